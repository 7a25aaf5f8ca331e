"""What was once read wrongly without a word: each is read as it is meant, told, or refused in a sentence."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv as arrow_csv

import fedstill
from fedstill.base.errors import InputError
from fedstill.cli import main
from fedstill.data import csv_files, own, sources, walk
from fedstill.data.own import given
from fedstill.data.places import Reading
from fedstill.data.table_schema import TableSchema
from fedstill.report import rows
from fedstill.report.record import read_run
from fedstill.report.spending import remarks

RNG = np.random.default_rng(0)
NUMBER = {"kind": "number", "range": [0, 110]}


def schema(columns: Mapping[str, Any], **facts: Any) -> TableSchema:
    return TableSchema(**{"target": "died", "classes": ("no", "yes"), "columns": columns, **facts})


def encoded(columns: Mapping[str, Any], table: Mapping[str, Any], **facts: Any) -> dict[str, list[Any]]:
    found, _ = schema(columns, **facts).encode(pa.table(dict(table)), "it")
    result: dict[str, list[Any]] = found.to_pydict()
    return result


def classes_of(names: list[str], labels: list[int]) -> datasets.Dataset:
    x = RNG.normal(size=(len(labels), 2))
    kinds = {"a": datasets.Value("float32"), "b": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}
    rows = {"a": x[:, 0], "b": x[:, 1], "label": labels}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


# Classes and columns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "gap"),
    [
        ({"kind": "number", "range": [0, 9], "missing": 3}, -1 / 3),
        ({"kind": "date", "range": ["2020-01-01", "2020-01-03"], "missing": "2020-01-03"}, 1.0),
        ({"kind": "boolean", "missing": True}, 1.0),
        ({"kind": "category", "values": ["a", "b"], "missing": "a"}, 1.0),
        ({"kind": "category", "values": ["1", "2"], "missing": "1"}, 1.0),
    ],
)
@pytest.mark.parametrize(
    ("absent", "dtype"), [(None, object), (math.nan, object), (math.nan, "float64"), (pd.NA, "Int64"), ("", object)]
)
def test_a_column_of_gaps_alone_is_read(facts: dict[str, Any], gap: float, absent: Any, dtype: Any) -> None:
    """A hospital that does not collect a variable has one."""
    found = encoded({"a": facts}, {"a": pd.Series([absent] * 3, dtype=dtype), "died": ["no"] * 3})
    first = next(name for name in found if name.startswith("a"))
    assert found[first] == pytest.approx([gap] * 3) and found["a is missing"] == [1.0] * 3


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"kind": "number", "range": [0, 9], "missing": "abc"}, "'abc', which is no number of the range"),
        ({"kind": "number", "range": [0, 9], "missing": True}, "True, which is no number of the range"),
        ({"kind": "number", "range": [0, 9], "missing": -1}, "-1.0, which is no number of the range"),
        ({"kind": "number", "range": [0, 9], "missing": "abc", "outside": "clip"}, "'abc', which is no number"),
        ({"kind": "date", "range": ["2020-01-01", "2021-01-01"], "missing": 1980}, "1980.0, which is no date"),
        ({"kind": "date", "range": ["2020-01-01", "2021-01-01"], "missing": "1999-01-01"}, "which is no date of"),
        (
            {"kind": "category", "values": ["a", "b"], "missing": "other"},
            "'other', which is none of its values",
        ),
        ({"kind": "number", "range": [-1.7e308, 1.7e308]}, "is too wide"),
        ({"kind": "date", "range": ["2020-13-01", "2021-01-01"]}, "'2020-13-01' is no date; write it as YYYY-MM-DD"),
    ],
)
def test_a_schema_whose_gaps_or_ranges_no_record_can_have_is_refused(
    facts: dict[str, Any], words: str, tmp_path: Path
) -> None:
    place = tmp_path / "schema.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in facts.items()]
    place.write_text("\n".join(['target = "died"', 'classes = ["no", "yes"]', "[columns.a]", *lines]))
    with pytest.raises(ValueError, match=re.escape(words)):
        TableSchema.read(place)


def test_a_run_keeps_the_schema_that_it_was_made_with(tmp_path: Path) -> None:
    """One that today's rules refuse in a file, and one whose gaps are clipped, which is well defined."""
    column = {"kind": "number", "range": [0, 9], "missing": -1}
    kept = {"target": "died", "classes": ["no", "yes"], "columns": {"a": column}}
    assert TableSchema.kept(kept, "the run").columns["a"].missing == -1
    found = encoded({"a": {**column, "outside": "clip"}}, {"a": ["", "9"], "died": ["no", "yes"]})
    assert found["a"] == [-1.0, 1.0] and found["a is missing"] == [1.0, 0.0]


def test_a_number_that_is_none_is_a_gap_whatever_the_categories_are_called() -> None:
    column = {"a": {"kind": "category", "values": ["nan", "b"], "missing": "b"}}
    table = schema(column).model_dump(mode="json")
    for absent in (math.nan, np.float32("nan"), pd.NA, pd.NaT, None, Decimal("NaN")):
        assert np.isnan(rows.codes([{"a": absent}], table)[0, 0])
    assert rows.codes([{"a": "nan"}], table)[0, 0] == 0
    found = encoded(column, {"a": pd.Series([math.nan, "nan"], dtype=object), "died": ["no", "yes"]})
    assert found["a is missing"] == [1.0, 0.0] and found["a=nan"] == [0.0, 1.0]


@pytest.mark.parametrize("count", [2, 3])
def test_each_client_s_own_order_of_classes_is_followed(count: int) -> None:
    first, second = classes_of(["cat", "dog"], [0] * 12 + [1] * 8), classes_of(["dog", "cat"], [0] * 30 + [1] * 5)
    data, clients = given([first, second, second][:count])
    labels = [*data.train.labels.tolist(), *data.test.labels.tolist()]
    assert clients == count and data.class_names == ("cat", "dog")
    assert labels.count(0) == 12 + 5 * (count - 1) and labels.count(1) == 8 + 30 * (count - 1)
    with pytest.raises(ValueError, match="client 1's classes are bird, cat, but another client's cat, dog"):
        given([first, classes_of(["bird", "cat"], [0, 1] * 9), second])


def test_files_with_other_orders_of_classes_are_refused(tmp_path: Path) -> None:
    for i, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        (tmp_path / f"h{i}").mkdir()
        classes_of(names, [0] * 12 + [1] * 8).to_parquet(tmp_path / f"h{i}" / "data.parquet")
    with pytest.raises(ValueError, match="class 0 of the column 'label' is 'dog' in 'h1/data.parquet'"):
        sources.load(str(tmp_path), cache_dir=tmp_path / "cache")


def test_no_made_column_takes_the_place_of_another() -> None:
    ward = {"kind": "category", "values": ["surgery", "other"], "outside": "other"}
    with pytest.raises(ValueError, match="outside = 'other' makes a second one"):
        schema({"ward": ward})
    with pytest.raises(ValueError, match="two columns would be called 'age is missing'"):
        schema({"age": NUMBER | {"missing": 60}, "age is missing": NUMBER})
    with pytest.raises(ValueError, match="two columns would be called 'ward=a'"):
        schema({"ward": {"kind": "category", "values": ["a", "b"]}, "age": NUMBER}, group="ward=a")


@pytest.mark.parametrize(("missing", "stands"), [("no", 0.0), ("false", 0.0), ("Yes", 1.0), (True, 1.0), (0, 0.0)])
def test_a_word_that_stands_for_a_gap_means_what_it_says(missing: object, stands: float) -> None:
    column = {"f": {"kind": "boolean", "missing": missing}}
    found = encoded(column, {"f": ["yes", "no", None], "died": ["no", "yes", "no"]})
    assert found["f"] == [1.0, 0.0, stands]
    with pytest.raises(ValueError, match="missing is 'perhaps', which is neither true nor false"):
        schema({"f": {"kind": "boolean", "missing": "perhaps"}})


def test_a_value_that_the_schema_names_is_no_gap() -> None:
    column = {"f": {"kind": "category", "values": ["none", "x"], "missing": "x"}}
    table = {"f": ["none", "x", None], "died": ["-", "none", "-"]}
    found = encoded(column, table, classes=("-", "none"))
    assert found["f=none"] == [1, 0, 0] and found["f is missing"] == [0, 0, 1] and found["died"] == ["-", "none", "-"]
    rows_of = schema(column, classes=("-", "none")).model_dump(mode="json")
    assert np.isnan(rows.codes([{"f": word} for word in ("none", "x", "")], rows_of)[:, 0]).tolist() == [0, 0, 1]


def test_a_word_that_csv_readers_take_for_a_gap_is_a_value_too(tmp_path: Path) -> None:
    column = {"c": {"kind": "category", "values": ["NA", "EU"], "missing": "EU"}, "age": NUMBER}
    text = "c,age,died\n" + "".join(f"{('NA', 'EU', '')[i % 3]},{i},{('null', 'yes')[i % 2]}\n" for i in range(30))
    found = read(text, tmp_path, schema=schema(column, classes=("null", "yes")))
    means = found.train.images.mean(0).tolist()
    assert found.features[:3] == ("c=NA", "c=EU", "c is missing")
    assert means[0] == pytest.approx(1 / 3, abs=0.1) and means[1] == pytest.approx(2 / 3, abs=0.1) and means[2] < 0.5


def test_texts_are_compared_as_cells_are() -> None:
    values = [" Caf\u0065\u0301 ", "x"]
    found = encoded(
        {"f": {"kind": "category", "values": values, "missing": values[0]}},
        {"f": ["Caf\u00e9", None], "died": ["e\u0301", "yes"]},
        classes=("\u00e9 ", "yes"),
    )
    assert found["f=Caf\u00e9"] == [1, 1] and found["died"] == ["\u00e9", "yes"]
    with pytest.raises(ValueError, match="the schema that runs/old has kept is refused: "):
        TableSchema.kept({"target": "died", "classes": ["no", "yes"], "columns": {}}, "runs/old")


def test_a_cell_of_megabytes_is_read(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text(f'a,b\n1,"{"x" * 3_000_000}"\n2,y\n')
    table = csv_files.read_csv(tmp_path / "long.csv", as_text=False)
    assert [len(text) for text in table["b"].to_pylist()] == [3_000_000, 1]


def test_a_csv_file_reaches_arrow_s_threads_without_a_python_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that releases one while the program ends aborts it (exit code 134 in place of 2)."""
    read, sources = arrow_csv.read_csv, list[object]()
    monkeypatch.setattr(arrow_csv, "read_csv", lambda source, **more: (sources.append(source), read(source, **more))[1])
    (tmp_path / "some.csv").write_text("a,b\n1,x\n")
    csv_files.read_csv(tmp_path / "some.csv", as_text=False)
    (source,) = sources
    assert isinstance(source, pa.BufferReader)


@pytest.mark.parametrize("role", ["group", "site"])
def test_gaps_are_no_person_and_no_site(role: str) -> None:
    table = {"age": [1.0, 2.0, 3.0], "died": ["no"] * 3, "who": ["a", None, "NA"]}
    with pytest.raises(ValueError, match="column 'who' of it has 2 gaps, and those records would be one"):
        encoded({"age": NUMBER}, table, **{role: "who"})


def test_a_number_as_a_category_is_the_same_text_in_every_table() -> None:
    column = {"f": {"kind": "category", "values": ["1", "2"], "outside": "other"}}
    found = encoded(column, {"f": [1.0, 1.5, np.inf, 1e19], "died": ["no"] * 4})
    assert found["f=1"] == [1, 0, 0, 0] and found["f=other"] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        (["0.5", "1.0", "1.5"], [0.5, 1.0, 1.5]),
        (["0.5", "1", "1.5"], ["0.5", "1.0", "1.50"]),
        (["0.1", "2", "03"], [np.float32(0.1), np.float32(2.0), np.float32(3.0)]),
        (["true", "false", "3"], [True, False, None]),
    ],
)
def test_a_program_reads_categories_as_the_training_did(values: list[str], cells: list[Any]) -> None:
    column = {"f": {"kind": "category", "values": values, "outside": "other", "missing": "other"}}
    found = encoded(column, {"f": pa.array(cells), "died": ["no"] * 3})
    trained = np.stack([found[f"f={value}"] for value in (*values, "other")], 1).argmax(1)
    kept = schema(column).model_dump(mode="json")
    codes = rows.codes([{"f": cell} for cell in cells], kept)[:, 0]
    assert trained.tolist() == [3 if np.isnan(code) else code for code in codes]
    assert trained.tolist()[:2] == [0, 1]


def test_no_number_is_infinite_and_none_has_other_signs() -> None:
    for text in ("inf", "1e400", "1_000", "\u0663"):
        with pytest.raises(ValueError, match="is no number|is not finite"):
            encoded({"age": NUMBER | {"outside": "clip"}}, {"age": [text], "died": ["no"]})
        with pytest.raises(ValueError, match="is no number|is not finite"):
            rows.code(text, NUMBER)
    assert rows.code(" 1,5e1", NUMBER) == 15.0


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Int128", "Object"])
def test_columns_of_polars_that_no_table_has_are_a_sentence(kind: str) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": polars.Series([1, 2], dtype=getattr(polars, kind)), "died": ["no", "yes"]})
    with pytest.raises(ValueError, match="give each column one type, and numbers of 64 bits"):
        own.table(frame, "the records")


def read(text: str, folder: Path, **settings: Any) -> sources.DataSet:
    (folder / "t.csv").write_text(text)
    return sources.load(str(folder / "t.csv"), Reading(**settings), folder / "cache")


BODY = "".join(f"{7 * i % 41},{i % 6},{'yes' if i % 2 else 'no'}\n" for i in range(40))


@pytest.mark.parametrize("quote", ['30,4,"no\n', '30,4,"no\n37,5,"yes"\n', '30,4,"no"x\n'])
def test_a_quote_that_nobody_closes_swallows_no_records(quote: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read as CSV .*give each quoted cell a quote at both of its ends"):
        read("a,b,label\n" + BODY.replace("30,4,no\n", quote), tmp_path)
    assert len(read("a,b,label\n" + BODY.replace("30,4,no\n", '30,"4","no"\n'), tmp_path).train.labels) > 20


@pytest.mark.parametrize("form", ["\n\na,b,label\n{}", "\r\na,b,label\n{}", "old Mac"])
def test_blank_lines_and_ends_of_lines_of_any_kind(form: str, tmp_path: Path) -> None:
    text = form.format(BODY) if "{}" in form else ("a,b,label\n" + BODY).replace("\n", "\r")
    found = read(text, tmp_path)
    assert len(found.train.labels) + len(found.test.labels) == 40 and found.features == ("a", "b")


def test_the_largest_integer_is_a_class_without_records_before_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="class 2 .* has 0 train records"):
        read("a,b,label\n" + BODY.replace("yes", "1").replace("no", "0") + f"3,4,{2**63 - 1}\n", tmp_path)


def test_a_header_may_be_as_long_as_genes_are_many(tmp_path: Path) -> None:
    names = [f"a_gene_with_a_long_name_{i}" for i in range(6_000)]
    cells = [",".join([*map(str, RNG.integers(9, size=6000)), "ab"[i % 2]]) for i in range(12)]
    lines = [",".join([*names, "label"]), *cells]
    assert len(read("\n".join(lines), tmp_path).features) > 5_000


def test_a_cell_may_be_long_beside_quotes(tmp_path: Path) -> None:
    notes = "".join(f'"{"word, " * 25_000}{i}",{"ab"[i % 2]}\n' for i in range(12))
    (tmp_path / "t.csv").write_text("text,label\n" + notes)
    assert len(sources.load_raw(str(tmp_path / "t.csv"), cache_dir=tmp_path / "cache").train[0]) > 8
    assert len(rows.records_of(tmp_path / "t.csv")) == 12


def test_blanks_around_names_change_no_values(tmp_path: Path) -> None:
    text = "age, ward, patient,died\n" + "".join(
        f"{30 + i},{i % 2 + 1:02d},{i // 2:03d},{'no' if i % 3 else 'yes'}\n" for i in range(60)
    )
    ward = {"kind": "category", "values": ["01", "02"], "outside": "other"}
    found = read(text, tmp_path, schema=schema({"age": NUMBER, "ward": ward}, group="patient"))
    assert not any("in no category" in remark for remark in found.remarks)
    assert {len(value) for value in found.columns["patient"]} == {3}


def test_pictures_by_their_paths_alone_are_refused_since_they_change_unseen(tmp_path: Path) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    cells = []
    for i in range(10):
        Image.fromarray(np.full((8, 8), 9 * i, np.uint8)).save(tmp_path / f"{i}.png")
        cells.append({"bytes": None, "path": f"{i}.png"})
    pq.write_table(pa.table({"image": pa.array(cells, kind), "label": [0, 1] * 5}), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match="has a path alone, whose file may change unseen"):
        sources.load(str(tmp_path / "p.parquet"), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("other", ["holdout", None, ""])
def test_a_column_of_splits_with_something_else_is_refused(other: str | None, tmp_path: Path) -> None:
    words = ["train", "test", other, "train"] * 10
    frame = pd.DataFrame({"a": RNG.normal(size=40), "label": [0, 1] * 20, "split": words})
    frame.to_parquet(tmp_path / "s.parquet")
    with pytest.raises(ValueError, match="the column 'split' of .* tells splits, but has"):
        sources.load(str(tmp_path / "s.parquet"), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="the column 'split' of .* tells splits, but has"):
        given(frame)


@pytest.mark.parametrize("words", [["train", "bus", "car"], ["train", "test", "val"]])
def test_a_column_with_a_meaning_of_its_own_tells_no_splits(words: list[str]) -> None:
    frame = pd.DataFrame({"age": 7 * np.arange(60.0) % 61, "set": words * 20})
    data, _ = given((frame, "set"))
    assert data.class_names == tuple(sorted(words))
    made = schema({"set": {"kind": "category", "values": words}, "age": NUMBER})
    data, _ = given(frame.assign(died=["no", "yes"] * 30), Reading(schema=made))
    assert data.features == (*(f"set={word}" for word in words), "age")


def test_a_frame_s_column_of_splits_is_followed() -> None:
    frame = pd.DataFrame(
        {"a": 7 * np.arange(40.0) % 41, "label": [0, 1] * 20, "split": ["train", "train", "train", "test"] * 10}
    )
    data, _ = given(frame)
    assert len(data.train.labels) == 30 and data.test.images.flatten().tolist() == [7 * i % 41 for i in range(3, 40, 4)]
    assert data.features == ("a",)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to become somebody who may not read")
def test_a_folder_that_cannot_be_read_is_missed() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder is closed by each session that begins
        place = Path(name)
        place.chmod(0o755)
        for i in range(3):
            (place / f"h{i}").mkdir()
            (place / f"h{i}" / "t.csv").write_text("a,b,label\n" + BODY)
        (place / "h1").chmod(0)
        code = "import os, sys\nfrom pathlib import Path\nfrom fedstill.data import walk\nos.setuid(65534)\n"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}walk.walk(Path({name!r}))"], capture_output=True, text=True
        )
    assert "h1' cannot be read (Permission denied), and its records would be missing" in done.stderr


def test_hidden_folders_need_no_right_to_be_read(tmp_path: Path) -> None:
    for name in (".Trash-0", "lost+found"):
        walk.missed(tmp_path, PermissionError(13, "Permission denied", str(tmp_path / name)))
    with pytest.raises(ValueError, match="h1' cannot be read"):
        walk.missed(tmp_path, PermissionError(13, "Permission denied", str(tmp_path / "h1")))


def test_pictures_outside_of_their_folder_are_refused(tmp_path: Path) -> None:
    folder, kind = tmp_path / "own", pa.struct({"bytes": pa.binary(), "path": pa.string()})
    folder.mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    cells = [{"bytes": None, "path": "../a.png"}] * 10
    pq.write_table(pa.table({"image": pa.array(cells, kind), "label": [0, 1] * 5}), folder / "train.parquet")
    with pytest.raises(ValueError, match="lies outside of"):
        sources.load(str(folder), cache_dir=tmp_path / "cache")


def test_arrays_that_are_not_read_are_told(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(30, 3)), np.arange(30) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_valid=x, y_valid=y, site=y)
    found = sources.load(str(tmp_path / "a.npz"), cache_dir=tmp_path / "cache")
    assert any("not read: the arrays x_valid, y_valid" in remark for remark in found.remarks)


def test_frames_of_mixed_types_are_refused_without_a_value() -> None:
    mixed = pd.DataFrame({"a": [1, "secret", 3], "label": [0, 1, 0]})
    with pytest.raises(ValueError, match="a column 'a' of several types") as why:
        given(mixed)
    assert "secret" not in str(why.value)
    with pytest.raises(ValueError, match="a column 'a' of several types, or of numbers of more than 64 bits"):
        given(pd.DataFrame({"a": pd.Series([2**70, 1, 2], dtype=object), "label": [0, 1, 0]}))
    with pytest.raises(ValueError, match="have a column 'label' beside the classes that were given"):
        given((pd.DataFrame({"a": [1.0, 2.0], "label": [0, 1]}), [0, 1]))


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of two hospitals, its schema and a run on it."""
    folder = tmp_path_factory.mktemp("clinic")
    count = 240
    age = RNG.integers(20, 100, count)
    died = np.where(age + RNG.normal(0, 5, count) > 60, "yes", "no")
    frame = pd.DataFrame(
        {"age": age, "patient": np.arange(count) // 2, "hospital": [0, 1] * (count // 2), "died": died}
    )
    frame["split"] = ["train", "train", "train", "train", "test", "test"] * (count // 6)
    frame.to_csv(folder / "p.csv", index=False)
    frame[frame.split == "test"].drop(columns="split").to_csv(folder / "new.csv", index=False)
    (folder / "s.toml").write_text(
        'target = "died"\nclasses = ["no", "yes"]\ngroup = "patient"\nsite = "hospital"\n'
        '[columns.age]\nkind = "number"\nrange = [0, 110]\noutside = "clip"\n'
    )
    task = ["--data", str(folder / "p.csv"), "--schema-file", str(folder / "s.toml"), "--partition", "by:hospital"]
    work = ["--clients", "2", "--model", "linear", "--rounds", "20", "--workers", "0", "--local.lr", "0.3"]
    main(["run", "fedavg", *task, *work, "--out", str(folder / "run")])
    return folder


def test_rows_reach_a_model_by_the_schema_of_its_run(trained: Path) -> None:
    frame = pd.read_csv(trained / "new.csv")
    expected = fedstill.evaluate(trained / "run", str(trained / "new.csv"))
    assert expected.accuracy > 0.8  # type: ignore[union-attr]
    for data in ((frame, "died"), (frame.drop(columns="died"), frame["died"]), frame):
        for model in (trained / "run", fedstill.load_model(trained / "run")):
            assert fedstill.evaluate(model, data).accuracy == expected.accuracy  # type: ignore[union-attr]
    said = fedstill.load_model(trained / "run").predict(frame.drop(columns=["died", "patient", "hospital"]))
    assert (said == frame["died"]).mean() == expected.accuracy  # type: ignore[union-attr]
    both = fedstill.evaluate(trained / "run", pd.read_csv(trained / "p.csv"))
    assert any("judged are the 80 records of the test split, of 240" in remark for remark in both.remarks)
    bare = fedstill.load_data(str(trained / "p.csv"), label_column="died")
    with pytest.raises(InputError, match="was read without the run's schema"):
        fedstill.evaluate(trained / "run", bare)
    with pytest.raises(InputError, match="which the data have not; give a table"):
        fedstill.evaluate(trained / "run", (frame[["age"]].to_numpy(float), (frame["died"] == "yes").to_numpy(int)))


def test_objects_are_trained_on_by_the_schema(trained: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(trained / "p.csv")
    task = {"schema_file": str(trained / "s.toml"), "partition": "by:hospital", "clients": 2, "model": "linear"}
    run = fedstill.run("fedavg", data=(frame, "died"), out=tmp_path / "run", rounds=20, workers=0, **task)
    assert fedstill.load_model(run.folder).columns == ("age",)
    bare = fedstill.load_data(str(trained / "p.csv"), label_column="died")
    with pytest.raises(InputError, match="the data set was read without it"):
        fedstill.run("fedavg", data=bare, rounds=1, workers=0, **task)
    with pytest.raises(InputError, match="the classes of the data are in 'hospital', but the schema's are in 'died'"):
        fedstill.run("fedavg", data=(frame, "hospital"), rounds=1, workers=0, **task)


def test_a_changed_schema_is_another_task(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, words = trained / "s.toml", json.loads((trained / "run" / "config.json").read_text())["command"].split()[1:]
    before = place.read_text()
    place.write_text(before.replace('["no", "yes"]', '["yes", "no"]'))
    try:
        with pytest.raises(SystemExit) as stopped:
            main(words)
    finally:
        place.write_text(before)
    assert stopped.value.code == 2 and "was begun with another schema than" in capsys.readouterr().err
    main(words)


def test_what_a_judge_read_is_told(trained: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(trained / "new.csv")
    found = fedstill.evaluate(trained / "run", frame.assign(age=frame.age * 12))
    assert any("values of column 'age' of" in remark and "are clipped" in remark for remark in found.remarks)
    for data in (str(trained / "new.csv"), str(trained / "p.csv")):
        with pytest.raises(InputError, match="the data have no column 'patiend'; did you mean patient"):
            fedstill.evaluate(trained / "run", data, group="patiend")
        with pytest.raises(InputError, match="label_column is 'hospital', but the run read its classes from 'died'"):
            fedstill.evaluate(trained / "run", data, label_column="hospital")
        assert fedstill.evaluate(trained / "run", data).persons is not None
    bare = frame.assign(patient="p" + frame.patient.astype(str), bmi=frame.age % 7)
    bare = bare.drop(columns=["hospital"]).rename(columns={"died": "label"})
    run = fedstill.run(
        "fedavg", data=bare, group="patient", clients=2, model="linear", rounds=1, workers=0, out=tmp_path / "run"
    )
    assert fedstill.evaluate(run, bare).persons is not None
    without = fedstill.evaluate(run, bare.drop(columns="patient"))
    assert any("have no column 'patient', so that intervals are of records" in remark for remark in without.remarks)


def test_runs_on_one_file_add_up_however_it_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    wider = tmp_path / "wider.toml"
    wider.write_text((trained / "s.toml").read_text().replace("[0, 110]", "[0, 120]"))
    task = ["--partition", "by:hospital", "--clients", "2", "--epsilon", "1", "--noise", "entropy", "--workers", "0"]
    task += ["--public", "noise=64", "--model", "linear"]
    for i, (data, by) in enumerate((("./p.csv", trained / "s.toml"), (str(trained / "p.csv"), wider))):
        main(["run", "afl", "--data", data, "--schema-file", str(by), *task, "--out", str(tmp_path / str(i))])
    told = [*remarks([read_run(tmp_path / str(i)) for i in range(2)])]
    assert any("all 2 runs of these records has an epsilon of up to 2" in remark for remark in told), told
    for i in range(2):
        place = tmp_path / str(i) / "config.json"
        content = json.loads(place.read_text())
        content["experiment"]["data"] = "./p.csv"
        if i == 0:  # as former code wrote it
            del content["data_path"]
        place.write_text(json.dumps(content))
    assert [*remarks([read_run(tmp_path / str(i)) for i in range(2)])] == told


# A published program --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("age,bmi\n40,25,30\n", "row 0 has 3 cells, but the header has 2"),
        ("age,bmi\n40\n", "row 0 has 1 cells, but the header has 2"),
        ("age,age\n40,25\n", "two columns 'age'"),
        ('age,bmi\n40,"25\n', "cannot be read as CSV"),
        ("", "has no header"),
    ],
)
def test_a_program_s_reader_of_rows_loses_no_cell(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(ValueError, match=says):
        rows.records_of(tmp_path / "new.csv")
    (tmp_path / "new.csv").write_text("\nage;bmi\n40,5;25\n\n41;26\n")
    assert rows.records_of(tmp_path / "new.csv") == [{"age": "40,5", "bmi": "25"}, {"age": "41", "bmi": "26"}]
