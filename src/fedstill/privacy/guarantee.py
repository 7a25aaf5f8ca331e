"""What a run guarantees, derived from what its clients sent; nobody can type an epsilon in."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fedstill.protocol import Step


@dataclass(frozen=True)
class Guarantee:
    """A guarantee, or "none" and why.

    Attributes:
        holds: whether there is one.
        unit: what is protected: one record, or one record's label.
        epsilon: the privacy loss, at ``delta``.
        delta: the probability that the loss is larger.
        adversary: against whom it holds.
        reason: the field that breaks it, or the theorem it rests on.
    """

    holds: bool
    unit: Literal["record", "label"] | None
    epsilon: float | None
    delta: float | None
    adversary: str | None
    reason: str


def none(reason: str) -> Guarantee:
    """No guarantee, and why."""
    return Guarantee(holds=False, unit=None, epsilon=None, delta=None, adversary=None, reason=reason)


def of_steps(asked: Iterable[Step[Any]]) -> Guarantee:
    """The guarantee of a run that asked for these steps: a field that is not declared public is unprotected."""
    fields = [f"field '{f.name}' of step '{s.name}'" for s in asked for f in s.reply.schema if not f.is_public]
    if fields:
        return none(f"{' and '.join(fields)} {'is' if len(fields) == 1 else 'are'} released unprotected")
    return Guarantee(
        holds=True,
        unit="record",
        epsilon=0.0,
        delta=0.0,
        adversary="the server",
        reason="every field that the clients sent is declared public",
    )
