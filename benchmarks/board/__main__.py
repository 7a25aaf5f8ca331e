"""The board: every one-shot method on the same tasks.

    python benchmarks/board run                     # the jobs that are missing, the most valuable first, until stopped
    python benchmarks/board left                    # how many are missing, and their hours
    python benchmarks/board take                    # copy the rows of finished jobs into benchmarks/board/results
    python benchmarks/board page                    # docs/board.md and its pictures from these rows
    python benchmarks/board add LABEL METHOD FLAGS TRY TRY TRY   # a new row: into methods.json, and its jobs are run
    python benchmarks/board remove LABEL            # a row and its results, here only: its runs stay where they are

Stopped at any moment and started again, ``run`` goes on with the job it was at. ``run --part 0 --parts 2`` beside
``run --part 1 --parts 2`` are two processes that share the rows, or the jobs of the rows that are named.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import plan
from filelock import Timeout
from plan import Job

from fedstill.base.errors import FedstillError
from fedstill.base.lookup import is_label

RESULTS = Path(__file__).parent / "results"
TRIES = "tries.jsonl"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of a file of results."""
    file = RESULTS / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def key(row: Row) -> tuple[Any, ...]:
    """What tells a row of a file from the others."""
    return tuple(row.get(name) for name in ("data", "split", "clients", "seed", "label", "number"))


def write(name: str, rows: Iterable[Row]) -> None:
    """Write rows to a file of results, with those of the file that they do not replace, a line each."""
    merged = {key(row): row for row in [*read(name), *rows]}
    RESULTS.mkdir(exist_ok=True)
    ordered = sorted(merged.values(), key=lambda row: tuple((value is not None, str(value)) for value in key(row)))
    (RESULTS / name).write_text("".join(json.dumps(row) + "\n" for row in ordered))


def rows() -> list[Row]:
    """All rows of runs."""
    return [row for data in plan.DATA for row in read(f"{data}.jsonl")]


def seconds(row: Row) -> float:
    """Seconds of the processor that a row cost without its attack; a try is one of ten clients."""
    return float(row["client_seconds"] * row.get("clients", plan.tuning("").clients) + row["server_seconds"])


def is_taken(job: Job, taken: dict[tuple[Any, ...], Row]) -> bool:
    """Whether the results have the job."""
    data, split, clients, seed = job.cell
    if job.kind == "try":
        return (data, None, None, None, job.label, job.number) in taken
    row = taken.get((data, split, clients, seed, job.label, None))
    return row is not None and (job.kind == "run" or "attack_seconds" in row or "failed" in row)


def missing() -> list[Job]:
    """The jobs that the results lack."""
    taken = {key(row): row for row in [*rows(), *read(TRIES)]}
    return [job for job in plan.jobs() if not is_taken(job, taken)]


def spent() -> float:
    """Hours of one core that the results cost."""
    every = [*rows(), *read(TRIES)]
    return sum(seconds(row) + row.get("attack_seconds", 0.0) for row in every) / 3600


def guess() -> dict[Job, float]:
    """Seconds of each missing job: the mean of those of its row done in the most similar cells, on their last date.

    Before any is done, ``seconds`` in ``methods.json``. A hundred clients count twice, an attack as two runs.
    """
    by_date: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in sorted([*rows(), *read(TRIES)], key=lambda row: str(row["date"])):
        label, data, clients = row["label"], row["data"], row.get("clients", 10)
        for similar in ((label, data, clients), (label, clients), (label,)):
            by_date.setdefault(similar, {}).setdefault(row["date"], []).append(seconds(row))
            if "attack_seconds" in row:
                attacks = by_date.setdefault(("attack", *similar), {})
                attacks.setdefault(row["date"], []).append(row["attack_seconds"])
    # earlier ones are of an older version, or of another machine
    found = {similar: list(costs.values())[-1] for similar, costs in by_date.items()}

    def of(job: Job) -> float:
        label, (data, _, clients, _) = job.label, job.cell
        for similar in ((label, data, clients), (label, clients), (label,)):
            if job.kind == "attack" and ("attack", *similar) in found:
                return mean(found["attack", *similar])
            if similar in found:
                more = 2 if clients == 100 and clients not in similar else 1
                return mean(found[similar]) * (2 if job.kind == "attack" else more)
        return float(plan.methods()[label]["seconds"]) * (2 if clients == 100 or job.kind == "attack" else 1)

    return {job: of(job) for job in missing()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def left() -> str:
    """What is missing, in words."""
    costs = guess()
    groups: dict[tuple[str, str], list[float]] = {}
    for job, cost in costs.items():
        data, split, clients, seed = job.cell
        where = data if job.kind == "try" else f"{data}, {split}, {clients} clients, seed {seed}"
        groups.setdefault((job.kind, where), []).append(cost)
    lines = [f"{kind:6} {where:45} {len(own):4} {sum(own) / 3600:6.2f} h" for (kind, where), own in groups.items()]
    total = f"done {len(plan.jobs()) - len(costs)} of {len(plan.jobs())} jobs in {spent():.2f} hours of one core"
    return "\n".join([*lines, f"{total}; left about {sum(costs.values()) / 3600:.1f}"])


def run(place: Path, part: int, parts: int, until: float, labels: list[str]) -> None:
    """Do the missing jobs of a part of the rows until a time; a job that is done has its entry in its own folder."""
    import work

    work.begin()
    every = list(plan.methods())
    mine = set(labels or every[part::parts])
    if unknown := mine - set(every):
        raise ValueError(f"{plan.METHODS.name} has no row {min(unknown)}; its rows are {', '.join(every)}")
    tries = read(TRIES)
    jobs = [job for job in missing() if job.label in mine]
    for job in jobs[part::parts] if labels else jobs:
        if work.is_done(job, place):
            continue
        if time.time() > until:
            return
        attacked = job._replace(kind="run")
        if job.kind == "attack" and not work.is_done(attacked, place):  # made on another machine, or deleted
            do_job(attacked, tries, place)
        do_job(job, tries, place)


def do_job(job: Job, tries: list[Row], place: Path) -> None:
    """Do a job below ``place``, a run with the best try of its row, and say so, or that one of its tries is damaged."""
    import work

    data, start = job.cell.data, time.time()
    own = [Job("try", job.label, plan.tuning(data), number) for number in range(plan.TRIES)]
    tried, damaged = rows_of(own, place)
    if damaged:
        print(f"{time.strftime('%H:%M:%S')} {job.kind} {job.name} left out: {'; '.join(damaged)}", flush=True)
        return
    try:
        with work.alone(job, place):
            if work.is_done(job, place):  # by another process meanwhile
                return
            known = tries + [row for _, row in tried]
            entry = work.do(job, plan.best(job.label, data, known) if job.kind == "run" else 0, place)
        failed = entry.get("failed") or entry.get("attack_failed") or ""
    except Timeout:
        failed = "another process is at it"
    print(f"{time.strftime('%H:%M:%S')} {job.kind} {job.name} {time.time() - start:.0f} s {failed}", flush=True)


def rows_of(jobs: Iterable[Job], place: Path) -> tuple[list[tuple[Job, Row]], list[str]]:
    """Those of the jobs that are done below ``place``, with their rows, and in words those whose runs are damaged."""
    import work

    found, damaged = [], []
    for job in jobs:
        if work.is_done(job, place):
            try:
                found.append((job, work.row_of(job, place)))
            except (ValueError, FedstillError) as error:
                damaged.append(f"{job.name} ({error})")
    return found, damaged


def take(place: Path) -> int:
    """Copy the rows of the finished jobs below ``place`` into the results, and return their number.

    A row that was there already and has another model is printed: processors differ in their last bits.

    Raises:
        ValueError: there is no such folder, or runs are damaged; the others' rows are copied all the same.
    """
    if not place.is_dir():
        raise ValueError(f"there is no folder {place}; name that of 'run' with --runs")
    found, damaged = rows_of((job for job in plan.jobs() if job.kind != "attack"), place)
    for _, row in found:  # rows of before 2026-11-24 name the folder that they were in
        row |= {name: row[name].replace(f"{place}/", f"{plan.FOLDER}/") for name in row if name.endswith("command")}
    known = {key(row): row for row in rows()}
    for job, row in found:
        before = known.get(key(row), row)
        if row.get("digest") != before.get("digest"):
            accuracies = f"{row['accuracy']} for {before['accuracy']}"
            print(f"another model than before: {job.name}, accuracy {accuracies}")
    write(TRIES, [row for job, row in found if job.kind == "try"])
    for data in plan.DATA:
        write(f"{data}.jsonl", [row for job, row in found if job.kind == "run" and row["data"] == data])
    if damaged:
        raise ValueError(f"{len(found)} rows were taken; left out, because they are damaged: {'; '.join(damaged)}")
    return len(found)


def write_page() -> None:
    """Write docs/board.md and its pictures."""
    import page

    everything, costs = rows(), guess()
    state = (len(plan.jobs()) - len(costs), len(plan.jobs()))
    drawn = page.pictures(everything, read(TRIES))
    words = page.text(everything, read(TRIES), spent(), sum(costs.values()) / 3600, state, drawn)
    (page.DOCS / "board.md").write_text(words)
    for name, svg in drawn.items():
        (page.DOCS / "images" / name).write_text(svg)


def add(label: str, method: str, shared: str, tries: list[str]) -> None:
    """Add a row to ``methods.json``, if all its commands can be run."""
    import work

    content = json.loads(plan.METHODS.read_text())
    if label in content["rows"]:
        raise ValueError(f"{plan.METHODS.name} has a row {label} already; choose another label, or remove it")
    if not is_label(label):
        raise ValueError(f"{label!r} is not a label; use letters, digits, - and _")
    row = {"method": method, "seconds": 30, "flags": shared, "tries": tries}
    work.check(label, row)
    content["rows"][label] = row
    plan.METHODS.write_text(json.dumps(content, indent=1) + "\n")


def remove(label: str) -> int:
    """Remove a row from ``methods.json``, and its results, whose number is returned."""
    content = json.loads(plan.METHODS.read_text())
    if label not in content["rows"]:
        raise ValueError(f"{plan.METHODS.name} has no row {label}; its rows are {', '.join(content['rows'])}")
    del content["rows"][label]
    number = 0
    for file in sorted(RESULTS.glob("*.jsonl")):
        every = read(file.name)
        others = [row for row in every if row["label"] != label]
        number += len(every) - len(others)
        file.write_text("".join(json.dumps(row) + "\n" for row in others))
    plan.METHODS.write_text(json.dumps(content, indent=1) + "\n")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path(plan.FOLDER), help="folder of the runs")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("labels", nargs="*", help="rows to run; all by default")
    adding = commands.add_parser("add")
    for name in ("label", "method", "flags"):
        adding.add_argument(name)
    adding.add_argument("tries", nargs=plan.TRIES)
    commands.add_parser("remove").add_argument("label")
    for one in (running, adding):
        one.add_argument("--part", type=int, default=0)
        one.add_argument("--parts", type=int, default=1)
        one.add_argument("--hours", type=float, default=1e6, help="start no job after this time")
    for name in ("left", "take", "page"):
        commands.add_parser(name)
    given = parser.parse_args()
    try:
        do(given)
    except (ValueError, FedstillError) as error:  # a damaged run too
        parser.exit(2, f"board: {error}\n")


def do(given: argparse.Namespace) -> None:
    """One command."""
    if given.command == "add":
        add(given.label, given.method, given.flags, given.tries)
    if given.command in ("run", "add"):
        labels = [given.label] if given.command == "add" else given.labels
        run(given.runs, given.part, given.parts, time.time() + 3600 * given.hours, labels)
    elif given.command == "remove":
        print(f"{remove(given.label)} results of {given.label} removed; write the page again")
    elif given.command == "left":
        print(left())
    elif given.command == "take":
        print(f"{take(given.runs)} rows")
    else:
        write_page()


if __name__ == "__main__":
    main()
