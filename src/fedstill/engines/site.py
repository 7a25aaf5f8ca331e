"""The client's side, the same in every engine: a request's bytes in, a reply's bytes out."""

import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedstill import files, schema, seeds, wire
from fedstill.engines.agreement import Agreement
from fedstill.engines.client_evaluation import steps_of
from fedstill.engines.request_results import RequestResults
from fedstill.journal import JUDGING
from fedstill.privacy.ledger import BudgetExceeded, Entry, Ledger, open_ledger
from fedstill.privacy.mechanisms import Mechanism
from fedstill.protocol import Client, Released
from fedstill.records import Records

Result = TypeVar("Result")
Rows = TypeVar("Rows")
Value = TypeVar("Value")

log = logging.getLogger("fedstill")


class Holdings(Protocol):
    """What the clients hold."""

    def public(self) -> Records | None:
        """The public records, which everybody holds, or None."""

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
        open_ledger: opens a client's ledger, given its folder; by default one of this run, within the run's budget.
        discreet: is told what a step complained about, which then stays here; by default the server is told.
    """

    def __init__(
        self,
        agreement: Agreement,
        holdings: Holdings,
        folder: Path,
        *,
        device: str = "cpu",
        threads: int = 1,
        open_ledger: Callable[[Path], Ledger] | None = None,
        discreet: Callable[[Exception], None] | None = None,
    ) -> None:
        self.agreement = agreement
        self.holdings = holdings
        self.folder = folder
        self.device = torch.device(device)
        self.threads = threads
        self._open_ledger = open_ledger or self._ledger
        self._discreet = discreet
        self._logged: set[str] = set()
        self._results: dict[tuple[bytes, str], Any] = {}
        self._steps = steps_of(agreement.method)

    def _ledger(self, folder: Path) -> Ledger:
        return open_ledger(
            folder / "ledger.jsonl",
            delta=self.agreement.delta,
            budget=self.agreement.budget,
            repeatable=self.agreement.simulated_noise,
        )

    def answer(self, client: int, request: bytes) -> bytes:
        """The reply to ``request``, or a message that says why there is none; never raises."""
        try:
            return self._answer(client, request)
        except schema.Refused as error:
            return wire.pack({}, {"error": f"refused by the client: {error}"})
        except Exception as error:  # whatever goes wrong in a step must not take the other clients down
            return wire.pack({}, {"error": self._report(client, error)})

    def _answer(self, client: int, request: bytes) -> bytes:
        header = wire.envelope(request)
        name = header.get("step")
        if not isinstance(name, str) or name not in self._steps:
            raise schema.Refused(f"step {name!r} is not one of {', '.join(sorted(self._steps))}")
        step = self._steps[name]
        values, envelope = wire.decode(request, step.request, self.agreement.facts, header=header)
        exchange = envelope.get("exchange")
        if not isinstance(exchange, int) or exchange < 0:
            raise schema.Refused(f"exchange is {exchange!r}; it must be a whole number from 0")
        folder = self.folder / f"{client:05d}"
        given = _Given(folder, exchange, request)
        # real noise would differ the second time, and the two replies together would tell more than either
        if not self.agreement.simulated_noise and (earlier := given.read()) is not None:
            return earlier
        held = _StateFiles(folder)
        ledger = self._open_ledger(folder)
        state, common = held.read(exchange % JUDGING), RequestResults(self._results, request)
        actor = SiteClient(self.agreement, client, exchange, name, self.holdings, state, ledger, self.device, common)
        seed = seeds.derive(self.agreement.seed, "client", client, exchange, "torch")
        try:
            with _threads(self.threads), seeds.isolated(seed):
                reply = step.function(self.agreement.method, actor, **step.arguments(values))
            assert isinstance(reply, step.reply), f"step {name} returned {type(reply).__name__}"
            envelope = {"step": name, "exchange": exchange, **_spent(ledger, exchange)}
            data = wire.encode(reply.payload(), step.reply.schema, self.agreement.facts, envelope)
        except Exception as error:
            if not ledger.of_exchange(exchange):
                raise
            # what was charged is charged; the server has to know
            return wire.pack({}, {"error": self._report(client, error), **_spent(ledger, exchange)})
        if exchange < JUDGING:
            held.write(exchange, actor.state)
        if not self.agreement.simulated_noise and ledger.of_exchange(exchange):
            given.write(data)
        return data

    def _report(self, client: int, error: Exception) -> str:
        """What the server may know of an error."""
        if self._discreet is not None:
            self._discreet(error)
            known = isinstance(error, BudgetExceeded)  # which says nothing of the records
            return f"refused by the site: {error}" if known else "the step failed at the site; its log says why"
        reason = f"{type(error).__name__}: {error}"
        # a ValueError says it all in its sentence, and the same trace from every client helps nobody
        if not isinstance(error, ValueError) and reason not in self._logged:
            self._logged.add(reason)
            log.error("client %d failed", client, exc_info=error)
        return reason


def _spent(ledger: Ledger, exchange: int) -> dict[str, object]:
    entries = ledger.of_exchange(exchange)
    return {"spent": entries} if entries else {}


class SiteClient(Client):
    """The `Client` that a step sees."""

    def __init__(
        self,
        agreement: Agreement,
        client: int,
        exchange: int,
        step: str,
        holdings: Holdings,
        state: dict[str, Tensor],
        ledger: Ledger,
        device: torch.device,
        common: RequestResults,
    ) -> None:
        self.id = client
        self.architecture = agreement.architecture(client)
        self.state = {name: value.to(device) for name, value in state.items()}
        self.device = device
        self.delta = agreement.delta
        self._agreement = agreement
        self._holdings = holdings
        self._exchange = exchange
        self._step = step
        self._ledger = ledger
        self._releases = 0
        self._common = common

    @cached_property
    def _records(self) -> tuple[Records, Records]:
        return self._holdings.records(self.id)

    # what a step does not look at is neither copied nor moved

    @cached_property
    def train(self) -> Records:
        """See `Client.train`."""
        return self._records[0].to(self.device)

    @cached_property
    def test(self) -> Records:
        """See `Client.test`."""
        return self._records[1].to(self.device)

    @cached_property
    def public(self) -> Records | None:
        """See `Client.public`."""
        public = self._holdings.public()
        return None if public is None else public.to(self.device)

    @override
    def once(self, name: str, compute: Callable[[], Result]) -> Result:
        return self._common.once(name, compute)

    def release(
        self, mechanism: Mechanism[Rows, Value], rows: Rows, *, adaptive: bool = False, part: str | None = None
    ) -> Released[Value]:
        """See `Client.release`."""
        index, self._releases = self._releases, self._releases + 1
        entry = Entry(
            exchange=self._exchange,
            step=self._step,
            index=index,
            mechanism=type(mechanism).__name__,
            unit=mechanism.unit,
            event=mechanism.event,
            theorem=mechanism.theorem,
            adaptive=adaptive,
            part=part,
        )
        self._ledger.charge(entry)
        noise: seeds.Noise = seeds.Entropy()
        if self._agreement.simulated_noise:
            noise = seeds.Simulated(self.rng("privacy noise", index))
        return Released(mechanism(rows, noise))

    def rng(self, *use: str | int) -> torch.Generator:
        """See `Client.rng`."""
        return seeds.stream(self._agreement.seed, "client", self.id, self._exchange, *use)

    def new_model(
        self, weights: Mapping[str, Tensor] | None = None, *, draw: int = 0, architecture: str | None = None
    ) -> nn.Module:
        """See `Client.new_model`."""
        return self._agreement.new_model(weights, draw=draw, architecture=architecture, device=self.device)


class _Given:
    """The reply that a client has given to a question, to give the same again."""

    def __init__(self, folder: Path, exchange: int, request: bytes) -> None:
        self._place = folder / f"{exchange:06d}-{hashlib.sha256(request).hexdigest()[:16]}.given"

    def read(self) -> bytes | None:
        if not self._place.exists():
            return None
        return bytes(files.read_checked(self._place, "the client releases nothing again; start another run"))

    def write(self, reply: bytes) -> None:
        files.write_checked(self._place, reply)


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


def last_state(folder: Path, client: int) -> dict[str, Tensor]:
    """What a client of a simulation holds after its last answer; ``folder`` is where all their states are."""
    return _StateFiles(folder / f"{client:05d}").read(JUDGING)


def forget_state(folder: Path, keep: Collection[int] = ()) -> None:
    """Delete the state of all clients but ``keep``, who may be asked again; a finished simulation has no other use."""
    for place in folder.glob("*") if keep else [folder]:
        if place.name not in {f"{client:05d}" for client in keep}:
            shutil.rmtree(place, ignore_errors=True)


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
