"""Peak memory of a FedAvg round with 10, 100 and 1,000 clients on the same records, workers included.

python benchmarks/memory.py --data fashion_mnist
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil


def peak(clients: int, data: str, workers: int) -> tuple[float, float]:
    """Highest resident memory in MB of the whole process tree (shared pages counted once), and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"run fedavg --data {data} --model lenet --clients {clients} --rounds 2 --workers {workers}"
        command = [sys.executable, "-m", "fedstill", *words.split(), "--out", str(Path(folder) / "run")]
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
            raise SystemExit(f"the run with {clients} clients failed")
        return highest, time.perf_counter() - began


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="fashion_mnist")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    first = 0.0
    for clients in (10, 100, 1000):
        memory, seconds = peak(clients, options.data, options.workers)
        first = first or memory
        print(f"{clients:5} clients: peak {memory:7.1f} MB ({memory / first - 1:+.1%}), {seconds:.1f} s")


if __name__ == "__main__":
    main()
