"""A run's progress on the terminal: one bar for what is going on now, lines for what is done."""

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedstill.engines.transport import Watcher
from fedstill.journal import Refusal


class Bars(Watcher):
    """Draws bars while the block runs."""

    def __init__(self, console: Console, label: str) -> None:
        """``label`` names the run, as ``fedgm, seed 0``."""
        self.label = label
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._rounds: TaskID | None = None
        self._clients: TaskID | None = None
        self._work: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def asked(self, step: str, clients: int, answered: int) -> None:
        """See `Watcher.asked`."""
        if self._clients is None:
            self._clients = self._progress.add_task("")
        words = f"{self.label}: clients, step {step}"
        self._progress.reset(self._clients, total=clients, completed=answered, description=words)

    def arrived(self, refusal: Refusal | None) -> None:
        """See `Watcher.arrived`."""
        assert self._clients is not None
        self._progress.advance(self._clients)
        if refusal:
            self._console.print(f"[yellow]client {refusal.client} is left out:[/] ", end="")
            self._console.print(refusal.reason, markup=False)

    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        """See `Watcher.logged`."""
        if self._rounds is None:
            self._rounds = self._progress.add_task("", total=rounds)
        words = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._progress.update(
            self._rounds, completed=round, total=rounds, description=f"{self.label}: rounds ({words})"
        )

    def progressed(self, what: str, done: int, total: int) -> None:
        """See `Watcher.progressed`."""
        if what not in self._work:
            self._work[what] = self._progress.add_task(f"{self.label}: {what}", total=total)
        self._progress.update(self._work[what], completed=done, total=total)
