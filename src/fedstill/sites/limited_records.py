"""The server's limits on the numbers of records that clients claim."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from typing_extensions import override

from fedstill import schema, wire
from fedstill.engines.transport import Arrival, Transport


class LimitedRecords(Transport):
    """A transport that refuses replies which claim more records than their client may have.

    Args:
        inner: the connection to the clients.
        limits: the largest number of each client that has a limit.
    """

    def __init__(self, inner: Transport, limits: Mapping[int, int]) -> None:
        self._inner = inner
        self._limits = limits

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for arrival in self._inner.exchange(request, clients, sent):
            limit = self._limits.get(arrival.client)
            claimed = 0 if limit is None else _records(arrival)
            if limit is not None and claimed > limit:
                reason = f"it claims {claimed:,} records; its limit is {limit:,} (max_records)"
                yield arrival._replace(failure=reason)
            else:
                yield arrival

    @override
    def close(self) -> None:
        self._inner.close()


def _records(arrival: Arrival) -> int:
    """The number of records that a reply claims, as one number or by class; 0 for a malformed reply."""
    try:
        tensors, header = wire.unpack(arrival.reply)
        by_class = tensors.get("counts")
        number = header.get("fields", {}).get("num_records", 0)
        return max(int(number), 0 if by_class is None else int(by_class.sum(dtype=torch.float64)))  # never overflows
    except (schema.Refused, AttributeError, TypeError, ValueError, OverflowError, RuntimeError):
        return 0  # the server's other checks refuse it
