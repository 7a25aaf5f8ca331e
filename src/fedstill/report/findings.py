"""The results of a report in sentences."""

from collections.abc import Sequence

from fedstill.report import settings
from fedstill.report.tasks import Row, Task
from fedstill.report.words import accuracy_words, human_bytes

MOST_CHANGES = 8
LONGEST = 40
"""Number of characters of a setting's value."""
_DEFAULT = "Default settings"
_BUT_COLUMNS = "Default settings except for the columns"


def title(tasks: Sequence[Task]) -> str:
    """The title of the page."""
    labels = list(dict.fromkeys(row.label for task in tasks for row in task.rows))
    data = ", ".join(dict.fromkeys(run.summary["data"] for task in tasks for run in task.runs))
    names = labels[0] if len(labels) == 1 else f"{len(labels)} methods"
    return f"{names} on {data}" + (f": {len(tasks)} tasks" if len(tasks) > 1 else "")


def finding(task: Task, *, named: bool = True) -> str:
    """The result of a task in one or two sentences: the most accurate method, and the one with the fewest bytes.

    Args:
        task: the task.
        named: whether to begin with the task.
    """
    table = task.ranked
    if not table:
        return f"No finished run on {task.words} has an accuracy."
    text = f"On {task.words}, " if named else ""
    best = table[0]
    score = f"{accuracy_words(best.accuracy, best.spread)} %"
    up, down = (human_bytes(best.mean_of(f"bytes_{way}_per_client")) for way in ("up", "down"))
    rounds = f"{best.mean_of('rounds'):.4g} round{'s' if best.mean_of('rounds') != 1 else ''}"
    if len(table) == 1:
        return text + f"{best.name} reaches {score} with {up} up and {down} down per client in {rounds}."
    second = table[1]
    if second.accuracy == best.accuracy:
        equal = [row.name for row in table if row.accuracy == best.accuracy]
        return (
            text
            + f"{', '.join(equal[:-1])} and {equal[-1]} are equally accurate, the best of {_count(table)}: {score}."
        )
    text += f"{best.name} is the most accurate of {_count(table)}: {score} with {up} up and "
    text += f"{down} down per client in {rounds}"
    assert best.accuracy is not None and second.accuracy is not None
    if best.spread is not None and second.spread is not None:
        if best.accuracy - second.accuracy <= best.spread + second.spread:
            text += f" (its lead over {second.name} is within the spread over seeds)"
    least = min((row for row in table if _total(row)), key=_total, default=best)  # except methods without bytes
    if _total(least) < _total(best):
        score = accuracy_words(least.accuracy, least.spread)
        ratio = _total(best) / _total(least)
        times = f", {ratio:.{0 if ratio >= 10 else 1}f} times less," if ratio >= 1.05 else ""
        text += f". {least.name} exchanges least: {human_bytes(_total(least))} both ways{times} for {score} %"
    return text + "."


def _count(table: Sequence[Row]) -> str:
    methods = len({row.label for row in table})
    rows = "" if methods == len(table) else f" in {len(table)} settings"
    return f"{methods} method{'s' if methods > 1 else ''}{rows}"


def overview(tasks: Sequence[Task]) -> str:
    """The number of tasks and runs, if there is more than one task."""
    runs = sum(len(task.runs) for task in tasks)
    return f"{runs} runs on {len(tasks)} tasks. Methods are ranked within a task only."


def tuning(task: Task) -> str:
    """Which methods run with their default settings, and what was changed in the others, beyond the columns."""
    labels: dict[str, dict[str, None]] = {}
    for row in task.rows:
        own = settings.changed(row.runs[0])
        if own is None:
            continue
        parts = [f"{key} = {_shortened(value)}" for key, value in own.items() if not _is_column(key, task)]
        what = ", ".join(parts) or (_BUT_COLUMNS if own else _DEFAULT)
        labels.setdefault(what, {})[row.label] = None
    usual = [f"{what}: {', '.join(names)}." for what in (_DEFAULT, _BUT_COLUMNS) if (names := labels.pop(what, None))]
    changed = [f"{', '.join(names)} ({what})" for what, names in labels.items()]
    if len(changed) > MOST_CHANGES:
        changed = [*changed[:MOST_CHANGES], f"{len(changed) - MOST_CHANGES} more (see All settings)"]
    return " ".join([*usual, *([f"Changed: {'; '.join(changed)}."] if changed else [])])


def _is_column(key: str, task: Task) -> bool:
    return key in task.columns or f"method.{key}" in task.columns


def _shortened(value: object) -> str:
    text = settings.words(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _total(row: Row) -> float:
    return row.mean_of("bytes_up_per_client") + row.mean_of("bytes_down_per_client")
