"""Values that a privacy mechanism has released, and their post-processing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
