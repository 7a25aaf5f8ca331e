"""Runs are ranked within a task; settings are columns; a sweep is a plot and a matrix; unfinished runs are marked."""

import csv
import io
import itertools
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from report_pages import PRIVATE, Outline, add_parts, only_task, page, write_run
from rich.console import Console

from fedstill.cli import main
from fedstill.report import drawing, export, figures, groups, sections, tables
from fedstill.report.groups import group
from fedstill.report.record import RunRecord, find_runs, plain, read_run
from fedstill.runs.journal import WITHDRAWN


def sweep_runs(
    folder: Path, values: tuple[str, ...] = ("dirichlet:0.1", "dirichlet:0.5", "dirichlet:5")
) -> list[RunRecord]:
    """Two methods, two seeds, each partition; accuracies rise by 10 points from one to the next."""
    runs = []
    for i, value in enumerate(values):
        for label, low in (("fedavg", 0.3), ("real", 0.6)):
            for seed in range(2):
                accuracy = low + 0.1 * i + 0.02 * seed
                place = folder / f"{i}" / label / f"seed-{seed}"
                runs.append(write_run(place, label=label, method=label, seed=seed, partition=value, accuracy=accuracy))
    return [read_run(run) for run in runs]


def look(records: list[RunRecord]) -> figures.Look:
    names = [row.name for task in group(records) for row in task.rows]
    return figures.styles(dict.fromkeys([*names, *(name for s in groups.find(group(records)) for name in s.series)]))


# ---------------------------------------------------------------------------------------------------------- the tasks


def test_methods_are_ranked_within_a_task_only(tmp_path: Path) -> None:
    easy = write_run(tmp_path / "a", label="real", data="digits", accuracy=0.99)
    hard = [
        write_run(tmp_path / label, label=label, data="letters", accuracy=accuracy)
        for label, accuracy in (("fedavg", 0.5), ("fedgm", 0.8))
    ]
    records = [read_run(run) for run in (easy, *hard)]
    digits, letters = group(records)
    assert [row.label for row in letters.rows] == ["fedgm", "fedavg"]
    assert "fedgm is the most accurate of 2 methods" in sections.finding(letters)
    assert sections.finding(digits).startswith("On digits (partition iid, 2 clients), real reaches 99.00 %")
    words = Outline(page(records, tmp_path)).words
    assert "most accurate of 3" not in words and "3 runs on 2 tasks" in words
    assert "fedgm is the most accurate of 2 methods: 80.00" in words
    assert [(row["data"], row["label"]) for row in tables.rows(records)] == [
        ("digits", "real"),
        ("letters", "fedgm"),
        ("letters", "fedavg"),
    ]


def test_equal_accuracies_have_no_winner(tmp_path: Path) -> None:
    for label, accuracy in (("fedavg", 0.5), ("fedgm", 0.8), ("real", 0.8)):
        write_run(tmp_path / label, label=label, accuracy=accuracy)
    (task,) = group([read_run(tmp_path / label) for label in ("fedavg", "fedgm", "real")])
    words = sections.finding(task)
    assert "fedgm and real are equally accurate, the best of 3 methods: 80.00 %." in words
    assert "most accurate" not in words


@pytest.mark.parametrize(
    ("setting", "first", "second"),
    [
        ("clients", 2, 4),
        ("model", "convnet", "lenet"),
        ("limit", None, 100),
        ("validation", 0.0, 0.1),
        ("local_test", 0.0, 0.2),
    ],
)
def test_runs_that_differ_in_the_task_are_not_compared(tmp_path: Path, setting: str, first: Any, second: Any) -> None:
    records = []
    for i, value in enumerate((first, second)):
        run = write_run(tmp_path / str(i), accuracy=0.5, **({"clients": value} if setting == "clients" else {}))
        config = json.loads((run / "config.json").read_text())
        config["experiment"][setting] = value
        (run / "config.json").write_text(json.dumps(config))
        records.append(read_run(run))
    assert len(group(records)) == 2
    assert len({task.words for task in group(records)}) == 2


def test_another_data_set_of_the_same_name_is_another_task(tmp_path: Path) -> None:
    records = []
    for i in range(2):
        run = write_run(tmp_path / str(i))
        config = json.loads((run / "config.json").read_text()) | {"fingerprint": f"{i}" * 64}
        (run / "config.json").write_text(json.dumps(config))
        records.append(read_run(run))
    words = [task.words for task in group(records)]
    assert words == [f"digits (partition iid, 2 clients, data set {i * 8})" for i in ("0", "1")]
    assert "data set" not in group(records[:1])[0].words


def test_settings_that_differ_are_columns_and_no_part_of_the_name(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", label="fedavg", accuracy=0.7, setting={"local": {"lr": 0.1, "epochs": 5}}),
        write_run(tmp_path / "b", label="fedavg", accuracy=0.6, setting={"local": {"lr": 0.01, "epochs": 5}}),
        write_run(tmp_path / "c", label="real", accuracy=0.5, method="real", setting={"ipc": 1}),
    ]
    records = [read_run(run) for run in runs]
    task = only_task(records)
    assert tables.headings(task)[:2] == ("method", "local.lr")
    assert [line[:2] for line in tables.cells(task)] == [("fedavg", "0.1"), ("fedavg", "0.01"), ("real", "–")]
    assert [(row["label"], row["local.lr"]) for row in tables.rows(records)] == [
        ("fedavg", 0.1),
        ("fedavg", 0.01),
        ("real", None),
    ]
    first, second, third = csv.DictReader(io.StringIO(export.table_csv(tables.rows(records))))
    assert (first["label"], first["local.lr"], third["local.lr"]) == ("fedavg", "0.1", "")
    assert second["partition"] == "iid"


def test_rounds_are_no_second_column_where_the_run_had_as_many(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{n}", label=f"l{n}", rounds=n, setting={"rounds": n}) for n in (1, 2)]
    records = [read_run(run) for run in runs]
    assert only_task(records).columns == []
    short = write_run(tmp_path / "short", label="l3", rounds=3, setting={"rounds": 9})  # it stopped before
    assert only_task([*records, read_run(short)]).columns == ["method.rounds"]


def test_rows_that_differ_in_rounds_alone_have_names_of_their_own(tmp_path: Path) -> None:
    """Figures have a line for each name; the worst row took the place of all."""
    runs = [write_run(tmp_path / f"{n}", rounds=n, setting={"rounds": n}, accuracy=0.3 * n) for n in (1, 2, 3)]
    task = only_task([read_run(add_parts(run)) for run in runs])
    assert task.columns == [] and [row.name for row in task.rows] == [f"fedgm (method.rounds {n})" for n in (3, 2, 1)]
    figure = figures.accuracy_against_bytes_of(task.rows, figures.styles([row.name for row in task.rows]), "up")
    assert figure is not None and len(figure.lines) == 3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"code": {"own.py:Own": "ab" * 32}}, "code"),
        ({"public_fingerprint": "cd" * 32}, "public records"),
        ({"refused": [{"client": 1, "step": "update", "round": None, "reason": WITHDRAWN}]}, "without client"),
    ],
)
def test_other_code_other_public_records_and_fewer_clients_are_other_rows(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    """Two seeds of them have no common mean, and of two equal seeds none is left out."""
    runs = [write_run(tmp_path / f"{i}", seed=seed, accuracy=0.5 + 0.1 * i) for i, seed in enumerate((0, 1, 0))]
    for run in runs[1:]:
        for name in ("config.json", "summary.json"):
            if (name == "summary.json") == ("refused" in change):
                (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **change}))
    task = only_task([read_run(run) for run in runs])
    assert [[run.summary["accuracy"] for run in row.runs] for row in task.rows] == [[0.7, 0.6], [0.5]]
    assert task.columns == [word] and word in task.rows[0].name


def test_the_page_says_which_methods_have_default_settings(tmp_path: Path) -> None:
    from fedstill import FedAvg

    plain = FedAvg().model_dump(mode="json")
    tuned = FedAvg(rounds=3).model_dump(mode="json")
    runs = [
        write_run(tmp_path / "a", label="fedavg", method="fedavg", rounds=20, setting=plain),
        write_run(tmp_path / "b", label="short", method="fedavg", rounds=3, setting=tuned),
        write_run(tmp_path / "c", label="mine", method="package.module:Mine", setting={"x": 1}),
    ]
    text = sections.tuning_sentence(only_task([read_run(run) for run in runs]))
    assert text == "Default settings: fedavg. Changed: short (rounds = 3)."  # "mine" is a stranger's: not imported
    swept = []
    for i in range(20):  # a sweep does not name each of its values again
        setting = plain | {"participation": i / 20, "weighting": "x" * 80}
        swept.append(write_run(tmp_path / f"s{i}", label="swept", method="fedavg", rounds=20, setting=setting))
    text = sections.tuning_sentence(only_task([read_run(run) for run in swept]))
    assert text == f"Changed: swept (weighting = {'x' * 39}…)."


# ------------------------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_over_alpha_is_a_line_for_each_method_on_a_log_axis(tmp_path: Path) -> None:
    records = sweep_runs(tmp_path)
    (sweep,) = groups.find(group(records))
    assert (sweep.keys, sweep.values) == (("partition",), (["dirichlet:0.1", "dirichlet:0.5", "dirichlet:5"],))
    assert sweep.axis == ("partition: dirichlet", [0.1, 0.5, 5.0])
    figure = figures.over_setting(sweep, look(records))
    assert figure is not None and figure.x.log
    lines = {line.name: line for line in figure.lines}
    assert list(lines["fedavg"].x) == [0.1, 0.5, 5.0]
    assert list(lines["fedavg"].y) == pytest.approx([31, 41, 51])
    assert lines["fedavg"].spread[0] == pytest.approx(math.sqrt(2))  # of 30 and 32
    assert lines["fedavg"].tips[0] == "fedavg, partition: dirichlet 0.1: 31.00 ± 1.41 %"
    text = page(records, tmp_path)
    assert "<h2>Accuracy by partition</h2>" in text
    assert '<th scope="row">fedavg</th><td style="--share:0">31.00 ± 1.41</td>' in text
    assert '<td style="--share:0.55">81.00 ± 1.41</td></tr>' in text  # the highest
    assert "Data: digits (partition dirichlet:0.1 or dirichlet:0.5 or dirichlet:5, 2 clients)" in text


def test_the_lines_of_a_sweep_differ_in_colour(tmp_path: Path) -> None:
    records = sweep_runs(tmp_path)
    tasks = group(records)
    found = groups.find(tasks)
    names = groups.names(found, tasks)
    first = [name for sweep in found for name in (*sweep.series, *sweep.levels)]
    assert names[: len({*first})] == list(dict.fromkeys(first))
    assert {row.name for task in tasks for row in task.rows} <= {*names} and len(names) == len({*names})


def test_the_tries_of_a_sweep_and_its_final_runs_are_not_points_of_one_line(tmp_path: Path) -> None:
    runs = []
    for i, (lr, validation) in enumerate(((0.03, 0.1), (0.1, 0.1), (0.3, 0.1), (0.3, 0.0))):
        run = write_run(tmp_path / f"{i}", label="fedavg", setting={"lr": lr}, accuracy=0.3 + lr)
        config = json.loads((run / "config.json").read_text())
        config["experiment"]["validation"] = validation
        (run / "config.json").write_text(json.dumps(config))
        runs.append(read_run(run))
    (sweep,) = groups.find(group(runs))
    assert (sweep.keys, sweep.values) == (("lr",), (["0.03", "0.1", "0.3"],))
    assert sorted(run.folder.name for run in sweep.runs) == ["0", "1", "2"]
    text = page(runs, tmp_path)
    assert "<h2>Accuracy by lr</h2>" in text and 'id="figure-sweep-0"' in text
    assert "Data: digits (partition iid, 2 clients, 10 % of them for validation)" in text


def test_a_sweep_over_names_is_a_matrix_without_a_plot(tmp_path: Path) -> None:
    records = sweep_runs(tmp_path, ("iid", "classes:2"))
    (sweep,) = groups.find(group(records))
    assert sweep.axis is None and figures.over_setting(sweep, look(records)) is None
    text = page(records, tmp_path)
    assert 'id="figure-sweep' not in text and '<th scope="col">classes:2</th>' in text


def test_a_sweep_within_a_decade_has_a_linear_axis_and_other_methods_are_levels(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{n}", label="fedgm", accuracy=0.5 + n / 100, setting={"ipc": n}) for n in (1, 2, 5)
    ] + [write_run(tmp_path / "avg", label="fedavg", method="fedavg", accuracy=0.4)]
    records = [read_run(run) for run in runs]
    (sweep,) = groups.find(group(records))
    assert (sweep.keys, list(sweep.levels)) == (("ipc",), ["fedavg"])
    figure = figures.over_setting(sweep, look(records))
    assert figure is not None and not figure.x.log
    assert [set(line.y) for line in figure.lines if line.name == "fedavg"] == [{40.0}]
    assert [row.name for row in only_task(records).rows][0] == "fedgm (ipc 5)"


def test_labels_that_stand_for_values_are_one_line(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{n}", label=f"gm{n}", setting={"ipc": n}) for n in (1, 10, 50)]
    (sweep,) = groups.find(group([read_run(run) for run in runs]))
    assert list(sweep.series) == ["fedgm"] and sweep.values == (["1", "10", "50"],)
    assert groups.find(group([read_run(run) for run in runs[:2]])) == []  # two versions are a comparison


def test_the_options_of_a_model_are_settings_of_their_own(tmp_path: Path) -> None:
    runs = []
    for width in (8, 32):
        run = write_run(tmp_path / str(width))
        config = json.loads((run / "config.json").read_text())
        config["experiment"]["model"] = f"convnet:width={width},depth=2"
        (run / "config.json").write_text(json.dumps(config))
        runs.append(read_run(run))
    (sweep,) = groups.find(group(runs))
    assert (sweep.keys, sweep.axis) == (("model.width",), ("model.width", [8.0, 32.0]))


def test_two_settings_are_a_matrix_for_each_method(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{a}-{k}", partition=f"dirichlet:{a}", clients=k, accuracy=a * k / 100)
        for a in (0.1, 1)
        for k in (2, 10)
    ]
    records = [read_run(run) for run in runs]
    (sweep,) = groups.find(group(records))
    assert (sweep.keys, sweep.values) == (("partition", "clients"), (["dirichlet:0.1", "dirichlet:1"], ["2", "10"]))
    text = page(records, tmp_path)
    assert "<h2>Accuracy by partition and clients</h2>" in text and "<h3>fedgm</h3>" in text
    assert text.count('class="matrix long"') == 1
    row = text.partition('<th scope="row">dirichlet:1</th>')[2].partition("</tr>")[0]
    assert row == '<td style="--share:0.101">2.00</td><td style="--share:0.55">10.00</td>'
    three = write_run(tmp_path / "data", partition="dirichlet:1", clients=10, data="letters", accuracy=0.1)
    assert groups.find(group([*records, read_run(three)])) == []  # three settings are no matrix


# ------------------------------------------------------------------------------------------------------------ exports


def test_runs_csv_is_tidy(tmp_path: Path) -> None:
    private = {"method": "fedauxfdp", "guarantee": PRIVATE, "setting": {"rounds": 1, "space": {"dims": 8}}}
    folders = [add_parts(write_run(tmp_path / "a", seed=3)), write_run(tmp_path / "b", label="dp", **private)]
    text = export.csv_text(export.runs([read_run(folder) for folder in folders]))
    first, second = csv.DictReader(io.StringIO(text))
    assert first.keys() == second.keys()
    assert (first["seed"], first["label"], first["folder"]) == ("3", "fedgm", str(folders[0]))
    assert float(first["balanced_accuracy"]) == pytest.approx((0.75 + 1) / 2)
    assert (first["epsilon"], first["unit"], first["guarantee"]) == ("", "", "none")
    assert (second["method"], second["epsilon"], second["delta"], second["unit"]) == (
        "fedauxfdp",
        "1.0",
        "1e-05",
        "record",
    )
    assert (second["space.dims"], second["method.rounds"], first["space.dims"]) == ("8", "1", "")
    assert {"bytes_up", "bytes_down", "bytes_up_per_client", "rounds", "seconds", "partition", "model"} <= first.keys()
    assert second["state"] == "finished"


def test_latex_is_escaped_and_has_the_rules_of_booktabs(tmp_path: Path) -> None:
    evil = r"50%_{a}&#$~^\x"
    records = [read_run(write_run(tmp_path / "a", label=evil)), read_run(write_run(tmp_path / "b", seed=1, label=evil))]
    text = export.latex_text(records)
    assert r"50\%\_\{a\}\&\#\$\textasciitilde{}\textasciicircum{}\textbackslash{}x & 90.00 $\pm$ 0.00 & 1.00 kB" in text
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")] == [1] * 4
    assert r"\begin{tabular}{lrrrrlr}" in text and text.startswith("% \\usepackage{booktabs, graphicx}")
    for opened, closed in ((r"\begin{table*}", r"\end{table*}"), (r"\else\width\fi}{!}{%", "\\end{tabular}}\n")):
        assert text.count(opened) == text.count(closed) == 1  # no table is wider than the page, nor into a column
    two = export.latex_text([*records, read_run(write_run(tmp_path / "c", data="a\nb%"))])
    assert two.count(r"\toprule") == 2
    assert all(line.startswith(("%", "\\")) or line.endswith(r" \\") for line in two.splitlines() if line)


def test_the_command_writes_the_tables_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep_runs(tmp_path / "runs")
    out = tmp_path / "out"
    main(["report", str(tmp_path / "runs"), "--out", str(out)])
    assert {file.name for file in out.iterdir()} == {"report.html", "table.csv", "table.json", "runs.csv"}
    assert len(list(csv.DictReader((out / "runs.csv").open()))) == 12
    capsys.readouterr()
    main(["report", "--latex", str(tmp_path / "runs"), "--markdown", "--out", str(out)])
    said = capsys.readouterr().out.replace("\n", "")
    assert f"table: {out / 'table.tex'}" in said and f"table: {out / 'table.md'}" in said
    assert "digits (partition dirichlet:0.5, 2 clients)" in (out / "table.md").read_text()
    for words, sentence in [
        (["--latex"], "folder of at least one run"),
        (["--pdf", "x"], "there is no flag --pdf"),
        ([str(tmp_path), "--out", "--latex"], "--out needs a value"),
    ]:
        with pytest.raises(SystemExit) as stop:
            main(["report", *words])
        assert stop.value.code == 2 and sentence in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- unfinished runs


def unfinished(folder: Path, rounds: int = 2, **summary: Any) -> Path:
    """A run with 20 rounds that was killed after ``rounds``."""
    content = {"label": "fedavg", "method": "fedavg", "setting": {"rounds": 20}} | summary
    run = add_parts(write_run(folder, **content), rounds=rounds)
    config = json.loads((run / "config.json").read_text())
    config["experiment"]["model"] = "convnet"
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").unlink()
    return run


def test_an_unfinished_run_is_reported_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "done", accuracy=0.5)
    going = unfinished(tmp_path / "runs" / "going")
    assert find_runs(tmp_path / "runs") == [tmp_path / "runs" / "done"]
    record = read_run(going, unfinished=True)
    assert (record.finished, record.state, record.summary["accuracy"]) == (False, "unfinished: round 2 of 20", 0.8)
    assert (record.summary["bytes_up"], record.summary["bytes_down_per_client"]) == (2000, 3000)
    main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    first, second = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
    assert (first["method"], first["state"]) == ("fedgm", "finished")  # not ranked by an accuracy half way
    assert (second["state"], second["guarantee"], second["epsilon"]) == ("unfinished: round 2 of 20", None, None)
    words = Outline((tmp_path / "out" / "report.html").read_text()).words
    assert "unfinished: round 2 of 20" in words and "fedgm reaches 50.00" in words and "most accurate" not in words
    with pytest.raises(ValueError, match="has no finished run"):
        find_runs(going)


def test_an_unfinished_run_alone_and_before_its_first_round(tmp_path: Path) -> None:
    going = unfinished(tmp_path / "going")
    (going / "metrics.jsonl").unlink()
    (going / "partition.json").unlink()
    record = read_run(going, unfinished=True)
    assert (record.state, record.summary["accuracy"]) == ("unfinished: no round yet", None)
    assert "No finished run on digits" in Outline(page([record], tmp_path)).words
    before = {file: file.stat().st_mtime_ns for file in going.rglob("*")}
    read_run(going, unfinished=True)
    assert {file: file.stat().st_mtime_ns for file in going.rglob("*")} == before  # its process may be at work


def test_an_unfinished_seed_is_no_part_of_the_mean(tmp_path: Path) -> None:
    done = [write_run(tmp_path / f"{s}", label="fedavg", method="fedavg", seed=s, accuracy=0.5) for s in range(2)]
    for run in done:
        config = json.loads((run / "config.json").read_text())
        config["experiment"]["model"], config["method"]["rounds"] = "convnet", 20
        (run / "config.json").write_text(json.dumps(config))
    going = unfinished(tmp_path / "2", seed=2)
    task = only_task([*map(read_run, done), read_run(going, unfinished=True)])
    rows = [(row.name, row.accuracy, len(row.runs)) for row in task.rows]
    assert rows == [("fedavg", 0.5, 2), ("fedavg (unfinished)", 0.8, 1)]


@pytest.mark.parametrize(("key", "value"), [("clients", "many"), ("clients", 0), ("seed", None)])
def test_an_unfinished_run_with_a_damaged_configuration_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    going = unfinished(tmp_path / "going")
    config = json.loads((going / "config.json").read_text())
    config["experiment"][key] = value
    (going / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json is damaged"):
        read_run(going, unfinished=True)


# ------------------------------------------------------------------------------------------------------------ the page


def svgs(text: str) -> list[ElementTree.Element]:
    """The figures of a page."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def test_every_figure_is_readable_without_a_script_and_has_its_values(tmp_path: Path) -> None:
    records = [read_run(add_parts(write_run(tmp_path / label, label=label))) for label in ("fedgm", "fedavg")]
    plain = re.sub(r"<script>.*?</script>", "", page(records, tmp_path), flags=re.DOTALL)
    found = {str(svg.get("id")): svg for svg in svgs(plain)}
    ways = [f"bytes-0-{way}" for way in ("up-and-down", "up", "down")]
    names = [*ways, "rounds-0", "partition-0", "bubbles-0", "classes-0"]
    assert list(found) == [f"figure-{name}" for name in names]
    for name, svg in found.items():
        assert svg.get("role") == "img" and svg.get("aria-label") and svg.get("viewBox")
        assert not {"width", "height"} & set(svg.keys())  # as wide as the page
        assert len([text for text in svg.iter("text") if text.text]) >= 4, name
    titles = {name: [str(title.text) for title in svg.iter("title")] for name, svg in found.items()}
    assert titles["figure-rounds-0"][:2] == ["fedgm, round 1: 40.00 %", "fedgm, round 2: 80.00 %"]
    assert titles["figure-partition-0"] == ["client 0, class cat: 1 records", "client 1, class cat: 2 records"]
    assert titles["figure-bubbles-0"] == titles["figure-partition-0"]
    recalls = ["class cat: 75.0 %", "class dog: 100.0 %"]
    assert titles["figure-classes-0"] == [f"{label}, {words}" for label in ("fedgm", "fedavg") for words in recalls]


def test_figures_have_the_page_s_colour_of_text_and_no_name_twice(tmp_path: Path) -> None:
    records = [read_run(add_parts(write_run(tmp_path / label, label=label))) for label in ("fedgm", "fedavg")]
    text = page(records, tmp_path)
    for svg in svgs(text):
        assert svg.get("fill") == "currentColor"
        inks = {str(element.get("fill")) for element in svg.iter("text")} - {"None"}
        assert inks <= {"currentColor"}, inks
    colours = {colour.lower() for colour in re.findall(r'(?:fill|stroke)="(#\w+)"', text)}
    assert colours <= {colour.lower() for colour in (*figures.PALETTE, drawing.BLUE)}
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    assert used <= set(ids)


def test_a_long_line_has_its_ends_and_some_values() -> None:
    line = drawing.Line("a", [*range(1000)], [0.0] * 1000, tips=[str(i) for i in range(1000)])
    places = drawing.pointed(line)
    assert places[0] == 0 and places[-1] == 999 and len(places) <= drawing.POINTS + 1
    plot = drawing.Plot(drawing.Axis("x"), [drawing.Axis("y")], [line])
    (svg,) = svgs(drawing.page_svg(plot, "a", ""))
    assert [title.text for title in svg.iter("title")] == [str(place) for place in places]


def test_letters_that_the_fonts_lack_and_dollars_are_text(tmp_path: Path) -> None:
    names = ("猫 $\\alpha$", "<b>&")
    text = page([read_run(add_parts(write_run(tmp_path / "a", label="$a$_{b}"), names=names))], tmp_path)
    assert "猫 $\\alpha$</text>" in text and "&lt;b&gt;&amp;</text>" in text


def test_classes_have_recall_balanced_accuracy_and_a_confusion_matrix_with_numbers(tmp_path: Path) -> None:
    records = [read_run(add_parts(write_run(tmp_path / "a")))]
    text = page(records, tmp_path)
    outline = Outline(text)
    assert tables.balanced_accuracy(records[0]) == pytest.approx(0.875)
    assert "balanced accuracy" in outline.words and "87.5" in outline.words
    assert '<tr><th scope="row">cat</th><td style="--share:0.413">3</td><td style="--share:0.138">1</td></tr>' in text
    (tmp_path / "a" / "evaluation.json").write_text(json.dumps({"confusion": np.eye(21, dtype=int).tolist()}))
    (tmp_path / "a" / "partition.json").unlink()
    text = page([read_run(tmp_path / "a")], tmp_path)
    assert 'class="matrix dense"' not in text and 'id="figure-confusion-0"' in text


def test_each_seed_is_in_the_page(tmp_path: Path) -> None:
    records = [read_run(write_run(tmp_path / f"run-{s}", seed=s, accuracy=0.9 + s / 100)) for s in range(2)]
    words = Outline(page(records, tmp_path)).words
    for record in records:
        assert str(record.folder) in words and f"{100 * record.summary['accuracy']:.2f}" in words


def test_the_footer_has_version_day_and_environment(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"version": "0.9.1"}))
    os.utime(run / "summary.json", (1_700_000_000, 1_700_000_000))
    record = read_run(run)
    assert "<footer><p>1 run of fedstill 0.9.1, last written 2023-11-14.</p></footer>" in page([record], tmp_path)
    start = {"started": "2026-11-22T20:00:00+01:00", "commit": "abc<b>", "torch": "2.13.0", "blas": None, "threads": 1}
    later = start | {"started": "2026-11-24T08:00:00+01:00", "torch": "2.14.0"}
    footer = page([replace(record, environment=(start, later))], tmp_path).partition("<footer>")[2]
    assert "1 run of fedstill 0.9.1, started 2026-11-22 to 2026-11-24." in footer
    assert "<p>commit of fedstill abc&lt;b&gt;; torch 2.13.0, 2.14.0; threads 1.</p>" in footer


def test_a_page_of_three_methods_and_two_seeds_is_smaller_than_300_kilobytes(tmp_path: Path) -> None:
    runs = []
    for method, seed in itertools.product(range(3), range(2)):
        run = add_parts(write_run(tmp_path / f"{method}-{seed}", label=f"m{method}", seed=seed), rounds=2)
        lines = [{"round": r, "accuracy": r / 100, "bytes_up": 1000 * r, "bytes_down": r} for r in range(1, 101)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        names, counts = [f"class {c}" for c in range(10)], np.arange(500).reshape(50, 10).tolist()
        (run / "partition.json").write_text(json.dumps({"class_names": names, "counts": counts}))
        (run / "evaluation.json").unlink()
        config = json.loads((run / "config.json").read_text())
        config["experiment"]["clients"] = 50
        (run / "config.json").write_text(json.dumps(config))
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"clients": 50}))
        runs.append(run)
    text = page([read_run(run) for run in runs], tmp_path)
    images = sum(map(len, re.findall(r'<img src="[^"]*"', text)))
    assert len(text) - images < 300_000


def test_the_terminal_has_a_table_for_each_task(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(tables.terminal(sweep_runs(tmp_path)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.count("accuracy, %") == 3 and "digits (partition dirichlet:5, 2 clients)" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["dirichlet:0.1", "dirichlet:1"], ("dirichlet", [0.1, 1.0])),
        ([1, 10], ("", [1.0, 10.0])),
        (["noise=100", "noise=500"], ("noise", [100.0, 500.0])),
        (["iid", "dirichlet:1"], None),
        (["classes:2", "shards:2"], None),
        ([True, False], None),
        ([None, 1.0], None),
    ],
)
def test_numbers_of_settings(values: list[Any], expected: Any) -> None:
    assert groups.numeric(values) == expected


def test_options_of_a_model_are_told_from_other_words() -> None:
    apart = groups.options_apart({"model": "convnet:width=8,norm=batch", "partition": "dirichlet:0.1", "own": "a.b:c"})
    assert apart == {
        "model": "convnet",
        "model.width": "8",
        "model.norm": "batch",
        "partition": "dirichlet:0.1",
        "own": "a.b:c",
    }


def test_texts_of_a_stranger_s_run_are_no_formulas_and_no_commands_of_the_terminal() -> None:
    text = export.csv_text([{"label": '=HYPERLINK("http://x")', "model": "a-b", "accuracy": -0.5, "more": ["@x", "y"]}])
    assert text.splitlines()[1] == """"'=HYPERLINK(""http://x"")",a-b,-0.5,'@x y"""
    assert str(plain("[/red]\x1b]0;mine\x07\n")) == "[/red]?]0;mine??"
