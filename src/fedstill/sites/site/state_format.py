"""The format of a site's state: its version, the names of its files, and how an earlier one is taken over.

In format 2, ledger, log and counts were files of their own; in format 3 they are one journal. No charge is lost: a
ledger or a log that is damaged or missing is taken over by nobody, nor is a ledger that lacks a charge of the log. The
old files stay in ``state/before-journal``, with their digests in the journal's first line.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedstill.base import files
from fedstill.runs.environment import now
from fedstill.sites import units
from fedstill.sites.seals import number_of
from fedstill.sites.site.chain import Chain, Line

NAME = "journal"
KEY, LINES, HEAD, LOCK = (f"{NAME}.{part}" for part in ("key", "jsonl", "head", "lock"))
FORMAT, VERSION = "format.json", 3
"""File with the version of a site's state, and the version."""
NEWEST = "newest.receipt"
"""Name of the file with a receipt that shows the state to be an older copy."""
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


def check_newest(state: Path) -> None:
    """Raise `Damaged` if the state was found to be an older copy, and is one still.

    That is: it has a receipt (``newest.receipt``) of a line that its journal lacks, or one that tells nothing.
    """
    place = state / NEWEST
    try:
        given = place.read_bytes().decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return
    except OSError as error:
        raise files.Damaged(f"{place} can't be read ({error.strerror}); let the site's own user read it") from error
    found = lacks(state, given)
    if found is None:
        raise files.Damaged(
            f"{place}, the mark of an older copy, is no receipt of this journal; bring the newest copy back, or delete "
            "that file if this is the newest"
        )
    if found:
        raise files.Damaged(older(state, number_of(given)))


def lacks(state: Path, given: str) -> bool | None:
    """Whether the journal, or the log before it, lacks the line of a receipt, or has another there.

    None for a receipt that none of them gave (`receipt_of`).
    """
    if not (number := number_of(given)):
        return None
    mac = given.split(".")[1]
    for folder, name in ((state, NAME), (state / ASIDE, "log"), (state, "log")):
        key = folder / f"{name}.key"
        if key.exists() and hmac.compare_digest(given, receipt_of(key, number, mac)):
            found = Chain(folder, name, _REMEDY).mac_of(number)
            return found is None or found.hex() != mac
    check_aside(state)
    return None


def check_aside(state: Path) -> None:
    """Raise `Damaged` unless the files that the journal was begun from are where it put them, as they were.

    A server's receipts of that time are checked by them.
    """
    if not (state / LINES).exists() or not (lines := Chain(state, NAME, _REMEDY).read()):
        return
    for name, digest in json.loads(lines[0].text).get("files", {}).items():
        there = next((place for place in (state / ASIDE / name, state / name) if place.is_file()), None)
        if there is None or files.digest(there) != digest:
            raise files.Damaged(
                f"{state / ASIDE / name}, from which the journal was begun, is missing or was changed, so that a "
                "server's receipts of before can't be checked; bring it back from a copy, or make the site anew "
                "(fedstill site init) with the budget that is left"
            )


def receipt_of(key: Path, number: int, mac: str) -> str:
    """The receipt of a line, by its number and its MAC, that whoever has the journal's key can make."""
    text = f"receipt {number} {mac}".encode()
    return f"{number}.{mac}.{hmac.digest(key.read_bytes(), text, hashlib.sha256).hex()}"


def older(state: Path, number: int) -> str:
    """The sentence about an older copy, which lacks a line."""
    return (
        f"{state} is an older copy: its journal lacks line {number}, so it has forgotten releases; "
        "bring the newest copy back, or make the site anew (fedstill site init) with the budget that is left"
    )


def take_over(state: Path) -> None:
    """Begin the journal of a site with the charges and counts that its earlier files have, and put these aside.

    A crash leaves the earlier files, and the next call begins anew, or the journal.

    Raises:
        Damaged: the ledger, the log or a file of counts was changed or is an older copy.
        ValueError: the state is another user's.
    """
    units.check_owner(state, "site status FOLDER")
    with FileLock(state / "takeover.lock", timeout=60):
        if version_of(state) == VERSION:
            return  # another process was quicker
        check_newest(state)
        charges = Chain(state / "ledger", "ledger", _REMEDY).read() if (state / "ledger").exists() else []
        if (state / FORMAT).exists() or any((state / f"log.{part}").exists() for part in ("key", "head", "jsonl")):
            _check_ledger(charges, Chain(state, "log", _REMEDY).read(), state)
        try:
            counts, old = _counts(state), _old_files(state)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, files.Damaged):
                raise
            raise files.Damaged(f"{state} has a damaged file of counts ({error!r:.80}); {_REMEDY}") from error
        for name in (HEAD, LINES, KEY):
            (state / name).unlink(missing_ok=True)
        chain = Chain(state, NAME, _REMEDY)
        chain.create()
        chain.synchronise()
        digests = {str(place.relative_to(state)): files.digest(place) for place in old}
        begun = {"what": "begun", "counts": counts, "files": digests, "detail": f"the earlier files are in {ASIDE}"}
        for number, facts in enumerate([begun, *(_charged(i, line.text) for i, line in enumerate(charges, 1))], 1):
            chain.append({"n": number, "time": facts.pop("time", None) or now(), **facts})
        files.write_json(state / FORMAT, {"version": VERSION})  # from here on, the journal counts
        for place in old:
            aside = state / ASIDE / place.relative_to(state)
            aside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(place, aside)


def _check_ledger(charges: list[Line], log: list[Line], state: Path) -> None:
    """Compare the ledger with the charges that the log has: an older copy of it, or none, has forgotten some."""
    for line in log:
        facts = json.loads(line.text)
        number = facts.get("ledger", 0) if facts["what"] in ("charged", "begun") else 0
        if number > len(charges):
            raise files.Damaged(f"{state / 'ledger'} lacks charge {number}, which the log has; {_REMEDY}")
        if facts["what"] == "charged" and charges[number - 1].mac.hex() != facts["ledger_mac"]:
            raise files.Damaged(f"{state / 'ledger'} has another charge {number} than the log; {_REMEDY}")


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
