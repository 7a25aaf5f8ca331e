"""Progress bars of a run on the terminal."""

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
from typing_extensions import override

from fedstill.engines.transport import Watcher
from fedstill.journal import Refusal


class Bars(Watcher):
    """Progress bars, drawn while the ``with`` block runs; ``label`` names the run, as ``fedgm, seed 0``."""

    def __init__(self, console: Console, label: str) -> None:
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

    @override
    def asked(self, step: str, clients: int, answered: int) -> None:
        if self._clients is None:
            self._clients = self._progress.add_task("")
        words = f"{self.label}: clients, step {step}"
        self._progress.reset(self._clients, total=clients, completed=answered, description=words)

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        assert self._clients is not None
        self._progress.advance(self._clients)
        if refusal:
            self._console.print(f"[yellow]client {refusal.client} is left out:[/] ", end="")
            self._console.print(refusal.reason, markup=False)

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        if self._rounds is None:
            self._rounds = self._progress.add_task("", total=rounds)
        words = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._progress.update(
            self._rounds, completed=round, total=rounds, description=f"{self.label}: rounds ({words})"
        )

    @override
    def progressed(self, label: str, done: int, total: int) -> None:
        if label not in self._work:
            self._work[label] = self._progress.add_task(f"{self.label}: {label}", total=total)
        self._progress.update(self._work[label], completed=done, total=total)
