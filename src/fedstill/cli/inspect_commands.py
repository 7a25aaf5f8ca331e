"""`fedstill list`, `data`, `privacy`, `attack`, `audit`: what shows and tries."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.output import Bad, asks_help, line_of, print_found, print_json, terminal, usage

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from rich.table import Table

    from fedstill.audit.lower_bounds import Finding


SETTINGS = "fedstill.audit.whole_runs:AuditSettings"
USAGE = """usage: fedstill audit METHOD ... [flags]   prove lower bounds on the epsilon of private methods

METHOD is a private method, a class derived from one (mine.py:Class), or all. Exit code 1: a claim is refuted.
"""


def audit(words: list[str]) -> None:
    """``fedstill audit``."""
    from fedstill.base.lookup import add_working_folder
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import declared

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


def list_methods(words: list[str]) -> None:
    """``fedstill methods``."""
    from fedstill import methods
    from fedstill.cli import declared, flags, parser

    if words and words[0] in methods.TABLE:
        raise Bad(f"'{words[0]}' is an unexpected argument; its settings: fedstill run {words[0]} --help")
    about = "List the methods: how often clients are asked, what they need and protect, and the paper."
    (form,) = parser.parse("fedstill methods", about, words, [parser.Section(flags.Format())])
    if form.json_:
        print_json({"methods": [declared.facts(name) for name in methods.TABLE]})
        return
    print(declared.listing())
    print(
        "\nprotects: the unit of the privacy guarantee with default settings"
        "\nsettings: fedstill run METHOD --help"
        "\ndifferences from the paper: docs/methods/METHOD.md"
    )


def data(words: list[str]) -> None:
    """``fedstill data``."""
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import read

    text = (
        "usage: fedstill data list [--json]      list the known data sets\n"
        "       fedstill data show NAME [flags]  plot the records of each client\n"
    )
    if not words or asks_help(words[:1]):
        usage(words, text + parser.flags_text("fedstill data show NAME", flags.show_sections()))
    elif words[0] == "list":
        known, local_copy = read("fedstill.data.names:KNOWN"), read("fedstill.data.places:local_copy")
        (form,) = parser.parse(
            "fedstill data list", "List the known data sets.", words[1:], [parser.Section(flags.Format())]
        )
        hubs = {name: f"hub: {facts.hub}" if facts.hub else "scikit-learn" for name, facts in known.items()}
        sources = {name: str(local_copy(name) or hub) for name, hub in hubs.items()}
        if form.json_:
            print_json({"data_sets": [{"name": name, "source": source} for name, source in sources.items()]})
        else:
            width = max(map(len, sources))
            print("\n".join(f"{name:<{width}}  {source}" for name, source in {"name": "source", **sources}.items()))
    elif words[0] == "show":
        experiment, output = flags.parse_show("fedstill data show", words[1:])
        from fedstill.report import data_page

        if output.json_:
            print_json(data_page.numbers(experiment, output.out))
        else:
            terminal().print(*data_page.show(experiment, output.out), sep="\n")
    else:
        raise Bad(f"there is no 'data {words[0]}'; choose list or show")


def privacy(words: list[str]) -> None:
    """``fedstill privacy``."""
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import read

    text = (
        "usage: fedstill privacy RUN [--json]  show the clients' releases and their costs\n"
        "       fedstill privacy plan [flags]  plan noise and accuracy of a release\n"
        "       fedstill privacy import FILE   add up an Opacus history (import --help)\n"
    )
    if not words or asks_help(words[:1]):
        plan_flags = [parser.Section(read("fedstill.report.plan:Plan")(), title="options of privacy plan")]
        usage(words, text + parser.flags_text("fedstill privacy", plan_flags))
    elif words[0] == "plan":
        if (shown := flags.shown("fedstill.report.plan:Plan", words)) is not None:
            flags.parse_settings("fedstill privacy plan", words[1:], shown)
        from fedstill.base.lookup import add_working_folder
        from fedstill.report.plan import Plan, plan

        add_working_folder()
        settings, form = flags.parse_settings("fedstill privacy plan", words[1:], Plan())
        print_found(plan(settings), as_json=form.json_)
    elif words[0] == "import":
        program, rest = "fedstill privacy import FILE", words[2:] if words[1:2] != ["--help"] else words[1:]
        if (shown := flags.shown("fedstill.sites.site.opacus:Import", rest)) is not None:
            flags.parse_settings(program, rest, shown)
        if not words[1:] or words[1].startswith("-"):
            raise Bad(f"the file comes first: {program.replace('FILE', 'accountant.pt')} --delta 1e-5")
        from fedstill.sites.site.opacus import Import

        history, form = flags.parse_settings(program, rest, Import())
        print_found(history.run(Path(words[1])), as_json=form.json_)
    else:
        run, *rest = words
        about = "Show each client's releases in a run and their costs."
        (form,) = parser.parse("fedstill privacy RUN", about, rest, [parser.Section(flags.Format())])
        from fedstill.report import spending as ledger

        if form.json_:
            print_json(ledger.numbers(Path(run)))
        else:
            print_found(({}, ledger.show(Path(run))), as_json=False)


def attack(words: list[str]) -> None:
    """``fedstill attack``."""
    from fedstill import attacks
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
