"""The table of results: one row per method, with mean and spread over seeds."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedstill.experiment.config import FREE, flat
from fedstill.report import guarantees
from fedstill.report.record import RunRecord

HEADINGS = ("method", "accuracy, %", "up/client", "down/client", "rounds", "guarantee", "seconds")
OVER_CLIENTS = "over clients"
"""The last column, if clients evaluate: the spread of their accuracies, in percentage points."""
LEFT = (0, 5)
_OWN_PLACE = {"round", "accuracy", "spread", "bytes_up", "bytes_down", "seconds"}
"""Logged numbers with their own columns or figures."""
# settings that may differ between the seeds of a method
_FREE = FREE | {"seed", "threads", "device"}


def group(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """The records by label, one record per seed, in order of first appearance.

    Runs with the same label that differ in more than the seed get the differing settings in their labels. Of two runs
    with the same settings and seed, the first counts.
    """
    families: dict[str, dict[str, dict[int, RunRecord]]] = {}
    for record in records:
        variant = json.dumps(_settings(record), sort_keys=True, default=str)
        families.setdefault(record.label, {}).setdefault(variant, {}).setdefault(record.summary["seed"], record)
    groups: dict[str, list[RunRecord]] = {}
    for label, variants in families.items():
        settings = [_settings(next(iter(seeds.values()))) for seeds in variants.values()]
        differing = [key for key in _keys(settings) if any(s.get(key) != settings[0].get(key) for s in settings)]
        for setting, seeds in zip(settings, variants.values(), strict=True):
            suffix = ", ".join(f"{key}={setting.get(key)}" for key in differing)
            groups[f"{label} ({suffix})" if suffix else label] = [seeds[seed] for seed in sorted(seeds)]
    return groups


def rows(records: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """The table as JSON, most accurate method first; numbers are means over seeds.

    ``accuracy`` is in [0, 1] or None, ``accuracy_spread`` its sample standard deviation over seeds (None with one
    seed), ``spread_over_clients`` the sample standard deviation of the clients' accuracies (None without). ``epsilon``
    and ``delta``, unrounded or None, are those of ``guarantee``, which holds for every seed.
    """
    table = []
    for label, runs in group(records).items():
        mean, spread = accuracy(runs)
        guarantee = guarantees.weakest(runs)
        table.append(
            {
                "method": label,
                "accuracy": mean,
                "accuracy_spread": spread,
                "seeds": len(runs),
                "bytes_up_per_client": _mean(runs, "bytes_up_per_client"),
                "bytes_down_per_client": _mean(runs, "bytes_down_per_client"),
                "rounds": _mean(runs, "rounds"),
                "guarantee": guarantees.words(guarantee),
                "epsilon": guarantee.epsilon if guarantees.is_finite(guarantee) else None,
                "delta": guarantee.delta if guarantees.is_finite(guarantee) else None,
                "seconds": _mean(runs, "seconds"),
                "spread_over_clients": _spread_over_clients(runs),
            }
        )
    return sorted(table, key=lambda row: -1.0 if row["accuracy"] is None else row["accuracy"], reverse=True)


def cells(records: Iterable[RunRecord]) -> list[tuple[str, ...]]:
    """The table as text, in the order of `headings`."""
    table = rows(records)
    by_clients = any(row["spread_over_clients"] is not None for row in table)
    return [
        (
            row["method"],
            accuracy_words(row["accuracy"], row["accuracy_spread"]),
            human_bytes(row["bytes_up_per_client"]),
            human_bytes(row["bytes_down_per_client"]),
            f"{row['rounds']:.4g}",
            row["guarantee"],
            f"{row['seconds']:.1f}" if row["seconds"] < 100 else f"{row['seconds']:.0f}",
            *([_points(row["spread_over_clients"])] if by_clients else []),
        )
        for row in table
    ]


def headings(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """The headings of `cells`."""
    by_clients = any(_spread_over_clients([record]) is not None for record in records)
    return (*HEADINGS, OVER_CLIENTS) if by_clients else HEADINGS


def logged(records: Sequence[RunRecord]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Other numbers logged after the last round: headings, and a row for each method; means over seeds."""
    last: dict[str, dict[str, list[float]]] = {}
    for label, runs in group(records).items():
        values = last.setdefault(label, {})
        for name, value in (pair for run in runs if run.metrics for pair in others(run.metrics[-1]).items()):
            values.setdefault(name, []).append(value)
    names = list(dict.fromkeys(name for values in last.values() for name in values))
    lines = [
        (label, *(f"{np.mean(values[name]):.4g}" if name in values else "–" for name in names))
        for label, values in last.items()
        if values
    ]
    return ("method", *names), lines


def others(metric: Mapping[str, Any]) -> dict[str, float]:
    """The method's own finite numbers in a line of ``metrics.jsonl``."""
    return {
        name: float(value)
        for name, value in metric.items()
        if name not in _OWN_PLACE and isinstance(value, int | float) and math.isfinite(value)
    }


def caption(records: Sequence[RunRecord]) -> str:
    """The caption of the table."""
    seeds = sorted({len(runs) for runs in group(records).values()})
    judged = " or ".join(dict.fromkeys(record.summary["judged_on"] for record in records))
    apart = " Over clients: the sample standard deviation of their own accuracies, in points."
    apart = apart if OVER_CLIENTS in headings(records) else ""
    if seeds == [1]:
        return f"Accuracy on {judged}; one seed, so the spread over seeds is unknown.{apart}"
    over = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"Accuracy on {judged}: mean ± sample standard deviation over {over} seeds.{apart}"


def terminal(records: Sequence[RunRecord]) -> Table:
    """The table for the terminal."""
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table(caption=Text(caption(records)), caption_justify="left", **style)
    for i, heading in enumerate(headings(records)):
        if i in LEFT:
            table.add_column(heading, overflow="fold", min_width=6)
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    for row in cells(records):
        table.add_row(*map(Text, row))  # rich would parse [brackets] in a label otherwise
    return table


def markdown(records: Sequence[RunRecord]) -> str:
    """The table in Markdown, with its caption."""
    top = headings(records)
    lines = [top, tuple("---" if i in LEFT else "---:" for i in range(len(top)))]
    lines += [tuple(map(_escape_markdown, row)) for row in cells(records)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{caption(records)}\n"


def csv_text(records: Iterable[RunRecord]) -> str:
    """The `rows` as CSV."""
    table = rows(records)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def finding(records: Sequence[RunRecord]) -> str:
    """The result in one or two sentences: the most accurate method, and the method with the fewest bytes."""
    table = [row for row in rows(records) if row["accuracy"] is not None]
    if not table:
        return "No run recorded an accuracy."
    best = table[0]
    where = setting_words(records)
    score = f"{accuracy_words(best['accuracy'], best['accuracy_spread'])} %"
    up, down = human_bytes(best["bytes_up_per_client"]), human_bytes(best["bytes_down_per_client"])
    rounds = f"{best['rounds']:.4g} round{'s' if best['rounds'] != 1 else ''}"
    if len(table) == 1:
        return f"On {where}, {best['method']} reaches {score} with {up} up and {down} down per client in {rounds}."
    text = f"On {where}, {best['method']} is the most accurate of {len(table)} methods: {score} with {up} up and "
    text += f"{down} down per client in {rounds}"
    second = table[1]
    if None not in (best["accuracy_spread"], second["accuracy_spread"]):
        if best["accuracy"] - second["accuracy"] <= best["accuracy_spread"] + second["accuracy_spread"]:
            text += f" (its lead over {second['method']} is within the spread over seeds)"
    least = min((row for row in table if _total(row)), key=_total, default=best)  # except methods without bytes
    if _total(least) < _total(best):
        score = accuracy_words(least["accuracy"], least["accuracy_spread"])
        ratio = _total(best) / _total(least)
        times = f"{ratio:.0f} times less" if ratio >= 10 else f"{ratio:.1f} times less"
        text += f". {least['method']} exchanges least: {human_bytes(_total(least))} both ways, {times}, for {score} %"
    return text + "."


def setting_words(records: Iterable[RunRecord]) -> str:
    """The setting of all records in words: data, partition and clients."""
    settings = {tuple(record.summary[key] for key in ("data", "partition", "clients")) for record in records}
    if len(settings) > 1:
        return f"{len(settings)} different settings"
    data, partition, clients = next(iter(settings))
    return f"{data} (partition {partition}, {clients} client{'s' if clients != 1 else ''})"


def accuracy(runs: Sequence[RunRecord]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the accuracy, in [0, 1]; None for too few seeds."""
    values = [run.summary["accuracy"] for run in runs if run.summary["accuracy"] is not None]
    mean = float(np.mean(values)) if values else None
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else None


def accuracy_words(mean: float | None, spread: float | None) -> str:
    """``"92.31 ± 0.18"`` in percent, or only one number, or a dash."""
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}" + (f" ± {100 * spread:.2f}" if spread is not None else "")


def human_bytes(count: float) -> str:
    """Three significant digits in decimal units: ``"78.5 kB"``, ``"1.27 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _total(row: dict[str, Any]) -> float:
    return float(row["bytes_up_per_client"] + row["bytes_down_per_client"])


def _spread_over_clients(runs: Sequence[RunRecord]) -> float | None:
    spreads = [run.summary.get("spread_over_clients") for run in runs]
    known = [spread for spread in spreads if spread is not None]
    return float(np.mean(known)) if known else None


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"


def _mean(runs: Sequence[RunRecord], key: str) -> float:
    return float(np.mean([run.summary[key] for run in runs]))


def _settings(record: RunRecord) -> dict[str, Any]:
    task = {key: value for key, value in record.config["experiment"].items() if key not in _FREE}
    own = {f"method.{key}" if key in task else key: value for key, value in record.config["method"].items()}
    return flat(task | own)


def _keys(settings: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for setting in settings for key in setting))


def _escape_markdown(text: str) -> str:
    for character in "\\`*_[]|":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
