"""Entries of ledgers, for tests."""

from fedstill.privacy import accounting
from fedstill.privacy.ledger import Charge
from fedstill.privacy.releases import Event, Gaussian, Unit

ONE = Gaussian(noise_multiplier=accounting.gaussian_noise(1.0, 1e-5))
"""What one Gaussian release of epsilon 1 costs."""


def entry(
    event: Event = ONE,
    index: int = 0,
    unit: Unit = "record",
    part: str | None = None,
    adaptive: bool = False,
    exchange: int = 0,
) -> Charge:
    return Charge(
        exchange=exchange,
        step="s",
        index=index,
        mechanism="Noisy",
        unit=unit,
        event=event,
        theorem="a theorem",
        adaptive=adaptive,
        part=part,
    )
