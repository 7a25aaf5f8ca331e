"""Status of a site for its operator, and evidence for others in one file."""

import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedstill import __version__
from fedstill.base import files
from fedstill.privacy.accounting import shares
from fedstill.privacy.ledger import Charge
from fedstill.report.guarantees import round_up
from fedstill.report.html import data_table, folded, framed, section
from fedstill.report.markup import joined, part
from fedstill.report.spending import cost_words
from fedstill.runs.environment import now
from fedstill.sites.site import decisions, log
from fedstill.sites.site.answer import size_of
from fedstill.sites.site.charges import largest_fitting, standing, uses_of
from fedstill.sites.site.checkpoint import OUTCOMES, ChargeLine, Checkpoint, Standing
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_journal import SiteJournal, charges_among
from fedstill.sites.site.state_format import check_newest

LAST = 5
"""Number of the last questions in a status."""
Line = Mapping[str, Any]
_NO_DATA, _NO_LIMIT = "none, as it is a helper of masked sums", "none reached"


def status(policy: SitePolicy) -> dict[str, Any]:
    """The state of a site as JSON: budget, runs, running and last questions, waiting runs, health.

    Raises:
        NewerFormat: a newer fedstill wrote the state.
    """
    lines, charges, found, health = _evidence(policy)
    failed = found.at.failed
    outcomes = [line for line in lines if line["what"] in OUTCOMES]
    health |= {"data": _data(policy), "limits": _limits(policy, found.at), "free_gb": round(_free(policy) / 1e9, 1)}
    health["is_well"] = (health["journal"], health["limits"]) == ("whole", _NO_LIMIT) and (
        health["data"] in ("readable", _NO_DATA)
    )
    return {
        "client": policy.client,
        "version": __version__,
        "time": now(),
        "paused": decisions.is_paused(policy),
        "budget": budget(policy, found),
        "questions": {what: sum(line["what"] == what for line in lines) for what in ("asked", *OUTCOMES)},
        "runs": runs(policy, lines, charges),
        "failures": {"number": failed, "limit": policy.max_failures_ever},
        "running": [brief(line) for line in log.unfinished(lines) if _is_alive(policy, line)],
        "waiting": [{name: run[name] for name in ("run", "step", "time")} for run in decisions.waiting(policy)],
        "last": [brief(line) for line in outcomes[-LAST:]],
        "health": health,
    }


def read(policy: SitePolicy) -> tuple[list[dict[str, Any]], list[ChargeLine], Standing]:
    """The lines of the journal, the releases among them, and what they mean for the next question.

    Raises:
        Damaged: the journal was changed, the state is an older copy, or a newer fedstill wrote it.
    """
    journal = SiteJournal(policy.state)
    lines = journal.read()
    check_newest(policy.state)
    return log.without_checkpoints(lines), charges_among(lines, policy.state), journal.standing()


def budget(policy: SitePolicy, found: Standing) -> dict[str, Any]:
    """The site's budget, and what all runs have spent of it, by the unit that they protect, as its filter counts it."""
    spent = shares(uses_of(found, policy.budget, policy.delta))
    most = max((use["share"] if use["share"] is not None else math.inf for use in spent.values()), default=0.0)
    return {
        "epsilon": policy.budget,
        "delta": policy.delta,
        "per_run": policy.budget_per_run,
        "releases": found.at.charges,
        "spent": spent,
        "unlimited": policy.unlimited,
        "fits": None if policy.budget is None else _fitting(policy, found),
        "left_share": None if policy.budget is None else max(0.0, 1 - most),
    }


def _fitting(policy: SitePolicy, found: Standing) -> float:
    """The largest epsilon of one more release, of a run that has released nothing yet."""
    if policy.budget is None or found.at.charges >= policy.max_releases:
        return 0.0
    return min(largest_fitting(found, policy.budget, policy.delta), policy.budget_per_run or math.inf)


def runs(policy: SitePolicy, lines: Sequence[Line], charges: Sequence[ChargeLine]) -> list[dict[str, Any]]:
    """The questions and the releases of each run, in the order of their beginnings."""
    of_run: dict[str, list[Line]] = {}
    for line in lines:
        if "run" in line:
            of_run.setdefault(str(line["run"]), []).append(line)
    released: dict[str, list[Charge]] = {}
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
                **{what: sum(line["what"] == what for line in own) for what in ("asked", *OUTCOMES)},
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
        "well": (
            "Whether journal and data are whole and no limit is reached",
            {"": found["health"]["is_well"]},
        ),
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


def _evidence(policy: SitePolicy) -> tuple[list[dict[str, Any]], list[ChargeLine], Standing, dict[str, Any]]:
    """Lines, releases, what they mean for the next question, and whether the journal is whole."""
    try:
        return *read(policy), {"journal": "whole"}
    except files.NewerFormat:
        raise
    except files.Damaged as error:
        return [], [], Standing(), {"journal": str(error)}


def _data(policy: SitePolicy) -> str:
    place = policy.data
    if place is None:
        is_helper = policy.helper and not policy.methods
        return _NO_DATA if is_helper else "none, so that the site replies to nothing (data)"
    if not place.exists():
        return f"{place} does not exist (data)"
    return "readable" if os.access(place, os.R_OK) else f"{place} can't be read by this user (data)"


def _limits(policy: SitePolicy, at: Checkpoint) -> str:
    """The limits by which the site replies to no question at all."""
    reached = {
        "max_failures_ever": at.failed >= policy.max_failures_ever,
        "refusals_per_day": log.refused_today(at) >= policy.refusals_per_day,
        "state_gb": size_of(policy.state) >= policy.state_gb * 1e9,
    }
    names = [name for name, is_reached in reached.items() if is_reached]
    return f"{', '.join(names)} reached, so that the site replies to nothing" if names else _NO_LIMIT


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


_ENDINGS = (".html", ".json")


def export(policy: SitePolicy, place: Path) -> None:
    """Write the site's rules, totals, runs, charges and log to an ``.html`` or ``.json`` file.

    Details of failures stay in the site's log, as they may contain data.

    Raises:
        ValueError: the name has another ending.
        Damaged: the journal was changed.
    """
    if place.suffix not in _ENDINGS:
        raise ValueError(f"{place} does not end in .html or .json; the ending gives the format")
    found = evidence(policy)
    if place.suffix == ".json":
        files.write_json(place, found)
    else:
        files.write_bytes(place, page(found).encode())


def evidence(policy: SitePolicy) -> dict[str, Any]:
    """All of it as JSON.

    Raises:
        Damaged: the journal was changed.
    """
    verdict = log.verify(policy.state)
    lines, charges, found = read(policy)
    return {
        "version": 1,
        "made": now(),
        "fedstill": __version__,
        "site": policy.client,
        "policy": policy.model_dump(mode="json"),
        "check": {"is_whole": verdict.is_whole, **vars(verdict)},
        "budget": budget(policy, found),
        "runs": runs(policy, lines, charges),
        "charges": [_charge(charge) for charge in charges],
        "log": [{**line, "detail": "in the site's log"} if line["what"] == "failed" else line for line in lines],
    }


def _charge(charge: ChargeLine) -> dict[str, Any]:
    entry = charge.entry.model_dump(mode="json")
    cost = cost_words(charge.entry)
    return {"number": charge.number, "time": charge.time, "run": charge.run, "cost": cost, **entry, "mac": charge.mac}


def page(found: Mapping[str, Any]) -> str:
    """The page of an `evidence`."""
    policy, budget, check = found["policy"], found["budget"], found["check"]
    limit = (
        f"no budget, so {decisions.without_budget(budget)}"
        if budget["epsilon"] is None
        else f"epsilon {budget['epsilon']:g}"
    )
    allowed = ", ".join(policy["methods"]) or "nothing"
    bare = "may leave" if policy["unprotected"] else "never leave"
    intro = (
        f"Site {found['site']} took part in federated learning: its records stay on its own machine, and a server "
        f"sends questions, whose answers are listed here. The site's own rules allow {allowed}. Values "
        f"that no privacy mechanism protects (models, images) {bare}. Protected values leave within a budget for all "
        f"runs together: {limit} at delta {budget['delta']:g}."
    )
    whole = "Nothing was changed." if check["is_whole"] else "SOMETHING IS WRONG."
    checked = "Charges and log are lines of one chain of keyed hashes, which was checked for this file. " + whole
    parts = [
        _paragraph(intro),
        _paragraph(f"Made at {found['made']} by fedstill {found['fedstill']}."),
        section("Check", _paragraph(checked) + _list([*check["problems"], *check["notes"]])),
        section("Totals", _paragraph(_totals(found)) + _spent(budget["spent"])),
        section("Runs", joined(*map(_run, found["runs"])) or _paragraph("No run has asked anything yet.")),
        section("Charges", _charges(found["charges"])),
        section("Log", folded(f"{len(found['log'])} lines", _log(found["log"]))),
    ]
    title = f"Evidence of site {found['site']}"
    return framed(title, joined(part("opening", title), *parts))


def _totals(found: Mapping[str, Any]) -> str:
    runs, lines = found["runs"], found["log"]
    of_runs = {what: sum(run[what] for run in runs) for what in ("asked", *OUTCOMES)}
    others = {what: sum(line["what"] == what for line in lines) - of_runs[what] for what in OUTCOMES}
    ended = ", ".join(f"{of_runs[what]} {what}" for what in OUTCOMES)
    beside = ", ".join(f"{number} {what}" for what, number in others.items() if number)
    return (
        f"{len(runs)} runs asked {of_runs['asked']} questions: {ended}, and {len(log.unfinished(lines))} without an "
        f"outcome, whose process still runs or was killed. Messages of no run: {beside or 'none'}. "
        f"{found['budget']['releases']} releases were charged."
    )


def _spent(spent: Mapping[str, Any]) -> Markup:
    rows = [(unit, _number(use["epsilon"]), _percent(use["share"])) for unit, use in spent.items()]
    headings = ("protected unit", "epsilon of all releases", "share of the budget")
    return data_table(headings, rows, words=(0,)) if rows else Markup()


def _run(run: Mapping[str, Any]) -> Markup:
    counts = ", ".join(f"{run[what]} {what}" for what in ("asked", *OUTCOMES))
    about = f"Method {run['method']}, model {run['model']}, from {run['first']} to {run['last']}: {counts}."
    fields = _list(f"{name} left the site: {kind}" for name, kind in run["fields"].items())
    settings = folded("settings", _paragraph(str(run["settings"])))
    content = _paragraph(about) + (fields or _paragraph("Nothing left the site.")) + _spent(run["spent"]) + settings
    return section(f"Run {run['run']}", content, 3)


def _charges(charges: Sequence[Mapping[str, Any]]) -> Markup:
    headings = ("charge", "time", "run", "step", "mechanism", "protects", "cost", "rests on")
    rows = [
        (str(c["number"]), str(c["time"] or "-"), c["run"][:8], c["step"], c["mechanism"], c["unit"], c["cost"])
        + (c["theorem"],)
        for c in charges
    ]
    return folded(f"{len(rows)} charges", data_table(headings, rows, words=range(1, 8))) if rows else Markup()


def _log(lines: Sequence[Mapping[str, Any]]) -> Markup:
    headings = ("entry", "time", "what", "run", "step", "request", "reply", "detail")
    rows = [
        (
            str(line.get("n", "-")),
            str(line["time"]),
            str(line["what"]),
            *(str(line.get(name, "-"))[:width] for name, width in (("run", 8), ("step", 40), ("request", 16))),
            str(line.get("reply", "-"))[:16],
            str(line["detail"])[:300],
        )
        for line in lines
    ]
    return data_table(headings, rows, words=range(1, 8))


def _paragraph(text: str) -> Markup:
    return part("paragraph", text)


def _list(sentences: Iterable[str]) -> Markup:
    some = list(sentences)
    return part("items", some) if some else Markup()


def _number(epsilon: float | None) -> str:
    return "unbounded" if epsilon is None else round_up(epsilon)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
