"""Pareto fronts: which points no other dominates, the table of all points, and figures that are whole SVGs."""

import csv
import json
import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from report_pages import PRIVATE, page, write_run

from fedstill.cli import main
from fedstill.report import export, pareto
from fedstill.report.drawing import themed_svg
from fedstill.report.page import write_page
from fedstill.report.record import RunRecord, read_run

SVG = "{http://www.w3.org/2000/svg}"


def point(name: str, accuracy: float, up: float, epsilon: float = math.inf, seconds: float = 1.0) -> pareto.Point:
    return pareto.Point(name, name, accuracy, None, up, epsilon, seconds, 1)


def test_a_front_has_the_points_that_no_other_dominates() -> None:
    points = [
        point("small", 0.5, 10),
        point("worse at the same bytes", 0.4, 10),
        point("best", 0.9, 100),
        point("as good for more", 0.9, 200),
        point("between", 0.7, 50),
        point("worse for more", 0.6, 60),
        point("twin", 0.7, 50),
    ]
    names = [p.name for p in pareto.front(points, pareto.COSTS["bytes"])]
    assert names == ["small", "between", "twin", "best"]


def test_a_front_is_the_same_by_brute_force() -> None:
    rng = random.Random(0)
    points = [
        point(str(i), rng.randrange(8) / 8, rng.randrange(6), rng.choice([1.0, 4.0, math.inf])) for i in range(60)
    ]
    for cost in pareto.COSTS.values():
        best = pareto.front(points, cost)
        for p in points:
            better = [q for q in points if cost(q) <= cost(p) and q.accuracy >= p.accuracy]
            strictly = [q for q in better if cost(q) < cost(p) or q.accuracy > p.accuracy]
            assert (p in best) == (not strictly)


def runs(folder: Path) -> list[RunRecord]:
    """Three methods on one task with different models, one private, and another task of a single run."""
    for label, facts in {
        "images": {"accuracy": 0.7, "bytes_up_per_client": 900, "seconds": 60.0},
        "sums": {"accuracy": 0.9, "bytes_up_per_client": 40_000, "seconds": 5.0, "model": "scattering"},
        "noisy": {"accuracy": 0.8, "bytes_up_per_client": 40_000, "seconds": 9.0, "guarantee": PRIVATE},
    }.items():
        for seed in range(2):
            own = dict(facts)
            model = own.pop("model", None)
            place = write_run(folder / label / str(seed), label=label, method=label, seed=seed, **own)
            if model:
                config = json.loads((place / "config.json").read_text())
                config["experiment"]["model"] = model
                (place / "config.json").write_text(json.dumps(config))
    write_run(folder / "other", label="alone", data="letters")
    return [read_run(folder / label / str(seed)) for label in ("images", "sums", "noisy") for seed in range(2)]


def test_a_picture_has_one_point_for_each_row_whatever_the_model(tmp_path: Path) -> None:
    records = [*runs(tmp_path), read_run(tmp_path / "other")]
    (picture,) = pareto.pictures(records)  # the single run of another task is no picture
    assert [p.name for p in picture.points] == ["sums", "noisy", "images"]
    assert [p.seeds for p in picture.points] == [2, 2, 2]
    fronts = {cost: [p.name for p in best] for cost, best in picture.fronts().items()}
    assert fronts == {"bytes": ["images", "sums"], "epsilon": ["noisy", "sums"], "seconds": ["sums"]}
    lines = {line["label"]: line for line in pareto.lines([picture])}
    assert lines["noisy"]["epsilon"] == 1.0
    assert lines["sums"]["epsilon"] is None
    assert lines["images"]["front"] == ["bytes"]


def test_records_that_nothing_protects_are_beside_every_epsilon(tmp_path: Path) -> None:
    for label, guarantee in (("some", {**PRIVATE, "exposed": 8}), ("no", {**PRIVATE, "exposed": 0})):
        write_run(tmp_path / label, label=label, guarantee=guarantee)
    write_run(tmp_path / "none", label="none")
    records = [read_run(tmp_path / label) for label in ("some", "no", "none")]
    (picture,) = pareto.pictures(records)
    exposed = {"some": 8, "no": 0, "none": None}
    assert {line["label"]: line["exposed"] for line in pareto.lines([picture])} == exposed
    assert {line["label"]: line["exposed"] for line in export.runs(records)} == exposed
    epsilons = {cells[0]: cells[3] for cells in pareto.cells(picture)}
    assert epsilons == {"some": "1.0, 8 exposed", "no": "1.0", "none": "none"}


def test_a_guarantee_for_labels_is_none_for_records(tmp_path: Path) -> None:
    write_run(tmp_path / "a", label="labels", guarantee={**PRIVATE, "unit": "label"})
    write_run(tmp_path / "b", label="records", guarantee=PRIVATE, accuracy=0.5)
    (picture,) = pareto.pictures([read_run(tmp_path / "a"), read_run(tmp_path / "b")])
    assert {p.name: p.epsilon for p in picture.points} == {"labels": math.inf, "records": 1.0}


def test_runs_on_other_records_are_not_in_one_picture(tmp_path: Path) -> None:
    for label, facts in {"a": {}, "b": {"partition": "classes:1"}, "c": {"clients": 3}}.items():
        write_run(tmp_path / label, label=label, **facts)
    assert pareto.pictures([read_run(tmp_path / label) for label in "abc"]) == []


def test_runs_on_features_are_in_the_picture_of_their_images(tmp_path: Path) -> None:
    def with_facts(label: str, fingerprint: str, **facts: Any) -> RunRecord:
        place = write_run(tmp_path / label, label=label)
        config = json.loads((place / "config.json").read_text())
        config["experiment"] |= facts
        config["fingerprint"] = fingerprint
        (place / "config.json").write_text(json.dumps(config))
        return read_run(place)

    images = with_facts("images", "a" * 64)
    others = with_facts("others", "b" * 64)  # the file has changed between the runs
    vectors = [with_facts(name, name, features=name, model="linear") for name in ("scattering", "patches")]
    (picture,) = pareto.pictures([images, *vectors])
    assert {p.name for p in picture.points} == {"images", "scattering", "patches"}
    assert pareto.pictures([images, others, *vectors]) == []  # of which images the vectors are made is not known
    again = with_facts("again", "other", features="patches", model="linear")
    assert pareto.pictures([images, *vectors, again]) == []


@pytest.mark.parametrize(
    ("worst", "best"),
    [(10, 99.5), (89, 90), (99.9, 100), (0, 100), (50, 100), (100, 100), (97.2, 97.3), (99.995, 99.996), (92, 93)],
)
def test_high_accuracies_have_an_axis_of_errors_whose_ticks_tell_the_truth(worst: float, best: float) -> None:
    dots = [pareto.Dot(str(y), "kind", 1.0 + i, y, best=False) for i, y in enumerate((worst, best))]
    plot = pareto.scatter(dots, "x", str)
    (axis,) = plot.y
    assert axis.name == "accuracy, % (log of the error)" and axis.range is not None and axis.ticks is not None
    low, high = axis.range
    places = dict(zip((worst, best), [y for line in plot.lines for y in line.y], strict=True))
    assert all(low <= y <= high for y in places.values())
    ticks = {float(text): y for y, text in axis.ticks}
    assert len(ticks) >= 3
    one_pixel = (high - low) / 300
    known = [*ticks.items(), *places.items()]
    for one, y in known:  # higher is better, to a tenth of a pixel, for ticks and dots alike
        assert all(y < other_y + 0.1 * one_pixel for other, other_y in known if other > one)
        assert all(y > other_y + one_pixel for other, other_y in known if other < one - 0.05 * (100.001 - other))
    if best < 100:  # equal ratios of errors have equal distances
        (a, ya), (b, yb), *_, (c, yc) = sorted(ticks.items())
        expected = math.log((100 - a) / (100 - b)) / math.log((100 - a) / (100 - c))
        assert (ya - yb) / (ya - yc) == pytest.approx(expected, abs=0.01)


def begin(mark: ElementTree.Element) -> tuple[float, float]:
    """The place of a marker, or where its outline begins."""
    circle, outline = [mark.get("cx"), mark.get("cy")], str(mark.get("d")).split()[1:3]
    x, y = (mark.get("x"), mark.get("y")) if mark.tag == f"{SVG}use" else outline or circle
    return float(str(x)), float(str(y))


def drawn(dots: list[pareto.Dot]) -> tuple[ElementTree.Element, dict[str, tuple[float, float]]]:
    """The SVG of the dots, and the places of its texts."""
    plot = pareto.scatter(dots, "bytes & more", lambda value: f"{value:g}")
    root = ElementTree.fromstring(themed_svg(plot, "bytes", "a <title>"))
    texts = [text for text in root.iter(f"{SVG}text") if text.get("x")]
    return root, {str(text.text): (float(str(text.get("x"))), float(str(text.get("y")))) for text in texts}


def test_names_on_the_front_do_not_cover_each_other() -> None:
    places = [(3.0, 96.0), (4.7, 97.3), (8.0, 97.4), (8.2, 97.5), (11.0, 97.6)]
    dots = [pareto.Dot(f"method-{i}", "kind", x, y, best=True) for i, (x, y) in enumerate(places)]
    boxes = [place for text, place in drawn(dots)[1].items() if text.startswith("method-")]
    assert len(boxes) == 5
    for i, (x, y) in enumerate(boxes):
        assert not [1 for a, b in boxes[:i] if abs(x - a) < 6 * len("method-0") - 1 and abs(y - b) < 10]


@pytest.mark.parametrize("xs", [[5.0], [1.0, 1e9], [0.0, 10.0, math.inf], [0.0, 0.0], [math.inf, 1.0], [3.0, 3.1, 3.2]])
def test_every_dot_and_name_lies_in_the_figure(xs: list[float]) -> None:
    dots = [pareto.Dot(f"<b>& {i}", "kind", x, 10.0 * i, best=True) for i, x in enumerate(xs)]
    root, texts = drawn(dots)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    marks = [mark for mark in root.iter() if mark.get("pointer-events")]
    assert len(marks) == len(dots) == sum(text.startswith("<b>&") for text in texts)
    for x, y in [*texts.values(), *map(begin, marks)]:
        assert 0 <= x < width and 0 < y < height


def test_a_figure_for_other_pages_is_light_or_dark_and_the_same_each_time() -> None:
    dots = [pareto.Dot(f"m{i}", f"m{i}", 10.0**i, 10.0 * i, best=True) for i in range(3)]
    plot = pareto.scatter(dots, "bytes", str)
    text = themed_svg(plot, "bytes", "about")
    assert "prefers-color-scheme:dark" in text and 'aria-label="about"' in text and "<metadata" not in text
    assert "<script" not in text and text == themed_svg(plot, "bytes", "about")


@pytest.mark.parametrize("number", [1, 18, 19, 28, 29, 56])
def test_every_kind_has_a_line_of_its_own_in_the_legend(number: int) -> None:
    kinds = [f"method-{i:02d}" for i in range(number)]
    dots = [pareto.Dot(f"{kind} here", kind, 1.0 + i, 50.0, best=False) for i, kind in enumerate(kinds)]
    root, texts = drawn(dots)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    places = [texts[kind] for kind in kinds] if number > 1 else []
    assert all(x < width - 30 and y < height for x, y in places)
    assert all(abs(y - b) >= 10 or abs(x - a) >= 50 for i, (x, y) in enumerate(places) for a, b in places[:i])


def test_the_front_is_a_staircase_and_cheaper_dots_are_further_left() -> None:
    dots = [pareto.Dot(str(i), "kind", 10.0**i, 10.0 * i, best=i != 1) for i in range(4)]
    plot = pareto.scatter(dots, "x", lambda value: f"{value:g}")
    front, *others = plot.lines
    assert front.steps and front.x == [0, 2, 3] and front.y == [0, 20, 30]
    found = sorted((x, y) for line in others for x, y in zip(line.x, line.y, strict=True))
    assert [y for _, y in found] == [0, 10, 20, 30]


def test_the_command_writes_the_table_the_figures_and_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(tmp_path / "runs")
    main(["report", str(tmp_path / "runs"), "--pareto", "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "Pareto fronts: digits" in shown
    for cost in ("bytes", "epsilon", "seconds"):
        ElementTree.parse(tmp_path / "out" / f"pareto-{cost}.svg")
    table = list(csv.DictReader((tmp_path / "out" / "pareto.csv").open()))
    assert [row["label"] for row in table] == ["sums", "noisy", "images"]
    assert "| sums | 90.00" in (tmp_path / "out" / "pareto.md").read_text()
    assert (tmp_path / "out" / "report.html").read_text().count('id="figure-front-') == 3
    main(["report", str(tmp_path / "runs"), "--pareto", "--json", "--out", str(tmp_path / "out")])
    assert [row["label"] for row in json.loads(capsys.readouterr().out)["pareto"]] == ["sums", "noisy", "images"]


def test_a_single_point_is_refused_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", label="a")
    with pytest.raises(SystemExit) as error:
        main(["report", str(tmp_path / "a"), "--pareto", "--out", str(tmp_path / "out")])
    assert error.value.code == 2
    assert "--pareto needs two finished runs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_page_without_fronts_is_as_before_and_names_are_text(tmp_path: Path) -> None:
    records: list[Any] = runs(tmp_path / "runs")
    assert "Pareto" not in page(records, tmp_path)
    write_run(tmp_path / "evil", label="<img src=x>", accuracy=0.95)
    records.append(read_run(tmp_path / "evil"))
    write_page(records, tmp_path / "report.html", fronts=pareto.pictures(records))
    assert "<img src=x>" not in (tmp_path / "report.html").read_text()
