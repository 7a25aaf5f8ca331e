"""Progress of a run on the terminal: bars if somebody watches, else lines."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any, Self

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
from fedstill.experiment.cell import Cell
from fedstill.experiment.lines import ForReaders, Lines, Quiet, ending, numbers
from fedstill.journal import Refusal

_DAY = 86_400.0


def watch(console: Console, label: str, *, quiet: bool = False) -> AbstractContextManager[Watcher]:
    """The watcher for the console: `Bars` on a terminal, `Cell` in a notebook, `Lines` in a log, `Quiet` if asked.

    ``label`` names the run, as ``fedgm, seed 0``.
    """
    if quiet:
        return nullcontext(Quiet())
    if console.is_jupyter:
        return Cell(label)
    if console.is_interactive:
        return Bars(console, label)
    return Lines(partial(print, file=console.file, flush=True), label)


class Bars(ForReaders):
    """Progress bars, drawn while the ``with`` block runs and left on the terminal; ``label`` names the run."""

    def __init__(self, console: Console, label: str) -> None:
        super().__init__()
        self.label = label
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_DAY,  # rich forgets what is older, and then a round of a minute has no pace
        )
        self._rounds: TaskID | None = None
        self._clients: TaskID | None = None
        self._work: dict[str, TaskID] = {}
        self._inside: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.tasks:
            self._progress.stop()

    @override
    def asked(self, step: str, clients: int, answered: int) -> None:
        words = f"{self.label}: clients, step {step}"
        if self._clients is None:
            self._note_taken_over(clients, answered)
            self._clients = self._bar(words, answered, clients)
        self._progress.reset(self._clients, total=clients, completed=answered, description=words)

    @override
    def working(self, client: int, label: str, done: int, total: int) -> None:
        words = f"{self.label}: client {client}, {label}"
        if self._inside is None:
            self._inside = self._bar(words, done, total)
        self._progress.update(self._inside, completed=done, total=total, description=words, visible=True)

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        assert self._clients is not None
        self._progress.advance(self._clients)
        if self._inside is not None:  # the next client's work shows it again
            self._progress.update(self._inside, visible=False)
        if refusal:
            self._console.print(f"[yellow]client {refusal.client} is left out:[/] ", end="")
            self._console.print(refusal.reason, markup=False)

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        words = f"{self.label}: rounds ({numbers(values)})" if values else f"{self.label}: rounds"
        if self._rounds is None:
            self._rounds = self._bar(words, self._kept, rounds)
        self._progress.update(self._rounds, completed=round, total=rounds, description=words)

    @override
    def progressed(self, label: str, done: int, total: int) -> None:
        if label not in self._work:
            self._work[label] = self._bar(f"{self.label}: {label}", done, total)
        self._progress.update(self._work[label], completed=done, total=total)

    @override
    def noted(self, sentence: str) -> None:
        self._console.print(f"{self.label}: {sentence}", markup=False, highlight=False, soft_wrap=True)

    @override
    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        self.noted(ending(summary, before))

    def _bar(self, words: str, done: int, total: int) -> TaskID:
        """A new bar; the first one starts the display, so that a run without work has none."""
        task = self._progress.add_task(words, completed=done, total=total)
        self._progress.start()
        return task
