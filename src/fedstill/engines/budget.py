"""Budgets and guarantee of a run, derived from the releases in the server's journal."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedstill.engines.run_spec import RunSpec
from fedstill.privacy import guarantee
from fedstill.privacy.events import Event, Unit
from fedstill.privacy.ledger import UNCOUNTABLE, Entry, covers, total_epsilon
from fedstill.protocol import Federation, Method, Step

Releases = Mapping[int, Sequence[Entry]]
"""The releases of each client that has any."""


def able_clients(
    fed: Federation, method: Method, releases: Releases, event: Event, exchange: int, adaptive: bool, unit: Unit
) -> list[int]:
    """The clients whose budget covers one more release, in request ``exchange``."""
    following = Entry(
        exchange=exchange,
        step="next",
        index=0,
        mechanism=type(method).__name__,
        unit=unit,
        event=event,
        theorem="",
        adaptive=adaptive,
    )
    return [k for k in fed.clients if covers(releases.get(k, []), following, fed.budget, fed.delta)]


def largest_epsilon(fed: Federation, releases: Releases, unit: Unit) -> float | None:
    """The largest epsilon of one client's releases of this unit; None where nothing bounds it."""
    each = ([entry for entry in entries if entry.unit == unit] for entries in releases.values())
    try:
        most = max((total_epsilon(entries, fed.delta, fed.budget) for entries in each), default=0.0)
    except UNCOUNTABLE:
        return None
    return most if math.isfinite(most) else None


def guarantee_of(steps: Iterable[Step[Any]], releases: Releases, spec: RunSpec) -> guarantee.Guarantee:
    """The guarantee for every reply to ``steps``."""
    unprotected = [
        f"field '{f.name}' of step '{s.name}'"
        for s in steps
        for f in s.reply.schema
        if not (f.is_public or f.is_released)
    ]
    return guarantee.derive(unprotected, releases, spec.delta, budget=spec.budget, simulated=spec.simulated_noise)
