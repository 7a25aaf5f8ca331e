"""The guarantee of a run, derived from what its clients sent and released; nobody can type an epsilon in."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from annotated_types import Ge, Le

from fedstill.privacy.events import Pure, Unbounded, Unit
from fedstill.privacy.ledger import UNCOUNTABLE, Entry, by_part, total_epsilon

ADJACENCY = {
    "record": "one record of one client is added or removed",
    "label": "one record's label is replaced, everything else about it being public",
}
"""The difference between neighbouring data sets, by unit."""


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
        simulated: whether the noise of the releases came from the run's seed, which whoever knows it can take off.
    """

    holds: bool
    unit: Literal["record", "label"] | None
    adjacency: str | None
    epsilon: Annotated[float, Ge(0)] | None
    delta: Annotated[float, Ge(0), Le(1)] | None
    adversary: str | None
    accountant: str | None
    reason: str
    simulated: bool


def none(reason: str, *, simulated: bool) -> Guarantee:
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
        simulated=simulated,
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
        spent: each client's releases.
        delta: where epsilon is stated.
        budget: the budget of the clients' ledgers; the epsilon of releases whose noise was chosen adaptively.
        simulated: whether the noise came from the run's seed.
    """
    entries = [entry for each in spent.values() for entry in each]
    simulated = simulated and bool(entries)
    no = partial(none, simulated=simulated)
    if unprotected:
        *others, last = unprotected
        if others:
            return no(f"{', '.join(others)} and {last} are released unprotected")
        return no(f"{last} is released unprotected")
    for entry in entries:
        if isinstance(entry.event, Unbounded):
            return no(f"{entry.mechanism} of step '{entry.step}': {entry.event.reason}")
    units = {entry.unit for entry in entries}
    if len(units) > 1:
        return no("some releases protect records, others labels only; costs of different adjacencies don't add up")
    unit: Unit = units.pop() if units else "record"
    epsilon, accountant = 0.0, "none needed"
    for client, each in spent.items():
        try:
            own, how = of_client(each, delta, budget)
        except UNCOUNTABLE as error:  # a client may list what it likes
            return no(f"the releases that client {client} lists can't be added up ({type(error).__name__})")
        if own >= epsilon and each:
            epsilon, accountant = own, how
    theorems = list(dict.fromkeys(f"{entry.mechanism}: {entry.theorem}" for entry in entries))
    reason = "; ".join(theorems) or "every field that the clients sent is declared public"
    if simulated:
        reason += ". Its noise came from the run's seed, so this run is a simulation (--noise entropy for real noise)"
    if not math.isfinite(epsilon):
        return no(f"the releases together have no finite epsilon at delta {delta:g}")
    pure = all(entry.event.kind == "pure" for entry in entries)
    return Guarantee(
        holds=True,
        unit=unit,
        adjacency=ADJACENCY[unit],
        epsilon=epsilon,
        delta=0.0 if pure and all(len(group) <= 1 for each in spent.values() for group in by_part(each)) else delta,
        adversary="the server, and whoever sees what it makes of the replies",
        accountant=accountant,
        reason=reason,
        simulated=simulated,
    )


def of_client(entries: Sequence[Entry], delta: float, budget: float | None) -> tuple[float, str]:
    """One client's epsilon at ``delta``, of releases of one unit, and the accountant that found it.

    Where noise was chosen adaptively, the epsilon is the budget: the filter promises that and no less.
    """
    epsilon = total_epsilon(entries, delta, budget)
    if any(entry.adaptive for entry in entries):
        kept = budget is not None and epsilon <= budget
        return (budget if kept and budget is not None else math.inf), "Renyi filter (Feldman, Zrnic 2021)"
    groups = by_part(entries)
    if any(len(group) > 1 or not isinstance(group[0].event, Pure) for group in groups if group):
        how = "privacy loss distributions (dp-accounting)"
    else:
        how = "a single release"
    if len(groups) > 1:
        how += f", the costliest of {len(groups)} disjoint parts of the records (parallel composition)"
    return epsilon, how
