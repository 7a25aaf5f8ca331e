"""Seconds a round and memory of FedAvg, beside a plain loop and the peers that are installed.

    python benchmarks/peers run     # benchmarks/results/peers.json, about four minutes of two idle cores a turn
    python benchmarks/peers page    # docs/peers.md from it

Contenders take turns, each time in a process of its own: a run of `SHORT` rounds, and one of `LONG`. Seconds a round
are their difference, by the rounds between, so that starts do not count; a start is what is left of the short run.
Memory is the most that the process and its children had for themselves, in MB. One thread each; Flower has two cores.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1]))
import contenders
import record

SHORT, LONG = 1, 6
RESULTS = Path(__file__).parents[1] / "results" / "peers.json"
PRIVATE = RESULTS.with_name("dp_sgd.json")
PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
CLIENTS, RECORDS, TESTS = 10, 10_000, 2_000


def work(folder: Path) -> contenders.Work:
    """The first records of MNIST, in parts of equal size."""
    import fedstill

    data = fedstill.load_data("mnist")
    train, test = data.train[:RECORDS], data.test[:TESTS]
    x, test_x = (part.images.float() / 255 for part in (train, test))
    return contenders.Work(x, train.labels, CLIENTS, test_x, test.labels, folder)


def one(name: str) -> dict[str, float]:
    """A contender's times in this process."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        given = work(Path(folder))
        times, accuracy = [], 0.0
        for rounds in (SHORT, LONG):
            began = time.perf_counter()
            accuracy = contenders.CONTENDERS[name][0](given, rounds)
            times.append(time.perf_counter() - began)
    each = (times[1] - times[0]) / (LONG - SHORT)
    return {"round": each, "start": times[0] - SHORT * each, "accuracy": accuracy}


def measured(name: str) -> dict[str, float]:
    """A contender's times in another process, and the memory of it and its children."""
    words = [sys.executable, str(Path(__file__).parent), "one", name]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most = 0

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            now = 0
            for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                try:
                    now += each.memory_full_info().uss
                except psutil.Error:
                    continue
            most = max(most, now)
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, errors = process.communicate()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{name} failed: {errors[-2000:]}")
    return {**json.loads(out.splitlines()[-1]), "memory": most / 1e6}


def there(package: str, *modules: str) -> str | None:
    """The version of a package, or None if it or one of the modules that it imports is absent."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        return None
    try:
        return importlib.metadata.version(package) if package else ""
    except importlib.metadata.PackageNotFoundError:
        return None


def page(found: dict[str, Any], private: list[dict[str, Any]]) -> str:
    """The page, in Markdown, of this program's file of results and of that of ``dp_sgd.py``."""
    loop = statistics.median(next(row for row in found["table"] if row["name"] == "plain loop")["seconds_a_round"])
    lines = []
    for row in found["table"]:
        each = row["seconds_a_round"]
        lines.append(
            f"| {row['name']} {row['version']} | {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f}) | "
            f"{statistics.median(each) / loop:.2f} | {row['start_seconds'] + statistics.median(each):.1f} | "
            f"{row['memory_MB']:,} | "
            f"{100 * row['accuracy']:.1f} |"
        )
    steps = [
        f"| {row['batch']} | {' | '.join(map('{:.3f}'.format, row['seconds a step'].values()))} |" for row in private
    ]
    number = [len(row["seconds_a_round"]) for row in found["table"]]
    turns = " to ".join(map(str, sorted({min(number), max(number)}))) + " times"
    absent = f" Not installed here: {', '.join(found['absent'])}." if found["absent"] else ""
    return f"""# Beside its peers

Seconds a round of FedAvg and memory, of the same network (`{found["model"]}`) on the same records
({found["clients"]} clients, {found["records"]:,} images of MNIST, one local epoch a round, SGD, batches of
{contenders.BATCH}), each library by its own documented way ([contenders.py](../benchmarks/peers/contenders.py)):

| | seconds a round, median (least to most) | of the plain loop | one upload, seconds | memory, MB | accuracy, % |
| --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(lines)}

* **What differs**: the plain loop checks, counts, sends and stores nothing. fedstill encodes, checks and journals each
  message, and resumes after a kill. Flower starts Ray, whose two actors use both cores; the others are one process
  with one thread. One upload is one-shot FedAvg, from records in memory to the average: a start and a round.
  Accuracy is that of the last model of {LONG} rounds on {found["tests"]:,} test images; each library draws its batches.
* **Measured** on {found["date"]}: {found["machine"]}, torch {found["torch"]}, contenders in turn, {turns}, each time
  in a process of its own; the load of the machine in the last five minutes was {found["load"]} at the end.{absent}
* **FedLab and fluke** need torchvision, of which the machine that measured has no build without CUDA; fluke has a
  contender for machines with it.

```sh
pip install 'fedstill[flower]' pfl fluke-fl
{found["command"]}
python benchmarks/peers page
```

## DP-SGD

Processor seconds a step, one thread, of FedKADP's network for MNIST (215,370 parameters), one and the same for all;
the clipped sums are equal to the loop's to a relative {max(row["relative difference"] for row in private):.0e}
([numbers](../benchmarks/results/dp_sgd.json), `python benchmarks/dp_sgd.py`):

| records a step | {" | ".join(private[0]["seconds a step"])} |
| ---: |{" ---: |" * len(private[0]["seconds a step"])}
{chr(10).join(steps)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "page", "one"])
    parser.add_argument("name", nargs="?", choices=[*contenders.CONTENDERS], help="of 'one', for this program itself")
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    if flags.what == "one":
        print(json.dumps(one(flags.name)))
    elif flags.what == "page":
        PAGE.write_text(page(json.loads(RESULTS.read_text()), json.loads(PRIVATE.read_text())))
    else:
        run(flags.repeats)


def run(repeats: int) -> None:
    """Measure all contenders that are installed, and write the results so far after each."""
    versions = {name: there(*needs) for name, (_, *needs) in contenders.CONTENDERS.items()}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name, version in versions.items() if version is not None}
    absent = sorted(versions.keys() - rows.keys())
    facts = {"clients": CLIENTS, "records": RECORDS, "tests": TESTS, "model": contenders.MODEL, "absent": absent}
    for name, own in [*rows.items()] * repeats:
        own.append(measured(name))
        print(name, own[-1], flush=True)
        table = [summary(name, versions[name] or "", each) for name, each in rows.items() if each]
        record.keep(RESULTS, table, **facts, load=round(os.getloadavg()[1], 1))


def summary(name: str, version: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """A line of the results, from a contender's times."""
    return {
        "name": name,
        "version": version,
        "seconds_a_round": [round(row["round"], 3) for row in rows],
        "start_seconds": round(statistics.median(row["start"] for row in rows), 1),
        "memory_MB": round(max(row["memory"] for row in rows)),
        "accuracy": round(statistics.mean(row["accuracy"] for row in rows), 4),
    }


if __name__ == "__main__":
    main()
