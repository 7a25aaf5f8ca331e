"""What a real site answers: its own policy file decides, not the server."""

import hashlib
import json
import logging
import time
import tomllib
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from fedstill import files, methods, models, schema, wire
from fedstill.data import public, sources
from fedstill.engines.agreement import Agreement
from fedstill.engines.client_evaluation import steps_of
from fedstill.engines.site import Site
from fedstill.engines.terms import Terms
from fedstill.privacy.ledger import Ledger
from fedstill.records import Records
from fedstill.settings import Settings
from fedstill.sites.ledger import open_ledger

log = logging.getLogger("fedstill")


class Policy(Settings):
    """A site's policy: a TOML file with these settings. What it doesn't allow is refused."""

    client: NonNegativeInt
    """The site's number in every run, from 0; the server's list of sites says who has which."""
    data: Path
    """The site's records: a folder of images or of parquet files, or an .npz file. No server ever names it."""
    state: Path
    """A folder of the site's own for its ledger, its log and what runs keep between steps."""
    methods: tuple[str, ...]
    """What it answers: "METHOD" for all steps of a method, "METHOD.STEP" for one."""
    budget: PositiveFloat | None = None
    """The largest epsilon, of each unit, that all releases of all runs may come to; None releases nothing."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Where that epsilon is stated, and the largest delta that a run may calibrate its noise for."""
    unprotected: bool = False
    """Whether fields may leave that no mechanism protects (models, images); the log lists them."""
    min_records: PositiveInt = 50
    """Answer nothing with fewer records."""
    public: dict[str, Path] = {}
    """Where public data sets are here, by the names that runs use; made-up ones (noise) need no entry."""
    simulated_noise: bool = False
    """Whether the server may choose the seed of the noise. It can subtract such noise: for tests only."""
    own_code: bool = False
    """Whether a run may name methods and models of packages installed here, beside those of fedstill."""
    device: str = "cpu"
    """Where steps compute."""
    threads: Annotated[int, Ge(1), Le(256)] = 1
    """Threads that a step may use."""

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """Read the file; paths in it are taken from its folder.

        Raises:
            ValueError: it can't be read or a setting is wrong, in one sentence.
        """
        try:
            found = cls(**tomllib.loads(path.read_text()))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"the policy {str(path)!r} can't be read as TOML: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"the policy {str(path)!r} is wrong at '{where}': {first['msg']}") from error
        here = path.resolve().parent
        return found.model_copy(
            update={
                "data": here / found.data.expanduser(),
                "state": here / found.state.expanduser(),
                "public": {name: here / place.expanduser() for name, place in found.public.items()},
            }
        )


class PolicySite:
    """A site that answers requests within its policy, and keeps a log of what it answered and refused."""

    def __init__(self, policy: Policy) -> None:
        """``policy`` is the site's own."""
        self.policy = policy

    @property
    def ledger(self) -> Path:
        """The folder of the ledger; made once, by `create_ledger`."""
        return self.policy.state / "ledger"

    def answer(self, terms: str, request: bytes) -> bytes:
        """The reply to ``request``, or a message that says why there is none; never raises.

        What a step complains about stays in the site's log: the server learns that it failed, and where.
        """
        facts: dict[str, Any] = {}
        try:
            return self._answer(terms, request, facts)
        except schema.Refused as error:
            self._log("refused", facts, str(error))
            return wire.pack({}, {"error": f"refused by the site: {error}"})
        except Exception as error:
            self._log("failed", facts, f"{type(error).__name__}: {error}")
            return wire.pack({}, {"error": "the site can't answer; its log says why"})

    def _answer(self, text: str, request: bytes, facts: dict[str, Any]) -> bytes:
        terms = Terms.read(text)
        step = wire.envelope(request).get("step")
        facts |= {"run": terms.run, "method": terms.method, "step": schema.clean(str(step)), "model": terms.model}
        self._permit(terms, step)
        agreement = terms.agreement()
        self._permit_fields(agreement, str(step))
        held = _Held(self.policy, terms)
        if len(held.own[0]) < self.policy.min_records:
            raise schema.Refused(f"the site answers with {self.policy.min_records} records or more (min_records)")
        # other terms make another run, whatever number the server gives it: its parts of the records are others too
        run = f"{terms.run}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        reply = Site(
            agreement,
            held,
            self.policy.state / "runs" / run,
            device=self.policy.device,
            threads=self.policy.threads,
            open_ledger=partial(self._open_ledger, run, agreement),
            discreet=partial(self._log, "failed", facts),
        ).answer(self.policy.client, request)
        if "error" not in wire.envelope(reply):
            self._log("answered", facts, f"{len(reply)} bytes")
        return reply

    def _permit(self, terms: Terms, step: object) -> None:
        policy = self.policy
        allowed = {terms.method, f"{terms.method}.{step}"} & set(policy.methods)
        if not allowed:
            named = ", ".join(policy.methods) or "nothing"
            raise schema.Refused(
                f"its policy answers {named}, not '{schema.clean(f'{terms.method}.{step}')}' (methods)"
            )
        if not policy.own_code:
            if terms.method not in methods.TABLE:
                raise schema.Refused("its policy runs fedstill's own methods only (own_code)")
            if any(models.is_own(name) for name in (terms.model, *terms.models)):
                raise schema.Refused("its policy builds fedstill's own models only (own_code)")
        if terms.simulated_noise and not policy.simulated_noise:
            raise schema.Refused(
                "the run wants privacy noise from a seed that the server knows (simulated_noise); use --noise entropy"
            )
        if terms.delta > policy.delta:
            raise schema.Refused(
                f"the run's delta is {terms.delta:g}; its policy allows {policy.delta:g} at most (delta)"
            )

    def _permit_fields(self, agreement: Agreement, step: str) -> None:
        steps = steps_of(agreement.method)
        if step not in steps:
            raise schema.Refused(f"step '{schema.clean(step)}' is not one of {', '.join(sorted(steps))}")
        fields = steps[step].reply.schema
        if any(f.is_released for f in fields) and self.policy.budget is None and not self.policy.unprotected:
            raise schema.Refused("its policy has no budget, so it releases nothing (budget)")
        bare = [f.name for f in fields if not (f.is_public or f.is_released)]
        if bare and not self.policy.unprotected:
            raise schema.Refused(f"its policy lets nothing out unprotected, and '{bare[0]}' would be (unprotected)")

    def _open_ledger(self, run: str, agreement: Agreement, _: Path) -> Ledger:
        return open_ledger(
            self.ledger,
            run,
            delta=self.policy.delta,
            budget=self.policy.budget,
            allow_unbounded=self.policy.unprotected and self.policy.budget is None,
            run_limit=None if agreement.budget is None else (agreement.budget, agreement.delta),
        )

    def _log(self, what: str, facts: dict[str, Any], detail: str | Exception) -> None:
        text = f"{type(detail).__name__}: {detail}" if isinstance(detail, Exception) else detail
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "what": what, **facts, "detail": text}
        log.info("%s", json.dumps(line))
        self.policy.state.mkdir(parents=True, exist_ok=True)
        files.append_json(self.policy.state / "log.jsonl", line)


class _Held:
    """The site's records as those of the run's task (see `fedstill.engines.site.Holdings`)."""

    def __init__(self, policy: Policy, terms: Terms) -> None:
        self._policy = policy
        self._terms = terms

    @cached_property
    def own(self) -> tuple[Records, Records]:
        """Train and test records."""
        part, terms = sources.load_part(str(self._policy.data)), self._terms
        places = {name: i for i, name in enumerate(terms.class_names)}
        names = part.class_names or terms.class_names
        if unknown := [name for name in names if name not in places]:
            raise schema.Refused(f"the site's class '{unknown[0]}' is not one of the run's")
        table = torch.tensor([places[name] for name in names])
        found = []
        for images, labels in (part.train, part.test):
            if tuple(images.shape[1:]) != terms.shape:
                here, there = (" x ".join(map(str, shape)) for shape in (images.shape[1:], terms.shape))
                raise schema.Refused(f"the site's images are {here}, the run's {there}")
            if len(labels) and int(labels.max()) >= len(table):
                raise schema.Refused(f"the site has the class {int(labels.max())}; the run has {len(table)} classes")
            found.append(Records(images, table[labels], len(terms.class_names), terms.normalisation))
        return found[0], found[1]

    def records(self, client: int) -> tuple[Records, Records]:
        """See `Holdings.records`."""
        return self.own

    def public(self) -> Records | None:
        """See `Holdings.public`."""
        spec, terms = self._terms.public, self._terms
        if spec is None:
            return None
        name, colon, rest = spec.partition(":")
        if name.split("=")[0] != "noise":
            if name not in self._policy.public:
                raise schema.Refused(f"the site has no public data '{schema.clean(name)}' (public)")
            spec = f"{self._policy.public[name]}{colon}{rest}"
        return public.load(spec, terms.shape, terms.normalisation)
