"""Features of CIFAR-10's images by `patches`: records per core second, and peak memory by number of records.

Memory is what the process holds of its own (anonymous pages, sampled every 20 ms); the vectors go to a mapped file.

Usage: python benchmarks/features.py            # --data, --features, --records, --threads
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import record


def own_mb() -> float:
    """Anonymous memory of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def measure(data: str, name: str, count: int, threads: int) -> dict[str, Any]:
    """Vectors of the first ``count`` training images, in this process."""
    import torch

    from fedstill import load_data
    from fedstill.data import features

    torch.set_num_threads(threads)
    images = load_data(data).train.images[:count]
    backbone = features.load_backbone(name, tuple(images.shape[1:]))
    peak, done = own_mb(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, own_mb())

    before = own_mb()
    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as folder:
        began, cpu = time.perf_counter(), time.process_time()
        rows = features.rows_of(backbone, images, file=Path(folder) / "rows.npy")
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        width = rows.shape[1]
    done.set()
    watcher.join()
    speed = {"wall": wall, "cpu": cpu, "records_per_core_second": count / cpu}
    return {"records": count, "numbers": width, "threads": threads, **speed, "peak_mb": peak, "before_mb": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--features", default="patches:centroids=1024,public=cifar100")
    parser.add_argument("--records", type=int, nargs="+", default=[5_000, 50_000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="measure one number of records in this process")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "features.json")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.data, args.features, args.records[0], args.threads)))
        return
    table = []
    for count in args.records:
        words = [*sys.argv, "--records", str(count), "--here"]
        shown = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True).stdout
        table.append(json.loads(shown.splitlines()[-1]))
        print(table[-1], flush=True)
    record.keep(args.out, table)


if __name__ == "__main__":
    main()
