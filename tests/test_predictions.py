"""Predictions of records without labels: tables, pictures and texts, from Python and on the command line."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tiny_backbones
import torch
from PIL import Image

import fedstill
from fedstill import InputError, RunRecord
from fedstill.cli import main

LINEAR = {"model": "linear", "clients": 2, "workers": 0, "rounds": 2, "local": {"lr": 0.5}}
SCHEMA = """
target = "died"
classes = ["no", "yes"]

[columns.age]
kind = "number"
range = [0, 100]
outside = "clip"

[columns.dose]
kind = "number"
range = [0, 5000]

[columns.ward]
kind = "category"
values = ["surgery", "icu"]
"""


def patients(seed: int, n: int = 300) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"patient": [f"{i:03}" for i in range(n)], "age": rng.integers(20, 100, n)})
    frame["dose"] = (rng.uniform(1000, 4900, n)).round(1)
    frame["ward"] = np.where(rng.random(n) < 0.5, "icu", "surgery")
    frame["died"] = np.where(frame["age"] + rng.normal(0, 5, n) > 60, "yes", "no")
    return frame


def code(words: list[str]) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(words)
        raise SystemExit(0)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predictions")


@pytest.fixture(scope="module")
def plain(folder: Path) -> RunRecord:
    """A run on two columns of numbers, without a schema."""
    data = patients(0)[["age", "dose", "died"]]
    return fedstill.run("fedavg", data=(data, "died"), out=folder / "plain", **LINEAR)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def coded(folder: Path) -> RunRecord:
    """A run on a table by its schema."""
    place = folder / "schema.toml"
    place.write_text(SCHEMA)
    task = {"schema_file": place, "out": folder / "coded"}
    return fedstill.run("fedavg", data=patients(0), **task, **LINEAR)  # type: ignore[arg-type]


def written(frame: pd.DataFrame, place: Path) -> Path:
    if place.suffix == ".parquet":
        frame.to_parquet(place)
    else:
        frame.to_csv(place, index=False, sep=";" if "semicolons" in place.stem else ",")
    return place


@pytest.mark.parametrize("how", ["plain", "coded"])
@pytest.mark.parametrize("file", ["new.csv", "semicolons.csv", "new.parquet"])
def test_rows_without_a_class_are_predicted_as_those_with_one(
    how: str, file: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run: RunRecord = request.getfixturevalue(how)
    new = patients(1)
    judged = fedstill.evaluate(run, written(new, tmp_path / f"labelled-{file}"), label_column="died", group="none")
    assert isinstance(judged, fedstill.Evaluation) and judged.whole
    given = new[["ward", "dose", "patient", "age"]]  # another order, without the class
    found = fedstill.predict(run, written(given, tmp_path / file), keep=["patient"])
    assert found.class_names == ("no", "yes") and found.probabilities is not None
    np.testing.assert_array_equal(found.probabilities, judged.scores.probabilities)
    assert found.predicted.tolist() == [("no", "yes")[c] for c in judged.scores.predicted]
    table = found.to_pandas()
    assert table["patient"].tolist() == new["patient"].tolist()  # 007 has its zeros
    left = "ward" if how == "plain" else None
    assert found.told == ((f"not the model's, so not read: {left}",) if left else ())
    unkept = fedstill.predict(run, tmp_path / file)
    assert unkept.told[-1].endswith("ward, patient" if left else "patient")


@pytest.mark.parametrize("how", ["plain", "coded"])
@pytest.mark.parametrize("kind", ["pandas", "arrow", "polars"])
def test_a_frame_is_predicted_as_its_file(how: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run: RunRecord = request.getfixturevalue(how)
    given = patients(1)[["ward", "dose", "patient", "age"]]
    expected = fedstill.predict(run, written(given, tmp_path / "new.parquet"), keep=["patient"])
    frame: Any = given.set_axis(range(7, 7 + len(given)))
    if kind != "pandas":
        frame = pa.Table.from_pandas(given)
    if kind == "polars":
        frame = pytest.importorskip("polars").from_arrow(frame)
    found = fedstill.predict(run, frame, keep=["patient"])
    np.testing.assert_array_equal(found.probabilities, expected.probabilities)  # type: ignore[arg-type]
    assert found.told == expected.told and found.to_pandas().equals(expected.to_pandas())


@pytest.mark.parametrize("kind", ["frame", "parquet"])
def test_whole_numbers_that_are_kept_stay_such_beside_a_gap(kind: str, coded: RunRecord, tmp_path: Path) -> None:
    """They were decimals: patient 9007199254740993 became another one, and 5 became 5.0."""
    given = patients(1)[:3].assign(patient=pd.array([2**53 + 1, None, 5], dtype="Int64"))
    found = fedstill.predict(
        coded, given if kind == "frame" else written(given, tmp_path / "new.parquet"), keep=["patient"]
    )
    found.save(tmp_path / "out.csv")
    rows = (tmp_path / "out.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["patient", "9007199254740993", "", "5"]


def test_what_is_no_file_and_no_frame_is_refused(coded: RunRecord) -> None:
    with pytest.raises(InputError, match=r"ndarray; give a file, a folder or a table; arrays .*load_model\(run\)"):
        fedstill.predict(coded, np.zeros((3, 2)))
    with pytest.raises(InputError, match="the data have 0 records"):
        fedstill.predict(coded, patients(1)[:0])
    with pytest.raises(InputError, match="the data have two columns 'age'"):
        fedstill.predict(coded, patients(1).rename(columns={"dose": "age"}))


def test_a_threshold_decides_as_in_an_evaluation(coded: RunRecord, tmp_path: Path) -> None:
    new = patients(2)
    place = written(new, tmp_path / "new.csv")
    for positive in ("yes", "no"):
        judged = fedstill.evaluate(coded, place, positive=positive, threshold=0.7, group="none")
        found = fedstill.predict(coded, place, positive=positive, threshold=0.7)
        assert found.predicted.tolist() == [("no", "yes")[c] for c in judged.scores.predicted]  # type: ignore[union-attr]
    assert {*found.predicted} == {"no", "yes"}
    with pytest.raises(InputError, match="it must be one of two classes: no, yes"):
        fedstill.predict(coded, place, positive="dead")


def test_ten_thousand_rows_are_in_their_order(coded: RunRecord, tmp_path: Path) -> None:
    new = patients(3, 10_000)
    found = fedstill.predict(coded, written(new, tmp_path / "many.csv"), keep=["patient"])
    alone = fedstill.predict(coded, written(new[7_000:7_001], tmp_path / "one.csv"), keep=["patient"])
    assert found.columns["patient"][7_000] == alone.columns["patient"][0] == "7000"
    assert found.probabilities is not None and alone.probabilities is not None
    np.testing.assert_allclose(found.probabilities[7_000], alone.probabilities[0], rtol=1e-5)
    assert len(found.to_pandas()) == 10_000 and found.to_pandas().index.name == "record"


def test_numbers_are_predicted_in_their_unit(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(
        'target = "stay"\nrange = [0, 30]\n\n[columns.age]\nkind = "number"\nrange = [0, 100]\n'
    )
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(0, 100, 400)})
    frame["stay"] = frame["age"] * 0.25
    task = {"schema_file": str(tmp_path / "schema.toml"), **LINEAR, "rounds": 20}
    run = fedstill.run("fedavg", data=frame, out=tmp_path / "run", **task)  # type: ignore[arg-type]
    new = pd.DataFrame({"age": [20, 40]})
    found = fedstill.predict(run, written(new, tmp_path / "new.csv"))
    assert found.probabilities is None and found.class_names == ("stay",)
    np.testing.assert_allclose(found.predicted, [5, 10], atol=0.5)
    assert list(found.to_pandas().columns) == ["predicted"]
    with pytest.raises(InputError, match="positive and threshold are for two classes"):
        fedstill.predict(run, tmp_path / "new.csv", threshold=0.5)


WRONG = {
    "absent": ("age,ward\n50,icu\n", "'dose'"),
    "a value beyond its range": ("age,dose,ward\n50,9000,icu\n", "9000"),
    "thousands": ("age;dose;ward\n50;1.200;icu\n51;4.500;icu\n", r"may be 1200 or 1\.2"),
    "no rows": ("age,dose,ward\n", "has 0 records"),
    "two columns of a name": ("age,dose,ward,age\n50,1,icu,3\n", "two columns 'age'"),
    "a text": ("age,dose,ward\nold,1200,icu\n", "'age'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_table_is_a_sentence(what: str, coded: RunRecord, tmp_path: Path) -> None:
    content, words = WRONG[what]
    (tmp_path / "new.csv").write_text(content)
    with pytest.raises(InputError, match=words):
        fedstill.predict(coded, tmp_path / "new.csv")


def test_values_that_are_clipped_are_said(coded: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,dose,ward\n150,1200.5,icu\n40,1300.5,icu\n")
    found = fedstill.predict(coded, tmp_path / "new.csv")
    assert len(found.told) == 1 and "'age'" in found.told[0] and found.told[0].startswith("1 of 2 values"), found.told


def test_a_gap_or_a_text_in_a_column_of_numbers_is_refused(plain: RunRecord, tmp_path: Path) -> None:
    for cell, words in (("", "record 1 has a value that is not finite"), ("old", "'age' has type string")):
        (tmp_path / "new.csv").write_text(f"age,dose\n50,1200.5\n{cell},1300.5\n")
        with pytest.raises(InputError, match=words):
            fedstill.predict(plain, tmp_path / "new.csv")


@pytest.fixture(scope="module")
def pictures(folder: Path) -> tuple[RunRecord, Path]:
    """A run on pictures, and a folder of its test records by class."""
    task: dict[str, Any] = {"model": "convnet:width=8,depth=2", "clients": 2, "limit": 600, "workers": 0}
    run = fedstill.run("fedavg", data="digits", rounds=2, out=folder / "pictures", **task)
    test = fedstill.load_data("digits").test
    for i, (image, label) in enumerate(zip(test.images, test.labels, strict=True)):
        place = folder / "digits" / str(int(label)) / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place)
    return run, folder / "digits"


def test_pictures_are_predicted_by_their_paths(pictures: tuple[RunRecord, Path]) -> None:
    run, place = pictures
    found = fedstill.predict(run, place)
    files = list(found.columns["file"])
    assert files == sorted(files) and len(files) > 256 and found.told == ()
    images = np.stack([np.asarray(Image.open(place / file))[None] for file in files])
    expected = run.load_model().predict_proba(torch.from_numpy(images))
    assert found.probabilities is not None
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-5)
    right = np.mean([Path(file).parent.name == name for file, name in zip(files, found.predicted, strict=True)])
    assert right == pytest.approx(fedstill.evaluate(run, place).accuracy)  # type: ignore[union-attr]
    one = fedstill.predict(run, place / files[9])
    assert one.columns["file"] == [Path(files[9]).name] and one.predicted[0] == found.predicted[9]


@pytest.mark.parametrize("form", ["coloured", "large", "deep", "mixed"])
def test_pictures_of_another_form_are_made_the_runs_and_said(
    form: str, pictures: tuple[RunRecord, Path], tmp_path: Path
) -> None:
    run, place = pictures
    expected = fedstill.predict(run, place)
    for i, file in enumerate(expected.columns["file"]):
        picture = Image.open(place / file)
        if form == "coloured":
            picture = picture.convert("RGB")
        elif form == "deep":
            picture = Image.fromarray(np.asarray(picture).astype(np.uint16) * 257)
        elif form == "large" or i % 4 == 0:
            picture = picture.resize((16, 16), Image.Resampling.NEAREST)
        (tmp_path / "new" / file).parent.mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "new" / file)
    found = fedstill.predict(run, tmp_path / "new")
    n = len(expected.predicted)
    number = {"mixed": (n + 3) // 4}.get(form, n)
    what = "were made opaque, gray or RGB, of 8 bits" if form == "deep" else "were cropped and resized to 8 x 8"
    assert found.told == (() if form == "coloured" else (f"{number:,} of {n:,} pictures {what}",))
    if form in ("coloured", "deep"):
        assert found.predicted.tolist() == expected.predicted.tolist()
    else:
        assert np.mean(found.predicted == expected.predicted) > 0.8


def test_what_is_no_record_of_the_model_is_refused(
    pictures: tuple[RunRecord, Path], plain: RunRecord, tmp_path: Path
) -> None:
    run, place = pictures
    table = written(patients(1), tmp_path / "new.csv")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    for name in ("empty", "both", "tables"):
        (tmp_path / name).mkdir()
    written(patients(1), tmp_path / "both" / "new.parquet")
    written(patients(1), tmp_path / "tables" / "new.csv")
    Image.new("L", (8, 8)).save(tmp_path / "both" / "a.png")
    for model, data, words in (
        (run, table, "is a table, but the model takes pictures"),
        (plain, place, "is no table, but the model takes the rows of one"),
        (run, tmp_path / "red.png", "is in colour, but the model takes gray pictures"),
        (run, tmp_path / "both", "has pictures and tables"),
        (run, tmp_path / "tables", "has tables alone"),
        (run, tmp_path / "empty", "has no pictures"),
        (run, tmp_path / "absent", "is no file or folder here"),
        (run, Path(fedstill.__file__), "cannot be read"),
        (run, "~nobody-of-this-name/x.png", "no home directory is known for"),
    ):
        with pytest.raises(InputError, match=words):
            fedstill.predict(model, data)
    with pytest.raises(InputError, match="is no table; leave it out"):
        fedstill.predict(run, place, keep=["patient"])
    with pytest.raises(InputError, match=r"has no column 'patent' to keep; did you mean patient\?"):
        fedstill.predict(plain, table, keep=["patent"])
    with pytest.raises(InputError, match=r"keep is 'patient'; give a list"):
        fedstill.predict(plain, table, keep="patient")


@pytest.mark.slow
def test_texts_are_predicted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    encoder = str(tiny_backbones.save_texts(tmp_path / "encoder"))
    texts = pd.DataFrame({"text": [f"{word} of it {i % 7}" for i in range(60) for word in ("good", "bad")]})
    texts["label"] = ["a", "b"] * 60
    texts.to_csv(tmp_path / "texts.csv", index=False)
    task: dict[str, Any] = {"features": f"hf:{encoder}", "model": "linear", "clients": 2, "workers": 0}
    run = fedstill.run("fedavg", data=str(tmp_path / "texts.csv"), rounds=1, out=tmp_path / "run", **task)
    found = fedstill.predict(run, written(texts.assign(n=1)[["n", "text"]], tmp_path / "new.csv"))
    assert found.told == ("not the model's, so not read: n",)
    np.testing.assert_allclose(found.probabilities, run.load_model().predict_proba(texts["text"].tolist()), rtol=1e-5)  # type: ignore[arg-type]
    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    with pytest.raises(InputError, match="is no table, but the model takes the rows of one"):
        fedstill.predict(run, tmp_path / "one.png")


def test_the_command_prints_or_writes_for_the_owner_alone(
    coded: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = written(patients(4)[["patient", "age", "dose", "ward"]], tmp_path / "new.csv")
    words = ["predict", str(coded.folder), str(new), "--keep", "patient"]
    assert code(words) == 0
    printed = capsys.readouterr()
    table = pd.read_csv(io.StringIO(printed.out), dtype={"patient": str})
    assert list(table) == ["record", "patient", "predicted", "probability of no", "probability of yes"]
    assert table["patient"].tolist() == patients(4)["patient"].tolist() and printed.err == ""
    out = tmp_path / "predicted.csv"
    assert code([*words, "--out", str(out)]) == 0
    assert out.read_text() == printed.out and out.stat().st_mode & 0o077 == 0
    capsys.readouterr()
    assert code([*words, "--out", str(out)]) == 2
    assert "name a new file for the predictions" in capsys.readouterr().err
    assert code([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["records"] == 300 and rows["predictions"][7]["patient"] == "007"
    assert code(["predict", str(coded.folder), str(new)]) == 0
    assert capsys.readouterr().err == "not the model's, so not read: patient\n"


def test_an_evaluations_predictions_are_the_owners_alone(coded: RunRecord, tmp_path: Path) -> None:
    found = fedstill.evaluate(coded, written(patients(5), tmp_path / "new.csv"), group="none")
    found.save(str(tmp_path / "scores.csv"))
    with pytest.raises(InputError, match="name a new file for the predictions"):
        found.save(tmp_path / "scores.csv")
    assert (tmp_path / "scores.csv").stat().st_mode & 0o077 == 0
    assert len(pd.read_csv(tmp_path / "scores.csv")) == 300


@pytest.mark.parametrize("missing", [None, 0.0])
def test_an_empty_line_of_a_file_with_one_column_is_a_gap(missing: float | None, tmp_path: Path) -> None:
    """The rows after it moved up by one, without a word."""
    text = 'target = "died"\nclasses = ["no", "yes"]\n\n[columns.x]\nkind = "number"\nrange = [-6, 6]\n'
    (tmp_path / "s.toml").write_text(text + ("" if missing is None else f"missing = {missing}\n"))
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=200).clip(-5, 5)})
    frame["died"] = np.where(frame["x"] > 0, "yes", "no")
    run = fedstill.run("fedavg", data=frame, schema_file=tmp_path / "s.toml", out=tmp_path / "run", **LINEAR)  # type: ignore[arg-type]
    (tmp_path / "new.csv").write_text("x\n1.5\n\n-1.5\n0.2\n")
    if missing is None:
        with pytest.raises(InputError, match="'x'"):
            fedstill.predict(run, tmp_path / "new.csv")
        return
    found = fedstill.predict(run, tmp_path / "new.csv", keep=["x"])
    assert len(found.predicted) == 4 and found.columns["x"] == ["1.5", None, "-1.5", "0.2"]
    (tmp_path / "quoted.csv").write_text('x\n1.5\n""\n-1.5\n0.2\n')
    quoted = fedstill.predict(run, tmp_path / "quoted.csv")
    np.testing.assert_array_equal(found.probabilities, quoted.probabilities)  # type: ignore[arg-type]


def test_a_picture_is_said_to_be_cropped_where_the_run_has_a_size_too(
    pictures: tuple[RunRecord, Path], tmp_path: Path
) -> None:
    _, place = pictures
    task: dict[str, Any] = {"model": "linear", "clients": 2, "rounds": 1, "workers": 0, "size": 8}
    run = fedstill.run("fedavg", data=str(place), out=tmp_path / "run", **task)
    Image.new("L", (16, 8), 90).save(tmp_path / "wide.png")
    assert fedstill.predict(run, tmp_path / "wide.png").told == ("1 of 1 pictures were cropped and resized to 8 x 8",)
    clear = Image.new("LA", (8, 8), (90, 0))
    clear.save(tmp_path / "clear.png")
    assert fedstill.predict(run, tmp_path / "clear.png").told == (
        "1 of 1 pictures were made opaque, gray or RGB, of 8 bits",
    )
    Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)).save(tmp_path / "dark.tif")
    with pytest.raises(InputError, match="32 bits a pixel and values up to 63, which may be meant as 8 bits or as 16"):
        fedstill.predict(run, tmp_path / "dark.tif")
