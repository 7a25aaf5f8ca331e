"""Replies fetched from a grid, each by itself, so that one which arrives slowly delays no other.

Flower's grid takes a reply as soon as a node has announced it, and then waits for its parts, up to two hours. A node
that sends them slowly, or never, would hold up the whole run, whatever time limit a client has.
"""

import threading
from collections.abc import Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

_PATIENCE = 1.0
"""Seconds until a reply that is being fetched is left to its thread."""


class Pulls:
    """Replies of a grid.

    Args:
        grid: Flower's connection to its nodes.
        at_once: number of replies to fetch at a time, which limits the replies in memory. With more than one, the nodes
            are trusted to send whole replies, as those of a simulation are, and are fetched in this thread.
    """

    def __init__(self, grid: Grid, at_once: int = 1) -> None:
        self._grid = grid
        self._at_once = at_once
        self._running: dict[str, _Pull] = {}

    def pull(self, messages: Sequence[str]) -> Iterator[Message]:
        """The replies to messages that are whole by now; others may be asked for again."""
        if self._at_once > 1:
            for start in range(0, len(messages), self._at_once):
                yield from self._grid.pull_messages(messages[start : start + self._at_once])
            return
        for message in messages:
            known = self._running.get(message)
            pull = known or _Pull(self._grid, message)
            pull.join(0 if known else _PATIENCE)
            if pull.is_alive():
                self._running[message] = pull
                continue
            self._running.pop(message, None)
            found = pull.found
            del known, pull
            if isinstance(found, Exception):
                raise found
            while found:  # nothing here keeps a reply that the caller has dropped
                yield found.pop(0)


class _Pull(threading.Thread):
    """One call of the grid, and what it has ``found``; a daemon, as nothing ends it."""

    def __init__(self, grid: Grid, message: str) -> None:
        super().__init__(daemon=True)
        self._grid = grid
        self._message = message
        self.found: list[Message] | Exception = []
        self.start()

    def run(self) -> None:
        try:
            self.found = list(self._grid.pull_messages([self._message]))
        except Exception as error:
            self.found = error
