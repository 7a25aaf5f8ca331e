"""The format of a site's state: its version, the names of its files, and how an earlier one is taken over.

In format 2, ledger, log and counts were files of their own; in format 3 they are one journal. No charge is lost: a
ledger or a log that is damaged is taken over by nobody, and the old files stay in ``state/before-journal``, with their
digests in the journal's first line.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedstill.base import files
from fedstill.runs.environment import now
from fedstill.sites.site.chain import Chain

NAME = "journal"
KEY, LINES, HEAD, LOCK = (f"{NAME}.{part}" for part in ("key", "jsonl", "head", "lock"))
FORMAT, VERSION = "format.json", 3
"""File with the version of a site's state, and the version."""
ASIDE = "before-journal"
"""Folder, in a state that was taken over, of its earlier files."""
_REMEDY = "bring its newest copy back; a site is taken over whole, or not at all"


def version_of(state: Path) -> int | None:
    """The version of a site's state; None for none.

    Raises:
        NewerFormat: a newer fedstill wrote the state, which may have more than this one can read and continue.
        Damaged: the file with its version can't be read.
    """
    place = state / FORMAT
    try:
        version = json.loads(place.read_bytes())["version"]
    except FileNotFoundError:
        return 1 if (state / "ledger").exists() else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise files.Damaged(f'{place} is damaged; write {{"version": {VERSION}}} into it') from error
    files.check_format(state, version, VERSION)
    return int(version)


def take_over(state: Path) -> None:
    """Begin the journal of a site with the charges and counts that its earlier files have, and put these aside.

    A crash leaves the earlier files, and the next call begins anew, or the journal.

    Raises:
        Damaged: the ledger, the log or a file of counts was changed, or the state is another user's.
    """
    if state.stat().st_uid != os.geteuid():
        raise files.Damaged(
            f"{state} is of an earlier format and belongs to another user, whose first command takes it over; run this "
            "as its owner (sudo -u)"
        )
    with FileLock(state / "takeover.lock", timeout=60):
        if version_of(state) == VERSION:
            return  # another process was quicker
        charges = Chain(state / "ledger", "ledger", _REMEDY).read() if (state / "ledger").exists() else []
        if any((state / f"log.{part}").exists() for part in ("key", "head", "jsonl")):
            Chain(state, "log", _REMEDY).read()
        counts, old = _counts(state), _old_files(state)
        for name in (HEAD, LINES, KEY):
            (state / name).unlink(missing_ok=True)
        chain = Chain(state, NAME, _REMEDY)
        chain.create()
        chain.synchronise()
        digests = {str(place.relative_to(state)): _digest(place) for place in old}
        begun = {"what": "begun", "counts": counts, "files": digests, "detail": f"the earlier files are in {ASIDE}"}
        for number, facts in enumerate([begun, *(_charged(i, line.text) for i, line in enumerate(charges, 1))], 1):
            chain.append({"n": number, "time": facts.pop("time", None) or now(), **facts})
        files.write_json(state / FORMAT, {"version": VERSION})  # from here on, the journal counts
        for place in old:
            aside = state / ASIDE / place.relative_to(state)
            aside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(place, aside)


def _charged(number: int, text: bytes) -> dict[str, Any]:
    """The line of a charge, from one of a ledger."""
    facts = json.loads(text)
    known = {name: facts[name] for name in ("time", "run", "entry", "records", "counts") if name in facts}
    step = facts["entry"]["step"]
    return {"what": "charged", **known, "charge": number, "unit": facts["entry"]["unit"], "step": step, "detail": ""}


def _counts(state: Path) -> dict[str, Any]:
    life: Mapping[str, Any] = {"begun": 0, "ended": 0}
    if (place := state / "life.json").exists():
        life = json.loads(place.read_bytes())
    begun = {line["run"]: line["time"] for line in files.read_json_lines(state / "runs.jsonl", _REMEDY)}
    runs = {}
    for run, moment in begun.items():
        lines = files.read_json_lines(state / "runs" / run / "questions.jsonl", _REMEDY)
        asked = sum(line["what"] == "asked" for line in lines)
        last = max((line["time"] for line in lines), default=moment)
        runs[run] = {"begun": moment, "last": last, "accepted": asked, "ended": len(lines) - asked}
    return {"accepted": life["begun"], "ended": life["ended"], "runs": runs}


def _old_files(state: Path) -> list[Path]:
    names = ("log.*", "log-*.jsonl", "ledger/*", "life.json", "runs.jsonl", "refusals.json", "runs/*/questions.jsonl")
    return [place for name in names for place in sorted(state.glob(name)) if place.is_file()]


def _digest(place: Path) -> str:
    return hashlib.sha256(place.read_bytes()).hexdigest()
