"""The file of a sweep: a task, methods, and the values of their settings to try."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from fedstill import methods
from fedstill.experiment import search
from fedstill.experiment.config import Experiment
from fedstill.experiment.mapping import read_mapping
from fedstill.protocol import Method
from fedstill.settings import Settings, sentence

VALIDATION = 0.1
"""Share of the training records that a sweep evaluates on, if the file does not say."""
FINAL = "final"
"""The folder of the runs on the test set, which no method's label may have."""


class Plan(Settings):
    """How a sweep searches."""

    search: Literal["grid", "optuna"] = "grid"
    """All points of each method's grid, or points that optuna proposes."""
    tries: PositiveInt | None = None
    """Number of points for each method with settings to try; the size of their grids by default."""
    batch: PositiveInt = 4
    """Number of points that optuna proposes at a time."""
    seeds: tuple[NonNegativeInt, ...] = (0,)
    """Seeds of each point; its score is the mean validation accuracy over them."""
    final_seeds: tuple[NonNegativeInt, ...] = ()
    """Seeds of the runs on the test set; those of the points by default."""


@dataclass(frozen=True)
class Entry:
    """A method of a sweep.

    Attributes:
        label: its name in the tables.
        name: the method, as `fedstill.methods.find` takes it.
        settings: its settings that are not searched.
        space: what to try.
        tries: the number of points.
    """

    label: str
    name: str
    settings: dict[str, Any]
    space: dict[str, search.Range | list[Any]]
    tries: int

    def method(self, point: search.Point) -> Method:
        """The method at a point.

        Raises:
            ValueError: a value is invalid, or there is no such setting; one sentence.
        """
        kind = methods.find(self.name)
        try:
            return kind(**_merged(self.settings, point))
        except ValidationError as error:
            raise ValueError(f"{self.label}: {sentence(error, kind=kind)}") from error


@dataclass(frozen=True)
class Sweep:
    """A checked sweep: the task, the plan and the methods."""

    experiment: Experiment
    plan: Plan
    entries: tuple[Entry, ...]

    def search(self, entry: Entry) -> search.Search:
        """The search of one method."""
        if not entry.space or self.plan.search == "grid":
            return search.grid(entry.space, entry.tries)
        return search.optuna(entry.space, entry.tries, self.plan.batch)

    def has_equal_budgets(self) -> bool:
        """Whether all methods with settings to try have the same number of tries."""
        return len({entry.tries for entry in self.entries if entry.space}) < 2


def read_sweep(path: Path) -> Sweep:
    """Read the file of a sweep: fields of `Experiment` and `Plan`, and ``methods``, by label.

    A method is a mapping of its settings, with ``try`` (values or ranges by dotted name), ``method`` (its name, if that
    is not the label) and ``tries`` (its own number of points, which makes the budgets unequal).

    Raises:
        ValueError: the file is missing or is not YAML, a setting is invalid, or methods would get unequal budgets
            unasked; one sentence.
    """
    content = read_mapping(path, "a sweep's file")
    try:
        if "method" in content:
            raise ValueError("it has 'method', as a run's file does; try fedstill run, or name it under 'methods'")
        given = content.pop("methods", None)
        if not isinstance(given, dict) or not given:
            raise ValueError("it needs 'methods', a mapping of methods with their settings")
        plan = Plan(**{key: content.pop(key) for key in [*Plan.model_fields] if key in content})
        experiment = Experiment(**{"validation": VALIDATION, **content})
        _check(experiment, plan)
        return Sweep(experiment, plan, _entries(given, plan))
    except ValidationError as error:
        more = [*Plan.model_fields, "methods"]
        words = sentence(error, kind=Experiment, also=more, owners=_kinds(given))
        raise ValueError(f"{path}: {words}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _kinds(given: Mapping[Any, Any]) -> dict[str, type[Method]]:
    """The classes of the methods of a file, by label; without those that cannot be found."""
    found = {}
    for label, content in given.items():
        try:
            found[str(label)] = methods.find(str(content.get("method", label) if isinstance(content, dict) else label))
        except ValueError:
            continue
    return found


def _check(experiment: Experiment, plan: Plan) -> None:
    if not experiment.validation:
        raise ValueError("validation is 0, but a sweep chooses by validation records; set it above 0, as 0.1")
    if experiment.seed:
        raise ValueError(f"seed is {experiment.seed}; give seeds: [{experiment.seed}] in its place")
    for name, seeds in (("seeds", plan.seeds), ("final_seeds", plan.final_seeds)):
        if len(set(seeds)) < len(seeds) or (name == "seeds" and not seeds):
            raise ValueError(f"{name} is {list(seeds)}; give one or more different numbers")


def _entries(given: Mapping[str, Any], plan: Plan) -> tuple[Entry, ...]:
    drafts = [_draft(str(label), {} if content is None else content) for label, content in given.items()]
    sizes = {}
    for label, _, _, space, own in drafts:
        if space and plan.search == "grid":
            sizes[label] = search.grid_size(space)
            if (asked := own or plan.tries) and asked > sizes[label]:
                raise ValueError(f"tries is {asked}, but the grid of {label} has {sizes[label]} points; add values")
        elif space and not (own or plan.tries):
            raise ValueError("optuna needs a number of points for each method, as tries: 16")
    if plan.tries is None:
        free = {label: sizes[label] for label, _, _, _, own in drafts if label in sizes and not own}
        if len(set(free.values())) > 1:
            words = ", ".join(f"{label} {size}" for label, size in free.items())
            raise ValueError(
                f"the grids have different sizes ({words}), so the methods would not be tuned equally; set tries: "
                f"{min(free.values())}, or tries in each method for budgets that differ on purpose"
            )
    entries = []
    for label, name, settings, space, own in drafts:
        entry = Entry(label, name, settings, space, (own or plan.tries or sizes[label]) if space else 1)
        for point in search.corners(space):
            entry.method(point)
        entries.append(entry)
    return tuple(entries)


def _draft(label: str, content: object) -> tuple[str, str, dict[str, Any], dict[str, search.Range | list[Any]], int]:
    """Label, name, settings, space and own number of tries (0 without) of a method."""
    if not label.replace("-", "_").isidentifier() or label == FINAL:
        raise ValueError(f"'{label}' cannot be the label of a method; use other letters, and method: for its name")
    if not isinstance(content, dict):
        raise ValueError(f"{label} must be a mapping of settings, not {content!r}")
    settings = dict(content)
    name, space, own = settings.pop("method", label), settings.pop("try", None), settings.pop("tries", 0)
    if not isinstance(name, str):
        raise ValueError(f"method of {label} is {name!r}; give a method's name")
    if not isinstance(own, int) or isinstance(own, bool) or own < 0:
        raise ValueError(f"tries of {label} is {own!r}; give a whole number above 0")
    if space is not None and not isinstance(space, dict):
        raise ValueError(f"try of {label} must be a mapping of settings to lists of values, not {space!r}")
    return label, name, settings, {str(key): _values(label, key, v) for key, v in (space or {}).items()}, own


def _values(label: str, key: str, values: object) -> search.Range | list[Any]:
    if isinstance(values, list) and values:
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ValueError(f"try of {label}: {key} has a value twice: {values}")
        return values
    if isinstance(values, dict):
        try:
            return search.Range(**values)
        except ValidationError as error:
            raise ValueError(f"try of {label}: {key}: {sentence(error)}") from error
    raise ValueError(f"try of {label}: {key} is {values!r}; give a list of values, or low and high for optuna")


def _merged(settings: Mapping[str, Any], point: search.Point) -> dict[str, Any]:
    """``settings`` with the values of a point at their dotted names."""
    merged = dict(settings)
    for place, value in point.items():
        *path, last = place.split(".")
        inner = merged
        for part in path:
            deeper = inner.get(part, {})
            if not isinstance(deeper, dict):
                raise ValueError(f"{place} is to be tried, but {part} is {deeper!r}")
            inner[part] = inner = dict(deeper)
        inner[last] = value
    return merged
