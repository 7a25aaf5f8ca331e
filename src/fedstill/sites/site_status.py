"""The state of a site as its operator sees it: budget, runs, questions, health."""

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fedstill import __version__, files
from fedstill.privacy.composition import shares
from fedstill.privacy.ledger import Entry
from fedstill.runs.environment import now
from fedstill.sites import decisions, log, verify
from fedstill.sites.ledger import Charge, read_charges, standing
from fedstill.sites.policy import SitePolicy

LAST = 5
"""Number of the last questions in a status."""
Line = Mapping[str, Any]


def status(policy: SitePolicy) -> dict[str, Any]:
    """The state of a site as JSON: budget, runs, running and last questions, waiting runs, health.

    Raises:
        NewerFormat: a newer fedstill wrote the state.
    """
    lines, charges, health = _evidence(policy)
    outcomes = [line for line in lines if line["what"] in verify.OUTCOMES]
    health |= {"data": _data(policy), "free_gb": round(_free(policy) / 1e9, 1)}
    health["is_well"] = all(health[part] == "whole" for part in ("log", "ledger")) and health["data"] == "readable"
    return {
        "client": policy.client,
        "version": __version__,
        "time": now(),
        "paused": decisions.is_paused(policy),
        "budget": budget(policy, charges),
        "questions": {what: sum(line["what"] == what for line in lines) for what in ("asked", *verify.OUTCOMES)},
        "runs": runs(policy, lines, charges),
        "running": [brief(line) for line in verify.unfinished(lines) if _is_alive(policy, line)],
        "waiting": [{name: run[name] for name in ("run", "step", "time")} for run in decisions.waiting(policy)],
        "last": [brief(line) for line in outcomes[-LAST:]],
        "health": health,
    }


def budget(policy: SitePolicy, charges: Sequence[Charge]) -> dict[str, Any]:
    """The site's budget, and what all runs have spent of it, by the unit that they protect."""
    entries = [charge.entry for charge in charges]
    spent = shares(standing(entries, None, policy.budget, policy.delta))
    most = max((use["share"] if use["share"] is not None else math.inf for use in spent.values()), default=0.0)
    return {
        "epsilon": policy.budget,
        "delta": policy.delta,
        "per_run": policy.budget_per_run,
        "releases": len(entries),
        "spent": spent,
        "left_share": None if policy.budget is None else max(0.0, 1 - most),
    }


def runs(policy: SitePolicy, lines: Sequence[Line], charges: Sequence[Charge]) -> list[dict[str, Any]]:
    """The questions and the releases of each run, in the order of their beginnings."""
    of_run: dict[str, list[Line]] = {}
    for line in lines:
        if "run" in line:
            of_run.setdefault(str(line["run"]), []).append(line)
    released: dict[str, list[Entry]] = {}
    for charge in charges:
        released.setdefault(charge.run, []).append(charge.entry)
    found, limit = [], policy.budget_per_run or policy.budget
    for name in {**of_run, **released}:
        own, entries = of_run.get(name, []), released.get(name, [])
        found.append(
            {
                "run": name,
                "method": next((line["method"] for line in own if "method" in line), None),
                "model": next((line["model"] for line in own if "model" in line), None),
                "settings": next((line["settings"] for line in own if "settings" in line), None),
                "first": own[0]["time"] if own else None,
                "last": own[-1]["time"] if own else None,
                "fields": {name: kind for line in own for name, kind in line.get("fields", {}).items()},
                "releases": len(entries),
                "spent": shares(standing(entries, None, limit, policy.delta)),
                **{what: sum(line["what"] == what for line in own) for what in ("asked", *verify.OUTCOMES)},
            }
        )
    return found


def brief(line: Line) -> dict[str, Any]:
    """The facts of a question that fit one line of a table."""
    return {name: line.get(name) for name in ("n", "time", "what", "run", "method", "step", "exchange", "detail")}


def prometheus(found: Mapping[str, Any]) -> str:
    """A `status` in Prometheus' text format."""
    spent = found["budget"]["spent"]
    gauges: dict[str, tuple[str, dict[str, float | None]]] = {
        "budget_epsilon": ("Largest epsilon of all releases of all runs", {"": found["budget"]["epsilon"]}),
        "spent_epsilon": ("Epsilon of all releases", {f'unit="{u}"': use["epsilon"] for u, use in spent.items()}),
        "spent_share": ("Share of the budget", {f'unit="{u}"': use["share"] for u, use in spent.items()}),
        "releases": ("Number of releases", {"": found["budget"]["releases"]}),
        "questions": ("Questions by outcome", {f'what="{w}"': n for w, n in found["questions"].items()}),
        "runs": ("Number of runs", {"": len(found["runs"])}),
        "running": ("Questions that are being answered", {"": len(found["running"])}),
        "waiting": ("Runs that wait for approval", {"": len(found["waiting"])}),
        "paused": ("Whether the site is paused", {"": found["paused"]}),
        "well": ("Whether log, ledger and data are whole", {"": found["health"]["is_well"]}),
        "free_bytes": ("Free space for the state", {"": found["health"]["free_gb"] * 1e9}),
        "last_question_seconds": ("Time of the last outcome", {"": _seconds(found["last"][-1:])}),
    }
    text = ""
    for name, (about, values) in gauges.items():
        text += f"# HELP fedstill_site_{name} {about}.\n# TYPE fedstill_site_{name} gauge\n"
        for label, value in values.items():
            number = "+Inf" if value is None else repr(float(value))
            text += f"fedstill_site_{name}{{{label}}} {number}\n" if label else f"fedstill_site_{name} {number}\n"
    return text


def _seconds(last: Sequence[Line]) -> float:
    return datetime.fromisoformat(str(last[0]["time"])).timestamp() if last else 0.0


def _evidence(policy: SitePolicy) -> tuple[list[dict[str, Any]], list[Charge], dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    charges: list[Charge] = []
    health: dict[str, Any] = {"log": "whole", "ledger": "whole"}
    try:
        lines = log.read(policy.state)
    except files.NewerFormat:
        raise
    except files.Damaged as error:
        health["log"] = str(error)
    try:
        charges = read_charges(policy.ledger)
    except files.NewerFormat:
        raise
    except files.Damaged as error:
        health["ledger"] = str(error)
    return lines, charges, health


def _data(policy: SitePolicy) -> str:
    place = policy.data
    if not place.exists():
        return f"{place} does not exist (data)"
    return "readable" if os.access(place, os.R_OK) else f"{place} can't be read by this user (data)"


def _free(policy: SitePolicy) -> int:
    place = policy.state if policy.state.exists() else policy.state.parent
    return shutil.disk_usage(place).free


def _is_alive(policy: SitePolicy, line: Line) -> bool:
    """Whether the process of a question may still compute: it exists, and the policy's seconds are not over."""
    begun = datetime.fromisoformat(str(line["time"])).timestamp()
    if "process" not in line or time.time() - begun > policy.max_seconds + 60:
        return False
    try:
        os.kill(int(line["process"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, as the node should be
        return True
    return True
