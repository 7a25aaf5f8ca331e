"""A real site's answer to a request, within the site's policy and with a log of answers and refusals."""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from functools import cached_property, partial

import torch

from fedstill import files, schema, wire
from fedstill.data import public, sources
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.site import Site
from fedstill.privacy.ledger import Ledger
from fedstill.records import Records
from fedstill.sites.ledger import open_ledger
from fedstill.sites.policy import SitePolicy

log = logging.getLogger("fedstill")


def answer(policy: SitePolicy, text: str, request: bytes) -> bytes:
    """The reply to ``request``, or a message that says why there is none; never raises.

    The error of a step stays in the site's log: the server only learns that the step failed.

    Args:
        policy: the site's own.
        text: the run's spec, as `RunSpec.text` gives it.
        request: the request's bytes.
    """
    facts: dict[str, str] = {}
    note = partial(_log, policy, facts)
    try:
        return _answer(policy, text, request, facts, note)
    except schema.Refused as error:
        note("refused", str(error))
        return wire.pack({}, {"error": f"refused by the site: {error}"})
    except Exception as error:
        note("failed", error)
        return wire.pack({}, {"error": "the site can't answer; its log says why"})


def _answer(
    policy: SitePolicy, text: str, request: bytes, facts: dict[str, str], note: Callable[[str, str | Exception], None]
) -> bytes:
    spec = RunSpec.read(text)
    header = wire.envelope(request)
    step = header.get("step")
    facts |= {"run": spec.run, "method": spec.name, "step": schema.clean(str(step)), "model": spec.model}
    policy.check_run(spec, step)
    policy.check_fields(spec.method, str(step))
    data = SiteData(policy, spec)
    if len(data.own[0]) < policy.min_records:
        raise schema.Refused(f"the site answers with {policy.min_records} records or more (min_records)")
    # another spec makes another run, whatever number the server gives it: its parts of the records may differ
    run = f"{spec.run}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    site = Site(
        spec,
        data,
        policy.state / "runs" / run,
        device=policy.device,
        threads=policy.threads,
        open_ledger=lambda _: _open_ledger(policy, spec, run),
        on_error=partial(note, "failed"),
    )
    reply, ok = site.try_answer(policy.client, request, header)
    if ok:
        note("answered", f"{len(reply)} bytes")
    return reply


def _open_ledger(policy: SitePolicy, spec: RunSpec, run: str) -> Ledger:
    return open_ledger(
        policy.ledger,
        run,
        delta=policy.delta,
        budget=policy.budget,
        allow_unbounded=policy.unprotected and policy.budget is None,
        run_limit=None if spec.budget is None else (spec.budget, spec.delta),
    )


def _log(policy: SitePolicy, facts: dict[str, str], what: str, detail: str | Exception) -> None:
    text = f"{type(detail).__name__}: {detail}" if isinstance(detail, Exception) else detail
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "what": what, **facts, "detail": text}
    log.info("%s", json.dumps(line))
    policy.state.mkdir(parents=True, exist_ok=True)
    files.append_json(policy.state / "log.jsonl", line)


class SiteData:
    """The site's records, in the form of the run's task (a `fedstill.engines.client.ClientData`)."""

    def __init__(self, policy: SitePolicy, spec: RunSpec) -> None:
        """Read nothing yet."""
        self._policy = policy
        self._spec = spec

    @cached_property
    def own(self) -> tuple[Records, Records]:
        """Train and test records.

        Raises:
            Refused: the records do not fit the run's task.
        """
        part, spec = sources.load_part(str(self._policy.data)), self._spec
        places = {name: i for i, name in enumerate(spec.class_names)}
        names = part.class_names or spec.class_names
        if unknown := [name for name in names if name not in places]:
            raise schema.Refused(f"the site's class '{unknown[0]}' is not one of the run's")
        table = torch.tensor([places[name] for name in names])
        return self._in_task(*part.train, table), self._in_task(*part.test, table)

    def _in_task(self, images: torch.Tensor, labels: torch.Tensor, table: torch.Tensor) -> Records:
        spec = self._spec
        if tuple(images.shape[1:]) != spec.shape:
            here, there = (" x ".join(map(str, shape)) for shape in (images.shape[1:], spec.shape))
            raise schema.Refused(f"the site's images are {here}, the run's {there}")
        if len(labels) and int(labels.max()) >= len(table):
            raise schema.Refused(f"the site has the class {int(labels.max())}; the run has {len(table)} classes")
        return Records(images, table[labels], spec.num_classes, spec.normalisation)

    def records(self, client: int) -> tuple[Records, Records]:
        """The site's own records, for any number."""
        return self.own

    def public(self) -> Records | None:
        """The public records, from the place that the policy gives them.

        Raises:
            Refused: the policy gives no place.
        """
        spec = self._spec.public
        if spec is None:
            return None
        name, colon, rest = spec.partition(":")
        if name.split("=")[0] != "noise":
            if name not in self._policy.public:
                raise schema.Refused(f"the site has no public data '{schema.clean(name)}' (public)")
            spec = f"{self._policy.public[name]}{colon}{rest}"
        return public.load(spec, self._spec.shape, self._spec.normalisation)
