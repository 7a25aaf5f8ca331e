"""A site's log: a chained, keyed line for everything that arrives, for what became of it, and for every charge.

The lines are in ``state/log.jsonl`` (`fedstill.sites.site.chain`); files of 64 MiB are kept under other names. A line
has its number ``n``, the time, ``what`` happened, a ``detail`` in words, and facts that depend on ``what``:

============  ========================================================================================================
what          facts
============  ========================================================================================================
started       of the node: version of fedstill, the policy
asked         run, method, step, exchange, model, settings, ``spec`` and ``request`` (SHA-256), bytes, process, policy
imported      run and ``history`` (SHA-256) of releases by another program, which the ledger is charged with next
charged       as above, number ``ledger`` and ``ledger_mac`` of the line in the ledger, unit, epsilon, shares of budgets
answered      as asked, ``reply`` (SHA-256), its bytes, its fields, the numbers of its charges
refused       the same, ``reply``; of a foreign bundle, ``bundle`` (SHA-256)
waiting       as refused: the operator has not approved the run
failed        as refused; the reason may contain data
begun         a chain begins at a site that has earlier charges
============  ========================================================================================================

After as many messages refused, failed or waiting as the policy's ``refusals_per_day``, the rest of a day has no line.
The other lines are, by the operator, ``paused``, ``resumed``, ``approved`` and ``denied``.

A killed process may leave a question without an outcome, a charge that only the ledger has (it was killed between the
two files), and a charge without a release. None of these is wrong. Wrong is a release that left twice or without a
charge, a charge of the log that the ledger lacks, and every change of a line.
"""

import hashlib
import hmac
import json
import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as chained
from pathlib import Path
from typing import Any

from fedstill import schema
from fedstill.base import files
from fedstill.privacy.accounting import shares
from fedstill.runs.environment import now
from fedstill.sites.seals import number_of
from fedstill.sites.site.chain import Chain
from fedstill.sites.site.charges import LINES as LEDGER
from fedstill.sites.site.charges import ChargeLine, SiteStore, read_charges, standing
from fedstill.sites.site.policy import SitePolicy

COUNT = "refusals.json"
"""Name of the file with the day, in UTC, and the number of messages refused in it."""


def count(policy: SitePolicy) -> int:
    """Count a message that is refused, fails or waits; returns the number of today."""
    number = _today(policy) + 1
    files.write_json(policy.state / COUNT, {"day": _day(), "count": number})
    return number


def is_full(policy: SitePolicy) -> bool:
    """Whether the site has refused so many messages today that it logs and answers no other."""
    return _today(policy) >= policy.refusals_per_day


def _today(policy: SitePolicy) -> int:
    """Number of messages refused today; 0 if the file is damaged, as it limits the size of the log only."""
    try:
        found = json.loads((policy.state / COUNT).read_bytes())
        return int(found["count"]) if found["day"] == _day() else 0
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def _day() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


HEAD = "log.head"
"""Name of the file with the end of the chain, which a site has since it first served."""
FORMAT, VERSION = "format.json", 2
"""File with the version of a site's state, and the version."""
NEWEST = "newest.receipt"
"""Name of the file with a receipt that shows the log to be an older copy."""
IMPORTED = "imported"
"""Step of the charges for the history of another program."""
_LARGEST = 64 * 2**20
_TAIL = 2**20
"""Bytes of the log's end in which a line is looked for before all of it is read."""
_DETAIL = 1000
_REMEDY = (
    "the site replies to nothing until its newest copy is back, or until 'fedstill site log FOLDER --restart' puts it "
    "aside and begins another"
)

log = logging.getLogger("fedstill")


def write(policy: SitePolicy, facts: Mapping[str, Any], what: str, detail: str | Exception, **more: Any) -> None:
    """Append a line with ``facts`` and ``more``, ``what`` happened and its ``detail``, shortened.

    Raises:
        Damaged: the log was changed, or a newer fedstill wrote it.
        OSError: the line can't be written.
    """
    text = schema.clean(f"{type(detail).__name__}: {detail}" if isinstance(detail, Exception) else detail, _DETAIL)
    if what in ("refused", "failed", "waiting"):
        number, limit = count(policy), policy.refusals_per_day
        if number > limit:
            return
        if number == limit:
            text += f"; this is refusal {limit:,} of the day, so no other is logged or answered (refusals_per_day)"
    line = {"time": now(), "what": what, **facts, **more, "detail": text}
    log.info("%s", json.dumps(line))
    append(policy.state, line)


def charged(policy: SitePolicy, facts: Mapping[str, Any], charge: ChargeLine, store: SiteStore) -> None:
    """Append a line with ``facts`` and the costs of a charge that ``store`` has just taken."""
    entry, limit = charge.entry, policy.budget_per_run or policy.budget
    own = standing(store.runs[charge.run], None, limit, policy.delta)
    first = store.first.cost if store.first else None
    every = standing(list(chained(*store.runs.values())), first, policy.budget, policy.delta)
    alone = shares(standing([entry], None, policy.budget, policy.delta))[entry.unit]
    cost = {"epsilon": alone["epsilon"], "run_total": shares(own), "total": shares(every), "budget": policy.budget}
    ledger = {"ledger": charge.number, "ledger_mac": charge.mac, "unit": entry.unit}
    write(policy, facts, "charged", f"{entry.mechanism} ({entry.unit})", **ledger, **cost)


def append(state: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the log in a site's folder ``state``, and begin the log if there is none."""
    chained = is_chained(state)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    chain = _chain(state)
    with chain.lock:
        if chained:
            _check_there(state)
        _begin(state, chain)
        if not chained:
            files.write_json(state / FORMAT, {"version": VERSION, "chained": True})
        chain.synchronise()
        chain.append({"n": chain.count + 1, **line})


def receipt(state: Path) -> str:
    """A receipt of the log as it is (`fedstill.sites.seals`); nothing where there is no log, or a damaged one."""
    try:
        chain = _chain(state)
        chain.synchronise()
        return _receipt(state, chain.count, chain.last.hex()) if chain.count else ""
    except (files.Damaged, OSError):
        return ""


def check_receipt(state: Path, given: str) -> None:
    """Refuse to go on with a log that lacks a line of which it has given a receipt, or has another there.

    A receipt of another log proves nothing, and is ignored. An older copy may have gone on since, so that the number of
    lines is not enough.

    Raises:
        Damaged: the log, and with it all of the state, is an older copy.
    """
    number, newest = number_of(given), state / NEWEST
    if not number or not is_chained(state):
        return
    mac = given.split(".")[1]
    if not hmac.compare_digest(given, _receipt(state, number, mac)):
        return
    if _mac_of(state, number) != mac:
        files.write_bytes(newest, given.encode())
        raise files.Damaged(_older(state, number))
    newest.unlink(missing_ok=True)


def check_newest(state: Path) -> None:
    """Raise `Damaged` if the state was found to be an older copy (`check_receipt`)."""
    if (newest := state / NEWEST).exists():
        raise files.Damaged(_older(state, number_of(newest.read_text("utf-8"))))


def _older(state: Path, number: int) -> str:
    return (
        f"{state} is an older copy: its log lacks line {number}, so its ledger has forgotten releases; "
        "bring the newest copy back, or make the site anew (fedstill site init) with the budget that is left"
    )


def _receipt(state: Path, number: int, mac: str) -> str:
    key = (state / "log.key").read_bytes()
    return f"{number}.{mac}.{hmac.digest(key, f'receipt {number} {mac}'.encode(), hashlib.sha256).hex()}"


def _mac_of(state: Path, number: int) -> str | None:
    """The MAC of a line, which is mostly among the last; None if there is no such line."""
    chain = _chain(state)
    place = chain.places[-1]
    with place.open("rb") as file:
        file.seek(start := max(0, place.stat().st_size - _TAIL))
        last = file.read().split(b"\n")[1 if start else 0 :]
    found = [line for line in last if line.startswith(b'{"n":%d,' % number) and line.endswith(b'"}')]
    if found:
        return found[-1][-66:-2].decode(errors="replace")
    lines = chain.read()
    return lines[number - 1].mac.hex() if number <= len(lines) else None


def read(state: Path) -> list[dict[str, Any]]:
    """All lines, after a check of the chain.

    Raises:
        Damaged: the log was changed, or a newer fedstill wrote it.
    """
    if is_chained(state):
        _check_there(state)
    elif not any((_has_lines(state), (state / HEAD).exists(), (state / "log.key").exists())):
        return []
    return [json.loads(line.text) for line in _chain(state).read()]


def restart(state: Path) -> Path:
    """Put a damaged log aside and begin another, whose first line says so; returns the folder of the old one.

    Raises:
        NewerFormat: a newer fedstill wrote the state.
        Damaged: the log is an older copy; another one would hide that the ledger has forgotten releases.
    """
    check_format(state)
    check_newest(state)
    aside = state / time.strftime("log-damaged-%Y%m%d-%H%M%S")
    chain = _chain(state)
    with chain.lock:
        aside.mkdir(mode=0o700)
        places = [p for p in (*chain.places, state / "log.key", state / "log.head") if p.exists()]
        digests = {place.name: _digest(place) for place in places}
        for place in places:
            shutil.move(place, aside / place.name)
        _begin(state, chain, damaged=digests)
    return aside


def check_format(state: Path) -> None:
    """Refuse the state of a newer fedstill, which has more than this one can read and continue.

    Raises:
        NewerFormat: a newer fedstill wrote the state.
        Damaged: the file with its version can't be read.
    """
    is_chained(state)


def is_chained(state: Path) -> bool:
    """Whether the log's chain was begun, so that its files must be there; errors as of `check_format`."""
    place = state / FORMAT
    try:
        content = json.loads(place.read_bytes())
        version, chained = content["version"], content.get("chained") is True
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise files.Damaged(f'{place} is damaged; write {{"version": {VERSION}}} into it') from error
    files.check_format(state, version, VERSION)
    return chained


def _check_there(state: Path) -> None:
    """Refuse a log whose chain was begun and has no head; with a head, `Chain` checks the other files."""
    if not (state / HEAD).exists():
        raise files.Damaged(f"{state / HEAD} can't be read (it is missing); {_REMEDY}")


def _chain(state: Path) -> Chain:
    return Chain(state, "log", _REMEDY, _LARGEST)


def _begin(state: Path, chain: Chain, **more: Any) -> None:
    """Make the chain if there is none, with a line about what came before it."""
    key, head, lines = (state / f"log.{part}" for part in ("key", "head", "jsonl"))
    if head.exists() or _has_lines(state):  # of lines without a key or a head, `Chain` says that they are damaged
        return
    for place in (key, lines):  # of a crash while they were made
        place.unlink(missing_ok=True)
    chain.create()
    ledger = ledger_of(state) / LEDGER
    facts: dict[str, Any] = {"ledger": ledger.read_bytes().count(b"\n") if ledger.exists() else 0, **more}
    if facts != {"ledger": 0}:
        chain.synchronise()
        line = {"time": now(), "what": "begun", **facts, "detail": "the chain of the log begins here"}
        chain.append({"n": 1, **line})


def _has_lines(state: Path) -> bool:
    lines = state / "log.jsonl"
    return lines.exists() and lines.stat().st_size > 0


def ledger_of(state: Path) -> Path:
    """Folder of the ledger in a site's folder ``state``."""
    return state / "ledger"


def _digest(place: Path) -> str:
    return hashlib.sha256(place.read_bytes()).hexdigest()


Line = Mapping[str, Any]
OUTCOMES = ("answered", "refused", "failed", "waiting")
"""Possible outcomes of a request."""


@dataclass
class Verdict:
    """The result of `verify`.

    Attributes:
        problems: sentences on what is wrong.
        notes: sentences on what killed processes left, which is not wrong.
        counts: numbers of lines, questions, answers, releases and charges.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(state: Path) -> Verdict:
    """Check the log and the ledger in a site's folder ``state``; no damage raises an error.

    Raises:
        NewerFormat: a newer fedstill wrote them.
    """
    verdict = Verdict()
    lines: list[dict[str, Any]] = []
    charges: list[ChargeLine] = []
    try:
        lines = read(state)
        charges = read_charges(ledger_of(state))
        check_newest(state)
    except files.NewerFormat:  # which may know more kinds of lines and charges
        raise
    except files.Damaged as error:
        verdict.problems.append(str(error))
        return verdict
    _compare(verdict, [line for line in lines if "n" in line], charges)
    asked = sum(line["what"] == "asked" for line in lines)
    answered = sum(line["what"] == "answered" for line in lines)
    verdict.counts |= {"lines": len(lines), "questions": asked, "answers": answered, "charges": len(charges)}
    return verdict


def unfinished(lines: Sequence[Line]) -> list[Line]:
    """The questions without an outcome: they are being answered, or their process was killed."""
    waiting: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        if line["what"] == "asked":
            waiting[_question(line)].append(line)
        elif line["what"] in OUTCOMES and waiting[_question(line)]:
            same = waiting[_question(line)]
            own = [each for each in same if each.get("process") == line.get("process")]
            same.remove((own or same)[0])
    return sorted((line for each in waiting.values() for line in each), key=lambda line: int(line.get("n", 0)))


def _question(line: Line) -> tuple[str, str]:
    """Digests of the spec and the request of a line's question: runs of one seed send the same requests."""
    return str(line.get("spec")), str(line.get("request"))


def _compare(verdict: Verdict, lines: Sequence[Line], charges: Sequence[ChargeLine]) -> None:
    begun = max((int(line["ledger"]) for line in lines if line["what"] == "begun"), default=0)
    if begun:
        verdict.notes.append(
            f"the chain of the log begins after charge {begun}; earlier charges are in the ledger only"
        )
    if wrong := next((i for i, line in enumerate(lines, start=1) if line["n"] != i), None):
        verdict.problems.append(f"entry {wrong} of the log has another number")
    logged = _logged(verdict, lines, charges)
    unlogged = [charge for charge in charges[begun:] if charge.number not in logged]
    broken = Counter(line.get("run") for line in unfinished(lines))
    runs = {_question(line): line.get("run") for line in lines if line["what"] == "asked"}
    broken.update(runs.get(_question(line)) for line in lines if line["what"] == "failed")
    for charge in unlogged:
        words = f"charge {charge.number} of run {charge.run[:8]} is in the ledger and not in the log"
        if charge.entry.step == IMPORTED:
            verdict.notes.append(f"{words}: it was imported by a killed process; it stays charged")
            continue
        broken[charge.run] -= 1
        if broken[charge.run] < 0:
            verdict.problems.append(f"{words}, and no question of the run was interrupted")
        else:
            verdict.notes.append(f"{words}: a question was interrupted between the two; it stays charged")
    _check_answers(verdict, lines, [*charges[:begun], *unlogged])
    for line in unfinished(lines):
        verdict.notes.append(f"entry {line['n']} has no outcome: the question is being answered, or was interrupted")


def _logged(verdict: Verdict, lines: Sequence[Line], charges: Sequence[ChargeLine]) -> dict[int, Line]:
    """The charges of the log by their number in the ledger, which must have each."""
    logged: dict[int, Line] = {}
    for line in lines:
        if line["what"] != "charged":
            continue
        number = int(line["ledger"])
        if number > len(charges):
            verdict.problems.append(f"charge {number} (entry {line['n']} of the log) is lost: the ledger lacks it")
        elif charges[number - 1].mac != line["ledger_mac"] or charges[number - 1].run != line["run"]:
            verdict.problems.append(f"charge {number} (entry {line['n']} of the log) is another one in the ledger")
        elif number in logged:
            verdict.problems.append(f"charge {number} is in the log twice (entries {logged[number]['n']}, {line['n']})")
        logged[number] = line
    return logged


def _check_answers(verdict: Verdict, lines: Sequence[Line], others: Sequence[ChargeLine]) -> None:
    """Check that every released reply was charged, and left in one form; ``others`` are charges the log lacks."""
    charged = {(line["run"], line.get("request")) for line in lines if line["what"] == "charged"}
    exchanges = {(charge.run, charge.entry.exchange) for charge in others}
    replies: dict[tuple[str, str], Line] = {}
    payers: dict[int, Line] = {}
    released = 0
    for line in lines:
        if line["what"] != "answered" or line["simulated_noise"] or "released" not in line["fields"].values():
            continue
        released += 1
        question = (str(line["run"]), str(line["request"]))
        earlier = replies.setdefault(question, line)
        if earlier["reply"] != line["reply"]:
            verdict.problems.append(f"the question of entries {earlier['n']} and {line['n']} got two releases")
        if question not in charged and (line["run"], line["exchange"]) not in exchanges:
            verdict.problems.append(f"the release of entry {line['n']} was not charged")
        for number in line["charges"]:
            payer = payers.setdefault(number, line)
            if payer["reply"] != line["reply"]:
                verdict.problems.append(f"charge {number} paid for two releases (entries {payer['n']}, {line['n']})")
    verdict.counts["releases"] = released
