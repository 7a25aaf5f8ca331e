"""Sections of the report's page."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from fedstill.report import export, figures, groups, guarantees, html, regression, spending, tables
from fedstill.report.drawing import Plot
from fedstill.report.groups import Group, Row, Series, setting_words
from fedstill.report.markup import joined, part
from fedstill.report.record import TEST, RunRecord, accuracy_words, human_bytes, measure_words, png
from fedstill.runs.folder import Images, RunFolder

IMAGES_PER_CLASS = 5
MOST_CLASSES = 20


def sheet(rows: Sequence[Row]) -> Markup:
    """An HTML table of the images of each row's first run that has any, beside test images; empty without images."""
    chosen = [(row, next((run for run in row.runs if set(run.images or ()) - {TEST}), None)) for row in rows]
    shown = [(row, run) for row, run in chosen if run is not None]
    if not shown:
        return Markup()
    columns: dict[str, tuple[Images, RunRecord]] = {}
    for row, run in shown:
        own = {kind: pair for kind, pair in (run.images or {}).items() if kind != TEST}
        columns |= {row.name if len(own) == 1 else f"{row.name}: {kind}": (pair, run) for kind, pair in own.items()}
    record = shown[0][1]
    if test := (record.images or {}).get(TEST):
        columns[record.summary["judged_on"]] = (test, record)
    return _table(columns, record)


def _table(columns: dict[str, tuple[Images, RunRecord]], record: RunRecord) -> Markup:
    labels = sorted({int(label) for (_, values), _ in columns.values() for label in values})
    slots = {name: _slots(pair) for name, (pair, _) in columns.items()}
    rows = []
    for label in labels[:MOST_CLASSES]:
        name = record.class_name(label)
        strips = [_strip(p, label, slots[c], f"class {name}: {c}") for c, (p, _) in columns.items()]
        rows.append((name, strips))
    seeds = ", ".join(str(seed) for seed in sorted({run.summary["seed"] for _, run in columns.values()}))
    about = f"Seed {seeds}; at most {IMAGES_PER_CLASS} images per class"
    about += f"; {MOST_CLASSES} of {len(labels)} classes" if len(labels) > MOST_CLASSES else ""
    return part("sheet", list(columns), rows, f"{about}.")


def _slots(pair: Images) -> int:
    """Largest number of images to show of a class."""
    return min(IMAGES_PER_CLASS, int(np.unique(pair[1], return_counts=True)[1].max(initial=1)))


def _strip(pair: Images, label: int, slots: int, words: str) -> Markup:
    images, labels = pair
    places = np.flatnonzero(labels == label)
    if not len(places):
        return Markup("–")
    few = places[np.linspace(0, len(places) - 1, min(slots, len(places))).astype(int)]
    _, channels, height, width = images.shape
    # as many slots in each strip of a column, with transparent gaps, so that all strips have one scale
    strip = np.zeros((height, slots * (width + 1) - 1, channels + 1), dtype=np.uint8)
    for slot, image in enumerate(images[few]):
        left = slot * (width + 1)
        strip[:, left : left + width, :channels] = image.transpose(1, 2, 0)
        strip[:, left : left + width, channels] = 255
    return part("image", png(strip), strip.shape[1], height, words)


MOST_CHANGES = 8
LONGEST = 40
"""Number of characters of a setting's value."""
_DEFAULT = "Default settings"
_BUT_COLUMNS = "Default settings except for the columns"


def page_title(tasks: Sequence[Group]) -> str:
    """The title of the page."""
    labels = list(dict.fromkeys(row.label for task in tasks for row in task.rows))
    data = ", ".join(dict.fromkeys(run.summary["data"] for task in tasks for run in task.runs))
    names = labels[0] if len(labels) == 1 else f"{len(labels)} methods"
    return f"{names} on {data}" + (f": {len(tasks)} tasks" if len(tasks) > 1 else "")


def finding(task: Group, *, named: bool = True) -> str:
    """The result of a task in one or two sentences: the most accurate method, and the one with the fewest bytes.

    Args:
        task: the task.
        named: whether to begin with the task.
    """
    if regression.is_numeric(task):
        return regression.finding(task, named=named)
    table = task.ranked
    if not table:
        return f"No finished run on {task.words} has an accuracy."
    text = f"On {task.words}, " if named else ""
    best = table[0]
    if task.measure not in (None, "accuracy"):
        if best.measured(task.measure) is None:
            return f"{text}{task.measure} has no value with all seeds of any method."
        value = measure_words([run.measured(task.measure) for run in best.runs])
        lead = f", the best of {_count(table)}" if len(table) > 1 else ""
        return f"{text}{best.name} has {task.measure} {value}{lead}, and an accuracy of {_accuracy(best)}."
    score = _accuracy(best)
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


def _accuracy(row: Row) -> str:
    return f"{accuracy_words(row.accuracy, row.spread)} %"


def _count(table: Sequence[Row]) -> str:
    methods = len({row.label for row in table})
    rows = "" if methods == len(table) else f" in {len(table)} settings"
    return f"{methods} method{'s' if methods > 1 else ''}{rows}"


def overview(tasks: Sequence[Group]) -> str:
    """The number of tasks and runs, if there is more than one task."""
    runs = sum(len(task.runs) for task in tasks)
    return f"{runs} runs on {len(tasks)} tasks. Methods are ranked within a task only."


def tuning_sentence(task: Group) -> str:
    """Which methods run with their default settings, and what was changed in the others, beyond the columns."""
    labels: dict[str, dict[str, None]] = {}
    for row in task.rows:
        own = groups.changed(row.runs[0])
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


def _is_column(key: str, task: Group) -> bool:
    return key in task.columns or f"method.{key}" in task.columns


def _shortened(value: object) -> str:
    text = groups.value_words(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _total(row: Row) -> float:
    return row.mean_of("bytes_up_per_client") + row.mean_of("bytes_down_per_client")


MOST_REFUSALS = 50
MOST_CLIENTS = 100
MOST_NUMBERS = 20
"""Number of classes up to which a confusion matrix has its numbers in the cells."""
MOST_MATRICES = 6
_FLAG = re.compile(r"(--[a-z][\w.-]*)")


def results(task: Group) -> Markup:
    """The table of a task, the settings that were changed, and each seed's numbers."""
    text, parts = Markup(), tables.blocks(task)
    for i, (heading, rows) in enumerate(parts):
        text += part("strong", heading) if heading else Markup()
        about = tables.caption(task) if i == len(parts) - 1 else ""
        text += html.data_table(tables.headings(rows), tables.cells(rows), tables.text_columns(rows), caption=about)
    for sentence in tables.remarks(task):
        text += part("paragraph", sentence, "note")
    if tuning := tuning_sentence(task):
        text += part("paragraph", tuning, "note")
    headings, lines = tables.logged(task)
    if lines:
        text += html.data_table(headings, lines, (0,), caption="Logged after the last round; means over seeds.")
    headings, lines = tables.each_seed(task)
    if len(lines) > 1:
        text += html.folded("Each seed", html.data_table(headings, lines, (0, len(headings) - 1)))
    return text


def sweep(sweep: Series, look: figures.Look, number: int) -> Markup:
    """A plot of a sweep over one number, and its matrix, or one matrix for each method of a sweep over two settings."""
    plot = figures.over_setting(sweep, look)
    text = html.figure(plot, f"sweep-{number}", sweep_caption(sweep, plot))
    every = [row for line in sweep.series.values() for row in line.values()]
    low, high = (f([row.accuracy or 0.0 for row in every]) for f in (min, max))

    def cell(row: Row | None) -> tuple[str, float | None]:
        if row is None or row.accuracy is None:
            return "–", None
        return accuracy_words(row.accuracy, row.spread), (row.accuracy - low) / ((high - low) or 1.0)

    spread = ", mean ± sample standard deviation over seeds" * any(row.spread is not None for row in every)
    note = f"Accuracy in percent{spread}; a stronger colour is higher."
    if len(sweep.keys) == 1:
        lines = {name: [cell(line.get((value,))) for value in sweep.values[0]] for name, line in sweep.series.items()}
        return text + html.matrix("method", sweep.values[0], lines, across=sweep.keys[0], caption=note)
    down, across = sweep.values
    for name, line in list(sweep.series.items())[:MOST_MATRICES]:
        lines = {value: [cell(line.get((value, other))) for other in across] for value in down}
        text += part("heading", name, 3)
        text += html.matrix(sweep.keys[0], across, lines, across=sweep.keys[1], caption=note)
    rest = len(sweep.series) - MOST_MATRICES
    return text + (part("paragraph", f"{rest} more methods are in table.csv.", "note") if rest > 0 else Markup())


def sweep_caption(sweep: Series, plot: Plot | None) -> str:
    """What the plot of a sweep shows, and from which runs."""
    about = export.of_lines(plot, "methods without this setting")
    return f"{about} {export.source_of(sweep.runs, sweep.task)}".strip()


def partition(task: Group, number: int) -> Markup:
    """The records of each class at each client, for one seed."""
    record = next((run for run in task.runs if run.counts is not None), None)
    if record is None:
        return Markup()
    about, also = (partition_caption(record, note) for note in (figures.BLANK, figures.AREA))
    text = html.figure(figures.records_per_client(record), f"partition-{number}", about)
    dots = html.figure(figures.bubbles(record), f"bubbles-{number}", also)
    text += html.folded("The same as bubbles", dots)
    for sentence in RunFolder(record.folder).read_origin():
        text += part("paragraph", f"{sentence[0].upper()}{sentence[1:]}.", "note")
    if values := _column_values(record):
        assert record.counts is not None
        sizes = record.counts.sum(axis=1)
        lines = [(str(c), *(each[c] for each in values.values()), f"{n:,}") for c, n in enumerate(sizes[:MOST_CLIENTS])]
        rest = len(sizes) - MOST_CLIENTS
        words = f"{rest} more clients are in the run's partition.json." if rest > 0 else ""
        table = html.data_table(("client", *values, "records"), lines, range(len(values) + 1), caption=words)
        text += html.folded(f"Values of {', '.join(values)} at each client", table)
    return text


def _column_values(record: RunRecord) -> dict[str, list[str]]:
    """The column of the partition by:COLUMN with its values at each client, as words; empty for other partitions."""
    found = RunFolder(record.folder).read_column_values()
    clients = 0 if record.counts is None else len(record.counts)
    return {name: [", ".join(each) for each in values] for name, values in found.items() if len(values) == clients}


def partition_caption(record: RunRecord, note: str) -> str:
    """The records of the clients of a run in a sentence, ``note`` on the figure, and where they come from."""
    assert record.counts is not None
    sizes, held = record.counts.sum(axis=1), (record.counts > 0).sum(axis=1)
    caption = f"A client has {_range(sizes)} records "
    classes_held = "all" if held.min() == record.counts.shape[1] else f"{_range(held)} of the"
    caption += f"(median {int(np.median(sizes)):,}) of {classes_held} {record.counts.shape[1]} classes. {note} "
    return caption + export.source_of([record], setting_words(record))


def _range(numbers: np.ndarray) -> str:
    low, high = numbers.min(), numbers.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def per_class(task: Group, look: figures.Look, number: int) -> Markup:
    """Recall of each class as a figure and as a table, and confusion matrices."""
    rates = tables.recalls(task.ranked)
    caption = f"{export.CLASSES} {export.source(task)}"
    text = html.figure(figures.per_class_accuracy(task.ranked, look), f"classes-{number}", caption)
    if rates:
        named = next(run for row in task.ranked for run in row.runs if run.confusion is not None)
        assert named.confusion is not None
        tested = named.confusion.sum(axis=1)
        columns = list(rates.values())
        lines = [
            (named.class_name(c), f"{tested[c]:,}", *(_percent(column[c]) for column in columns))
            for c in range(len(tested))
        ]
        lines += [
            ("balanced accuracy", f"{tested.sum():,}", *(_percent(float(np.nanmean(column))) for column in columns))
        ]
        caption = "Recall in percent, mean over seeds; balanced accuracy is the mean over classes."
        table = html.data_table(("class", "test records", *rates), lines, (0,), caption=caption)
        text += html.folded("Recall of each class as a table", table)
    return text + _confusions(task, number)


def _confusions(task: Group, number: int) -> Markup:
    shown = [row for row in task.ranked if tables.confusion(row) is not None]
    if not shown:
        return Markup()
    text = joined(part("strong", f"Confusion matrix: {shown[0].name}"), _confusion(shown[0], task, number))
    for row in shown[1:]:
        matrix = tables.confusion(row)
        if matrix is not None and len(matrix) <= MOST_NUMBERS:
            text += html.folded(f"Confusion matrix: {row.name}", _confusion(row, task, number))
    return text


def _confusion(row: Row, task: Group, number: int) -> Markup:
    matrix = tables.confusion(row)
    assert matrix is not None
    over = " over all seeds" if len(row.runs) > 1 else ""
    if len(matrix) > MOST_NUMBERS:
        caption = f"Predictions{over}. Colour: percent of the true class; blank: none. {export.source(task)}"
        return html.figure(figures.confusion(row), f"confusion-{number}", caption)
    names = [row.runs[0].class_name(c) for c in range(len(matrix))]
    shares = np.nan_to_num(tables.shares(matrix))
    lines = {}
    for name, counts, percents in zip(names, matrix, shares, strict=True):
        heading = name if name not in lines else f"{name} "
        lines[heading] = [(f"{n:,}" if n else "", p / 100 or None) for n, p in zip(counts, percents, strict=True)]
    caption = f"Number of test records{over}; colour: share of the true class."
    return html.matrix("true", names, lines, across="predicted", caption=caption, dense=True)


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.1f}"


def privacy(tasks: Sequence[Group]) -> Markup:
    """The guarantees in words; rows with the same guarantee share a box, and a row is named with its task if needed."""
    boxes: dict[tuple[bool, str, tuple[str, ...]], list[Row]] = {}
    for row in (row for task in tasks for row in task.rows if row.finished):
        guarantee = row.guarantee
        holds = guarantees.is_finite(guarantee)
        promise = guarantees.words(guarantee) if holds else "no privacy guarantee"
        sent = any(run.summary["bytes_up"] for run in row.runs)
        sentences = guarantees.explained(guarantee, sent=sent)
        boxes.setdefault((holds, promise, sentences), []).append(row)
    places = Counter(name for rows in boxes.values() for name in {row.name for row in rows})
    text = Markup()
    for (holds, promise, sentences), rows in boxes.items():
        names = dict.fromkeys(row.name if places[row.name] == 1 else f"{row.name} on {row.task}" for row in rows)
        text += part("promise", holds, ", ".join(names), promise, [_FLAG.split(sentence) for sentence in sentences])
    for sentence in spending.remarks([run for task in tasks for run in task.runs]):
        text += part("paragraph", sentence, "note")
    return text


def clients(task: Group) -> Markup:
    """The clients' accuracies on their own test records: least, median and largest, and each as a table."""
    columns: dict[str, dict[int, float]] = {}
    for row in task.ranked:
        each: dict[int, list[float]] = {}
        for run in row.runs:
            for entry in run.clients:
                if entry["accuracy"] is not None:
                    each.setdefault(entry["client"], []).append(entry["accuracy"])
        if each:
            columns[row.name] = {client: float(np.mean(values)) for client, values in each.items()}
    if not columns:
        return Markup()
    rows = [
        (name, *(_percent(float(f(list(found.values())))) for f in (np.min, np.median, np.max)))
        for name, found in columns.items()
    ]
    caption = "Accuracy in percent of the clients on their own test records, mean over seeds."
    text = html.data_table(("method", "least", "median", "largest"), rows, (0,), caption=caption)
    shown = sorted({client for found in columns.values() for client in found})
    split = next((values for run in task.runs if (values := _column_values(run))), {})
    lines = [
        (
            str(client),
            *(each[client] if client < len(each) else "–" for each in split.values()),
            *(_percent(found.get(client, float("nan"))) for found in columns.values()),
        )
        for client in shown[:MOST_CLIENTS]
    ]
    rest = len(shown) - MOST_CLIENTS
    words = f"{rest} more clients are in the runs' clients.json." if rest > 0 else ""
    table = html.data_table(("client", *split, *columns), lines, range(1, len(split) + 1), caption=words)
    return text + html.folded("Each client", table)


def by_value(task: Group) -> Markup:
    """The accuracy on the test records of each value of the partition's column, as of each hospital."""
    found = {row.name: [run.by_value for run in row.runs if run.by_value is not None] for row in task.ranked}
    columns = {name: runs for name, runs in found.items() if runs}
    if not columns:
        return Markup()

    def share(cells: Sequence[Sequence[int]]) -> float:
        right = sum(count for true, predicted, count in cells if true == predicted)
        return right / sum(count for *_, count in cells)

    sizes = {value: sum(count for *_, count in cells) for runs in columns.values() for value, cells in runs[0].items()}
    lines = [
        (
            value,
            f"{size:,}",
            *(
                _percent(float(np.mean([share(run[value]) for run in runs if value in run] or [np.nan])))
                for runs in columns.values()
            ),
        )
        for value, size in sizes.items()
    ]
    name = task.rows[0].runs[0].summary["partition"].partition(":")[2]
    caption = f"Accuracy in percent on the test records of each {name}, mean over seeds."
    return html.data_table((name, "test records", *columns), lines, range(1, len(columns) + 2), caption=caption)


def errors_by_value(task: Group) -> Markup:
    """The errors of predicted numbers on the test records of each value of the partition's column."""
    found = regression.by_value(task)
    if found is None:
        return Markup()
    headings, lines, caption = found
    return html.data_table(headings, lines, range(1, len(headings)), caption=caption)


def refusals(task: Group) -> Markup:
    """The replies that were not used."""
    lines = [
        (row.name, str(run.summary["seed"]), str(r.client), r.step, str(r.round or "–"), r.reason)
        for row in task.rows
        for run in row.runs
        for r in run.refused
    ]
    if not lines:
        return Markup()
    rest = len(lines) - MOST_REFUSALS
    words = f"{rest} more are in the runs' summary.json." if rest > 0 else ""
    headings = ("method", "seed", "client", "step", "round", "reason")
    intro = part("paragraph", "These replies were not used. The bytes of those that arrived count.")
    return intro + html.data_table(headings, lines[:MOST_REFUSALS], (0, 3, 5), wide=(5,), caption=words)


def reproduce(records: Sequence[RunRecord], tasks: Sequence[Group], command: str | None) -> Markup:
    """The commands, and all settings."""
    single = list(dict.fromkeys(record.config["command"] for record in records if record.config.get("command")))
    shown = [command] if command else single
    text = html.commands(shown) if shown else Markup()
    if command and single != shown:
        text += html.folded("Each run", html.commands(single))
    configs: dict[str, Any] = {}
    for task in tasks:
        configs |= {f"{row.name} on {task.words}": row.runs[0].config for row in task.rows}
    return text + html.folded("All settings (first seed of each row)", html.listed(configs))


def footer(records: Sequence[RunRecord]) -> Markup:
    """Version, days and environments of the runs; equal for equal runs, whenever the page is made."""
    versions = _distinct(r.config.get("version") or r.summary.get("version") for r in records)
    starts = [start for record in records for start in record.environment]
    days = _distinct(str(start.get("started", ""))[:10] for start in starts)
    verb = "started" if days else "last written"
    days = sorted(days or _distinct(record.date for record in records))
    text = f"{len(records)} run{'s' if len(records) > 1 else ''}"
    text += f" of fedstill {', '.join(versions)}" if versions else ""
    text += f", {verb} {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
    facts = {key: _distinct(start.get(key) for start in starts) for key in dict.fromkeys(k for s in starts for k in s)}
    words = [
        f"{_FACTS.get(key, key)} {', '.join(values)}" for key, values in facts.items() if values and key not in _OWN
    ]
    lines = [f"{text}.", *([f"{'; '.join(words)}."] if words else [])]
    return part("footer", lines)


_OWN = {"started", "fedstill", "folder", "of"}
"""Facts of an environment that the footer has elsewhere, or that are nobody else's business."""
_FACTS = {"commit": "commit of fedstill", "folder_commit": "commit of the working folder", "cpu": "CPU", "blas": "BLAS"}


def _distinct(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
