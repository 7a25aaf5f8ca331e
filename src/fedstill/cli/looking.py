"""``fedstill methods``, ``data``, ``privacy`` and ``attack``: what there is, and what became of it."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.words import Bad, line_of, no_more, terminal

if TYPE_CHECKING:
    pass


def list_methods(words: list[str]) -> None:
    """``fedstill methods``."""
    from rich.table import Table

    from fedstill import methods

    no_more(words)

    table = Table("method", "what it is", "steps at the clients", box=None, pad_edge=False)
    for name in methods.TABLE:
        method = methods.get(name)
        table.add_row(name, (method.__doc__ or "").strip().split("\n")[0], ", ".join(method.steps()))
    terminal().print(table)


def data(words: list[str]) -> None:
    """``fedstill data``."""
    from fedstill.experiment import holdings

    usage = (
        "usage: fedstill data list\n"
        "       fedstill data show NAME [--partition RULE] [--clients K] [--seed N] [--out FILE]"
    )
    if not words or words[0] in ("-h", "--help"):
        print(usage)
    elif words[0] == "list":
        no_more(words[1:])
        terminal().print(holdings.listing())
    elif words[0] == "show":
        from fedstill import flags

        parsed = flags.parse_show("fedstill data show", words[1:])
        terminal().print(*holdings.show(parsed.experiment, parsed.out), sep="\n")
    else:
        raise Bad(f"there is no 'data {words[0]}'; choose list or show")


def privacy(words: list[str]) -> None:
    """``fedstill privacy``."""
    usage = (
        "usage: fedstill privacy RUN        what each client released, when, at what cost, composed how\n"
        "       fedstill privacy plan [--epsilon 1] [--delta 1e-5] [--records 2500] [--classes 10] [--clients 10]"
    )
    if not words or words[0] in ("-h", "--help"):
        print(usage)
        return
    from fedstill.experiment import ledgers

    if words[0] == "plan":
        from fedstill import flags

        settings = flags.parse_plan("fedstill privacy plan", words[1:], ledgers.Plan())
        terminal().print(*ledgers.plan(settings), sep="\n")
    else:
        no_more(words[1:])
        terminal().print(*ledgers.show(Path(words[0])), sep="\n")


def attack_run(words: list[str]) -> None:
    """``fedstill attack``."""
    from fedstill import flags
    from fedstill.experiment import attack, attack_uploads
    from fedstill.experiment.progress import Bars

    usage = (
        "usage: fedstill attack RUN           membership inference by shadow runs; more: fedstill attack RUN --help\n"
        "       fedstill attack RUN uploads   what a curious server reads off labels, images and updates"
    )
    if not words or words[0].startswith("-"):
        if words and words[0] not in ("-h", "--help"):
            raise Bad(f"the run comes first: fedstill attack RUN {' '.join(words)}")
        print(usage)
        return
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
    console.print(*attack.show(found), sep="\n")
    console.print(f"report: {attack.place_of(run, found['client']) / 'attack.html'}", soft_wrap=True)
