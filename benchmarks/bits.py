"""Digests of a small run of every method, to show that a change of the code changes no result.

    python benchmarks/bits.py record before.json            # with the old code
    python benchmarks/bits.py record after.json             # with the new code
    python benchmarks/bits.py compare before.json after.json

A digest holds the final weights, both byte counts, the guarantee and every logged number of a run. The runs go through
the public `fedstill.run` on the digits that scikit-learn carries, with the settings of the common tests
(tests/support/method_settings.py) and the variants of ``bits_settings.json``.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import weights_digest

SETTINGS = Path(__file__).with_name("bits_settings.json")
ENGINES = ("inprocess", "flower")


def digest(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """What a finished run computed, without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    guarantee = {key: summary["guarantee"][key] for key in ("holds", "unit", "epsilon", "delta", "adversary")}
    return {
        "weights": weights_digest(folder),
        "accuracy": summary["accuracy"],
        "bytes_up": summary["bytes_up"],
        "bytes_down": summary["bytes_down"],
        "guarantee": guarantee,
        "log": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
    }


def one(name: str, settings: dict[str, Any], task: dict[str, Any], engine: str, seed: int) -> dict[str, Any]:
    """The digest of one run."""
    from fedstill import Experiment, Job, methods, run

    task = {"data": "digits", "model": "convnet:width=8,depth=2", "clients": 4, "limit": 400, "workers": 0, **task}
    experiment = Experiment(seed=seed, engine=engine, **task)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        method = name.partition("#")[0]
        job = Job(experiment, methods.find(method)(**settings), folder, name=method)
        return digest(folder, run(job).summary)


def table() -> dict[str, dict[str, Any]]:
    """Task and settings of every run, by name: each method's small settings, and the variants beside it."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from method_settings import SMALL

    extra = json.loads(SETTINGS.read_text())
    entries = {name: {"task": extra["tasks"].get(name, {}), "settings": SMALL[name]} for name in SMALL}
    for name, variant in extra["variants"].items():
        base = entries[name.partition("#")[0]]
        entries[name] = {part: merged(base[part], variant[part]) for part in ("task", "settings")}
    return entries


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, which may be nested."""
    nested = {key: merged(base[key], value) for key, value in changes.items() if isinstance(base.get(key), dict)}
    return {**base, **changes, **nested}


def record(out: Path, names: list[str], engines: list[str], seeds: list[int]) -> None:
    """Write the digests of all runs; those that ``out`` has already are kept."""
    entries = table()
    done = json.loads(out.read_text()) if out.exists() else {}
    for name in names or entries:
        for engine in engines:
            for seed in seeds:
                key = f"{name} {engine} {seed}"
                if key not in done:
                    done[key] = one(name, entries[name]["settings"], entries[name]["task"], engine, seed)
                    out.write_text(json.dumps(done, indent=1))
                    print(key, done[key]["weights"][:12], flush=True)


def compare(before: Path, after: Path) -> int:
    """Print what differs; 1 when anything does."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    wrong = 0
    for key in sorted(old.keys() & new.keys()):
        for part in old[key]:
            if old[key][part] != new[key][part]:
                wrong += 1
                print(f"{key}: {part} was {old[key][part]}, is {new[key][part]}")
    missing = sorted(old.keys() - new.keys())
    print(f"{len(old.keys() & new.keys())} runs compared, {wrong} differences; not run again: {len(missing)} {missing}")
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--methods", nargs="*", default=[])
    recording.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    recording.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    words = parser.parse_args()
    if words.command == "compare":
        return compare(words.before, words.after)
    record(words.out, words.methods, words.engines, words.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
