"""The report: one HTML page that needs no network, no server and no other file."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedstill import files
from fedstill.report import guarantees, plots, sheets, tables
from fedstill.report.record import RunRecord

MOST_REFUSALS = 50
MOST_SETTINGS = 4

# forbids the browser to fetch anything, whatever a label or a name contains
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #57606a; --line: #d5dae0; --box: #f5f7f9;
  --bad: #9a3412; --bad-back: #fff3ea; --good: #116149; --good-back: #e8f6f0; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --text: #e4e8ec; --soft: #a3adb8; --line: #363d46;
  --box: #1d2228; --bad: #ffb489; --bad-back: #33211a; --good: #7fdcb9; --good-back: #14291f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .4rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.finding { font-size: 1.15rem; }
.note, figcaption, caption { color: var(--soft); font-size: .9rem; }
figure { margin: .6rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; padding-top: .5rem; }
.data th, .data td { padding: .4rem .8rem .4rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; overflow-wrap: normal; }
.data th { font-weight: 600; } .data .words { text-align: left; } .data .wide { white-space: normal; min-width: 14rem; }
.sheet { width: 100%; max-width: 44rem; }
.sheet th { font-weight: 500; text-align: left; font-size: .85rem; padding-right: .5rem; max-width: 6rem;
  overflow-wrap: break-word; }
.sheet td { padding: 2px 8px 2px 0; vertical-align: middle; } .sheet thead th { color: var(--soft); }
.sheet img { display: block; width: 100%; height: auto; image-rendering: pixelated; }
.promise { border-left: 4px solid var(--good); background: var(--good-back); padding: .6rem .9rem; margin: .7rem 0; }
.promise.none { border-color: var(--bad); background: var(--bad-back); }
.promise strong { color: var(--good); } .promise.none strong { color: var(--bad); }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .8rem; font-size: .85rem;
  overflow-x: auto; }
summary { cursor: pointer; } :focus-visible { outline: 2px solid #3a93ce; outline-offset: 2px; }
.js-plotly-plot .main-svg text:not(.hovertext text):not(.nums):not(.name) { fill: var(--text) !important; }
"""


def write_report(records: Sequence[RunRecord], path: str | Path, *, command: str | None = None) -> None:
    """Write the report of one or more runs to ``path``, atomically.

    Args:
        records: the runs; runs with the same label are seeds of one method.
        path: the HTML file, which is overwritten.
        command: the command of all runs, such as a comparison; each run's command is shown if None.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("a report needs at least one finished run; give the folder of one")
    files.write_bytes(Path(path), _page(records, command).encode())


def _page(records: Sequence[RunRecord], command: str | None) -> str:
    groups = tables.group(records)
    datasets = ", ".join(dict.fromkeys(record.summary["data"] for record in records))
    title = f"{next(iter(groups)) if len(groups) == 1 else f'{len(groups)} methods'} on {datasets}"
    finding = tables.finding(records).replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")
    sections = [
        section("Results", _table(records)),
        section("Accuracy against bytes", _against_bytes(records)),
        section("Accuracy per round", figure(plots.accuracy_per_round(records), "rounds", ROUNDS_NOTE)),
        section("Other numbers per round", figure(plots.course(records), "course", COURSE_NOTE)),
        section("Records of each client", _partitions(records)),
        section("Sample images", sheets.sheets(groups)),
        section("Accuracy per class", _classes(records, groups)),
        section("Privacy guarantees", _guarantees(groups)),
        section("Refused replies", _refusals(groups)),
        section("Reproduce", _reproduce(records, command)),
    ]
    body = f'<h1>{escape(title)}</h1>\n<p class="finding">{escape(finding)}</p>\n' + "".join(sections)
    return framed(title, body)


def framed(title: str, body: str) -> str:
    """A whole page, with plotly's script if there are figures."""
    from plotly.offline import get_plotlyjs

    script = f"<script>{get_plotlyjs()}</script>\n" if PLOT_CLASS in body else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{script}</head>\n"
        f"<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


PLOT_CLASS = "plotly-graph-div"
BYTES_NOTE = "Mean over seeds; bars span one sample standard deviation. Up and to the left is better."
ROUNDS_NOTE = "Mean over seeds, with a band of one sample standard deviation. Dotted: a method with a single value."
LOGGED_NOTE = "Other numbers logged after the last round; means over seeds."
COURSE_NOTE = "Other numbers logged after each round; means over seeds."


def _against_bytes(records: Sequence[RunRecord]) -> str:
    ways: dict[plots.Way, str] = {"up and down": BYTES_NOTE, "up": "Bytes up alone.", "down": "Bytes down alone."}
    texts = (
        figure(plots.accuracy_against_bytes(records, way), f"bytes-{way.replace(' ', '-')}", note)
        for way, note in ways.items()
    )
    return "".join(texts)


def section(heading: str, content: str) -> str:
    """A section; empty without content."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{content}</section>\n" if content else ""


def figure(plot: Any | None, name: str, caption: str) -> str:
    """A plotly figure with a caption; empty if there is none."""
    if plot is None:
        return ""
    config = {"responsive": True, "displaylogo": False, "modeBarButtons": [["zoom2d", "resetScale2d", "toImage"]]}
    text = plot.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"figure-{name}",
        config=config,
        default_height=f"{plot.layout.height}px",
    )
    return f"<figure>\n{text}\n<figcaption>{escape(caption)}</figcaption>\n</figure>\n"


def _table(records: Sequence[RunRecord]) -> str:
    table = data_table(tables.headings(records), tables.cells(records), tables.LEFT, caption=tables.caption(records))
    headings, lines = tables.logged(records)
    return table + (data_table(headings, lines, (0,), caption=LOGGED_NOTE) if lines else "")


def data_table(
    headings: Sequence[str],
    lines: Iterable[Sequence[str]],
    words: Sequence[int],
    *,
    wide: Sequence[int] = (),
    caption: str = "",
) -> str:
    """A table; ``words`` are the columns of text, ``wide`` the columns that may wrap."""
    kinds = [" ".join(["words"] * (i in words) + ["wide"] * (i in wide)) for i in range(len(headings))]
    head = "".join(f'<th scope="col" class="{k}">{escape(h)}</th>' for h, k in zip(headings, kinds, strict=True))
    body = ""
    for line in lines:
        first, *rest = (escape(cell) for cell in line)
        body += f'<tr><th scope="row" class="{kinds[0]}">{first}</th>'
        body += "".join(f'<td class="{k}">{cell}</td>' for cell, k in zip(rest, kinds[1:], strict=True)) + "</tr>\n"
    about = f"<p class='note'>{escape(caption)}</p>\n" if caption else ""
    table = f'<table class="data"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>'
    return f'<div class="scroll" tabindex="0">{table}</div>\n{about}'


def _partitions(records: Sequence[RunRecord]) -> str:
    settings = {(r.summary["data"], r.summary["partition"], r.summary["clients"]): r for r in reversed(records)}
    shown = [record for record in reversed(settings.values()) if record.counts is not None]
    text = ""
    for i, record in enumerate(shown[:MOST_SETTINGS]):
        assert record.counts is not None
        sizes, classes = record.counts.sum(axis=1), (record.counts > 0).sum(axis=1)
        words = f"{tables.setting_words([record])}, seed {record.summary['seed']}: a client has "
        words += f"{sizes.min():,} to {sizes.max():,} records, {int(np.median(sizes)):,} in the median, of "
        words += (
            f"{classes.min()} to {classes.max()} of the {record.counts.shape[1]} classes. Colour: records; blank: none."
        )
        text += figure(plots.records_per_client(record), f"partition-{i}", words)
    if len(shown) > MOST_SETTINGS:
        text += f'<p class="note">{len(shown) - MOST_SETTINGS} more settings are not shown.</p>\n'
    return text


def _classes(records: Sequence[RunRecord], groups: dict[str, list[RunRecord]]) -> str:
    text = figure(plots.per_class_accuracy(records), "classes", "Mean over seeds, on the records of the class.")
    best = max(groups, key=lambda label: tables.accuracy(groups[label])[0] or 0.0)
    caption = f"{best}: predictions for the records of each class, over all seeds. Colour: percent; blank: none."
    confused = figure(plots.confusion(groups[best]), "confusion", caption)
    return text + (f"<h3>Confusion matrix</h3>\n{confused}" if confused else "")


def _guarantees(groups: dict[str, list[RunRecord]]) -> str:
    text = ""
    for label, runs in groups.items():
        guarantee = guarantees.weakest(runs)
        holds = guarantees.is_finite(guarantee)
        promise = guarantees.words(guarantee) if holds else "no privacy guarantee"
        sent = any(run.summary["bytes_up"] for run in runs)
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in guarantees.explained(guarantee, sent=sent))
        head = f"<strong>{escape(label)}: {escape(promise)}</strong>"
        text += f'<div class="promise{"" if holds else " none"}">{head}{words}</div>\n'
    return text


def _refusals(groups: dict[str, list[RunRecord]]) -> str:
    lines = [
        (label, str(run.summary["seed"]), str(r.client), r.step, str(r.round or "–"), r.reason)
        for label, runs in groups.items()
        for run in runs
        for r in run.refused
    ]
    if not lines:
        return ""
    rest = len(lines) - MOST_REFUSALS
    words = f"{rest} more are in the runs' summary.json." if rest > 0 else ""
    headings = ("method", "seed", "client", "step", "round", "reason")
    intro = "<p>These replies were not used; their bytes count.</p>\n"
    return intro + data_table(headings, lines[:MOST_REFUSALS], (0, 3, 5), wide=(5,), caption=words)


def _reproduce(records: Sequence[RunRecord], command: str | None) -> str:
    single = list(dict.fromkeys(record.config["command"] for record in records if record.config.get("command")))
    shown = [command] if command else single
    text = f'<pre tabindex="0">{escape(chr(10).join(shown))}</pre>\n' if shown else ""
    if command and single != shown:
        text += f"<details><summary>Each run</summary><pre>{escape(chr(10).join(single))}</pre></details>\n"
    settings = {label: runs[0].config for label, runs in tables.group(records).items()}
    full = escape(json.dumps(settings, indent=2, default=str))
    return text + f"<details><summary>All settings (first seed of each method)</summary><pre>{full}</pre></details>\n"
