"""The ledger of a real site: it outlasts runs and restarts, and whoever loses or changes it stops all releases.

`create_ledger` makes it once, `open_ledger` opens it for a run. The store is a chain of MACs on disk; the rule composes
the releases of all runs.
"""

import hashlib
import hmac
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import ValidationError

from fedstill import files
from fedstill.privacy import accounting
from fedstill.privacy.events import Event, Gaussian, Pure, Unbounded, Unit
from fedstill.privacy.ledger import BudgetExceeded, Entry, Ledger, by_part, check_budget, refuse_unbudgeted

KEY, LINES, HEAD, LOCK = "ledger.key", "ledger.jsonl", "ledger.head", "ledger.lock"
_START = bytes(32)  # stands where the first line would have the MAC of the one before
_TAIL = len(',"mac":""}') + 2 * len(_START)
_renyi = lru_cache(maxsize=4096)(accounting.renyi)


def create_ledger(folder: Path) -> None:
    """Make an empty ledger; once, as a new one knows of no earlier release.

    Raises:
        ValueError: when a file of one is there already.
    """
    if there := [name for name in (KEY, LINES, HEAD) if (folder / name).exists()]:
        raise ValueError(f"{folder} has a {there[0]} already; a new ledger would forget what was released")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    key = secrets.token_bytes(32)
    for name, data in ((KEY, key), (LINES, b""), (HEAD, _head(key, 0, _START))):
        with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        _flush(folder / name)
    _flush(folder)
    _flush(folder.parent)


def open_ledger(
    folder: Path,
    run: str,
    *,
    delta: float,
    budget: float | None,
    allow_unbounded: bool = False,
    run_limit: tuple[float, float] | None = None,
) -> Ledger:
    """The ledger of a site, for one of its runs; ``entries`` are those of this run.

    Its `charge` raises `Damaged` when the ledger is not what was written, and TimeoutError when another process keeps
    it for a minute.

    Args:
        folder: where `create_ledger` made it.
        run: a name that no other run has.
        delta: the delta that the budget is stated at, in (0, 1).
        budget: the largest epsilon (of each unit) that the releases of all runs may cost together; None for no limit.
        allow_unbounded: whether releases that no epsilon bounds may be made, where there is no budget.
        run_limit: epsilon and delta that the run's own releases stay within, as it was announced; None for no limit.

    Raises:
        Damaged: when the ledger is not what was written.
        ValueError: the budget is not a number of 0 or more.
    """
    if budget is not None and not 0 <= budget < math.inf:
        raise ValueError(f"budget is {budget}; it must be a number of 0 or more, or None")
    store = SiteStore(folder, run)
    rule = partial(
        _check, store=store, delta=delta, budget=budget, allow_unbounded=allow_unbounded, run_limit=run_limit
    )
    return Ledger(store, rule)


class SiteStore:
    """The releases of one site in all its runs, on its disk before anything is released.

    A line holds the run, the entry and the HMAC-SHA256 of both and of the MAC of the line before; the head holds how
    many lines there are. One line more is a crash before the release: it is charged. Half a line is a crash as well and
    is not charged, as `Ledger.charge` had not returned. Anything else is damage and stops everything. So does an older
    copy that is put back while this object lives; between two openings nobody can notice one without a counter kept
    elsewhere. Whoever may read the key can write any ledger, so the folder is the site's alone.

    Args:
        folder: where `create_ledger` made it.
        run: the run whose entries `read` returns and `append` writes.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._lock = FileLock(folder / LOCK, timeout=60)
        self._macs = [_START]
        self._runs: dict[str, list[Entry]] = {}

    def lock(self) -> AbstractContextManager[Any]:
        """Keep other processes from charging meanwhile."""
        return self._lock

    def other_runs(self) -> list[list[Entry]]:
        """The entries of every other run, as last read."""
        return [entries for run, entries in self._runs.items() if run != self._run]

    def read(self) -> list[Entry]:
        """The run's entries, after every line on the disk was verified.

        Raises:
            Damaged: when the ledger is not what was written.
        """
        self._key = self._bytes(KEY)
        with self._lock:
            (lines, macs), known = self._verified(), len(self._macs)
            if macs[:known] != self._macs:
                raise self._damaged(f"{LINES} was replaced by another copy")
            try:
                new = [(value["run"], Entry(**value["entry"])) for value in map(json.loads, lines[known - 1 :])]
            except (ValidationError, ValueError, TypeError, KeyError) as error:
                raise self._damaged(f"{LINES} was written by another version of fedstill") from error
            for run, entry in new:
                self._runs.setdefault(run, []).append(entry)
            self._macs = macs  # last: whatever interrupts this, no line goes uncounted
        return list(self._runs.get(self._run, []))

    def _verified(self) -> tuple[list[bytes], list[bytes]]:
        """The lines and the MACs, which begin with that before the first line; mends the head after a crash."""
        if len(self._key) != len(_START):
            raise self._damaged(f"{KEY} has {len(self._key)} bytes in place of {len(_START)}")
        head, data, macs = self._bytes(HEAD), self._bytes(LINES), [_START]
        *lines, torn = data.split(b"\n")
        self._end = len(data) - len(torn)
        for number, line in enumerate(lines, start=1):
            signed, mac = _signed(self._key, macs[-1], line[:-_TAIL] + b"}")
            if not hmac.compare_digest(signed, line):
                raise self._damaged(f"line {number} of {LINES} was changed, moved or added, or {KEY} is another's")
            macs.append(mac)
        if head != _head(self._key, len(lines), macs[-1]):
            if not lines or head != _head(self._key, len(lines) - 1, macs[-2]):
                raise self._damaged(f"{HEAD} does not fit {LINES}, which lacks lines or has too many, or {KEY}")
            self._write_head(len(lines), macs[-1])
        return lines, macs

    def append(self, entry: Entry) -> None:
        """Write one more entry of the run; it is on the disk for sure when this returns."""
        text = json.dumps({"run": self._run, "entry": entry.model_dump(mode="json")}, separators=(",", ":"))
        line, mac = _signed(self._key, self._macs[-1], text.encode())
        with (self._folder / LINES).open("r+b") as file:
            file.truncate(self._end)  # what a crash left of a line
            file.seek(self._end)
            file.write(line + b"\n")
        self._write_head(len(self._macs), mac)
        self._runs.setdefault(self._run, []).append(entry)
        self._macs.append(mac)

    def _write_head(self, count: int, mac: bytes) -> None:
        _flush(self._folder / LINES)
        files.write_bytes(self._folder / HEAD, _head(self._key, count, mac))
        _flush(self._folder)

    def _bytes(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise self._damaged(f"{name} can't be read ({error.strerror})") from error

    def _damaged(self, what: str) -> files.Damaged:
        return files.Damaged(f"{self._folder} is damaged: {what}; nothing is released until its newest copy is back")


def _check(
    entries: Sequence[Entry],
    entry: Entry,
    *,
    store: SiteStore,
    delta: float,
    budget: float | None,
    allow_unbounded: bool,
    run_limit: tuple[float, float] | None,
) -> None:
    """The rule of a site's ledger: the run keeps its limit, and all runs together the site's budget.

    Runs may share records whatever their parts are, so each other run counts with the cost of its costliest part. Where
    an entry is adaptive, or noise is on samples of the records, a Renyi filter decides, as servers choose their next
    request by earlier replies; for Gaussian noise on all records that makes no difference. Releases that protect
    records do not count against the budget of labels, nor the other way round.
    """
    if isinstance(entry.event, Unbounded) and not allow_unbounded:
        what = f"{entry.mechanism} in step '{entry.step}' ({entry.event.reason})"
        raise BudgetExceeded(f"no epsilon bounds {what}, which this site does not allow; nothing was released")
    if run_limit is not None:
        check_budget(entries, entry, *run_limit)
    if budget is None:
        return refuse_unbudgeted(entry)
    ours = _paths([*entries, entry], entry.unit)
    others = [_paths(run, entry.unit) for run in store.other_runs()]
    filter, total = accounting.rdp_filter(budget, delta), math.inf
    spent = sum(max(_divergence(path, entry.unit, filter.order) for path in paths) for paths in [ours, *others])
    if spent <= filter.bound:  # enough for any noise, and quicker to find than the exact sum
        return
    if not any(_wants_filter(e) for path in chain(ours, *others) for e in path):
        rest = list(chain(*map(_ceiling, others)))
        sums = (_fewer([e.event for e in path] + rest) for path in ours)
        total = max(accounting.epsilon(events, delta, entry.unit) for events in sums)
    if total > budget:
        what = "" if math.isinf(total) else f"; it would come to {total:.4g}"
        raise BudgetExceeded(
            f"releasing {entry.mechanism} in step '{entry.step}' would take the epsilon per {entry.unit} above the "
            f"site's budget of {budget:g} at delta {delta:g}{what}, as earlier runs count; nothing was "
            "released (raise the site's budget or the noise)"
        )


def _wants_filter(entry: Entry) -> bool:
    """Whether adding up what was spent bounds nothing, since a server may choose a release by what came before.

    For Gaussian noise on all records it makes no difference; trade-off curves on samples cross.
    """
    return entry.adaptive or (isinstance(entry.event, Gaussian) and entry.event.sampling < 1)


def _paths(entries: Sequence[Entry], unit: Unit) -> list[list[Entry]]:
    # see `by_part`; but a step that is asked again may split the records another way, and parts overlap
    same = [e for e in entries if e.unit == unit]
    asked = {(e.part, e.exchange) for e in same if e.part is not None}
    return [same] if len(asked) > len({part for part, _ in asked}) else by_part(same)


def _divergence(path: Sequence[Entry], unit: Unit, order: int) -> float:
    if unit == "label" and any(isinstance(e.event, Gaussian) for e in path):
        return math.inf  # noise multipliers are by the influence of a record; a label's may be twice that
    return sum(_renyi(e.event, order) for e in path)


def _ceiling(paths: Sequence[Sequence[Entry]]) -> list[Event]:
    """The costliest path; where it depends on what else is released which one that is, events that dominate all."""
    pure, rest = [], Counter[Event]()
    for path in paths:
        pure.append(sorted((e.event.epsilon for e in path if isinstance(e.event, Pure)), reverse=True))
        rest |= Counter(e.event for e in path if not isinstance(e.event, Pure))
    return [*(Pure(epsilon=max(each)) for each in zip_longest(*pure, fillvalue=0.0)), *rest.elements()]


def _fewer(events: list[Event]) -> Iterator[Event]:
    """The same with equal Gaussians in one, which is quicker to compose."""
    for event, n in Counter(events).items():
        yield from [event.model_copy(update={"count": event.count * n})] if isinstance(event, Gaussian) else [event] * n


def _signed(key: bytes, before: bytes, text: bytes) -> tuple[bytes, bytes]:
    """The JSON object ``text`` with its MAC in it, and the MAC."""
    mac = hmac.digest(key, before + text, hashlib.sha256)
    return text[:-1] + b',"mac":"%s"}' % mac.hex().encode(), mac


def _head(key: bytes, count: int, mac: bytes) -> bytes:
    head = json.dumps({"count": count, "last": mac.hex()}).encode()
    return _signed(key, b"head", head)[0] + b"\n"  # signed, or any key would fit an empty ledger


def _flush(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
