"""Our bytes on a Flower grid: as they are, cut into raw ``Array`` objects.

Flower builds an array of a message from chunks and holds its bytes three times meanwhile, and the rest of the message
twice; cut into many, a message costs its receiver two times its bytes.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedstill import schema, wire
from fedstill.engines.transport import Arrival
from fedstill.train.allocator import handing_back

_BYTES = 64 << 20
"""Replies that may wait in the server's memory, beyond one for each client that can be played at a time."""
_LARGE = 16 << 20
"""Bytes of a reply that is worth tidying up after."""
_PIECE = 4 << 20
"""Bytes of an array at most."""
ASK = "ask"
"""The name of the query that carries a request."""


class OnGrid:
    """The way to clients that are nodes of a Flower grid.

    Args:
        grid: Flower's way to its nodes.
        nodes: the node of every client.
        window: how many clients have a question at a time; the others' messages are not made before.
        ahead: as ``window``, once replies to a step have turned out to be small: `_BYTES` in all.
        timeout: seconds that a client may take for one step, None for no limit.
        failed: says why there is nothing to wait for any more, or None.
        facts: what goes with every request.
        poll: seconds between two looks at what came.
        at_once: replies to fetch at a time; over a network only so many are in memory together.
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
    ) -> None:
        self._grid = grid
        self._nodes = nodes
        self._window = window
        self._ahead = ahead or window
        self._largest: dict[str | None, int] = {}
        self._timeout = timeout
        self._failed = failed
        self._facts = dict(facts or {})
        self._poll = poll
        self._at_once = at_once

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """See `Transport.exchange`."""
        with handing_back():
            yield from self._exchange(request, clients, sent)

    def _exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        step = _step(request)
        pieces = _cut(request)
        waiting = deque(clients)
        flying: dict[str, tuple[int, float]] = {}  # message -> client, deadline
        while waiting or flying:
            if reason := self._failed():
                raise RuntimeError(f"Flower ended early: {reason}")
            free = max(0, self._may_fly(step) - len(flying))
            some = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            for client in [client for client in some if client not in self._nodes]:
                some.remove(client)
                yield Arrival(client, b"", "no site answers for it")
            for client, message in zip(some, self._push(pieces, some), strict=True):
                if not message:  # Flower knows already that the node is gone
                    yield Arrival(client, b"", "its node is not connected")
                    continue
                sent(client)
                flying[message] = (client, time.monotonic() + (self._timeout or float("inf")))
            before = len(flying)
            for asked in _batched(flying, self._at_once):
                for reply in self._grid.pull_messages(asked):
                    client, _ = flying.pop(reply.metadata.reply_to_message_id)
                    arrival = _arrival(client, reply)
                    self._largest[step] = max(self._largest.get(step, 1), len(arrival.reply))
                    yield arrival
                    if len(arrival.reply) > _LARGE:
                        del arrival, reply
                        gc.collect()  # Flower's copies, which live on in cycles otherwise
            for message, (client, deadline) in list(flying.items()):
                if deadline <= time.monotonic():
                    del flying[message]
                    yield Arrival(client, b"", f"no reply within {self._timeout:g} s (--timeout)")
            if len(flying) == before:
                time.sleep(self._poll)

    def _may_fly(self, step: str | None) -> int:
        """How many questions may be out at a time: more than can be played, once replies are known to be small."""
        if step not in self._largest:
            return self._window
        return max(self._window, min(self._ahead, _BYTES // self._largest[step]))

    def _push(self, pieces: Sequence[bytes], clients: Sequence[int]) -> list[str]:
        messages = [
            Message(
                _holding(pieces, client=client, **self._facts),
                dst_node_id=self._nodes[client],
                message_type=f"query.{ASK}",
            )
            for client in clients
        ]
        return list(self._grid.push_messages(messages)) if messages else []


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


def _holding(pieces: Sequence[bytes], **facts: int | str) -> RecordDict:
    arrays = {
        str(number): Array(dtype="uint8", shape=(len(piece),), stype="fedstill", data=piece)
        for number, piece in enumerate(pieces)
    }
    found = RecordDict({"message": ArrayRecord(arrays)})
    if facts:
        found["facts"] = ConfigRecord(dict(facts))
    return found


def content(data: bytes, **facts: int | str) -> RecordDict:
    """A message of ours: the bytes, and what has to stand beside them."""
    return _holding(_cut(data), **facts)


def taken(message: Message) -> bytes:
    """The bytes of a message of ours, which has none afterwards, as Flower's objects live on in cycles for a while.

    Raises:
        KeyError, AttributeError, TypeError: it is none of ours.
    """
    arrays = message.content.array_records["message"]
    pieces = [arrays[str(number)] for number in range(max(1, len(arrays)))]
    data = b"".join(piece.data for piece in pieces)
    for piece in pieces:
        piece.data = b""
    return data


def _arrival(client: int, reply: Message) -> Arrival:
    if reply.has_error():
        reason = reply.error.reason or f"error {reply.error.code}"
        if "ActorUnavailableError" in reason or "ActorDiedError" in reason:
            return Arrival(client, b"", "its process ended; out of memory?")
        return Arrival(client, b"", f"Flower says: {schema.clean(reason, 300)}")
    try:
        return Arrival(client, taken(reply))
    except (KeyError, AttributeError, TypeError):
        return Arrival(client, b"", "the reply holds no bytes of ours")
