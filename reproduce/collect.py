"""Put the runs below a folder into one JSON file: commands, device, date, commit, and each run's last values.

python reproduce/collect.py NAME FOLDER --to OUT.json                                # finished runs alone
python reproduce/collect.py PIECE FOLDER --status 0 --seconds 12 --to OUT.json       # a piece of the queue, as it is
"""

import argparse
import datetime
import json
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]


def commit_here() -> str:
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


def lines_of(place: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file; a line that is not written to its end is left out."""
    found = []
    for line in place.read_text().splitlines() if place.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def runs_of(folder: Path, *, whole: bool) -> list[dict[str, Any]]:
    """The runs below ``folder``; one whose files are damaged ends the program if ``whole``, else it is named.

    The tries and attacks of a run, which lie in its folder, are none of these.
    """
    if whole and not folder.is_dir():
        raise SystemExit(f"collect: there is no folder {folder}")
    found = []
    for place in sorted(folder.rglob("config.json")):
        above = [place.parent.parent, *place.parent.parent.parents]
        if any((run / "config.json").is_file() for run in above if run.is_relative_to(folder)):
            continue
        try:
            found.append(run_of(place.parent))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            sentence = f"collect: {place.parent} is damaged ({error}); repeat this run in a new folder"
            if whole:
                raise SystemExit(sentence) from error
            print(f"{sentence}; it is left out", file=sys.stderr, flush=True)
    return found


def run_of(folder: Path) -> dict[str, Any]:
    """One run, finished or not."""
    config = json.loads((folder / "config.json").read_text())
    is_finished = (folder / "summary.json").exists()
    summary = json.loads((folder / "summary.json").read_text()) if is_finished else {}
    lines, starts = lines_of(folder / "metrics.jsonl"), lines_of(folder / "environment.jsonl")
    return {
        "label": config["label"],
        "seed": config["experiment"]["seed"],
        "finished": is_finished,
        "accuracy": summary.get("accuracy"),
        **({"judged_on": on} if (on := summary.get("judged_on", "test records")) != "test records" else {}),
        "seconds": float(summary["seconds"]) if is_finished else None,
        "last": {key: value for key, value in (lines[-1] if lines else {}).items() if isinstance(value, int | float)},
        "accuracies": [line.get("accuracy") for line in lines],
        "method": config["method"],
        **({"membership": found} if (found := memberships(folder)) else {}),
        "command": config["command"],
        "date": (summary.get("finished") or "")[:10],
        "commits": [start["commit"] for start in starts if start.get("commit")],
    }


def memberships(folder: Path) -> list[dict[str, Any]]:
    """What the attacks on a run's clients found: LiRA's online form, and the network of the shadow runs' posteriors."""
    files = sorted(folder.glob("attack/client-*/attack.json"))
    found = [content["membership"] for file in files if "membership" in (content := json.loads(file.read_text()))]
    facts = ("client", "records", "members", "shadows", "posteriors")
    return [{name: one[name] for name in facts} | {"online": one["likelihood_ratio"]["online"]} for one in found]


def main() -> None:
    """Write the file; of a piece, a run that was under way is in it, marked as not finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--status", type=int, help="the exit status of a piece; without it, of finished runs alone")
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    log = args.folder / "log"
    runs = runs_of(args.folder, whole=args.status is None)
    if args.status is None:
        is_finished = all(run["finished"] for run in runs)
        runs = [run for run in runs if run["finished"]]
        seconds = round(sum(run["seconds"] for run in runs))
    else:
        is_finished = args.status == 0
        seconds = args.seconds + (json.loads(args.to.read_text())["seconds"] if args.to.exists() else 0)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = {
        "piece": args.name,
        "finished": is_finished,
        **({} if args.status is None else {"status": args.status}),
        "device": device(),
        "torch": torch_version(),
        "commit": ", ".join(dict.fromkeys(commit for run in runs for commit in run["commits"])) or commit_here(),
        "date": max([run["date"] for run in runs], default="") or today,
        "seconds": seconds,
        "commands": sorted({run["command"] for run in runs}),
        "runs": [{key: run[key] for key in run if key not in ("command", "date", "commits")} for run in runs],
        **({"end of log": log.read_text(errors="replace").splitlines()[-4:]} if log.exists() else {}),
    }
    args.to.write_text(json.dumps(found, indent=1) + "\n")
    print(args.name, "finished" if is_finished else "unfinished", f"{len(runs)} runs, {seconds} s", flush=True)


if __name__ == "__main__":
    main()
