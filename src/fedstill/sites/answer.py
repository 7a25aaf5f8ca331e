"""A real site's reply to a request, within the site's policy, and its log of replies and refusals."""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

from filelock import FileLock

from fedstill import schema, wire
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.site import NO_REPLY, Question, Site
from fedstill.privacy.ledger import BudgetExceeded, Ledger
from fedstill.sites import decisions, log, refusals, sent
from fedstill.sites.consent import kind_of
from fedstill.sites.ledger import Charge, SiteStore, open_ledger
from fedstill.sites.policy import SitePolicy
from fedstill.sites.questions import Questions
from fedstill.sites.site_data import SiteData

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
        decisions.check_approval(policy, self._run, self._text, step)  # before anything is loaded for the run
        folder = policy.state / "runs" / self._run
        data = SiteData(policy, spec, folder)
        data.check_backbone()
        site = Site(
            spec,
            data,
            folder,
            device=policy.device,
            threads=policy.threads,
            open_ledger=lambda _: _open_ledger(policy, spec, self._run, self._charged),
        )
        question = site.read(self._request, header)
        questions = Questions(policy, self._run, self._text)
        questions.ask()
        try:
            data.check_public()
        except schema.Refused:
            questions.end()
            raise
        return site, data, question, questions

    def _charged(self, charge: Charge, store: SiteStore) -> None:
        """Log a charge, before the release."""
        self._charges.append(charge.number)
        log.charged(self._policy, self._facts, charge, store)

    def _refusal(self, error: Exception, **header: object) -> bytes:
        reason = schema.clean(str(error), 500)
        reply = wire.pack({}, {"error": f"refused by the site: {reason}", **header})
        cause = error.__cause__  # for the site's operator alone
        own = "" if cause is None else f" ({schema.clean(str(cause), 200)})"
        self._note("waiting" if isinstance(error, decisions.Waiting) else "refused", reason + own, reply)
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
