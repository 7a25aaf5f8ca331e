"""Messages of ours on a Flower grid: their bytes in raw ``Array`` objects, cut into pieces.

Flower builds each array of a message from chunks and needs three times its bytes meanwhile, and twice the bytes of the
rest; cut into many arrays, a message costs its receiver only twice its bytes.
"""

import gc
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from typing_extensions import override

from fedstill import schema, wire
from fedstill.engines.transport import Arrival, Transport
from fedstill.train.allocator import returning_memory

_BYTES = 64 << 20
"""Bytes of replies that may wait in the server's memory, beyond one reply for each client played at a time."""
_LARGE = 16 << 20
"""Size in bytes from which memory is tidied up after a reply."""
_PIECE = 2 << 20
"""Maximum bytes of an array, and of the replies that share a message."""
_SHARED = 0.1
"""Maximum seconds that the clients of a shared message take together: about what Flower takes to hand one over."""
ASK = "ask"
"""The name of the query that carries a request."""


class GridTransport(Transport):
    """The way to clients that are nodes of a Flower grid.

    Args:
        grid: Flower's way to its nodes.
        nodes: the node of every client.
        window: number of clients that have a request at a time; messages for the others are not made before.
        ahead: as ``window``, once replies to a step have turned out to be small: `_BYTES` in all.
        timeout: seconds that a client may take for one step; None for no limit.
        failed: returns why Flower has ended, or None while it runs.
        facts: config values that go with every request.
        poll: seconds between two looks for replies.
        at_once: number of replies to fetch at a time; over a network only so many are in memory together.
        shared: whether a node can play any client, so that quick clients can share a message, which would otherwise
            cost more than their steps.
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
        poll: float = 0.05,
        at_once: int = 1000,
        shared: bool = False,
    ) -> None:
        self._grid = grid
        self._nodes = nodes
        self._window = window
        self._ahead = ahead or window
        self._paces = defaultdict[str | None, _Pace](_Pace)
        self._timeout = timeout
        self._failed = failed
        self._facts = dict(facts or {})
        self._poll = poll
        self._at_once = at_once
        self._shared = shared

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        with returning_memory():
            yield from self._exchange(request, clients, sent)

    def _exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        pace = self._paces[_step(request)]
        pieces = _cut(request)
        waiting = deque(client for client in clients if client in self._nodes)
        for client in sorted(set(clients) - self._nodes.keys()):
            yield Arrival(client, b"", "no site answers for it")
        alone = deque[int]()  # clients of a shared message that failed
        flying: dict[str, tuple[list[int], float]] = {}  # message -> clients, deadline
        while waiting or alone or flying:
            if reason := self._failed():
                raise RuntimeError(f"Flower ended early: {reason}")
            asked = sum(len(group) for group, _ in flying.values())
            again = [[alone.popleft()] for _ in range(min(self._may_fly(pace) - asked, len(alone)))]
            groups = again + self._groups(waiting, asked + len(again), pace)
            for number, (group, message) in enumerate(zip(groups, self._push(pieces, groups), strict=True)):
                if not message:  # Flower knows already that the node is gone
                    yield from (Arrival(client, b"", "its node is not connected") for client in group)
                    continue
                for client in group if number >= len(again) else []:
                    sent(client)
                flying[message] = (group, time.monotonic() + (self._timeout or float("inf")))
            before = len(flying)
            for messages in _batched(flying, self._at_once):
                for reply in self._grid.pull_messages(messages):
                    group, _ = flying.pop(reply.metadata.reply_to_message_id)
                    if len(group) > 1 and reply.has_error():  # one of them ended the process of all
                        alone.extend(group)
                        continue
                    arrivals = _arrivals(group, reply)
                    largest = max(len(arrival.reply) for arrival in arrivals)
                    pace.learn(len(group), largest, _seconds(reply))
                    while arrivals:
                        yield arrivals.pop()
                    if largest > _LARGE:
                        del reply
                        gc.collect()  # Flower's copies, which live on in cycles otherwise
            for message, (group, deadline) in list(flying.items()):
                if deadline <= time.monotonic():
                    del flying[message]
                    reason = f"no reply within {self._timeout:g} s (--timeout)"
                    yield from (Arrival(client, b"", reason) for client in group)
            if len(flying) == before:
                time.sleep(self._poll)

    def _may_fly(self, pace: "_Pace") -> int:
        """Number of clients that may have a request: more than can be played, once replies are known to be small."""
        if not pace.largest:
            return self._window
        return max(self._window, min(self._ahead, _BYTES // pace.largest))

    def _groups(self, waiting: deque[int], asked: int, pace: "_Pace") -> list[list[int]]:
        """The next clients, taken from ``waiting``: those of each list share a message."""
        size, free = 1, self._may_fly(pace) - asked
        if self._shared and self._timeout is None:
            size = max(1, min(pace.fit, math.ceil(len(waiting) / (2 * self._window))))  # something for every player
            if size > pace.sharing:  # there will be more to a message once these are back
                free = min(free, 2 * self._window * size - asked)
        some = [waiting.popleft() for _ in range(max(0, min(free, len(waiting))))]
        return [some[start : start + size] for start in range(0, len(some), size)]

    def _push(self, pieces: Sequence[bytes], groups: Sequence[Sequence[int]]) -> list[str]:
        messages = [
            Message(
                _holding(pieces, clients=list(group), **self._facts),
                dst_node_id=self._nodes[group[0]],
                message_type=f"query.{ASK}",
            )
            for group in groups
        ]
        return list(self._grid.push_messages(messages)) if messages else []


@dataclass
class _Pace:
    """Statistics of replies to a step: largest size, seconds per client, clients that shared a message."""

    largest: int = 0
    seconds: float = math.inf
    sharing: int = 1

    def learn(self, clients: int, largest: int, seconds: float) -> None:
        """Add the latest message; clients that don't say how long they took count as slow."""
        self.largest = max(self.largest, largest, 1)
        self.seconds = seconds / clients
        self.sharing = max(self.sharing, clients)

    @property
    def fit(self) -> int:
        """Number of clients that may share the next message: few at first, as the first reply may be the quickest."""
        if not self.largest:
            return 1
        return max(1, int(min(2 * self.sharing, _PIECE // self.largest, _SHARED / max(self.seconds, 1e-9))))


def _step(request: bytes) -> str | None:
    try:
        return str(wire.envelope(request).get("step"))
    except schema.Refused:
        return None


def _batched(messages: Iterable[str], size: int) -> list[list[str]]:
    """The messages in lists of ``size``."""
    every = list(messages)
    return [every[start : start + size] for start in range(0, len(every), size)]


def _cut(data: bytes) -> list[bytes]:
    """The bytes in pieces, one of them empty where there are none."""
    return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)] or [b""]


def _holding(pieces: Sequence[bytes], **facts: int | str | float | list[int]) -> RecordDict:
    arrays = {
        str(number): Array(dtype="uint8", shape=(len(piece),), stype="fedstill", data=piece)
        for number, piece in enumerate(pieces)
    }
    found = RecordDict({"message": ArrayRecord(arrays)})
    if facts:
        found["facts"] = ConfigRecord(dict(facts))
    return found


def content(data: bytes, **facts: int | str | float | list[int]) -> RecordDict:
    """A message of ours: the bytes, and config values beside them.

    A reply of several clients holds their bytes one after the other; ``sizes`` gives the number of each.
    """
    return _holding(_cut(data), **facts)


def take_bytes(message: Message) -> bytes:
    """The bytes of a message of ours, which is emptied, since Flower's objects live on in cycles for a while.

    Raises:
        KeyError, AttributeError, TypeError: the message is not one of ours.
    """
    arrays = message.content.array_records["message"]
    pieces = [arrays[str(number)] for number in range(max(1, len(arrays)))]
    data = b"".join(piece.data for piece in pieces)
    for piece in pieces:
        piece.data = b""
    return data


def _arrivals(clients: Sequence[int], reply: Message) -> list[Arrival]:
    """The arrival of each client that a message asked."""
    try:
        if reply.has_error():
            return [Arrival(client, b"", _failure(reply)) for client in clients]
        if len(clients) == 1:
            return [Arrival(clients[0], take_bytes(reply))]
        sizes: list[int] = list(reply.content.config_records["facts"]["sizes"])  # type: ignore[arg-type]
        cuts = pairwise(accumulate(sizes, initial=0))
        data = take_bytes(reply)
        return [Arrival(client, data[start:end]) for client, (start, end) in zip(clients, cuts, strict=True)]
    except (KeyError, AttributeError, TypeError, ValueError):
        return [Arrival(client, b"", "the reply holds no bytes of ours") for client in clients]


def _failure(reply: Message) -> str:
    reason = reply.error.reason or f"error {reply.error.code}"
    if "ActorUnavailableError" in reason or "ActorDiedError" in reason:
        return "its process ended; out of memory?"
    return f"Flower says: {schema.clean(reason, 300)}"


def _seconds(reply: Message) -> float:
    """Seconds that the clients say they took, or infinity."""
    if reply.has_error():
        return math.inf
    facts: Mapping[str, object] = reply.content.config_records.get("facts", {})
    said = facts.get("seconds")
    return said if isinstance(said, float) and said >= 0 else math.inf
