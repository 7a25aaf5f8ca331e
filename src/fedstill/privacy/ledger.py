"""A client's ledger: each release with its cost, written down before the release is made and within a budget.

A ledger is a store, where entries are read and appended, and a rule, which refuses entries. A simulated client's is
made by `open_ledger`, a real site's by `fedstill.sites.ledger.open_ledger`.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from fedstill import files
from fedstill.privacy import accounting
from fedstill.privacy.events import Event, Unit, Words

UNCOUNTABLE = (ArithmeticError, MemoryError, ValueError)
"""Errors of `total_epsilon` on releases that a client made up."""


class BudgetExceeded(ValueError):
    """A release that the budget does not cover; nothing was released."""


class Entry(BaseModel):
    """One release. It holds public facts only: the mechanism's parameters, never a value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    exchange: NonNegativeInt
    """The number of the server's request, from 0."""
    step: Annotated[Words, Field(max_length=200)]
    """The step that released."""
    index: NonNegativeInt
    """The release's number within that step, from 0."""
    mechanism: Annotated[Words, Field(max_length=200)]
    """The mechanism's name."""
    unit: Unit
    """The unit that it protects."""
    event: Event
    """The event that accountants compose."""
    theorem: Annotated[Words, Field(max_length=1000)]
    """The theorem that the cost rests on."""
    adaptive: bool = False
    """Whether its noise was chosen from earlier releases, so that a filter has to bound the sum."""
    part: Annotated[Words, Field(max_length=200)] | None = None
    """The disjoint part of the client's records that it was made from; None for any of them."""

    @model_validator(mode="after")
    def _labels_only(self) -> Self:
        # a record that comes or goes may move others into another part; a label that is replaced moves none
        if self.part is not None and self.unit != "label":
            raise ValueError(
                f"part is '{self.part}', but {self.mechanism} protects the unit '{self.unit}'; parts are for "
                "mechanisms that protect labels"
            )
        return self


def by_part(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Group releases by part: for each part, the releases that one of its labels can influence (its own and no part's).

    Neighbours differ by one label, which lies in one part, and all other releases have the same distribution given
    what was released before. So the costliest group is the cost of all ``entries`` together (parallel composition:
    McSherry 2009, theorem 4; where later mechanisms depend on earlier releases: Ghazi et al. 2021, arXiv:2102.06062,
    section 4 on LP-MST).
    """
    parts = dict.fromkeys(e.part for e in entries if e.part is not None)
    return [[e for e in entries if e.part in (None, part)] for part in parts] or [list(entries)]


def total_epsilon(entries: Sequence[Entry], delta: float, budget: float | None) -> float:
    """The epsilon at ``delta`` of one client's releases, all of one unit; infinite where none bounds them.

    Where noise was chosen adaptively it is the epsilon of the Renyi filter of ``budget``, infinite without a budget.
    """
    groups = [[e.event for e in group] for group in by_part(entries)]
    if any(e.adaptive for e in entries):
        return math.inf if budget is None else max(map(accounting.rdp_filter(budget, delta).epsilon, groups))
    unit = entries[0].unit if entries else "record"
    return max(accounting.epsilon(events, delta, unit) for events in groups)


def covers(entries: Sequence[Entry], entry: Entry, budget: float | None, delta: float) -> bool:
    """Whether ``budget`` covers ``entry`` after ``entries``: the epsilon of all releases of its unit stays within it.

    The one answer to that question: a ledger charges by it, and a server asks only clients for whom it is true.

    Args:
        entries: the client's releases so far.
        entry: the next release.
        budget: the largest epsilon of each unit; None for no limit.
        delta: where the budget is stated.

    Raises:
        ValueError: the noise of ``entry`` is chosen adaptively, and no budget is given that a filter could keep.
    """
    if budget is None:
        refuse_unbudgeted(entry)
        return True
    try:
        return total_epsilon(_of_unit(entries, entry), delta, budget) <= budget
    except UNCOUNTABLE:  # a client may list any releases to a server, whose run they must not end
        return False


def check_budget(entries: Sequence[Entry], entry: Entry, budget: float | None, delta: float) -> None:
    """Raise `BudgetExceeded` unless the budget `covers` ``entry`` after ``entries``."""
    if covers(entries, entry, budget, delta):
        return
    same = _of_unit(entries, entry)
    total = math.inf if any(e.adaptive for e in same) else total_epsilon(same, delta, budget)
    what = "" if math.isinf(total) else f"; it would come to {total:.4g}"
    raise BudgetExceeded(
        f"releasing {entry.mechanism} in step '{entry.step}' would take the epsilon per {entry.unit} above the "
        f"budget of {budget:g} at delta {delta:g}{what}; nothing was released (raise --budget or noise)"
    )


def _of_unit(entries: Sequence[Entry], entry: Entry) -> list[Entry]:
    return [*(e for e in entries if e.unit == entry.unit), entry]


def refuse_unbudgeted(entry: Entry) -> None:
    """Raise ValueError for an adaptive release; for ledgers without a budget."""
    if entry.adaptive:
        raise ValueError(
            f"{entry.mechanism} chooses its noise from earlier releases, which only a filter bounds; that needs a "
            "--budget, as --budget 2"
        )


class Store(Protocol):
    """Storage of a ledger's entries, on a disk."""

    def lock(self) -> AbstractContextManager[Any]:
        """Keep other processes from charging meanwhile."""

    def read(self) -> list[Entry]:
        """All entries, in order."""

    def append(self, entry: Entry) -> None:
        """Write one more."""


Rule = Callable[[Sequence[Entry], Entry], None]
"""``rule(entries, entry)`` raises `BudgetExceeded` where ``entry`` must not follow ``entries``."""


@final
class Ledger:
    """The releases of one client.

    Args:
        store: keeps the entries.
        rule: refuses entries.
        repeatable: whether noise is that of a simulation: a step that is run again then makes the same release again,
            which costs nothing new. Real noise is new each time and is charged each time.
    """

    def __init__(self, store: Store, rule: Rule, *, repeatable: bool = False) -> None:
        self._store = store
        self._rule = rule
        self._repeatable = repeatable
        self.entries = store.read()

    def charge(self, entry: Entry) -> None:
        """Write ``entry`` down; call this before the release is made.

        Raises:
            BudgetExceeded: when the rule refuses it; nothing is charged then.
            ValueError: when its noise is chosen adaptively and there is no budget that a filter could keep.
        """
        with self._store.lock():
            self.entries = self._store.read()  # other processes may have charged
            if self._repeatable and entry in self.entries:
                return
            self._rule(self.entries, entry)
            self._store.append(entry)
            self.entries.append(entry)

    def of_exchange(self, exchange: int) -> list[dict[str, Any]]:
        """The releases made for one request, as they go into its reply."""
        return [e.model_dump(mode="json") for e in self.entries if e.exchange == exchange]


class FileStore:
    """A file of one JSON line per entry, which one process at a time writes.

    Raises:
        Damaged: when a line is no entry.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        try:
            self._entries = [Entry(**line) for line in files.read_json_lines(place)]
        except (ValidationError, TypeError) as error:
            # a ledger that can't be read must not be taken for an empty one
            raise files.Damaged(f"{place} is damaged; nothing more is released from here") from error

    def lock(self) -> AbstractContextManager[None]:
        """No lock: nobody else writes."""
        return nullcontext()

    def read(self) -> list[Entry]:
        """All entries, in order."""
        return list(self._entries)

    def append(self, entry: Entry) -> None:
        """Write one more."""
        self._place.parent.mkdir(parents=True, exist_ok=True)
        files.append_json(self._place, entry.model_dump(mode="json"))
        self._entries.append(entry)


def open_ledger(place: Path, *, delta: float, budget: float | None = None, repeatable: bool = False) -> Ledger:
    """The ledger of one client in one run.

    Args:
        place: a file of one JSON line per release.
        delta: the delta that the budget is stated at, in (0, 1).
        budget: the largest epsilon (of each unit) that all releases may cost together; None for no limit.
        repeatable: see `Ledger`.
    """
    return Ledger(FileStore(place), partial(check_budget, budget=budget, delta=delta), repeatable=repeatable)
