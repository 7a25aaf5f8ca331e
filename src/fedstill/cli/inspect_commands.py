"""`fedstill methods`, `data`, `privacy`, `attack`, `audit`, `doctor`: what shows and tries."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill import attacks, methods
from fedstill.base.files import expanded
from fedstill.cli.command import FORM, Command, Part, sections_of
from fedstill.cli.output import Bad, asks_help, line_of, print_found, print_json, table, terminal, usage

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from rich.table import Table

    from fedstill.audits.lower_bounds import Finding
    from fedstill.audits.own_methods import Checked, CheckSettings
    from fedstill.audits.whole_runs import AuditSettings
    from fedstill.cli.flags import Format, Output, SchemaDraft
    from fedstill.experiment.config import Experiment
    from fedstill.protocol import Method
    from fedstill.report.plan import Plan
    from fedstill.sites.site.opacus import Import


def audit(names: list[str], settings: "AuditSettings", form: "Format") -> None:
    """``fedstill audit``."""
    from fedstill.base.lookup import add_working_folder

    add_working_folder()
    from fedstill.audits import whole_runs
    from fedstill.audits.scenes import SCENES
    from fedstill.experiment.progress import watch

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
    heads = ("method", "claim", "bound", "fit", "ratio", "reach", "clients", "verdict")
    rows = (
        (
            found.method,
            f"{found.claim:.3g}" + (" (label)" if found.unit == "label" else ""),
            f"{found.bound:.2f}",
            "-" if found.fit is None else f"{found.fit:.2f}",
            f"{found.largest / found.claim:.2f}",
            "-" if found.reach is None else f"{found.reach:.2f}",
            str(found.clients),
            "REFUTED" if found.refuted else "not refuted",
        )
        for found in findings
    )
    return table(heads, rows, whole=heads)


def list_methods(_: list[str], form: "Format") -> None:
    """``fedstill methods``."""
    from fedstill.cli import declared

    if form.json_:
        print_json({"methods": [declared.facts(name) for name in methods.TABLE]})
        return
    print(declared.listing())
    print(
        "\nprotects: the unit of the privacy guarantee with default settings"
        "\nsettings: fedstill run METHOD --help"
        "\ndifferences from the paper: docs/methods/METHOD.md"
    )


def list_data(_: list[str], form: "Format") -> None:
    """``fedstill data list``."""
    from fedstill.cli.declared import read

    known, local_copy = read("fedstill.data.names:KNOWN"), read("fedstill.data.places:local_copy")
    hubs = {name: f"hub: {facts.hub}" if facts.hub else "scikit-learn" for name, facts in known.items()}
    sources = {name: str(local_copy(name) or hub) for name, hub in hubs.items()}
    if form.json_:
        print_json({"data_sets": [{"name": name, "source": source} for name, source in sources.items()]})
    else:
        width = max(map(len, sources))
        print("\n".join(f"{name:<{width}}  {source}" for name, source in {"name": "source", **sources}.items()))


def show_data(words: list[str], experiment: "Experiment", output: "Output") -> None:
    """``fedstill data show``."""
    from fedstill.cli import parser
    from fedstill.report import data_page

    if words:
        experiment = parser.changed(experiment, {"data": words[0]})
    if output.json_:
        print_json(data_page.numbers(experiment, output.out))
    else:
        terminal().print(*data_page.show(experiment, output.out), sep="\n")


def draft_schema(words: list[str], drafting: "SchemaDraft") -> None:
    """``fedstill data schema``."""
    from fedstill.data import readers, schema_draft

    table = readers.read_table(expanded(words[0]), as_text=True)
    print(schema_draft.draft(table, drafting.target, words[0]), end="")


def forget(names: list[str]) -> None:
    """``fedstill data forget``."""
    from fedstill.data import cache

    found = cache.forget(names)
    for place in found:
        print(f"deleted: {place}")
    if not found:
        print(f"{cache.default_folder()} has nothing of {', '.join(names)}; 'all' deletes whatever was decoded")


def privacy(words: list[str], form: "Format") -> None:
    """``fedstill privacy RUN``."""
    from fedstill.report import spending

    run = Path(words[0])
    if form.json_:
        print_json(spending.numbers(run))
    else:
        print_found(({}, spending.show(run)), as_json=False)


def plan(_: list[str], settings: "Plan", form: "Format") -> None:
    """``fedstill privacy plan``."""
    from fedstill.base.lookup import add_working_folder
    from fedstill.report import plan as planning

    add_working_folder()
    print_found(planning.plan(settings), as_json=form.json_)


def import_history(words: list[str], history: "Import", form: "Format") -> None:
    """``fedstill privacy import``."""
    print_found(history.run(Path(words[0])), as_json=form.json_)


def attack(words: list[str]) -> None:
    """``fedstill attack``."""
    from fedstill.base.lookup import add_working_folder
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import read

    if not words or asks_help(words[:1]):
        usage(
            words,
            "usage: fedstill attack RUN [ATTACK] [flags]  infer training records from a run\n"
            "\nRUN is the folder of a finished run; ATTACK is membership by default.\n"
            + parser.flags_text(
                "fedstill attack RUN",
                [
                    parser.Section(kind(), title=name, about=(kind.__doc__ or "").splitlines()[0])
                    for name, kind in ((name, read(place)) for name, place in attacks.ATTACKS.items())
                ],
            ),
        )
        return
    if words[0].startswith("-"):
        raise Bad(f"the run comes first: fedstill attack RUN {' '.join(words)}")
    add_working_folder()
    run, *rest = words
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    program = "fedstill attack RUN" + (f" {name}" if name else "")
    if (shown := flags.shown(attacks.ATTACKS.get(name or "membership", ""), rest)) is not None:
        flags.parse_settings(program, rest, shown)
    settings, form = flags.parse_settings(program, rest, attacks.find(name or "membership")())
    progress = terminal(stderr=form.json_)
    print_found(settings.attack(Path(run), progress, line_of(["attack", *words])), as_json=form.json_)


_THOUSANDS = 2000
"""Least number of records of the largest pair of a check that is kept."""
_SENTENCES = 8
"""Most broken pairs that a check prints."""


def check(words: list[str]) -> None:
    """``fedstill check``."""
    from fedstill.base.lookup import add_working_folder
    from fedstill.cli import flags, parser

    if not words or asks_help(words[:1]):
        about = parser.flags_text("fedstill check METHOD", sections_of(CHECK, shown=True))
        usage(words, f"usage: fedstill check METHOD [flags]\n\n{textwrap.fill(CHECK.about, 78)}\n{about}")
        return
    if words[0].startswith("-"):
        raise Bad(f"the method comes first: fedstill check mine.py:Mine {' '.join(words)}")
    add_working_folder()
    name, *rest = words
    from fedstill.audits.own_methods import CheckSettings

    method = flags.method_of(name, rest)
    changed, settings, form = flags.parse_check(f"fedstill check {name}", rest, method, CheckSettings())
    if _checked(changed, settings, form).found:
        raise SystemExit(1)


def _checked(method: "Method", settings: "CheckSettings", form: "Format") -> "Checked":
    """Check a method, print what was found, and keep a pass."""
    from fedstill.audits import own_methods
    from fedstill.engines import own_code
    from fedstill.experiment.progress import watch
    from fedstill.report import guarantees

    with watch(terminal(stderr=True), "check", quiet=form.json_) as watcher:
        found = own_methods.check(method, settings, lambda done, number: watcher.progressed("pairs", done, number))
    whole = max(settings.records) >= _THOUSANDS and not (found.found or found.mixed)
    kept = whole and own_code.keep_pass(method, settings.model, found.pairs)
    if form.json_:
        facts = {"method": type(method).__qualname__, "guarantee": guarantees.as_json(found.guarantee)}
        print_json({**facts, "pairs": found.pairs, "found": found.found, "mixed": found.mixed, "kept": kept})
        return found
    for sentence in found.found[:_SENTENCES]:
        print(f"BROKEN: {sentence}")
    if (left := len(found.found) - _SENTENCES) > 0:
        print(f"BROKEN: and {left} more (--json lists all)")
    name, claim = type(method).__qualname__, guarantees.words(found.guarantee)
    *first, last = (f"{number:,}" for number in settings.records)
    if found.found:
        print(f"{name}: {len(found.found)} of {found.pairs} pairs differ beside releases; its epsilon does not hold")
    else:
        sizes = " and ".join([*filter(None, [", ".join(first)]), last])
        grown = f", and of a class growing to {settings.class_records:,}" if settings.class_records else ""
        print(
            f"{name}: on {found.pairs} pairs of data sets of {sizes} records{grown}, nothing but releases differs "
            f"(claim: {claim}); no proof: what depends on another number of records, or of a class, would not show "
            "(--records, --class-records)"
        )
    if found.mixed:
        print(
            "NOT SHOWN: a network gets private records in batches outside of privacy.rowwise.features; with weights "
            "that a server chooses, rounding may let one record move the rows of others, which no pair here can show"
        )
    if kept:
        print(f"runs of this code with these settings and --model {settings.model} say so beside their epsilon")
    return found


def doctor(_: list[str], form: "Format") -> None:
    """``fedstill doctor``."""
    from fedstill.runs import machine

    findings = list(machine.examine())
    number = {state: sum(found.state == state for found in findings) for state in ("fault", "warning")}
    if form.json_:
        print_json({"is_well": not number["fault"], "findings": [found._asdict() for found in findings]})
    else:
        width = max(len(found.part) for found in findings)
        for found in findings:
            remedy = f"; remedy: {found.remedy}" if found.remedy else ""
            print(f"{found.state:<7}  {found.part:<{width}}  {found.text}{remedy}")
        verdict = "runs are impossible" if number["fault"] else "runs are possible"
        print(f"{verdict}: " + ", ".join(f"{n} {state}{'s' * (n != 1)}" for state, n in number.items()))
    if number["fault"]:
        raise SystemExit(1)


METHODS = Command(
    list_methods,
    "",
    "List the methods: how often clients are asked, what they need and protect, and the paper.",
    (FORM,),
)
DATA = Command(
    about="List the data sets, or plot a partition.\n\nExample: fedstill data show digits --partition classes:2",
    below={
        "list": Command(list_data, "", "List the known data sets.", (FORM,)),
        "forget": Command(
            forget,
            "DATA ...",
            "Delete decoded copies of data sets, by name or path, also of a path that is gone; or of all.",
            needs="usage: fedstill data forget DATA ...; name data sets or paths, or all",
        ),
        "schema": Command(
            draft_schema,
            "FILE",
            "Draft the schema of a table from an example, a parquet or CSV file, as TOML for a person to check.",
            (Part("SchemaDraft", "draft"),),
            needs="usage: fedstill data schema FILE [--target COLUMN]; name a parquet or CSV file",
        ),
        "show": Command(
            show_data,
            "[NAME]",
            "Plot the records of each class at each client; with --out, as a page too.",
            (
                Part(
                    "fedstill.experiment.config:Experiment",
                    "task",
                    only=("data", "size", "label_column", "schema_file", "partition", "clients", "seed", "limit"),
                ),
                Part("Output", "output", without=("quiet",)),
            ),
        ),
    },
)
PRIVACY = Command(
    privacy,
    "RUN",
    "Show the clients' releases in RUN and their costs, or plan their noise.\n\nExample: fedstill privacy runs/first",
    (FORM,),
    below={
        "plan": Command(
            plan,
            "",
            "The noise of each epsilon, and the accuracy to expect.\n\nExample: fedstill privacy plan",
            ("fedstill.report.plan:Plan", FORM),
        ),
        "import": Command(
            import_history,
            "FILE",
            "Add up the history of an Opacus accountant by privacy loss distributions, and charge it to a site's "
            "ledger.\n\nExample: fedstill privacy import accountant.pt --delta 1e-5",
            ("fedstill.sites.site.opacus:Import", FORM),
        ),
    },
)
ATTACK = Command(
    attack,
    "RUN [ATTACK]",
    "infer training records from a run",
    (*attacks.ATTACKS.values(), FORM),
    raw=True,
)
AUDIT = Command(
    audit,
    "METHOD ...",
    "Prove lower bounds on the epsilon of private methods. METHOD is a private method, a class derived from one "
    "(mine.py:Class), or all. Exit code 1: a claim is refuted.\n\nExample: fedstill audit fedavg-p",
    ("fedstill.audits.whole_runs:AuditSettings", FORM),
    choices=(*methods.TABLE, "all"),
)
CHECK = Command(
    check,
    "METHOD [flags]",
    "Compare a private method of your own (mine.py:Class) on neighbouring data sets: nothing but releases may depend "
    "on one record. METHOD has its own flags too. Exit code 1: something does.",
    ("fedstill.audits.own_methods:CheckSettings", FORM),
    raw=True,
)
DOCTOR = Command(
    doctor,
    "",
    "Examine this machine: versions, devices, threads, folders, disk, data and extras, each with the remedy. Exit code "
    "1: a fault makes runs impossible.\n\nExample: fedstill doctor --json",
    (FORM,),
)
