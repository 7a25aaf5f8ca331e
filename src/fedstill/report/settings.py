"""The settings of finished runs: flat, comparable, and as words."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedstill import methods
from fedstill.experiment.config import FREE, Experiment, defaults_of, flat
from fedstill.report.record import RunRecord

TASK = ("data", "size", "partition", "clients", "model", "models", "limit", "validation", "local_test")
"""Settings that make a task: accuracies of runs that differ in one of these are not comparable."""

UNNAMED = FREE | {"seed", "threads", "device"}
"""Settings that may differ between the runs of one row."""

_RESULTS = {"label", "method", "state", "accuracy", "rounds", "guarantee", "epsilon", "delta", "unit", "seconds"}
_OPTIONS = re.compile(r"[\w.-]+:\w+=[^,=]+(?:,\w+=[^,=]+)*")
_NUMBER = re.compile(r"(.*?[:=])?(-?\d+(?:\.\d+)?(?:e-?\d+)?)")


def task_settings(record: RunRecord) -> dict[str, Any]:
    """All settings of the experiment; `Experiment`'s default for one that the run's version did not have."""
    return flat(Experiment().model_dump(mode="json")) | flat(record.config["experiment"])


def method_settings(record: RunRecord) -> dict[str, Any]:
    """The method's settings; ``method.`` is put before a name that the experiment or a result has too."""
    own = flat({key: value for key, value in record.config["method"].items() if key != "name"})
    taken = task_settings(record).keys() | _RESULTS
    return {f"method.{key}" if key in taken else key: value for key, value in own.items()}


def method_name(record: RunRecord) -> str:
    """The name of the method, whatever the run's label is."""
    return str(record.config["method"].get("name", record.label))


def row_settings(record: RunRecord) -> dict[str, Any]:
    """The settings that all runs of a row share, with the options of a model apart."""
    task = {key: value for key, value in task_settings(record).items() if key not in UNNAMED}
    return options_apart(task | method_settings(record))


def options_apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``model = convnet:width=8`` as ``model = convnet`` and ``model.width = 8``; other settings as they are."""
    apart: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, str) and _OPTIONS.fullmatch(value):
            name, _, options = value.partition(":")
            apart[key] = name
            apart |= {f"{key}.{option.partition('=')[0]}": option.partition("=")[2] for option in options.split(",")}
        else:
            apart[key] = value
    return apart


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not equal in all of these."""
    every = list(settings)
    keys = dict.fromkeys(key for one in every for key in one)
    return [key for key in keys if len({words(one.get(key)) for one in every}) > 1]


def words(value: object) -> str:
    """A value of a setting as text; a dash for no value."""
    if value is None or value == []:
        return "–"
    if isinstance(value, list | tuple):
        return " ".join(map(words, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def numbers(values: Sequence[object]) -> tuple[str, list[float]] | None:
    """The common prefix and the numbers of values such as ``dirichlet:0.1``; None if they are not of this form."""
    matches = [_NUMBER.fullmatch(words(value)) for value in values]
    if any(isinstance(value, bool) for value in values) or not all(matches):
        return None
    prefixes = {match[1] or "" for match in matches if match}
    if len(prefixes) != 1:
        return None
    return prefixes.pop().rstrip(":="), [float(match[2]) for match in matches if match]


def changed(record: RunRecord) -> dict[str, Any] | None:
    """The method's settings that differ from their defaults; None for a method that is not fedstill's.

    The code of a stranger's method is not imported.
    """
    name = method_name(record)
    if name not in methods.TABLE:
        return None
    defaults = defaults_of(methods.find(name))
    own = flat({key: value for key, value in record.config["method"].items() if key != "name"})
    return {key: value for key, value in own.items() if words(value) != words(defaults.get(key))}
