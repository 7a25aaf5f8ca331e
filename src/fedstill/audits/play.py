"""Whole runs of a method on many copies of one client: real server, real steps, real bytes, simulated noise.

Each client of a run has noise of its own, so that one run with n clients is n independent runs of what a client
releases. Some of the copies have one more record than the others.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from jaxtyping import Float64
from torch import Tensor
from typing_extensions import override

from fedstill.audits.neighbours import Heard, listening
from fedstill.base import seeds
from fedstill.base.records import Records
from fedstill.engines.client import Site
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Arrival, Inline
from fedstill.privacy.guarantee import Guarantee
from fedstill.privacy.integer_sums import IntegerSum
from fedstill.privacy.releases import Event, Released
from fedstill.protocol import Method, Reply

Reader = Callable[[Reply, Mapping[str, Any]], Iterable[Tensor]]
"""The numbers of a reply that an attacker looks at, given the arguments of the request."""


@dataclass(frozen=True)
class Copies:
    """Records of clients, many of which have the same (a `fedstill.engines.client.ClientData`).

    Attributes:
        worlds: different sets of training records.
        which: the place in ``worlds`` of each client's records.
        images: the public records.
        first: number of the first client; clients with other numbers have other noise.
    """

    worlds: Sequence[Records]
    which: Sequence[int]
    images: Records
    first: int = 0

    def public(self) -> Records:
        """The public records."""
        return self.images

    def records(self, client: int) -> tuple[Records, Records]:
        """A client's training records, and no test records."""
        own = self.worlds[self.which[client - self.first]]
        return own, own[:0]


@dataclass(frozen=True)
class Game:
    """The settings of a run beside the method's.

    Attributes:
        model: the run's model.
        budget: the budget of the clients' ledgers.
        delta: the run's delta.
        read: the numbers that the attacker looks at; by default all of a reply.
    """

    model: str
    budget: float | None = None
    delta: float = 1e-5
    read: Reader = field(default=lambda reply, arguments: _numbers(vars(reply).values()))


@dataclass(frozen=True)
class Played:
    """Everything that one run showed of its clients.

    Attributes:
        replies: the numbers of all replies of each client, ``(clients, numbers)``.
        claim: the run's guarantee.
        requests: the arguments of each request.
        exact: of a quiet run, for each client the exact values and the noise's standard deviations, in order.
        events: the costs of the first client's releases.
    """

    replies: Float64[Tensor, "clients numbers"]
    claim: Guarantee
    requests: list[Mapping[str, Any]]
    exact: dict[int, list[tuple[Tensor, float]]]
    events: list[Event]


class _Tap(Inline):
    """Gives clients other numbers at the site than at the server, and knows which one is at work."""

    first = client = 0
    heard: Heard | None = None

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for self.client in clients:
            sent(self.client)
            reply = self.site.answer(self.first + self.client, request)
            if self.heard is not None:
                self.heard.messages.append((request, reply))
            yield Arrival(self.client, reply)


class _Listening(ServerFederation):
    """A server that keeps the numbers of its clients' replies, and what it asked."""

    read: Reader

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heard: dict[int, list[Tensor]] = {}
        self.requests: list[Mapping[str, Any]] = []

    @override
    def _ask(self, exchange: int, step: Any, to: Any, arguments: Any, *more: Any) -> Any:
        replies = super()._ask(exchange, step, to, arguments, *more)
        self.requests.append(arguments)
        for client, reply in zip(replies.clients, replies, strict=True):
            self.heard.setdefault(client, []).extend(self.read(reply, arguments))
        return replies


def _numbers(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Released):
            yield from _numbers([value.value])
        elif isinstance(value, Mapping):
            yield from _numbers(value.values())
        elif isinstance(value, Tensor | int | float):
            yield torch.as_tensor(value).double().flatten()


def play(method: Method, data: Copies, task: Game, *, quiet: bool = False, heard: Heard | None = None) -> Played:
    """Run ``method`` with a client for each entry of ``data.which``.

    Args:
        method: the method.
        data: the clients' records, and public ones.
        task: the run's other settings.
        quiet: whether exact values are released, without noise.
        heard: what to fill for the comparison of neighbours; fake values are released then.

    Raises:
        fedstill.engines.server.TooFewReplies: a client gave no usable reply.
        ValueError: the method refuses its settings or the task.
    """
    with tempfile.TemporaryDirectory() as place:
        facts = {"model": task.model, "budget": task.budget, "delta": task.delta}
        spec = RunSpec.of(method, data.worlds[0], **facts)
        tap = _Tap(Site(spec, data, Path(place) / "clients"))
        tap.first, tap.heard = data.first, heard
        some = {"num_clients": len(data.which), "test": data.images[:2], "public": data.images}
        fed = _Listening(spec, tap, folder=Path(place), keep_replies=True, **some)
        fed.read = task.read
        exact: dict[int, list[tuple[Tensor, float]]] = {}
        with _silence(tap, exact) if quiet else nullcontext() if heard is None else listening(heard):
            method.server(fed)
        sized = heard is None  # a comparison may end with clients that answered other numbers of requests
        rows = [torch.cat(fed.heard[client]) for client in fed.clients] if sized else [torch.empty(0)]
        events = [entry.event for entry in fed.journal.releases().get(0, ())]
        return Played(torch.stack(rows), fed.guarantee(), fed.requests, exact, events)


def _silence(tap: _Tap, exact: dict[int, list[tuple[Tensor, float]]]) -> AbstractContextManager[Any]:
    """Simulated noise that adds nothing and notes what it was given; a site's own noise is not touched."""

    def added(noise: seeds.Simulated, value: Tensor, std: float) -> Tensor:
        exact.setdefault(tap.client, []).append((value.clone(), std))
        return value

    def integers(self: Any, value: Tensor, scale: float, noise: seeds.Noise) -> Tensor:
        exact.setdefault(tap.client, []).append((value.double(), self.noise_multiplier * scale))
        return value

    patches = ExitStack()
    patches.enter_context(mock.patch.object(seeds.Simulated, "added", added))
    patches.enter_context(mock.patch.object(IntegerSum, "integers", integers))
    return patches
