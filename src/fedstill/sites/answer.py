"""A real site's reply to a request, within the site's policy, and its log of replies and refusals."""

import hashlib
import json
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from filelock import FileLock

from fedstill import schema, wire
from fedstill.data import features, public, sources
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.site import NO_REPLY, Question, Site
from fedstill.models import pretrained
from fedstill.privacy.ledger import BudgetExceeded, Ledger
from fedstill.records import Records
from fedstill.sites import decisions, log, refusals, sent
from fedstill.sites.consent import kind_of
from fedstill.sites.ledger import Charge, SiteStore, open_ledger
from fedstill.sites.policy import SitePolicy
from fedstill.sites.questions import Questions

_LONGEST = 2000
"""Number of characters of a run's settings in a line of the log; the spec of an accepted run is stored as a whole."""


def answer(policy: SitePolicy, text: str, request: bytes) -> bytes:
    """The reply to ``request``, or an error message.

    A refusal that follows from the request, the policy and the ledger says why. Whatever else goes wrong may depend on
    the records, so the server gets the constant `NO_REPLY`, and the reason stays in the site's log.

    Args:
        policy: the site's policy.
        text: the run's spec, from `RunSpec.text`.
        request: the request's bytes.

    Raises:
        Damaged: the log was changed; nothing is answered then.
        OSError: the log can't be written.
    """
    return _Answer(policy, text, request).reply()


class _Answer:
    """One question: ``facts`` grow with what is known of it, and stand in each of its lines in the log."""

    def __init__(self, policy: SitePolicy, text: str, request: bytes) -> None:
        self._policy, self._text, self._request = policy, text, request
        self._charges: list[int] = []
        self._facts: dict[str, Any] = {
            "request": _digest(request),
            "bytes": len(request),
            "spec": _digest(text.encode(errors="replace")),
            "process": os.getpid(),
            "policy": _digest(policy.model_dump_json().encode())[:16],
        }

    def reply(self) -> bytes:
        if refusals.is_full(self._policy):  # without a line: the server could fill the disk
            return wire.pack({}, {"error": "refused by the site: too many messages were refused today; ask tomorrow"})
        try:
            spec, header = self._read()
            site, data, question, questions = self._accept(spec, header)
        except schema.Refused as error:
            return self._refusal(error)
        except Exception as error:
            return self._failure(error)
        try:
            data.check()
            # one question of a run at a time: the same one, asked twice at once, must not be released twice
            with FileLock(site.folder / "answer.lock", timeout=self._policy.max_seconds):
                reply = site.reply(self._policy.client, question)
            sent.keep(self._policy, self._run, self._request, reply)
        except BudgetExceeded as error:  # depends on the requests alone, like the ledger
            questions.end()
            return self._refusal(error, **site.spent(self._policy.client, question.exchange))
        except Exception as error:
            return self._failure(error)
        questions.end()
        self._note(
            "answered", f"{len(reply):,} bytes", reply, fields={f.name: kind_of(f) for f in question.step.reply.schema}
        )
        return reply

    def _read(self) -> tuple[RunSpec, dict[str, Any]]:
        """The spec and the request's header; whatever they are, the log has a line that they arrived."""
        facts = self._facts
        try:
            spec = RunSpec.read(self._text)
            self._run = f"{spec.run}-{facts['spec'][:16]}"  # another spec may split the records differently
            settings = schema.clean(json.dumps(spec.settings), _LONGEST)
            facts |= {"run": self._run, "method": spec.name, "model": spec.model, "settings": settings}
            facts["simulated_noise"] = spec.simulated_noise
            header = wire.envelope(self._request)
            exchange = header.get("exchange")
            facts["step"] = schema.clean(str(header.get("step")))
            facts["exchange"] = exchange if type(exchange) is int else schema.short(exchange)
        finally:
            self._note("asked", f"{len(self._request):,} bytes")
        return spec, header

    def _accept(self, spec: RunSpec, header: dict[str, Any]) -> "tuple[Site, SiteData, Question, Questions]":
        policy, step = self._policy, str(header.get("step"))
        decisions.check_pause(policy)
        policy.check_run(spec, header.get("step"))
        policy.check_fields(spec.method, step)
        data = SiteData(policy, spec)
        data.check_backbone()
        site = Site(
            spec,
            data,
            policy.state / "runs" / self._run,
            device=policy.device,
            threads=policy.threads,
            open_ledger=lambda _: _open_ledger(policy, spec, self._run, self._charged),
        )
        question = site.read(self._request, header)
        decisions.check_approval(policy, self._run, self._text, step)
        data.check_public()
        questions = Questions(policy, self._run, self._text)
        questions.ask()
        return site, data, question, questions

    def _charged(self, charge: Charge, store: SiteStore) -> None:
        """Log a charge, before the release."""
        self._charges.append(charge.number)
        log.charged(self._policy, self._facts, charge, store)

    def _refusal(self, error: Exception, **header: object) -> bytes:
        reason = schema.clean(str(error), 500)
        reply = wire.pack({}, {"error": f"refused by the site: {reason}", **header})
        self._note("waiting" if isinstance(error, decisions.Waiting) else "refused", reason, reply)
        return reply

    def _failure(self, error: Exception) -> bytes:
        self._note("failed", error, NO_REPLY)
        return NO_REPLY

    def _note(self, what: str, detail: str | Exception, reply: bytes | None = None, **more: Any) -> None:
        if reply is not None:
            more |= {"reply": _digest(reply), "reply_bytes": len(reply), "charges": self._charges}
        log.write(self._policy, self._facts, what, detail, **more)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _open_ledger(policy: SitePolicy, spec: RunSpec, run: str, charged: Callable[[Charge, SiteStore], None]) -> Ledger:
    return open_ledger(
        policy.ledger,
        run,
        delta=policy.delta,
        budget=policy.budget,
        allow_unbounded=policy.unprotected and policy.budget is None,
        public_images=policy.public_images or policy.unprotected,
        budget_per_run=policy.budget_per_run,
        run_limit=None if spec.budget is None else (spec.budget, spec.delta),
        charged=charged,
    )


class SiteData:
    """The site's records in the form of the run's task (a `fedstill.engines.client.ClientData`), read when used."""

    def __init__(self, policy: SitePolicy, spec: RunSpec) -> None:
        self._policy = policy
        self._spec = spec

    def check_backbone(self) -> None:
        """Compare the site's backbone with the run's, whatever the records are.

        Raises:
            Refused: the site can't load it, or it has another SHA-256.
        """
        name, expected = self._spec.features, self._spec.backbone
        if name is None or name.startswith(features.OF_SHAPE):
            return
        try:
            digest = pretrained.load(name, (), download=False).digest
        except ValueError as error:
            raise schema.Refused(f"the site can't load the backbone '{name}' (features)") from error
        if digest != expected:
            raise schema.Refused(
                f"the site's backbone '{name}' has the SHA-256 {digest[:16]}..., the run's {str(expected)[:16]}..."
            )

    def check_public(self) -> None:
        """Compare the public records with those that the server describes.

        Raises:
            Refused: the site can't load them, or they are others.
        """
        stated, name = self._spec.public_sample, schema.clean(str(self._spec.public))
        if stated is None:
            return
        try:
            found = self.public()
        except ValueError as error:
            raise schema.Refused(f"the site can't load its public data '{name}' (public)") from error
        if found is not None and (words := public.difference(found, dict(stated))):
            raise schema.Refused(f"the site's public data '{name}' {words}; both need the same in one order (public)")

    def check(self) -> None:
        """Read the records.

        Raises:
            Refused: they do not fit the run's task, or they are too few.
        """
        if len(self.own[0]) < self._policy.min_records:
            raise schema.Refused(
                f"the site has {len(self.own[0])} records; its minimum is {self._policy.min_records} (min_records)"
            )

    @cached_property
    def own(self) -> tuple[Records, Records]:
        """Training and test records.

        Raises:
            Refused: the records do not fit the run's task.
        """
        policy, spec = self._policy, self._spec
        place, cache_dir = str(policy.data), policy.state / "data"
        if spec.features is None:
            part = sources.load_part(place, size=policy.size, cache_dir=cache_dir)
        else:
            part = features.load_part(
                place,
                spec.features,
                str(spec.backbone),
                size=policy.size,
                device=policy.device,
                cache_dir=cache_dir,
            )
        places = {name: i for i, name in enumerate(spec.class_names)}
        names = part.class_names or spec.class_names
        if unknown := [name for name in names if name not in places]:
            raise schema.Refused(f"the site's class '{unknown[0]}' is not a class of the run")
        table = torch.tensor([places[name] for name in names])
        return self._in_task(*part.train, table), self._in_task(*part.test, table)

    def _in_task(self, images: torch.Tensor, labels: torch.Tensor, table: torch.Tensor) -> Records:
        spec = self._spec
        if tuple(images.shape[1:]) != spec.shape:
            site_shape, run_shape = (" x ".join(map(str, shape)) for shape in (images.shape[1:], spec.shape))
            kind = "vectors" if images.ndim == 2 else "images"
            raise schema.Refused(f"the site's {kind} are {site_shape}, the run's are {run_shape}")
        if len(labels) and int(labels.max()) >= len(table):
            raise schema.Refused(f"the site has the class {int(labels.max())}; the run has {len(table)} classes")
        return Records(images, table[labels], spec.num_classes, spec.normalisation)

    def records(self, client: int) -> tuple[Records, Records]:
        """The site's own records, whatever the number."""
        return self.own

    def public(self) -> Records | None:
        """The public records, from the place that the policy names."""
        return self._public

    @cached_property
    def _public(self) -> Records | None:
        spec = self._spec.public
        if spec is None:
            return None
        name, colon, rest = spec.partition(":")
        if name in self._policy.public:
            spec = f"{self._policy.public[name]}{colon}{rest}"
        size = self._policy.size
        if self._spec.features is not None:
            found = (self._spec.features, str(self._spec.backbone))
            like = Records(
                torch.empty(0, *self._spec.shape), torch.empty(0, dtype=torch.int64), 1, self._spec.normalisation
            )
            return features.load_public(spec, found, like, size=size, device=self._policy.device)
        return public.load(spec, self._spec.shape, self._spec.normalisation, size=size)
