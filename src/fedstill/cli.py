"""The command ``fedstill``: this file knows the words, and imports what is heavy only once a word needs it."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

HELP = """usage: fedstill COMMAND ...

Federated learning by distillation: clients answer once with something small, every byte is counted.

commands:
  run METHOD [flags]         run one method on one task           fedstill run fedgm --help
  run FILE.yaml [flags]      the same, described in a file
  run --extend RUN [flags]   ask the clients that are missing in a finished one-shot run
  compare METHOD ... [flags] several methods on the same clients  fedstill compare --help
  report RUN ...             a table and a page of finished runs
  methods                    what there is to run
  data list | show           data sets, and who would hold what
  deploy site | app | check  real clients over TLS on Flower: what it needs, and a trial on this machine
  privacy RUN | plan         what a run's clients released at what cost, or what a release would cost
  attack RUN                 whose records can be told from a run's model  fedstill attack --help
  --version

example:
  fedstill run fedgm --data digits --partition classes:1 --ipc 1 --model convnet:width=32 --out runs/first
"""


class Bad(Exception):
    """Something the user can mend: printed as one sentence, exit code 2."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, with 2 for what the user can mend, with 130 when interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(words)
    except Bad as error:
        _fail(str(error))
    except ValueError as error:
        if os.environ.get("FEDSTILL_TRACEBACK"):
            raise
        _fail(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command again goes on where this stopped", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if os.environ.get("FEDSTILL_TRACEBACK"):
            raise
        _fail(f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}")
    except Exception as error:
        from fedstill.engines.server import TooFewReplies

        if not isinstance(error, TooFewReplies):
            raise
        print(f"fedstill: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _fail(sentence: str) -> None:
    print(f"fedstill: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return
    if words[0] in ("-V", "--version"):
        from fedstill import __version__

        print(f"fedstill {__version__}")
        return
    command = COMMANDS.get(words[0])
    if command is None:
        raise Bad(f"there is no command '{words[0]}'; choose {', '.join(COMMANDS)} (fedstill --help)")
    command(words[1:])


# ------------------------------------------------------------------------------------------------------------- run


def _run(words: list[str]) -> None:
    from fedstill import flags, methods
    from fedstill.experiment import config
    from fedstill.experiment.run import Job

    if words and words[0] == "--extend":
        _extend(words[1:])
        return
    if not words or words[0].startswith("-"):
        if words and words[0] not in ("-h", "--help"):
            raise Bad(f"the method comes first: fedstill run METHOD {' '.join(words)}")
        print(f"usage: fedstill run METHOD|FILE.yaml [flags]\n\nmethods: {', '.join(methods.TABLE)}")
        print("\nflags:   fedstill run METHOD --help\nexample: fedstill run fedavg --data digits --rounds 5")
        return
    name = words[0]
    if Path(name).suffix in (".yaml", ".yml"):
        experiment, name, method = config.read_yaml(Path(name))
    else:
        experiment, method = config.Experiment(), flags.defaults(methods.get(name))
    parsed = flags.parse_run(f"fedstill run {words[0]}", words[1:], experiment, method)
    out = (
        parsed.out
        or Path("runs") / f"{name.replace(':', '.')}-{_slug(parsed.experiment.data)}-{parsed.experiment.seed}"
    )
    _make_and_show(Job(parsed.experiment, name, parsed.method, out, command=_command(["run", *words])))


def _make_and_show(job: "Any") -> None:
    from fedstill.experiment import tables
    from fedstill.experiment.record import read_run

    console = _console()
    _make(job, console)
    record = read_run(job.out)
    _page([record], job.out / "report.html", None)
    console.print(tables.terminal([record]))
    console.print(f"report: {job.out / 'report.html'}", soft_wrap=True)


def _extend(words: list[str]) -> None:
    from fedstill import flags
    from fedstill.experiment import extend

    if not words or words[0].startswith("-"):
        raise Bad("--extend needs a finished run: fedstill run --extend RUN [--out FOLDER] [--timeout S] ...")
    run = Path(words[0])
    out = run.with_name(f"{run.name}-extended")
    job = extend.read_job(run, out, _command(["run", "--extend", *words]))
    if extend.asked_sites(run):
        raise Bad(
            f"{run} asked real sites; ask the late ones with flwr run APP CONNECTION --run-config "
            f'\'extend="{run.absolute()}" out="{out.absolute()}"\''
        )
    parsed = flags.parse_run(f"fedstill run --extend {run}", words[1:], job.experiment, job.method)
    job = job._replace(experiment=parsed.experiment, method=parsed.method, out=parsed.out or out)
    extend.begin(run, job)
    _make_and_show(job)


def _make(job: "Any", console: "Console") -> None:
    from fedstill.experiment.progress import Bars
    from fedstill.experiment.run import run

    label = f"{job.label or job.name}, seed {job.experiment.seed}"
    with Bars(console, label) as bars:
        summary = run(job, watcher=bars)
    console.print(f"{label}: accuracy {100 * summary['accuracy']:.1f} %, {summary['seconds']:.0f} s", highlight=False)


def _console() -> "Console":
    from rich.console import Console

    return Console()


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(text).stem) or "data"


def _command(words: Sequence[str]) -> str:
    return shlex.join(["fedstill", *words])


def _page(records: "Sequence[Any]", path: Path, command: str | None) -> None:
    from fedstill.experiment.html import write_report

    write_report(records, path, command=command)


# --------------------------------------------------------------------------------------------------------- compare


def _compare(words: list[str]) -> None:
    from fedstill import flags
    from fedstill.experiment import extend
    from fedstill.experiment.record import read_run
    from fedstill.experiment.run import Job

    entries = []
    while words and not words[0].startswith("-"):
        entries.append(words.pop(0))
    parsed = flags.parse_compare("fedstill compare", words, entries)
    out = parsed.out or Path("runs") / f"compare-{_slug(parsed.experiment.data)}"
    command = _command(["compare", *entries, *words])
    console = _console()
    folders: list[Path] = []
    for seed in parsed.seeds:
        experiment = parsed.experiment.model_copy(update={"seed": seed})
        for label, (name, method) in parsed.methods.items():
            job = Job(experiment, name, method, out / label / f"seed-{seed}", label=label, command=command)
            extend.reuse(job, folders)
            _make(job, console)
            folders.append(job.out)
    _show([read_run(folder) for folder in folders], out, command, console)


def _show(records: "Sequence[Any]", out: Path, command: str | None, console: "Console") -> None:
    from fedstill import files
    from fedstill.experiment import tables

    _page(records, out / "report.html", command)
    files.write_json(out / "table.json", tables.rows(records))
    files.write_bytes(out / "table.csv", tables.csv_text(records).encode())
    files.write_bytes(out / "table.md", tables.markdown(records).encode())
    console.print(tables.terminal(records))
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)


def _report(words: list[str]) -> None:
    from fedstill.experiment.record import find_runs, read_run

    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: fedstill report RUN ... [--out FOLDER]\n\nA table and a page of finished runs or folders of runs."
        )
        print("\nexample: fedstill report runs/compare-digits --out runs/again")
        return
    out = Path("runs/report")
    if "--out" in words:
        at = words.index("--out")
        if at + 1 == len(words):
            raise Bad("--out needs a folder")
        out = Path(words[at + 1])
        words = words[:at] + words[at + 2 :]
    if unknown := [word for word in words if word.startswith("-")]:
        raise Bad(f"there is no flag {unknown[0]}; report knows --out FOLDER")
    folders = [folder for word in words for folder in find_runs(word)]
    _show([read_run(folder) for folder in folders], out, None, _console())


def _no_more(words: Sequence[str]) -> None:
    if words:
        raise Bad(f"'{words[0]}' is one word too many here")


# ----------------------------------------------------------------------------------------------- methods and data


def _methods(words: list[str]) -> None:
    from rich.table import Table

    from fedstill import methods

    _no_more(words)

    table = Table("method", "what it is", "steps at the clients", box=None, pad_edge=False)
    for name in methods.TABLE:
        method = methods.get(name)
        table.add_row(name, (method.__doc__ or "").strip().split("\n")[0], ", ".join(method.steps()))
    _console().print(table)


def _data(words: list[str]) -> None:
    from fedstill.experiment import holdings

    usage = (
        "usage: fedstill data list\n"
        "       fedstill data show NAME [--partition RULE] [--clients K] [--seed N] [--out FILE]"
    )
    if not words or words[0] in ("-h", "--help"):
        print(usage)
    elif words[0] == "list":
        _no_more(words[1:])
        _console().print(holdings.listing())
    elif words[0] == "show":
        from fedstill import flags

        parsed = flags.parse_show("fedstill data show", words[1:])
        _console().print(*holdings.show(parsed.experiment, parsed.out), sep="\n")
    else:
        raise Bad(f"there is no 'data {words[0]}'; choose list or show")


# --------------------------------------------------------------------------------------------------------- privacy


def _privacy(words: list[str]) -> None:
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
        _console().print(*ledgers.plan(settings), sep="\n")
    else:
        _no_more(words[1:])
        _console().print(*ledgers.show(Path(words[0])), sep="\n")


def _attack(words: list[str]) -> None:
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
    console, run = _console(), Path(words[0])
    if words[1:2] == ["uploads"]:
        what = flags.parse_attack("fedstill attack RUN uploads", words[2:], attack_uploads.Uploads())
        with console.status("reading uploads") as status:
            read = attack_uploads.uploads(run, what, progress=lambda what: status.update(f"reading uploads: {what}"))
        console.print(*attack_uploads.show(read), sep="\n")
        console.print(f"numbers: {run / 'attack' / 'uploads.json'}", soft_wrap=True)
        return
    settings = flags.parse_attack("fedstill attack RUN", words[1:], attack.Membership())
    command = _command(["attack", *words])
    found = attack.membership(run, settings, watch=lambda world: Bars(console, world), command=command)
    console.print(*attack.show(found), sep="\n")
    console.print(f"report: {attack.place_of(run, found['client']) / 'attack.html'}", soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------- deploy


def _deploy(words: list[str]) -> None:
    usage = (
        "usage: fedstill deploy site FOLDER --client N --data PATH --state FOLDER --methods METHOD ... [--budget E]\n"
        "                                   a site's policy and ledger; more: fedstill deploy site --help\n"
        "       fedstill deploy app FOLDER  the folder that 'flwr run' wants\n"
        "       fedstill deploy check [FOLDER]\n"
        "                                   a SuperLink and two sites on this machine, tried (docs/deploy.md)"
    )
    if not words or words[0] in ("-h", "--help"):
        print(usage)
        return
    from fedstill.experiment import deploy

    if words[0] == "check":
        _no_more(words[2:])
        if unknown := [word for word in words[1:] if word.startswith("-")]:
            raise Bad(f"there is no flag {unknown[0]}; deploy check knows an empty folder for what it makes")
        console = _console()
        try:
            for line in deploy.check(Path(words[1]) if words[1:] else None):
                console.print(line, soft_wrap=True, highlight=False)
        except RuntimeError as error:
            print(f"fedstill: {error}", file=sys.stderr)
            raise SystemExit(1) from None
    elif words[0] == "app" and len(words) == 2 and not words[1].startswith("-"):
        print(f"the app is in {deploy.app(Path(words[1]))}; 'flwr run {words[1]} CONNECTION --run-config ...' runs it")
    elif words[0] == "site":
        from fedstill import flags

        folder, settings = flags.parse_site("fedstill deploy site", words[1:])
        deploy.site(folder, settings)
        print(f"policy: {folder / 'policy.toml'}; edit it as you like, the site reads it anew for each request")
    else:
        raise Bad(f"'deploy {' '.join(words)}' is none of: deploy site FOLDER, deploy app FOLDER, deploy check")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "run": _run,
    "compare": _compare,
    "report": _report,
    "methods": _methods,
    "data": _data,
    "deploy": _deploy,
    "privacy": _privacy,
    "attack": _attack,
}
