"""The base class of the attacks in `fedstill.attacks.ATTACKS`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from fedstill.base.settings import Settings
from fedstill.data.sources import DataSet


class Attack(Settings, ABC):
    """An attack on a finished run; its fields are flags of ``fedstill attack RUN NAME``."""

    @abstractmethod
    def attack(
        self, folder: Path, console: Console, command: str, data: DataSet | None = None
    ) -> tuple[dict[str, Any], Iterable[RenderableType]]:
        """Attack the run in ``folder``, write the results to its ``attack`` folder and return them.

        Args:
            folder: the run's folder.
            console: the terminal, for the progress.
            command: the command line, for the record.
            data: the data set, if the run was given one as an object.

        Returns:
            The results as JSON, and what a terminal shows of them, which does not wrap plain strings.

        Raises:
            ValueError: ``folder`` is not a finished run, or the run cannot be attacked.
        """
