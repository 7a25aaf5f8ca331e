"""``tests/vectors/journal.json``: a reader of a site's journal of twenty lines sees what fedstill sees."""

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import journal_cases
import pytest

from fedstill.base import files
from fedstill.sites.site.charges import Limits, open_site_ledger, read_charges
from fedstill.sites.site.log import verify
from fedstill.sites.site.site_journal import SiteJournal
from fedstill.sites.site.state_format import HEAD, KEY, LINES

ALL = json.loads((Path(__file__).parents[1] / "vectors" / "journal.json").read_text("utf-8"))["cases"]
FILES = {case["name"]: case["files"] for case in ALL}
CASES = [{**case, "files": FILES.get(case.get("of"), {}) | case["files"]} for case in ALL]


def named(good: bool) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in CASES if case["good"] is good]


def read(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a journal by the rule in tests/vectors/README.md; AssertionError if it is damaged."""
    found, key = case["files"], bytes.fromhex(case["files"][KEY])
    older = sorted(name for name in found if name.startswith("journal-"))
    text = "".join(found[name] for name in [*older, LINES])
    lines, before = [], bytes(32)
    for line in text.split("\n")[:-1]:
        body, mac = line[:-74] + "}", hmac.new(key, before + (line[:-74] + "}").encode(), hashlib.sha256)
        assert line == f'{body[:-1]},"mac":"{mac.hexdigest()}"}}'
        lines.append(json.loads(body))
        before = mac.digest()
    head = json.loads(found[HEAD])
    own = json.dumps({name: value for name, value in head.items() if name != "mac"})
    assert hmac.new(key, b"head" + own.encode(), hashlib.sha256).hexdigest() == head["mac"] and len(key) == 32
    assert head["count"] in (len(lines), len(lines) - 1)  # one more line is of a crash before the head was written
    assert head["last"] in (before.hex(), text.split("\n")[-3][-66:-2] if len(lines) > 1 else "0" * 64)
    return lines


def test_the_file_is_what_the_program_writes_today() -> None:
    assert journal_cases.contents()["cases"] == ALL


@pytest.mark.parametrize("case", named(good=True))
def test_a_good_journal_is_read_alike(case: dict[str, Any], tmp_path: Path) -> None:
    state = journal_cases.write_files(tmp_path / "state", case["files"])
    lines = read(case)
    own = [json.loads(line.text) for line in SiteJournal(state).read()]
    assert own == lines and len(lines) == case["lines"]
    charged = [line for line in lines if line["what"] == "charged"]
    assert [charge.entry.model_dump(mode="json") for charge in read_charges(state)] == [c["entry"] for c in charged]
    at = SiteJournal(state).standing().at
    accepted = sum(line["what"] == "accepted" for line in lines)
    failed = accepted - sum(line["what"] == "answered" for line in lines)
    assert (
        (at.charges, at.accepted, at.failed) == (len(charged), accepted, failed) == (case["charges"], accepted, failed)
    )


@pytest.mark.parametrize("case", named(good=False))
def test_a_bad_journal_is_refused_by_both(case: dict[str, Any], tmp_path: Path) -> None:
    state = journal_cases.write_files(tmp_path / "state", case["files"])
    with pytest.raises(files.Damaged):
        read_charges(state)
        if not verify(state).is_whole:
            raise files.Damaged("it is whole as a chain, and its lines disagree")
    if "earlier" not in case["name"]:  # a question reads the last file, which is whole; --verify reads all
        with pytest.raises(files.Damaged):
            open_site_ledger(state, journal_cases.RUN, Limits(1e-5, 9.0))
    if case["name"] not in ("the format is newer", "a charge has the number of another"):
        with pytest.raises(AssertionError):
            read(case)
