"""What a run guarantees, derived from what its clients sent and released; nobody can type an epsilon in."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from fedstill.privacy import accounting
from fedstill.privacy.events import Pure, Unbounded, Unit
from fedstill.privacy.ledger import Entry, is_unbounded, touching

ADJACENCY = {
    "record": "one record of one client is added or removed",
    "label": "one record's label is replaced, everything else about it being public",
}
"""What the neighbouring data sets of each unit differ by."""


@dataclass(frozen=True)
class Guarantee:
    """A guarantee, or "none" and why.

    Attributes:
        holds: whether there is one.
        unit: what is protected: one record, or one record's label.
        adjacency: what neighbouring data sets differ by.
        epsilon: the privacy loss, at ``delta``; that of the client who spent most.
        delta: the probability that the loss is larger.
        adversary: against whom it holds.
        accountant: how the releases were added up.
        reason: the field or release that breaks it, or the theorems it rests on.
    """

    holds: bool
    unit: Literal["record", "label"] | None
    adjacency: str | None
    epsilon: Annotated[float, Ge(0)] | None
    delta: Annotated[float, Ge(0), Le(1)] | None
    adversary: str | None
    accountant: str | None
    reason: str


def none(reason: str) -> Guarantee:
    """No guarantee, and why."""
    return Guarantee(
        holds=False,
        unit=None,
        adjacency=None,
        epsilon=None,
        delta=None,
        adversary=None,
        accountant=None,
        reason=reason,
    )


def derive(
    unprotected: Sequence[str],
    spent: Mapping[int, Sequence[Entry]],
    delta: float,
    *,
    budget: float | None = None,
    simulated: bool = True,
) -> Guarantee:
    """The guarantee of a run.

    Args:
        unprotected: the fields that clients sent and that are neither released nor public, as "field F of step S".
        spent: what each client released.
        delta: where epsilon is stated.
        budget: what the clients' ledgers allowed; the epsilon of releases whose noise was chosen adaptively.
        simulated: whether the noise came from the run's seed.
    """
    if unprotected:
        *others, last = unprotected
        if others:
            return none(f"{', '.join(others)} and {last} are released unprotected")
        return none(f"{last} is released unprotected")
    entries = [entry for each in spent.values() for entry in each]
    broken = next((entry for entry in entries if is_unbounded(entry)), None)
    if broken is not None and isinstance(broken.event, Unbounded):
        return none(f"{broken.mechanism} of step '{broken.step}': {broken.event.reason}")
    units = {entry.unit for entry in entries}
    if len(units) > 1:
        return none("some releases protect records, others labels only; costs of different adjacencies don't add up")
    unit: Unit = units.pop() if units else "record"
    epsilon, accountant = 0.0, "none needed"
    for client, each in spent.items():
        try:
            found, how = of_client(each, delta, unit, budget)
        except (ArithmeticError, MemoryError, ValueError) as error:  # a client may list what it likes
            return none(f"the releases that client {client} lists can't be added up ({type(error).__name__})")
        if found >= epsilon and each:
            epsilon, accountant = found, how
    theorems = list(dict.fromkeys(f"{entry.mechanism}: {entry.theorem}" for entry in entries))
    reason = "; ".join(theorems) or "every field that the clients sent is declared public"
    if simulated and entries:
        reason += ". Its noise came from the run's seed, so this run is a simulation (--noise entropy for real noise)"
    if not math.isfinite(epsilon):
        return none(f"the releases together have no finite epsilon at delta {delta:g}")
    pure = all(entry.event.kind == "pure" for entry in entries)
    return Guarantee(
        holds=True,
        unit=unit,
        adjacency=ADJACENCY[unit],
        epsilon=epsilon,
        delta=0.0 if pure and all(len(path) <= 1 for each in spent.values() for path in touching(each)) else delta,
        adversary="the server, and whoever sees what it makes of the replies",
        accountant=accountant,
        reason=reason,
    )


def of_client(entries: Sequence[Entry], delta: float, unit: Unit, budget: float | None) -> tuple[float, str]:
    """One client's epsilon at ``delta``, and how it was found."""
    paths = [[entry.event for entry in path] for path in touching(entries)]
    if any(entry.adaptive for entry in entries):
        kept = budget is not None and all(map(accounting.rdp_filter(budget, delta).allows, paths))
        return (budget if kept and budget is not None else math.inf), "Renyi filter (Feldman, Zrnic 2021)"
    epsilon = max(accounting.epsilon(events, delta, unit) for events in paths)
    if any(len(events) > 1 or not isinstance(events[0], Pure) for events in paths if events):
        how = "privacy loss distributions (dp-accounting)"
    else:
        how = "a single release"
    if len(paths) > 1:
        how += f", the costliest of {len(paths)} disjoint parts of the records (parallel composition)"
    return epsilon, how
