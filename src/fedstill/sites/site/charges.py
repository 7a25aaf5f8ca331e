"""The ledger of a real site: it outlasts runs and restarts, and a lost or changed one stops all releases.

It is a view of the site's journal (`fedstill.sites.site.site_journal`), whose lines ``charged`` are its entries; its
rule composes the releases of all runs. `open_site_ledger` opens it for a run.
"""

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.privacy import accounting
from fedstill.privacy.accounting import for_replaced_labels as replaced
from fedstill.privacy.accounting import shares
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
from fedstill.sites.site.checkpoint import ChargeLine, Past, Standing
from fedstill.sites.site.site_journal import SiteJournal, charges_among


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


FactsOf = Callable[[Charge, "SiteStore"], Mapping[str, Any]]
"""Facts for the line of a charge, given the release and the store before it."""


def open_site_ledger(state: Path, run: str, limits: Limits, facts_of: FactsOf = lambda *_: {}) -> Ledger:
    """The ledger of a site for one of its runs; its ``entries`` are those of this run.

    Its `charge` raises `Damaged` if the journal was changed, and TimeoutError if another process locks it for a minute.

    Args:
        state: the folder given to `site_journal.create`.
        run: the run's unique name.
        limits: what is allowed.
        facts_of: more facts for the line of each charge, which is on disk before the release happens.

    Raises:
        Damaged: the journal was changed.
    """
    store = SiteStore(state, run, facts_of, alone=limits.alone)
    return Ledger(store, partial(_check, store=store, limits=limits))


class SiteStore:
    """The releases of one site in all its runs; each is on disk before it happens.

    An older copy that replaces the journal while this object exists is noticed; between two openings, the receipts tell
    (`fedstill.sites.site.site_journal.check_receipt`).

    Args:
        state: the folder given to `site_journal.create`.
        run: the run whose entries `read` returns and `append` writes.
        facts_of: more facts for the line of each charge.
        alone: whether `append` marks shares of a masked sum's noise as counting by themselves.
    """

    def __init__(self, state: Path, run: str, facts_of: FactsOf = lambda *_: {}, *, alone: bool = True) -> None:
        self._journal, self.run, self._facts_of, self._alone = SiteJournal(state), run, facts_of, alone
        self._size = 0
        self.first: Event | None = None
        """The cost of the first release of all runs, as last read."""
        self.past = Past()
        """The composed costs of the releases before `recent`, as last read."""
        self.recent: list[Charge] = []
        """The releases of all runs after the last checkpoint, as last read."""
        self.own: list[Charge] = []
        """The releases of the run, as last read."""

    def lock(self) -> AbstractContextManager[Any]:
        """A lock against charges by other processes."""
        return self._journal.lock

    @property
    def size(self) -> int:
        """Number of entries of all runs, as last read."""
        return self._size

    def read(self) -> list[Charge]:
        """The run's entries, after a check of every line since the last checkpoint, and of every file with one.

        Raises:
            Damaged: the journal was changed, or a newer fedstill wrote it.
        """
        standing = self._journal.standing()
        self._size, self.first, self.past = standing.at.charges, standing.at.first, standing.at.past
        self.recent = [charge.entry for charge in standing.recent]
        self.own = [charge.entry for charge in self._journal.charges_of(self.run)]
        return list(self.own)

    def append(self, entry: Charge) -> None:
        """Write one more entry of the run, and flush it to disk."""
        entry = marked(entry, alone=self._alone)
        facts: dict[str, Any] = {"run": self.run, "charge": self._size + 1, "entry": entry.model_dump(mode="json")}
        if entry.records is not None:
            facts["records"] = base64.b64encode(entry.records).decode()
        if entry.counts_alone:
            facts["counts"] = "alone"
        more = {"detail": f"{entry.mechanism} ({entry.unit})", **self._facts_of(entry, self)}
        self._journal.append({"time": now(), "what": "charged", **more, **facts})


def marked(entry: Charge, *, alone: bool) -> Charge:
    """The entry; if it is a share of a masked sum's noise, with the mark whether it counts by itself."""
    return entry if entry.alone is None else entry.model_copy(update={"counts_alone": alone})


def read_charges(state: Path) -> list[ChargeLine]:
    """All releases of a site in order, after a check of every line on disk.

    Raises:
        Damaged: the journal was changed, or a newer fedstill wrote it.
    """
    return charges_among(SiteJournal(state).read(), state)


def costs_of(charge: Charge, store: SiteStore, limits: Limits) -> dict[str, Any]:
    """What a charge costs, by itself, with the earlier ones of its run, and with those of all runs, as JSON."""
    charge, delta = marked(charge, alone=limits.alone), limits.delta
    own = standing([*store.own, charge], None, limits.budget_per_run or limits.budget, delta)
    every = standing([*store.recent, charge], store.first, limits.budget, delta, store.past)
    alone = shares(standing([charge], None, limits.budget, delta))[charge.unit]
    return {
        "unit": charge.unit,
        "epsilon": alone["epsilon"],
        "run_total": shares(own),
        "total": shares(every),
        "budget": limits.budget,
    }


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
        what = f"the site's budget of {limits.budget:g} at delta {limits.delta:g}, including earlier runs"
        every, first = [*store.recent, entry], store.first or entry.cost
        _check_all(every, first, limits.budget, limits.delta, f"{what}; nothing was released", entry, store.past)
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


def _check_all(
    entries: Sequence[Charge],
    first: Event,
    budget: float,
    delta: float,
    limit: str,
    entry: Charge,
    past: Past | None = None,
) -> None:
    """Raise `BudgetExceeded` unless filters admit ``past`` and ``entries``, of which ``entry`` is the new one."""
    units: set[Unit] = {e.unit for e in entries} | _units(past)
    for unit in units & {entry.unit, "label"}:
        for costs in _paths(entries, unit, past):
            if not accounting.admits(costs, first, budget, delta):
                raise BudgetExceeded(
                    f"releasing {entry.mechanism} in step '{entry.step}' would take the epsilon per {unit} above "
                    f"{limit} (raise the site's budget or the noise)"
                )


def standing(
    entries: Sequence[Charge], first: Event | None, budget: float | None, delta: float, past: Past | None = None
) -> dict[Unit, accounting.Use]:
    """The part of a budget that releases use up, for each unit that they protect.

    Args:
        entries: the releases of one run, or of all.
        first: the first release of all runs, or of this run for a budget of a run; None for the first of ``entries``.
        budget: the site's budget; None for no budget, of which every share is infinite, and the epsilon the smallest
            of those by filters for some budgets.
        delta: the budget's delta.
        past: composed costs of earlier releases; None for none.
    """
    uses: dict[Unit, accounting.Use] = {}
    for unit in dict.fromkeys([*_units(past), *(e.unit for e in entries)]):
        start = first or entries[0].cost
        paths = _paths(entries, unit, past)
        if budget is not None:
            uses[unit] = max((accounting.used(costs, start, budget, delta) for costs in paths), key=lambda u: u.share)
        else:
            of_paths = (min(accounting.used(costs, start, some, delta).epsilon for some in _SOME) for costs in paths)
            uses[unit] = accounting.Use(max(of_paths), math.inf)
    return uses


_SOME = tuple(2.0**power for power in range(-4, 11))
"""Budgets whose filters are tried where a site has none: each filter has one order, and its bound holds anyway."""


def _units(past: Past | None) -> set[Unit]:
    if past is None:
        return set()
    found: dict[Unit, bool] = {"record": bool(past.records), "label": bool(past.labels or past.parts)}
    return {unit for unit, there in found.items() if there}


def uses_of(found: Standing, budget: float | None, delta: float) -> dict[Unit, accounting.Use]:
    """The part of a site's budget that the releases of all runs use up, as the filter will count them at the next."""
    return standing([charge.entry for charge in found.recent], found.at.first, budget, delta, found.at.past)


def largest_fitting(found: Standing, budget: float, delta: float) -> float:
    """The largest epsilon at ``delta`` of one more Gaussian release on all records that a site's budget admits.

    To about a thousandth of it; 0 if none fits. The filter decides, as it will, so that it may be more or less than the
    budget minus what was spent.
    """
    entries, past = [charge.entry for charge in found.recent], found.at.past
    paths = {unit: _paths(entries, unit, past) for unit in _units(past) | {entry.unit for entry in entries}}
    paths.setdefault("record", [Counter[Event]()])

    def fits(epsilon: float) -> bool:
        event = Gaussian(noise_multiplier=accounting.gaussian_noise(epsilon, delta))
        more: dict[Unit, Counter[Event]] = {"record": Counter([event]), "label": _for_labels({("record", event): 1})}
        first = found.at.first or event
        return all(accounting.admits(path + more[unit], first, budget, delta) for unit in paths for path in paths[unit])

    low, high = 0.0, budget
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _paths(entries: Sequence[Charge], unit: Unit, past: Past | None = None) -> list[Counter[Event]]:
    """The costs of the releases that one record can influence, for each record; equal ones once."""
    past = past or Past()
    if unit == "record":  # a released label hides no record, whose image is public (policy)
        return [past.records + Counter(entry.cost for entry in entries if entry.unit == "record")]
    always, masks = np.ones(len(entries), dtype=np.bool_), list(record_masks(entries))
    known = {data for data, _ in masks}
    masks += [(data, always) for data in map(bytes.fromhex, past.parts) if data not in known]
    if past.parts:  # where there are data with parts, each record is of some
        masks = [(data, mask) for data, mask in masks if data is not None]
    numbers: dict[tuple[Unit, Event], int] = {}  # of equal costs, which are many
    kinds = np.array([numbers.setdefault((entry.unit, entry.cost), len(numbers)) for entry in entries], dtype=np.int64)
    counts = {(data, np.bincount(kinds[mask], minlength=len(numbers)).tobytes()) for data, mask in masks}
    found = []
    for data, raw in counts:
        costs = _for_labels({("record", event): times for event, times in past.records.items()})
        costs += _for_labels({("label", event): times for event, times in past.of_labels(data).items()})
        times = np.frombuffer(raw, np.int64).tolist()
        found.append(costs + _for_labels(dict(zip(numbers, times, strict=True))))
    return found


def _for_labels(costs: Mapping[tuple[Unit, Event], int]) -> Counter[Event]:
    """The costs, where one record's label is replaced, of releases that protect a unit at costs, so many times each."""
    found = Counter[Event]()
    for (unit, event), times in costs.items():
        # noise multipliers are relative to the influence of a record, also in a release that protects labels
        for each in [event] if unit == "label" and isinstance(event, Pure) else replaced(event):
            found[each] += times
    return +found
