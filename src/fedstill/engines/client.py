"""The client side: from the bytes of a request to those of the reply."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedstill import schema, ticks
from fedstill.base import files, seeds
from fedstill.base.records import Records
from fedstill.data.public import is_noise
from fedstill.engines.client_evaluation import EVALUATE, steps_of
from fedstill.engines.column_scale import Measured, read_header, rescaled
from fedstill.engines.masked_sums import MaskedStep, check_range, masked_steps, simulated_key
from fedstill.engines.run_spec import RunSpec
from fedstill.privacy.integer_sums import IntegerSum
from fedstill.privacy.ledger import Charge, Ledger, Part, open_ledger
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.releases import Event
from fedstill.protocol import Client, Released, wire
from fedstill.protocol.sides import Step
from fedstill.runs.journal import EVALUATIONS


class ReplyCopy:
    """A copy of the reply to one request in the client's ``folder``, to send the same bytes again."""

    def __init__(self, folder: Path, exchange: int, request: bytes) -> None:
        self._place = folder / f"{exchange:06d}-{hashlib.sha256(request).hexdigest()[:16]}.given"

    def read(self) -> bytes | None:
        """The stored reply, or None."""
        if not self._place.exists():
            return None
        return bytes(files.read_checked(self._place, "the client releases nothing again; start another run"))

    def write(self, reply: bytes) -> None:
        """Store the reply."""
        files.write_checked(self._place, reply)


class StateFiles:
    """State of a client, one file per request, so that a step repeated after a crash starts from the same state.

    Args:
        folder: the client's.
        newest: a file with the number of the request after which the newest state was written, which is not in
            ``folder``, so that a state that was deleted is not taken for none.
        label: the run and the client, which the checksum of a state covers with its request, so that another's state is
            not taken for this one's.
        remedy: end of the sentence of `fedstill.base.files.Damaged`.
    """

    def __init__(self, folder: Path, newest: Path, label: str, remedy: str) -> None:
        self.folder = folder
        self._newest = newest
        self._label = label
        self._remedy = remedy
        self._deleted = folder / "earlier-deleted"

    def read(self, exchange: int) -> dict[str, Tensor]:
        """The state before request ``exchange``.

        Raises:
            fedstill.base.files.Damaged: it is damaged, or no longer kept, as after a reply before the last was deleted.
        """
        earlier = self._before(exchange)
        newest = self._newest_number()
        lost = 0 <= newest < exchange and not (earlier and int(earlier[-1].stem) >= newest)
        if lost or (not earlier and self._deleted.exists()):
            raise files.Damaged(f"{self.folder} has no state from before request {exchange} any more; {self._remedy}")
        return wire.unpack(self._content(earlier[-1]))[0] if earlier else {}

    def write(self, exchange: int, state: Mapping[str, Tensor]) -> None:
        """Store the state after request ``exchange``, if it changed; of the earlier ones only the last is kept."""
        if not state and not self.folder.exists():
            return
        packed, place, earlier = wire.pack(state, {}), self.folder / f"{exchange:06d}.state", self._before(exchange)
        if earlier and not place.exists() and self._content(earlier[-1]) == packed:
            return
        files.write_checked(place, packed, self._labelled(place))
        if self._newest_number() < exchange:
            files.write_bytes(self._newest, str(exchange).encode())
        for old in earlier[:-1]:
            self._deleted.touch()
            old.unlink()

    def _content(self, place: Path) -> bytearray:
        return files.read_checked(place, self._remedy, self._labelled(place))

    def _labelled(self, place: Path) -> bytes:
        return f"{self._label}/{place.stem}/".encode()

    def _newest_number(self) -> int:
        """The request after which the newest state was written; -1 if there was none."""
        if not self._newest.exists():
            return -1
        text = self._newest.read_text("utf-8")
        if not text.isdecimal():
            raise files.Damaged(f"{self._newest} is damaged; {self._remedy}")
        return int(text)

    def _before(self, exchange: int) -> list[Path]:
        """The files of states before request ``exchange``, in order."""
        return sorted(file for file in self.folder.glob("*.state") if int(file.stem) < exchange)


Result = TypeVar("Result")
Rows = TypeVar("Rows")
Value = TypeVar("Value")


class ClientData(Protocol):
    """Records of a site's clients."""

    def public(self) -> Records | None:
        """The public records, the same at the server and every client, or None."""

    def records(self, client: int) -> tuple[Records, Records]:
        """The training and the local test records of a client."""


class RequestResults:
    """Results that depend on a request and the public records alone, shared by the clients of one site.

    Args:
        cache: results of the last request that had any, by the request's digest and the result's name; changed in
            place.
        request: the request's bytes.
    """

    def __init__(self, cache: MutableMapping[tuple[bytes, str], Any], request: bytes) -> None:
        self._cache = cache
        self._request = request

    def once(self, name: str, compute: Callable[[], Result]) -> Result:
        """The result of ``compute()``, cached under ``name`` for this request."""
        key = hashlib.sha256(self._request).digest(), name
        if key not in self._cache:
            for old in [old for old in self._cache if old[0] != key[0]]:
                del self._cache[old]
            self._cache[key] = compute()
        result: Result = self._cache[key]
        return result


class SiteClient(Client):
    """The `Client` of a simulated or a real site."""

    def __init__(
        self,
        spec: RunSpec,
        client: int,
        exchange: int,
        step: str,
        data: ClientData,
        state: dict[str, Tensor],
        ledger: Ledger,
        device: torch.device,
        common: RequestResults,
        sign: Callable[[bytes], bytes],
        scale: Measured | None = None,
    ) -> None:
        self.id = client
        self.architecture = spec.architecture(client)
        self.state = {name: value.to(device) for name, value in state.items()}
        self.device = device
        self.delta = spec.delta
        self.class_names = spec.class_names
        self.exchange = exchange
        self.masked = spec.sums is not None
        self.adders = 1 if spec.sums is None else spec.sums.adders
        self._spec = spec
        self._data = data
        self._exchange = exchange
        self._step = step
        self._ledger = ledger
        self._releases = 0
        self._common = common
        self._scale = scale
        self.sign = sign
        """The client's Ed25519 signature of an upload to a masked sum."""

    @cached_property
    def _records(self) -> tuple[Records, Records]:
        train, test = self._data.records(self.id)
        return self._scaled(train), self._scaled(test)

    def _scaled(self, records: Records, *, drawn: bool = False) -> Records:
        """The records under the scale that the request brought, if it brought one."""
        if self._scale is None or self._spec.scale is None:
            return records
        normalisation = self._scale.normalisation(self._spec.scale, self._spec.normalisation, records.shape[0])
        return rescaled(records, normalisation, drawn=drawn)

    # cached and lazy: records that a step does not use are neither copied nor moved

    @cached_property
    def _fingerprint(self) -> bytes:
        return hashlib.sha256(self._records[0].images.cpu().numpy().tobytes()).digest()

    @cached_property
    @override
    def train(self) -> Records:
        return self._records[0].to(self.device)

    @cached_property
    @override
    def test(self) -> Records:
        return self._records[1].to(self.device)

    @cached_property
    @override
    def public(self) -> Records | None:
        public = self._data.public()
        if public is None:
            return None
        return self._scaled(public, drawn=is_noise(str(self._spec.public))).to(self.device)

    @override
    def once(self, name: str, compute: Callable[[], Result]) -> Result:
        return self._common.once(name, compute)

    @override
    def release(
        self, mechanism: Mechanism[Rows, Value], rows: Rows, *, adaptive: bool = False, part: Part | None = None
    ) -> Released[Value]:
        index, self._releases = self._releases, self._releases + 1
        adders, alone = self._shared(mechanism)
        entry = Charge(
            exchange=self._exchange,
            step=self._step,
            index=index,
            mechanism=type(mechanism).__name__,
            unit=mechanism.unit,
            event=mechanism.event,
            theorem=mechanism.theorem,
            adaptive=adaptive,
            adders=adders,
            alone=alone,
            part=None if part is None else part.name,
        )
        records = None
        if part is not None:
            assert isinstance(rows, Tensor) and len(rows) == len(self.train), "a part is one of all records' rows"
            rows = cast(Rows, rows[part.positions])
            records = part.records(len(self.train), self._fingerprint)
        self._ledger.charge(entry, records)
        noise: seeds.Noise = seeds.Entropy()
        if self._spec.simulated_noise:
            noise = seeds.Simulated(self.rng("privacy noise", index))
        return Released(mechanism(rows, noise))

    def _shared(self, mechanism: Mechanism[Any, Any]) -> tuple[int, Event | None]:
        """The number of clients that the noise of a mechanism counts on, and the cost of this client's share alone.

        Raises:
            ValueError: it counts on others though the server sees this upload, or a sum may leave its masks' range.
        """
        if not isinstance(mechanism, IntegerSum):
            return 1, None
        if mechanism.adders not in (1, self.adders):
            raise ValueError(
                f"{type(mechanism).__name__} counts on the noise of {mechanism.adders} clients, but in this run "
                f"{self.adders} add theirs; pass adders=client.adders"
            )
        if self._spec.sums is not None:
            check_range(mechanism, self._spec.sums)
        return mechanism.adders, mechanism.alone if mechanism.adders > 1 else None

    @override
    def rng(self, *use: str | int) -> torch.Generator:
        return seeds.stream(self._spec.seed, "client", self.id, self._exchange, *use)

    @override
    def new_model(
        self, weights: Mapping[str, Tensor] | None = None, *, draw: int = 0, architecture: str | None = None
    ) -> nn.Module:
        return self._spec.new_model(weights, draw=draw, architecture=architecture, device=self.device)


log = logging.getLogger("fedstill")


NO_REPLY = wire.pack({}, {"error": "the site gives no reply"})
"""A real site's reply to every request that it refuses, or that fails, for a reason that depends on its records."""


_REMEDY = "put its newest copy back, or let the server start another run"
"""Remedy for a damaged file of a real site in one run."""


class Question(NamedTuple):
    """A request that passed its checks: its step, the step's arguments, its number, its bytes, its scale."""

    step: Step[Any]
    values: Mapping[str, Any]
    exchange: int
    request: bytes
    scale: Measured | None = None


class Site:
    """The clients whose records are at one place, and their replies.

    Args:
        spec: the run's public settings.
        data: records of the clients.
        folder: parent of each client's folder, which holds its state between steps.
        newest: folder with the number of each client's newest state (`StateFiles`); by default beside the clients'.
        device: device of the steps.
        threads: number of threads of a step; results are reproducible to the bit only for the same number.
        open_ledger: opens a client's ledger, given its folder; by default a ledger of this run with the run's budget.
        sign: a real site's signature of its uploads to masked sums; simulated clients have keys that protect nothing.
    """

    def __init__(
        self,
        spec: RunSpec,
        data: ClientData,
        folder: Path,
        newest: Path | None = None,
        *,
        device: str = "cpu",
        threads: int = 1,
        open_ledger: Callable[[Path], Ledger] | None = None,
        sign: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.spec = spec
        self.data = data
        self.folder = folder
        self.newest = newest or folder / "newest"
        self.device = torch.device(device)
        self.threads = threads
        self._open_ledger = open_ledger
        self._own_sign = sign
        self._logged: set[str] = set()
        self._results: dict[tuple[bytes, str], Any] = {}
        self._steps = masked_steps(steps_of(spec.method, spec.scale), spec.sums, spec.digest)
        self.failure: Exception | None = None
        """The error of the latest answer, with its traceback; None if there was none."""

    def _ledger(self, folder: Path) -> Ledger:
        if self._open_ledger is not None:
            return self._open_ledger(folder)
        return open_ledger(
            folder / "ledger.jsonl",
            delta=self.spec.delta,
            budget=self.spec.budget,
            repeatable=self.spec.simulated_noise,
        )

    def answer(self, client: int, request: bytes, tell: ticks.Tell | None = None) -> bytes:
        """The reply of a simulated client to ``request``, or an error message; never raises.

        ``tell`` observes the work inside the step.
        """
        self.failure = None
        try:
            question = self.read(request, wire.envelope(request))
        except schema.Refused as error:
            self.failure = error
            return wire.pack({}, {"error": f"refused by the client: {error}"})
        except Exception as error:  # one client's failure must not end the others
            return wire.pack({}, {"error": self._report(client, error)})
        try:
            with ticks.told(tell):
                return self.reply(client, question)
        except Exception as error:
            # the ledger stays charged although the step failed, so the server must know
            return wire.pack({}, {"error": self._report(client, error), **self.spent(client, question.exchange)})

    def read(self, request: bytes, header: Mapping[str, Any]) -> Question:
        """Check a request with the `wire.envelope` ``header``, without a look at any record.

        Raises:
            Refused: the request is malformed.
        """
        name = header.get("step")
        if not isinstance(name, str) or name not in self._steps:
            raise schema.Refused(f"step {name!r} is not one of {', '.join(sorted(self._steps))}")
        step = self._steps[name]
        values, envelope = wire.decode(request, step.request, self.spec.facts, header=header)
        exchange = envelope.get("exchange")
        if type(exchange) is not int or not 0 <= exchange < EVALUATIONS**2:  # True is an int, and 10**4000 no file
            raise schema.Refused(
                f"exchange is {schema.short(exchange)}; it must be a whole number from 0 below {EVALUATIONS**2}"
            )
        return Question(step, values, exchange, request, read_header(envelope, self.spec.scale))

    def reply(self, client: int, question: Question) -> bytes:
        """A client's reply to a request.

        Raises:
            Exception: the step failed; releases before that stay charged (`spent`).
        """
        step, values, exchange, request, scale = question
        folder = self._folder(client)
        copy = ReplyCopy(folder, exchange, request)
        # with new noise, a second reply to the same request would reveal more than the first
        if not self.spec.simulated_noise and (earlier := copy.read()) is not None:
            return earlier
        states = self._states(client)
        ledger = self._ledger(folder)
        state, common = states.read(exchange % EVALUATIONS), RequestResults(self._results, request)
        actor = self._client(client, exchange, step.name, state, ledger, common, scale)
        with self._reproducible(client, exchange):
            reply = step.function(self.spec.method, actor, **step.arguments(values))
        if not isinstance(reply, step.reply):
            raise TypeError(f"step {step.name} returned a {type(reply).__name__}; it must return {step.reply.__name__}")
        if not isinstance(step, MaskedStep) and any(e.adders > 1 for e in ledger.entries if e.exchange == exchange):
            raise TypeError(
                f"step {step.name} released with a share of the noise, but its reply is no sum; declare its fields "
                "Summed[...]"
            )
        envelope = {"step": step.name, "exchange": exchange, **_spent(ledger, exchange)}
        data = wire.encode(reply.payload(), step.reply.schema, self.spec.facts, envelope)
        if exchange < EVALUATIONS:
            states.write(exchange, actor.state)
        if not self.spec.simulated_noise and ledger.of_exchange(exchange):
            copy.write(data)
        return data

    def personal_model(self, client: int, shared: Mapping[str, Tensor], asked: int) -> nn.Module:
        """The own model of a simulated client as it evaluates it after ``asked`` requests; nothing is stored."""
        exchange, folder = EVALUATIONS + asked, self._folder(client)
        state, ledger = self._states(client).read(EVALUATIONS), self._ledger(folder)
        common = RequestResults({}, b"")
        actor = self._client(client, exchange, EVALUATE.name, state, ledger, common)
        with self._reproducible(client, exchange):
            return self.spec.method.personal_model(actor, shared)

    def _client(
        self,
        client: int,
        exchange: int,
        step: str,
        state: dict[str, Tensor],
        ledger: Ledger,
        common: RequestResults,
        scale: Measured | None = None,
    ) -> SiteClient:
        sign = self._own_sign or (lambda text: simulated_key(self.spec.run, client).sign(text))
        where = state, ledger, self.device, common, sign, scale
        return SiteClient(self.spec, client, exchange, step, self.data, *where)

    @contextmanager
    def _reproducible(self, client: int, exchange: int) -> Iterator[None]:
        """Seed torch for a client's step, and set the number of threads, inside the block."""
        with (
            seeds.isolated(seeds.derive(self.spec.seed, "client", client, exchange, "torch")),
            torch_threads(self.threads),
        ):
            yield

    def _folder(self, client: int) -> Path:
        return self.folder / f"{client:05d}"

    def _states(self, client: int) -> StateFiles:
        folder, label = self._folder(client), f"{self.spec.run}/{client}"
        remedy = f"delete {self.folder.parent} and run again" if self._open_ledger is None else _REMEDY
        return StateFiles(folder, self.newest / folder.name, label, remedy)

    def spent(self, client: int, exchange: int) -> dict[str, object]:
        """The releases for one request, for the header of an error message; nothing without a readable ledger."""
        try:
            return _spent(self._ledger(self._folder(client)), exchange)
        except files.Damaged:
            return {}

    def _report(self, client: int, error: Exception) -> str:
        """The error as the server sees it; its trace is logged here."""
        self.failure = error
        reason = f"{type(error).__name__}: {error}"
        # a ValueError explains itself; each trace is logged once, not for every client
        if not isinstance(error, ValueError) and reason not in self._logged:
            self._logged.add(reason)
            log.error("client %d failed", client, exc_info=error)
        return reason


def _spent(ledger: Ledger, exchange: int) -> dict[str, object]:
    entries = ledger.of_exchange(exchange)
    return {"spent": entries} if entries else {}


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Set the number of threads inside the block, which holds `fedstill.base.processes.PROCESS`."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
