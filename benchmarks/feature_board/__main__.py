"""Methods on vectors of a pretrained backbone: CIFAR-10 and CIFAR-100 by EfficientNet-Lite0.

    python benchmarks/feature_board run --folder OUT   # what is missing, cheapest rows first, until stopped
    python benchmarks/feature_board page               # docs/board_features.md from the results

``methods.json`` has for each row its method, flags and `TRIES` alternatives. The one that is best on validation records
(a tenth of the training records, which no client has, of another seed) is run and measured on the test records. Each
line of ``results/`` has its command, commit and date; a line that is there is not computed again.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import feature_page
import numpy as np

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "board")]
import texts
from record import weights_digest

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CONTENT: dict[str, dict[str, tuple[str, str, list[str]]]] = json.loads((HERE / "methods.json").read_text())
ROWS = {label: row for kind in CONTENT.values() for label, row in kind.items()}
TRIES = 3
SEEDS = (0, 1, 2)
TUNING_SEED = 1000
SIZE, TUNING_SIZE = 224, 128
"""Pixels a side of the results, and of the tries."""
PUBLIC = {"cifar10": "cifar100-5000.npz", "cifar100": "cifar10-5000.npz"}
"""The file of public images of each task, which are of the other one."""
HUNDRED = [label for label in CONTENT["sums"] if not label.startswith("safle")]
HUNDRED += ["fedavg, 1 round", "fedavg, 20 rounds", "real, 10 vectors", "fedpft", "fedavg-p"]
"""Rows of CIFAR-100, by the settings that were chosen for CIFAR-10."""
FEW, FEW_PIXELS = "--limit 2000 ", 64
"""Training records and pixels a side of the short form."""
Row = dict[str, Any]


class Job(NamedTuple):
    """A run of a row, or one of its tries if ``number`` is not None.

    Attributes:
        label: the row, a key of ``methods.json``.
        size: pixels a side.
        split: the partition.
        clients: their number.
        seed: the seed.
        number: of a try, from 0.
        data: the task, a key of `PUBLIC`.
    """

    label: str
    size: int
    split: str
    clients: int
    seed: int
    number: int | None = None
    data: str = "cifar10"


def jobs() -> Iterator[Job]:
    """Tries, then runs: the most telling first. A sum is the same for any split; seed 0 of AFL shows it."""
    for label in ROWS:
        yield from (Job(label, TUNING_SIZE, "dirichlet:0.1", 10, TUNING_SEED, i) for i in range(TRIES))
    for clients, seeds in ((10, SEEDS), (100, SEEDS[:1])):
        yield from (Job(label, SIZE, "classes:1", clients, seed) for seed in seeds for label in ROWS)
    yield Job("afl, epsilon 1", SIZE, "dirichlet:0.1", 10, 0)
    yield Job("afl, epsilon 1", SIZE, "iid", 10, 0)
    yield from (Job(label, SIZE, "classes:1", 100, seed) for seed in SEEDS[1:] for label in CONTENT["sums"])
    for seed in SEEDS:
        for clients in (10, 100):
            for split in ("dirichlet:0.1", "iid"):
                yield from (Job(label, SIZE, split, clients, seed) for label in CONTENT["others"])
    yield from (Job(label, SIZE, "classes:1", 100, seed) for seed in SEEDS[1:] for label in CONTENT["others"])
    yield from (Job(label, SIZE, "classes:10", 10, seed, data="cifar100") for seed in SEEDS for label in HUNDRED)


def few() -> Iterator[Job]:
    """The jobs of the short form: the tries of the first row, then its run."""
    label = next(iter(ROWS))
    yield from (Job(label, FEW_PIXELS, "classes:1", 10, TUNING_SEED, i) for i in range(TRIES))
    yield Job(label, FEW_PIXELS, "classes:1", 10, 0)


def words(job: Job, chosen: int, more: str = "") -> list[str]:
    """The words of a job's command after ``fedstill run``, without its folder."""
    method, flags, tries = ROWS[job.label]
    held = "--validation 0.1 " if job.number is not None else ""
    task = (
        f"--data {job.data} --size {job.size} --features efficientnet-lite0 --public ./{PUBLIC[job.data]}:unlabeled "
        f"--partition {job.split} --clients {job.clients} --seed {job.seed} {held}{more}--workers 0"
    )
    return [
        method,
        *shlex.split(task),
        *shlex.split(flags),
        *shlex.split(tries[chosen if job.number is None else job.number]),
    ]


def read(name: str, results: Path = RESULTS) -> list[Row]:
    """The lines of a file of results."""
    file = results / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def key(row: Row) -> Job:
    """The job of a line of results."""
    return Job(**{name: row[name] for name in Job._fields if name in row})


def best(label: str, tries: list[Row]) -> int:
    """The number of a row's first try with the highest accuracy on validation records.

    Raises:
        ValueError: a try is missing.
    """
    own = {row["number"]: row["accuracy"] or 0.0 for row in tries if row["label"] == label}
    if len(own) < TRIES:
        raise ValueError(f"{label!r} has {len(own)} of {TRIES} tries; run them first")
    return max(sorted(own), key=lambda number: own[number])


def do(job: Job, chosen: int, folder: Path, more: str) -> Row:
    """Run the job in this process and return its line."""
    import work

    from fedstill.experiment.run import run
    from fedstill.report.record import read_run

    said = words(job, chosen, more)
    place = folder / "-".join(str(part).replace(" ", "").replace(",", "-").replace(":", "-") for part in job)
    line = ["run", *said, "--out", str(place)]
    parsed, clock, began = work.parse(line), work.Clock(), time.process_time()
    found: Row = {name: value for name, value in job._asdict().items() if value is not None} | {"accuracy": None}
    try:
        experiment = parsed.experiment.model_copy(update=work.SPARED)
        run(work.Run(experiment, parsed.method, place, name=said[0], label=job.label, command=""), watcher=clock)
        record = read_run(place)
        found |= {
            "accuracy": record.accuracy,
            "up": record["bytes_up_per_client"],
            "down": record["bytes_down_per_client"],
        }
        found |= {"unit": record.guarantee.unit, "epsilon": record.guarantee.epsilon} if record.guarantee.holds else {}
        found["digest"] = weights_digest(place)[:16]
    except work.FAILURES as error:
        found["failed"] = work.reason(error)
    found["client_seconds"] = round(clock.clients / job.clients, 3)
    found["server_seconds"] = round(time.process_time() - began - clock.clients, 2)
    work.thin(place)
    return found | {
        "command": shlex.join(["fedstill", "run", *said]),
        "commit": work.commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def publish(folder: Path) -> None:
    """Write the public images of each task: the first 5,000 training images of the other one."""
    from fedstill import load_data

    for task, other in (("cifar10", "cifar100"), ("cifar100", "cifar10")):
        if not (folder / PUBLIC[task]).exists():
            some = load_data(other).train[:5000]
            pixels = some.images.permute(0, 2, 3, 1).numpy()
            part = {"x_train": pixels[1:], "y_train": some.labels[1:].numpy()}
            np.savez(folder / PUBLIC[task], **part, x_test=pixels[:1], y_test=some.labels[:1].numpy())


def run_missing(folder: Path, kinds: list[str], rows: list[str], data: list[str], minutes: float, quick: bool) -> None:
    """Compute what the results lack, for a number of minutes; a short form has its own results in the folder."""
    results, more = (folder.resolve() / "results", FEW) if quick else (RESULTS, "")
    results.mkdir(parents=True, exist_ok=True)
    os.nice(15 - os.nice(0))
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    publish(Path())
    began = time.monotonic()
    for job in few() if quick else jobs():
        if job.data not in data or not any(job.label in CONTENT[kind] for kind in rows):
            continue
        name = "tries.jsonl" if job.number is not None else "runs.jsonl"
        if ("try" if job.number is not None else "run") not in kinds or job in map(key, read(name, results)):
            continue
        if time.monotonic() - began > 60 * minutes:
            return
        row = do(job, 0 if job.number is not None else best(job.label, read("tries.jsonl", results)), Path(), more)
        with (results / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            row["label"],
            *(row.get(k) for k in ("number", "split", "clients", "seed", "accuracy", "failed")),
            flush=True,
        )
    lost = [row["failed"] for name in ("tries.jsonl", "runs.jsonl") for row in read(name, results) if "failed" in row]
    if quick and lost:
        raise SystemExit(f"the short form failed: {lost[0]}")


def written() -> str:
    """The page from the results."""
    planned = sum(job.number is None for job in dict.fromkeys(jobs()))
    return feature_page.page(read("runs.jsonl"), read("tries.jsonl"), CONTENT, planned, texts.section())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("--folder", type=Path, default=Path("runs/feature-board"))
    parser.add_argument("--kinds", nargs="+", choices=["try", "run"], default=["try", "run"])
    parser.add_argument("--rows", nargs="+", choices=[*CONTENT], default=[*CONTENT], help="for several processes")
    parser.add_argument("--data", nargs="+", choices=[*PUBLIC], default=[*PUBLIC], help="for several processes")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--quick", action="store_true", help="one row on few records; nothing is kept")
    flags = parser.parse_args()
    if flags.what == "run":
        run_missing(flags.folder, flags.kinds, flags.rows, flags.data, flags.minutes, flags.quick)
    else:
        feature_page.PAGE.write_text(written())


if __name__ == "__main__":
    main()
