"""Simulated clients whose replies do not arrive, in front of any transport."""

from collections.abc import Callable, Iterator, Sequence

from typing_extensions import override

from fedstill import seeds, wire
from fedstill.engines.transport import Arrival, Transport
from fedstill.journal import EVALUATIONS


class Losing(Transport):
    """A transport on which some replies get lost, the same ones in every start of a run.

    A lost client gets the request, and its bytes are counted; it computes nothing and keeps its state. Evaluations by
    clients measure a run and lose nobody.

    Args:
        transport: the way to the clients.
        num_clients: number of clients of the run.
        seed: the run's seed.
        drop: probability that a client does not reply to a request, independent of other requests and clients.
        slow: share of the clients that reply too late to every request, rounded to whole clients.
    """

    def __init__(self, transport: Transport, num_clients: int, *, seed: int, drop: float, slow: float) -> None:
        self._transport, self._seed, self._drop, self._slow_share = transport, seed, drop, slow
        order = seeds.numpy_stream(seed, "server", "slow").permutation(num_clients)
        self._slow = frozenset(order[: num_slow(num_clients, slow)].tolist())

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        self._transport.tell = self.tell
        number = wire.envelope(request)["exchange"]
        reasons = {} if number >= EVALUATIONS else {c: why for c in clients if (why := self._reason(number, c))}
        for client, why in reasons.items():
            sent(client)
            yield Arrival(client, b"", why)
        yield from self._transport.exchange(request, [client for client in clients if client not in reasons], sent)

    def _reason(self, number: int, client: int) -> str | None:
        """Why the reply of a client to a request does not arrive; None if it does."""
        if client in self._slow:
            return f"it is slow (--slow {self._slow_share:g})"
        draw = seeds.numpy_stream(self._seed, "client", client, number, "drop").random()
        return f"its reply is lost in every start with this seed (--drop {self._drop:g})" if draw < self._drop else None

    @override
    def close(self) -> None:
        self._transport.close()


def num_slow(num_clients: int, slow: float) -> int:
    """Number of clients that a share ``slow`` makes, at least one if it is above 0."""
    return max(round(slow * num_clients), 1) if slow else 0
