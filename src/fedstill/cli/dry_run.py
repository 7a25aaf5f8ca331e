"""``--dry-run`` of ``fedstill run`` and ``compare``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.common import print_json, terminal

if TYPE_CHECKING:
    from fedstill.cli.flags import RunOutput
    from fedstill.engines.rehearsal import Request
    from fedstill.experiment.dry_run import Estimate
    from fedstill.experiment.job import Job


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
    from fedstill.experiment.dry_run import estimate
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
        _show(label, each, jobs[label], seeds)
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


def _show(label: str, each: "Estimate", job: "Job", seeds: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    from fedstill.report.guarantees import words
    from fedstill.report.words import human_bytes

    task = job.experiment
    console = terminal()
    title = f"{label} on {task.data}, {task.partition}, {task.clients} clients" + (f", {seeds} seeds" * (seeds > 1))
    console.print(title, style="bold", highlight=False, soft_wrap=True, markup=False)
    headings = ("step", "requests", "clients", "down, each", "up, each", "seconds, each")
    table = Table(*(Column(heading, no_wrap=True) for heading in headings), box=SIMPLE_HEAD, pad_edge=False)
    for request in each.requests:
        counts = (str(request.times), str(request.clients), human_bytes(request.down), human_bytes(request.up))
        table.add_row(request.step, *counts, f"{request.seconds:.2g}")
    console.print(table)
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
    from fedstill.experiment.lines import clock

    return f"{seconds:.1f} s" if seconds < 10 else clock(seconds)
