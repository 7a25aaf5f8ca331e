"""A client's ledger: what it released, at what cost, and whether one more release fits its budget."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from fedstill import files
from fedstill.privacy import accounting
from fedstill.privacy.events import Event, Unbounded, Unit, Words


class BudgetExceeded(ValueError):
    """A release that the budget does not cover; nothing was released."""


class Entry(BaseModel):
    """One release. It holds public facts only: the mechanism's parameters, never a value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    exchange: NonNegativeInt
    """The server's question, counted from 0."""
    step: Annotated[Words, Field(max_length=200)]
    """The step that released."""
    index: NonNegativeInt
    """The release's number within that step, from 0."""
    mechanism: Annotated[Words, Field(max_length=200)]
    """The mechanism's name."""
    unit: Unit
    """What it protects."""
    event: Event
    """What it costs."""
    theorem: Annotated[Words, Field(max_length=1000)]
    """Why it costs that."""
    adaptive: bool = False
    """Whether its noise was chosen from earlier releases, so that a filter has to watch over the sum."""
    part: Annotated[Words, Field(max_length=200)] | None = None
    """Which of several disjoint parts of the client's records it was made from; None for any of them."""

    @model_validator(mode="after")
    def _labels_only(self) -> Self:
        # a record that comes or goes may move others into another part; a label that is replaced moves none
        if self.part is not None and self.unit != "label":
            raise ValueError(
                f"part is '{self.part}', but {self.mechanism} protects the unit '{self.unit}'; parts are for "
                "mechanisms that protect labels"
            )
        return self


def touching(entries: Sequence[Entry]) -> list[list[Entry]]:
    """For each part the releases that a label of that part enters: those of this part and those of no part.

    Neighbours differ by one label, which lies in one part, and all other releases have the same distribution given
    what was released before. So the costliest of these lists is what all ``entries`` cost together (parallel
    composition: McSherry 2009, theorem 4; where later mechanisms depend on earlier releases: Ghazi et al. 2021,
    arXiv:2102.06062, section 4 on LP-MST).
    """
    parts = dict.fromkeys(e.part for e in entries if e.part is not None)
    return [[e for e in entries if e.part in (None, part)] for part in parts] or [list(entries)]


def check_budget(entries: Sequence[Entry], entry: Entry, budget: float, delta: float) -> None:
    """Raise `BudgetExceeded` if ``entry`` after ``entries`` would take the epsilon of its unit above ``budget``."""
    same = [*(e for e in entries if e.unit == entry.unit), entry]
    paths = [[e.event for e in path] for path in touching(same)]
    adaptive = any(e.adaptive for e in same)
    if not all(accounting.fits(events, budget, delta, entry.unit, adaptive=adaptive) for events in paths):
        total = math.inf if adaptive else max(accounting.epsilon(p, delta, entry.unit) for p in paths)
        what = "" if math.isinf(total) else f"; it would come to {total:.4g}"
        raise BudgetExceeded(
            f"releasing {entry.mechanism} in step '{entry.step}' would take the epsilon per {entry.unit} above the "
            f"budget of {budget:g} at delta {delta:g}{what}; nothing was released (raise --budget or noise)"
        )


class Ledger:
    """The releases of one client, kept on disk before anything is released.

    Args:
        place: a file of one JSON line per release.
        delta: the delta that the budget is stated at, in (0, 1).
        budget: the largest epsilon (of each unit) that all releases may cost together; None for no limit.
        repeatable: whether noise is that of a simulation: a step that is run again then makes the same release again,
            which costs nothing new. Real noise is new each time and is charged each time.
    """

    def __init__(self, place: Path, *, delta: float, budget: float | None = None, repeatable: bool = False) -> None:
        self._place = place
        self._delta = delta
        self._budget = budget
        self._repeatable = repeatable
        self.entries = self._read()

    def charge(self, entry: Entry) -> None:
        """Write ``entry`` down; call this before the release is made.

        Raises:
            BudgetExceeded: when the budget does not cover it; nothing is charged then.
            ValueError: when its noise is chosen adaptively and there is no budget that a filter could keep.
        """
        if self._repeatable and entry in self.entries:
            return
        if entry.adaptive and self._budget is None:
            raise ValueError(f"{entry.mechanism} chooses its noise from earlier releases; that needs a --budget")
        if self._budget is not None:
            self._check(entry, self._budget)
        self._write(entry)
        self.entries.append(entry)

    def _read(self) -> list[Entry]:
        try:
            return [Entry(**line) for line in files.read_json_lines(self._place)]
        except (ValidationError, TypeError) as error:
            # a ledger that can't be read must not be taken for an empty one
            raise files.Damaged(f"{self._place} is damaged; nothing more is released from here") from error

    def _write(self, entry: Entry) -> None:
        self._place.parent.mkdir(parents=True, exist_ok=True)
        files.append_json(self._place, entry.model_dump(mode="json"))

    def _check(self, entry: Entry, budget: float) -> None:
        check_budget(self.entries, entry, budget, self._delta)

    def of_exchange(self, exchange: int) -> list[dict[str, Any]]:
        """The releases made for one question, as they go into its reply."""
        return [e.model_dump(mode="json") for e in self.entries if e.exchange == exchange]


def is_unbounded(entry: Entry) -> bool:
    """Whether no epsilon bounds the release."""
    return isinstance(entry.event, Unbounded)
