"""The grid of Flower that carries messages to clients and brings their replies.

Flower's grid takes a reply as soon as a node has announced it, and then waits for its parts, up to two hours. A node
that sends them slowly, or never, would hold up the whole run, whatever time limit a client has.
"""

import gc
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flwr.app import Message
from flwr.serverapp import Grid
from typing_extensions import override

from fedstill import schema
from fedstill.base.processes import returning_memory
from fedstill.engines.flower.payload import MOST, PIECE, TooLarge, cut, record, take_bytes
from fedstill.engines.transport import RECEIPT, SIGNATURE, Arrival, Transport
from fedstill.protocol import wire

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


_BYTES = 64 << 20
"""Maximum bytes of replies waiting in the server's memory, besides one reply of each client that runs at the time."""
_LARGE = 16 << 20
"""Size in bytes of a reply after which the garbage collector runs."""
_SHARED = 0.1
"""Maximum seconds of the clients of a shared message together: about the time that Flower takes to deliver one."""
ASK = "ask"
"""Name of the query that carries a request."""


class GridTransport(Transport):
    """Connection to clients that are nodes of a Flower grid.

    Args:
        grid: Flower's connection to its nodes.
        nodes: the node of every client.
        window: number of clients that have a request at a time.
        ahead: as ``window``, for a step whose replies are known to be small: `_BYTES` in all.
        timeout: seconds that a client may take for one step; None for no limit.
        failed: returns the reason why Flower has ended, or None while it runs.
        facts: config values sent with every request.
        facts_of: returns further config values of a request to one client.
        poll: seconds between two polls for replies.
        at_once: as for `Pulls`.
        shared: whether a node can run any client, so that quick clients can share a message; for short steps a message
            costs more than the step.
        max_bytes: size of the largest reply.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[int, int],
        *,
        window: int,
        ahead: int | None = None,
        timeout: float | None = None,
        failed: Callable[[], str | None] = lambda: None,
        facts: Mapping[str, int | str] | None = None,
        facts_of: Callable[[int, bytes], Mapping[str, str]] | None = None,
        poll: float = 0.05,
        at_once: int = 1000,
        shared: bool = False,
        max_bytes: int = MOST,
    ) -> None:
        self._grid = grid
        self._nodes = nodes
        self._window = window
        self._ahead = ahead or window
        self.paces = defaultdict[str | None, _Pace](_Pace)
        self._timeout = timeout
        self._failed = failed
        self._facts = dict(facts or {})
        self._facts_of = facts_of
        self._poll = poll
        self._at_once = at_once
        self._shared = shared
        self._max_bytes = max_bytes

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        with returning_memory():
            yield from self._exchange(request, clients, sent)

    def _exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        pace, pulls = self.paces[_step(request)], Pulls(self._grid, self._at_once)
        pieces = cut(request)
        waiting = deque(client for client in clients if client in self._nodes)
        for client in sorted(set(clients) - self._nodes.keys()):
            yield Arrival(client, b"", "no site replies for it")
        alone = deque[int]()  # clients whose shared message failed
        flying: dict[str, tuple[list[int], float]] = {}  # message -> clients, deadline
        while waiting or alone or flying:
            if reason := self._failed():
                raise RuntimeError(f"Flower ended early: {reason}")
            asked = sum(len(group) for group, _ in flying.values())
            again = [[alone.popleft()] for _ in range(min(self._may_fly(pace) - asked, len(alone)))]
            groups = again + self._groups(waiting, asked + len(again), pace)
            for number, (group, message) in enumerate(zip(groups, self._push(request, pieces, groups), strict=True)):
                if not message:  # Flower knows that the node is gone
                    yield from (Arrival(client, b"", "its node is not connected") for client in group)
                    continue
                for client in group if number >= len(again) else []:
                    sent(client)
                flying[message] = (group, time.monotonic() + (self._timeout or float("inf")))
            before = len(flying)
            for reply in pulls.pull(list(flying)):
                if reply.metadata.reply_to_message_id not in flying:
                    continue  # a second reply
                group, _ = flying.pop(reply.metadata.reply_to_message_id)
                if not reply.has_error() and reply.metadata.src_node_id != self._nodes[group[0]]:
                    yield from (Arrival(client, b"", "another node replied for it") for client in group)
                    continue
                if len(group) > 1 and reply.has_error():  # one client ended the process of all
                    alone.extend(group)
                    continue
                arrivals = arrivals_of(group, reply, self._max_bytes)
                largest = max(len(arrival.reply) for arrival in arrivals)
                pace.learn(len(group), largest, _seconds(reply))
                while arrivals:
                    yield arrivals.pop()
                if largest > _LARGE:
                    del reply
                    gc.collect()  # frees Flower's copies, which are in reference cycles
            for message, (group, deadline) in list(flying.items()):
                if deadline <= time.monotonic():
                    del flying[message]
                    reason = f"no reply within {self._timeout:g} s (--timeout)"
                    yield from (Arrival(client, b"", reason) for client in group)
            if len(flying) == before:
                time.sleep(self._poll)

    def _may_fly(self, pace: "_Pace") -> int:
        """Number of clients that may have a request: more than can run at a time, if replies are known to be small."""
        if not pace.largest:
            return self._window
        return max(self._window, min(self._ahead, _BYTES // pace.largest))

    def _groups(self, waiting: deque[int], asked: int, pace: "_Pace") -> list[list[int]]:
        """Remove the next clients from ``waiting``; the clients of one list share a message."""
        size, free = 1, self._may_fly(pace) - asked
        if self._shared and self._timeout is None:
            size = max(1, min(pace.fit, math.ceil(len(waiting) / (2 * self._window))))  # work for every process
            if size > pace.sharing:  # replies to these may allow larger groups
                free = min(free, 2 * self._window * size - asked)
        clients = [waiting.popleft() for _ in range(max(0, min(free, len(waiting))))]
        return [clients[start : start + size] for start in range(0, len(clients), size)]

    def _push(self, request: bytes, pieces: Sequence[bytes], groups: Sequence[Sequence[int]]) -> list[str]:
        messages = []
        for group in groups:
            own = {} if self._facts_of is None else self._facts_of(group[0], request)
            content = record(pieces, clients=list(group), **self._facts, **own)
            messages.append(Message(content, dst_node_id=self._nodes[group[0]], message_type=f"query.{ASK}"))
        return list(self._grid.push_messages(messages)) if messages else []


@dataclass
class _Pace:
    """Statistics of the replies to a step: largest size, seconds per client, largest number of clients of a message."""

    largest: int = 0
    seconds: float = math.inf
    sharing: int = 1

    def learn(self, clients: int, largest: int, seconds: float) -> None:
        """Add the latest message; ``seconds`` is infinite if unknown."""
        self.largest = max(self.largest, largest, 1)
        self.seconds = seconds / clients
        self.sharing = max(self.sharing, clients)

    @property
    def fit(self) -> int:
        """Number of clients that may share the next message; at most twice as many as so far."""
        if not self.largest:
            return 1
        return max(1, int(min(2 * self.sharing, PIECE // self.largest, _SHARED / max(self.seconds, 1e-9))))


def _step(request: bytes) -> str | None:
    try:
        return str(wire.envelope(request).get("step"))
    except schema.Refused:
        return None


def arrivals_of(clients: Sequence[int], reply: Message, at_most: int) -> list[Arrival]:
    """Split one Flower message into its clients' replies; a reply above ``at_most`` bytes is refused."""
    try:
        if reply.has_error():
            return [Arrival(client, b"", _failure(reply)) for client in clients]
        if len(clients) == 1:
            facts: Mapping[str, object] = reply.content.config_records.get("facts", {})
            seal = {name: str(facts.get(name, "")) for name in (SIGNATURE, RECEIPT)}
            return [Arrival(clients[0], take_bytes(reply, at_most), **seal)]
        sizes: list[int] = list(reply.content.config_records["facts"]["sizes"])  # type: ignore[arg-type]
        cuts = pairwise(accumulate(sizes, initial=0))
        data = take_bytes(reply, len(clients) * at_most)
        return [Arrival(client, data[start:end]) for client, (start, end) in zip(clients, cuts, strict=True)]
    except (TooLarge, MemoryError) as error:
        return [Arrival(client, b"", str(error) or "the reply does not fit into the memory") for client in clients]
    except (KeyError, AttributeError, TypeError, ValueError):
        return [Arrival(client, b"", "the reply was not made by fedstill") for client in clients]


def _failure(reply: Message) -> str:
    reason = reply.error.reason or f"error {reply.error.code}"
    if "ActorUnavailableError" in reason or "ActorDiedError" in reason:
        return "its process ended; out of memory?"
    return f"Flower reports: {schema.clean(reason, 300)}"


def _seconds(reply: Message) -> float:
    """The clients' seconds for their steps as reported, or infinity."""
    if reply.has_error():
        return math.inf
    facts: Mapping[str, object] = reply.content.config_records.get("facts", {})
    seconds = facts.get("seconds")
    return seconds if isinstance(seconds, float) and seconds >= 0 else math.inf
