"""The state of a run while its process works, from its files; nothing is written or locked."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from fedstill.base import files
from fedstill.privacy import guarantee
from fedstill.privacy.ledger import UNCOUNTABLE, Charge
from fedstill.privacy.releases import UNITS, Unit
from fedstill.runs.folder import SITES_WORDS, RunFolder
from fedstill.runs.journal import EVALUATIONS, JournalFiles, exchange_of
from fedstill.runs.listing import entry
from fedstill.runs.pieces import Config

Mark = tuple[float, int]
"""A time in seconds, and the number of parts that were done then."""


def seconds_left(began: Mark, first: Mark, last: Mark, total: int, idle: float) -> float:
    """Seconds until ``total`` parts are done.

    The first part starts processes and fills caches, so from the third on it does not count.

    Args:
        began: the start.
        first: the end of the first part, or of the first several if they ended at once.
        last: the end of the last part that is done.
        total: number of parts.
        idle: seconds since then.
    """
    time, done = first if last[1] - began[1] > 2 and last[1] > first[1] else began
    pace = (last[0] - time) / (last[1] - done)
    return pace * (total - last[1]) - min(idle, pace) if last[1] < total else 0.0


_REST = 20
"""Time between two computations of epsilon, as a multiple of the time that one takes."""
_RELEASES: TypeAdapter[tuple[Charge, ...]] = TypeAdapter(tuple[Charge, ...])


class Spent(NamedTuple):
    """The epsilon of one client's releases so far.

    Attributes:
        epsilon: of the client that spent most; None where nothing bounds it.
        delta: the delta of epsilon.
        unit: the protected unit.
    """

    epsilon: float | None
    delta: float
    unit: Unit


class Counted(NamedTuple):
    """Epsilons that were computed, which can take seconds for many clients.

    Attributes:
        size: size of the file of releases.
        again: the time from which a larger file is read, so that the look at a run takes a twentieth of a core at most.
        spent: the result.
    """

    size: int
    again: float
    spent: Sequence[Spent]


class Live(NamedTuple):
    """The state of a run.

    Attributes:
        label: its name in tables.
        method: the method's name.
        task: data, partition and number of clients in words.
        state: ``running`` if a process writes the folder.
        round: number of the last finished round; 0 before it.
        rounds: number of rounds of the run, or None if its method does not state one.
        step: name of the step that clients were asked for last; empty before the first request.
        asked: number of clients that this request was sent to so far.
        answered: number of clients that replied to it, without those whose reply is not used.
        clients: number of clients.
        refused: number of replies so far that are not used.
        bytes_up: bytes of all replies so far.
        bytes_down: bytes of all requests so far.
        accuracy: accuracy in [0, 1] of the last evaluation, or None.
        accuracies: round and accuracy of each evaluated round.
        spent: the releases so far, by unit; empty without any.
        promised: the guarantee in ``summary.json``; None before the end.
        seconds: seconds from the start to the last sign of work, without pauses between starts.
        left: seconds that the remaining rounds, or the replies to the only request, will take; None if unknown.
    """

    label: str
    method: str
    task: str
    state: Literal["finished", "running", "interrupted", "damaged", "newer"]
    round: int
    rounds: int | None
    step: str
    asked: int
    answered: int
    clients: int
    refused: int
    bytes_up: int
    bytes_down: int
    accuracy: float | None
    accuracies: Sequence[tuple[int, float]]
    spent: Sequence[Spent]
    promised: guarantee.Guarantee | None
    seconds: float
    left: float | None


def live(path: Path, known: dict[Path, Counted] | None = None) -> Live:
    """The state of the run in ``path``.

    Args:
        path: the run's folder.
        known: what earlier calls computed, by file; it is changed in place. Without it, all is computed now.

    Raises:
        ValueError: there is no run, or a file is damaged.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ValueError(f"{path} has no run; give the folder of a run or of a comparison (fedstill runs)")
    config, found = folder.read_config(), entry(path)
    metrics = folder.read_metrics()
    journal = JournalFiles(folder.journal)
    messages = [m for m in journal.messages() if m["exchange"] < EVALUATIONS]
    last = max((m["exchange"] for m in messages), default=None)
    down, up = ({m["client"] for m in messages if m["exchange"] == last and m.get(way)} for way in ("down", "up"))
    clients, rounds = int(config.experiment["clients"]), config.method.get("rounds")
    seconds = [line["seconds"] for line in metrics if line["seconds"] is not None]
    total = rounds if isinstance(rounds, int) else None
    accuracies = [(line["round"], line["accuracy"]) for line in metrics if line["accuracy"] is not None]
    refusals = journal.refusals()
    lost = {int(file.stem) for file in refusals if exchange_of(file.parent) == last}
    ups = [m["seconds"] for m in messages if m.get("up") and m["exchange"] == last]
    left = None
    if found.state == "running" and total is not None and total > 1:
        left = time_left([0.0, *seconds], total, _idle(folder.metrics)) if seconds else None
    elif found.state == "running" and ups and len(up | lost) < clients:
        left = time_left([0.0, *ups], clients - len(lost - up), _idle(journal.meter))
    partition = SITES_WORDS if folder.asked_sites else config.experiment.get("partition")
    return Live(
        label=config.label,
        method=found.method,
        task=f"{config.experiment.get('data')}, {partition}, {clients} clients",
        state=found.state,
        round=metrics[-1]["round"] if metrics else 0,
        rounds=total,
        step="" if last is None else journal.step(last) or "",
        asked=len(down),
        answered=len(up - lost),
        clients=clients,
        refused=len(refusals),
        bytes_up=sum(m.get("up", 0) for m in messages),
        bytes_down=sum(m.get("down", 0) for m in messages),
        accuracy=found.accuracy,
        accuracies=accuracies,
        spent=_spent(folder, config, {} if known is None else known),
        promised=found.guarantee,
        seconds=max([*seconds, *(m["seconds"] for m in messages)], default=0.0),
        left=left,
    )


def time_left(times: Sequence[float], total: int, idle: float) -> float | None:
    """Seconds until ``total`` parts of a work are done, as `seconds_left`; None before the first.

    Args:
        times: the time of the start, then the time at which each part was done, in order.
        total: number of parts.
        idle: seconds since the last part was done.
    """
    done = len(times) - 1
    if done < 1:
        return None
    return seconds_left((times[0], 0), (times[1], 1), (times[-1], done), total, idle)


def _idle(file: Path) -> float:
    return max(time.time() - file.stat().st_mtime, 0.0) if file.exists() else 0.0


def _spent(folder: RunFolder, config: Config, known: dict[Path, Counted]) -> Sequence[Spent]:
    place = JournalFiles(folder.journal).spent
    size, began, before = place.stat().st_size if place.exists() else 0, time.monotonic(), known.get(place)
    if before is None or (before.size != size and began >= before.again):
        spent = spent_by_unit(folder, place, config.experiment)
        now = time.monotonic()
        known[place] = Counted(size, now + _REST * (now - began), spent)
    return known[place].spent


def spent_by_unit(folder: RunFolder, place: Path, experiment: dict[str, Any]) -> Sequence[Spent]:
    """What the releases in the file ``place`` of ``folder`` have spent so far, for each unit of protection.

    Raises:
        Damaged: a line is no list of releases.
    """
    releases: dict[tuple[int, int], tuple[Charge, ...]] = {}
    try:
        for line in files.read_json_lines(place):
            releases[line["client"], line["exchange"]] = _RELEASES.validate_python(line["spent"])
    except (KeyError, TypeError, ValidationError) as error:
        raise folder.damaged(place, "a line is no list of releases") from error
    of_clients: dict[int, list[Charge]] = {}
    for (client, _), entries in sorted(releases.items()):
        of_clients.setdefault(client, []).extend(entries)
    delta, budget = experiment.get("delta", 1e-5), experiment.get("budget")
    found = []
    for unit in UNITS:
        kinds = {tuple(e for e in entries if e.unit == unit) for entries in of_clients.values()} - {()}
        try:
            costs = [guarantee.spent_by(kind, delta, budget, experiment.get("group_bound")) for kind in kinds]
        except UNCOUNTABLE:
            costs = [(math.inf, delta)]
        if costs:
            most, at = max(costs)
            found.append(Spent(most if math.isfinite(most) else None, at, unit))
    return found
