"""Four concurrent runs in threads of one process, repeated: how often their models differ from those of runs alone.

    python benchmarks/threads.py --repeats 100 --out benchmarks/results/threads.json

The runs have different methods and numbers of client threads, and all compute in this process (``workers=0``), where
torch's global generator and its number of threads are shared.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fedstill import Experiment, Job, methods, run

TASK = {"data": "digits", "clients": 4, "limit": 300, "workers": 0, "model": "convnet:width=8,depth=2"}
RUNS = (
    ("fedavg", {"rounds": 2, "local": {"epochs": 1}}, {"seed": 0}),
    ("fedavg", {"rounds": 2, "local": {"epochs": 1}}, {"seed": 1, "threads": 2}),
    ("real", {"ipc": 2, "training": {"epochs": 5}}, {"seed": 2}),
    ("scaffold", {"rounds": 2, "local": {"epochs": 1}}, {"seed": 3}),
)


def digest(number: int, folder: Path) -> str:
    """Run number ``number`` and the SHA-256 of its model's file."""
    name, settings, changes = RUNS[number]
    run(Job(Experiment(**{**TASK, **changes}), methods.find(name)(**settings), folder, name=name))
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def concurrent(numbers: Sequence[int], place: Path) -> list[str]:
    """The digests of these runs, all started at once; an error's name in place of a digest."""

    def one(number: int) -> str:
        try:
            return digest(number, place / str(number))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(numbers)) as threads:
        return list(threads.map(one, numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    before, cpu = torch.get_rng_state(), time.process_time()
    wrong: list[list[str]] = []
    numbers = range(len(RUNS))
    with tempfile.TemporaryDirectory() as folder:
        alone = [digest(number, Path(folder) / f"alone-{number}") for number in numbers]
        for repeat in range(words.repeats):
            found = concurrent(numbers, Path(folder) / str(repeat))
            wrong.append([found[i] for i in numbers if found[i] != alone[i]])
            print(f"repeat {repeat + 1}: {len(wrong[-1])} of {len(RUNS)} differ", flush=True)
    errors = [text for some in wrong for text in some if " " in text]
    result = {
        "repeats": words.repeats,
        "runs": len(RUNS) * words.repeats,
        "runs that differ": sum(map(len, wrong)),
        "repeats with a difference": sum(map(bool, wrong)),
        "errors": sorted({text.split(":")[0] for text in errors}),
        "global generator unchanged": bool(torch.equal(before, torch.get_rng_state())),
        "cpu seconds": round(time.process_time() - cpu),
    }
    print(json.dumps(result, indent=1))
    if words.out:
        words.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
