"""One job of the board: the run, its seconds of the processor at the clients and at the server, and its compact row."""

import json
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import plan
from filelock import FileLock
from plan import Job, words
from typing_extensions import override

from fedstill.attacks.membership import Membership, membership
from fedstill.cli import flags
from fedstill.cli.output import line_of
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import Watcher
from fedstill.experiment.checks import check_job
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job as Run
from fedstill.experiment.run import run
from fedstill.report.record import read_run
from fedstill.runs.journal import Refusal

sys.path.append(str(Path(__file__).parents[1]))
from record import weights_digest

ROW = "board.json"
"""The file in a run's folder with what only the board measures; it marks the job as done."""
ATTACKED = "board-attack.json"
SOURCE = Path(__file__).parents[2]
SPARED = {"evaluate_uploads": False}
"""What the board has no column for, which with a hundred clients takes half of the server's time; no result depends
on it."""
FAILURES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of one run, which the others survive; a full disk, for one, ends the board."""


class Clock(Watcher):
    """Seconds of the processor that the clients of a run in this process take, from each request to its last reply."""

    def __init__(self) -> None:
        self.clients = 0.0
        self._waiting = 0
        self._asked = 0.0

    @override
    def asked(self, step: str, clients: int, answered: int, lost: int) -> None:
        self._waiting, self._asked = clients - answered - lost, time.process_time()

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.clients += time.process_time() - self._asked


def reason(error: Exception) -> str:
    """The first line of an error; an error that is not a sentence for the user has its type in front."""
    words = (str(error).splitlines() or [""])[0][:300]
    return words if isinstance(error, ValueError | TooFewReplies) else f"{type(error).__name__}: {words}"


@cache
def commit() -> str:
    """The last commit that changed the source that this process runs, with ``+changes`` if files differ from it."""

    def git(*what: str) -> str:
        return subprocess.run(["git", "-C", str(SOURCE), *what], capture_output=True, text=True).stdout.strip()

    return (git("log", "-1", "--format=%H", "--", "src") or "unknown") + "+changes" * bool(git("status", "-s", "src"))


def is_done(job: Job, place: Path) -> bool:
    """Whether the job is done; a run that failed is."""
    return (place / job.name / (ATTACKED if job.kind == "attack" else ROW)).is_file()


def parse(line: list[str]) -> flags.RunFlags:
    """The settings of a command of `plan.words`.

    Raises:
        ValueError, FedstillError: there is no such method or flag, or a value is out of its range.
    """
    return flags.parse_run(f"fedstill run {line[1]}", line[2:], Experiment(), flags.method_of(line[1], []))


def check(label: str, row: plan.Row) -> None:
    """Refuse a row that no command of the board could run: as `parse`, or settings that its method does not support."""
    for data in plan.DATA:
        for number in range(plan.TRIES):
            line = words(Job("try", label, plan.tuning(data), number), 0, plan.FOLDER, row)
            parsed = parse(line)
            check_job(Run(parsed.experiment, parsed.method, Path(plan.FOLDER), name=line[1], label=label))


def alone(job: Job, place: Path) -> FileLock:
    """Keep other processes from the job, whose folder `do` makes anew; at once `filelock.Timeout` if one is at it."""
    folder = place / job.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)


def do(job: Job, chosen: int, place: Path) -> dict[str, Any]:
    """Do the job in its folder below ``place``, anew if it was interrupted, and return its entry."""
    if job.kind == "attack":
        return attack(job, place)
    folder = place / job.name
    shutil.rmtree(folder, ignore_errors=True)
    line = words(job, chosen, str(place))
    parsed = parse(line)
    clock, start = Clock(), time.process_time()
    entry: dict[str, Any] = {"command": line_of(words(job, chosen, plan.FOLDER))}
    try:
        experiment = parsed.experiment.model_copy(update=SPARED)
        task = Run(experiment, parsed.method, folder, name=line[1], label=job.label, command=line_of(line))
        run(task, watcher=clock)
        entry["digest"] = weights_digest(folder)[:16]
    except FAILURES as error:
        entry["failed"] = reason(error)
    total = time.process_time() - start
    clients = job.cell.clients
    entry |= {"client_seconds": round(clock.clients / clients, 3), "server_seconds": round(total - clock.clients, 2)}
    entry["commit"] = commit()
    folder.mkdir(parents=True, exist_ok=True)
    if not plan.is_attacked(job.cell):
        thin(folder)
    (folder / ROW).write_text(json.dumps(entry, indent=1))
    return entry


def attack(job: Job, place: Path) -> dict[str, Any]:
    """Attack the job's run; an attack that was interrupted goes on."""
    folder, start = place / job.name, time.process_time()
    line = words(job, 0, str(place))
    settings, _ = flags.parse_settings("fedstill attack RUN membership", line[3:], Membership())
    entry: dict[str, Any] = {"attack_command": line_of(words(job, 0, plan.FOLDER))}
    try:
        found = membership(folder, settings, command=line_of(line))
        rate = found["likelihood_ratio"]["online"]["rates"][1]
        assert rate["fpr"] == 0.01
        entry["attack"] = {name: round(rate[name], 4) for name in ("tpr", "low", "high")}
        entry["attack"] |= {"auc": round(found["likelihood_ratio"]["online"]["auc"], 4), "members": found["members"]}
    except FAILURES as error:
        entry["attack_failed"] = reason(error)
    entry["attack_seconds"] = round(time.process_time() - start, 1)
    (folder / ATTACKED).write_text(json.dumps(entry, indent=1))
    for world in folder.glob("attack/*/world-*"):  # the probabilities stay, which other scores can be made of
        shutil.rmtree(world)
    thin(folder)
    return entry


def thin(folder: Path) -> None:
    """Delete the replies and pictures of a run that will not be attacked any more: gigabytes in all."""
    for place in (*folder.glob("journal/*-*"), folder / "images"):
        shutil.rmtree(place, ignore_errors=True)


def row_of(job: Job, place: Path) -> dict[str, Any]:
    """The compact row of a run or a try that is done, read from its folder."""
    folder, (data, split, clients, seed) = place / job.name, job.cell
    measured = json.loads((folder / ROW).read_text())
    if not (isinstance(measured, dict) and isinstance(measured.get("command"), str)):
        raise ValueError(f"{folder / ROW} is damaged; delete {folder} and run again")
    row: dict[str, Any] = {"label": job.label, "data": data}
    if job.kind == "try":
        row["number"] = job.number
    else:
        row |= {"split": split, "clients": clients, "seed": seed}
    date = time.strftime("%Y-%m-%d", time.gmtime((folder / ROW).stat().st_mtime))
    if "failed" in measured:
        return {**row, "accuracy": None, **measured, "date": date}
    record = read_run(folder)
    row["accuracy"] = record.accuracy
    if (predicted := record.summary.get("predicted_classes")) is not None:
        row["predicted_classes"] = predicted
    if job.kind == "run":
        row |= {"up": record["bytes_up_per_client"], "down": record["bytes_down_per_client"]}
        row |= {"unit": record.guarantee.unit, "epsilon": record.guarantee.epsilon} if record.guarantee.holds else {}
    attacked = folder / ATTACKED
    more = json.loads(attacked.read_text()) if attacked.exists() else {}
    return {**row, **measured, "date": date, **more}


def begin() -> None:
    """Give way to all other processes, and ask for the commit before anybody can change a file."""
    os.nice(19 - os.nice(0))
    commit()
