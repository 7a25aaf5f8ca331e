"""The server's side of every engine: it sends requests, and checks and stores the replies.

A reply is decoded twice by design: once when it arrives, to check it, and again from the journal each time it is used,
so that only one reply is in memory at a time and a resumed run takes the same path.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from fedstill.base import files, lookup, seeds
from fedstill.base.errors import FedstillError
from fedstill.base.records import Records
from fedstill.base.weights import load, state
from fedstill.data import public as public_data
from fedstill.engines import own_code, reply_checks
from fedstill.engines.client_evaluation import EVALUATE, EvaluationResult, steps_of
from fedstill.engines.column_scale import HIDDEN, Measured, measured, rescaled, scale_step
from fedstill.engines.masked_sums import MaskedReply, MaskedStep, Opening, masked_sizes, shapes, unflattened
from fedstill.engines.reply_checks import Checked, Replies, check, listed
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.transport import Arrival, Transport, Watcher
from fedstill.evaluation import LastConfusion, accuracies, numbers
from fedstill.privacy import guarantee
from fedstill.privacy.guarantee import Guarantee
from fedstill.privacy.ledger import UNCOUNTABLE, Charge, covers, total_epsilon
from fedstill.privacy.releases import Event, Unit
from fedstill.protocol import Federation, Method, Reply, Round, Step, Summation, shared_part, wire
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import CHECKPOINT, EVALUATIONS, Journal, Refusal
from fedstill.schema import short
from fedstill.sums.helpers import Answers
from fedstill.sums.masks import Terms

Releases = Mapping[int, Sequence[Charge]]
"""The releases of each client that has any."""


def able_clients(
    fed: Federation, method: Method, releases: Releases, event: Event, exchange: int, adaptive: bool, unit: Unit
) -> list[int]:
    """The clients whose budget covers one more release, in request ``exchange``."""
    following = Charge(
        exchange=exchange,
        step="next",
        index=0,
        mechanism=type(method).__name__,
        unit=unit,
        event=event,
        theorem="",
        adaptive=adaptive,
    )
    return [k for k in fed.clients if covers(releases.get(k, []), following, fed.budget, fed.delta)]


def largest_epsilon(fed: Federation, releases: Releases, unit: Unit) -> float | None:
    """The largest epsilon of one client's releases of this unit; None where nothing bounds it."""
    each = ([entry for entry in entries if entry.unit == unit] for entries in releases.values())
    try:
        most = max((total_epsilon(entries, fed.delta, fed.budget) for entries in each), default=0.0)
    except UNCOUNTABLE:
        return None
    return most if math.isfinite(most) else None


def guarantee_of(steps: Iterable[Step[Any]], releases: Releases, spec: RunSpec) -> guarantee.Guarantee:
    """The guarantee for every reply to ``steps``; with code outside of fedstill it rests on the word of that code."""
    unprotected = [
        f"field '{f.name}' of step '{s.name}'" for s in steps for f in s.reply.schema if f.protection == "unprotected"
    ]
    found = guarantee.derive(unprotected, releases, spec.delta, budget=spec.budget, simulated=spec.simulated_noise)
    if found.adders and (sums := spec.sums):
        found = replace(
            found,
            adversary=(
                f"the server, up to {sums.traitors} of {len(sums.signers)} helpers and {sums.least - sums.adders} "
                f"clients of a sum of {sums.least} or more who work together, and whoever sees what they make of the "
                "totals"
            ),
        )
    names = own_code.named(spec)
    if not (found.holds and names) or (found.unit == "client" and not lookup.is_own(type(spec.method))):
        return found  # a client's whole update is clipped, whatever a network made of its records
    return replace(found, unchecked=" with ".join(names), pairs=own_code.pairs_of(spec))


EPOCHS = "epochs"
"""File name of the checkpoint within a round."""
SAVE_EVERY = 20.0
"""Minimum seconds between two epoch checkpoints, so the most work a killed run repeats (plus the current epoch)."""
Carried = Sequence[nn.Module | dict[str, Tensor]]
"""The models and tensors of a loop."""
LastEvaluation = tuple[int, str, EvaluationResult]
"""Number of the evaluation request, digest of the evaluated model, result."""


class LastRound(NamedTuple):
    """Position of a run after a finished round."""

    number: int
    exchange: int
    steps: Sequence[str]
    evaluation: LastEvaluation | None


def save_round(journal: Journal, carried: Carried, last: LastRound, metrics: Path) -> None:
    """Save the checkpoint of a finished round, with seals of the byte counts and of the file ``metrics``."""
    evaluation = last.evaluation and [*last.evaluation[:2], last.evaluation[2].described()]
    header: dict[str, object] = {
        "round": last.number,
        "exchange": last.exchange,
        "steps": last.steps,
        "judged": evaluation,
    }
    header["seals"] = journal.seals(metrics)
    journal.save_checkpoint(tensors(carried), header)


def load_round(journal: Journal, carried: Carried, metrics: Path) -> LastRound | None:
    """Copy the checkpoint of the last finished round into ``carried`` and return its position; None in a new run.

    Raises:
        Damaged: the checkpoint does not fit, or a sealed file was changed.
    """
    saved = journal.load_checkpoint()
    if saved is None:
        return None
    values, header = saved
    journal.check_seals(header.get("seals", {}), metrics)
    copy_into(carried, values, journal.folder / CHECKPOINT)
    evaluation = None
    if header.get("judged") is not None:
        number, digest, result = header["judged"]
        evaluation = int(number), digest, EvaluationResult.read(result)
    return LastRound(int(header["round"]), header["exchange"], header["steps"], evaluation)


def epochs(journal: Journal, number: int, carried: Carried, at: Mapping[str, int | None]) -> Iterator[int]:
    """The epochs of one loop that remain, up to ``number``, with checkpoints; ``at`` is the loop's place in the run."""
    saved, done, before = journal.load_checkpoint(EPOCHS), 0, time.monotonic()
    if saved is not None and saved[1].items() >= at.items():
        copy_into(carried, saved[0], journal.folder / EPOCHS)
        done = int(saved[1]["done"])
    for epoch in range(done + 1, number + 1):
        yield epoch
        if epoch == number or time.monotonic() - before >= SAVE_EVERY:
            journal.save_checkpoint(tensors(carried), {**at, "done": epoch}, EPOCHS)
            before = time.monotonic()


def tensors(carried: Carried) -> dict[str, Tensor]:
    """The models and tensors as one set of named tensors."""
    parts = [state(part) if isinstance(part, nn.Module) else part for part in carried]
    return {f"{i}/{name}": value for i, part in enumerate(parts) for name, value in part.items()}


def copy_into(carried: Carried, saved: Mapping[str, Tensor], path: Path) -> None:
    """Copy the named tensors of `tensors`, read from ``path``, into the models and tensors of a loop.

    Raises:
        Damaged: names or shapes differ; nothing was copied.
    """
    sizes = {key: value.shape for key, value in tensors(carried).items()}
    if sizes != {key: value.shape for key, value in saved.items()}:
        raise files.Damaged(
            f"{path} does not fit what this run carries (is it of another version?); delete it and run again"
        )
    for i, part in enumerate(carried):
        prefix = f"{i}/"
        load(part, {name.removeprefix(prefix): v for name, v in saved.items() if name.startswith(prefix)})


R = TypeVar("R", bound=Reply)


class TooFewReplies(FedstillError, RuntimeError):
    """Fewer clients than the run requires gave a usable reply."""


class ServerFederation(Federation):
    """The `Federation` of a server's loop.

    Args:
        spec: the run's public set-up.
        transport: the connection to the clients.
        num_clients: number of clients, which are numbered from 0.
        folder: the run's folder, for the journal, the metrics and the pictures.
        test: the server's test records.
        public: records that the server and every client have, or None.
        min_clients: number of usable replies that a request needs; all clients by default.
        keep_replies: whether to keep the replies of finished rounds.
        evaluate_every: number of rounds between evaluations of the model; the last round is always evaluated.
        evaluate_uploads: whether `evaluate_each` evaluates.
        device: the server's device.
        watcher: observes the progress.
        local_test: whether clients evaluate models on their own test records, instead of the server on ``test``.
        helpers: the helpers of masked sums, in the order of the spec.

    Attributes:
        num_rounds: number of rounds in the method's loop; 1 for a method without one.
        done: number of these in which clients were asked, or the server worked; 1 for a method without a loop.
        transport: the way to the clients.
    """

    _errors: Mapping[str, float | None] = {}  # of the last evaluation of a model that predicts a number
    _header: Mapping[str, Any] = {}  # of every request, beside its step and number

    def __init__(
        self,
        spec: RunSpec,
        transport: Transport,
        *,
        num_clients: int,
        folder: Path,
        test: Records,
        public: Records | None = None,
        min_clients: int | None = None,
        keep_replies: bool = False,
        evaluate_every: int = 1,
        evaluate_uploads: bool = True,
        device: str = "cpu",
        watcher: Watcher | None = None,
        local_test: bool = False,
        helpers: Sequence[Answers] = (),
    ) -> None:
        self.spec = spec
        self._helpers = helpers
        self.clients = range(num_clients)
        self.architecture = spec.model
        self.architectures = [spec.architecture(client) for client in self.clients]
        self.public = None if public is None else public.to(device)
        self.delta = spec.delta
        self.budget = spec.budget
        self.max_bytes = spec.max_bytes
        self.masked = spec.sums is not None
        self.num_classes = spec.num_classes
        self.like = test[:0]
        self.device = torch.device(device)
        self._folder = RunFolder(folder)
        self.journal = Journal(self._folder.journal)
        self.min_clients = num_clients if min_clients is None else min_clients
        self.asked_steps: dict[str, Step[Any]] = {}
        self.transport = transport
        self.transport.tell = None if watcher is None else watcher.working
        self._test = test.to(device)
        self._confusion = LastConfusion(self._test)
        self._keep_replies = keep_replies
        self._evaluate_every = evaluate_every
        self._evaluate_uploads = evaluate_uploads
        self._watcher = watcher or Watcher()
        self._local_test = local_test
        self._last_evaluation: LastEvaluation | None = None
        self._loops = 0  # loops of epochs since the round began
        self._exchange = 0
        self._sizes: Mapping[int, float] = {}  # of the clients' last replies with weights or other numbers
        self._round: int | None = None
        self.num_rounds = self.done = 1

    # -------------------------------------------------------------------------------------------------------- requests

    @override
    def ask(
        self,
        step: Step[R],
        to: Sequence[int] | None = None,
        *,
        at_most: Mapping[str, int] | None = None,
        exactly: Mapping[str, int] | None = None,
        at_least: int = 0,
        **arguments: Any,
    ) -> Replies[R]:
        if self.masked and not isinstance(step, MaskedStep):
            self._check_seen(step)
        exchange, self._exchange = self._exchange, self._exchange + 1
        self.done = self._round or self.done  # a loop may end in the middle of a round
        return self._ask(exchange, step, to, arguments, at_most, exactly, at_least)

    def _ask(
        self,
        exchange: int,
        step: Step[R],
        to: Sequence[int] | None,
        arguments: Mapping[str, Any],
        at_most: Mapping[str, int] | None = None,
        exactly: Mapping[str, int] | None = None,
        at_least: int = 0,
    ) -> Replies[R]:
        facts = replace(self.spec.facts, sizes={**self.spec.facts.sizes, **(exactly or {})})
        asked = self._asked(step, to)
        self.asked_steps[step.name] = step
        envelope = {"step": step.name, "exchange": exchange, **self._header}
        request = wire.encode(step.payload(arguments), step.request, self.spec.facts, envelope)
        self.journal.check_request(exchange, step.name, request)
        good, refusals = self.journal.replies_to(exchange, step.name, asked, len(request))
        self._find_lost_releases(exchange, step, good)
        answered = {*good, *(refusal.client for refusal in refusals)}
        waiting = [client for client in asked if client not in answered]
        if not (self.spec.simulated_noise or self._folder.asked_sites):
            self.journal.check_kept(exchange, waiting, self._folder.clients)
        self._watcher.asked(step.name, len(asked), len(good), len(answered) - len(good))
        sizes = dict[int, float]()
        if waiting:
            checked = partial(check, exchange=exchange, step=step, facts=facts, at_most=at_most)
            sizes = self._receive(exchange, step, request, waiting, checked, good, refusals)
        replies = Replies(self.journal, self.spec.facts, exchange, step, sorted(good))
        measured = reply_checks.sizes_of(replies, step.reply.schema, sizes)
        self._sizes = measured or self._sizes  # replies without floats, as evaluations, leave the last ones
        for client, reason in reply_checks.too_large(measured).items():
            refusals.append(Refusal(client, step.name, self._round, reason))
            self.journal.refuse_reply(exchange, refusals[-1])
            self._watcher.withdrawn(refusals[-1])
            good.remove(client)
        self._check_enough(exchange, step, len(good), len(asked), at_least, refusals)
        return Replies(self.journal, self.spec.facts, exchange, step, sorted(good))

    @override
    def sum(
        self,
        step: Step[R],
        to: Sequence[int] | None = None,
        *,
        exactly: Mapping[str, int] | None = None,
        at_least: int = 0,
        **arguments: Any,
    ) -> Summation[R]:
        if not step.sums:
            raise TypeError(f"fed.sum takes a step whose reply is declared Summed[...]; self.{step.name} is none")
        kind, sums = step.reply, self.spec.sums
        if sums is None:
            seen = self.ask(step, to, exactly=exactly, at_least=at_least, **arguments)
            return Summation(added_up(kind, seen), list(seen.clients))
        sizes = {**self.spec.facts.sizes, **(exactly or {})}
        length = sum(map(math.prod, shapes(kind, sizes).values()))
        terms = sums.terms(self.spec.digest, self._exchange, length, step.name)
        replies = self.ask(
            MaskedStep(step, sums, self.spec.digest),
            to,
            exactly=masked_sizes(terms),
            at_least=max(at_least, sums.least),
            **arguments,
        )
        clients, total = self._opened(terms, replies, step)
        return Summation(unflattened(kind, total, sizes), clients, sums.adders, sums.records)

    def _check_seen(self, step: Step[Any]) -> None:
        """Refuse a step whose reply shows the server something of records, in a run whose sums are masked.

        Raises:
            ValueError: it does.
        """
        if seen := next((f for f in step.reply.schema if f.protection != "public"), None):
            raise ValueError(
                f"the server sees the field '{seen.name}' of the step {step.name} of each client, so that masked sums "
                f"would hide nothing with {type(self.spec.method).__name__}; use --sums open"
            )

    def _opened(
        self, terms: Terms, replies: Replies[MaskedReply], step: Step[Any]
    ) -> tuple[list[int], NDArray[np.int64]]:
        """The clients in a masked sum, and their total.

        The set of clients is written down before a helper sees it: a resumed run shows the helpers no other.
        """
        place = {client: i for i, client in enumerate(replies.clients)}
        reading = self._folder.sums / f"{terms.exchange:06d}.json"
        fixed = self._folder.read_clients_of(reading) if reading.exists() else None
        clients = list(replies.clients) if fixed is None else [client for client in fixed if client in place]
        opening = Opening(terms, self._helpers, clients, lambda client: replies[place[client]])
        if fixed is None:
            refusals = [Refusal(c, step.name, self._round, reason) for c, reason in opening.refusals().items()]
            for refusal in refusals:
                self.journal.refuse_reply(terms.exchange, refusal)
                self._watcher.withdrawn(refusal)
            self._check_enough(terms.exchange, step, len(opening.uploads), len(clients), terms.least, refusals)
            files.write_json(reading, [upload.client for upload in opening.uploads])
        before = time.monotonic()
        total = opening.total()
        down, up = opening.helper_bytes
        facts = {"exchange": terms.exchange, "clients": len(opening.uploads), "bytes_to_a_helper": down,
                 "bytes_from_a_helper": up, "seconds": round(time.monotonic() - before, 3)}  # fmt: skip
        files.write_json(reading.with_suffix(".cost.json"), facts)
        return [upload.client for upload in opening.uploads], total

    def _asked(self, step: Step[Any], to: Sequence[int] | None) -> list[int]:
        """The numbers of the clients to ask, sorted.

        Raises:
            TypeError: ``step`` is no step, or ``to`` has other things than numbers of clients.
        """
        if not isinstance(step, Step):
            raise TypeError(f"fed.ask takes a step of the method, as self.update, not a {type(step).__name__}")
        numbers = list(self.clients) if to is None else list(to) if isinstance(to, Iterable) else [to]
        if wrong := [number for number in numbers if number not in self.clients]:
            raise TypeError(
                f"fed.ask(self.{step.name}, to=...) has {short(wrong[0])}, which is no number of a client (0 to "
                f"{len(self.clients) - 1}); give the step's arguments by name, as weights=..."
            )
        if to is not None and not isinstance(to, Iterable):
            raise TypeError(f"fed.ask(self.{step.name}, to={to}) needs a list of clients, as to=[{to}]")
        return sorted(numbers)

    def _receive(
        self,
        exchange: int,
        step: Step[Any],
        request: bytes,
        waiting: Sequence[int],
        checked: Callable[[Arrival], Checked],
        good: list[int],
        refusals: list[Refusal],
    ) -> dict[int, float]:
        """Send the request and journal what arrives, in ``good`` or ``refusals``; returns the sizes of the replies."""
        sizes = dict[int, float]()
        sent = partial(self.journal.count_sent, exchange, size=len(request))
        try:
            for arrival in self.transport.exchange(request, waiting, sent):
                reason, spent, sizes[arrival.client] = checked(arrival)
                refusal = None if reason is None else Refusal(arrival.client, step.name, self._round, reason)
                if spent:  # even if the reply is not used
                    self.journal.store_releases(exchange, arrival.client, spent)
                if refusal is None:
                    self.journal.store_reply(exchange, step.name, arrival.client, arrival.reply)
                    good.append(arrival.client)
                else:
                    self.journal.store_refusal(exchange, refusal, len(arrival.reply))
                    refusals.append(refusal)
                self._watcher.arrived(refusal)
                del arrival  # before the next is fetched
        finally:
            self.journal.flush()
        return sizes

    def _check_enough(
        self, exchange: int, step: Step[Any], good: int, asked: int, at_least: int, refusals: Sequence[Refusal]
    ) -> None:
        """Raise `TooFewReplies` unless enough of the clients that were asked gave a usable reply."""
        required = min(self.min_clients, asked)
        if good >= max(required, at_least):
            return
        self.journal.forget_refusals(exchange, step.name)  # a resumed run asks these clients again
        needed = f"{required} are needed (--min-clients)"
        if at_least > required:
            needed = f"the method needs {at_least}"
        why = "".join(f"; client {first.client}: {first.reason}" for first in refusals[:1])
        few = TooFewReplies(f"{good} of {asked} clients gave a usable reply to step '{step.name}', {needed}{why}")
        raise few from self.transport.failure

    def _find_lost_releases(self, exchange: int, step: Step[Any], clients: Sequence[int]) -> None:
        """Store the releases that stored replies list and the journal has lost."""
        if not any(field.is_released for field in step.reply.schema):
            return
        for client in clients:
            if not self.journal.has_releases(exchange, client):
                reply = self.journal.read_reply(exchange, step.name, client)
                _, header = wire.decode(reply, step.reply.schema, self.spec.facts)
                if spent := listed(header, step.name, exchange):
                    self.journal.store_releases(exchange, client, spent)

    def measure_scale(self) -> None:
        """Measure the scale of the columns before all other requests, which bring it, if the run has a private one.

        It is written down before it is used: a resumed run asks nobody again.
        """
        scale, folder = self.spec.scale, self._folder
        if scale is None:
            return
        step = scale_step(scale)
        if folder.scale.exists():
            self.asked_steps[step.name], self._exchange = step, 1
        else:
            steps = steps_of(self.spec.method).values()
            if self.masked and not any(own.sums for own in steps):
                for own in steps:  # before anything is released
                    self._check_seen(own)
            summed = self.sum(step, exactly={"measured": len(scale.columns)})
            folder.write_scale(measured(scale, summed, self.num_classes, self.delta)._asdict())
        told = folder.read_scale(len(scale.columns))
        found = Measured(told.mean, told.std, told.records, told.clear)
        self._header = found.header
        if not found.clear:
            self._watcher.noted(HIDDEN)
        made = found.normalisation(scale, self.spec.normalisation, self.like.shape[0])
        self.like, self._test = (rescaled(records, made) for records in (self.like, self._test))
        if self.public is not None:
            drawn = public_data.is_noise(str(self.spec.public))
            self.public = rescaled(self.public, made, drawn=drawn)
        self._confusion = LastConfusion(self._test)

    # ---------------------------------------------------------------------------------------------------------- budget

    @override
    def able(self, event: Event, *, adaptive: bool = False, unit: Unit = "record") -> list[int]:
        releases = self.journal.releases(before=self._exchange)
        return able_clients(self, self.spec.method, releases, event, self._exchange, adaptive, unit)

    @override
    def spent(self, unit: Unit = "record") -> float | None:
        return largest_epsilon(self, self.journal.releases(before=self._exchange), unit)

    # ---------------------------------------------------------------------------------------------------------- rounds

    @override
    def rounds(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[Round]:
        if number >= EVALUATIONS:  # from there on, requests are evaluations
            raise ValueError(f"rounds is {number}; it must be below {EVALUATIONS:,}")
        self.num_rounds, first = number, self._exchange  # a resumed run reads replies to earlier requests again
        self.done = self._restore(carry)
        self._folder.drop_metrics_after(self.done)
        if self.done:
            self._watcher.resumed(self.done, number)
        for index in range(self.done + 1, number + 1):
            self._round, self._loops = index, 0
            yield Round(number=index, log=partial(self._log, index))
            reply_checks.check_finite(index, carry, self._sizes)
            last = LastRound(index, self._exchange, [*self.asked_steps], self._last_evaluation)
            save_round(self.journal, carry, last, self._folder.metrics)
            self.done = index
            if not self._keep_replies and index < number:
                self.journal.forget_replies(first, self._exchange)
        self._round = None

    def _restore(self, carry: Carried) -> int:
        """Continue after the last finished round; returns its number."""
        last = load_round(self.journal, carry, self._folder.metrics)
        if last is None:
            return 0
        self._exchange = last.exchange
        self.journal.check_answered(self.min_clients, before=last.exchange)
        self._last_evaluation = last.evaluation or self._last_evaluation
        steps = steps_of(self.spec.method, self.spec.scale)
        self.asked_steps |= {name: steps[name] for name in last.steps}
        return last.number

    @override
    def epochs(self, number: int, *carry: nn.Module | dict[str, Tensor]) -> Iterator[int]:
        self._loops += 1
        at = {"exchange": self._exchange, "round": self._round, "epochs": number, "loop": self._loops}
        return epochs(self.journal, number, carry, at)

    def last(self, model: nn.Module) -> EvaluationResult:
        """Evaluate the final model, and log its accuracy if the method has logged nothing."""
        result = self.evaluate_model(model)
        if not self._folder.metrics.exists():
            self._log(self.done, accuracy=result.accuracy)
        return result

    def _log(self, index: int, **numbers: float | None) -> None:
        values = {name: value for name, value in numbers.items() if value is not None}
        spread = None if self._last_evaluation is None else self._last_evaluation[2].spread
        if "accuracy" in values and spread is not None:
            values["spread_over_clients"] = spread
        values |= {name: value for name, value in self._errors.items() if value is not None}
        self._errors = {}
        journal = self.journal
        totals = {"bytes_up": journal.bytes_up, "bytes_down": journal.bytes_down, "seconds": journal.seconds}
        loss = self._confusion.losses.get(values.get("accuracy", math.nan), math.nan)
        self._confusion.forget()
        more = {"log_loss": loss} if math.isfinite(loss) else {}
        self._folder.append_metrics({"round": index, **values, **more, **totals})
        self._watcher.logged(index, self.num_rounds, values)

    # ------------------------------------------------------------------------------------------ models and evaluation

    @property
    def task(self) -> dict[str, Any]:
        """The fields that the final model's file needs, with the scale that was measured."""
        own = self.like.normalisation if self._header else self.spec.normalisation
        return {**self.spec.task, "mean": list(own.mean), "std": list(own.std)}

    def guarantee(self) -> Guarantee:
        """The guarantee for all replies so far."""
        return guarantee_of(self.asked_steps.values(), self.journal.releases(), self.spec)

    @override
    def new_model(self, *, draw: int = 0, architecture: str | None = None) -> nn.Module:
        return self.spec.new_model(draw=draw, architecture=architecture, device=self.device)

    @override
    def rng(self, *use: str | int) -> torch.Generator:
        return seeds.stream(self.spec.seed, "server", *use)

    @override
    def evaluate(self, model: nn.Module) -> float | None:
        return self.evaluate_model(model).accuracy if self._evaluates_now else None

    @override
    def evaluate_each(self, networks: nn.Module) -> list[float] | None:
        return accuracies(networks, self._test) if self._evaluate_uploads and self._evaluates_now else None

    @property
    def _evaluates_now(self) -> bool:
        return self._round is None or not self._round % self._evaluate_every or self._round == self.num_rounds

    def evaluate_model(self, model: nn.Module) -> EvaluationResult:
        """Evaluate ``model``, or reuse the last result if it is of the same model with the same weights.

        Where clients evaluate, a request since then forbids that: it may change their states, and with them their own
        models.
        """
        if self.spec.target is not None:
            found = numbers(model, self._test, self.spec.target)
            self._errors = found.measures()
            return EvaluationResult(torch.zeros(1, 1, dtype=torch.int64), numbers=found, unpredicted=found.unpredicted)
        if not self._local_test:
            return EvaluationResult(self._confusion(model).cpu(), unpredicted=self._confusion.unpredicted)
        shared = shared_part(self.spec.method, model)
        digest = hashlib.sha256(wire.pack(shared, {})).hexdigest()
        last, last_digest, result = self._last_evaluation or (0, "", None)
        if result is None or last_digest != digest or last % EVALUATIONS != self._exchange:
            number = EVALUATIONS + (last if last and last % EVALUATIONS == self._exchange else self._exchange)
            replies = self._ask(number, EVALUATE, None, {"shared": shared})
            tables = zip(replies.clients, (reply.confusion for reply in replies), strict=True)
            result = EvaluationResult.of_clients(tables, self.num_classes)
            self._last_evaluation = number, digest, result
        return result

    @override
    def progress(self, label: str) -> Callable[[int, int], None]:
        return partial(self._watcher.progressed, label)

    @override
    def show(self, name: str, images: Records) -> None:
        if not images.are_vectors:
            self._folder.write_images(name, images)


def added_up(kind: type[R], replies: Iterable[R]) -> R:
    """The total of replies of this kind that the server sees, of which one is in memory at a time."""
    totals: dict[str, Tensor] = {}
    for reply in replies:
        for name, value in reply.payload().items():
            wide = value.to(torch.float64 if value.is_floating_point() else torch.int64)
            if name in totals:
                totals[name] += wide
            else:
                totals[name] = wide.clone()
    return kind.from_payload(totals)
