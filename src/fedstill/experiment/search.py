"""Searches among settings: all points of a grid, or those that optuna proposes.

A search is a generator of batches of points; it receives the score of each point of the last batch, and None for a
point whose runs failed. It depends on nothing but its arguments and the scores, so a sweep that was interrupted begins
its searches anew, finds the finished runs in their folders, and comes to the same points.
"""

import itertools
import random
from collections.abc import Generator, Mapping
from typing import Any, Self

from pydantic import PositiveFloat, model_validator

from fedstill.base import errors
from fedstill.base.settings import Settings

Point = dict[str, Any]
"""Values of the settings of a method, by dotted name."""
Search = Generator[list[Point], list[float | None], None]


class Range(Settings):
    """Numbers between two limits, for optuna."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log: bool = False
    """Whether to search by factors, as for learning rates."""
    whole: bool = False
    """Whether the values are whole numbers."""
    step: PositiveFloat | None = None
    """Distance between values; any value by default."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}; low must be below high")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("a search by factors (log) needs a low above 0, and has no step")
        if self.whole and not (self.low.is_integer() and self.high.is_integer() and float(self.step or 1).is_integer()):
            raise ValueError("low, high and step must be whole numbers if the values are")
        return self


Space = Mapping[str, Range | list[Any]]
"""Values to try by dotted name of a setting: a list, or a range."""


def grid_size(space: Space) -> int:
    """The number of points of a grid.

    Raises:
        ValueError: a setting has a range in place of values.
    """
    size = 1
    for name, values in space.items():
        if isinstance(values, Range):
            raise ValueError(f"{name} has a range, but a grid needs a list of values (or search: optuna)")
        size *= len(values)
    return size


def grid(space: Space, tries: int) -> Search:
    """One batch: all points of a grid in order, or ``tries`` of them, drawn at random, always the same."""
    names = list(space)
    points = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*map(_listed_values, space.values()))
    ]
    if tries < len(points):
        chosen = sorted(random.Random(0).sample(range(len(points)), tries))
        points = [points[i] for i in chosen]
    yield points


def _listed_values(values: Range | list[Any]) -> list[Any]:
    assert not isinstance(values, Range)
    return values


def optuna(space: Space, tries: int, batch: int) -> Search:
    """Batches of points of optuna's sampler TPE, whose seed is 0.

    Raises:
        ValueError: optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError(f"optuna is not installed; {errors.install('sweeps')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    done = 0
    while done < tries:
        trials = [study.ask() for _ in range(min(batch, tries - done))]
        scores = yield [{name: _suggested(trial, name, values) for name, values in space.items()} for trial in trials]
        for trial, score in zip(trials, scores, strict=True):
            study.tell(trial, score, state=optuna.trial.TrialState.FAIL if score is None else None)
        done += len(trials)


def _suggested(trial: Any, name: str, values: Range | list[Any]) -> Any:
    if not isinstance(values, Range):
        return values[trial.suggest_categorical(name, list(range(len(values))))]  # a value may be a list
    if values.whole:
        step = int(values.step or 1)
        return trial.suggest_int(name, int(values.low), int(values.high), step=step, log=values.log)
    return trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log)


def corners(space: Space) -> list[Point]:
    """Points in which every value of a list and both limits of a range occur, to check them before the first run."""
    sides = {name: _ends(values) if isinstance(values, Range) else values for name, values in space.items()}
    longest = max(map(len, sides.values()), default=1)
    return [{name: side[i % len(side)] for name, side in sides.items()} for i in range(longest)]


def _ends(values: Range) -> list[Any]:
    return [int(values.low), int(values.high)] if values.whole else [values.low, values.high]
