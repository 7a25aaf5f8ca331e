"""Replay ten cheap numbers of the board, drawn by the day, and fail if one of them is no longer what the page says.

    make numbers                                    # today's ten
    python reproduce/replay.py --day 2026-11-27    # those of another day
    python reproduce/replay.py --count 3 --seconds 5

A number is a row of ``benchmarks/board/results``: its command is run again, in a folder that is then deleted, and its
accuracy, its bytes and its epsilon are compared. On another processor or version of PyTorch the last bits of a run
differ, so an accuracy may differ by `NEAR`; bytes and epsilon may not differ.
"""

import argparse
import datetime
import json
import math
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.report.record import read_run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "board" / "results"
NEAR = 0.01
"""Largest difference of accuracies of the same run on different machines; a test set of the board has 2,000 records or
more, of which a rounding may move some."""
Row = Mapping[str, Any]


def cheap(seconds: float, folder: Path = RESULTS) -> list[Row]:
    """The rows that took at most so many seconds of a core, with a result."""
    rows = [
        json.loads(line)
        for place in sorted(folder.glob("*.jsonl"))
        if place.stem != "tries"
        for line in place.read_text("utf-8").splitlines()
    ]
    return [row for row in rows if "failed" not in row and seconds_of(row) <= seconds]


def seconds_of(row: Row) -> float:
    """Seconds of a core that a row took."""
    return float(row["client_seconds"] * row["clients"] + row["server_seconds"])


def drawn(rows: Sequence[Row], day: str, count: int) -> list[Row]:
    """Some of the rows, of different methods as far as there are, by the day."""
    rng, found, labels = random.Random(f"numbers of {day}"), list[Row](), set[str]()
    for row in rng.sample(rows, len(rows)):
        if len(found) < count and row["label"] not in labels:
            found.append(row)
            labels.add(row["label"])
    return found


def replay(row: Row, place: Path) -> dict[str, Any]:
    """The accuracy, the bytes that a client sent, and the epsilon of a row's run, made again in ``place``.

    Raises:
        RuntimeError: the command ends with an error.
    """
    words = shlex.split(row["command"])
    words[words.index("--out") + 1] = str(place)
    words = [sys.executable, "-m", *words]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else "no words")
    record = read_run(place)
    return {
        "accuracy": record.accuracy,
        "up": record["bytes_up_per_client"],
        "epsilon": record.guarantee.epsilon if record.guarantee.holds else None,
    }


def difference(row: Row, found: Mapping[str, Any]) -> str:
    """What differs, in words; nothing for no difference that counts."""
    words = []
    if not math.isclose(row["accuracy"], found["accuracy"], abs_tol=NEAR):
        words.append(f"accuracy {row['accuracy']:.4f}, now {found['accuracy']:.4f}")
    if "epsilon" in row and not math.isclose(row["epsilon"], found["epsilon"] or math.inf, rel_tol=1e-9):
        words.append(f"epsilon {row['epsilon']:.6g}, now {found['epsilon']}")
    if not math.isclose(row["up"], found["up"], rel_tol=1e-9):
        words.append(f"{row['up']:,.0f} bytes up, now {found['up']:,.0f}")
    return "; ".join(words)


def main() -> None:
    """Replay the day's numbers; exit with 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--day", default=datetime.date.today().isoformat())
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="largest cost of a row, in seconds of a core")
    options = parser.parse_args()
    wrong = 0
    for row in drawn(cheap(options.seconds), options.day, options.count):
        name = f"{row['label']}, {row['data']}, {row['split']}, {row['clients']} clients, seed {row['seed']}"
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = difference(row, replay(row, Path(folder) / "run"))
            except RuntimeError as error:
                said = f"its command fails: {error}"
        wrong += bool(said)
        print(f"{'DIFFERS' if said else 'holds':<8} {name}: {said or format(row['accuracy'], '.4f')}", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} numbers do not hold; run their rows again (benchmarks/board), or find what changed")


if __name__ == "__main__":
    main()
