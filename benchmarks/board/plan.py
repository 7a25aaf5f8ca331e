"""The board's plan: its cells, its methods with their tries, and the jobs in the order in which they are worth running.

A cell is a data set, a split, a number of clients and a seed. ``methods.json`` names for each row of the board the
method, its flags and `TRIES` alternatives; the first of those with the highest accuracy on validation records is the
row's on that data set.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

METHODS = Path(__file__).with_name("methods.json")
DATA = ("mnist", "fashion_mnist", "cifar10")
SPLITS = ("classes:1", "dirichlet:0.1", "dirichlet:0.5", "iid")
CLIENTS = (10, 100)
SEEDS = (0, 1, 2)
"""Seeds of every row in every cell."""
MORE = (3, 4, 5, 6, 7, 8, 9)
"""More of them, for the rows and splits that ``methods.json`` names under "more seeds"."""
RECORDS = 4000
TRIES = 3
TUNING_SEED = 1000
"""Seed of all tries: no row has its split or its random start. Of its records 884 are training records of some row's
seed; none is a test record."""
ATTACKED = ("classes:1", "iid")
"""Splits of ten clients on which the runs with seed 0 are attacked."""
ATTACK = "membership --score rmia --shadows 2"
FOLDER = "runs/board"
"""The board's folder in the commands of rows, wherever they were run."""


Row = dict[str, Any]
"""An entry of ``methods.json``."""


class Cell(NamedTuple):
    """One column of a table, with one seed."""

    data: str
    split: str
    clients: int
    seed: int


class Job(NamedTuple):
    """A try, a run, or an attack on a run.

    Attributes:
        kind: "try", "run" or "attack".
        label: the row.
        cell: the cell; a try belongs to the cell `TUNING` of its data set.
        number: the number of a try, from 0.
    """

    kind: str
    label: str
    cell: Cell
    number: int = 0

    @property
    def name(self) -> str:
        """The folder of the try or of the run below the board's folder."""
        data, split, clients, seed = self.cell
        if self.kind == "try":
            return f"tries/{data}/{self.label}/{self.number}"
        return f"{data}/{split.replace(':', '-')}/{clients}/{self.label}/seed-{seed}"


def is_attacked(cell: Cell) -> bool:
    """Whether the runs of a cell are attacked."""
    return cell.clients == 10 and cell.seed == 0 and cell.split in ATTACKED


def tuning(data: str) -> Cell:
    """The cell of all tries on a data set."""
    return Cell(data, "dirichlet:0.1", 10, TUNING_SEED)


@cache
def _read(file: Path, changed: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def content() -> dict[str, Any]:
    """The content of ``methods.json`` as it is now."""
    return _read(METHODS, METHODS.stat().st_mtime_ns)


def methods() -> dict[str, dict[str, Any]]:
    """The rows of the board by label, as in ``methods.json``.

    Raises:
        ValueError: a row has another number of tries than `TRIES`.
    """
    found: dict[str, dict[str, Any]] = content()["rows"]
    for label, row in found.items():
        if len(row["tries"]) != TRIES:
            raise ValueError(f"{label} has {len(row['tries'])} tries in {METHODS.name}; every row has {TRIES}")
    return found


def seeds(label: str, split: str, clients: int) -> tuple[int, ...]:
    """The seeds of a row's runs on a split; none for a number of clients that the row leaves out."""
    if clients not in methods()[label].get("clients", CLIENTS):
        return ()
    more = content().get("more seeds", {"splits": [], "rows": []})
    return (*SEEDS, *MORE) if split in more["splits"] and label in more["rows"] else SEEDS


def name(label: str, number: int) -> str:
    """The name of what a try of a row runs: the label, or that of a variant which the method's paper does not have."""
    return str(methods()[label].get("names", [label] * TRIES)[number])


def share_of_steps(label: str, clients: int) -> str:
    """The share of the steps of the method's authors that a row takes, in percent; a dash where nothing is fitted."""
    steps = methods()[label].get("steps")
    return f"{100 * steps[str(clients)] / steps['authors']:.2g}" if steps else "–"


def cells() -> Iterator[list[Cell]]:
    """All cells in groups of equal worth, the most valuable first."""
    skewed, milder = SPLITS[:2], SPLITS[2:]
    for splits in (skewed[:1], skewed[1:], milder):
        yield [Cell(data, split, 10, 0) for split in splits for data in DATA]
    yield [Cell(data, split, 10, seed) for seed in SEEDS[1:] for split in skewed for data in DATA]
    yield [Cell(data, split, 100, 0) for split in skewed for data in DATA]
    yield [Cell(data, split, 10, seed) for seed in SEEDS[1:] for split in milder for data in DATA]
    yield [Cell(data, split, 100, 0) for split in milder for data in DATA]
    yield [Cell(data, split, 100, seed) for seed in SEEDS[1:] for split in SPLITS for data in DATA]
    yield [
        Cell(data, split, clients, seed) for clients in CLIENTS for data in DATA for split in SPLITS for seed in MORE
    ]


def jobs() -> list[Job]:
    """All jobs in order: a row's tries before its first run on a data set, attacks after the first three groups."""
    rows = methods()
    found = list[Job]()
    for number, group in enumerate(cells()):
        for cell in group:
            for label in rows:
                if cell.seed in seeds(label, cell.split, cell.clients):
                    found += [Job("try", label, tuning(cell.data), i) for i in range(TRIES)]
                    found.append(Job("run", label, cell))
        if number == 2:
            attacked = sorted({job.cell for job in found if is_attacked(job.cell)})
            found += [Job("attack", label, cell) for cell in attacked for label in rows]
    return list(dict.fromkeys(found))


def best(label: str, data: str, tries: Sequence[dict[str, Any]]) -> int:
    """The number of a row's first try with the highest accuracy on a data set; 0 if all failed.

    Raises:
        ValueError: a try is missing.
    """
    own = {t["number"]: t["accuracy"] or 0.0 for t in tries if (t["label"], t["data"]) == (label, data)}
    if len(own) < TRIES:
        raise ValueError(f"{label} has {len(own)} of {TRIES} tries on {data}; run them first")
    return max(sorted(own), key=lambda number: own[number])


def words(job: Job, chosen: int, place: str, row: Row | None = None) -> list[str]:
    """The words of a job's command after ``fedstill``.

    Args:
        job: the job.
        chosen: the number of the row's best try on the data set; a try has its own.
        place: the board's folder.
        row: a row that ``methods.json`` does not have yet.
    """
    row = row or methods()[job.label]
    data, split, clients, seed = job.cell
    out = f"{place}/{job.name}"
    if job.kind == "attack":
        return ["attack", out, *shlex.split(ATTACK)]
    held = RECORDS * 5 // 4
    amount = f"--limit {held} --validation 0.2" if job.kind == "try" else f"--limit {RECORDS}"
    task = f"--data {data} --partition {split} --clients {clients} {amount} --seed {seed} --workers 0"
    flags = f"{row['flags']} {row['tries'][job.number if job.kind == 'try' else chosen]}"
    flags += " " + row.get(f"at {clients} clients", "")  # of two equal flags the last counts
    for name, text in content()["shared"].items():
        flags = flags.replace("{" + name + "}", text if isinstance(text, str) else text[data])
    return ["run", row["method"], *shlex.split(task), *shlex.split(flags), "--out", out]
