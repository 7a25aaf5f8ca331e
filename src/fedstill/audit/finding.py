"""What an audit of one method found."""

from dataclasses import asdict, dataclass
from typing import Any

EXCEEDED = 1.001
"""Share of the claimed sensitivity that refutes a claim: in DP-SGD, exact steps move the later ones a little."""


@dataclass(frozen=True)
class Finding:
    """What the audit of one method found.

    Attributes:
        method: the method.
        unit: what its claim protects.
        claim: the epsilon of the runs' guarantee.
        delta: its delta.
        bound: lower bound on epsilon for any mechanism.
        fit: lower bound on epsilon if scores are Gaussian, as the claim implies; None for other claims.
        reach: largest share of the claimed sensitivity by which a canary moves exact values; None for labels.
        canaries: number of canaries.
        clients: number of clients.
        risk: probability that a bound of this audit, or of an earlier one of some of its scores, is above the truth.
        looks: number of times that the scores were judged, each with more clients.
        difference: what else depends on a record (`Scene.difference`); empty if nothing does.
    """

    method: str
    unit: str
    claim: float
    delta: float
    bound: float
    fit: float | None
    reach: float | None
    canaries: int
    clients: int
    risk: float
    looks: int
    difference: str = ""

    @property
    def largest(self) -> float:
        """The larger of both bounds."""
        return max(self.bound, self.fit or 0.0)

    @property
    def refuted(self) -> bool:
        """Whether a bound exceeds the claim, a canary moves exact values too far, or something else depends on it."""
        return self.largest > self.claim or (self.reach or 0.0) > EXCEEDED or bool(self.difference)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        verdict = "refuted" if self.refuted else "not refuted"
        return {**asdict(self), "ratio": self.largest / self.claim, "verdict": verdict}
