"""``fedstill run``, also with ``--extend``, ``--without`` and ``--replies``: runs on the replies of a finished run."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.common import Bad, asks_help, line_of
from fedstill.cli.run import make_and_show, run_one, slug_of

if TYPE_CHECKING:
    from fedstill.cli.flags import RunOutput


def run(words: list[str]) -> None:
    """``fedstill run``, of a method or of a finished run's replies."""
    if words and words[0] in _FORMS:
        _FORMS[words[0]](words[1:])
    else:
        run_one(words)


def _extended(words: list[str]) -> None:
    """``fedstill run --extend``."""
    from fedstill.cli import flags
    from fedstill.experiment import extend
    from fedstill.experiment.finished import read_job
    from fedstill.lookup import add_working_folder
    from fedstill.runs.folder import RunFolder

    text = (
        "usage: fedstill run --extend RUN [--out FOLDER] [flags]\n\n"
        "Ask the clients whose reply is missing in the finished one-shot run RUN.\n"
        "The flags are those of its method: fedstill run METHOD --help"
    )
    if asks_help(words[:1]):
        print(text)
        return
    if not words or words[0].startswith("-"):
        raise Bad("--extend needs a finished run: fedstill run --extend RUN [--out FOLDER] [--timeout S] ...")
    add_working_folder()
    run = _run_of(words[0])
    out = run.with_name(f"{run.name}-extended")
    job = read_job(run, out, line_of(["run", "--extend", *words]))
    if RunFolder(run).asked_sites:
        raise Bad(
            f"{run} asked real sites; extend it with flwr run APP CONNECTION --run-config "
            f'\'extend="{run.absolute()}" out="{out.absolute()}"\''
        )
    parsed = flags.parse_run(f"fedstill run --extend {run}", words[1:], job.experiment, job.method)
    _refuse_dry_run(parsed.output)
    job = job.replace(experiment=parsed.experiment, method=parsed.method, out=parsed.output.out or out)
    extend.begin(run, job)
    make_and_show(job, parsed.output)


def _without_client(words: list[str]) -> None:
    """``fedstill run --without``."""
    from fedstill.cli import flags
    from fedstill.experiment import config
    from fedstill.experiment.finished import read_job
    from fedstill.experiment.withdraw import leave_out
    from fedstill.lookup import add_working_folder
    from fedstill.runs.folder import RunFolder

    text = (
        "usage: fedstill run --without CLIENT RUN [--out FOLDER] [flags]\n\n"
        "The model that the other clients of the finished one-shot run RUN would have made;\n"
        "no client is asked. The flags are those of fedstill run that change no result.\n"
        "example: fedstill run --without 3 runs/fedgm-digits-0"
    )
    if asks_help(words[:1]):
        print(text)
        return
    if len(words) < 2 or not words[0].isdecimal() or words[1].startswith("-"):
        raise Bad("--without needs a client's number and a finished run: fedstill run --without 3 RUN [--out FOLDER]")
    add_working_folder()
    client, run = int(words[0]), _run_of(words[1])
    job = read_job(run, run.with_name(f"{run.name}-without-{client}"), line_of(["run", "--without", *words]))
    parsed = flags.parse_run(f"fedstill run --without {client} {run}", words[2:], job.experiment, job.method)
    _refuse_dry_run(parsed.output)
    changed = job.replace(experiment=parsed.experiment, method=parsed.method, out=parsed.output.out or job.out)
    if other := config.difference(job.description(), changed.description()):
        raise Bad(f"--without repeats {run} with its own settings, but {other}; start another run for that")
    if parsed.experiment.min_clients != job.experiment.min_clients:
        raise Bad("--without takes all other replies that there are; leave --min-clients out")
    job = leave_out(run, client, changed)
    make_and_show(job, parsed.output, nobody=RunFolder(run).asked_sites)


def _on_replies(words: list[str]) -> None:
    """``fedstill run --replies``."""
    from fedstill.cli import flags
    from fedstill.experiment import reuse
    from fedstill.experiment.finished import read_job
    from fedstill.lookup import add_working_folder
    from fedstill.runs.folder import RunFolder

    text = (
        "usage: fedstill run --replies RUN METHOD [--out FOLDER] [flags]\n\n"
        "Another method, or other settings of the server, on the replies to the first request of\n"
        "the finished run RUN. The clients' settings and the task are those of RUN; no client is\n"
        "asked for these replies again.\n"
        "The flags are those of the method: fedstill run METHOD --help\n"
        "example: fedstill run --replies runs/feddf-digits-0 dense --epochs 40"
    )
    if asks_help(words[:1]):
        print(text)
        return
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise Bad("--replies needs a finished run and a method: fedstill run --replies RUN METHOD [--out FOLDER]")
    add_working_folder()
    run, name = _run_of(words[0]), words[1]
    before = read_job(run, run.with_name(f"{run.name}-{slug_of(name)}"), line_of(["run", "--replies", *words]))
    method = before.method if name == before.name else flags.method_of(name, words[2:])
    method = reuse.with_client_settings(method, before.method)
    parsed = flags.parse_run(f"fedstill run --replies {run} {name}", words[2:], before.experiment, method)
    _refuse_dry_run(parsed.output)
    job = before.replace(
        experiment=parsed.experiment, name=name, method=parsed.method, label="", out=parsed.output.out or before.out
    )
    job = reuse.repeat(run, job)
    make_and_show(job, parsed.output, nobody=RunFolder(run).asked_sites)


def _run_of(word: str) -> Path:
    """The folder of a run, with a name also where it is the working folder."""
    if not word:
        raise Bad("the run is ''; give the folder of a finished run (fedstill runs)")
    return Path(word) if Path(word).name not in ("", "..") else Path(os.path.abspath(word))


def _refuse_dry_run(output: "RunOutput") -> None:
    if output.dry_run:
        raise Bad("--dry-run estimates a new run; this one takes the replies of a finished run, and their bytes")


_FORMS: Mapping[str, Callable[[list[str]], None]] = {
    "--extend": _extended,
    "--without": _without_client,
    "--replies": _on_replies,
}
