"""A site's evidence in one file, for an ethics board: JSON, or a page that needs no network."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedstill import __version__, files
from fedstill.report.guarantees import round_up
from fedstill.report.html import data_table, folded, framed, section
from fedstill.report.privacy import cost_words
from fedstill.runs.environment import now
from fedstill.sites import log, site_status, verify
from fedstill.sites.ledger import Charge, read_charges
from fedstill.sites.policy import SitePolicy

_ENDINGS = (".html", ".json")


def export(policy: SitePolicy, place: Path) -> None:
    """Write the site's rules, totals, runs, charges and log to an ``.html`` or ``.json`` file.

    Details of failures stay in the site's log, as they may contain data.

    Raises:
        ValueError: the name has another ending.
        Damaged: the log or the ledger was changed.
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
        Damaged: the log or the ledger was changed.
    """
    verdict = verify.verify(policy.state)
    lines, charges = log.read(policy.state), read_charges(policy.ledger)
    return {
        "version": 1,
        "made": now(),
        "fedstill": __version__,
        "site": policy.client,
        "policy": policy.model_dump(mode="json"),
        "check": {"is_whole": verdict.is_whole, **vars(verdict)},
        "budget": site_status.budget(policy, charges),
        "runs": site_status.runs(policy, lines, charges),
        "charges": [_charge(charge) for charge in charges],
        "log": [{**line, "detail": "in the site's log"} if line["what"] == "failed" else line for line in lines],
    }


def _charge(charge: Charge) -> dict[str, Any]:
    entry = charge.entry.model_dump(mode="json")
    cost = cost_words(charge.entry)
    return {"number": charge.number, "time": charge.time, "run": charge.run, "cost": cost, **entry, "mac": charge.mac}


def page(found: Mapping[str, Any]) -> str:
    """The page of an `evidence`."""
    policy, budget, check = found["policy"], found["budget"], found["check"]
    limit = "no budget, so no release" if budget["epsilon"] is None else f"epsilon {budget['epsilon']:g}"
    allowed = ", ".join(policy["methods"]) or "nothing"
    bare = "may leave" if policy["unprotected"] else "never leave"
    intro = (
        f"Site {found['site']} took part in federated learning: its records stay on its own machine, and a server "
        f"sends questions, whose answers are listed here. The site's own rules allow {allowed}. Values "
        f"that no privacy mechanism protects (models, images) {bare}. Protected values leave within a budget for all "
        f"runs together: {limit} at delta {budget['delta']:g}."
    )
    whole = "Nothing was changed, and log and ledger agree." if check["is_whole"] else "SOMETHING IS WRONG."
    checked = "The log and the ledger are chains of keyed hashes, which were checked for this file. " + whole
    parts = [
        _paragraph(intro),
        _paragraph(f"Made at {found['made']} by fedstill {found['fedstill']}."),
        section("Check", _paragraph(checked) + _list([*check["problems"], *check["notes"]])),
        section("Totals", _paragraph(_totals(found)) + _spent(budget["spent"])),
        section("Runs", "".join(_run(run) for run in found["runs"]) or _paragraph("No run has asked anything yet.")),
        section("Charges", _charges(found["charges"])),
        section("Log", folded(f"{len(found['log'])} lines", _log(found["log"]))),
    ]
    return framed(f"Evidence of site {found['site']}", f"<h1>Evidence of site {found['site']}</h1>\n" + "".join(parts))


def _totals(found: Mapping[str, Any]) -> str:
    runs = found["runs"]
    asked, answered, failed = (sum(run[what] for run in runs) for what in ("asked", "answered", "failed"))
    return (
        f"{len(runs)} runs asked {asked} questions; {answered} were answered, {failed} failed, and all others were "
        f"refused. {found['budget']['releases']} releases were charged."
    )


def _spent(spent: Mapping[str, Any]) -> str:
    rows = [(unit, _number(use["epsilon"]), _percent(use["share"])) for unit, use in spent.items()]
    headings = ("protected unit", "epsilon of all releases", "share of the budget")
    return data_table(headings, rows, words=(0,)) if rows else ""


def _run(run: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{run[what]} {what}" for what in ("asked", *verify.OUTCOMES))
    about = f"Method {run['method']}, model {run['model']}, from {run['first']} to {run['last']}: {counts}."
    fields = _list(f"{name} left the site: {kind}" for name, kind in run["fields"].items())
    settings = folded("settings", _paragraph(str(run["settings"])))
    content = _paragraph(about) + (fields or _paragraph("Nothing left the site.")) + _spent(run["spent"]) + settings
    return section(f"Run {run['run']}", content, 3)


def _charges(charges: Sequence[Mapping[str, Any]]) -> str:
    headings = ("charge", "time", "run", "step", "mechanism", "protects", "cost", "rests on")
    rows = [
        (str(c["number"]), str(c["time"] or "-"), c["run"][:8], c["step"], c["mechanism"], c["unit"], c["cost"])
        + (c["theorem"],)
        for c in charges
    ]
    return folded(f"{len(rows)} charges", data_table(headings, rows, words=range(1, 8))) if rows else ""


def _log(lines: Sequence[Mapping[str, Any]]) -> str:
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


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>\n" if items else ""


def _number(epsilon: float | None) -> str:
    return "unbounded" if epsilon is None else round_up(epsilon)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
