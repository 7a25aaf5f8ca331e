"""The server's side, the same in every engine: questions out, checked and journalled replies in."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedstill import schema, seeds, wire
from fedstill.engines import checkpoint as kept
from fedstill.engines.agreement import Agreement
from fedstill.engines.client_evaluation import JUDGE, Judgement, steps_of
from fedstill.engines.reply_checks import check
from fedstill.engines.transport import Arrival, Transport, Watcher
from fedstill.evaluate import accuracies, confusion
from fedstill.journal import CHECKPOINT, JUDGING, Journal, Refusal
from fedstill.privacy import guarantee
from fedstill.privacy.events import Event, Unit
from fedstill.privacy.ledger import UNCOUNTABLE, Entry, covers, total_epsilon
from fedstill.protocol import Federation, Reply, Round, Step, shared_part
from fedstill.records import Records
from fedstill.runs.folder import RunFolder

R = TypeVar("R", bound=Reply)
EPOCHS = "epochs"
"""The checkpoint within a round, or without one."""
SAVE_EVERY = 20.0
"""Seconds between two of these at least: what a killed run loses at most, beside the epoch it was in."""


class TooFewReplies(RuntimeError):
    """Fewer clients than the run requires gave a usable reply."""


class Replies(Sequence[R]):
    """Replies in the order of the clients, read from the journal one at a time as they are used."""

    def __init__(self, federation: "ServerFederation", exchange: int, step: Step[R], clients: Sequence[int]) -> None:
        """``clients`` are those whose reply is in the journal."""
        self.clients = clients
        self._federation = federation
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
        data = self._federation.journal.read_reply(self._exchange, self._step.name, self.clients[index])
        values, _ = wire.decode(data, self._step.reply.schema, self._federation.agreement.facts)
        return self._step.reply.from_payload(values)


class ServerFederation(Federation):
    """The `Federation` that a server's loop sees.

    Args:
        agreement: the run's public set-up.
        transport: the way to the clients.
        num_clients: how many there are, numbered from 0.
        folder: the run's folder; holds the journal, the metrics and the pictures.
        test: the server's test records.
        public: records that everybody holds, or None.
        min_clients: how many usable replies a question needs.
        keep_replies: keep the replies of finished rounds too.
        evaluate_every: judge the model after every so many rounds, and after the last.
        device: where the server computes.
        watcher: sees the progress.
        local_test: whether clients keep test records of their own, which then are what models are judged on.
    """

    def __init__(
        self,
        agreement: Agreement,
        transport: Transport,
        *,
        num_clients: int,
        folder: Path,
        test: Records,
        public: Records | None = None,
        min_clients: int | None = None,
        keep_replies: bool = False,
        evaluate_every: int = 1,
        device: str = "cpu",
        watcher: Watcher | None = None,
        local_test: bool = False,
    ) -> None:
        self.agreement = agreement
        self.clients = range(num_clients)
        self.architecture = agreement.model
        self.architectures = [agreement.architecture(client) for client in self.clients]
        self.public = None if public is None else public.to(device)
        self.delta = agreement.delta
        self.budget = agreement.budget
        self.num_classes = agreement.num_classes
        self.like = test[:0]
        self.device = torch.device(device)
        self._folder = RunFolder(folder)
        self.journal = Journal(self._folder.journal)
        self.min_clients = num_clients if min_clients is None else min_clients
        self.asked_steps: dict[str, Step[Any]] = {}
        self._transport = transport
        self._test = test.to(device)
        self._keep_replies = keep_replies
        self._evaluate_every = evaluate_every
        self._watcher = watcher or Watcher()
        self._local_test = local_test
        self._judged: tuple[int, str, Judgement] | None = None  # question, digest of what was judged, and how
        self._saved = time.monotonic()
        self._loops = 0  # of epochs, since the round began
        self._exchange = 0
        self._round: int | None = None
        self._rounds = 1

    @property
    def num_rounds(self) -> int:
        """How many rounds the method's loop has; 1 for a method without one."""
        return self._rounds

    # ------------------------------------------------------------------------------------------------------- questions

    def ask(
        self,
        step: Step[R],
        to: Sequence[int] | None = None,
        *,
        at_most: Mapping[str, int] | None = None,
        exactly: Mapping[str, int] | None = None,
        **arguments: Any,
    ) -> Replies[R]:
        """See `Federation.ask`."""
        exchange, self._exchange = self._exchange, self._exchange + 1
        return self._ask(exchange, step, to, arguments, at_most, exactly)

    def _ask(
        self,
        exchange: int,
        step: Step[R],
        to: Sequence[int] | None,
        arguments: Mapping[str, Any],
        at_most: Mapping[str, int] | None = None,
        exactly: Mapping[str, int] | None = None,
    ) -> Replies[R]:
        facts = replace(self.agreement.facts, sizes={**self.agreement.facts.sizes, **(exactly or {})})
        asked = sorted(self.clients if to is None else to)
        assert set(asked) <= set(self.clients), f"asked for clients {asked}; there are {len(self.clients)}"
        self.asked_steps[step.name] = step
        envelope = {"step": step.name, "exchange": exchange}
        request = wire.encode(step.payload(arguments), step.request, self.agreement.facts, envelope)
        self.journal.asks(exchange, step.name, request)
        good, refusals = self.journal.answered(exchange, step.name)
        answered = {*good, *(refusal.client for refusal in refusals)}
        waiting = [client for client in asked if client not in answered]
        self._watcher.asked(step.name, len(asked), len(asked) - len(waiting))
        if waiting:
            sent = partial(self.journal.sent, exchange, size=len(request))
            try:
                for arrival in self._transport.exchange(request, waiting, sent):
                    refusal, spent = self._judge(arrival, exchange, step, facts, at_most)
                    if spent:  # also of a reply that is not used
                        self.journal.keep_spent(exchange, arrival.client, spent)
                    if refusal is None:
                        self.journal.keep_reply(exchange, step.name, arrival.client, arrival.reply)
                        good.append(arrival.client)
                    else:
                        self.journal.keep_refusal(exchange, refusal, len(arrival.reply))
                        refusals.append(refusal)
                    self._watcher.arrived(refusal)
                    del arrival  # before the next is fetched
            finally:
                self.journal.settle()
        needed = min(self.min_clients, len(asked))
        if len(good) < needed:
            first = refusals[0]
            self.journal.forget_refusals(exchange, step.name)  # the next start may have more patience or more luck
            raise TooFewReplies(
                f"{len(good)} of {len(asked)} clients gave a usable reply to step '{step.name}', {needed} are needed "
                f"(--min-clients); client {first.client}: {first.reason}"
            )
        return Replies(self, exchange, step, sorted(good))

    def _judge(
        self,
        arrival: Arrival,
        exchange: int,
        step: Step[R],
        facts: schema.Facts,
        at_most: Mapping[str, int] | None,
    ) -> tuple[Refusal | None, list[Entry]]:
        """Why a reply must not be used, or None; and what the client says it released."""
        reason, spent = check(arrival, exchange, step, facts, at_most)
        return (None if reason is None else Refusal(arrival.client, step.name, self._round, reason)), spent

    # ---------------------------------------------------------------------------------------------------------- budget

    @override
    def able(self, event: Event, *, adaptive: bool = False, unit: Unit = "record") -> list[int]:
        following = Entry(
            exchange=self._exchange,
            step="next",
            index=0,
            mechanism=type(self.agreement.method).__name__,
            unit=unit,
            event=event,
            theorem="",
            adaptive=adaptive,
        )
        spent = self.journal.spent(before=self._exchange)
        return [k for k in self.clients if covers(spent.get(k, []), following, self.budget, self.delta)]

    @override
    def spent(self, unit: Unit = "record") -> float | None:
        spent = self.journal.spent(before=self._exchange).values()
        each = ([entry for entry in entries if entry.unit == unit] for entries in spent)
        try:
            most = max((total_epsilon(entries, self.delta, self.budget) for entries in each), default=0.0)
        except UNCOUNTABLE:
            return None
        return most if math.isfinite(most) else None

    # ---------------------------------------------------------------------------------------------------------- rounds

    def rounds(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[Round]:
        """See `Federation.rounds`."""
        self._rounds = number
        done = self._restore(carry)
        self._folder.drop_metrics_after(done)
        for index in range(done + 1, number + 1):
            self._round, self._loops = index, 0
            yield Round(number=index, log=partial(self._log, index))
            self._save(index, carry)
            if not self._keep_replies and index < number:
                self.journal.forget_replies(self._exchange)
        self._round = None

    def _save(self, done: int, keep: kept.Carried) -> None:
        header: dict[str, Any] = {
            "round": done,
            "exchange": self._exchange,
            "steps": sorted(self.asked_steps),
            "judged": None,
        }
        if self._judged is not None:
            header["judged"] = [*self._judged[:2], self._judged[2].described()]
        self.journal.save_checkpoint(kept.tensors(keep), header)

    def _restore(self, keep: kept.Carried) -> int:
        checkpoint = self.journal.load_checkpoint()
        if checkpoint is None:
            return 0
        tensors, header = checkpoint
        kept.put_back(keep, tensors, self.journal.folder / CHECKPOINT)
        self._exchange = header["exchange"]
        if header.get("judged") is not None:
            number, digest, judgement = header["judged"]
            self._judged = int(number), digest, Judgement.read(judgement)
        steps = steps_of(self.agreement.method)
        self.asked_steps |= {name: steps[name] for name in header["steps"]}
        return int(header["round"])

    def epochs(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[int]:
        """See `Federation.epochs`."""
        self._loops += 1
        at = {"exchange": self._exchange, "round": self._round, "epochs": number, "loop": self._loops}
        checkpoint = self.journal.load_checkpoint(EPOCHS)
        done = 0
        if checkpoint is not None and checkpoint[1].items() >= at.items():
            kept.put_back(carry, checkpoint[0], self.journal.folder / EPOCHS)
            done = int(checkpoint[1]["done"])
        for epoch in range(done + 1, number + 1):
            yield epoch
            if epoch == number or time.monotonic() - self._saved >= SAVE_EVERY:
                self.journal.save_checkpoint(kept.tensors(carry), {**at, "done": epoch}, EPOCHS)
                self._saved = time.monotonic()

    def last(self, model: nn.Module) -> Judgement:
        """How good the finished model is; the line of ``metrics.jsonl`` of a method that logged none."""
        judgement = self.judge(model)
        if not self._folder.metrics.exists():
            self._log(self._rounds, accuracy=judgement.accuracy)
        return judgement

    def _log(self, index: int, **numbers: float | None) -> None:
        values = {name: value for name, value in numbers.items() if value is not None}
        if self._judged is not None and "accuracy" in values and (spread := self._judged[2].spread) is not None:
            values["spread"] = spread
        line: dict[str, float] = {"round": index, **values}
        journal = self.journal
        line |= {"bytes_up": journal.bytes_up, "bytes_down": journal.bytes_down, "seconds": journal.seconds}
        self._folder.append_metrics(line)
        self._watcher.logged(index, self._rounds, values)

    # ------------------------------------------------------------------------------------------------------------ rest

    def guarantee(self) -> guarantee.Guarantee:
        """What holds for everything that the clients have sent so far."""
        unprotected = [
            f"field '{f.name}' of step '{s.name}'"
            for s in self.asked_steps.values()
            for f in s.reply.schema
            if not (f.is_public or f.is_released)
        ]
        return guarantee.derive(
            unprotected,
            self.journal.spent(),
            self.agreement.delta,
            budget=self.agreement.budget,
            simulated=self.agreement.simulated_noise,
        )

    def new_model(self, *, draw: int = 0, architecture: str | None = None) -> nn.Module:
        """See `Federation.new_model`."""
        return self.agreement.new_model(draw=draw, architecture=architecture, device=self.device)

    def rng(self, *use: str | int) -> torch.Generator:
        """See `Federation.rng`."""
        return seeds.stream(self.agreement.seed, "server", *use)

    def evaluate(self, model: nn.Module) -> float | None:
        """See `Federation.evaluate`."""
        return self.judge(model).accuracy if self._judges else None

    def evaluate_each(self, networks: nn.Module) -> list[float] | None:
        """See `Federation.evaluate_each`."""
        return accuracies(networks, self._test) if self._judges else None

    @property
    def _judges(self) -> bool:
        return self._round is None or not self._round % self._evaluate_every or self._round == self._rounds

    def judge(self, model: nn.Module) -> Judgement:
        """The quality of ``model``; clients are not asked again about the same model with no other request since.

        Any request may have changed what clients keep, and with it their own models.
        """
        if not self._local_test:
            return Judgement(confusion(model, self._test, self.num_classes).cpu())
        shared = shared_part(self.agreement.method, model)
        digest = hashlib.sha256(wire.pack(shared, {})).hexdigest()
        last, judged, judgement = self._judged or (0, "", None)
        if judgement is None or judged != digest or last % JUDGING != self._exchange:
            number = JUDGING + (last if last and last % JUDGING == self._exchange else self._exchange)
            replies = self._ask(number, JUDGE, None, {"shared": shared})
            tables = {client: reply.confusion for client, reply in zip(replies.clients, replies, strict=True)}
            judgement = Judgement.of_clients(tables, self.num_classes)
            self._judged = number, digest, judgement
        return judgement

    def progress(self, what: str) -> Callable[[int, int], None]:
        """See `Federation.progress`."""
        return partial(self._watcher.progressed, what)

    def show(self, name: str, images: Records) -> None:
        """See `Federation.show`."""
        self._folder.write_images(name, images)
