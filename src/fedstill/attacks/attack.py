"""The interface of the attacks in `fedstill.attacks.ATTACKS`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType

from fedstill.settings import Settings


class Attack(Settings, ABC):
    """An attack on a finished run; its fields are the flags of ``fedstill attack RUN NAME``."""

    @abstractmethod
    def attack(self, folder: Path, console: Console, command: str) -> Iterator[RenderableType]:
        """Attack the run in ``folder``, write the results to its ``attack`` folder and yield them for the terminal.

        A plain string is a line that is not wrapped.

        Args:
            folder: the run's.
            console: the terminal, for the progress.
            command: the command line, for the record.

        Raises:
            ValueError: ``folder`` holds no finished run, or one that cannot be attacked so; one sentence.
        """
