"""A site's journal: one chain of lines for all that happened, from which ledger, log and counts are read.

The lines are in ``state/journal.jsonl`` (`fedstill.sites.site.chain`). A file of 256 KiB is kept under another name,
and the next one begins with a checkpoint (`fedstill.sites.site.checkpoint`), so that a question takes as long after
many releases as after few. A line has its number ``n``, the time, ``what`` happened, a ``detail`` in words, and facts
that depend on ``what``:

============  ========================================================================================================
what          facts
============  ========================================================================================================
started       of the node: version of fedstill, the policy
asked         run, method, step, exchange, model, settings, ``spec`` and ``request`` (SHA-256), bytes, process, policy
accepted      run and ``spec`` of a question that the policy allows, its number, the time in seconds: before its step
imported      run and ``history`` (SHA-256) of releases by another program, which are charged next
charged       as asked, the number of the charge, its ``entry``, unit, epsilon, shares of budgets: before the release
answered      as asked, ``reply`` (SHA-256), its bytes, its fields, the numbers of its charges
refused       the same, ``reply``; ``beyond`` if the ledger refused, after the step; of a foreign bundle, ``bundle``
waiting       as refused: the operator has not approved the run
failed        as refused; the reason may contain data
signed        the fingerprint of a helper of masked sums, the number of sets it has signed: before a signature leaves
begun         the journal goes on where files of an earlier format end, whose digests it has
checkpoint    ``at``: what all lines before mean for what comes next
============  ========================================================================================================

All lines of a question but the first have its number, that of its line ``asked``, as ``question``. After as many
messages refused, failed or waiting as the policy's ``refusals_per_day``, the rest of a day has no line. The other lines
are, by the operator, ``paused``, ``resumed``, ``approved`` and ``denied``.

A reader of the key can forge the chain, so the hashes prove something only against who lacks it: an accident, a copy, a
program without access. Against the site's own operator the receipts do, which its server keeps (`receipt`).
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock
from pydantic import ValidationError

from fedstill.base import files
from fedstill.runs.environment import now
from fedstill.sites.seals import number_of
from fedstill.sites.site.chain import Chain, Line
from fedstill.sites.site.checkpoint import ChargeLine, Standing, read_charge
from fedstill.sites.site.state_format import (
    FORMAT,
    HEAD,
    KEY,
    LINES,
    NAME,
    NEWEST,
    VERSION,
    check_newest,
    lacks,
    older,
    receipt_of,
    take_over,
    version_of,
)

T = TypeVar("T")
LARGEST = 2**18
"""Bytes of a file, without its checkpoint, from which another begins."""
_CHECKPOINT = b',"what":"checkpoint",'
_REMEDY = (
    "the site replies to nothing until its newest copy is back; if there is none, make the site anew (fedstill site "
    "init) with the budget that is left"
)


class SiteJournal:
    """The journal in a site's folder ``state``; `create` makes it once.

    An object knows the end that it saw last: a file that no longer has it is damaged.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._chain = Chain(state, NAME, _REMEDY)
        self._standing: Standing | None = None
        self._lines = 0  # taken in by `standing`
        self._earlier: tuple[str, int, list[ChargeLine]] = ("", 0, [])  # a run's charges, of so many of all runs

    @property
    def lock(self) -> FileLock:
        """A lock against other processes; this object may take it again."""
        return self._chain.lock

    def append(self, line: Mapping[str, Any]) -> int:
        """Write one more line, flush it to the disk, and return its number.

        Raises:
            Damaged: the journal was changed, or a newer fedstill wrote it.
            OSError: the line can't be written.
        """
        check(self._state)
        with self.lock:
            self._chain.synchronise()
            if self._chain.size >= LARGEST and self._chain.size >= LARGEST + self._checkpoint_size():
                self._begin_file()
            number = self._chain.count + 1
            self._chain.append({"n": number, **line})
            return number

    def standing(self) -> Standing:
        """What the lines mean, after a check of those from the last checkpoint on.

        Raises:
            Damaged: they were changed, or a newer fedstill wrote them.
        """
        check(self._state)
        if self._standing is None:
            lines, standing = self._since_checkpoint(), Standing()
            self._lines = lines[0].number - 1 if lines else 0
        else:
            lines, standing = self._chain.read(self._lines), self._standing
        self._standing = standing
        for line in lines:
            if line.number > self._lines:
                _read(partial(standing.add, line.number, json.loads(line.text), line.mac), self._state)
                self._lines = line.number
        return standing

    def charges_of(self, run: str) -> list[ChargeLine]:
        """The releases of a run, in order."""
        standing = self.standing()
        recent = [charge for charge in standing.recent if charge.run == run]
        counts, since = standing.at.runs.get(run), standing.at.charges - len(standing.recent)
        if counts is None or counts.first > self._chain.count - self._chain.lines or not since:
            return recent
        if self._earlier[:2] != (run, since):  # whole files, which nobody changes
            earlier = charges_among(self._chain.read(counts.first - 1), self._state, run)
            self._earlier = run, since, [charge for charge in earlier if charge.number <= since]
        return [*self._earlier[2], *recent]

    def read(self) -> list[Line]:
        """All lines, after a check of each."""
        check(self._state)
        return self._chain.read()

    def _since_checkpoint(self) -> list[Line]:
        """The lines from the last checkpoint on; all of them without one."""
        begins = self._chain.begins
        for since in reversed(begins):
            lines = self._chain.read(since)
            marks = [place for place, line in enumerate(lines) if _is_checkpoint(line)]
            if marks:
                return lines[marks[-1] :]
        return lines

    def _checkpoint_size(self) -> int:
        """Bytes of the checkpoint that the file begins with: a large one must not make each line begin a file."""
        with (self._state / LINES).open("rb") as file:
            first = file.readline()
        return len(first) if _CHECKPOINT in first[:200] else 0

    def _begin_file(self) -> None:
        at = self.standing().checkpoint(time.time())
        self._chain.rotate()
        line = {"time": now(), "what": "checkpoint", "at": at.model_dump(mode="json"), "detail": ""}
        self._chain.append({"n": self._chain.count + 1, **line})


def create(state: Path) -> None:
    """Make an empty journal, once: a second one would not know the earlier releases.

    What a crash left of one while it was made, and one without a line, are replaced.

    Raises:
        ValueError: the site has a journal already.
        NewerFormat: a newer fedstill wrote the state.
    """
    if _is_used(state):
        raise ValueError(f"{state} has a site's journal already; a new journal would forget what was released")
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    state.chmod(0o700)
    for name in (HEAD, LINES, KEY):
        (state / name).unlink(missing_ok=True)
    Chain(state, NAME, "").create()
    files.write_json(state / FORMAT, {"version": VERSION})


def _is_used(state: Path) -> bool:
    """Whether a state has, or had, a line; a crash while it was made leaves none."""
    chain, version = Chain(state, NAME, _REMEDY), version_of(state)
    lines, head, key = (state / name for name in (LINES, HEAD, KEY))
    if version is not None and (version < VERSION or not all(place.exists() for place in (lines, head, key))):
        return True
    if len(chain.places) > 1 or (lines.exists() and lines.stat().st_size):
        return True
    if head.exists() and head.stat().st_size:
        try:
            chain.read()
        except files.Damaged:  # it has the number of lines
            return True
    return False


def check(state: Path) -> None:
    """Refuse a state without a journal, of another format, or of a newer fedstill.

    A state of format 2, which has a ledger and a log, is taken over.

    Raises:
        NewerFormat: a newer fedstill wrote the state.
        Damaged: the journal is missing, or the file with its version can't be read.
    """
    version = version_of(state)
    if version == VERSION and (state / HEAD).exists():
        return
    if version is not None and version < VERSION:
        take_over(state)
    elif version is None and not any((state / name).exists() for name in (HEAD, LINES, KEY)):
        raise files.Damaged(f"{state} has no journal; 'fedstill site init' makes a site, whose folder moves as a whole")
    else:
        missing = HEAD if version is not None else FORMAT
        raise files.Damaged(f"{state} is damaged: {missing} can't be read (it is missing); {_REMEDY}")


def append(state: Path, line: Mapping[str, Any]) -> int:
    """Append a line to the journal in a site's folder ``state``; as `SiteJournal.append`."""
    return SiteJournal(state).append(line)


def charges_among(lines: list[Line], state: Path, run: str | None = None) -> list[ChargeLine]:
    """The releases of some lines, of one run or of all."""
    words = [b'"what":"charged"'] if run is None else [b'"what":"charged"', json.dumps(run).encode()]
    some = [line for line in lines if all(word in line.text for word in words)]  # the others need no parser
    found = [(facts, line.mac) for line in some if (facts := json.loads(line.text))["what"] == "charged"]
    charges = _read(lambda: [read_charge(facts, mac) for facts, mac in found], state)
    return [charge for charge in charges if run in (None, charge.run)]


def _read(what: Callable[[], T], state: Path) -> T:
    try:
        return what()
    except (ValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, files.Damaged):
            raise
        why = str(error).splitlines()[0]
        raise files.Damaged(f"{state / LINES} was written by another version of fedstill ({why}); {_REMEDY}") from error


def _is_checkpoint(line: Line) -> bool:
    return _CHECKPOINT in line.text[:200]


def receipt(state: Path) -> str:
    """A receipt of the journal as it is (`fedstill.sites.seals`); nothing where there is none, or a damaged one."""
    try:
        chain = Chain(state, NAME, _REMEDY)
        chain.synchronise()
        return receipt_of(state / KEY, chain.count, chain.last.hex()) if chain.count else ""
    except (files.Damaged, OSError):
        return ""


def check_receipt(state: Path, given: str) -> None:
    """Refuse to go on with a journal that lacks a line of which it has given a receipt, or has another there.

    A receipt of another journal proves nothing, and is ignored; one of the log of format 2 is that log's, as an older
    copy may have been taken over. An older copy may have gone on since, so that the number of lines is not enough.

    Once a state was found to be one, it stays one until its journal has the line that showed it, whatever is given:
    a server's copy of the receipts may be older too, or gone.

    Raises:
        Damaged: the journal, and with it all of the state, is an older copy.
    """
    if version_of(state) is None:
        return
    check(state)
    check_newest(state)
    if lacks(state, given):
        files.write_bytes(state / NEWEST, given.encode())
        raise files.Damaged(older(state, number_of(given)))
    (state / NEWEST).unlink(missing_ok=True)
