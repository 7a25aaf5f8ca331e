"""The guarantee of a run, derived from its clients' replies and releases; it can't be set by hand."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from annotated_types import Ge, Le

from fedstill.privacy import accounting
from fedstill.privacy.ledger import UNCOUNTABLE, Charge, by_part, total_epsilon
from fedstill.privacy.releases import Event, Unbounded

ADJACENCY = {
    "record": "one record of one client is added or removed",
    "label": "one record's label is replaced, everything else about it being public",
    "client": "all records of one client are replaced by any others, or one is added or removed",
}
"""The difference between neighbouring data sets, by unit of a guarantee."""
_SCALES = "normalisation", "scale"
_COLUMNS = "list of columns"
"""Facts of a task that say nothing of labels."""
_OF_NUMBERS = "--limit", "--public held", "--partition iid", "--partition quantity"
"""Draws that look at the number of records alone."""
APART = (
    "give data with a test split of their own and a column that names each record's client (--partition by:COLUMN), "
    "and leave out --limit, --validation and --public held"
)
"""Remedy: data of which no draw depends on all records."""
_WHOLE = frozenset({"ClippedUpdate", "IntegerUpdate"})
"""Mechanisms whose theorem lets all of a client's records change."""


@dataclass(frozen=True)
class Guarantee:
    """The privacy guarantee of a run, or the reason why there is none; then all other facts are None.

    Attributes:
        holds: whether there is a guarantee.
        unit: the protected unit: one record, one record's label, or a client with all of its records.
        adjacency: the difference between neighbouring data sets.
        epsilon: privacy loss at ``delta`` of the client that spent most.
        delta: probability that the loss is larger.
        adversary: the parties against whom the guarantee holds.
        accountant: the method by which the costs of the releases were added up.
        reason: the theorems that the guarantee rests on, or the field or release that breaks it.
        simulated: whether the noise came from the run's seed; whoever knows the seed can remove such noise.
        exposed: number of the clients' records that the public or the test records hold too, which nothing protects;
            None where nobody counted them: in a run without a guarantee, or of real sites.
        unchecked: a method, or models, outside of fedstill on whose word the guarantee rests: that each row which they
            make depends on its own record only. None for fedstill's own, which tests compare on neighbouring data.
        pairs: number of pairs of neighbouring data sets on which a check of that method (``fedstill check``) has found
            nothing; None without a check of this code with these settings.
        group: the column whose values, such as patients, have ``group_size`` records at most, a public bound
            (`for_group`); None without one.
        group_size: that bound.
        group_epsilon: privacy loss of all of a group's records together; None if nothing is promised to them.
        group_delta: its delta.
        adders: number of honest clients on whose noise the guarantee counts, in a run with masked sums; else None.
        alone_epsilon: then the privacy loss, at ``delta``, if all other clients, the server and the helpers work
            together, so that the client's own share of the noise is all; None if that promises nothing.
    """

    holds: bool
    unit: Literal["record", "label", "client"] | None
    adjacency: str | None
    epsilon: Annotated[float, Ge(0)] | None
    delta: Annotated[float, Ge(0), Le(1)] | None
    adversary: str | None
    accountant: str | None
    reason: str
    simulated: bool
    exposed: int | None = None
    unchecked: str | None = None
    pairs: int | None = None
    group: str | None = None
    group_size: int | None = None
    group_epsilon: float | None = None
    group_delta: float | None = None
    adders: int | None = None
    alone_epsilon: float | None = None


def is_spent(found: Guarantee) -> bool:
    """Whether the guarantee is that of releases; its epsilon may be 0 where delta alone covers their noise."""
    return bool(found.epsilon or found.delta)


def no_guarantee(reason: str, *, simulated: bool) -> Guarantee:
    """A `Guarantee` that does not hold, and the reason."""
    return Guarantee(False, None, None, None, None, None, None, reason, simulated)


def of_group(epsilon: float, delta: float, size: int) -> tuple[float, float] | None:
    """The guarantee of ``size`` records together, where (epsilon, delta) is that of one; None if it promises nothing.

    Vadhan, The Complexity of Differential Privacy (2017), Lemma 2.2: along a chain of ``size`` neighbours epsilons add
    up, and delta is multiplied by 1 + e^epsilon + ... + e^((size - 1) epsilon).
    """
    total = size * epsilon
    if total > 700 or not math.isfinite(total):
        return None
    grown = delta * (math.expm1(total) / math.expm1(epsilon) if epsilon else size)
    return (total, grown) if grown < 1 else None


def for_group(found: Guarantee, spent: Mapping[int, Sequence[Charge]], column: str, size: int) -> Guarantee:
    """``found`` with the guarantee of up to ``size`` records together, all of one value of ``column``.

    Group privacy: ``size`` records, at one client or at several, move a sum by ``size`` sensitivities at most, so a
    Gaussian release on all records has the noise multiplier ``sigma / size`` for them. Releases on samples, and those
    with noise that was chosen adaptively, have lemma 2.2 (`of_group`) in its place. The bound must be public.

    As no more than ``size`` records of a value stay, one more may take the place of another, at another client too: the
    epsilon of a record becomes that of two records.
    """
    if not found.holds or found.epsilon is None or found.unit not in ("record", "label"):
        return found
    group = _together(found, spent, size)
    stated = replace(found, group=column, group_size=size)
    if group is not None:
        stated = replace(stated, group_epsilon=group[0], group_delta=group[1])
    if found.unit == "label" or not any(spent.values()):
        return stated
    two = _together(found, spent, 2)
    if two is None:
        return no_guarantee(f"nothing bounds the cost of two records, and {_IN_PLACE}", simulated=found.simulated)
    alone = None
    if found.alone_epsilon is not None:
        own = replace(found, epsilon=found.alone_epsilon)
        alone = _together(own, {client: _alone_events(each) for client, each in spent.items()}, 2)
    alone_epsilon = alone[0] if alone is not None and alone[1] <= two[1] else None
    reason = f"{found.reason}; epsilon is that of two records, as {_IN_PLACE}"
    return replace(stated, epsilon=two[0], delta=two[1], alone_epsilon=alone_epsilon, reason=reason)


def spent_by(entries: Sequence[Charge], delta: float, budget: float | None, bound: int | None) -> tuple[float, float]:
    """Epsilon, at delta or more, of one client's releases, all of one unit; with a public ``bound`` as `for_group`.

    Args:
        entries: the releases, at least one.
        delta: the run's.
        budget: the limit of a filter, if there is one.
        bound: most records of one group (``--group-bound``): then it is that of two records.
    """
    unit, (epsilon, _) = entries[0].unit, of_client(entries, delta, budget)
    if bound is None or unit != "record":
        return epsilon, delta
    own = Guarantee(True, unit, None, epsilon, delta, None, None, "one client's", simulated=False)
    return _together(own, {0: entries}, 2) or (math.inf, delta)


_IN_PLACE = "one record more may take the place of another of its group (--group-bound)"


def _together(found: Guarantee, spent: Mapping[int, Sequence[Charge]], size: int) -> tuple[float, float] | None:
    """Epsilon and delta of ``size`` records together, where those of one are ``found``'s; None without a bound."""
    entries = [entry for each in spent.values() for entry in each]
    if not entries:
        return 0.0, 0.0
    epsilon, delta = found.epsilon or 0.0, found.delta or 0.0
    if all(_is_on_all(entry.event) and not entry.adaptive and entry.part is None for entry in entries):
        each = [[accounting.of_records(entry.event, size) for entry in some] for some in spent.values() if some]
        if delta:
            unit: Literal["record", "label"] = "label" if found.unit == "label" else "record"
            together = max(accounting.epsilon(events, delta, unit) for events in each)
        else:
            together = size * epsilon
        return (together, delta) if math.isfinite(together) else None
    return of_group(epsilon, delta, size)


def _alone_events(entries: Sequence[Charge]) -> list[Charge]:
    """The releases as if the client's own share of the noise were all."""
    return [entry.model_copy(update={"event": entry.alone or entry.event}) for entry in entries]


def _is_on_all(event: Event) -> bool:
    return event.kind == "pure" or (event.kind == "gaussian" and event.sampling == 1)


def telling(measured: Sequence[str], unit: str | None) -> list[str]:
    """The ``measured`` facts that end a guarantee of this unit: all, but for labels no scales of public images."""
    return [fact for fact in measured if unit != "label" or fact not in (*_SCALES, _COLUMNS)]


def remedy(measured: Sequence[str]) -> str:
    """Flags that state facts of a task that came from the records (`fedstill.data.sources.DataSet.measured`)."""
    if _COLUMNS in measured:
        return "describe the table by a schema (--schema-file; fedstill data schema drafts one)"
    scaled = [fact for fact in measured if fact in _SCALES]
    flags = ["--mean 0.5 --std 0.25"] * bool(scaled)
    flags += ["--num-classes or --class-names"] * (len(scaled) < len(measured))
    return f"state {'it' if len(measured) == 1 else 'them'} ({', '.join(flags)})"


def moving(drawn: Sequence[str], unit: str | None) -> list[str]:
    """Draws of a task (``Task.drawn``) in which one record, or one label, may move other records."""
    return [what for what in drawn if unit != "label" or not what.startswith(_OF_NUMBERS)]


def beside(
    found: Guarantee,
    measured: Sequence[str],
    held: int = 0,
    in_public: Callable[[], tuple[int, int]] | None = None,
    drawn: Sequence[str] = (),
) -> Guarantee:
    """``found``, or none where a run's settings hold facts ``measured`` on the records: those leave without noise.

    Args:
        found: the guarantee by the releases alone.
        measured: facts of the task that came from the records (`fedstill.data.sources.DataSet.measured`).
        held: number of the task's own records that the run took as public (``--public held=N``).
        in_public: counts the clients' records that are among the public or the test records too, and all of them;
            called only if there is a guarantee.
        drawn: what decided which client has which records, and depends on all of them (``Task.drawn``). It ends a
            guarantee with real noise; a simulation stands for clients that have their records already.
    """
    if not found.holds:
        return found
    measured = telling(measured, found.unit)
    if measured:
        return no_guarantee(
            f"the {' and the '.join(measured)} of the task came from the records, and every request and the model's "
            f"file show it; {remedy(measured)}",
            simulated=found.simulated,
        )
    drawn = moving(drawn, found.unit) if is_spent(found) else []
    if drawn and not found.simulated:
        return no_guarantee(
            f"the {' and the '.join(drawn)} drew from all records which client has which, so one record more or less "
            f"moves others from client to client; {APART}",
            simulated=found.simulated,
        )
    known, of = in_public() if in_public else (0, 0)
    if known == of > 0:
        none = no_guarantee(
            f"all {of} records of the clients are among the public or the test records too, which the server has "
            "without noise; take other public and test records",
            simulated=found.simulated,
        )
        return replace(none, exposed=known)
    outside = [f"it is for the clients' records; nothing protects the {held} records that --public held={held} took"]
    outside = outside * bool(held)
    if drawn:
        outside.append(f"{OF_REAL_NOISE}, as the {' and the '.join(drawn)} drew from all records")
    if known:
        those = "which are among the public or the test records too"
        outside.append(f"nothing protects {known} of the clients' {of} records, {those}")
    return replace(found, reason="; ".join([found.reason, *outside]), exposed=known if of else None)


def derive(
    unprotected: Sequence[str],
    spent: Mapping[int, Sequence[Charge]],
    delta: float,
    *,
    budget: float | None = None,
    simulated: bool = True,
) -> Guarantee:
    """The guarantee of a run.

    Args:
        unprotected: fields of replies that are neither released nor public, as "field F of step S".
        spent: releases of each client.
        delta: the delta at which epsilon is stated.
        budget: the budget of the clients' ledgers, which is the epsilon of releases with adaptively chosen noise.
        simulated: whether the noise came from the run's seed.
    """
    entries = [entry for each in spent.values() for entry in each]
    simulated = simulated and bool(entries)
    no = partial(no_guarantee, simulated=simulated)
    if unprotected:
        *others, last = unprotected
        what = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        return no(f"{what} released unprotected")
    for entry in entries:
        if isinstance(entry.event, Unbounded):
            return no(f"{entry.mechanism} of step '{entry.step}': {entry.event.reason}")
    if len(units := {entry.unit for entry in entries}) > 1:
        return no("some releases protect records, others labels only; costs of different adjacencies don't add up")
    unit: Literal["record", "label", "client"] = units.pop() if units else "record"
    if entries and all(entry.mechanism in _WHOLE for entry in entries):
        unit = "client"
    epsilon, accountant = 0.0, "none needed"
    for client, each in spent.items():
        try:
            own, how = of_client(each, delta, budget)
        except UNCOUNTABLE as error:  # a client may list any releases
            return no(f"the releases that client {client} lists can't be added up ({type(error).__name__})")
        if own >= epsilon and each:
            epsilon, accountant = own, how
    theorems = list(dict.fromkeys(f"{entry.mechanism}: {entry.theorem}" for entry in entries))
    reason = "; ".join(theorems) or "every field that the clients sent is declared public"
    reason += _SIMULATED if simulated else ""
    if not math.isfinite(epsilon):
        return no(f"the releases together have no finite epsilon at delta {delta:g}")
    pure = all(entry.event.kind == "pure" for entry in entries)
    return Guarantee(
        holds=True,
        adders=max((entry.adders for entry in entries if entry.adders > 1), default=None),
        alone_epsilon=_alone(spent, delta, budget),
        unit=unit,
        adjacency=ADJACENCY[unit],
        epsilon=epsilon,
        delta=0.0 if pure and all(len(group) <= 1 for each in spent.values() for group in by_part(each)) else delta,
        adversary="the server, and whoever sees what it makes of the replies",
        accountant=accountant,
        reason=reason,
        simulated=simulated,
    )


OF_REAL_NOISE = "with real noise this task has no guarantee"
"""Beginning of the words on a simulation that stands for other clients than its own task has."""
_SIMULATED = ". Its noise came from the run's seed, so this run is a simulation (--noise entropy for real noise)"


def _alone(spent: Mapping[int, Sequence[Charge]], delta: float, budget: float | None) -> float | None:
    """The largest epsilon of a client whose own share of the noise is all; None if nothing bounds it, or no share."""
    if all(entry.adders == 1 for each in spent.values() for entry in each):
        return None
    most = 0.0
    for each in spent.values():
        own = _alone_events(each)
        try:
            most = max(most, of_client(own, delta, None if any(entry.adaptive for entry in own) else budget)[0])
        except UNCOUNTABLE:
            return None
    return most if math.isfinite(most) else None


def of_client(entries: Sequence[Charge], delta: float, budget: float | None) -> tuple[float, str]:
    """The epsilon at ``delta`` of one client's releases, all of one unit, and the accountant that computed it.

    If noise was chosen adaptively, epsilon is the budget: a filter guarantees the budget and nothing smaller.
    """
    epsilon = total_epsilon(entries, delta, budget)
    if any(entry.adaptive for entry in entries):
        within = budget if budget is not None and epsilon <= budget else math.inf
        return within, "Renyi filter (Feldman, Zrnic 2021)"
    groups = by_part(entries)
    ways = dict.fromkeys(
        accounting.accountant([entry.event for entry in group], group[0].unit) for group in groups if group
    )
    how = " or ".join(ways) or "none needed"
    if len(groups) > 1:
        how += f", the costliest of {len(groups)} disjoint parts of the records (parallel composition)"
    return epsilon, how
