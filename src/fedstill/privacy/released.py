"""Values that went through a privacy mechanism, and what was done to them afterwards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Released(Generic[T]):
    """A value that may leave: `Client.release` made it, or it was computed from such values and public ones only.

    Post-processing costs nothing (Dwork, Roth 2014, proposition 2.1): ``released.map(f)`` is released as well. ``f``
    must not look at records; that is the one promise a method's author gives.
    """

    value: T

    def map(self, f: Callable[[T], U]) -> "Released[U]":
        """The result of ``f`` on the value."""
        return Released(f(self.value))


def map_released(f: Callable[..., U], *values: Released[Any]) -> Released[U]:
    """The result of ``f`` on several released values."""
    return Released(f(*(each.value for each in values)))
