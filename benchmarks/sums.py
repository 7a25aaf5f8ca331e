"""Accuracy of methods of one private sum, open and masked, by number of clients.

    python benchmarks/sums.py OUT                      # about two hours of one core
    python benchmarks/sums.py OUT --data mnist --methods afl --seeds 0
    python benchmarks/sums.py --page                   # the tables of docs/sums.md from the results

Each method, epsilon and way has the number of features that is best on validation records (a fifth of 5,000 training
records, 10 clients), then runs on the board's 4,000 training records, or on all of them with ``--all``, and is measured
on all test records. A finished run is not repeated. ``results/sums.json`` has each run with its command.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/sums.json"
FEATURES = "--model patches:centroids=128,stride=2 --public noise=1000 --extractor.pretrain none --workers 0"
PAGE = ROOT / "docs/sums.md"
TABLES = [(method, epsilon, False) for method in ("afl", "fedcgs", "gh-ofl") for epsilon in (1, 4)] + [("afl", 1, True)]
"""The tables of the page: a method, an epsilon, and whether clients have all training records."""
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->"
METHODS = {"afl": "AFL", "fedcgs": "FedCGS", "gh-ofl": "GH-OFL"}
NAMES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
DIMS = {"open": {1: (16, 32, 64), 4: (32, 64, 128)}, "masked": {1: (32, 64, 128, 256), 4: (64, 128, 256, 400)}}
"""Features that are tried, by way and epsilon; the board's for open sums."""


def fedstill(words: str, out: Path) -> dict[str, Any]:
    """The summary of a run, computed once."""
    summary = out / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "fedstill", "run", *shlex.split(words), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/sums"))
    parser.add_argument("--page", action="store_true", help="write the tables of docs/sums.md, and run nothing")
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion_mnist", "cifar10"])
    parser.add_argument("--methods", nargs="+", default=["afl", "fedcgs", "gh-ofl"])
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--epsilons", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--partitions", nargs="+", default=["classes:1"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=["open", "masked", "one"], help="one: a client with all records")
    parser.add_argument("--all", action="store_true", help="all training records in place of 4,000")
    chosen = parser.parse_args()
    if chosen.page:
        PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())["runs"]))
        return
    found = {run["command"]: run for run in json.loads(RESULTS.read_text())["runs"]} if RESULTS.exists() else {}
    for data in chosen.data:
        for method in chosen.methods:
            for epsilon in chosen.epsilons:
                for way in chosen.ways:
                    dims = best(chosen.out, data, method, epsilon, "masked" if way == "one" else way)
                    for partition in chosen.partitions if way != "one" else ["iid"]:
                        for clients in chosen.clients if way != "one" else [1]:
                            for seed in chosen.seeds:
                                run = one(chosen, data, method, epsilon, way, dims, partition, clients, seed)
                                found[run["command"]] = run
                                RESULTS.write_text(json.dumps({"runs": list(found.values())}, indent=1) + "\n")


def table(runs: list[dict[str, Any]], method: str, epsilon: int, **chosen: Any) -> list[str]:
    """Lines of a Markdown table: a row for each data set and way, means and deviations over seeds in percent.

    The last column, where it was run, has one client with all records, whose noise is the total's.
    """
    own = [
        run
        for run in runs
        if (run["method"], run["epsilon"]) == (method, epsilon)
        and run["partition"] == ("iid" if run["sums"] == "one" else "classes:1")
        and all(run[key] == value for key, value in chosen.items())
    ]
    clients = sorted({run["clients"] for run in own if run["sums"] != "one"})
    heads = [f"{n:,} clients" for n in clients] + ["one client"] * any(run["sums"] == "one" for run in own)
    what = f"{METHODS[method]} at epsilon {epsilon}" + ", all records" * chosen.get("all", False)
    lines = [f"| {what} | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for data in dict.fromkeys(run["data"] for run in own):
        for way in ("open", "masked"):
            cells = [_cell(own, data, way, n) for n in clients]
            if len(heads) > len(clients):
                cells.append(_cell(own, data, "one", 1) if way == "masked" else "")
            lines.append(f"| {NAMES[data]}, {way} | " + " | ".join(cells) + " |")
    return lines


def _cell(runs: list[dict[str, Any]], data: str, way: str, clients: int) -> str:
    """Mean and sample standard deviation over the seeds of a cell, in percent; a dash without runs."""
    some = [100 * r["accuracy"] for r in runs if (r["data"], r["sums"], r["clients"]) == (data, way, clients)]
    spread = f" ± {statistics.stdev(some):.1f}" if len(some) > 1 else ""
    return f"{statistics.mean(some):.1f}{spread}" if some else "-"


def page(text: str, runs: list[dict[str, Any]]) -> str:
    """The page with the tables of these runs."""
    tables = ["\n".join(table(runs, method, epsilon, all=whole)) for method, epsilon, whole in TABLES]
    return record.between(text, BEGIN, END, "\n\n".join(tables) + "\n")


def best(out: Path, data: str, method: str, epsilon: int, way: str) -> int:
    """The number of features with the highest accuracy on validation records."""
    scores = {}
    for dims in DIMS[way][epsilon]:
        words = (
            f"{method} --data {data} --partition classes:1 --clients 10 --limit 5000 --validation 0.2 "
            f"{FEATURES} --epsilon {epsilon} --sums {way} --space.dims {dims}"
        )
        scores[dims] = fedstill(words, out / f"try-{data}-{method}-{epsilon}-{way}-{dims}")["accuracy"]
    return max(scores, key=lambda dims: scores[dims])


def one(
    chosen: argparse.Namespace,
    data: str,
    method: str,
    epsilon: int,
    way: str,
    dims: int,
    partition: str,
    clients: int,
    seed: int,
) -> dict[str, Any]:
    """One run with its facts."""
    amount = "" if chosen.all else "--limit 4000 "
    sums = "open" if way == "one" else way
    words = (
        f"{method} --data {data} --partition {partition} --clients {clients} {amount}--seed {seed} {FEATURES} "
        f"--epsilon {epsilon} --sums {sums} --space.dims {dims}"
    )
    name = (
        f"{data}-{method}-{epsilon}-{way}-{dims}-{partition.replace(':', '-')}-{clients}-{seed}" + "-all" * chosen.all
    )
    summary = fedstill(words, chosen.out / name)
    facts = {"data": data, "method": method, "epsilon": epsilon, "sums": way, "dims": dims, "partition": partition}
    told = {key: summary[key] for key in ("accuracy", "bytes_up_per_client", "seconds")}
    print(f"{name}: {summary['accuracy']:.4f} in {summary['seconds']:.1f} s", flush=True)
    spent = {"epsilon_of_run": summary["guarantee"]["epsilon"], "date": date.today().isoformat()}
    return (
        facts
        | {"clients": clients, "seed": seed, "all": chosen.all}
        | told
        | spent
        | {"command": f"fedstill run {words}"}
    )


if __name__ == "__main__":
    main()
