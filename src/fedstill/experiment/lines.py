"""Progress of a run as lines of text, for logs, pipes and Python's `logging`."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from typing_extensions import override

from fedstill.engines.transport import Watcher
from fedstill.journal import Refusal

EVERY = 30.0
"""Maximum seconds between two lines."""


@dataclass
class _Work:
    """Work of known size, and its pace since this process began it.

    The pace leaves out the first part, which starts processes and fills caches, as soon as two others are done.
    """

    name: str
    done: int
    total: int
    unit: str = ""
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
        return f"{self.name}, {self.done} of {self.total}{self.unit}"

    def left(self, now: float) -> float | None:
        """Seconds that the rest takes at this pace; None before the first part."""
        if self.warm is None or self.done >= self.total:
            return None
        warm = self.done - self.first > 2 and self.done > self.warm[1]
        start, before = self.warm if warm else (self.began, self.first)
        pace = (self.last - start) / (self.done - before)
        return pace * (self.total - self.done) - min(now - self.last, pace)


class Lines(Watcher):
    """A line for each kind of work, for each round, and after every 30 seconds without one.

    Lines are written between entering and leaving the context manager; a thread writes those between the events.

    Args:
        say: writes a line.
        label: name of the run, as ``fedgm, seed 0``, which begins each line.
        every: maximum seconds between two lines.
    """

    def __init__(self, say: Callable[[str], None], label: str, *, every: float = EVERY) -> None:
        self._say = say
        self._label = label
        self._every = every
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._over = threading.Event()
        self._began = self._last = time.monotonic()
        self._work: _Work | None = None
        self._rounds: _Work | None = None
        self._kept = self._number = 0
        self._seen: set[str] = set()
        self._source: str | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=1)

    @override
    def asked(self, step: str, clients: int, answered: int) -> None:
        name = f"step {step}"
        if self._rounds is None:
            if words := resumption(self._kept, clients, answered, self._source):
                self._write(words)
            self._rounds = _Work("round", self._kept, self._number)
        self._begin(_Work(name, answered, clients, " clients replied"), f"{name}: asking {clients} clients")

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        if self._work is not None:
            self._work.advance(self._work.done + 1)
            if self._work.done == self._work.total and not self._is_in_rounds:
                self._write_state()
        if refusal is not None:
            self._write(f"client {refusal.client} is left out: {refusal.reason}")

    @override
    def reused(self, run: str) -> None:
        self._source = run

    @override
    def resumed(self, rounds: int, number: int) -> None:
        self._kept, self._number = rounds, number
        if rounds == number:
            self._write(f"resuming: all {number} rounds kept")

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        if self._rounds is None:
            self._rounds = _Work("round", self._kept, rounds)
        self._rounds.total = rounds
        self._rounds.advance(round)
        self._work = None
        self._write_state(numbers(values))

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

    def _write_state(self, details: str = "") -> None:
        now, rounds, work = time.monotonic(), self._rounds, self._work
        parts = [f"round {rounds.done} of {rounds.total}"] if rounds and rounds.total else []
        parts += [str(work)] if work else []
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
                    self._write_state()


def clock(seconds: float) -> str:
    """Minutes and seconds, as ``2:05``, or hours too, as ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def numbers(values: Mapping[str, float]) -> str:
    """The logged numbers of a round; accuracy in percent."""
    words = {name: f"{100 * v:.1f} %" if name == "accuracy" else f"{v:.4g}" for name, v in values.items()}
    return ", ".join(f"{name} {text}" for name, text in words.items())


def resumption(rounds: int, clients: int, answered: int, source: str | None = None) -> str | None:
    """The work that a run takes over, of the run ``source`` or else of an earlier start, or None."""
    if not rounds and not answered:
        return None
    if source is not None:
        return f"{answered} of {clients} replies are those of {source}"
    rest = f" and {rounds} round{'s' * (rounds != 1)}" if rounds else ""
    return f"resuming: {answered} of {clients} replies{rest} kept"


def ending(summary: Mapping[str, Any], before: datetime | None) -> str:
    """The result of a run; ``before`` is the time at which an earlier start finished it."""
    if before is not None:
        return (
            f"finished on {before:%Y-%m-%d at %H:%M}; nothing to do (delete its folder, or choose another with --out, "
            "to run it anew)"
        )
    accuracy = "" if summary["accuracy"] is None else f"accuracy {100 * summary['accuracy']:.1f} %, "
    return f"{accuracy}{summary['seconds']:.0f} s"
