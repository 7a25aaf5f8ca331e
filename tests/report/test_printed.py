"""Figures for papers: as wide as a column, with the page's numbers, and captions that say where these come from."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from report_pages import add_parts, write_run

from fedstill.cli import main
from fedstill.report import drawing, export, figures, printed
from fedstill.report.groups import group
from fedstill.report.record import RunRecord, read_run


def runs(folder: Path, methods: int = 3, seeds: int = 2) -> list[RunRecord]:
    """Runs with everything that has a figure; one method has a long name and no bytes."""
    records = []
    for method in range(methods):
        label = f"method{method}" if method else 'a<b>&"_%$\\frac$ ' + "averylongname" * 12
        for seed in range(seeds):
            place = folder / f"{method}" / f"{seed}"
            sent = 10**method * 1000 if method else 0
            more = {"accuracy": 0.5 + method / 10 + seed / 50, "bytes_up_per_client": sent, "bytes_up": 2 * sent}
            write_run(place, label=label, seed=seed, version="0.1.0", **more)
            add_parts(place)
            start = {"started": "2026-03-01T10:30:00+00:00"}
            commits = {"commit": "0123456789abcdef+changes", "folder_commit": "f" * 40}
            (place / "environment.jsonl").write_text(json.dumps(start | commits) + "\n")
            records.append(read_run(place))
    return records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    return runs(tmp_path_factory.mktemp("printed"))


def figure_of(one: printed.Printed, width: float = 8.4) -> Any:
    with mpl.rc_context(drawing.style(7.0, "#222222", "")):
        return drawing.arranged(one.plot, width * 72 / 2.54, 7.0, "#222222")


def test_every_figure_of_the_page_is_there(records: list[RunRecord]) -> None:
    names = {one.name for one in printed.chosen(records)}
    assert {"bytes", "rounds", "partition", "bubbles", "classes", "confusion"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("width", [4.0, 8.4])
def test_nothing_is_wider_than_the_column(records: list[RunRecord], width: float) -> None:
    for one in printed.chosen(records):
        figure = figure_of(one, width)
        figure.draw_without_rendering()  # which arranges it
        drawn = figure.get_tightbbox()
        size = figure.get_size_inches()
        assert size[0] == pytest.approx(width / 2.54)
        assert drawn.x0 >= 0 and drawn.y0 >= 0, one.name
        assert drawn.x1 <= size[0] + 0.01 and drawn.y1 <= size[1] + 0.01, one.name
        for axis in figure.axes[:1]:  # room for the data beside names and legends
            assert axis.get_position().height * size[1] > 0.5, one.name


@pytest.mark.slow
def test_the_files_have_the_width_and_the_caption(records: list[RunRecord]) -> None:
    one = next(one for one in printed.chosen(records) if one.name == "bytes")

    def drawn(kind: drawing.Kind) -> bytes:
        return drawing.printed(one.plot, kind, 8.4 * 72 / 2.54, one.name, one.caption)

    pdf, svg = drawn("pdf"), drawn("svg")
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", pdf)
    assert box and float(box[1]) == pytest.approx(8.4 / 2.54 * 72, abs=0.01)
    text = svg.decode()
    wide = re.search(r'width="([\d.]+)pt"', text)
    assert wide and float(wide[1]) == pytest.approx(8.4 / 2.54 * 72, abs=0.01)
    assert "partition iid, 2 clients" in text and "bytes per client" in text  # letters, not outlines
    assert (drawn("pdf"), drawn("svg")) == (pdf, svg)


def test_captions_say_data_split_clients_seeds_and_commit(records: list[RunRecord]) -> None:
    source = "Data: digits (partition iid, 2 clients); model convnet; seeds 0, 1; fedstill 0.1.0; commit 0123456789"
    source += "+changes; working folder at commit ffffffffff."
    (task,) = group(records)
    assert export.source(task) == source
    for one in printed.chosen(records):
        expected = source.replace("seeds 0, 1", "seed 0") if one.name in ("partition", "bubbles") else source
        assert expected in one.caption, one.name
    assert source in export.markdown_text(records).replace("\\", "")
    assert r"\caption{Accuracy on test records: mean $\pm$ sample" in export.latex_text(records)
    assert r"commit 0123456789+changes" in export.latex_text(records)


def test_a_printed_figure_has_the_page_s_numbers(records: list[RunRecord]) -> None:
    (task,) = group(records)
    look = figures.styles(row.name for row in task.rows)
    plot = figures.accuracy_per_round(task.rows, look)
    assert plot is not None
    lines = [line.get_xydata() for line in figure_of(printed.Printed("rounds", plot, "")).axes[0].lines]
    expected = [np.stack([line.x, line.y], axis=1) for line in plot.lines]
    assert len(lines) == len(expected) == 3
    assert all(np.allclose(a, b) for a, b in zip(lines, expected, strict=True))
    heat = figures.records_per_client(records[0])
    assert heat is not None
    (cells,) = figure_of(printed.Printed("partition", heat, "")).axes[0].collections
    counts = records[0].counts
    assert counts is not None and len(cells.get_paths()) == np.count_nonzero(counts)


def test_the_area_of_a_bubble_is_the_number_of_records(records: list[RunRecord]) -> None:
    plot = figures.bubbles(records[0])
    assert plot is not None
    (line,) = plot.lines
    counts = records[0].counts
    assert counts is not None
    assert set(zip(line.x, line.y, strict=True)) == {place for place, n in np.ndenumerate(counts) if n}
    (dots,) = figure_of(printed.Printed("bubbles", plot, "")).axes[0].collections
    held = dict(zip(zip(line.x, line.y, strict=True), dots.get_sizes(), strict=True))
    assert held[1, 0] / held[0, 0] == pytest.approx(counts[1, 0] / counts[0, 0])
    many = RunRecord(Path(), "", {}, {}, class_names=("a",), counts=np.ones((51, 1), np.int64))
    assert figures.bubbles(many) is None and figures.records_per_client(many) is not None


def plot_of(name: str) -> drawing.Plot:
    """A line, with the name wherever a figure has words."""
    axis = drawing.Axis(name, ticks=[(1.0, name)])
    lines = [drawing.Line(f"{name}{i}", [1.0, 2.0], [1.0, 2.0], "#0072B2", "o", tips=[name, name]) for i in range(2)]
    return drawing.Plot(axis, [axis], lines, title=name, names=[(1.0, 1.0, name)])


@pytest.mark.parametrize("letter", ["\x01", "\x1b", "\x0b", "\ufffe"])
def test_a_letter_that_an_svg_cannot_hold_is_marked(letter: str) -> None:
    """Classes have the names of folders, in which an operating system allows any letter."""
    plot = plot_of(f"do{letter}g")
    for drawn in (
        drawing.page_svg(plot, "lines", f"a{letter}"),
        drawing.themed_svg(plot, "lines", f"a{letter}"),
        drawing.printed(plot, "svg", 200.0, "lines", f"a{letter}").decode(),
    ):
        assert "do\N{REPLACEMENT CHARACTER}g" in "".join(ElementTree.fromstring(drawn).itertext())
        assert letter not in drawn


def test_a_figure_is_the_same_whatever_the_user_has_set_for_figures() -> None:
    plot, own = plot_of("a"), {"text.usetex": True, "savefig.bbox": "tight", "axes.xmargin": 0.5, "font.weight": "bold"}
    plain = drawing.page_svg(plot, "lines", "")
    with mpl.rc_context(own):
        assert drawing.page_svg(plot, "lines", "") == plain
        assert mpl.rcParams["text.usetex"]


@pytest.mark.slow
def test_the_command_writes_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs(tmp_path / "runs", methods=1, seeds=1)
    main(["report", str(tmp_path / "runs"), "--figures", "pdf", "--column-cm", "5", "--out", str(tmp_path / "out")])
    assert "figures: " in capsys.readouterr().out
    text = (tmp_path / "out" / "figures.tex").read_text()
    for name in re.findall(r"\\includegraphics\[width=\\columnwidth\]\{(.*)\}", text):
        assert (tmp_path / "out" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert not list((tmp_path / "out").glob("*.svg")) and text.count(r"\caption{") >= 3
    for words, sentence in [
        (["--figures", "png"], "--figures is 'png'; it must be 'pdf' or 'svg'"),
        (["--column-cm", "2"], "--column-cm is 2; it must be greater than or equal to 4"),
    ]:
        with pytest.raises(SystemExit) as stop:
            main(["report", str(tmp_path / "runs"), *words])
        assert stop.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())
