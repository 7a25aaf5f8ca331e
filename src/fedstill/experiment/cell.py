"""Progress of a run in a notebook's cell: bars of plain HTML, which need no widgets."""

import time
from collections.abc import Mapping
from datetime import datetime
from html import escape
from typing import Any, Self

from typing_extensions import override

from fedstill.experiment.lines import ForReaders, clock, ending, numbers
from fedstill.journal import Refusal

_EVERY = 0.2
"""Minimum seconds between two drawings; each is a message to the browser."""


class Cell(ForReaders):
    """Bars below a notebook's cell, drawn anew while the ``with`` block runs; ``label`` names the run."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label
        self._bars: dict[str, tuple[str, int, int]] = {}
        self._notes: list[str] = []
        self._began = self._drawn = time.monotonic()
        self._handle: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._draw()

    @override
    def asked(self, step: str, clients: int, answered: int) -> None:
        if "clients" not in self._bars:
            self._note_taken_over(clients, answered)
        self._show("clients", f"clients, step {step}", answered, clients)

    @override
    def working(self, client: int, label: str, done: int, total: int) -> None:
        self._show("inside", f"client {client}, {label}", done, total)

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        words, done, total = self._bars["clients"]
        self._bars.pop("inside", None)
        if refusal:
            self._notes.append(f"client {refusal.client} is left out: {refusal.reason}")
        self._show("clients", words, done + 1, total)

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        self._show("rounds", f"rounds ({numbers(values)})" if values else "rounds", round, rounds)

    @override
    def progressed(self, label: str, done: int, total: int) -> None:
        self._show(f"work {label}", label, done, total)

    @override
    def noted(self, sentence: str) -> None:
        self._notes.append(sentence)
        self._draw()

    @override
    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        self.noted(ending(summary, before))

    def _show(self, place: str, words: str, done: int, total: int) -> None:
        self._bars[place] = words, done, total
        if self._handle is None or time.monotonic() - self._drawn >= _EVERY:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display  # a notebook has it

        rows = "".join(
            f"<div><progress value='{done}' max='{max(total, 1)}'></progress> {escape(words)}: {done} of {total}</div>"
            for words, done, total in self._bars.values()
        )
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes)
        self._drawn = time.monotonic()
        page = HTML(f"<div><b>{escape(self._label)}</b>, {clock(self._drawn - self._began)}{rows}{notes}</div>")
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
