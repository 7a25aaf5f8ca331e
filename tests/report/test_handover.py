"""A published program takes what people have: raw rows of a table with a schema, and raw pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import fedstill
from fedstill.base import seeds
from fedstill.base.records import AS_THEY_ARE, Normalisation
from fedstill.data import features, pictures
from fedstill.data.table_schema import TableSchema
from fedstill.experiment.trained import Trained
from fedstill.measures import decide, of_counts
from fedstill.models.build import build
from fedstill.report import programs, publish, rows

SCHEMA = """
target = "died"
classes = ["no", "yes"]
group = "patient"
site = "hospital"

[columns.age]
kind = "number"
range = [0, 110]
missing = 60

[columns.sodium]
kind = "number"
range = [100, 180]
outside = "clip"

[columns.ward]
kind = "category"
values = ["surgery", "medicine", "3"]
outside = "other"
missing = "medicine"

[columns.smoker]
kind = "boolean"
missing = true

[columns.admitted]
kind = "date"
range = ["2019-01-01", "2024-12-31"]
"""
NUMBER = SCHEMA.replace(
    'target = "died"\nclasses = ["no", "yes"]', 'target = "days"\nrange = [0, 40]\noutside = "clip"'
)


@pytest.mark.parametrize(
    "column",
    [
        '[columns.a]\nkind = "date"\nrange = ["1900-01-01", "9999-12-31"]\noutside = "clip"',
        '[columns.a]\nkind = "boolean"\nmissing = true',
        '[columns.a]\nkind = "number"\nrange = [-4e307, 4e307]\noutside = "clip"',
    ],
)
def test_a_program_of_one_column_is_compared_with_what_it_may_have(column: str, tmp_path: Path) -> None:
    """Also with one record alone, which is a gap, and with days after the last year."""
    (tmp_path / "schema.toml").write_text(f'target = "died"\nclasses = ["no", "yes"]\n\n{column}\n')
    schema = TableSchema.read(tmp_path / "schema.toml")
    width = len(schema.features)
    model = Trained(nn.Linear(width, 2), (width,), ("no", "yes"), AS_THEY_ARE, columns=schema.features, schema=schema)
    programs.write(model, model.shape, tmp_path / "model.pt2", schema=schema)
    assert (tmp_path / "model.pt2").exists()


def table(n: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = np.where(rng.random(n) < 0.2, np.nan, rng.uniform(0, 110, n).round(1))
    ward = rng.choice(["surgery", "medicine", "3", "garden", None], n)
    days = np.datetime64("2019-01-01") + rng.integers(0, 2000, n)
    sick = np.nan_to_num(age, nan=60) + 30 * (ward == "surgery") + rng.normal(0, 20, n) > 70
    frame = {
        "hospital": rng.choice(["a", "b"], n),
        "patient": rng.integers(0, n, n),
        "smoker": rng.choice(["yes", "NO", None], n),
        "sodium": rng.uniform(90, 190, n).round(2),
        "age": age,
        "ward": ward,
        "admitted": days.astype(str),
        "died": np.where(sick, "yes", "no"),
        "days": np.where(sick, 20.5, 3.25),
    }
    return pd.DataFrame(frame)


@pytest.fixture(scope="module", params=["classes", "number"])
def handed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on such a table, its files, and new rows."""
    place = tmp_path_factory.mktemp(request.param)
    (place / "data").mkdir()
    (place / "schema.toml").write_text(SCHEMA if request.param == "classes" else NUMBER)
    table(200).to_csv(place / "data" / "train.csv", index=False)
    table(80, 1).to_csv(place / "data" / "test.csv", index=False)
    task: dict[str, Any] = {"data": str(place / "data"), "schema_file": str(place / "schema.toml"), "clients": 2}
    task |= {"partition": "by:hospital", "model": "linear", "workers": 0, "progress": False}
    run = fedstill.run("fedavg", rounds=3, local={"lr": 0.3}, out=place / "run", **task)
    (place / "schema.toml").write_text("changed since")  # the run keeps what it was
    onnx = {"onnx": True}
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        onnx = {}
    facts = fedstill.publish(run, place / "out", threshold=0.4 if request.param == "classes" else None, **onnx)
    schema = TableSchema(**run.config["table_schema"])
    return {"run": run, "place": place, "facts": facts, "onnx": bool(onnx), "schema": schema}


def expected(handed: dict[str, Any], frame: pd.DataFrame) -> tuple[Any, Any]:
    """The run's own outputs and predictions."""
    import pyarrow as pa

    schema, model = handed["schema"], handed["run"].load_model()
    encoded, _ = schema.encode(pa.Table.from_pandas(frame, preserve_index=False), "it")
    vectors = np.stack([encoded[name].to_numpy() for name in schema.features], 1).astype(np.float32)
    with torch.no_grad():
        return model(torch.from_numpy(vectors)).numpy(), model.predict(vectors)


@pytest.mark.filterwarnings("ignore:[0-9]+ of 300 values of column")  # sodium is clipped, and wards are others
def test_raw_rows_have_the_predictions_of_the_run_in_every_program(handed: dict[str, Any]) -> None:
    frame, out = table(300, 2), handed["place"] / "out"
    logits, said = expected(handed, frame)
    names: dict[str, Any] = {"__name__": "handed"}
    exec((out / "rows.py").read_text("utf-8"), names)  # the file that is handed on, not the module
    frame.to_csv(out / "new.csv", index=False, sep=";", decimal=",")
    for options in ({}, {"onnx": True}) if handed["onnx"] else ({},):
        model = names["Model"](out, **options)
        for given in (frame, frame.to_dict("records"), out / "new.csv"):
            found = model.outputs(given)
            if "target" in handed["facts"]:
                assert np.abs(found[:, 0] - said).max() < 1e-4 and said.std() > 1
                assert np.array_equal(model.predict(given), found[:, 0])
                continue
            np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
            shares = torch.from_numpy(logits).softmax(1).numpy()
            np.testing.assert_allclose(model.probabilities(given), shares, rtol=1e-5, atol=1e-6)
            assert np.array_equal(model.predict(given) == "yes", shares[:, 1] >= 0.4)
            assert 0.1 < (shares[:, 1] >= 0.4).mean() < 0.9 and ((shares[:, 1] >= 0.4) != (said == "yes")).any()


def test_a_wrong_row_is_a_sentence_and_the_bare_program_gives_no_number(handed: dict[str, Any]) -> None:
    out, schema = handed["place"] / "out", handed["schema"].model_dump(mode="json")
    good = {"age": 50, "sodium": "140,5", "ward": "surgery", "smoker": True, "admitted": "2020-02-29"}
    assert not np.isnan(rows.codes([good], schema)).any()
    for change, sentence in (
        (
            {"age": 700},
            r"row 1: column 'age' has 700, outside of 0 to 110 \(6.36 times the largest; another unit\?\)",
        ),
        ({"age": "sixty"}, "column 'age' has 'sixty', which is no number"),
        ({"age": "1.000,5"}, "with comma and point"),
        ({"sodium": None}, "column 'sodium' has a gap, for which nothing stands"),
        ({"smoker": "maybe"}, "neither true nor false"),
        ({"admitted": "29.02.2020"}, "which is no day; write dates as YYYY-MM-DD"),
        ({"admitted": "2020-02-01 to 2020-03-01"}, "which is no day; write dates as YYYY-MM-DD"),
        ({"admitted": "2018-12-31"}, "outside of"),
        ({"Age ": 50, "age": ...}, r"row 1 has no column 'age'; did you mean 'Age '"),
    ):
        row = {name: value for name, value in {**good, **change}.items() if value is not ...}
        with pytest.raises(ValueError, match=sentence):
            rows.codes([good, row], schema)
    unclear, plain = {**good, "age": "1,088"}, {**good, "sodium": "140"}
    assert rows.codes([unclear], schema)[0, 0] == 1.088  # the comma of sodium is decimal
    with pytest.raises(ValueError, match=r"column 'age' has '1,088', which may be 1088 or 1\.0880; write it as one"):
        rows.codes([{**plain, "age": "1,088"}], schema)
    with pytest.raises(ValueError, match="commas in column 'sodium' and with points in column 'age'"):
        rows.codes([good, {**plain, "age": "1.088"}], schema)
    raw = np.tile(rows.codes([good], schema), (7, 1))
    raw[1, 0], raw[2, 1], raw[3, 3], raw[4, 4], raw[5, 0], raw[6, 2] = 700, np.nan, 2, 1, np.nan, 99
    with torch.no_grad():
        found = torch.export.load(out / "model.pt2").module()(torch.from_numpy(raw)).numpy()
    refused = np.isnan(found).all(1)
    assert refused.tolist() == [False, True, True, True, True, False, False]  # 99 is "other", and an age may lack
    if handed["onnx"]:
        import onnxruntime

        session = onnxruntime.InferenceSession(out / "model.onnx")
        np.testing.assert_allclose(session.run(None, {"records": raw})[0], found, rtol=1e-5, atol=1e-5)


def test_the_card_has_measures_with_intervals_the_schema_and_the_threshold(handed: dict[str, Any]) -> None:
    card = (handed["place"] / "out" / "README.md").read_text("utf-8")
    assert "| ward | category | surgery, medicine, 3 | medicine, and a column that tells gaps | other |" in card
    assert "| age | number | 0 to 110 | 60, and a column that tells gaps | refuse |" in card
    assert "| admitted | date | 2019-01-01 to 2024-12-31 | refused | refuse |" in card
    assert "from rows import Model" in card
    facts = json.loads((handed["place"] / "out" / "config.json").read_text("utf-8"))
    assert TableSchema(**facts["schema"]) == handed["schema"]
    if "target" in facts:
        assert "| RMSE on test records, with its 95 % interval |" in card and "The target is days: 0 to 40." in card
        return
    found = fedstill.evaluate(handed["run"], str(handed["place"] / "data" / "test.csv")).scores
    values, ends = found.measures(), found.intervals()
    assert found.persons is not None and len(set(found.persons)) < len(found.persons)
    for name, word in {"auc": "AUC, the area under the receiver's curve", "sensitivity": "sensitivity for yes"}.items():
        value, low, high = (100 * one for one in (values[name], *ends[name]))
        assert f"| {word} | {value:.2f} % (95 % interval {low:.2f} to {high:.2f}) |\n" in card
    value, low, high = values["brier"], *ends["brier"]
    assert f"| Brier score (summed over classes) | {value:.4f} (95 % interval {low:.4f} to {high:.4f}) |\n" in card
    assert "| test records; intervals by resampling whole persons (patient) | 80 |\n" in card
    of_no = handed["run"].measures["no"]
    assert of_no["specificity"] == handed["run"].measures["yes"]["sensitivity"] and of_no["auc"][0] == values["auc"]
    assert "yes is predicted from a probability (softmax of the logits) of 0.4 on" in card
    assert facts["decision"] == {"positive": "yes", "threshold": 0.4}


def test_intervals_of_counts_are_those_of_resampled_records() -> None:
    counts = np.array([[50, 10], [5, 15]])
    found = of_counts(counts, 1)
    assert found["accuracy"][0] == 65 / 80 and found["sensitivity"][0] == 0.75 and found["precision"][0] == 0.6
    assert found["balanced accuracy"][0] == pytest.approx((50 / 60 + 0.75) / 2) and found["F1"][0] == 2 * 15 / 45
    spread = (65 / 80 * 15 / 80 / 80) ** 0.5
    value, low, high = found["accuracy"]
    assert value - low == pytest.approx(1.96 * spread, rel=0.2) and high - value == pytest.approx(
        1.96 * spread, rel=0.2
    )
    assert set(of_counts(np.diag([3, 4, 0]), 0)) == {"accuracy", "balanced accuracy"}


def test_a_threshold_is_for_two_classes(tmp_path: Path) -> None:
    network = nn.Linear(3, 3)
    three = Trained(network, (3,), ("a", "b", "c"), AS_THEY_ARE)
    with pytest.raises(ValueError, match="are for two classes, but the model has 3; drop them"):
        publish.decision_of(three, None, 0.3)
    two = Trained(network, (3,), ("a", "b"), AS_THEY_ARE)
    with pytest.raises(ValueError, match="positive is 'c'; it must be one of two classes: a, b"):
        publish.decision_of(two, "c", None)
    assert publish.decision_of(two, "a", None) == {"decision": {"positive": "a"}}


@pytest.mark.parametrize("shape", [(70, 131, 3), (40, 40, 1), (9, 300, 3), (131, 70, 1), (1, 5, 3)])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_squares_are_those_of_the_reader(shape: tuple[int, int, int], size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    image = Image.fromarray(pixels if shape[2] == 3 else pixels[:, :, 0])
    known = pictures.fitted(image, size, "it").transpose(2, 0, 1).astype(float)
    found = programs.squares(torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy()), size)[0].numpy()
    assert np.abs(found - known).max() <= (shape[0] > shape[1])  # Pillow 13 takes the columns of high ones first


@pytest.mark.slow
def test_raw_pictures_of_any_size_have_the_outputs_of_the_run(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    with seeds.isolated(0):
        network = build("convnet:width=8,depth=2", (3, 16, 16), 4)
    model = Trained(network, (3, 16, 16), tuple("abcd"), Normalisation((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)))
    programs.write(model, (3, 16, 16), tmp_path / "a", tmp_path / "b", size=16)
    compute, session = torch.export.load(tmp_path / "a").module(), onnxruntime.InferenceSession(tmp_path / "b")
    for height, width in ((16, 16), (33, 50), (200, 201)):
        pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
        known = pictures.fitted(Image.fromarray(pixels), 16, "it").transpose(2, 0, 1)[None]
        with torch.no_grad():
            logits = model(torch.from_numpy(known.copy())).numpy()
            raw = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
            found = compute(torch.from_numpy(raw)).numpy()
        np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(session.run(["logits"], {"records": raw})[0], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_raw_pictures_pass_the_backbone(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    shape, name = (1, 8, 8), "scattering:angles=2,groups=9"
    backbone = features.load_backbone(name, shape)
    with seeds.isolated(0):
        network = nn.Linear(features.rows_of(backbone, torch.zeros(1, *shape, dtype=torch.uint8)).shape[1], 3)
    model = Trained(network, (network.in_features,), tuple("abc"), AS_THEY_ARE, (name, backbone.digest))
    programs.write(model, shape, tmp_path / "a", tmp_path / "b")
    images = torch.randint(256, (9, *shape), generator=torch.Generator().manual_seed(0)).byte()
    with torch.no_grad():
        logits = model(images)
        found = torch.export.load(tmp_path / "a").module()(images)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    session = onnxruntime.InferenceSession(tmp_path / "b")
    said = torch.from_numpy(session.run(["logits"], {"records": images.numpy()})[0])
    torch.testing.assert_close(said, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_equal_probabilities_are_decided_as_in_an_evaluation(
    threshold: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first class without a threshold, and the positive one from its threshold on."""
    monkeypatch.setattr(rows.Model, "outputs", lambda *_: np.zeros((3, 2)))
    model = object.__new__(rows.Model)
    two = Trained(nn.Linear(3, 2), (3,), ("a", "b"), AS_THEY_ARE)
    model.facts = {"class_names": ["a", "b"], **publish.decision_of(two, "b", threshold)}
    expected = decide(np.full((3, 2), 0.5), 1, threshold)
    assert model.predict([]).tolist() == ["ab"[c] for c in expected] == ["a" if threshold is None else "b"] * 3
