"""``fedstill methods``, ``data``, ``privacy`` and ``attack``: what there is, and what became of it."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.common import Bad, line_of, no_more, terminal, usage

if TYPE_CHECKING:
    pass


def list_methods(words: list[str]) -> None:
    """``fedstill methods``."""
    from rich.table import Table

    from fedstill import methods

    no_more(words)

    table = Table("method", "what it is", box=None, pad_edge=False)
    for name in methods.TABLE:
        table.add_row(name, (methods.find(name).__doc__ or "").strip().split("\n")[0])
    terminal().print(table)
    print("\nits settings: fedstill run METHOD --help; where it differs from its paper: docs/methods/METHOD.md")


def data(words: list[str]) -> None:
    """``fedstill data``."""
    from fedstill.report import partition as holdings

    text = (
        "usage: fedstill data list\n"
        "       fedstill data show NAME [--partition RULE] [--clients K] [--seed N] [--out FILE]"
    )
    if usage(words, text):
        return
    if words[0] == "list":
        no_more(words[1:])
        terminal().print(holdings.listing())
    elif words[0] == "show":
        from fedstill.cli import flags

        parsed = flags.parse_show("fedstill data show", words[1:])
        terminal().print(*holdings.show(parsed.experiment, parsed.out), sep="\n")
    else:
        raise Bad(f"there is no 'data {words[0]}'; choose list or show")


def privacy(words: list[str]) -> None:
    """``fedstill privacy``."""
    text = (
        "usage: fedstill privacy RUN        what each client released, when, at what cost, composed how\n"
        "       fedstill privacy plan [--epsilon 1] [--delta 1e-5] [--records 2500] [--classes 10] [--clients 10]"
    )
    if usage(words, text):
        return
    from fedstill.report import ledgers

    if words[0] == "plan":
        from fedstill.cli import flags

        settings = flags.parse_plan("fedstill privacy plan", words[1:], ledgers.Plan())
        terminal().print(*ledgers.plan(settings), sep="\n")
    else:
        no_more(words[1:])
        terminal().print(*ledgers.show(Path(words[0])), sep="\n")


def attack_run(words: list[str]) -> None:
    """``fedstill attack``."""
    from fedstill.attacks import membership as attack
    from fedstill.attacks import report as attack_report
    from fedstill.attacks import uploads as attack_uploads
    from fedstill.cli import flags
    from fedstill.experiment.progress import Bars

    text = (
        "usage: fedstill attack RUN           membership inference by shadow runs; more: fedstill attack RUN --help\n"
        "       fedstill attack RUN uploads   what a curious server reads off labels, images and updates"
    )
    if usage(words, text):
        return
    if words[0].startswith("-"):
        raise Bad(f"the run comes first: fedstill attack RUN {' '.join(words)}")
    console, run = terminal(), Path(words[0])
    if words[1:2] == ["uploads"]:
        what = flags.parse_attack("fedstill attack RUN uploads", words[2:], attack_uploads.Uploads())
        with console.status("reading uploads") as status:
            read = attack_uploads.uploads(run, what, progress=lambda what: status.update(f"reading uploads: {what}"))
        console.print(*attack_uploads.show(read), sep="\n")
        console.print(f"numbers: {run / 'attack' / 'uploads.json'}", soft_wrap=True)
        return
    settings = flags.parse_attack("fedstill attack RUN", words[1:], attack.Membership())
    command = line_of(["attack", *words])
    found = attack.membership(run, settings, watch=lambda world: Bars(console, world), command=command)
    console.print(*attack_report.show(found), sep="\n")
    console.print(f"report: {attack.place_of(run, found['client']) / 'attack.html'}", soft_wrap=True)
