"""Progress of a run: as lines of text, and as bars."""

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
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
from fedstill.runs.journal import Refusal
from fedstill.runs.live import seconds_left

_log = logging.getLogger("fedstill")
EVERY = 30.0
"""Maximum seconds between two lines."""


@dataclass
class _Work:
    """Work of known size, and its pace since this process began it; ``lost`` parts of those done gave nothing."""

    name: str
    done: int
    total: int
    unit: str = ""
    lost: int = 0
    first: int = field(init=False)
    began: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self.first = self.done
        self.last = self.began  # the time at which ``done`` was reached
        self.warm: tuple[float, int] | None = None  # the time at which the first part was done, and its number

    def advance(self, done: int) -> None:
        """``done`` parts are done now."""
        if done > self.done:
            self.last = time.monotonic()
            self.warm = self.warm or (self.last, done)
        self.done = done

    def __str__(self) -> str:
        return f"{self.name}, {self.done - self.lost} of {self.total}{self.unit}{_left_out(self.lost)}"

    def left(self, now: float) -> float | None:
        """Seconds that the rest takes at this pace; None before the first part."""
        if self.warm is None or self.done >= self.total:
            return None
        return seconds_left((self.began, self.first), self.warm, (self.last, self.done), self.total, now - self.last)


class Quiet(Watcher):
    """No progress; what a person must know is a warning of the logger "fedstill"."""

    @override
    def noted(self, sentence: str) -> None:
        _log.warning("%s", sentence)


class ForReaders(Watcher):
    """A watcher that a person reads: it notes, before anything else, the work that a run takes over."""

    def __init__(self) -> None:
        self._kept = 0
        self._source: str | None = None

    @override
    def read(self, origin: Sequence[str]) -> None:
        for sentence in origin:
            self.noted(sentence)

    @override
    def reused(self, run: str) -> None:
        self._source = run

    @override
    def resumed(self, done: int, total: int) -> None:
        self._kept = done
        if done == total:
            self.noted(f"resuming: all {total} rounds kept")

    def _note_taken_over(self, clients: int, answered: int, lost: int) -> None:
        """Note the replies and rounds of an earlier start, or of another run; at the first request."""
        if not self._kept and not answered and not lost:
            return
        if self._source is not None:
            self.noted(f"{answered} of {clients} replies are those of {self._source}{_left_out(lost)}")
        else:
            rounds = f" and {self._kept} round{'s' * (self._kept != 1)}" if self._kept else ""
            self.noted(f"resuming: {answered} of {clients} replies{rounds} kept{_left_out(lost)}")


class Lines(ForReaders):
    """A line for each kind of work, for each round, and after every 30 seconds without one.

    Lines are written between entering and leaving the context manager; a thread writes those between the events.

    Args:
        say: writes a line.
        label: name of the run, as ``fedgm, seed 0``, which begins each line.
        every: maximum seconds between two lines.
    """

    def __init__(self, say: Callable[[str], None], label: str, *, every: float = EVERY) -> None:
        super().__init__()
        self._say = say
        self._label = label
        self._every = every
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._over = threading.Event()
        self._began = self._last = time.monotonic()
        self._work: _Work | None = None
        self._rounds: _Work | None = None
        self._number = 0
        self._seen: set[str] = set()
        self._inside = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=1)

    @override
    def asked(self, step: str, clients: int, answered: int, lost: int) -> None:
        name = f"step {step}"
        if self._rounds is None:
            self._note_taken_over(clients, answered, lost)
            self._rounds = _Work("round", self._kept, self._number)
        work = _Work(name, answered + lost, clients, " clients replied", lost)
        self._begin(work, f"{name}: asking {clients} clients")

    @override
    def working(self, client: int, label: str, done: int, total: int) -> None:
        self._inside = f"client {client}: {label}, {done} of {total}"

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        self._inside = ""
        if refusal is not None:
            self._write(_why(refusal))
        if self._work is not None:
            self._work.lost += refusal is not None
            self._work.advance(self._work.done + 1)
            if self._work.done == self._work.total and not self._is_in_rounds:
                self.write_state()

    @override
    def withdrawn(self, refusal: Refusal) -> None:
        if self._work is not None:
            self._work.lost += 1
        self._write(_why(refusal))

    @override
    def resumed(self, done: int, total: int) -> None:
        self._number = total
        super().resumed(done, total)

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        if self._rounds is None:
            self._rounds = _Work("round", self._kept, rounds)
        self._rounds.total = rounds
        self._rounds.advance(round)
        self._work = None
        self.write_state(numbers(values))

    @override
    def progressed(self, label: str, done: int, total: int) -> None:
        if self._work is None or self._work.name != label or done < self._work.done:
            self._begin(_Work(label, done, total), f"{label}: {done} of {total}")
        else:
            self._work.advance(done)

    @override
    def noted(self, sentence: str) -> None:
        self._write(sentence)

    @override
    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        self._write(ending(summary, before))

    @property
    def _is_in_rounds(self) -> bool:
        return self._rounds is not None and self._rounds.total > 1

    def _begin(self, work: _Work, words: str) -> None:
        """Go on to other work; only the first of its name has a line of its own."""
        self._work = work
        if work.name not in self._seen:
            self._seen.add(work.name)
            self._write(words)

    def write_state(self, details: str = "") -> None:
        """Write where the run is and how long it has taken, with ``details`` of the round that ended."""
        now, rounds, work = time.monotonic(), self._rounds, self._work
        parts = [f"round {rounds.done} of {rounds.total}"] if rounds and rounds.total else []
        parts += [str(work)] if work else []
        parts += [self._inside] if self._inside else []
        parts += [details] if details else []
        parts.append(f"{clock(now - self._began)} elapsed")
        if rounds and rounds.total > 1:
            left, of = rounds.left(now), ""
        else:
            left, of = (work.left(now), f" of {work.name}") if work else (None, "")
        parts += [f"about {clock(left)} left{of}"] if left else []
        self._write("; ".join(parts) if len(parts) > 1 else f"working; {parts[0]}")

    def _write(self, words: str) -> None:
        with self._lock:
            self._last = time.monotonic()
            self._say(f"{self._label}: {words}")

    def _repeat(self) -> None:
        with suppress(OSError, ValueError):  # the reader of the output has ended
            while not self._over.wait(max(self._last + self._every - time.monotonic(), 0.01)):
                if time.monotonic() - self._last >= self._every:
                    self.write_state()


def _left_out(lost: int) -> str:
    return f", {lost} left out" if lost else ""


def _why(refusal: Refusal) -> str:
    return f"client {refusal.client} is left out: {refusal.reason}"


def clock(seconds: float) -> str:
    """Minutes and seconds, as ``2:05``, or hours too, as ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def numbers(values: Mapping[str, float]) -> str:
    """The logged numbers of a round; accuracy in percent."""
    words = {name: f"{100 * v:.1f} %" if name == "accuracy" else f"{v:.4g}" for name, v in values.items()}
    return ", ".join(f"{name} {text}" for name, text in words.items())


def ending(summary: Mapping[str, Any], before: datetime | None) -> str:
    """The result of a run; ``before`` is the time at which an earlier start finished it."""
    if before is not None:
        return (
            f"finished on {before:%Y-%m-%d at %H:%M}; nothing to do (delete its folder, or choose another with --out, "
            "to run it anew)"
        )
    accuracy = "" if summary["accuracy"] is None else f"accuracy {100 * summary['accuracy']:.1f} %, "
    if errors := summary.get("errors"):
        accuracy = f"{numbers({name: value for name, value in errors.items() if value is not None})}, "
    if (asked := summary.get("measure")) and asked["value"] is not None and asked["name"] != "accuracy":
        accuracy = f"{asked['name']} {asked['value']:.4g}, {accuracy}"
    return f"{accuracy}{summary['seconds']:.0f} s"


_EVERY = 0.2
"""Minimum seconds between two drawings; each is a message to the browser."""


class WithBars(ForReaders):
    """A watcher that counts replies in a bar, and names there how many clients are left out."""

    def __init__(self) -> None:
        super().__init__()
        self._step, self._lost = "", 0

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        self._end_client()
        self._count(refusal is None, refusal)

    @override
    def withdrawn(self, refusal: Refusal) -> None:
        self._count(-1, refusal)

    def _begin_step(self, name: str, lost: int) -> str:
        """Begin to count the replies of a step; returns the words of its bar."""
        self._step, self._lost = name, lost
        return f"{name}{_left_out(lost)}"

    def _count(self, replied: int, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._lost += 1
            self._say_left_out(_why(refusal))
        self._advance(f"{self._step}{_left_out(self._lost)}", replied)

    @abstractmethod
    def _end_client(self) -> None:
        """Take away the bar of a client's work."""

    @abstractmethod
    def _say_left_out(self, words: str) -> None:
        """Say why a client is left out."""

    @abstractmethod
    def _advance(self, words: str, replied: int) -> None:
        """Show ``replied`` replies more, or one less, in the bar of replies, with these words."""


class Cell(WithBars):
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
    def asked(self, step: str, clients: int, answered: int, lost: int) -> None:
        if "clients" not in self._bars:
            self._note_taken_over(clients, answered, lost)
        self._show("clients", self._begin_step(f"clients, step {step}", lost), answered, clients)

    @override
    def working(self, client: int, label: str, done: int, total: int) -> None:
        self._show("inside", f"client {client}, {label}", done, total)

    @override
    def _end_client(self) -> None:
        self._bars.pop("inside", None)

    @override
    def _say_left_out(self, words: str) -> None:
        self._notes.append(words)

    @override
    def _advance(self, words: str, replied: int) -> None:
        _, done, total = self._bars["clients"]
        self._show("clients", words, done + replied, total)

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
        from jinja2 import Environment

        self._drawn = time.monotonic()
        cell = Environment(autoescape=True).from_string(_CELL)
        bars, seconds = self._bars.values(), clock(self._drawn - self._began)
        page = HTML(cell.render(label=self._label, clock=seconds, bars=bars, notes=self._notes))
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


_CELL = """<div><b>{{ label }}</b>, {{ clock }}
{%- for words, done, total in bars -%}
<div><progress value='{{ done }}' max='{{ [total, 1]|max }}'></progress> {{ words }}: {{ done }} of {{ total }}</div>
{%- endfor %}
{%- for note in notes %}<div>{{ note }}</div>{% endfor -%}
</div>"""
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


class Bars(WithBars):
    """Progress bars, drawn while the ``with`` block runs and left on the terminal; ``label`` names the run."""

    def __init__(self, console: Console, label: str) -> None:
        super().__init__()
        self.label = label
        self._console = console
        self.progress = Progress(
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
        if self.progress.tasks:
            self.progress.stop()

    @override
    def asked(self, step: str, clients: int, answered: int, lost: int) -> None:
        words = self._begin_step(f"{self.label}: clients, step {step}", lost)
        if self._clients is None:
            self._note_taken_over(clients, answered, lost)
            self._clients = self._bar(words, answered, clients)
        self.progress.reset(self._clients, total=clients, completed=answered, description=words)

    @override
    def working(self, client: int, label: str, done: int, total: int) -> None:
        words = f"{self.label}: client {client}, {label}"
        if self._inside is None:
            self._inside = self._bar(words, done, total)
        self.progress.update(self._inside, completed=done, total=total, description=words, visible=True)

    @override
    def _end_client(self) -> None:
        if self._inside is not None:  # the next client's work shows it again
            self.progress.update(self._inside, visible=False)

    @override
    def _say_left_out(self, words: str) -> None:
        self._console.print(words, style="yellow", markup=False)

    @override
    def _advance(self, words: str, replied: int) -> None:
        assert self._clients is not None
        self.progress.update(self._clients, advance=replied, description=words)

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        words = f"{self.label}: rounds ({numbers(values)})" if values else f"{self.label}: rounds"
        if self._rounds is None:
            self._rounds = self._bar(words, self._kept, rounds)
        self.progress.update(self._rounds, completed=round, total=rounds, description=words)

    @override
    def progressed(self, label: str, done: int, total: int) -> None:
        if label not in self._work:
            self._work[label] = self._bar(f"{self.label}: {label}", done, total)
        self.progress.update(self._work[label], completed=done, total=total)

    @override
    def noted(self, sentence: str) -> None:
        self._console.print(f"{self.label}: {sentence}", markup=False, highlight=False, soft_wrap=True)

    @override
    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        self.noted(ending(summary, before))

    def _bar(self, words: str, done: int, total: int) -> TaskID:
        """A new bar; the first one starts the display, so that a run without work has none."""
        task = self.progress.add_task(words, completed=done, total=total)
        self.progress.start()
        return task
