"""Decisions of a site's operator: to pause the site, and to approve a run."""

import json
from pathlib import Path
from typing import Any

from fedstill import files, schema
from fedstill.runs.environment import now
from fedstill.sites import log, units
from fedstill.sites.policy import SitePolicy

MOST_WAITING = 100
"""Largest number of runs whose spec is stored while they wait; later ones are in the log only."""


class Waiting(schema.Refused):
    """The operator has not approved the run."""


def pause(policy: SitePolicy) -> None:
    """Let the site refuse every question, for the same public reason."""
    log.check_format(policy.state)
    facts = {"by": units.user()}
    files.write_json(_paused(policy.state), {"time": now(), **facts})
    log.write(policy, facts, "paused", "the site replies to no question until it is resumed")


def resume(policy: SitePolicy) -> None:
    """End a pause."""
    log.check_format(policy.state)
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
    log.check_format(policy.state)
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
    log.check_format(policy.state)
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
