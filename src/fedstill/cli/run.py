"""``fedstill run``, ``compare`` and ``report``."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.common import Bad, line_of, print_json, print_wide, terminal, usage
from fedstill.cli.dry_run import note_default, show_estimates

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from rich.console import Console

    from fedstill.cli.flags import CompareFlags, RunOutput
    from fedstill.experiment.job import Job
    from fedstill.report.printed import Kind
    from fedstill.report.record import RunRecord


def run_one(words: list[str]) -> None:
    """``fedstill run METHOD``."""
    from fedstill import methods
    from fedstill.cli import flags
    from fedstill.experiment import config
    from fedstill.lookup import add_working_folder

    names = textwrap.fill(f"methods: {', '.join(methods.TABLE)}", 80, break_on_hyphens=False, subsequent_indent="  ")
    text = (
        f"usage: fedstill run METHOD|FILE.yaml [flags]\n\n{names}\n\n"
        "flags:   fedstill run METHOD --help\nexample: fedstill run fedavg --data digits --model convnet:depth=2"
    )
    if usage(words, text):
        return
    if words[0].startswith("-"):
        if words[0] == "--method" and len(words) > 1:
            raise Bad(f"the method comes first: fedstill run {' '.join(words[1:])}")
        raise Bad(f"the method comes first: fedstill run METHOD {' '.join(words)}")
    add_working_folder()
    name = words[0]
    if (Path(name) / "config.json").is_file():
        from fedstill.runs.folder import RunFolder, is_run

        if is_run(Path(name), certainly=True):  # models of other programs have such a file too
            begun = RunFolder(Path(name))
            command = begun.read_json(begun.config).get("command") or "its command"
            raise Bad(f"{name} is the folder of a run; repeat {command} to resume it")
    if Path(name).suffix in (".yaml", ".yml"):
        experiment, name, method = config.read_yaml(Path(name))
    else:
        experiment, method = config.Experiment(), flags.method_of(name, words[1:])
    parsed = flags.parse_run(f"fedstill run {words[0]}", words[1:], experiment, method)
    from fedstill.experiment.job import Job

    job = Job(parsed.experiment, parsed.method, Path(), name=name, command=line_of(["run", *words]))
    plain = Path("runs") / f"{slug_of(name)}-{_slug(parsed.experiment.data)}-{parsed.experiment.seed}"
    output = parsed.output
    note_default(words, output)
    if output.dry_run:
        show_estimates({name: job}, output)
        return
    _in_folder(output.out, plain, {Path(): job}, lambda out: make_and_show(job.replace(out=out), output))


def _in_folder(given: Path | None, plain: Path, jobs: "Mapping[Path, Job]", make: Callable[[Path], None]) -> None:
    """Call ``make`` with the folder ``given`` or the default folder of these jobs, by their paths in it."""
    from fedstill.experiment.places import default_folder
    from fedstill.runs.lock import Taken

    if given is not None:
        make(given)
        return
    out = default_folder(plain, jobs)
    try:
        make(out)
    except Taken:  # another process has begun there at the same moment
        again = default_folder(plain, jobs)
        if again == out:
            raise
        make(again)


def make_and_show(job: "Job", output: "RunOutput", *, nobody: bool = False) -> None:
    """Run ``job``, write its report and print its results; ``nobody`` as for `_make`."""
    from fedstill.report import tables
    from fedstill.report.page import write_report
    from fedstill.report.record import read_run
    from fedstill.runs.folder import RunFolder

    _make(job, output, nobody=nobody)
    record, page = read_run(job.out), RunFolder(job.out).report
    write_report([record], page)
    if output.json_:
        print_json({**record.summary, "folder": str(job.out), "report": str(page)})
        return
    console = terminal()
    print_wide(tables.terminal([record]))
    _print_remarks(console, [record])
    console.print(f"report: {page}", soft_wrap=True, markup=False)


def _print_remarks(console: "Console", records: "Sequence[RunRecord]") -> None:
    from fedstill.report import privacy

    for sentence in privacy.remarks(records):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _make(job: "Job", output: "RunOutput", *, nobody: bool = False) -> None:
    """Run ``job``; with ``nobody`` its clients are real sites, none of which is asked."""
    from fedstill.experiment.layout import Nobody
    from fedstill.experiment.progress import watch
    from fedstill.experiment.run import run
    from fedstill.tracking.follow import followed

    console = terminal(stderr=output.json_)
    with watch(console, job.title, quiet=output.quiet) as bars, followed(output.track, job.out, bars) as watcher:
        run(job, watcher=watcher, sites=(lambda spec: Nobody()) if nobody else None)


def slug_of(name: str) -> str:
    """A method's name as part of a folder's name."""
    return Path(name).name.replace(".py:", ".").replace(":", ".")


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(text).stem) or "data"


def compare(words: list[str]) -> None:
    """``fedstill compare``."""
    from fedstill.cli import flags
    from fedstill.lookup import add_working_folder

    add_working_folder()
    entries = []
    while words and not words[0].startswith("-"):
        entries.append(words.pop(0))
    parsed = flags.parse_compare("fedstill compare", words, entries)
    command = line_of(["compare", *entries, *words])
    jobs = _jobs(parsed, command)
    note_default(words, parsed.output)
    from fedstill.experiment.checks import check_job  # imported here, as help needs no torch

    for job in jobs.values():  # the last one must not fail after hours of the others
        check_job(job)
    if parsed.output.dry_run:
        first = {label: jobs[Path(label) / f"seed-{parsed.seeds[0]}"] for label in parsed.methods}
        show_estimates(first, parsed.output, seeds=len(parsed.seeds))
        return
    plain = Path("runs") / f"compare-{_slug(parsed.experiment.data)}"
    _in_folder(parsed.output.out, plain, jobs, lambda out: _compare(out, jobs, command, parsed.output))


def _jobs(parsed: "CompareFlags", command: str) -> "dict[Path, Job]":
    """The runs of a comparison, by their paths in its folder."""
    from fedstill.experiment.job import Job

    jobs = {}
    for seed in parsed.seeds:
        experiment = parsed.experiment.model_copy(update={"seed": seed})
        for label, (name, method) in parsed.methods.items():
            path = Path(label) / f"seed-{seed}"
            jobs[path] = Job(experiment, method, path, name=name, label=label, command=command)
    return jobs


def _compare(out: Path, jobs: "Mapping[Path, Job]", command: str, output: "RunOutput") -> None:
    from fedstill.experiment import reuse
    from fedstill.report.record import read_run

    if not output.quiet:
        console = terminal(stderr=output.json_)
        console.print(f"{len(jobs)} runs in {out}", soft_wrap=True, highlight=False, markup=False)
    folders: list[Path] = []
    for path, job in jobs.items():
        here = job.replace(out=out / path)
        reuse.prepare(here, folders)
        _make(here, output)
        folders.append(here.out)
    _show([read_run(folder) for folder in folders], out, command, as_json=output.json_)


def _show(
    records: "Sequence[RunRecord]",
    out: Path,
    command: str | None,
    *,
    as_json: bool,
    latex: bool = False,
    markdown: bool = False,
    with_pareto: bool = False,
    figures: "tuple[Kind, ...]" = (),
    column_cm: float = 8.4,
) -> None:
    from fedstill.report import export, pareto, tables
    from fedstill.report.page import write_page

    page = out / "report.html"
    fronts = pareto.pictures(records) if with_pareto else []
    if with_pareto and not fronts:
        raise Bad("--pareto needs two finished runs of different methods or settings on one task; name more folders")
    write_page(records, page, command=command, fronts=fronts)
    written = export.write_tables(records, out, latex=latex, markdown=markdown)
    written += export.write_fronts(fronts, out)
    if figures:
        from fedstill.report import printed

        drawn = printed.write(records, out, figures, column_cm)
    if as_json:
        more = {"pareto": pareto.lines(fronts)} if fronts else {}
        print_json({"folder": str(out), "report": str(page), "rows": tables.rows(records), **more})
        return
    console = terminal()
    print_wide(pareto.terminal(fronts) if fronts else tables.terminal(records))
    _print_remarks(console, records)
    for file in written:
        console.print(f"table: {file}", soft_wrap=True, markup=False)
    if figures:
        console.print(
            f"figures: {drawn[-1]}, {', '.join(file.name for file in drawn[:-1])}", soft_wrap=True, markup=False
        )
    console.print(f"report: {page}", soft_wrap=True, markup=False)


def report(words: list[str]) -> None:
    """``fedstill report``."""
    from fedstill.cli import flags

    runs, output = flags.parse_report("fedstill report", words)
    from fedstill.report.record import find_runs, read_run

    folders = dict.fromkeys(folder for word in runs for folder in find_runs(word, unfinished=True))
    records = [read_run(folder, unfinished=True) for folder in folders]
    _show(
        records,
        output.out,
        None,
        as_json=output.json_,
        latex=output.latex,
        markdown=output.markdown,
        with_pareto=output.pareto,
        figures=output.figures,
        column_cm=output.column_cm,
    )
