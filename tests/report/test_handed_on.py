"""A published folder in other hands: the readers beside the program say what the run's own reader would have said."""

import json
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from PIL import Image, TiffImagePlugin

import fedstill
from fedstill.data import pictures
from fedstill.report import pixels, publish, rows

SCHEMA = """
target = "died"
classes = ["no", "yes"]

[columns.age]
kind = "number"
range = [0, 110]

[columns.dose]
kind = "number"
range = [0, 2000]
outside = "clip"

[columns.flag]
kind = "category"
values = ["True", "False"]
outside = "other"
"""
GOOD: dict[str, Any] = {"age": 50, "dose": 3.5, "flag": "True"}


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> tuple[fedstill.RunRecord, Path]:
    """A run on a table in somebody's folder, by a path of its own, and what it publishes."""
    place = tmp_path_factory.mktemp("jane.doe")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.uniform(0, 110, 300).round(1), "dose": rng.uniform(0, 2000, 300).round(2)})
    frame["flag"] = np.where(rng.random(300) < 0.5, "True", "False")
    frame["died"] = np.where(frame.age + 40 * (frame.flag == "True") > 75, "yes", "no")
    frame.to_csv(place / "Klinik Nord.csv", index=False)
    (place / "s.toml").write_text(SCHEMA)
    task: dict[str, Any] = {"data": str(place / "Klinik Nord.csv"), "schema_file": str(place / "s.toml"), "clients": 2}
    made = fedstill.run("fedavg", rounds=3, model="linear", workers=0, out=place / "run", progress=False, **task)
    place_of_config = place / "run" / "config.json"
    config = json.loads(place_of_config.read_text())
    command = f"fedstill run fedavg --data '{task['data']}' --schema-file={task['schema_file']} --out {place}/run"
    place_of_config.write_text(json.dumps({**config, "command": command}))
    fedstill.publish(made, place / "out")
    return made, place / "out"


def test_no_file_names_a_folder_of_this_machine(handed: tuple[fedstill.RunRecord, Path]) -> None:
    """The card had the path of the table with its owner's name, and the programs those of torch's and our code."""
    out = handed[1]
    card = (out / "README.md").read_text("utf-8")
    assert (
        "# fedavg on Klinik Nord.csv" in card
        and "\nfedstill run fedavg --data 'Klinik Nord.csv' --schema-file=s.toml --out run\n" in card
    )
    content = [path.read_bytes() for path in out.iterdir()]
    with zipfile.ZipFile(out / "model.pt2") as program:
        content += [program.read(name) for name in program.namelist()]
    for folder in (out.parent, Path(fedstill.__file__).parent, Path(torch.__file__).parent):
        assert not any(str(folder).encode() in some for some in content), folder


def test_a_short_path_changes_no_other_word(handed: tuple[fedstill.RunRecord, Path]) -> None:
    made = handed[0]
    config = {
        **made.config,
        "experiment": {**made.config["experiment"], "data": "/a"},
        "data_path": r"C:\Users\jane\x_y.csv",
    }
    record = fedstill.RunRecord(made.folder, "x", config, {**made.summary, "data": "../p_q"})
    text = "of /a and '/a', n/a, /ab, x/a; ../p_q, ../p\\_q, /a, C:\\Users\\jane\\x_y.csv."
    assert publish.without_folders(text, record) == "of a and 'a', n/a, /ab, x/a; p_q, p\\_q, a, x_y.csv."


def test_a_truth_value_is_the_category_of_its_name(handed: tuple[fedstill.RunRecord, Path]) -> None:
    """pandas reads True and False of a file as truth values, which were in no category."""
    made, out = handed
    model = rows.Model(out)
    frame = pd.DataFrame([{**GOOD, "flag": flag} for flag in (True, False)])
    known = made.load_model().predict_proba(frame)
    assert abs(known[0, 0] - known[1, 0]) > 0.01
    for given in (frame, pa.Table.from_pandas(frame), pl.from_pandas(frame), frame.to_dict("records")):
        np.testing.assert_allclose(model.probabilities(given), known, rtol=1e-5, atol=1e-6)


def test_what_a_schema_clips_or_takes_for_others_is_counted(
    handed: tuple[fedstill.RunRecord, Path], caplog: pytest.LogCaptureFixture
) -> None:
    frame = pd.DataFrame([GOOD, {**GOOD, "dose": 99_999}, {**GOOD, "flag": "maybe"}])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows.Model(handed[1]).predict(frame)
    told = [str(one.message) for one in said]
    assert told == [
        "1 of 3 values of column 'dose' are clipped to [0.0, 2000.0]",
        "1 of 3 values of column 'flag' are in no category (other)",
    ]
    handed[0].load_model().predict(frame)
    assert [record.getMessage().replace(" of the table", "") for record in caplog.records] == told


def test_rows_that_are_no_table_are_one_sentence(
    handed: tuple[fedstill.RunRecord, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rows.Model(handed[1])
    series = pd.DataFrame([GOOD])["age"]
    for given in (GOOD, {"age": [50], "dose": [3.5]}, np.ones((2, 3)), [[1, 2, 3]], series, None, 5):
        with pytest.raises(ValueError, match="the rows are no table; give a list of dictionaries"):
            model.predict(given)
    twice = pa.Table.from_arrays([pa.array([90]), pa.array([3.5]), pa.array(["True"]), pa.array([1])], [*GOOD, "age"])
    for given in (twice, twice.to_pandas()):
        with pytest.raises(ValueError, match="the table has two columns 'age'"):
            model.predict(given)
    (tmp_path / "old.csv").write_bytes("age,dose,flag\n50,3.5,Trüe\n".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8 .*; save it again as CSV UTF-8"):
        model.predict(tmp_path / "old.csv")
    assert model.predict(Dataset.from_list([GOOD])).tolist() == model.predict([GOOD]).tolist()
    monkeypatch.setattr(model, "_computed", lambda values: np.array([[1.0, 2.0], [np.nan, 0.0]]))
    with pytest.raises(ValueError, match="the outputs of row 1 are not finite"):
        model.predict([GOOD, GOOD])


def test_an_empty_line_of_one_column_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("x\n1.5\n\n-1.5\n")
    (tmp_path / "two.csv").write_text("x,y\n1.5,2\n\n-1.5,3\n\n")
    assert rows.records_of(tmp_path / "one.csv") == [{"x": "1.5"}, {"x": ""}, {"x": "-1.5"}]
    assert rows.records_of(tmp_path / "two.csv") == [{"x": "1.5", "y": "2"}, {"x": "-1.5", "y": "3"}]


@pytest.mark.parametrize("sign", "\t|;")
def test_thousands_in_new_rows_are_refused_as_in_the_run_s(
    sign: str, handed: tuple[fedstill.RunRecord, Path], tmp_path: Path
) -> None:
    (tmp_path / "new.csv").write_text(sign.join(GOOD) + "\n" + sign.join(("50", "1.088", "True")) + "\n")
    with pytest.raises(ValueError, match="which may be 1088 or 1.0880"):
        rows.Model(handed[1]).predict(tmp_path / "new.csv")


def test_a_truth_value_is_no_number(handed: tuple[fedstill.RunRecord, Path]) -> None:
    frame = pd.DataFrame([{**GOOD, "age": True}])
    with pytest.raises(fedstill.InputError, match="column 'age' of the table has truth values, but the schema says"):
        handed[0].load_model().predict(frame)
    with pytest.raises(ValueError, match="column 'age' has 'True', which is no number"):
        rows.Model(handed[1]).predict(frame)


def test_a_folder_of_any_name_is_opened_in_any_locale(handed: tuple[fedstill.RunRecord, Path], tmp_path: Path) -> None:
    place = tmp_path / "pt ü é"
    place.symlink_to(handed[1])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from rows import Model; print(Model(sys.argv[1]).facts['shape'])"
    )
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code, str(place)], env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_safle_is_published(tmp_path: Path) -> None:
    """torch.export took the number of records for a constant."""
    task: dict[str, Any] = {"data": "digits", "limit": 200, "clients": 2, "workers": 0, "public": "held=50"}
    made = fedstill.run("safle", features="scattering", model="linear", progress=False, out=tmp_path / "run", **task)
    assert "model.pt2" in fedstill.publish(made, tmp_path / "out")["files"]


def test_true_numbers_that_are_clipped_are_said_beside_their_errors(tmp_path: Path) -> None:
    text = SCHEMA.replace(
        'target = "died"\nclasses = ["no", "yes"]', 'target = "days"\nrange = [1, 20]\noutside = "clip"'
    )
    (tmp_path / "s.toml").write_text(text)
    frame = pd.DataFrame([{**GOOD, "age": i % 100, "days": i % 40} for i in range(200)])
    frame.to_csv(tmp_path / "t.csv", index=False)
    task: dict[str, Any] = {"data": str(tmp_path / "t.csv"), "schema_file": str(tmp_path / "s.toml"), "clients": 2}
    made = fedstill.run("fedavg", rounds=1, workers=0, progress=False, out=tmp_path / "run", model="linear", **task)
    fedstill.publish(made, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "| true numbers outside of 1 to 20 | clipped before they are compared |" in card


# Pictures -------------------------------------------------------------------------------------------------------------


def squared(path: Path) -> np.ndarray[Any, Any]:
    """The picture as the run's own reader has it, before it is resized; a square of 24."""
    return pictures.fitted(pictures.opened(path, "it"), 24, "it")


MODES = {
    "png": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "tiff": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"],
    "jpg": ["1", "L", "RGB", "CMYK", "YCbCr"],
}


@pytest.mark.parametrize(("form", "mode"), [(form, mode) for form, modes in MODES.items() for mode in modes])
def test_a_picture_is_read_as_in_the_run(mode: str, form: str, tmp_path: Path) -> None:
    """Gray of 16 bits was white from 256 on in the lines of the card."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 24, 4), np.uint8)
    place = tmp_path / f"it.{form}"
    deep = noise[:, :, 0].astype(np.uint16) * 257 + noise[:, :, 1]
    made = Image.fromarray(deep) if mode.startswith("I") else Image.fromarray(noise).convert(mode)
    made = made.convert("I") if mode == "I" else made
    made.save(place)
    known = squared(place)
    found = pixels.read(place, known.shape[2])
    assert found.dtype == np.uint8 and np.array_equal(found[0].transpose(1, 2, 0), known)
    if known.shape[2] == 1:
        assert np.array_equal(pixels.read(place, 3)[0], np.broadcast_to(found[0], (3, 24, 24)))
    elif not (known == known[:, :, :1]).all():
        with pytest.raises(ValueError, match="is in colour, but the model takes gray pictures"):
            pixels.read(place, 1)


def test_white_is_zero_and_turned_pictures_too(tmp_path: Path) -> None:
    deep = np.arange(24 * 24, dtype=np.uint16).reshape(24, 24) * 100
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[TiffImagePlugin.PHOTOMETRIC_INTERPRETATION] = 0
    Image.fromarray(deep).save(tmp_path / "a.tiff", tiffinfo=tags)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray((deep // 256).astype(np.uint8)).save(tmp_path / "b.png", exif=turned)
    for name in ("a.tiff", "b.png"):
        assert np.array_equal(pixels.read(tmp_path / name, 1)[0, 0], squared(tmp_path / name)[:, :, 0]), name


def test_several_pictures_and_unknown_ranges_are_refused(tmp_path: Path) -> None:
    one, other = (Image.fromarray(np.full((8, 8), value, np.uint8)) for value in (0, 200))
    one.save(tmp_path / "a.gif", save_all=True, append_images=[other])
    with pytest.raises(ValueError, match="has 2 pictures; save the one that counts"):
        pixels.read(tmp_path / "a.gif", 1)
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="bits a channel in mode F; save it with 8"):
        pixels.read(tmp_path / "a.tiff", 1)
    Image.fromarray(np.full((8, 8), 70_000, np.int32)).save(tmp_path / "b.tiff")
    with pytest.raises(ValueError, match="has values from 70000 to 70000; save it with 8 or 16 bits"):
        pixels.read(tmp_path / "b.tiff", 1)
