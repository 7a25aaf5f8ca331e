"""What a run asks of a site, in plain words, for the operator who approves it."""

import json
from collections.abc import Mapping
from typing import Any

from fedstill import schema
from fedstill.engines.client_evaluation import steps_of
from fedstill.engines.run_spec import RunSpec
from fedstill.experiment.config import defaults_of, flat
from fedstill.privacy.composition import shares
from fedstill.records import in_words
from fedstill.sites import decisions
from fedstill.sites.ledger import read_charges, standing
from fedstill.sites.policy import SitePolicy

_KINDS = {
    "released": "through a privacy mechanism, charged to the budget",
    "public": "declared public: it depends on no record",
    "unprotected": "WITHOUT any protection: it may give records away",
}

_NAMED = 10
"""Number of classes that the text names."""


def proposal(policy: SitePolicy, request: Mapping[str, Any]) -> dict[str, Any]:
    """What the run asks for: its method, its settings, the fields that may leave, and what it may cost at most.

    Args:
        policy: the site's policy, which says which steps the run may ask for.
        request: the run, from `decisions.waiting`.

    Raises:
        Refused: the policy does not allow the run any more.
    """
    spec = RunSpec.read(str(request["spec"]))
    policy.check_run(spec, request["step"])
    method = spec.method
    values, defaults = flat(method.model_dump(mode="json")), defaults_of(type(method))
    steps = {}
    for name, step in steps_of(method).items():
        if {spec.name, f"{spec.name}.{name}"} & set(policy.methods):
            steps[name] = {f.name: kind_of(f) for f in step.reply.schema}
    return {
        "run": request["run"],
        "time": request["time"],
        "method": spec.name,
        "about": (type(method).__doc__ or "").partition("\n")[0],
        "model": spec.model,
        "task": f"{in_words(spec.shape)}, {spec.num_classes} classes",
        "classes": [schema.clean(name) for name in spec.class_names],
        "public": spec.public,
        "settings": {n: _plain(v) for n, v in values.items() if v != defaults.get(n, ...) or n == "epsilon"},
        "fields": steps,
        "cost": _cost(policy, spec),
    }


def words(found: Mapping[str, Any]) -> list[str]:
    """A `proposal` in lines of text."""
    cost, classes = found["cost"], found["classes"]
    more = f" and {len(classes) - _NAMED} more" if len(classes) > _NAMED else ""
    lines = [
        f"Run {found['run']}, first question at {found['time']}",
        f"  method:   {found['method']}: {found['about']}",
        f"  model:    {found['model']}, {found['task']}: {', '.join(classes[:_NAMED])}{more}",
        "  settings:" + ("" if found["settings"] else " defaults"),
        *(f"    {name} = {value}" for name, value in found["settings"].items()),
        "What would leave this site, whenever the run asks for it:",
    ]
    for step, fields in found["fields"].items():
        lines += [f"  step {step}:"]
        lines += [f"    {name}: {_KINDS[kind]}" for name, kind in fields.items()]
    left = "" if cost["left_share"] is None else f" (what other runs left: {100 * cost['left_share']:.1f} % of it)"
    if cost["at_most"] is None:
        lines += ["Costs: the policy has no budget, so nothing can be charged."]
    else:
        lines += [f"Costs at most: epsilon {cost['at_most']:g} of the site's budget of {cost['budget']:g}{left}."]
    lines += ["A yes holds for this run, with this method and these settings, and for no other."]
    return [schema.clean(line, 1000) for line in lines]  # words of a server are among them


def kind_of(field: schema.Field) -> str:
    """The protection of a field: public, released or unprotected."""
    return "public" if field.is_public else "released" if field.is_released else "unprotected"


def _cost(policy: SitePolicy, spec: RunSpec) -> dict[str, float | None]:
    limits = [limit for limit in (policy.budget, policy.budget_per_run, spec.budget) if limit is not None]
    entries = [charge.entry for charge in read_charges(policy.ledger)]
    uses = shares(standing(entries, None, policy.budget, policy.delta)).values()
    most = max((1.0 if use["share"] is None else use["share"] for use in uses), default=0.0)
    return {
        "budget": policy.budget,
        "at_most": min(limits) if policy.budget is not None else None,
        "left_share": None if policy.budget is None else max(0.0, 1 - most),
    }


def _plain(value: Any) -> str:
    return schema.clean(value if isinstance(value, str) else json.dumps(value, default=str), 200)


def list_waiting(policy: SitePolicy) -> list[str]:
    """A line for each run that waits."""
    return [f"{run['run']}  {run['time']}  asks for step {run['step']}" for run in decisions.waiting(policy)]
