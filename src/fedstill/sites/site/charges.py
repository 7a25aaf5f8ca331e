"""The ledger of a real site: it outlasts runs and restarts, and a lost or changed ledger stops all releases.

`create_ledger` makes it once; `open_ledger` opens it for a run. Its store is a chain of MACs on disk, its rule composes
the releases of all runs.
"""

import base64
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from fedstill.base import files
from fedstill.privacy import accounting
from fedstill.privacy.accounting import for_replaced_labels as replaced
from fedstill.privacy.ledger import (
    UNCOUNTABLE,
    BudgetExceeded,
    Charge,
    Ledger,
    by_record,
    check_budget,
    record_masks,
    refuse_unbudgeted,
)
from fedstill.privacy.releases import Event, Gaussian, Pure, Unbounded, Unit
from fedstill.runs.environment import now
from fedstill.sites.site.chain import Chain, Line

KEY, LINES, HEAD, LOCK = "ledger.key", "ledger.jsonl", "ledger.head", "ledger.lock"


class ChargeLine(NamedTuple):
    """A release in a site's ledger.

    Attributes:
        number: its number among the releases of all runs, from 1.
        run: the run's name at the site.
        entry: the release.
        time: the time of the charge.
        mac: the MAC of its line, in hexadecimal.
    """

    number: int
    run: str
    entry: Charge
    time: str
    mac: str


def create_ledger(folder: Path) -> None:
    """Make an empty ledger, once: a second one would not know the earlier releases.

    Raises:
        ValueError: the folder has a ledger already.
    """
    if there := [name for name in (KEY, LINES, HEAD) if (folder / name).exists()]:
        raise ValueError(f"{folder} has a {there[0]} already; a new ledger would forget what was released")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    _chain(folder).create()


@dataclass(frozen=True)
class Limits:
    """Limits of a site's ledger.

    Attributes:
        delta: the delta of the budget, in (0, 1).
        budget: maximum epsilon of the releases of all runs together; None for no limit.
        allow_unbounded: whether releases that no epsilon bounds are allowed, if there is no budget.
        public_images: whether releases that protect labels only are allowed within a budget.
        budget_per_run: maximum epsilon of one run's releases at ``delta``; None for no limit.
        run_limit: epsilon and delta limiting the run's own releases, as in its spec; None for no limit.
        min_epsilon: smallest epsilon of a release at ``delta``.
        max_releases: number of releases of all runs together; None for no limit.
        alone: whether a share of a masked sum's noise counts by itself, and not with that of others.
    """

    delta: float
    budget: float | None
    allow_unbounded: bool = False
    public_images: bool = False
    budget_per_run: float | None = None
    run_limit: tuple[float, float] | None = None
    min_epsilon: float = 0.0
    max_releases: int | None = None
    alone: bool = True

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 <= self.budget < math.inf:
            raise ValueError(f"budget is {self.budget}; it must be a number of 0 or more, or None")


def open_site_ledger(
    folder: Path, run: str, limits: Limits, charged: "Callable[[ChargeLine, SiteStore], None] | None" = None
) -> Ledger:
    """The ledger of a site for one of its runs; its ``entries`` are those of this run.

    Its `charge` raises `Damaged` if the ledger's files were changed, and TimeoutError if another process locks it for a
    minute.

    Args:
        folder: the folder given to `create_ledger`.
        run: the run's unique name.
        limits: what is allowed.
        charged: called with every release that is charged and with the store, before the release happens.

    Raises:
        Damaged: the ledger's files were changed.
    """
    store = SiteStore(folder, run, charged, alone=limits.alone)
    return Ledger(store, partial(_check, store=store, limits=limits))


class SiteStore:
    """The releases of one site in all its runs; each is on disk before it happens.

    A line of the chain (`fedstill.sites.site.chain`) has the run, the entry and the time. An older copy that replaces
    the files while this object exists is noticed; between two openings, the site's log tells
    (`fedstill.sites.site.log`).

    Args:
        folder: the folder given to `create_ledger`.
        run: the run whose entries `read` returns and `append` writes.
        charged: called with every release that `append` wrote, and with this object.
        alone: whether `append` marks shares of a masked sum's noise as counting by themselves.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        charged: "Callable[[ChargeLine, SiteStore], None] | None" = None,
        *,
        alone: bool = True,
    ) -> None:
        self._chain, self._folder, self._run, self._charged = _chain(folder), folder, run, charged
        self._alone = alone
        self.runs: dict[str, list[Charge]] = {}
        """The entries of each run, as last read."""
        self._count = 0

    def lock(self) -> AbstractContextManager[Any]:
        """A lock against charges by other processes."""
        return self._chain.lock

    @property
    def size(self) -> int:
        """Number of entries of all runs, as last read."""
        return self._chain.count

    def other_runs(self) -> list[list[Charge]]:
        """The entries of each other run, as last read."""
        return [entries for run, entries in self.runs.items() if run != self._run]

    @property
    def first(self) -> Charge | None:
        """The first entry of all runs, as last read."""
        return next((entries[0] for entries in self.runs.values() if entries), None)

    def read(self) -> list[Charge]:
        """The run's entries, after a check of every line on disk.

        Raises:
            Damaged: the ledger's files were changed, or a newer fedstill wrote them.
        """
        for charge in _charges(self._chain, self._folder, self._count):
            self._add(charge.run, charge.entry)
        return list(self.runs.get(self._run, []))

    def append(self, entry: Charge) -> None:
        """Write one more entry of the run, and flush it to disk."""
        time = now()
        entry = marked(entry, alone=self._alone)
        facts: dict[str, Any] = {"run": self._run, "time": time, "entry": entry.model_dump(mode="json")}
        if entry.records is not None:
            facts["records"] = base64.b64encode(entry.records).decode()
        if entry.counts_alone:
            facts["counts"] = "alone"
        mac = self._chain.append(facts)
        self._add(self._run, entry)
        if self._charged is not None:
            self._charged(ChargeLine(self._chain.count, self._run, entry, time, mac.hex()), self)

    def _add(self, run: str, entry: Charge) -> None:
        self.runs.setdefault(run, []).append(entry)
        self._count += 1  # last, so that every entry counts after an interruption


def marked(entry: Charge, *, alone: bool) -> Charge:
    """The entry; if it is a share of a masked sum's noise, with the mark whether it counts by itself."""
    return entry if entry.alone is None else entry.model_copy(update={"counts_alone": alone})


def read_charges(folder: Path) -> list[ChargeLine]:
    """All releases of a site in order, after a check of every line on disk.

    Raises:
        Damaged: the ledger's files were changed, or a newer fedstill wrote them.
    """
    return _charges(_chain(folder), folder)


def _chain(folder: Path) -> Chain:
    return Chain(folder, "ledger", "nothing is released until its newest copy is back")


def _charges(chain: Chain, folder: Path, since: int = 0) -> list[ChargeLine]:
    try:
        return [_read(number, line) for number, line in enumerate(chain.read(since), start=since + 1)]
    except (ValidationError, TypeError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise files.Damaged(
            f"{folder} is damaged: {LINES} was written by another version of fedstill; nothing is released until its "
            "newest copy is back"
        ) from error


def _check(entries: Sequence[Charge], entry: Charge, *, store: SiteStore, limits: Limits) -> None:
    """The rule of a site's ledger: the run stays within its limits, and all runs together within the site's budget.

    A server chooses every request by earlier replies, so filters decide (`fedstill.privacy.accounting`). The names of
    parts are the server's word: two releases count as of disjoint parts only if the ledger knows the records of both. A
    person's data have one budget: if labels were released, the releases that protect records count towards the labels'
    budget as well.
    """
    entry = marked(entry, alone=limits.alone)
    if isinstance(entry.event, Unbounded) and not limits.allow_unbounded:
        what = f"{entry.mechanism} in step '{entry.step}' ({entry.event.reason})"
        raise BudgetExceeded(f"no epsilon bounds {what}, which this site does not allow; nothing was released")
    if entry.unit == "label" and not limits.public_images and not limits.allow_unbounded:
        raise BudgetExceeded(
            f"{entry.mechanism} in step '{entry.step}' protects labels only, and this site does not declare its images "
            "public (public_images); nothing was released"
        )
    if limits.max_releases is not None and store.size >= limits.max_releases:
        raise BudgetExceeded(
            f"the site has released {store.size} times, its limit for all runs (max_releases); nothing was released"
        )
    if not isinstance(entry.event, Unbounded) and (least := _epsilon(entry, limits.delta)) < limits.min_epsilon:
        raise BudgetExceeded(
            f"{entry.mechanism} in step '{entry.step}' would release epsilon {least:.2g} alone, below the site's least "
            f"of {limits.min_epsilon:g} (min_epsilon); lower the noise; nothing was released"
        )
    if limits.run_limit is not None:
        own = [e.event for e in (*entries, entry) if e.unit == entry.unit]
        if not accounting.rdp_filter(*limits.run_limit, own[0]).allows(
            own
        ):  # sufficient, and quicker than the exact sum
            check_budget(entries, entry, *limits.run_limit, split=by_record)
    if limits.budget is None:
        refuse_unbudgeted(entry)
    else:
        every = [*chain(*store.other_runs()), *entries, entry]
        what = f"the site's budget of {limits.budget:g} at delta {limits.delta:g}, including earlier runs"
        _check_all(
            every, (store.first or entry).cost, limits.budget, limits.delta, f"{what}; nothing was released", entry
        )
    if limits.budget_per_run is not None:
        what = f"the site's budget of {limits.budget_per_run:g} at delta {limits.delta:g} for a run (budget_per_run)"
        _check_all([*entries, entry], [*entries, entry][0].cost, limits.budget_per_run, limits.delta, what, entry)


def _epsilon(entry: Charge, delta: float) -> float:
    """The epsilon at ``delta`` of one release; infinite where no sum is known."""
    return _of_event(entry.event, delta, entry.unit)


@lru_cache(256)
def _of_event(event: Event, delta: float, unit: Unit) -> float:
    try:
        return accounting.epsilon([event], delta, unit)
    except UNCOUNTABLE:
        return math.inf


def _check_all(entries: Sequence[Charge], first: Event, budget: float, delta: float, limit: str, entry: Charge) -> None:
    """Raise `BudgetExceeded` unless filters admit ``entries``, of which ``entry`` is the new one."""
    units: set[Unit] = {e.unit for e in entries}
    for unit in units & {entry.unit, "label"}:
        for events in _paths(entries, unit):
            if not accounting.admits(events, first, budget, delta):
                raise BudgetExceeded(
                    f"releasing {entry.mechanism} in step '{entry.step}' would take the epsilon per {unit} above "
                    f"{limit} (raise the site's budget or the noise)"
                )


def standing(
    entries: Sequence[Charge], first: Event | None, budget: float | None, delta: float
) -> dict[Unit, accounting.Use]:
    """The part of a budget that releases use up, for each unit that they protect.

    Args:
        entries: the releases of one run, or of all.
        first: the first release of all runs, or of this run for a budget of a run; None for the first of ``entries``.
        budget: the site's budget; None for no budget, of which every share is infinite.
        delta: the budget's delta.
    """
    uses: dict[Unit, accounting.Use] = {}
    for unit in dict.fromkeys(e.unit for e in entries):
        start = first or entries[0].cost
        each = (accounting.used(events, start, budget or 1.0, delta) for events in _paths(entries, unit))
        most = max(each, key=lambda use: use.share)
        uses[unit] = most if budget is not None else most._replace(share=math.inf)
    return uses


def largest_fitting(entries: Sequence[Charge], budget: float, delta: float) -> float:
    """The largest epsilon at ``delta`` of one more Gaussian release on all records that a site's budget admits.

    To about a thousandth of it; 0 if none fits. The filter decides, as it will, so that it may be more or less than the
    budget minus what was spent.
    """
    paths = _paths(entries, "record") if entries else {()}

    def fits(epsilon: float) -> bool:
        event = Gaussian(noise_multiplier=accounting.gaussian_noise(epsilon, delta))
        first = entries[0].cost if entries else event
        return all(accounting.admits([*path, event], first, budget, delta) for path in paths)

    low, high = 0.0, budget
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _paths(entries: Sequence[Charge], unit: Unit) -> set[tuple[Event, ...]]:
    """The costs of the releases that one record can influence, for each record; equal ones once."""
    numbers: dict[tuple[Event, ...], int] = {}  # of equal costs, which are many
    kinds = np.array([numbers.setdefault(tuple(_costs(entry, unit)), len(numbers)) for entry in entries])
    costs = list(numbers)
    different = {kinds[mask].tobytes() for mask in record_masks(entries)}
    return {tuple(chain(*(costs[kind] for kind in np.frombuffer(path, kinds.dtype)))) for path in different}


def _costs(entry: Charge, unit: Unit) -> list[Event]:
    """The costs of an entry for neighbours that differ by one ``unit``."""
    if unit == "record":  # a released label hides no record, whose image is public (policy)
        return [entry.cost] if entry.unit == "record" else []
    # noise multipliers are relative to the influence of a record, also in a release that protects labels
    return [entry.cost] if isinstance(entry.cost, Pure) and entry.unit == "label" else replaced(entry.cost)


def _read(number: int, line: Line) -> ChargeLine:
    value = json.loads(line.text)
    records = base64.b64decode(value["records"]) if "records" in value else None
    entry = Charge(**value["entry"], records=records, counts_alone=value.get("counts") == "alone")
    return ChargeLine(number, value["run"], entry, value.get("time"), line.mac.hex())
