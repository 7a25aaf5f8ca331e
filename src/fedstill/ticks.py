"""Progress of the work inside a client's step, which whoever runs the step may observe."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Tell = Callable[[str, int, int], None]
"""Called with the name of the work, and how many of how many parts are done."""
AFTER = 1.0
"""Seconds after which a step is long enough to tell of it."""
EVERY = 0.2
"""Minimum seconds between two calls about the same work, but for its end."""

_tell: ContextVar[Tell | None] = ContextVar("tell", default=None)


@contextmanager
def told(tell: Tell | None) -> Iterator[None]:
    """Tell ``tell`` of the `tick`s inside the block once it has taken `AFTER` seconds; None tells nobody."""
    if tell is None:
        yield
        return
    began, last = time.monotonic(), (-float("inf"), "")

    def some(label: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - began >= AFTER and (label != last[1] or now - last[0] >= EVERY or done == total):
            last = (now, label)
            tell(label, done, total)

    token = _tell.set(some)
    try:
        yield
    finally:
        _tell.reset(token)


def tick(label: str, done: int, total: int) -> None:
    """``done`` of ``total`` parts of the work ``label`` are done: an epoch, a network, a step of a long loop."""
    tell = _tell.get()
    if tell is not None:
        tell(label, done, total)
