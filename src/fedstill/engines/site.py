"""The client's side, the same in every engine: a request's bytes in, a reply's bytes out."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fedstill import files, schema, seeds, wire
from fedstill.engines.agreement import Agreement
from fedstill.protocol import Client
from fedstill.records import Records

log = logging.getLogger("fedstill")


class Holdings(Protocol):
    """What the clients hold."""

    def records(self, client: int) -> tuple[Records, Records]:
        """The train and the local test records of a client."""


class Site:
    """Answers requests for the clients whose records it holds.

    Args:
        agreement: the run's public set-up.
        holdings: where the clients' records come from.
        folder: where client state survives between steps, a folder for each client.
        device: where the steps compute.
        threads: how many threads a step may use; part of what makes a result reproducible to the bit.
    """

    def __init__(
        self, agreement: Agreement, holdings: Holdings, folder: Path, *, device: str = "cpu", threads: int = 1
    ) -> None:
        self.agreement = agreement
        self.holdings = holdings
        self.folder = folder
        self.device = torch.device(device)
        self.threads = threads
        self._logged: set[str] = set()

    def answer(self, client: int, request: bytes) -> bytes:
        """The reply to ``request``, or a message that says why there is none; never raises."""
        try:
            return self._answer(client, request)
        except schema.Refused as error:
            return wire.pack({}, {"error": f"refused by the client: {error}"})
        except Exception as error:  # whatever goes wrong in a step must not take the other clients down
            reason = f"{type(error).__name__}: {error}"
            # a ValueError says it all in its sentence, and the same trace from every client helps nobody
            if not isinstance(error, ValueError) and reason not in self._logged:
                self._logged.add(reason)
                log.exception("client %d failed", client)
            return wire.pack({}, {"error": reason})

    def _answer(self, client: int, request: bytes) -> bytes:
        name = wire.envelope(request).get("step")
        steps = self.agreement.method.steps()
        if not isinstance(name, str) or name not in steps:
            raise schema.Refused(f"step {name!r} is not one of {', '.join(sorted(steps))}")
        step = steps[name]
        values, envelope = wire.decode(request, step.request, self.agreement.facts)
        exchange = envelope.get("exchange")
        if not isinstance(exchange, int) or exchange < 0:
            raise schema.Refused(f"exchange is {exchange!r}; it must be a whole number from 0")
        train, test = self.holdings.records(client)
        held = _StateFiles(self.folder / f"{client:05d}")
        actor = SiteClient(self.agreement, client, exchange, train, test, held.read(exchange), self.device)
        seed = seeds.derive(self.agreement.seed, "client", client, exchange, "torch")
        with _threads(self.threads), seeds.isolated(seed):
            reply = step.function(self.agreement.method, actor, **values)
        assert isinstance(reply, step.reply), f"step {name} returned {type(reply).__name__}, not {step.reply.__name__}"
        answer = {f.name: getattr(reply, f.name) for f in fields(reply)}
        data = wire.encode(answer, step.reply.schema, self.agreement.facts, {"step": name, "exchange": exchange})
        held.write(exchange, actor.state)
        return data


class SiteClient(Client):
    """The `Client` that a step sees."""

    def __init__(
        self,
        agreement: Agreement,
        client: int,
        exchange: int,
        train: Records,
        test: Records,
        state: dict[str, Tensor],
        device: torch.device,
    ) -> None:
        self.id = client
        self.train = train.to(device)
        self.test = test.to(device)
        self.public = None
        self.state = {name: value.to(device) for name, value in state.items()}
        self.device = device
        self._agreement = agreement
        self._exchange = exchange

    def rng(self, *use: str | int) -> torch.Generator:
        """See `Client.rng`."""
        return seeds.stream(self._agreement.seed, "client", self.id, self._exchange, *use)

    def new_model(self, weights: Mapping[str, Tensor] | None = None, *, draw: int = 0) -> nn.Module:
        """See `Client.new_model`."""
        return self._agreement.new_model(weights, draw=draw, device=self.device)


class _StateFiles:
    """A client's state, one file per exchange, so that a step that is run again after a crash finds what it found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, exchange: int) -> dict[str, Tensor]:
        earlier = [f for f in sorted(self.folder.glob("*.state")) if int(f.stem) < exchange]
        if not earlier:
            return {}
        remedy = f"delete {self.folder.parent.parent} and run again"
        return wire.unpack(files.read_checked(earlier[-1], remedy))[0]

    def write(self, exchange: int, state: Mapping[str, Tensor]) -> None:
        if not state and not self.folder.exists():
            return
        files.write_checked(self.folder / f"{exchange:06d}.state", wire.pack(state, {}))
        for old in sorted(f for f in self.folder.glob("*.state") if int(f.stem) < exchange)[:-1]:
            old.unlink()


def forget_state(folder: Path) -> None:
    """Delete the state of all clients: what a finished simulation no longer needs."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)
