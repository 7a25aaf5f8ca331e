"""Kill a 10-client FedGM run with 2 workers at ten random moments (`kill -9`), resume each, compare the final weights.

python benchmarks/kill.py
"""

import argparse
import hashlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = (
    "run fedgm --data digits --partition classes:1 --clients 10 --ipc 1 --workers 2 --model convnet:width=32,depth=2 "
    "--training.epochs 100"
)


def command(folder: Path, extra: list[str]) -> list[str]:
    return [sys.executable, "-m", "fedstill", *WORDS.split(), *extra, "--out", str(folder)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        began = time.perf_counter()
        subprocess.run(command(whole, extra), check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        expected = hashlib.sha256((whole / "model.safetensors").read_bytes()).hexdigest()
        print(f"undisturbed: {seconds:.1f} s, weights {expected[:12]}")
        rng = random.Random(options.seed)
        for number in range(options.kills):
            folder = Path(place) / f"killed-{number}"
            process = subprocess.Popen(command(folder, extra), stdout=subprocess.DEVNULL)
            moment = rng.uniform(0, seconds)
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
            replies = len(list(folder.glob("journal/*/*.reply")))
            subprocess.run(command(folder, extra), check=True, stdout=subprocess.DEVNULL)
            found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            print(f"killed after {moment:5.1f} s with {replies:2} replies: weights {found[:12]}")
            if found != expected:
                raise SystemExit("the resumed run ended elsewhere")
    print(f"{options.kills} of {options.kills} resumed runs ended with the weights of the undisturbed one")


if __name__ == "__main__":
    main()
