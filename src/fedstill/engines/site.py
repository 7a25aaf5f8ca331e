"""The client's side of every engine: it turns the bytes of a request into the bytes of a reply."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedstill import files, schema, seeds, ticks, wire
from fedstill.engines.client import ClientData, RequestResults, SiteClient
from fedstill.engines.client_evaluation import EVALUATE, steps_of
from fedstill.engines.client_state import ReplyCopy, StateFiles, last_state
from fedstill.engines.run_spec import RunSpec
from fedstill.journal import EVALUATIONS
from fedstill.privacy.ledger import Ledger, open_ledger
from fedstill.steps import Step

log = logging.getLogger("fedstill")


NO_REPLY = wire.pack({}, {"error": "the site gives no reply"})
"""A real site's reply to every request that it refuses, or that fails, for a reason that depends on its records."""


_REMEDY = "put its newest copy back, or let the server start another run"
"""Remedy for a damaged file of a real site in one run."""


class Question(NamedTuple):
    """A request that passed its checks: its step, the step's arguments, its number and its bytes."""

    step: Step[Any]
    values: Mapping[str, Any]
    exchange: int
    request: bytes


class Site:
    """The clients whose records are at one place, and their replies.

    Args:
        spec: the run's public settings.
        data: records of the clients.
        folder: parent of each client's folder, which holds its state between steps.
        device: device of the steps.
        threads: number of threads of a step; results are reproducible to the bit only for the same number.
        open_ledger: opens a client's ledger, given its folder; by default a ledger of this run with the run's budget.
    """

    def __init__(
        self,
        spec: RunSpec,
        data: ClientData,
        folder: Path,
        *,
        device: str = "cpu",
        threads: int = 1,
        open_ledger: Callable[[Path], Ledger] | None = None,
    ) -> None:
        self.spec = spec
        self.data = data
        self.folder = folder
        self.device = torch.device(device)
        self.threads = threads
        self._open_ledger = open_ledger
        self._logged: set[str] = set()
        self._results: dict[tuple[bytes, str], Any] = {}
        self._steps = steps_of(spec.method)

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
        try:
            question = self.read(request, wire.envelope(request))
        except schema.Refused as error:
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
        if not isinstance(exchange, int) or exchange < 0:
            raise schema.Refused(f"exchange is {exchange!r}; it must be a whole number from 0")
        return Question(step, values, exchange, request)

    def reply(self, client: int, question: Question) -> bytes:
        """A client's reply to a request.

        Raises:
            Exception: the step failed; releases before that stay charged (`spent`).
        """
        step, values, exchange, request = question
        folder = self._folder(client)
        copy = ReplyCopy(folder, exchange, request)
        # with new noise, a second reply to the same request would reveal more than the first
        if not self.spec.simulated_noise and (earlier := copy.read()) is not None:
            return earlier
        states = StateFiles(folder, None if self._open_ledger is None else _REMEDY)
        ledger = self._ledger(folder)
        state, common = states.read(exchange % EVALUATIONS), RequestResults(self._results, request)
        actor = SiteClient(self.spec, client, exchange, step.name, self.data, state, ledger, self.device, common)
        with self._reproducible(client, exchange):
            reply = step.function(self.spec.method, actor, **step.arguments(values))
        assert isinstance(reply, step.reply), f"step {step.name} returned {type(reply).__name__}"
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
        state, ledger, common = last_state(self.folder, client), self._ledger(folder), RequestResults({}, b"")
        actor = SiteClient(self.spec, client, exchange, EVALUATE.name, self.data, state, ledger, self.device, common)
        with self._reproducible(client, exchange):
            return self.spec.method.personal_model(actor, shared)

    @contextmanager
    def _reproducible(self, client: int, exchange: int) -> Iterator[None]:
        """Seed torch for a client's step, and set the number of threads, inside the block."""
        with seeds.isolated(seeds.derive(self.spec.seed, "client", client, exchange, "torch")), _threads(self.threads):
            yield

    def _folder(self, client: int) -> Path:
        return self.folder / f"{client:05d}"

    def spent(self, client: int, exchange: int) -> dict[str, object]:
        """The releases for one request, for the header of an error message; nothing without a readable ledger."""
        try:
            return _spent(self._ledger(self._folder(client)), exchange)
        except files.Damaged:
            return {}

    def _report(self, client: int, error: Exception) -> str:
        """The error as the server sees it; its trace is logged here."""
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
def _threads(number: int) -> Iterator[None]:
    """Set the number of threads inside the block, which holds `fedstill.locks.PROCESS`."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
