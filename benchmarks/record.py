"""Files of measurements, with the command, the day and the machine."""

import argparse
import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))  # benchmarks share the tests' builders of runs


def at(kept: Path | str, quick: bool) -> Path:
    """The file of results: ``kept``, or for a short form, whose figures are none, its name in ``runs/quick``."""
    place = Path(__file__).parents[1] / "runs/quick" / Path(kept).name if quick else Path(kept)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def study(
    doc: str | None,
    out: str,
    short: str,
    results: Path,
    target: Path,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    page: Callable[[str, dict[str, Any]], str],
    **flags: Any,
) -> None:
    """The command of a study: ``run OUT`` keeps what was found, and makes the page from it; ``page`` makes it alone.

    Args:
        doc: the help text.
        out: usual folder of the runs.
        short: what the short form (``--quick``) leaves out.
        results: file of what was found.
        target: the page.
        run: what was found, for the words of the command.
        page: the text of the page, from its former text and what was found.
        flags: further flags, each with the arguments of ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("out", type=Path, nargs="?", default=Path(out))
    parser.add_argument("--quick", action="store_true", help=f"{short}; nothing is kept")
    for name, facts in flags.items():
        parser.add_argument(f"--{name}", **facts)
    chosen = parser.parse_args()
    kept = at(results, chosen.quick)
    if chosen.what == "run":
        kept.write_text(json.dumps(run(chosen), indent=1) + "\n")
    at(target, chosen.quick).write_text(page(target.read_text(), json.loads(kept.read_text())))


def keep(place: Path | str, table: Sequence[Any], **facts: Any) -> None:
    """Write ``table`` and ``facts`` as JSON."""
    what = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **facts,
        "table": table,
    }
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(json.dumps(what, indent=1) + "\n")


def commit() -> str:
    """The commit of this repository."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip()


def between(text: str, begin: str, end: str, content: str) -> str:
    """A page with other content between two marks."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{content}{end}{rest.partition(end)[2]}"


def weights_digest(folder: Path) -> str:
    """SHA-256 of the names, types, shapes and bytes of a run's final weights."""
    from fedstill.protocol import wire

    weights, _ = wire.unpack((folder / "model.safetensors").read_bytes())
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode())
        total.update(weights[name].contiguous().numpy().tobytes())
    return total.hexdigest()
