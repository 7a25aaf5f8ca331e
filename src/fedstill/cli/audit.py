"""``fedstill audit``."""

from typing import TYPE_CHECKING

from fedstill.cli.common import Bad, asks_help, print_json, terminal, usage

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from rich.table import Table

    from fedstill.audit.finding import Finding

SETTINGS = "fedstill.audit.whole_runs:AuditSettings"
USAGE = """usage: fedstill audit METHOD ... [flags]   prove lower bounds on the epsilon of private methods

METHOD is a private method, a class derived from one (mine.py:Class), or all. Exit code 1: a claim is refuted.
"""


def audit(words: list[str]) -> None:
    """``fedstill audit``."""
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import declared
    from fedstill.lookup import add_working_folder

    if not words or asks_help(words):
        sections = [parser.Section(declared(SETTINGS)()), parser.Section(flags.Format(), title="output")]
        usage(words[-1:], USAGE + parser.flags_text("fedstill audit METHOD", sections))
        return
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    names, rest = words[:count], words[count:]
    if not names:
        raise Bad(f"the method comes first: fedstill audit METHOD {' '.join(rest)}")
    add_working_folder()
    from fedstill.audit import whole_runs
    from fedstill.audit.scenes import SCENES
    from fedstill.experiment.progress import watch

    settings, form = flags.parse_settings("fedstill audit METHOD", rest, whole_runs.AuditSettings())
    names = list(SCENES) if names == ["all"] else names
    with watch(terminal(stderr=True), "audit", quiet=False) as watcher:
        findings = list(whole_runs.audit(names, settings, watcher.progressed))
    confidence = max(0.0, 1 - sum(finding.risk for finding in findings))
    if form.json_:
        print_json({"confidence": confidence, "findings": [finding.as_dict() for finding in findings]})
    else:
        console = terminal()
        console.print(_table(findings))
        for found in findings:
            if found.difference:
                console.print(f"{found.method}: {found.difference}", soft_wrap=True)
            if found.looks > 1:
                console.print(f"{found.method}: extended after a look, judged {found.looks} times", soft_wrap=True)
        console.print(
            f"All bounds together hold with probability {confidence:.3g}. The Gaussian fit refutes Gaussian "
            "claims only.",
            soft_wrap=True,
        )
    if any(finding.refuted for finding in findings):
        raise SystemExit(1)


def _table(findings: "list[Finding]") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    headings = ("method", "claim", "bound", "fit", "ratio", "reach", "clients", "verdict")
    columns = [Column(heading, no_wrap=True) for heading in headings]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for found in findings:
        table.add_row(
            found.method,
            f"{found.claim:.3g}" + (" (label)" if found.unit == "label" else ""),
            f"{found.bound:.2f}",
            "-" if found.fit is None else f"{found.fit:.2f}",
            f"{found.largest / found.claim:.2f}",
            "-" if found.reach is None else f"{found.reach:.2f}",
            str(found.clients),
            "REFUTED" if found.refuted else "not refuted",
        )
    return table
