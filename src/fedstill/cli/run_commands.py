"""`fedstill run`, `compare`, `sweep`, `report`: everything that computes."""

import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstill import methods
from fedstill.cli.command import Command, Part, read, sections_of
from fedstill.cli.output import Bad, asks_help, line_of, print_json, print_sentences, print_wide, table, terminal, usage

if TYPE_CHECKING:
    from fedstill.cli.flags import CompareFlags, OneRunOutput, ReportOutput, RunOutput
    from fedstill.experiment.estimate import Estimate, Request
    from fedstill.experiment.job import Job
    from fedstill.report.record import RunRecord


def note_default(words: "Sequence[str]", output: "RunOutput") -> None:
    """Say that the default data set is large, if a command names none."""
    from fedstill.experiment.config import Experiment

    named = any(word.partition("=")[0] == "--data" for word in words)
    if named or output.json_ or output.quiet or (words and Path(words[0]).suffix in (".yaml", ".yml")):
        return
    data = Experiment().data
    sentence = f"data: {data}, the default, with 60,000 images; --data digits takes seconds, --limit 2000 fewer records"
    terminal().print(sentence + ("" if output.dry_run else ", and --dry-run tells the time"), soft_wrap=True)


def show_estimates(jobs: "Mapping[str, Job]", output: "RunOutput", *, seeds: int = 1) -> None:
    """Print the estimate of each job, by label; ``seeds`` is the number of runs of each."""
    from fedstill.experiment.estimate import estimate
    from fedstill.experiment.progress import watch

    console = terminal(stderr=output.json_)
    found: dict[str, Estimate] = {}
    for label, job in jobs.items():
        with watch(console, f"dry run of {label}", quiet=output.quiet) as watcher:
            found[label] = estimate(job, watcher)
    if output.json_:
        names = {label: {"label": label, "method": jobs[label].name, "seeds": seeds} for label in found}
        print_json({"estimates": [{**names[label], **_as_json(each)} for label, each in found.items()]})
        return
    for label, each in found.items():
        _show_estimate(label, each, jobs[label], seeds)
    if len(found) > 1 or seeds > 1:
        total = seeds * sum(each.seconds for each in found.values())
        print(f"all {seeds * len(found)} runs: about {_clock(total)}")
    print("dry run: nothing was run and no folder was written")


def _as_json(each: "Estimate") -> dict[str, Any]:
    from fedstill.report import guarantees

    return {
        "requests": [_request(request) for request in each.requests],
        "bytes_up": each.bytes_up,
        "bytes_down": each.bytes_down,
        "bytes_judging": each.bytes_judging,
        "guarantee": guarantees.as_json(each.guarantee),
        "within_budget": each.within_budget,
        "at_most": each.at_most,
        "seconds": each.seconds,
        "seconds_clients": each.seconds_clients,
        "seconds_server": each.seconds_server,
        "clients_at_once": each.at_once,
    }


def _request(request: "Request") -> dict[str, Any]:
    facts = request._asdict()
    return facts | {"bytes_up_per_client": facts.pop("up"), "bytes_down_per_client": facts.pop("down")}


def _show_estimate(label: str, each: "Estimate", job: "Job", seeds: int) -> None:
    from fedstill.report.guarantees import words
    from fedstill.report.record import human_bytes

    task = job.experiment
    console = terminal()
    title = f"{label} on {task.data}, {task.partition}, {task.clients} clients" + (f", {seeds} seeds" * (seeds > 1))
    console.print(title, style="bold", highlight=False, soft_wrap=True, markup=False)
    headings = ("step", "requests", "clients", "down, each", "up, each", "seconds, each")
    rows = (
        (request.step, str(request.times), str(request.clients))
        + (human_bytes(request.down), human_bytes(request.up), f"{request.seconds:.2g}")
        for request in each.requests
    )
    console.print(table(headings, rows, whole=headings))
    lines = [
        f"bytes:   {human_bytes(each.bytes_up)} up, {human_bytes(each.bytes_down)} down; of a client "
        f"{human_bytes(each.bytes_up / task.clients)} up, {human_bytes(each.bytes_down / task.clients)} down"
        + (f"; {human_bytes(each.bytes_judging)} for evaluations" if each.bytes_judging else ""),
        f"privacy: {'at most ' * (each.at_most and each.guarantee.holds)}{words(each.guarantee)}"
        + ("" if each.guarantee.holds else f" ({each.guarantee.reason})")
        + ("; rounds ask some of the clients, so that none releases in all of them" if each.at_most else "")
        + ("" if each.within_budget else f"; the budget {'may end' if each.at_most else 'ends'} the releases early"),
        f"time:    about {_clock(each.seconds)} (clients {_clock(each.seconds_clients)}, {each.at_once} at once; "
        f"server {_clock(each.seconds_server)}; without the start of processes)",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    from fedstill.experiment.progress import clock

    return f"{seconds:.1f} s" if seconds < 10 else clock(seconds)


def run(words: list[str]) -> None:
    """``fedstill run``: a method, a file, or a form that takes the replies of a finished run."""
    if words and words[0] in _FORMS:
        _reuse(_FORMS[words[0]], words)
        return
    from fedstill.base.lookup import add_working_folder

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
    _refuse_folder(Path(words[0]))
    _run_one(words)


def _refuse_folder(place: Path) -> None:
    """Refuse the folder of a run in place of a method; a model of another program has a ``config.json`` too."""
    if (place / "config.json").is_file():
        from fedstill.runs.folder import RunFolder, is_run

        if is_run(place, certainly=True):
            begun = RunFolder(place)
            command = begun.read_json(begun.config).get("command") or "its command"
            raise Bad(f"{place} is the folder of a run; repeat {command} to resume it")


def _run_one(words: list[str]) -> None:
    """``fedstill run METHOD`` or ``FILE.yaml``."""
    from fedstill.cli import flags
    from fedstill.experiment import config

    name = words[0]
    if Path(name).suffix in (".yaml", ".yml"):
        experiment, name, method = config.read_yaml(Path(name))
    else:
        experiment, method = config.Experiment(), flags.method_of(name, words[1:])
    experiment, method, output = flags.parse_run(f"fedstill run {words[0]}", words[1:], experiment, method)
    from fedstill.experiment.job import Job

    job = Job(experiment, method, Path(), name=name, command=line_of(["run", *words]))
    note_default(words, output)
    if output.tune:
        _tune(job, output)
        return
    if output.dry_run:
        show_estimates({name: job}, output)
        return
    plain = Path("runs") / f"{slug_of(name)}-{_slug(experiment.data)}-{experiment.seed}"
    _in_folder(output.out, plain, [job], lambda _, jobs: make_and_show(jobs[0], output))


def _tune(job: "Job", output: "OneRunOutput") -> None:
    """``fedstill run METHOD --tune``; its usual folder is named by its settings, as the chosen ones come later."""
    from fedstill.experiment import config
    from fedstill.experiment.tries import check_tries

    if output.dry_run:
        raise Bad("--dry-run estimates one run, and --tune makes several; leave one of them out")
    check_tries(job)
    task = job.experiment
    digest = config.digest(task, {job.name: (job.name, job.method)}, job.own_code())
    plain = Path("runs") / f"{slug_of(job.name)}-{_slug(task.data)}-{task.seed}-tuned-{digest}"
    make_and_show(job.replace(out=output.out or plain), output)


def _in_folder(
    given: Path | None, plain: Path, jobs: "Sequence[Job]", make: "Callable[[Path, Sequence[Job]], None]"
) -> None:
    """Call ``make`` with the folder of a command and its jobs in there.

    Args:
        given: the folder, if the command names it.
        plain: its usual folder otherwise.
        jobs: the jobs, each with a folder relative to that.
        make: the work.
    """
    from fedstill.experiment.job import default_folder
    from fedstill.runs.folder import Taken

    def inside(out: Path) -> None:
        make(out, [job.replace(out=out / job.out) for job in jobs])

    if given is not None:
        inside(given)
        return
    places = {job.out: job for job in jobs}
    out = default_folder(plain, places)
    try:
        inside(out)
    except Taken:  # another process has begun there at the same moment
        again = default_folder(plain, places)
        if again == out:
            raise
        inside(again)


def make_and_show(job: "Job", output: "RunOutput", *, nobody: bool = False) -> None:
    """Run ``job``, write its report and print its results; ``nobody`` as for `fedstill.library.finish`."""
    from fedstill.report import spending, tables
    from fedstill.report.export import told
    from fedstill.report.page import write_report
    from fedstill.runs.folder import RunFolder

    record, page = _finish(job, output, nobody=nobody), RunFolder(job.out).report
    write_report([record], page)
    if output.json_:
        print_json({**record.summary, "remarks": told([record]), "folder": str(job.out), "report": str(page)})
        return
    console = terminal()
    print_wide(tables.terminal([record]))
    print_sentences(spending.remarks([record]))
    console.print(f"report: {page}", soft_wrap=True, markup=False)


def _finish(job: "Job", output: "RunOutput", *, nobody: bool = False) -> "RunRecord":
    """Run ``job`` as `fedstill.run` does, with the progress on this command's terminal."""
    from fedstill.experiment.progress import watch
    from fedstill.library import finish

    more: dict[str, Any] = {"tune": True} if getattr(output, "tune", False) else {}
    with watch(terminal(stderr=output.json_), job.title, quiet=output.quiet) as bars:
        return finish(job, bars, track=output.track, nobody=nobody, **more)


def slug_of(name: str) -> str:
    """A method's name as part of a folder's name."""
    return Path(name).name.replace(".py:", ".").replace(":", ".")


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(text).stem) or "data"


def compare(words: list[str]) -> None:
    """``fedstill compare``."""
    from fedstill.base.lookup import add_working_folder
    from fedstill.cli import flags

    add_working_folder()
    entries = []
    while words and not words[0].startswith("-"):
        entries.append(words.pop(0))
    parsed = flags.parse_compare("fedstill compare", words, entries)
    command = line_of(["compare", *entries, *words])
    jobs = _jobs(parsed, command)
    note_default(words, parsed.output)
    from fedstill.experiment.checks import check_job  # imported here, as help needs no torch

    for job in jobs:  # the last one must not fail after hours of the others
        check_job(job)
    if parsed.output.dry_run:
        first = {job.label: job for job in jobs if job.experiment.seed == parsed.seeds[0]}
        show_estimates(first, parsed.output, seeds=len(parsed.seeds))
        return
    plain = Path("runs") / f"compare-{_slug(parsed.experiment.data)}"
    _in_folder(parsed.output.out, plain, jobs, lambda out, jobs: _compare(out, jobs, command, parsed.output))


def _jobs(parsed: "CompareFlags", command: str) -> "list[Job]":
    """The runs of a comparison, each with its path in the folder of the comparison."""
    from fedstill.experiment.job import Job

    return [
        Job(
            parsed.experiment.model_copy(update={"seed": seed}),
            method,
            Path(label) / f"seed-{seed}",
            name=name,
            label=label,
            command=command,
        )
        for seed in parsed.seeds
        for label, (name, method) in parsed.methods.items()
    ]


def _compare(out: Path, jobs: "Sequence[Job]", command: str, output: "RunOutput") -> None:
    from fedstill.experiment import reuse

    if not output.quiet:
        console = terminal(stderr=output.json_)
        console.print(f"{len(jobs)} runs in {out}", soft_wrap=True, highlight=False, markup=False)
    records: list[RunRecord] = []
    for job in jobs:
        reuse.prepare(job, [record.folder for record in records])
        records.append(_finish(job, output))
    _show_runs(records, out, command, output, _others(out, [job.out for job in jobs]))


def _others(out: Path, shown: "Sequence[Path]") -> list[str]:
    """The sentence on finished runs of an earlier comparison in ``out``, which the tables of ``shown`` lack."""
    from fedstill.report.record import find_runs

    known = {folder.resolve() for folder in shown}
    others = [folder for folder in find_runs(str(out)) if folder.resolve() not in known]
    if not others:
        return []
    named = ", ".join("/".join(folder.parts[-2:]) for folder in others[:3]) + (" ..." if others[3:] else "")
    return [
        f"{out} has finished runs of an earlier command too, which this table lacks ({named}); fedstill report {out} "
        "shows all"
    ]


def _show_runs(
    records: "Sequence[RunRecord]",
    out: Path,
    command: str | None,
    output: "RunOutput | ReportOutput",
    remarks: "Sequence[str]" = (),
) -> None:
    """Write the page and the tables of these runs, and print the table; a comparison's have their usual form."""
    from fedstill.cli.flags import ReportOutput
    from fedstill.report import export, pareto, spending, tables
    from fedstill.report.page import write_page

    form = output if isinstance(output, ReportOutput) else ReportOutput()
    page = out / "report.html"
    fronts = pareto.pictures(records) if form.pareto else []
    if form.pareto and not fronts:
        raise Bad("--pareto needs two finished runs of different methods or settings on one task; name more folders")
    write_page(records, page, command=command, fronts=fronts)
    written = export.write_tables(records, out, latex=form.latex, markdown=form.markdown)
    written += export.write_fronts(fronts, out, export.told(records))
    drawn: Sequence[Path] = ()
    if form.figures:
        from fedstill.report import printed

        drawn = printed.write(records, out, form.figures, form.column_cm)
    if output.json_:
        more = {"pareto": pareto.lines(fronts)} if fronts else {}
        print_json(
            {
                "folder": str(out),
                "report": str(page),
                "rows": tables.rows(records),
                "remarks": [*export.told(records), *remarks],
                **more,
            }
        )
        return
    console = terminal()
    print_wide(pareto.terminal(fronts) if fronts else tables.terminal(records))
    print_sentences([*spending.remarks(records), *remarks])
    for file in written:
        console.print(f"table: {file}", soft_wrap=True, markup=False)
    if drawn:
        console.print(
            f"figures: {drawn[-1]}, {', '.join(file.name for file in drawn[:-1])}", soft_wrap=True, markup=False
        )
    console.print(f"report: {page}", soft_wrap=True, markup=False)
    old = [name for name in ("table.tex", "table.md") if (out / name).exists() and out / name not in written]
    print_sentences([f"{' and '.join(old)} in {out} stayed as before, and may be of other runs."] if old else [])


def report(words: list[str], output: "ReportOutput") -> None:
    """``fedstill report``."""
    from fedstill.report.record import find_runs, read_run
    from fedstill.runs.folder import is_run

    folders: dict[Path, Path] = {}  # each once, however it is named
    for folder in (folder for word in words for folder in find_runs(word, unfinished=True)):
        folders.setdefault(folder.resolve(), folder)
    if is_run(output.out, certainly=True) and {*folders} != {output.out.resolve()}:
        raise Bad(f"--out is {output.out}, the folder of a run, whose own page would be lost; give another folder")
    _show_runs([read_run(folder, unfinished=True) for folder in folders.values()], output.out, None, output)


class _Form(NamedTuple):
    """A form of ``fedstill run`` that takes the replies of a finished run.

    Attributes:
        run: the function, which gets the words that come first, the flags and the command line.
        takes: the number of words that come first.
        usage: its help text.
        needs: the sentence if one of these words is missing.
    """

    run: "Callable[[list[str], list[str], str], None]"
    takes: int
    usage: str
    needs: str


def _reuse(form: _Form, words: list[str]) -> None:
    """Run a form with the words after ``fedstill run``, of which the first is the form's name."""
    from fedstill.base.lookup import add_working_folder

    first, flags = words[1 : 1 + form.takes], words[1 + form.takes :]
    if asks_help(first[:1]):
        print(form.usage)
        return
    if len(first) < form.takes or any(word.startswith("-") for word in first):
        raise Bad(form.needs)
    add_working_folder()
    form.run(first, flags, line_of(["run", *words]))


def _extend(first: list[str], words: list[str], command: str) -> None:
    """``fedstill run --extend``."""
    from fedstill.experiment import reuse
    from fedstill.runs.folder import RunFolder

    run = _run_of(first[0])
    before = reuse.read_job(run, run.with_name(f"{run.name}-extended"), command)
    if RunFolder(run).asked_sites:
        raise Bad(
            f"{run} asked real sites; extend it with flwr run APP CONNECTION --run-config "
            f'\'extend="{run.absolute()}" out="{before.out.absolute()}"\''
        )
    job, output = _changed(before, f"fedstill run --extend {run}", words)
    reuse.begin(run, job)
    make_and_show(job, output)


def _leave_out(first: list[str], words: list[str], command: str) -> None:
    """``fedstill run --without``."""
    from fedstill.experiment import config, reuse
    from fedstill.runs.folder import RunFolder

    if not first[0].isdecimal():
        raise Bad(_FORMS["--without"].needs)
    client, run = int(first[0]), _run_of(first[1])
    before = reuse.read_job(run, run.with_name(f"{run.name}-without-{client}"), command)
    job, output = _changed(before, f"fedstill run --without {client} {run}", words)
    if other := config.difference(before.description(), job.description()):
        raise Bad(f"--without repeats {run} with its own settings, but {other}; start another run for that")
    if job.experiment.min_clients != before.experiment.min_clients:
        raise Bad("--without takes all other replies that there are; leave --min-clients out")
    make_and_show(reuse.leave_out(run, client, job), output, nobody=RunFolder(run).asked_sites)


def _repeat(first: list[str], words: list[str], command: str) -> None:
    """``fedstill run --replies``."""
    from fedstill.cli import flags
    from fedstill.experiment import reuse
    from fedstill.runs.folder import RunFolder

    run, name = _run_of(first[0]), first[1]
    before = reuse.read_job(run, run.with_name(f"{run.name}-{slug_of(name)}"), command)
    method = before.method if name == before.name else flags.method_of(name, [])
    method = reuse.with_client_settings(method, before.method)
    before = before.replace(name=name, method=method, label="")
    job, output = _changed(before, f"fedstill run --replies {run} {name}", words)
    make_and_show(reuse.repeat(run, job), output, nobody=RunFolder(run).asked_sites)


def _changed(before: "Job", program: str, words: list[str]) -> "tuple[Job, OneRunOutput]":
    """The job with the changes of the flags, and what it prints and writes."""
    from fedstill.cli import flags

    experiment, method, output = flags.parse_run(program, words, before.experiment, before.method)
    if output.tune:
        raise Bad("--tune tries settings of a new run; this one takes the replies of a finished run: leave it out")
    if output.dry_run:
        raise Bad("--dry-run estimates a new run; this one takes the replies of a finished run, and their bytes")
    return before.replace(experiment=experiment, method=method, out=output.out or before.out), output


def _run_of(word: str) -> Path:
    """The folder of a run, with a name also where it is the working folder."""
    if not word:
        raise Bad("the run is ''; give the folder of a finished run (fedstill runs)")
    return Path(word) if Path(word).name not in ("", "..") else Path(os.path.abspath(word))


_FORMS = {
    "--extend": _Form(
        _extend,
        1,
        "usage: fedstill run --extend RUN [--out FOLDER] [flags]\n\n"
        "Ask the clients whose reply is missing in the finished one-shot run RUN.\n"
        "The flags are those of its method: fedstill run METHOD --help",
        "--extend needs a finished run: fedstill run --extend RUN [--out FOLDER] [--timeout S] ...",
    ),
    "--without": _Form(
        _leave_out,
        2,
        "usage: fedstill run --without CLIENT RUN [--out FOLDER] [flags]\n\n"
        "The model that the other clients of the finished one-shot run RUN would have made;\n"
        "no client is asked. The flags are those of fedstill run that change no result.\n"
        "example: fedstill run --without 3 runs/fedgm-digits-0",
        "--without needs a client's number and a finished run: fedstill run --without 3 RUN [--out FOLDER]",
    ),
    "--replies": _Form(
        _repeat,
        2,
        "usage: fedstill run --replies RUN METHOD [--out FOLDER] [flags]\n\n"
        "Another method, or other settings of the server, on the replies to the first request of\n"
        "the finished run RUN. The clients' settings and the task are those of RUN; no client is\n"
        "asked for these replies again.\n"
        "The flags are those of the method: fedstill run METHOD --help\n"
        "example: fedstill run --replies runs/feddf-digits-0 dense --epochs 40",
        "--replies needs a finished run and a method: fedstill run --replies RUN METHOD [--out FOLDER]",
    ),
}


_SWEEP = """usage: fedstill sweep FILE.yaml [flags]

Try settings of several methods on validation records, each method as often as
the others, and write a table with the best of each. With --final, those run on
the test set too. The same command resumes a sweep.

the file:

data: digits
partition: classes:1
model: convnet:width=16,depth=2
methods:
  fedavg:
    rounds: 5
    try: {local.lr: [0.03, 0.1, 0.3]}
  fedgm:
    ipc: 1
    try: {matching.nets: [10, 30, 100]}

example: fedstill sweep examples/sweep.yaml --final
"""


def sweep(words: list[str]) -> None:
    """``fedstill sweep FILE.yaml``."""
    if not words or asks_help(words):
        from fedstill.cli import parser

        more = parser.flags_text("fedstill sweep", sections_of(SWEEP, shown=True))
        usage(words and ["--help"], f"{_SWEEP}{more}")
        return
    (place,), output = read(SWEEP, words, "fedstill sweep")
    from fedstill.base.lookup import add_working_folder
    from fedstill.experiment.progress import watch
    from fedstill.experiment.sweep import read_sweep, run_sweep
    from fedstill.report import tuning

    add_working_folder()
    file = Path(place)
    found, command = read_sweep(file), line_of(["sweep", *words])
    out = output.out or Path("runs") / f"sweep-{file.stem}"
    with watch(terminal(stderr=output.json_), file.stem, quiet=output.quiet) as watcher:
        run = partial(run_sweep, found, out, final=output.final, parallel=output.parallel)
        outcome = run(watcher=watcher, command=command)
    page = tuning.write(outcome, out, command)
    failed = next((one for one in outcome.tests.values() if one.score is None), None)
    if output.json_:
        folder = {"folder": str(out), "report": str(page)}
        print_json({**folder, "budget": tuning.budget(outcome), "rows": tuning.rows(outcome)})
    else:
        console = terminal()
        console.print(tuning.terminal(outcome))
        console.print(f"every try: {out / 'sweep.csv'}\nreport: {page}", soft_wrap=True, markup=False)
    if failed is not None:
        print(f"fedstill: {failed.entry.label} failed on the test set: {failed.failure}", file=sys.stderr)
        raise SystemExit(1)


RUN = Command(
    run,
    "METHOD",
    "run one method on one task",
    raw=True,
    below={
        name: Command(flags=("fedstill.experiment.config:Experiment", "OneRunOutput", place))
        for name, place in methods.TABLE.items()
    },
)
COMPARE = Command(
    compare,
    "METHOD ...",
    "run several methods on the same clients",
    (Part("fedstill.experiment.config:Experiment", without=("seed",)), "ComparisonOutput"),
    choices=tuple(methods.TABLE),
    raw=True,
)
REPORT = Command(
    report,
    "RUN ...",
    "Write a page and tables of runs; unfinished ones are marked. RUN is the folder of a run, or one with runs.\n\n"
    "Example: fedstill report runs/compare-digits --out runs/again",
    ("ReportOutput",),
    "usage: fedstill report RUN ... [flags]; name the folder of at least one run (fedstill report --help)",
)
SWEEP = Command(sweep, "FILE.yaml", "tune several methods, each with as many tries", ("SweepOutput",), raw=True)
