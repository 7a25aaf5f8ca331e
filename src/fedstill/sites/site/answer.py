"""A real site's reply to a request, within the site's policy, and its log of replies and refusals.

Releases are stored with the run's state anyway, since a repeated question gets the same reply. Other replies are copied
to ``state/sent`` for the policy's number of days.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from PIL import Image
from torch import Tensor

from fedstill import schema
from fedstill.base import files
from fedstill.base.errors import FedstillError
from fedstill.engines.client import NO_REPLY, Question, Site
from fedstill.engines.helper_calls import MARK
from fedstill.engines.run_spec import RunSpec
from fedstill.privacy.ledger import BudgetExceeded, Charge
from fedstill.protocol import wire
from fedstill.runs.environment import now
from fedstill.sites.site import decisions, log, site_sums
from fedstill.sites.site.charges import Limits, SiteStore, costs_of, open_site_ledger
from fedstill.sites.site.checkpoint import DAY
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_data import SiteData
from fedstill.sites.site.site_journal import SiteJournal
from fedstill.sites.site.state_format import check_newest

SPEC, LOCK = "spec.json", "answer.lock"
"""Names, in the folder of a run, of the file with the spec and of the lock of its steps."""


class FailedTooOften(FedstillError, RuntimeError):
    """The run has used up its failures; the site answers it no more."""


def accept(policy: SitePolicy, run: str, text: str, question: int) -> None:
    """Count a question, in the journal, before its step: so a step that kills its process is a failure too.

    Args:
        policy: the site's policy, which has the limits.
        run: the run's name at this site.
        text: the run's spec, which is stored with the first question.
        question: number of the question's first line.

    Raises:
        Refused: the site answers no more questions of this run, or of all, or begins no more runs today; each follows
            from the questions alone.
        FailedTooOften: too many questions of this run have failed.
        Damaged: the journal was changed, or the state is an older copy.
    """
    journal, place = SiteJournal(policy.state), policy.state / "runs" / run / SPEC
    check_newest(policy.state)
    with journal.lock:
        at, moment = journal.standing().at, time.time()
        own = at.runs.get(run)
        if own is None:
            if (place.parent / LOCK).exists():
                raise schema.Refused("the run has asked nothing for 30 days and is over here; start another run")
            today = sum(each.begun is not None and moment - DAY < each.begun <= moment for each in at.runs.values())
            if today >= policy.runs_per_day:  # a clock that was once ahead blocks nothing
                raise schema.Refused(f"the site has begun {today} runs in the last day, its limit (runs_per_day)")
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_bytes(place, text.encode())
        elif not place.exists():
            raise schema.Refused("the site has lost the state of this run; start another run")
        elif place.read_bytes() != text.encode():
            raise schema.Refused("another run with other settings has this run's name here; start another run")
        elif own.accepted >= policy.max_questions:
            raise schema.Refused(
                f"the run has asked {own.accepted} questions; the site's limit is that (max_questions)"
            )
        elif own.failed >= policy.max_failures:
            raise FailedTooOften(
                f"{own.failed} questions of the run failed or went beyond the budget, the site's limit (max_failures)"
            )
        if at.failed >= policy.max_failures_ever:
            what = f"{at.failed} questions have failed at the site or went beyond its budget"
            raise schema.Refused(f"{what}, its limit (max_failures_ever)")
        check_size(policy)
        facts = {"run": run, "spec": _digest(text.encode()), "question": question, "at": moment}
        journal.append({"time": now(), "what": "accepted", **facts, "detail": ""})


def check_size(policy: SitePolicy) -> None:
    """Raise Refused if the site's state is too large."""
    if (size := size_of(policy.state)) >= policy.state_gb * _GB:
        raise schema.Refused(f"the site's state has {size / _GB:.3g} GB, its limit (state_gb)")


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a file of a question that ends meanwhile
                total += os.lstat(os.path.join(place, name)).st_size
    return total


_GB = 10**9
_FIRST = 6
"""Number of values of a tensor in words."""


class Sent(NamedTuple):
    """A reply: its tensors by field, and its other values."""

    tensors: dict[str, Tensor]
    header: dict[str, Any]


def keep(policy: SitePolicy, run: str, request: bytes, reply: bytes) -> None:
    """Copy a reply, unless the run's state has it, and delete copies that are too old or too many."""
    folder = policy.state / "sent"
    if policy.keep_sent_days and len(reply) <= policy.keep_sent_gb * _GB:
        digest = hashlib.sha256(reply).hexdigest()
        if not any(_released(policy.state / "runs" / run, hashlib.sha256(request).hexdigest())):
            files.write_bytes(folder / f"{digest}.reply", reply)
    room = policy.keep_sent_gb * _GB
    oldest = time.time() - policy.keep_sent_days * DAY
    copies = list[tuple[float, int, Path]]()
    for place in folder.glob("*.reply"):
        with suppress(FileNotFoundError):  # another process has deleted it
            copies.append(((found := place.stat()).st_mtime, found.st_size, place))
    for written, size, place in sorted(copies, reverse=True):
        room -= size
        if written < oldest or room < 0:
            place.unlink(missing_ok=True)


def read(state: Path, line: Mapping[str, Any]) -> Sent:
    """The reply that a line ``answered`` of the log tells of.

    Raises:
        ValueError: the line tells of no reply, or its copy was deleted or changed.
    """
    if line.get("what") != "answered" or "reply" not in line:
        raise ValueError(f"entry {line.get('n')} is '{line.get('what')}': no field of a reply left the site then")
    places = [state / "sent" / f"{line['reply']}.reply"]
    for place in places:
        if place.exists() and hashlib.sha256(data := place.read_bytes()).hexdigest() == line["reply"]:
            return Sent(*wire.unpack(data))
    for place in _released(state / "runs" / str(line["run"]), str(line["request"])):
        data = bytes(files.read_checked(place, "the copy can't be shown"))
        if hashlib.sha256(data).hexdigest() == line["reply"]:
            return Sent(*wire.unpack(data))
    raise ValueError(
        f"the site has no copy of reply {line['reply'][:16]} of entry {line.get('n')} any more; the policy keeps "
        "unprotected replies for a number of days (keep_sent_days, keep_sent_gb)"
    )


def _released(run: Path, request: str) -> list[Path]:
    return sorted(run.glob(f"*/*-{request[:16]}.given"))


def described(reply: Sent) -> dict[str, Any]:
    """A reply in words: the type, the shape and some values of each tensor, and the other values."""
    found = {}
    for name, value in reply.tensors.items():
        wide = value.reshape(-1).to(torch.float64)
        span = f"{float(wide.min()):.6g} to {float(wide.max()):.6g}, mean {float(wide.mean()):.6g}" if len(wide) else ""
        first = ", ".join(f"{number:.6g}" for number in wide[:_FIRST].tolist())
        words = first if len(wide) <= _FIRST else f"{span}: {first}, ..."
        shape = " x ".join(map(str, value.shape)) or "1"
        found[name] = {"type": str(value.dtype).removeprefix("torch."), "shape": shape, "values": words}
    for name, value in reply.header.get("fields", {}).items():
        found[name] = {"type": type(value).__name__, "shape": "", "values": schema.short(value)}
    return {"values": found, "header": {name: value for name, value in reply.header.items() if name != "fields"}}


def write(reply: Sent, folder: Path) -> list[Path]:
    """Write each tensor as ``NAME.npy``, and images ``(n, c, h, w)`` with 1 or 3 channels as ``NAME.png`` too."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    places = []
    for name, value in reply.tensors.items():
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
        places.append(folder / f"{plain}.npy")
        array = value.to(torch.float32) if value.dtype == torch.bfloat16 else value
        np.save(places[-1], array.numpy(), allow_pickle=False)
        if value.ndim == 4 and value.shape[1] in (1, 3) and len(value):
            places.append(folder / f"{plain}.png")
            _sheet(value).save(places[-1])
    return places


def _sheet(images: Tensor) -> Image.Image:
    """Images ``(n, c, h, w)`` in rows, from the smallest value (black) to the largest (white)."""
    many, channels, height, width = images.shape
    across = math.ceil(math.sqrt(many))
    low, high = float(images.min()), float(images.max())
    grey = (images.to(torch.float64) - low) * (255 / max(high - low, 1e-12))
    sheet = torch.zeros(-(-many // across) * across, channels, height, width, dtype=torch.uint8)
    sheet[:many] = grey.round().to(torch.uint8)
    rows = sheet.reshape(-1, across, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = rows.reshape(-1, across * width, channels).numpy()
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


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
        if log.is_full(self._policy):  # without a line: the server could fill the disk
            return wire.pack({}, {"error": "refused by the site: too many messages were refused today; ask tomorrow"})
        try:
            spec, header = self._read()
            if MARK in header:
                return self._help(spec, header)
            site, data, question = self._accept(spec, header)
        except schema.Refused as error:
            return self._refusal(error)
        except Exception as error:
            return self._failure(error)
        try:
            data.check()
            # one question of a run at a time: the same one, asked twice at once, must not be released twice
            with FileLock(site.folder / LOCK, timeout=self._policy.max_seconds):
                reply = site.reply(self._policy.client, question)
            keep(self._policy, self._run, self._request, reply)
        except BudgetExceeded as error:  # depends on the requests alone, like the ledger
            self._facts["beyond"] = True  # but whether the step failed before depends on the records
            return self._refusal(error, **site.spent(self._policy.client, question.exchange))
        except Exception as error:
            return self._failure(error)
        self._note(
            "answered",
            f"{len(reply):,} bytes",
            reply,
            fields={f.name: f.protection for f in question.step.reply.schema},
        )
        return reply

    def _read(self) -> tuple[RunSpec, dict[str, Any]]:
        """The spec and the request's header; whatever they are, the log has a line that they arrived."""
        facts, spec = self._facts, None
        try:
            spec = RunSpec.read(self._text)
            self._run = f"{spec.run}-{facts['spec'][:16]}"  # another spec may split the records differently
            facts |= {"run": self._run, "method": spec.name, "model": spec.model}
            facts["simulated_noise"] = spec.simulated_noise
            header = wire.envelope(self._request)
            exchange = header.get("exchange")
            facts["step"] = schema.clean(str(header.get("step")))
            facts["exchange"] = exchange if type(exchange) is int else schema.short(exchange)
        finally:
            settings = {} if spec is None else {"settings": schema.clean(json.dumps(spec.settings), _LONGEST)}
            number = log.write(self._policy, {**facts, **settings}, "asked", f"{len(self._request):,} bytes")
            facts["question"] = number
        return spec, header

    def _help(self, spec: RunSpec, header: dict[str, Any]) -> bytes:
        """The reply of a helper of masked sums, which knows nothing of records."""
        decisions.check_pause(self._policy)
        check_size(self._policy)
        reply = site_sums.answer(self._policy, spec, self._request, header)
        self._note("answered", f"as a helper: {schema.clean(str(header[MARK]))}", reply, fields={})
        return reply

    def _accept(self, spec: RunSpec, header: dict[str, Any]) -> "tuple[Site, SiteData, Question]":
        policy, step = self._policy, str(header.get("step"))
        decisions.check_pause(policy)
        policy.check_run(spec, header.get("step"))
        policy.check_fields(spec.method, step, spec.scale)
        site_sums.check(policy, spec)
        decisions.check_approval(policy, self._run, self._text, step)  # before anything is loaded for the run
        folder, limits = policy.state / "runs" / self._run, policy.limits(spec)
        data = SiteData(policy, spec, folder)
        data.check_backbone()
        data.check_schema()
        site = Site(
            spec,
            data,
            folder,
            device=policy.device,
            threads=policy.threads,
            open_ledger=lambda _: open_site_ledger(policy.state, self._run, limits, partial(self._charged, limits)),
            sign=lambda text: site_sums.keys_of(policy.state).sign(text),  # open sums need no keys
        )
        question = site.read(self._request, header)
        accept(policy, self._run, self._text, self._facts["question"])
        data.check_public()
        return site, data, question

    def _charged(self, limits: Limits, charge: Charge, store: SiteStore) -> dict[str, Any]:
        """The facts of the line of a charge, which is written before the release."""
        self._charges.append(store.size + 1)
        return {**self._facts, **costs_of(charge, store, limits)}

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
