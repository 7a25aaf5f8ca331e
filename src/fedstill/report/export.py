"""The tables as files: CSV, Markdown, LaTeX, and a tidy table of runs."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.base import files
from fedstill.privacy.guarantee import Guarantee
from fedstill.report import caveats, groups, guarantees, pareto, spending, tables
from fedstill.report.drawing import Plot
from fedstill.report.groups import Group, group, task_settings
from fedstill.report.record import RunRecord
from fedstill.report.tables import balanced_accuracy

COURSE = "Other numbers logged after each round; means over seeds."
CLASSES = "Recall (sensitivity), mean over seeds."
SINGLE = "a method with a single value"
_SHORT = 10
"""Number of digits of a commit."""


def of_bytes(plots: Mapping[Any, Plot]) -> str:
    """What figures of accuracy against bytes show: bars are named where they have some."""
    bars = any(line.bars and any(line.spread) for plot in plots.values() for line in plot.lines)
    return "Mean over seeds; bars span one sample standard deviation. " * bars + "Up and to the left is better."


def of_lines(plot: Plot | None, dotted: str) -> str:
    """What a figure of lines shows: its bands, and the lines that are ``dotted``, where it has some."""
    lines, parts = plot.lines if plot else (), []
    if any(line.spread for line in lines):
        parts.append("Mean over seeds, with a band of one sample standard deviation.")
    if any(line.dash == ":" for line in lines):
        parts.append(f"Dotted: {dotted}.")
    return " ".join(parts)


def source(task: Group) -> str:
    """Data, partition, clients, model and seeds of a task, and the version and commits of its runs, as a sentence."""
    return source_of(task.runs, task.words)


def source_of(records: Iterable[RunRecord], words: str) -> str:
    """As `source`, for some runs on a task that ``words`` name."""
    runs = list(records)
    models = _distinct(task_settings(run)["model"] for run in runs)
    seeds = sorted({int(run.summary["seed"]) for run in runs})
    some = ", ".join(map(str, seeds)) if seeds[-1] - seeds[0] != len(seeds) - 1 or len(seeds) < 4 else ""
    parts = [
        f"Data: {words}",
        *([f"model {', '.join(models)}"] if "model " not in words else []),
        f"seed{'s' if len(seeds) > 1 else ''} {some or f'{seeds[0]} to {seeds[-1]}'}",
        *(f"fedstill {version}" for version in _distinct(run.summary.get("version") for run in runs)),
    ]
    starts = [start for run in runs for start in run.environment]
    own, theirs = (_distinct(start.get(key) for start in starts) for key in ("commit", "folder_commit"))
    parts += [f"commit {_short(commit)}" for commit in own]
    parts += [f"working folder at commit {_short(commit)}" for commit in theirs if commit not in own]
    return "; ".join(parts) + "."


def _short(commit: str) -> str:
    digits, plus, changes = commit.partition("+")
    return digits[:_SHORT] + plus + changes


def _distinct(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value not in (None, "")))


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
    "\n": " ",
}

_FIT = "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"


def write_tables(records: Sequence[RunRecord], out: Path, *, latex: bool = False, markdown: bool = False) -> list[Path]:
    """Write ``table.json``, ``table.csv`` and ``runs.csv`` to ``out``, and return the others that were asked for.

    Args:
        records: the runs.
        out: the folder.
        latex: whether to write ``table.tex``.
        markdown: whether to write ``table.md``.
    """
    rows, tasks, spent = tables.rows(records), group(records), spending.remarks(records)
    files.write_json(out / "table.json", {"rows": rows, "remarks": [*_on_accuracies(tasks), *spent]})
    own = [tables.row_remarks(row) for task in tasks for row in task.rows]
    files.write_bytes(out / "table.csv", table_csv(rows, [[*some, *spent] for some in own]).encode())
    each = [[*caveats.of_rows([(record.label, [record])] * record.finished), *spent] for record in records]
    lines = [{**run, "remarks": said} for run, said in zip(runs(records), each, strict=True)]
    files.write_bytes(out / "runs.csv", csv_text(lines).encode())
    asked = [(out / "table.tex", latex_text)] if latex else []
    asked += [(out / "table.md", markdown_text)] if markdown else []
    for file, text in asked:
        files.write_bytes(file, text(records).encode())
    return [file for file, _ in asked]


def told(records: Sequence[RunRecord]) -> list[str]:
    """All sentences that a reader of these runs' numbers must be told: on their accuracies, and on their guarantees."""
    return [*_on_accuracies(group(records)), *spending.remarks(records)]


def _on_accuracies(tasks: Iterable[Group]) -> Iterator[str]:
    return (sentence for task in tasks for sentence in tables.remarks(task))


def table_csv(rows: Sequence[Mapping[str, Any]], remarks: Sequence[Sequence[str]] | None = None) -> str:
    """The rows of `tables.rows` as CSV, with the guarantee in words, and the ``remarks`` on each."""
    cells = [
        {
            **row,
            "guarantee": row["guarantee"] and guarantees.words(Guarantee(**row["guarantee"])),
            "remarks": said,
        }
        for row, said in zip(rows, remarks or [()] * len(rows), strict=True)
    ]
    return csv_text(cells)


def write_fronts(pictures: Sequence[pareto.Picture], out: Path, said: Sequence[str] = ()) -> list[Path]:
    """Write ``pareto.csv``, ``pareto.md`` and a figure for each picture and cost to ``out``, and return the paths.

    What is ``said`` of the runs (`told`) stands in each row and below the tables.
    """
    if not pictures:
        return []
    below = f"\n{_markdown(' '.join(said))}\n" if said else ""
    texts = {
        "pareto.csv": csv_text([{**line, "remarks": said} for line in pareto.lines(pictures)]),
        "pareto.md": "\n".join(map(_front, pictures)) + below,
    }
    for i, picture in enumerate(pictures):
        number = f"-{i + 1}" if len(pictures) > 1 else ""
        texts |= {f"pareto-{cost}{number}.svg": text for cost, text in pareto.cost_figures(picture).items()}
    for name, text in texts.items():
        files.write_bytes(out / name, text.encode())
    return [out / name for name in texts]


def _front(picture: pareto.Picture) -> str:
    words = (0, len(pareto.HEADINGS) - 1)
    lines = [pareto.HEADINGS, tuple("---" if i in words else "---:" for i in range(len(pareto.HEADINGS)))]
    lines += [tuple(map(_markdown, row)) for row in pareto.cells(picture)]
    return f"**{_markdown(picture.words)}**\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def runs(records: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """One dictionary per run: its results, then every setting of the experiment and of its method.

    ``method`` is the method's name and ``label`` the name in tables. ``data_set`` has the first digits of the digest of
    all records: runs with others have other tasks. ``accuracy`` is in [0, 1]; with a number as the target there are
    ``rmse``, ``mae`` and ``r2``. Bytes are sums over the clients, except ``..._per_client``. A method's setting whose
    name is taken has ``method.`` in front. All dictionaries have the same keys; a setting that a method does not have
    is None.
    """
    lines = [_run(record) for record in records]
    keys = list(dict.fromkeys(key for line in lines for key in line))
    return [{key: line.get(key) for key in keys} for line in lines]


def _run(record: RunRecord) -> dict[str, Any]:
    summary, guarantee = record.summary, record.guarantee
    task = groups.task_settings(record)
    first = ("data", "partition", "clients", "model", "seed")
    finite = record.finished and guarantees.is_finite(guarantee)
    return {
        "label": record.label,
        "method": groups.method_name(record),
        **{key: task[key] for key in first},
        "data_set": groups.data_set(record),
        "state": record.state,
        **({"measured": asked["value"]} if (asked := record.get("measure")) else {}),
        "accuracy": summary["accuracy"],
        **(record.get("errors") or {}),
        "balanced_accuracy": balanced_accuracy(record),
        "spread_over_clients": summary.get("spread_over_clients"),
        "rounds": summary["rounds"],
        **{key: summary[key] for key in ("bytes_up", "bytes_down", "bytes_up_per_client", "bytes_down_per_client")},
        "guarantee": guarantees.words(guarantee) if record.finished else None,
        "epsilon": guarantee.epsilon if finite else None,
        "delta": guarantee.delta if finite else None,
        "unit": guarantee.unit if finite else None,
        "exposed": guarantee.exposed if finite else None,
        "seconds": summary["seconds"],
        "folder": str(record.folder),
        **{_free(key): value for key, value in task.items() if key not in first},
        **groups.method_settings(record),
    }


def _free(key: str) -> str:
    """The name of an experiment's setting; delta is a result too."""
    return f"experiment.{key}" if key in ("delta",) else key


def csv_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Dictionaries with the same keys as CSV; lists are words with spaces.

    A text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {
            key: _csv_cell(" ".join(map(str, value)) if isinstance(value, list | tuple) else value)
            for key, value in line.items()
        }
        for line in table
    )
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def markdown_text(records: Sequence[RunRecord]) -> str:
    """The tables in Markdown, each with its task and caption."""
    tasks, said = group(records), spending.remarks(records)
    return "\n".join(
        (f"**{_markdown(task.words)}**\n\n" if len(tasks) > 1 else "") + _one(task, said) for task in tasks
    )


def _one(task: Group, said: Sequence[str]) -> str:
    parts = [(f"*{heading}*\n\n" if heading else "") + _rows(part) for heading, part in tables.blocks(task)]
    return "\n\n".join(parts) + f"\n\n{_markdown(_caption(task, said))}\n"


def _rows(task: Group) -> str:
    words = tables.text_columns(task)
    lines = [tuple(map(_markdown, tables.headings(task)))]
    lines += [tuple("---" if i in words else "---:" for i in range(len(lines[0])))]
    lines += [tuple(map(_markdown, row)) for row in tables.cells(task)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _caption(task: Group, said: Sequence[str]) -> str:
    """The caption of a table, with all that a reader must be told beside its numbers."""
    return " ".join((tables.caption(task), *tables.remarks(task), *said, source(task)))


def latex_text(records: Sequence[RunRecord]) -> str:
    """The tables with their captions and the rules of booktabs, over both columns of a page.

    A table that is still wider is reduced to the page's width.
    """
    text = "% \\usepackage{booktabs, graphicx}\n% pdfLaTeX has Latin letters only; for names in others take LuaLaTeX\n"
    said = spending.remarks(records)
    for number, task in enumerate(group(records), 1):
        words = tables.text_columns(task)
        top = tables.headings(task)
        columns = "".join("l" if i in words else "r" for i in range(len(top)))
        lines = "\\midrule\n".join(_block(heading, part, len(top)) for heading, part in tables.blocks(task))
        about = latex(_caption(task, said))
        text += f"\n\\begin{{table*}}\n\\centering\\small\n\\caption{{{about}}}\n\\label{{tab:{number}}}\n"
        text += f"{_FIT}\\begin{{tabular}}{{{columns}}}\n\\toprule\n{' & '.join(map(latex, top))} \\\\\n\\midrule\n"
        text += f"{lines}\\bottomrule\n\\end{{tabular}}}}\n\\end{{table*}}\n"
    return text


def _block(heading: str, task: Group, columns: int) -> str:
    """The rows of a part of a table, below its heading, if it has one."""
    above = f"\\multicolumn{{{columns}}}{{l}}{{\\emph{{{latex(heading)}}}}} \\\\\n" if heading else ""
    return above + "".join(" & ".join(map(latex, line)) + " \\\\\n" for line in tables.cells(task))


def latex(text: str) -> str:
    """Text without commands of LaTeX."""
    return "".join(_LATEX.get(character, character) for character in text)


def _markdown(text: str) -> str:
    for character in "\\`*_[]|":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
