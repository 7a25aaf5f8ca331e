"""Replies to one request, read from the journal."""

from collections.abc import Sequence
from typing import TypeVar, overload

from fedstill import schema, wire
from fedstill.journal import Journal
from fedstill.protocol import Reply, Step

R = TypeVar("R", bound=Reply)


class Replies(Sequence[R]):
    """Replies of ``clients``, in their order, read from the journal one at a time when they are used."""

    def __init__(
        self, journal: Journal, facts: schema.Facts, exchange: int, step: Step[R], clients: Sequence[int]
    ) -> None:
        self.clients = clients
        self._journal = journal
        self._facts = facts
        self._exchange = exchange
        self._step = step

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        data = self._journal.read_reply(self._exchange, self._step.name, self.clients[index])
        values, _ = wire.decode(data, self._step.reply.schema, self._facts)
        return self._step.reply.from_payload(values)
