"""A client's ledger: each release and its cost, recorded before the release and limited by a budget.

A ledger has a store, which reads and appends entries, and a rule, which refuses entries. `open_ledger` opens that of a
simulated client, `fedstill.sites.site.charges.open_site_ledger` that of a real site.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol, Self, final

import numpy as np
from jaxtyping import Bool
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from typing_extensions import override

from fedstill.base import files
from fedstill.base.errors import FedstillError
from fedstill.privacy import accounting
from fedstill.privacy.releases import Event, Unit, Words

if TYPE_CHECKING:  # `fedstill runs` imports no torch
    from torch import Tensor

UNCOUNTABLE = (ArithmeticError, MemoryError, ValueError)
"""Errors that `total_epsilon` may raise on releases that a client invented."""


class BudgetExceeded(FedstillError, ValueError):
    """The budget does not cover a release; nothing was released."""


class Charge(BaseModel):
    """One release: public facts only, such as the mechanism's parameters, never a value."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    exchange: NonNegativeInt
    """Number of the server's request, from 0."""
    step: Annotated[Words, Field(max_length=200)]
    """Name of the step."""
    index: NonNegativeInt
    """Number of the release within that step, from 0."""
    mechanism: Annotated[Words, Field(max_length=200)]
    """Name of the mechanism."""
    unit: Unit
    """Unit that the mechanism protects."""
    event: Event
    """Event that accountants compose."""
    theorem: Annotated[Words, Field(max_length=1000)]
    """Theorem that the cost rests on."""
    adaptive: bool = False
    """Whether the noise was chosen from earlier releases, so that only a filter can bound the sum."""
    adders: Annotated[int, Field(ge=1, le=10**7)] = 1
    """Honest clients whose noise the event counts on, in a sum of which nobody sees a single upload; else 1."""
    alone: Event | None = None
    """Then: the cost of this client's own noise, if everybody else works together."""
    part: Annotated[Words, Field(max_length=200)] | None = None
    """Disjoint part of the client's records that the release depends on; None for all records."""
    counts_alone: Annotated[bool, Field(exclude=True, repr=False)] = False
    """Whether the ledger of a real site counts ``alone`` in place of the event; it never leaves."""
    records: Annotated[bytes | None, Field(exclude=True, repr=False)] = None
    """Records of that part (`Part.records`), for a ledger that checks parts; it never leaves. None if unknown."""

    @property
    def cost(self) -> Event:
        """The event that the ledger of a real site counts."""
        return self.alone if self.counts_alone and self.alone is not None else self.event

    @model_serializer(mode="wrap")
    def _without_share(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The fields; without those of a shared noise where there is none, so that open uploads have no such bytes."""
        fields: dict[str, Any] = usual(self)
        return fields if self.adders > 1 else {k: v for k, v in fields.items() if k not in ("adders", "alone")}

    @model_validator(mode="after")
    def _labels_only(self) -> Self:
        # adding or removing a record may move others to another part; replacing a label moves none
        if self.part is not None and self.unit != "label":
            raise ValueError(
                f"part is '{self.part}', but {self.mechanism} protects the unit '{self.unit}'; parts are for "
                "mechanisms that protect labels"
            )
        return self


class Part(NamedTuple):
    """A part of a client's records that a method makes before it looks at any label.

    Attributes:
        name: public name; parts of different names must be disjoint.
        positions: distinct positions ``(k,)`` of its records among all.
    """

    name: str
    positions: "Tensor"

    def records(self, count: int, fingerprint: bytes) -> bytes:
        """The part in bytes: ``fingerprint`` of the ``count`` records, their number, and a bit for each record."""
        chosen = np.zeros(count, dtype=np.bool_)
        chosen[self.positions.cpu().numpy()] = True
        return fingerprint[:_PRINT] + count.to_bytes(_COUNT, "big") + np.packbits(chosen).tobytes()


_PRINT, _COUNT = 16, 8  # bytes of the fingerprint and of the number in `Part.records`


def data_of(records: bytes) -> bytes:
    """The data that a part is of: the fingerprint and the number of records with which `Part.records` begins."""
    return records[: _PRINT + _COUNT]


def by_record(entries: Sequence[Charge]) -> list[list[Charge]]:
    """Group releases by the records that are known to be in them: for each record, those that it can influence.

    Releases whose records are not known, or are records of other data, count for every record. Unlike `by_part`, this
    trusts no name.
    """
    return [list(compress(entries, mask)) for _, mask in record_masks(entries)]


def record_masks(entries: Sequence[Charge]) -> Iterator[tuple[bytes | None, Bool[np.ndarray, " n"]]]:
    """For each record, whether it can influence each of the ``n`` releases, as in `by_record`; equal masks once.

    With each mask come the data of its records (`data_of`); None where no release has parts.
    """
    if all(entry.records is None for entry in entries):
        yield None, np.ones(len(entries), dtype=np.bool_)
    for data in {data_of(e.records) for e in entries if e.records is not None}:
        known = [i for i, e in enumerate(entries) if e.records is not None and e.records.startswith(data)]
        rows: dict[bytes, int] = {}  # equal parts once, as there may be thousands
        places = np.array([rows.setdefault(entries[i].records or b"", len(rows)) for i in known])
        packed = [np.frombuffer(records, np.uint8)[len(data) :] for records in rows]
        bits = np.unpackbits(np.stack(packed), axis=1, count=int.from_bytes(data[_PRINT:], "big"))
        for column in np.unique(bits, axis=1).T:
            mask = np.ones(len(entries), dtype=np.bool_)
            mask[known] = column[places]
            yield data, mask


def by_part(entries: Sequence[Charge]) -> list[list[Charge]]:
    """Group releases by part: for each part, the releases that one of its labels can influence (its own and no part's).

    Neighbours differ by one label, which lies in one part, and all other releases have the same distribution given
    what was released before. So the costliest group is the cost of all ``entries`` together (parallel composition:
    McSherry 2009, theorem 4; where later mechanisms depend on earlier releases: Ghazi et al. 2021, arXiv:2102.06062,
    section 4 on LP-MST).
    """
    parts = dict.fromkeys(e.part for e in entries if e.part is not None)
    return [[e for e in entries if e.part in (None, part)] for part in parts] or [list(entries)]


Split = Callable[[Sequence[Charge]], list[list[Charge]]]
"""`by_part`, or `by_record` where names of parts can't be trusted."""


def total_epsilon(entries: Sequence[Charge], delta: float, budget: float | None, split: Split = by_part) -> float:
    """The epsilon at ``delta`` of one client's releases, all of one unit; infinite if they are unbounded.

    If noise was chosen adaptively, it is the epsilon of the Renyi filter of ``budget``, infinite without a budget.
    """
    groups = [[e.event for e in group] for group in split(entries)]
    if any(e.adaptive for e in entries):
        if budget is None:
            return math.inf
        return max(map(accounting.rdp_filter(budget, delta, entries[0].event).epsilon, groups))
    unit = entries[0].unit if entries else "record"
    return max(accounting.epsilon(events, delta, unit) for events in groups)


def covers(
    entries: Sequence[Charge], entry: Charge, budget: float | None, delta: float, split: Split = by_part
) -> bool:
    """Whether the epsilon of a client's releases ``entries`` and ``entry``, of one unit, stays within ``budget``.

    Ledgers charge by this function, and servers ask only clients for which it is true.

    Args:
        entries: the client's releases so far.
        entry: the next release.
        budget: largest epsilon of each unit; None for no limit.
        delta: the delta of the budget.
        split: rule that groups releases on parts of the records.

    Raises:
        ValueError: the noise of ``entry`` is chosen adaptively and there is no budget, which a filter needs.
    """
    if budget is None:
        refuse_unbudgeted(entry)
        return True
    try:
        return total_epsilon(_of_unit(entries, entry), delta, budget, split) <= budget
    except UNCOUNTABLE:  # a client may list any releases; they must not end the server's run
        return False


def check_budget(
    entries: Sequence[Charge], entry: Charge, budget: float | None, delta: float, split: Split = by_part
) -> None:
    """Raise `BudgetExceeded` unless the budget `covers` ``entry`` after ``entries``."""
    if covers(entries, entry, budget, delta, split):
        return
    same = _of_unit(entries, entry)
    try:
        total = math.inf if any(e.adaptive for e in same) else total_epsilon(same, delta, budget, split)
    except UNCOUNTABLE:
        total = math.inf
    sum_words = "" if math.isinf(total) else f"; it would come to {total:.4g}"
    remedy = "raise --budget or noise"
    if any((e.exchange, e.index) == (entry.exchange, entry.index) for e in entries):
        remedy = (
            "an interrupted start released for this request already, and new noise is a release more; --min-clients "
            "goes on without this client, or start anew in another folder with a larger --budget"
        )
    raise BudgetExceeded(
        f"releasing {entry.mechanism} in step '{entry.step}' would take the epsilon per {entry.unit} above the "
        f"budget of {budget:g} at delta {delta:g}{sum_words}; nothing was released ({remedy})"
    )


def _of_unit(entries: Sequence[Charge], entry: Charge) -> list[Charge]:
    return [*(e for e in entries if e.unit == entry.unit), entry]


def refuse_unbudgeted(entry: Charge) -> None:
    """Raise ValueError for an adaptive release, which a ledger without a budget can't allow."""
    if entry.adaptive:
        raise ValueError(
            f"{entry.mechanism} chooses its noise from earlier releases, which only a filter bounds; that needs a "
            "--budget, as --budget 2"
        )


class Store(Protocol):
    """Storage of a ledger's entries on disk."""

    def lock(self) -> AbstractContextManager[Any]:
        """Prevent other processes from charging inside the block."""

    def read(self) -> list[Charge]:
        """All entries, in order."""

    def append(self, entry: Charge) -> None:
        """Write one more entry."""

    @property
    def size(self) -> int:
        """Number of entries of all writers, as last read."""


Rule = Callable[[Sequence[Charge], Charge], None]
"""``rule(entries, entry)`` raises `BudgetExceeded` if ``entry`` must not follow ``entries``."""


@final
class Ledger:
    """The releases of one client.

    Args:
        store: storage of the entries.
        rule: check of each new entry.
        repeatable: whether noise is simulated: a step that is run again then makes the same release again, which costs
            nothing. Real noise is new each time and is charged each time.
    """

    def __init__(self, store: Store, rule: Rule, *, repeatable: bool = False) -> None:
        self._store = store
        self.rule = rule
        self._repeatable = repeatable
        self.entries = store.read()

    def charge(self, entry: Charge, records: bytes | None = None) -> None:
        """Record ``entry`` and the ``records`` of its part (`Part.records`); call this before the release.

        Raises:
            BudgetExceeded: the rule refuses the entry; nothing is charged.
            ValueError: its noise is chosen adaptively and there is no budget, which a filter needs.
        """
        while True:
            self.entries, size = self._store.read(), self._store.size  # other processes may have charged
            if self._repeatable and entry in self.entries:
                return
            charged = entry.model_copy(update={"records": None if self._repeatable else records})
            self.rule(self.entries, charged)  # without the lock: it may take long, and others must charge meanwhile
            with self._store.lock():
                self.entries = self._store.read()
                if self._store.size == size:
                    self._store.append(charged)
                    self.entries.append(charged)
                    return

    def of_exchange(self, exchange: int) -> list[dict[str, Any]]:
        """The releases for one request, as its reply lists them."""
        return [e.model_dump(mode="json") for e in self.entries if e.exchange == exchange]


class FileStore(Store):
    """A file with one JSON line per entry and a single writer; raises `Damaged` if a line is no entry."""

    def __init__(self, place: Path) -> None:
        self._place = place
        try:
            self._entries = [Charge(**line) for line in files.read_json_lines(place)]
        except (ValidationError, TypeError) as error:
            # a ledger that can't be read must not count as empty
            raise files.Damaged(f"{place} is damaged; nothing more is released from here") from error

    @override
    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def read(self) -> list[Charge]:
        return list(self._entries)

    @override
    def append(self, entry: Charge) -> None:
        self._place.parent.mkdir(parents=True, exist_ok=True)
        files.append_json(self._place, entry.model_dump(mode="json"))
        self._entries.append(entry)

    @property
    @override
    def size(self) -> int:
        return len(self._entries)


def open_ledger(place: Path, *, delta: float, budget: float | None = None, repeatable: bool = False) -> Ledger:
    """The ledger of one simulated client in one run, in the file ``place``; arguments as in `covers` and `Ledger`."""
    return Ledger(FileStore(place), partial(check_budget, budget=budget, delta=delta), repeatable=repeatable)
