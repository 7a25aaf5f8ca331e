"""Peak memory and seconds of a run with many clients on the same records, workers included.

    python benchmarks/memory.py --data fashion_mnist
    python benchmarks/memory.py sums --data mnist --clients 1000 10000

The first is FedAvg with 10, 100 and 1,000 clients. The second is one masked sum of 131,841 numbers
(``results/memory-sums.json``).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import record

RUNS = {
    "fedavg": "run fedavg --model lenet --rounds 2",
    "sums": "run afl --epsilon 1 --sums masked --space.dims 512 --extractor.pretrain none "
    "--model patches:centroids=128,stride=2 --public noise=1000",
}
RESULTS = Path(__file__).parent / "results" / "memory-sums.json"


def peak(words: str) -> dict[str, float]:
    """What a command takes and gives.

    Its highest resident memory in MB, of the whole process tree with shared pages counted once, its seconds, bytes
    of a client's replies, and accuracy.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fedstill", *words.split(), "--out", str(out)]
        began = time.perf_counter()
        process = psutil.Popen(command, stdout=subprocess.DEVNULL)
        highest = 0.0
        done = threading.Event()

        def watch() -> None:
            nonlocal highest
            while not done.is_set():
                total = 0
                for part in [process, *_children(process)]:
                    try:
                        total += part.memory_full_info().pss
                    except psutil.Error:
                        continue
                highest = max(highest, total / 1e6)
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        done.set()
        watcher.join()
        if code:
            raise SystemExit(f"the run failed: fedstill {words}")
        seconds, found = time.perf_counter() - began, json.loads((out / "summary.json").read_text())
        return {
            "memory_MB": round(highest, 1),
            "seconds": round(seconds, 1),
            "bytes_up_per_client": found["bytes_up_per_client"],
            "accuracy": found["accuracy"],
        }


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=list(RUNS), default="fedavg")
    parser.add_argument("--data", default="fashion_mnist")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args()
    rows = list[dict[str, float]]()
    for clients in options.clients:
        words = f"{RUNS[options.what]} --data {options.data} --clients {clients} --workers {options.workers}"
        rows.append({"clients": clients, **peak(words)})
        memory = rows[-1]["memory_MB"]
        more = memory / rows[0]["memory_MB"] - 1
        print(f"{clients:6} clients: peak {memory:7.1f} MB ({more:+.1%}), {rows[-1]['seconds']} s", flush=True)
        if options.what == "sums":
            record.keep(RESULTS, rows)


if __name__ == "__main__":
    main()
