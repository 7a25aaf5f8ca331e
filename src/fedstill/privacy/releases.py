"""Releases: values that a mechanism has released, and their events, as accountants compose them. No torch is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

LEAST_DELTA = 1e-10
"""The least delta of real noise: each number, drawn from 53 bits, adds up to (1 + e^epsilon) 2^-54 to it
(`base.seeds.Entropy`)."""

Unit = Literal["record", "label"]
"""The difference between neighbouring data sets: one record added or removed, or one record's label replaced."""
UNITS: tuple[Unit, ...] = get_args(Unit)
"""All units."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be printable")
    return text


Words = Annotated[str, AfterValidator(_printable)]
"""Text that is safe to print, though it may come from another machine."""


class _Event(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Gaussian(_Event):
    """Gaussian noise of ``noise_multiplier`` times the sensitivity, ``count`` times, each on a Poisson sample."""

    kind: Literal["gaussian"] = "gaussian"
    noise_multiplier: Annotated[float, Ge(1e-9), Le(1e9)]
    sampling: Annotated[float, Gt(0), Le(1)] = 1.0
    count: Annotated[int, Ge(1), Le(10**9)] = 1


class Pure(_Event):
    """A mechanism that is ``epsilon``-DP with delta 0."""

    kind: Literal["pure"] = "pure"
    epsilon: PositiveFloat


class Unbounded(_Event):
    """A release that no epsilon bounds, and the reason."""

    kind: Literal["none"] = "none"
    reason: Annotated[Words, Field(max_length=1000)]


Event = Annotated[Gaussian | Pure | Unbounded, Field(discriminator="kind")]


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Released(Generic[T]):
    """A value that may leave a client: from `Client.release`, or computed from such values and public ones only.

    Post-processing costs nothing (Dwork, Roth 2014, proposition 2.1): ``released.map(f)`` is released as well. A
    method's author promises that ``f`` does not use any record; nothing checks it.
    """

    value: T

    def map(self, f: Callable[[T], U]) -> "Released[U]":
        """The result of ``f`` on the value."""
        return Released(f(self.value))


def map_released(f: Callable[..., U], *values: Released[Any]) -> Released[U]:
    """The result of ``f`` on several released values."""
    return Released(f(*(each.value for each in values)))
