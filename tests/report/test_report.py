"""Run folders are read with distrust; tables, figures and the page say what the folders hold and nothing more."""

import csv
import io
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_pages import NONE, PRIVATE, Outline, add_parts, only_task, page, write_run
from rich.console import Console

from fedstill.privacy.guarantee import Guarantee
from fedstill.report import export, figures, guarantees, html, markup, sections, tables
from fedstill.report.groups import group
from fedstill.report.page import write_report
from fedstill.report.record import RunRecord, find_runs, human_bytes, read_run


def drawn(draw: Any, records: list[RunRecord]) -> Any:
    """A figure of the rows of the runs' one task."""
    rows = only_task(records).rows
    return draw(rows, figures.styles(row.name for row in rows))


# ----------------------------------------------------------------------------------------------------------- reading


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    record = read_run(add_parts(write_run(tmp_path / "run", seed=3, accuracy=None)))
    assert (record.label, record.summary["seed"], record.summary["accuracy"]) == ("fedgm", 3, None)
    assert record.config["method"] == {"name": "fedgm"}
    assert [(m["round"], m["accuracy"]) for m in record.metrics] == [(1, 0.4), (2, 0.8)]
    assert record.class_names == ("cat", "dog")
    assert record.counts is not None and record.counts.tolist() == [[1, 0], [2, 0]]
    assert record.confusion is not None and record.confusion.tolist() == [[3, 1], [0, 4]]
    assert record.images is not None and sorted(record.images) == ["real", "synthetic"]
    assert record.images["synthetic"][0].shape == (4, 3, 4, 6)


def test_what_a_round_logs_twice_is_merged_and_a_line_cut_by_a_crash_is_dropped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n{"round": 1, "loss": 2}\n{"round": 2, "acc')
    (metric,) = read_run(folder).metrics
    assert (metric["accuracy"], metric["loss"]) == (0.5, 2)


def test_runs_are_found_at_any_depth_in_natural_order_and_unfinished_ones_are_left_out(tmp_path: Path) -> None:
    for seed in (10, 2):
        write_run(tmp_path / "fedgm" / f"seed-{seed}")
    (write_run(tmp_path / "fedgm" / "seed-3") / "summary.json").unlink()
    write_run(tmp_path / "fedgm" / "seed-2" / "clients" / "nested")
    assert [folder.name for folder in find_runs(tmp_path)] == ["seed-2", "seed-10"]
    assert find_runs(tmp_path / "fedgm" / "seed-2") == [tmp_path / "fedgm" / "seed-2"]
    with pytest.raises(ValueError, match="no folder"):
        find_runs(tmp_path / "absent")
    with pytest.raises(ValueError, match="no finished run"):
        find_runs(tmp_path / "fedgm" / "seed-3")


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", "[]", "not a JSON object"),
        ("summary.json", "{", "Expecting property name"),
        ("summary.json", b"\xff\xfe", "utf-8"),
        ("summary.json", '{"method": "fedgm"}', "label: field required"),
        ("summary.json", '{"accuracy": 93.5}', "accuracy: .*less than or equal to 1"),
        ("summary.json", '{"accuracy": NaN}', "accuracy"),
        ("summary.json", '{"bytes_up": -1}', "bytes_up"),
        ("summary.json", '{"seconds": Infinity}', "seconds"),
        ("summary.json", '{"guarantee": {"holds": true, "epsilon": -1}}', "guarantee."),
        ("partition.json", '{"class_names": ["a", "b"], "counts": [[1, 2]]}', "counts of 1 clients"),
        ("partition.json", '{"class_names": ["a", "b"], "counts": [[1, 2], [3]]}', "2 x 2"),
        ("partition.json", '{"class_names": ["a", "b"], "counts": [[1, 2], [3, -4]]}', "counts.1.1"),
        ("evaluation.json", '{"confusion": [[1, 2], [3]]}', "2 x 2"),
        ("evaluation.json", '{"confusion": [[1]]}', "2 x 2"),
        ("metrics.jsonl", '{"round": "one"}\n', "round"),
        ("partition.json", '{"class_names": ["a", "b"], "counts": [[1, 2], [3, 1' + 30 * "0" + "]]}", "counts.1.1"),
        ("images/synthetic.npz", b"PK\x03\x04 cut short", "damaged"),
        ("images/synthetic.npz", b"\x93NUMPY\x01\x00 cut short", "damaged"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, file: str, content: str | bytes, problem: str) -> None:
    folder = add_parts(write_run(tmp_path / "run"))
    whole = json.loads((folder / "summary.json").read_text())
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    elif file == "summary.json" and content.endswith("}") and "method" not in content:
        (folder / file).write_text(json.dumps(whole | json.loads(content)))
    else:
        (folder / file).write_text(content)
    with pytest.raises(ValueError, match=problem) as refusal:
        read_run(folder)
    assert str(folder / file) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (np.zeros((2, 1, 4, 4)), np.zeros(2, dtype=int)),
        (np.zeros((2, 4, 4), dtype=np.uint8), np.zeros(2, dtype=int)),
        (np.zeros((2, 2, 4, 4), dtype=np.uint8), np.zeros(2, dtype=int)),
        (np.zeros((2, 1, 4, 4), dtype=np.uint8), np.zeros(3, dtype=int)),
        (np.zeros((2, 1, 4, 4), dtype=np.uint8), np.array([0, -1])),
        (np.zeros((2, 1, 4, 4), dtype=np.uint8), np.array([0.0, 1.0])),
        (np.zeros((2, 1, 4, 4), dtype=np.uint8), np.array([0, 2**64 - 1], dtype=np.uint64)),
    ],
)
def test_images_of_another_kind_are_refused(tmp_path: Path, images: Any, labels: Any) -> None:
    folder = add_parts(write_run(tmp_path / "run"))
    np.savez(folder / "images" / "synthetic.npz", images=images, labels=labels)
    with pytest.raises(ValueError, match=r"synthetic\.npz is damaged"):
        read_run(folder)


def test_an_image_file_that_is_no_archive_or_has_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    folder = add_parts(write_run(tmp_path / "run"))
    file = folder / "images" / "synthetic.npz"
    content = bytearray(file.read_bytes())
    content[content.index(b"\x07" * 9) + 4] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"synthetic\.npz is damaged"):
        read_run(folder)
    images = np.random.default_rng(0).integers(0, 256, (9, 1, 32, 32), dtype=np.uint8)
    np.savez_compressed(file, images=images, labels=np.zeros(9, dtype=int))
    content = bytearray(file.read_bytes())
    content[60:200] = b"\xff" * 140  # inside the compressed images: not a zip archive's fault but a stream's
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"synthetic\.npz is damaged"):
        read_run(folder)
    with file.open("wb") as handle:
        np.save(handle, np.zeros((2, 1, 4, 4), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"synthetic\.npz is damaged"):
        read_run(folder)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_among_the_images_is_not_run(tmp_path: Path) -> None:
    folder = add_parts(write_run(tmp_path / "run"))
    trapped = np.array([Trap(tmp_path / "sprung")], dtype=object)
    np.savez(folder / "images" / "synthetic.npz", images=trapped, labels=np.zeros(1, dtype=int))
    with pytest.raises(ValueError, match=r"synthetic\.npz is damaged"):
        read_run(folder)
    assert not (tmp_path / "sprung").exists()


def test_an_unfinished_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    with pytest.raises(ValueError, match="not a finished run .summary.json is missing.; repeat its command to resume"):
        read_run(folder)


# ------------------------------------------------------------------------------------------------------------ tables


def three_seeds(tmp_path: Path) -> list[RunRecord]:
    """Accuracies 0.90, 0.92, 0.97: mean 0.93, deviations -3, -1, 4 points, variance 26 / 2 = 13."""
    pairs = enumerate((0.90, 0.92, 0.97))
    runs = [write_run(tmp_path / f"gm-{seed}", seed=seed, accuracy=accuracy) for seed, accuracy in pairs]
    return [read_run(run) for run in runs]


def test_seeds_collapse_into_mean_and_sample_standard_deviation(tmp_path: Path) -> None:
    other = write_run(tmp_path / "avg", label="fedavg", accuracy=0.95, rounds=20, guarantee=PRIVATE)
    first, second = tables.rows([*three_seeds(tmp_path), read_run(other)])
    assert (first["label"], first["accuracy_spread"], first["seeds"]) == ("fedavg", None, 1)
    assert (first["guarantee"]["holds"], first["guarantee"]["unit"]) == (True, "record")
    assert (second["label"], second["seeds"], second["guarantee"]["holds"]) == ("fedgm", 3, False)
    assert second["accuracy"] == pytest.approx(0.93, rel=1e-12)  # rounding of three additions
    assert second["accuracy_spread"] == pytest.approx(math.sqrt(13) / 100, rel=1e-12)
    assert (first["epsilon"], first["delta"]) == (1.0, 1e-5)
    assert (second["epsilon"], second["delta"]) == (None, None)
    assert (second["bytes_up_per_client"], second["bytes_down_per_client"]) == (1000, 3000)


def test_every_form_of_the_table_holds_the_same_cells(tmp_path: Path) -> None:
    records = [
        *three_seeds(tmp_path),
        read_run(write_run(tmp_path / "b", label="[b]a|b", accuracy=None, judged_on="[/i]")),
    ]
    expected = ("fedgm", "93.00 ± 3.61", "1.00 kB", "3.00 kB", "1", "none", "1.5")
    assert tables.cells(only_task(records))[0] == expected
    assert f"| {' | '.join(expected)} |" in export.markdown_text(records)
    assert "| \\[b\\]a\\|b | – |" in export.markdown_text(records)
    console = Console(file=io.StringIO(), width=140)
    console.print(tables.terminal(records))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(cell in shown for cell in (*expected, "[b]a|b"))
    first, second = csv.DictReader(io.StringIO(export.table_csv(tables.rows(records))))
    assert float(first["accuracy"]) == tables.rows(records)[0]["accuracy"]
    assert (second["label"], second["accuracy"]) == ("[b]a|b", "")
    assert json.loads(json.dumps(tables.rows(records))) == tables.rows(records)


def test_the_spread_over_clients_has_a_column_where_they_judged(tmp_path: Path) -> None:
    spreads = enumerate((0.10, 0.30))
    own = [write_run(tmp_path / f"{i}", label="fedrd", seed=i, spread_over_clients=spread) for i, spread in spreads]
    other = write_run(tmp_path / "avg", label="fedavg", accuracy=0.5)
    records = [read_run(run) for run in (*own, other)]
    assert [row["spread_over_clients"] for row in tables.rows(records)] == [pytest.approx(0.2, rel=1e-12), None]
    assert tables.headings(only_task(records))[-1] == "over clients"
    assert [row[-1] for row in tables.cells(only_task(records))] == ["20.00", "–"]
    assert "standard deviation of their own accuracies" in tables.caption(only_task(records))
    assert export.markdown_text(records).splitlines()[2].endswith("| 20.00 |")
    assert tables.headings(only_task(records[2:])) == ("method", *tables.RESULTS)
    assert "their own" not in tables.caption(only_task(records[2:]))


def test_the_report_has_what_methods_logged_last(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{i}", label="dense", seed=i) for i in range(2)]
    for run, share in zip(runs, (0.4, 0.5), strict=True):
        lines = [{"round": 1, "accuracy": 0.1, "ensemble": 0.2}, {"round": 2, "accuracy": 0.3, "ensemble": share}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [read_run(run) for run in (*runs, write_run(tmp_path / "avg", label="fedavg"))]
    assert tables.logged(only_task(records)) == (("method", "ensemble, %"), [("dense", "45.00")])
    write_report(records, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert '<th scope="col" class="">ensemble, %</th>' in page
    assert '<td class="">45.00</td>' in page


def test_a_narrow_terminal_breaks_words_and_no_number(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", label="a long label, " * 6, guarantee=PRIVATE, seconds=1234.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(tables.terminal([*three_seeds(tmp_path), read_run(long)]))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(cell in shown for cell in ("93.00 ± 3.61", "1.00 kB", "3.00 kB", "none", "delta", "1234 "))


@pytest.mark.parametrize("width", range(62, 122, 10))
def test_a_narrow_terminal_lacks_columns_in_place_of_parts_of_them(width: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", label="fedrd", guarantee=PRIVATE, seconds=1234.0, spread_over_clients=0.1)
    console = Console(file=io.StringIO(), width=width)
    console.print(tables.terminal([read_run(run)]))
    assert isinstance(console.file, io.StringIO)
    heading, _, first, *_ = shown = [line for line in console.file.getvalue().splitlines() if line.strip()]
    assert max(map(len, shown)) <= width
    columns = {"seconds": "1234", "rounds": "1", "over clients": "10.00"}
    kept = [name for name in columns if name in heading]
    assert kept == [*columns][len(columns) - len(kept) :] and (width < 112 or len(kept) == 3)
    assert all(columns[name] in first.split() for name in kept)
    assert all(name in heading for name in ("method", "accuracy, %", "up/client", "down/client", "guarantee"))


def test_only_seeds_are_averaged_and_equal_runs_count_once(tmp_path: Path) -> None:
    few = write_run(tmp_path / "few", accuracy=0.8, setting={"distill": {"ipc": 1}})
    again = write_run(tmp_path / "again", accuracy=0.8, setting={"distill": {"ipc": 1}})
    many = write_run(tmp_path / "many", accuracy=0.9, setting={"distill": {"ipc": 50}})
    other = write_run(tmp_path / "other", accuracy=0.7, setting={"distill": {"ipc": 50}}, partition="dirichlet:0.1")
    first, second = group(map(read_run, (few, again, many, other)))
    assert (first.words, second.words) == (
        "digits (partition iid, 2 clients)",
        "digits (partition dirichlet:0.1, 2 clients)",
    )
    assert [(row.name, len(row.runs)) for row in first.rows] == [
        ("fedgm (distill.ipc 50)", 1),
        ("fedgm (distill.ipc 1)", 1),
    ]
    assert [row.name for row in second.rows] == ["fedgm"]
    assert first.columns == ["distill.ipc"] and second.columns == []


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (78_512, "78.5 kB"), (999_499, "999 kB"), (999_600, "1.00 MB")]
    + [(1_274_000, "1.27 MB"), (9_996_000, "10.0 MB"), (99_960_000, "100 MB"), (2.5e9, "2.50 GB"), (3e12, "3 TB")],
)
def test_bytes_have_three_digits_and_decimal_units(count: float, words: str) -> None:
    assert human_bytes(count) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "1.0"), (0.0, "0"), (1.001, "1.01"), (2.3400001, "2.35"), (8.0, "8.0"), (1e-5, "1e-5")]
    + [(1.0001e-5, "1.01e-5"), (123.4, "124"), (1234.0, "1240"), (0.125, "0.125"), (0.1251, "0.126")],
)
def test_a_printed_guarantee_is_never_smaller_than_the_true_one(value: float, words: str) -> None:
    assert guarantees.round_up(value) == words
    assert float(words) >= value


def test_a_simulation_is_told_by_the_guarantee_s_field_(tmp_path: Path) -> None:
    words = (
        "A theorem. Its noise came from the run's seed, so this run is a simulation (--noise entropy for real noise)"
    )

    def told(guarantee: dict[str, Any]) -> bool:
        return guarantees.is_simulated(
            read_run(write_run(tmp_path / str(len(list(tmp_path.iterdir()))), guarantee=guarantee)).guarantee
        )

    for simulated in (True, False):
        assert told(PRIVATE | {"simulated": simulated}) == simulated
        assert told(PRIVATE | {"reason": words, "simulated": simulated}) == simulated
    assert not told(NONE | {"simulated": True})


def test_the_weakest_guarantee_of_the_seeds_is_shown(tmp_path: Path) -> None:
    larger = PRIVATE | {"epsilon": 2.0, "unit": "label", "delta": None}
    infinite = PRIVATE | {"epsilon": math.inf}
    folders = [
        write_run(tmp_path / f"{i}", seed=i, guarantee=g) for i, g in enumerate((PRIVATE, larger, NONE, infinite))
    ]
    runs = [read_run(folder) for folder in folders]
    assert guarantees.words(guarantees.weakest(run.guarantee for run in runs[:2])) == "eps 2.0 per label"
    assert guarantees.words(guarantees.weakest(run.guarantee for run in runs[:3])) == "none"
    assert guarantees.words(guarantees.weakest([runs[0].guarantee, runs[3].guarantee])) == "none"


def test_what_stands_beside_epsilon_is_the_weakest_of_the_seeds() -> None:
    one = Guarantee(True, "record", "a", 1.0, 1e-5, "b", "c", "d", False, unchecked="Mine", pairs=12, adders=3)
    one = replace(one, alone_epsilon=2.0, group="patient", group_size=4, group_epsilon=3.0, group_delta=1e-5)
    for other in ({"pairs": None}, {"alone_epsilon": None}, {"alone_epsilon": 5.0}, {"group_epsilon": None}):
        weaker = replace(one, **other)
        assert guarantees.weakest([one, weaker]) == guarantees.weakest([weaker, one]) == weaker


def test_the_finding_names_the_best_the_smallest_exchange_and_doubt(tmp_path: Path) -> None:
    records = three_seeds(tmp_path)
    best = {"label": "fedavg", "bytes_up_per_client": 50_000, "bytes_down_per_client": 50_000, "rounds": 20}
    silent = write_run(tmp_path / "local", label="local", accuracy=0.5, bytes_up_per_client=0, bytes_down_per_client=0)
    records += [read_run(write_run(tmp_path / f"a{s}", seed=s, accuracy=0.95 + s / 1000, **best)) for s in range(2)]
    text = sections.finding(only_task([*records, read_run(silent)]))
    assert (
        "fedavg is the most accurate of 3 methods: 95.05 ± 0.07 % with 50.0 kB up and 50.0 kB down per client" in text
    )
    assert "its lead over fedgm is within the spread over seeds" in text
    assert "fedgm exchanges least: 4.00 kB both ways, 25 times less, for 93.00 ± 3.61 %" in text
    expected = "On digits (partition iid, 2 clients), fedgm reaches 90.00 % with 1.00 kB up and 3.00 kB down per client"
    assert sections.finding(only_task(records[:1])) == f"{expected} in 1 round."
    nearly = write_run(tmp_path / "nearly", label="near", accuracy=0.5, bytes_down_per_client=2990)
    text = sections.finding(only_task([*records[:1], read_run(nearly)]))
    assert text.endswith(". near exchanges least: 3.99 kB both ways for 50.00 %.")


# ----------------------------------------------------------------------------------------------------------- figures


def test_a_method_looks_the_same_in_every_figure(tmp_path: Path) -> None:
    labels = ("fedgm", "fedavg", "dense")
    records = [read_run(add_parts(write_run(tmp_path / label, label=label))) for label in labels]
    looks: dict[str, set[tuple[str | None, str]]] = {}
    plots = [drawn(draw, records) for draw in (figures.accuracy_per_round, figures.per_class_accuracy)]
    for plot in [*plots, *drawn(figures.accuracy_against_bytes, records).values()]:
        for line in plot.lines:
            looks.setdefault(line.name, set()).add((line.colour, line.marker))
    assert set(looks) == set(labels)
    assert all(len(look) == 1 for look in looks.values())
    assert len(set().union(*looks.values())) == 3


def test_accuracy_against_bytes_draws_the_path_and_the_spread(tmp_path: Path) -> None:
    folders = [add_parts(write_run(tmp_path / f"{s}", seed=s, accuracy=0.8 + s / 50)) for s in range(2)]
    silent = write_run(tmp_path / "local", label="local", accuracy=0.5, bytes_up_per_client=0, bytes_down_per_client=0)
    plot = drawn(figures.accuracy_against_bytes, [read_run(folder) for folder in (*folders, silent)])["up and down"]
    moving, level = plot.lines
    # 4000 bytes per client in all; after round 1, half of the run's 8000 bytes.
    assert list(moving.x) == [2000, 4000]
    assert list(moving.y) == pytest.approx([40, 81])
    assert moving.spread == [0, pytest.approx(math.sqrt(2))] and moving.bars  # of 80 and 82
    assert moving.tips[-1] == "fedgm: 4.00 kB per client, 81.00 %"
    assert set(level.y) == {50.0} and level.dash == ":"
    assert plot.x.log and min(level.x) > 0


def test_one_figure_has_bytes_both_ways_up_and_down_with_a_switch(tmp_path: Path) -> None:
    bytes_ = {"bytes_up_per_client": 1000, "bytes_down_per_client": 3000, "bytes_up": 2000, "bytes_down": 6000}
    folder = add_parts(write_run(tmp_path / "run", **bytes_))
    lines = [{"round": 1, "accuracy": 0.5, "bytes_up": 500, "bytes_down": 3000}, {"round": 2, "accuracy": 0.8}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plots = drawn(figures.accuracy_against_bytes, [read_run(folder)])
    expected = {"up and down": [1750, 4000], "up": [250, 1000], "down": [1500, 3000]}
    assert {way: list(plot.lines[0].x) for way, plot in plots.items()} == expected
    for way, plot in plots.items():
        assert plot.x.name == f"bytes per client, {way}"
        low, high = plot.x.range
        assert low < min(expected[way]) and max(expected[way]) < high
    outline = Outline(page([read_run(folder)], tmp_path))
    radios = [attributes for tag, attributes in outline.tags if tag == "input"]
    assert [radio["value"] for radio in radios] == ["up and down", "up", "down"]
    assert [("checked" in radio) for radio in radios] == [True, False, False]
    ids = [f"figure-bytes-0-{way}" for way in ("up-and-down", "up", "down")]
    assert [a["id"] for tag, a in outline.tags if tag == "svg" and str(a["id"]).startswith("figure-bytes")] == ids


def test_other_numbers_of_the_rounds_have_a_panel_each(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{seed}", seed=seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        lines = [{"round": r, "accuracy": 0.5, "noise": 5.0 - r - seed, "<b>metric": 10.0 * r} for r in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [read_run(folder) for folder in folders]
    plot = drawn(figures.course, records)
    assert [(list(line.y), line.panel) for line in plot.lines] == [([10, 20], 0), ([3.5, 2.5], 1)]  # means over seeds
    assert [axis.name for axis in plot.y] == ["<b>metric", "noise"]
    assert "&lt;b&gt;metric</text>" in page(records, tmp_path)
    (folders[0] / "metrics.jsonl").write_text("")
    assert drawn(figures.course, [read_run(folders[0])]) is None


def test_a_thousand_clients_and_classes_without_records_can_be_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", clients=1000)
    counts = np.random.default_rng(0).integers(0, 3, (1000, 10)) * np.eye(10, dtype=int)[np.arange(1000) % 10]
    names = [str(c) for c in range(10)]
    (folder / "partition.json").write_text(json.dumps({"class_names": names, "counts": counts.tolist()}))
    record = read_run(folder)
    plot = figures.records_per_client(record)
    assert plot is not None and (heat := plot.heat) is not None and heat.values.shape == (10, 1000)
    order = [int(heat.tip(0, place).split()[1].rstrip(",")) for place in range(1000)]
    assert np.array_equal(np.nan_to_num(heat.values).T, counts[order])
    assert sorted(order) == list(range(1000))
    assert np.isnan(heat.values).sum() == (counts == 0).sum() and heat.most == 2
    assert "1000 clients" in (text := page([record], tmp_path)) and len(text) < 60_000  # an image, not 10,000 cells
    (folder / "evaluation.json").write_text(json.dumps({"confusion": np.diag([0, *range(1, 10)]).tolist()}))
    (line,) = drawn(figures.per_class_accuracy, [read_run(folder)]).lines
    assert (line.x, line.y) == ([*range(1, 10)], [100.0] * 9)


def test_confusion_is_in_percent_of_the_true_class(tmp_path: Path) -> None:
    records = [read_run(add_parts(write_run(tmp_path / f"{s}", seed=s))) for s in range(2)]
    plot = figures.confusion(only_task(records).rows[0])
    assert plot is not None and plot.heat is not None
    assert np.nan_to_num(plot.heat.values).tolist() == [[75, 25], [0, 100]]
    assert plot.heat.tip(0, 1) == "cat predicted as dog: 25.0 % of the class"
    assert list(drawn(figures.per_class_accuracy, records).lines[0].y) == [75, 100]


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    record = read_run(add_parts(write_run(tmp_path / "run", data="https://example.org/a.png")))
    outline = Outline(page([record], tmp_path))
    addresses = [
        v for _, attributes in outline.tags for k, v in attributes.items() if k in ("src", "href", "srcset", "action")
    ]
    assert addresses and all(address and address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in outline.tags}
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": html.POLICY}) in outline.tags
    assert "http" not in html.POLICY and "default-src 'none'" in html.POLICY
    assert not re.search(r"@import|url\(", markup.asset("page.css"))
    assert not re.search(r"fetch|XMLHttp|import|https?:", markup.asset("page.js"))


def test_whatever_a_user_named_is_text(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script><img src=x onerror=y>\"&"
    guarantee = NONE | {"reason": evil}
    refused = [{"client": 0, "step": evil, "round": None, "reason": evil}]
    folder = write_run(
        tmp_path / "run",
        label=evil,
        setting={evil: evil},
        partition=evil,
        data=evil,
        guarantee=guarantee,
        refused=refused,
    )
    add_parts(folder, names=(evil, "dog"))
    (folder / "images" / "synthetic.npz").rename(folder / "images" / "a<b onload=z>.npz")
    records = [read_run(folder)]
    text = page(records, tmp_path, command=evil)
    assert "<script>alert" not in text and "<img src=x" not in text and "<b onload" not in text
    outline = Outline(text)
    assert not [a for _, attributes in outline.tags for a in attributes if a.startswith("on")]
    assert outline.words.count(evil) >= 8
    assert any(words.startswith(f"{evil}, round") for words in outline.drawn)
    assert f"client 0, class {evil}: 1 records" in outline.drawn
    assert [attributes for tag, attributes in outline.tags if tag == "script"] == [{}]


def test_every_part_has_its_section_and_a_missing_part_has_none(tmp_path: Path) -> None:
    folder = add_parts(
        write_run(tmp_path / "run", refused=[{"client": 1, "step": "distill", "round": 1, "reason": "nan"}])
    )
    sections = {
        "metrics.jsonl": ["Accuracy against bytes", "Accuracy per round"],
        "partition.json": ["Records per client and class"],
        "images/synthetic.npz": ["Sample images"],
        "evaluation.json": ["Accuracy per class"],
    }
    always = ["Results", "Privacy guarantees", "Refused replies", "Reproduce"]
    text = page([read_run(folder)], tmp_path)
    for heading in (*always, *sum(sections.values(), [])):
        assert f"<h2>{heading}</h2>" in text
    for file, gone in sections.items():
        kept = (folder / file).read_bytes()
        (folder / file).unlink()
        outline = Outline(text := page([read_run(folder)], tmp_path))
        assert not any(f"<h2>{heading}</h2>" in text for heading in gone)
        assert outline.headings() == 9 - len(gone)
        (folder / file).write_bytes(kept)
    bare = page([read_run(write_run(tmp_path / "bare"))], tmp_path)
    assert Outline(bare).headings() == 3 and "<svg" not in bare


@pytest.mark.parametrize("tasks", [1, 2])
def test_headings_skip_no_level_and_every_figure_says_where_it_comes_from(tmp_path: Path, tasks: int) -> None:
    names = {"label": "fedavg", "guarantee": PRIVATE | {"reason": "noise of the seed (--noise entropy for more)"}}
    folders = [add_parts(write_run(tmp_path / f"{i}", partition=f"classes:{i}", **names)) for i in range(1, tasks + 1)]
    text = page([read_run(folder) for folder in folders], tmp_path)
    levels = [int(tag[1]) for tag, _ in Outline(text).tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) > 4 * tasks and all("Data: digits (partition classes:" in caption for caption in captions)
    assert '(<span class="flag">--noise</span> entropy' in text


def test_images_are_shown_beside_real_ones_with_words_for_each(tmp_path: Path) -> None:
    outline = Outline(page([read_run(add_parts(write_run(tmp_path / "run")))], tmp_path))
    pictures = [attributes for tag, attributes in outline.tags if tag == "img"]
    kinds = [f"class {name}: {column}" for name in ("cat", "dog") for column in ("fedgm", "test records")]
    assert [picture["alt"] for picture in pictures] == kinds

    from base64 import b64decode

    from PIL import Image

    source = pictures[2]["src"]
    assert source is not None
    strip = np.array(Image.open(io.BytesIO(b64decode(source.split(",")[1]))))
    assert strip.shape == (
        4,
        3 * 7 - 1,
        4,
    )  # a slot of 6 pixels and a gap for each image of "cat"
    assert (strip[:, :6] == (7, 7, 7, 255)).all() and (strip[:, 6:] == 0).all()  # class "dog" has one image


def test_captions_name_only_what_is_drawn(tmp_path: Path) -> None:
    def pages(name: str, seeds: int, *, also: bool) -> str:
        runs = [add_parts(write_run(tmp_path / name / str(seed), seed=seed, label="many")) for seed in range(seeds)]
        runs += [write_run(tmp_path / name / "one", label="once")] if also else []
        return page([read_run(run) for run in runs], tmp_path / name)

    alone = pages("alone", 1, also=False)
    assert "sample standard deviation" not in alone and "Dotted:" not in alone and "Accuracy per round" in alone
    several = pages("several", 2, also=True)
    assert "with a band of one sample standard deviation" in several
    assert "Dotted: a method with a single value." in several


def test_guarantees_are_told_in_words(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "none")
    private = write_run(tmp_path / "dp", label="fedauxfdp", guarantee=PRIVATE)
    words = Outline(page([read_run(bare), read_run(private)], tmp_path)).words
    assert "fedgm: no privacy guarantee" in words and "none:" not in words
    assert "The replies may reveal any record of the clients: `x` is not released." in words
    # (e + delta) / (1 + e) = 0.73106: rounded up to a tenth of a percent.
    assert "fedauxfdp: eps 1.0, delta 1e-5 per record" in words and "right at most 73.2 % of the time" in words
    assert "Holds against: the server." in words


def test_the_page_tells_how_to_make_it_again(tmp_path: Path) -> None:
    records = [read_run(write_run(tmp_path / f"{s}", seed=s)) for s in range(2)]
    copied = '</pre><button type="button" class="copy">Copy</button>'
    outline = Outline(text := page(records, tmp_path))
    assert copied in text and "fedstill run fedgm --seed 0\nfedstill run fedgm --seed 1\n" in outline.words
    text = page(records, tmp_path, command="fedstill compare")
    assert f"<pre><code><span>fedstill</span> <span>compare</span>\n</code>{copied}" in text


def test_the_page_is_the_same_each_time_and_replaces_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [read_run(add_parts(write_run(tmp_path / "run")))]
    first = page(records, tmp_path)
    assert page(records, tmp_path) == first
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_report(records[:1], tmp_path / "report.html", command="a later command")
    monkeypatch.undo()
    assert "a later command" not in (tmp_path / "report.html").read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_the_page_names_the_values_of_the_partition_s_column(tmp_path: Path) -> None:
    folder = add_parts(write_run(tmp_path / "run", partition="by:hospital"))
    part = json.loads((folder / "partition.json").read_text())
    own = {"clients": [{"client": c, "accuracy": 0.5} for c in range(2)]}
    (folder / "clients.json").write_text(json.dumps(own))
    write_report([read_run(folder)], tmp_path / "before.html")
    assert "Values of" not in (tmp_path / "before.html").read_text()
    values = {"hospital": [["Köln", "<Bonn>"], ["Ulm"]]}
    (folder / "partition.json").write_text(json.dumps(part | {"values": values}))
    write_report([read_run(folder)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Values of hospital at each client" in page
    assert page.count("Köln, &lt;Bonn&gt;") == page.count(">Ulm<") == 2  # with the records, and with the accuracies
