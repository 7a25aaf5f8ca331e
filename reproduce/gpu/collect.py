"""Put what a piece of the queue left into one JSON file: commands, device, date, commit, and each run's last values.

python reproduce/gpu/collect.py PIECE FOLDER --status 0 --seconds 12 --to OUT.json
"""

import argparse
import datetime
import json
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]


def commit() -> str:
    """Of a checkout, or of what ``pack.sh`` packed."""
    packed = HERE / "COMMIT"
    if packed.exists():
        return packed.read_text().strip().replace("\n", ", ")
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def device() -> str:
    """The GPU's name, or that there is none; without torch, whose import takes seconds on a busy machine."""
    with suppress(OSError):
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.splitlines()[0]
    return "cpu"


def torch_version() -> str:
    """Of the installed torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def run_of(folder: Path) -> dict[str, Any]:
    """One run, finished or not."""
    config = json.loads((folder / "config.json").read_text())
    summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {
        "label": config["label"],
        "seed": config["experiment"]["seed"],
        "finished": bool(summary),
        "accuracy": summary.get("accuracy"),
        "seconds": summary.get("seconds"),
        "last": {key: value for key, value in (lines[-1] if lines else {}).items() if isinstance(value, int | float)},
        "accuracies": [line.get("accuracy") for line in lines],
        "method": config["method"],
        "command": config["command"],
    }


def main() -> None:
    """Write the file; a run that was under way is in it, marked as not finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("piece")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--status", type=int, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    log = args.folder / "log"
    runs = [run_of(place.parent) for place in sorted(args.folder.rglob("config.json"))]
    earlier = json.loads(args.to.read_text())["seconds"] if args.to.exists() else 0
    found = {
        "piece": args.piece,
        "finished": args.status == 0,
        "status": args.status,
        "device": device(),
        "torch": torch_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": earlier + args.seconds,
        "commands": sorted({run["command"] for run in runs}),
        "runs": [{key: value for key, value in run.items() if key != "command"} for run in runs],
        "end of log": log.read_text(errors="replace").splitlines()[-4:] if log.exists() else [],
    }
    args.to.write_text(json.dumps(found, indent=1) + "\n")
    print(args.piece, "finished" if found["finished"] else f"status {args.status}", f"{found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
