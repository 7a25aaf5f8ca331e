"""Decisions of a site's operator: to pause the site, and to approve a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill import schema
from fedstill.base import files
from fedstill.base.records import in_words
from fedstill.engines.client_evaluation import steps_of
from fedstill.engines.column_scale import NAME as SCALE_STEP
from fedstill.engines.run_spec import RunSpec
from fedstill.experiment.config import defaults_of, flat
from fedstill.privacy.accounting import shares
from fedstill.runs.environment import now
from fedstill.sites import units
from fedstill.sites.site import log
from fedstill.sites.site.charges import uses_of
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_journal import SiteJournal
from fedstill.sites.site.state_format import version_of

MOST_WAITING = 100
"""Largest number of runs whose spec is stored while they wait; later ones are in the log only."""


class Waiting(schema.Refused):
    """The operator has not approved the run."""


def pause(policy: SitePolicy) -> None:
    """Let the site refuse every question, for the same public reason."""
    version_of(policy.state)
    facts = {"by": units.user()}
    files.write_json(_paused(policy.state), {"time": now(), **facts})
    log.write(policy, facts, "paused", "the site replies to no question until it is resumed")


def resume(policy: SitePolicy) -> None:
    """End a pause."""
    version_of(policy.state)
    _paused(policy.state).unlink(missing_ok=True)
    log.write(policy, {"by": units.user()}, "resumed", "the site replies to questions again")


def is_paused(policy: SitePolicy) -> bool:
    """Whether the site is paused."""
    return _paused(policy.state).exists()


def check_pause(policy: SitePolicy) -> None:
    """Refuse a question while the site is paused.

    Raises:
        Refused: it is.
    """
    if is_paused(policy):
        raise schema.Refused("the site is paused; ask again later")


def check_approval(policy: SitePolicy, run: str, text: str, step: str) -> None:
    """Let a run wait for the operator's yes, where the policy asks for it.

    Args:
        policy: the site's policy.
        run: the run's name at the site, which has the beginning of a hash of its spec.
        text: the run's spec, from `fedstill.engines.run_spec.RunSpec.text`; a yes holds for no other.
        step: the step of the question.

    Raises:
        Waiting: there is no yes; the server gets the same words before a decision and after a no.
    """
    if policy.approval == "none":
        return
    place = policy.state / "approvals" / f"{run}.json"
    facts = _facts(place)
    if facts.get("decision") == "yes" and facts["spec"] == text:
        return
    if not facts and len(waiting(policy)) < MOST_WAITING:
        files.write_json(place, {"run": run, "spec": text, "step": step, "time": now(), "decision": None})
    raise Waiting("the run waits for the approval of the site's operator (approval)")


def waiting(policy: SitePolicy) -> list[dict[str, Any]]:
    """The runs without a decision, in the order of their first questions."""
    version_of(policy.state)
    places = (policy.state / "approvals").glob("*.json")
    found = [facts for facts in map(_facts, sorted(places)) if facts and facts["decision"] is None]
    return sorted(found, key=lambda facts: str(facts["time"]))


def decide(policy: SitePolicy, run: str, *, yes: bool) -> None:
    """Approve a run, or deny it.

    Raises:
        ValueError: no run of this name waits or was decided on.
    """
    place, facts = _place(policy, run)
    by = {"by": units.user(), "run": facts["run"]}
    what = "approved" if yes else "denied"
    log.write(policy, by, what, f"the operator has {what} the run")
    files.write_json(place, {**facts, "decision": "yes" if yes else "no", "decided": now(), **by})


def request_of(policy: SitePolicy, run: str) -> dict[str, Any]:
    """The facts of a run that waits or was decided on; ``run`` is the beginning of its name.

    Raises:
        ValueError: no run has such a name, or several have, or its file is damaged.
    """
    return _place(policy, run)[1]


def _place(policy: SitePolicy, run: str) -> tuple[Path, dict[str, Any]]:
    version_of(policy.state)
    places = [p for p in (policy.state / "approvals").glob("*.json") if p.stem.startswith(run)]
    if len(places) != 1:
        number = f"{len(places)} runs have names that begin with" if places else "no run has the name"
        raise ValueError(f"{number} '{schema.clean(run)}'; 'fedstill site approve FOLDER' lists the runs that wait")
    if not (facts := _facts(places[0])):
        raise ValueError(f"{places[0]} is damaged; delete this file, and the run waits again at its next question")
    return places[0], facts


def _facts(place: Path) -> dict[str, Any]:
    """The facts of a run; none if the file is absent or damaged, so that the run waits again."""
    try:
        facts = json.loads(place.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    whole = isinstance(facts, dict) and all(isinstance(facts.get(n), str) for n in ("run", "spec", "step", "time"))
    return facts if whole and facts.get("decision") in (None, "yes", "no") else {}


def _paused(state: Path) -> Path:
    return state / "paused.json"


_KINDS = {
    "released": "through a privacy mechanism, charged to the budget",
    "public": "declared public: it depends on no record",
    "unprotected": "WITHOUT any protection: it may give records away",
}

_NAMED = 10
"""Number of classes that the text names."""


def proposal(policy: SitePolicy, request: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that the run asks for: its method, its settings, the fields that may leave, and what it may cost at most.

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
    for name, step in steps_of(method, spec.scale).items():
        if {spec.name, f"{spec.name}.{name}"} & set(policy.methods) or name == SCALE_STEP:
            steps[name] = {f.name: f.protection for f in step.reply.schema}
    return {
        "run": request["run"],
        "time": request["time"],
        "method": spec.name,
        "about": (type(method).__doc__ or "").partition("\n")[0],
        "model": spec.model,
        "task": f"{in_words(spec.shape)}, {spec.num_classes} classes",
        "classes": [schema.clean(name) for name in spec.class_names],
        "public": spec.public,
        "sums": None if spec.sums is None else spec.sums.words,
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
        *([] if found["sums"] is None else [f"  sums:     {found['sums']}"]),
        "What would leave this site, whenever the run asks for it:",
    ]
    for step, fields in found["fields"].items():
        lines += [f"  step {step}:"]
        lines += [f"    {name}: {_KINDS[kind]}" for name, kind in fields.items()]
    left = "" if cost["left_share"] is None else f" (what other runs left: {100 * cost['left_share']:.1f} % of it)"
    if cost["at_most"] is None:
        lines += [f"Costs: the policy has no budget, so {without_budget(cost)}."]
    else:
        lines += [f"Costs at most: epsilon {cost['at_most']:g} of the site's budget of {cost['budget']:g}{left}."]
    lines += ["A yes holds for this run, with this method and these settings, and for no other."]
    return [schema.clean(line, 1000) for line in lines]  # words of a server are among them


def without_budget(facts: Mapping[str, Any]) -> str:
    """What a site without a budget releases, by whether that is ``unlimited``."""
    return "releases have no limit" if facts["unlimited"] else "nothing is released"


def _cost(policy: SitePolicy, spec: RunSpec) -> dict[str, float | bool | None]:
    limits = [limit for limit in (policy.budget, policy.budget_per_run, spec.budget) if limit is not None]
    uses = shares(uses_of(SiteJournal(policy.state).standing(), policy.budget, policy.delta)).values()
    most = max((1.0 if use["share"] is None else use["share"] for use in uses), default=0.0)
    return {
        "budget": policy.budget,
        "at_most": min(limits) if policy.budget is not None else None,
        "unlimited": policy.unlimited,
        "left_share": None if policy.budget is None else max(0.0, 1 - most),
    }


def _plain(value: Any) -> str:
    return schema.clean(value if isinstance(value, str) else json.dumps(value, default=str), 200)


def list_waiting(policy: SitePolicy) -> list[str]:
    """A line for each run that waits."""
    return [f"{run['run']}  {run['time']}  asks for step {run['step']}" for run in waiting(policy)]
