"""A real site's reply to a request, within the site's policy, and its log of replies and refusals."""

import hashlib
from collections.abc import Callable
from functools import cached_property, partial

import torch

from fedstill import schema, wire
from fedstill.data import features, public, sources
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.site import NO_REPLY, Site
from fedstill.models import pretrained
from fedstill.privacy.ledger import BudgetExceeded, Ledger
from fedstill.records import Records
from fedstill.sites import log
from fedstill.sites.ledger import open_ledger
from fedstill.sites.policy import SitePolicy
from fedstill.sites.questions import Questions


def answer(policy: SitePolicy, text: str, request: bytes) -> bytes:
    """The reply to ``request``, or an error message.

    A refusal that follows from the request, the policy and the ledger says why. Whatever else goes wrong may depend on
    the records, so the server gets the constant `NO_REPLY`, and the reason stays in the site's log.

    Args:
        policy: the site's policy.
        text: the run's spec, from `RunSpec.text`.
        request: the request's bytes.

    Raises:
        OSError: the log can't be written.
    """
    facts: dict[str, str] = {}
    note = partial(log.write, policy, facts)
    try:
        # a run is its spec, not only the server's number: another spec may split the records differently
        spec = RunSpec.read(text)
        run = f"{spec.run}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        header = wire.envelope(request)
        step = header.get("step")
        facts |= {"run": run, "method": spec.name, "step": schema.clean(str(step)), "model": spec.model}
        facts["request"] = hashlib.sha256(request).hexdigest()
        policy.check_run(spec, step)
        policy.check_fields(spec.method, str(step))
        data = SiteData(policy, spec)
        data.check_backbone()
        site = Site(
            spec,
            data,
            policy.state / "runs" / run,
            device=policy.device,
            threads=policy.threads,
            open_ledger=lambda _: _open_ledger(policy, spec, run),
        )
        question = site.read(request, header)
        questions = Questions(policy, run)
        questions.ask()
    except schema.Refused as error:
        return _refusal(note, error)
    except Exception as error:
        note("failed", error)
        return NO_REPLY
    note("asked", f"question {question.exchange}, {len(request)} bytes")
    try:
        data.check()
        reply = site.reply(policy.client, question)
    except BudgetExceeded as error:  # depends on the requests alone, like the ledger
        questions.end()
        return _refusal(note, error, **site.spent(policy.client, question.exchange))
    except Exception as error:
        note("failed", error)
        return NO_REPLY
    questions.end()
    note("answered", f"{len(reply)} bytes")
    return reply


def _refusal(note: Callable[[str, str], None], error: Exception, **header: object) -> bytes:
    note("refused", str(error))
    return wire.pack({}, {"error": f"refused by the site: {error}", **header})


def _open_ledger(policy: SitePolicy, spec: RunSpec, run: str) -> Ledger:
    return open_ledger(
        policy.ledger,
        run,
        delta=policy.delta,
        budget=policy.budget,
        allow_unbounded=policy.unprotected and policy.budget is None,
        public_images=policy.public_images or policy.unprotected,
        run_limit=None if spec.budget is None else (spec.budget, spec.delta),
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
        if name is None or name.startswith("scattering"):  # made for the shape of the records
            return
        try:
            digest = pretrained.load(name, (), download=False).digest
        except ValueError as error:
            raise schema.Refused(f"the site can't load the backbone '{name}' (features)") from error
        if digest != expected:
            raise schema.Refused(
                f"the site's backbone '{name}' has the SHA-256 {digest[:16]}..., the run's {str(expected)[:16]}..."
            )

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
