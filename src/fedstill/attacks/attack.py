"""The base class of the attacks in `fedstill.attacks.ATTACKS`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType

from fedstill.settings import Settings


class Attack(Settings, ABC):
    """An attack on a finished run; its fields are flags of ``fedstill attack RUN NAME``."""

    @abstractmethod
    def attack(self, folder: Path, console: Console, command: str) -> Iterator[RenderableType]:
        """Attack the run in ``folder``, write the results to its ``attack`` folder and yield them for the terminal.

        The terminal does not wrap plain strings.

        Args:
            folder: the run's folder.
            console: the terminal, for the progress.
            command: the command line, for the record.

        Raises:
            ValueError: ``folder`` is not a finished run, or the run cannot be attacked; one sentence.
        """
