"""A checkpoint of a site's journal: all that earlier lines mean for what comes next, in a size that has a bound.

`Checkpoint` counts questions, failures, runs and refusals. `Past` has the costs of releases, composed: by `compact`,
each privacy filter adds up for them at least what it adds up for the releases one by one.
"""

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from itertools import compress
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
)

from fedstill.privacy.ledger import Charge, data_of, record_masks
from fedstill.privacy.releases import Event, Gaussian, Pure

DAY = 86_400.0
FORGET = 30 * DAY
"""Seconds without a question after which a checkpoint forgets the counts of a run."""
MOST_KINDS = 256
"""Largest number of kinds of noise in composed costs, beside that of whole Gaussian releases."""
MOST_DATA = 64
"""Largest number of data sets whose parts are told apart; a server makes another of a table by another order of its
columns."""
LEAST_PURE = 1e-6
"""Epsilon that a smaller one of a pure mechanism counts as, where kinds are merged."""
OUTCOMES = ("answered", "refused", "failed", "waiting")
"""Possible outcomes of a question."""
_REFUSALS = ("refused", "failed", "waiting")
_event: TypeAdapter[Event] = TypeAdapter(Event)


def _read_costs(pairs: Any) -> Counter[Event]:
    if isinstance(pairs, Counter):
        return pairs
    found = Counter[Event]()
    for facts, times in pairs:
        if facts.get("kind") == "gaussian":  # unchecked, as a sum may exceed the noise of one release
            found[Gaussian.model_construct(**facts)] += int(times)
        else:
            found[_event.validate_python(facts)] += int(times)
    return found


def _write_costs(costs: Counter[Event]) -> list[Any]:
    return [[event.model_dump(mode="json"), times] for event, times in costs.items()]


Costs = Annotated[Counter[Event], PlainValidator(_read_costs), PlainSerializer(_write_costs)]
"""Costs of releases, and how many have each."""


def compact(costs: Mapping[Event, int]) -> Counter[Event]:
    """The same costs in few kinds, for which every filter of `fedstill.privacy.accounting` adds up no less.

    Gaussian releases on all records become one of their precision, ``sum count / noise^2``, which both the Gaussian and
    the Renyi filter add up. Of noise on samples, each step counts by itself, so that the numbers of steps make no
    kinds. Its kinds and those of pure mechanisms are kept as they are up to `MOST_KINDS`; then they are rounded to the
    safe side, to three digits, to two, to one, until they are no more than that. If that does not help, samples count
    as all records, which dominates them.
    """
    found, precision = Counter[Event](), 0.0
    for event, times in costs.items():
        if not isinstance(event, Gaussian):
            found[event] += times
        elif event.sampling == 1:
            precision += times * event.count / event.noise_multiplier**2
        else:
            found[_gaussian(event.noise_multiplier, event.sampling)] += times * event.count
    for digits in (3, 2, 1, 0):
        if len(found) <= MOST_KINDS:
            break
        rounded = Counter[Event]()
        for event, times in found.items():
            if isinstance(event, Gaussian) and not digits:
                precision += times / event.noise_multiplier**2
            else:
                rounded[_rounded(event, max(digits, 1))] += times
        found = rounded
    if precision:
        # a little less noise than the exact one, for the rounding of the sum; a root is the same on every machine
        found[_gaussian((1 - 1e-12) / math.sqrt(precision), 1.0)] += 1
    return found


def _rounded(event: Event, digits: int) -> Event:
    if isinstance(event, Gaussian):
        noise, sampling = _digits(event.noise_multiplier, digits, up=False), _digits(event.sampling, digits, up=True)
        return _gaussian(noise, min(1.0, sampling))
    if isinstance(event, Pure):
        return Pure(epsilon=max(LEAST_PURE, _digits(event.epsilon, digits, up=True)))
    return event


def _gaussian(noise: float, sampling: float) -> Gaussian:
    return Gaussian.model_construct(kind="gaussian", noise_multiplier=noise, sampling=sampling, count=1)


def _digits(value: float, digits: int, *, up: bool) -> float:
    """A positive number rounded to some significant digits; without logarithms, whose last bits differ by machine."""
    exact = Decimal(value)
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return float(exact.quantize(step, ROUND_CEILING if up else ROUND_FLOOR))


class Parts(BaseModel):
    """Costs of releases on parts of the records of one data set; label privacy only.

    Attributes:
        most: at least the costs of each record: of each file of lines, the most that one of its records has.
        whole: the costs of all of them, which count for a record of other data.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)
    most: Costs = Counter()
    whole: Costs = Counter()


class Past(BaseModel):
    """The costs of all releases before a checkpoint, composed.

    Attributes:
        records: of releases that protect records.
        labels: of releases that protect labels, on all records, or on parts of data that were used long ago.
        parts: of releases that protect labels, on parts, by the fingerprint of the data in hexadecimal; the last of
            `MOST_DATA` data sets that were used.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)
    records: Costs = Counter()
    labels: Costs = Counter()
    parts: dict[str, Parts] = {}

    def after(self, entries: Sequence[Charge]) -> "Past":
        """The past with more releases."""
        records = Counter(entry.cost for entry in entries if entry.unit == "record")
        whole = [entry for entry in entries if entry.unit == "label" and entry.records is None]
        labels = self.labels + Counter(entry.cost for entry in whole)
        of_parts = [entry for entry in entries if entry.unit == "label" and entry.records is not None]
        parts = dict(self.parts)
        for data in dict.fromkeys(data_of(entry.records or b"") for entry in of_parts):
            own = [entry for entry in of_parts if data_of(entry.records or b"") == data]
            before, most = parts.pop(data.hex(), Parts()), Counter[Event]()
            for _, mask in record_masks(own):
                most |= Counter(entry.cost for entry in compress(own, mask))
            every = before.whole + Counter(entry.cost for entry in own)
            parts[data.hex()] = Parts(most=compact(before.most + most), whole=compact(every))
        for name in [*parts][:-MOST_DATA]:
            labels += parts.pop(name).whole
        return Past(records=compact(self.records + records), labels=compact(labels), parts=parts)

    def of_labels(self, data: bytes | None) -> Counter[Event]:
        """The costs, of releases that protect labels, for a record of ``data`` (`ledger.data_of`), or of no part."""
        total, name = Counter(self.labels), None if data is None else data.hex()
        for each, own in self.parts.items():
            total.update(own.most if each == name else own.whole)
        return total


class RunCounts(BaseModel):
    """Counts of a run at the site.

    Attributes:
        first: number of its first line.
        begun: time of its first question, in seconds since 1970; None for releases of another program.
        last: time of its last question.
        accepted: questions that were accepted.
        ended: those of them that neither failed nor went beyond the budget.
    """

    first: int
    begun: float | None = None
    last: float = 0.0
    accepted: int = 0
    ended: int = 0

    @property
    def failed(self) -> int:
        """Number of accepted questions that failed, went beyond the budget, or go on."""
        return self.accepted - self.ended


class Asked(BaseModel):
    """A question without an outcome: what tells it from others, and whether it was accepted."""

    spec: str = ""
    request: str = ""
    process: int | None = None
    run: str | None = None
    accepted: bool = False


class ChargeLine(NamedTuple):
    """A release in a site's journal.

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


class Checkpoint(BaseModel):
    """What all lines up to one mean for what comes next.

    Attributes:
        accepted: questions of all runs that were accepted.
        ended: those of them that neither failed nor went beyond the budget, by which a server may learn a bit.
        day: the last day, in UTC, with a message that was refused, failed or waits.
        refusals: the number of such messages on that day.
        runs: counts of each run, by its name.
        asked: the questions without an outcome, by the numbers of their lines.
        charges: the number of releases.
        first: the cost of the first release.
        past: the costs of the releases before the file's checkpoint.
        signed: of each key of the site as a helper of masked sums, by its fingerprint, the number of sets it signed.
    """

    accepted: int = 0
    ended: int = 0
    day: str = ""
    refusals: int = 0
    runs: dict[str, RunCounts] = {}
    asked: dict[int, Asked] = {}
    charges: int = 0
    first: Event | None = None
    past: Past = Past()
    signed: dict[str, int] = {}

    @model_serializer(mode="wrap")
    def _of_a_helper(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """All facts; ``signed`` only at a site that has signed."""
        found: dict[str, Any] = write(self)
        return found if self.signed else {name: value for name, value in found.items() if name != "signed"}

    @property
    def failed(self) -> int:
        """Number of accepted questions that failed, went beyond the budget, or go on."""
        return self.accepted - self.ended


@dataclass
class Standing:
    """What the lines up to one mean: the last checkpoint, continued, and the releases after it.

    Attributes:
        at: what the lines up to now mean; its ``past`` lacks ``recent``.
        recent: the releases after the past.
    """

    at: Checkpoint = field(default_factory=Checkpoint)
    recent: list[ChargeLine] = field(default_factory=list)

    def add(self, number: int, line: Mapping[str, Any], mac: bytes) -> None:
        """Take in one more line; other kinds than those here change nothing."""
        what, at = line["what"], self.at
        if what == "asked":
            known = {name: line[name] for name in ("spec", "request", "process", "run") if name in line}
            at.asked[number] = Asked(**known)
        elif what == "accepted":
            at.accepted += 1
            own = at.runs.setdefault(line["run"], RunCounts(first=number, begun=line["at"]))
            own.accepted, own.last = own.accepted + 1, line["at"]
            if line["question"] in at.asked:
                at.asked[line["question"]].accepted = True
                at.asked[line["question"]].run = line["run"]
        elif what == "charged":
            self._charge(number, line, mac)
        elif what in OUTCOMES:
            self._end(line)
        elif what == "signed":
            at.signed[line["helper"]] = max(line["signatures"], at.signed.get(line["helper"], 0))
        elif what == "checkpoint":
            self.at, self.recent = Checkpoint(**line["at"]), []
        elif what == "begun" and "counts" in line:
            counts = line["counts"]
            at.accepted, at.ended = counts["accepted"], counts["ended"]
            at.runs = {run: RunCounts(first=number, **own) for run, own in counts["runs"].items()}

    def _charge(self, number: int, line: Mapping[str, Any], mac: bytes) -> None:
        at = self.at
        charge = read_charge(line, mac)
        if charge.number != at.charges + 1:
            raise ValueError(f"charge {charge.number} is where charge {at.charges + 1} belongs")
        at.charges += 1
        at.first = at.first or charge.entry.cost
        at.runs.setdefault(charge.run, RunCounts(first=number))
        self.recent.append(charge)

    def _end(self, line: Mapping[str, Any]) -> None:
        at, what = self.at, line["what"]
        asked = at.asked.pop(line.get("question", 0), None)
        if asked is not None and asked.accepted and what != "failed" and not line.get("beyond"):
            at.ended += 1
            if asked.run in at.runs:
                at.runs[asked.run].ended += 1
        if what in _REFUSALS:
            day = utc_day(line["time"])
            at.refusals = at.refusals + 1 if day == at.day else 1
            at.day = day

    def checkpoint(self, clock: float) -> Checkpoint:
        """The checkpoint after the last line, without runs that have been silent for `FORGET` seconds."""
        runs = {run: own for run, own in self.at.runs.items() if own.begun is None or clock - own.last < FORGET}
        past = self.at.past.after([charge.entry for charge in self.recent])
        return self.at.model_copy(update={"past": past, "runs": runs})


def read_charge(line: Mapping[str, Any], mac: bytes) -> ChargeLine:
    """The release of a line ``charged``."""
    records = base64.b64decode(line["records"]) if "records" in line else None
    entry = Charge(**line["entry"], records=records, counts_alone=line.get("counts") == "alone")
    return ChargeLine(line["charge"], line["run"], entry, line["time"], mac.hex())


def utc_day(moment: str) -> str:
    """The day in UTC of a time in ISO 8601."""
    return datetime.fromisoformat(moment).astimezone(UTC).strftime("%Y-%m-%d")
