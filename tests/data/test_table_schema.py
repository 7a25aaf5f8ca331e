"""CSV files as people have them, and the public schema that turns rows into numbers, the same at every site."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedstill
from fedstill.cli import main
from fedstill.data import sources
from fedstill.data.csv_files import read_csv
from fedstill.data.places import Reading, find
from fedstill.data.readers import read_table
from fedstill.data.schema_draft import draft
from fedstill.data.table_schema import DAY, TableSchema

SCHEMA = """
target = "died"
classes = ["no", "yes"]
group = "patient"
site = "hospital"

[columns.age]
kind = "number"
range = [0, 110]
missing = 60

[columns.bmi]
kind = "number"
range = [10, 60]
outside = "clip"

[columns.ward]
kind = "category"
values = ["surgery", "medicine"]
outside = "other"

[columns.smoker]
kind = "boolean"
missing = false

[columns.admitted]
kind = "date"
range = ["2020-01-01", "2020-12-31"]
"""
ROWS = [
    ["P1", "north", "40", "25.5", "surgery", "yes", "2020-01-01", "no"],
    ["P2", "north", "", "70", "icu", "", "2020-12-31", "yes"],
    ["P3", "south", "110", "10", "medicine", "no", "2020-07-01", "no"],
    ["P4", "south", "55", "30", "surgery", "true", "2020-02-29", "yes"],
]
NAMES = ["patient", "hospital", "age", "bmi", "ward", "smoker", "admitted", "died"]


def schema(text: str = SCHEMA, folder: Path | None = None) -> TableSchema:
    import tomllib

    return TableSchema(**tomllib.loads(text))


def frame(**changes: Any) -> pd.DataFrame:
    found = pd.DataFrame(ROWS, columns=NAMES)
    for name, values in changes.items():
        found[name] = values
    return found


def csv(path: Path, text: str) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def encoded(table: pd.DataFrame, by: TableSchema | None = None) -> tuple[pd.DataFrame, tuple[str, ...]]:
    import pyarrow as pa

    found, remarks = (by or schema()).encode(pa.Table.from_pandas(table, preserve_index=False), "the rows")
    return found.to_pandas(), remarks


def test_rows_become_numbers_by_the_schema_alone() -> None:
    found, remarks = encoded(frame())
    assert list(found)[:-3] == list(schema().features)
    assert schema().features == (
        "age", "age is missing", "bmi", "ward=surgery", "ward=medicine", "ward=other", "smoker", "smoker is missing",
        "admitted",
    )  # fmt: skip
    assert found["age"].tolist() == pytest.approx([40 / 55 - 1, 60 / 55 - 1, 1, 0])
    assert found["age is missing"].tolist() == [0, 1, 0, 0]
    assert found["bmi"].tolist() == pytest.approx([(25.5 - 10) / 25 - 1, 1, -1, -0.2])
    assert found[["ward=surgery", "ward=medicine", "ward=other"]].to_numpy().tolist() == [
        [1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0],
    ]  # fmt: skip
    assert found["smoker"].tolist() == [1, 0, 0, 1] and found["smoker is missing"].tolist() == [0, 1, 0, 0]
    assert found["admitted"].tolist() == pytest.approx([-1, 1, 182 / 182.5 - 1, 59 / 182.5 - 1])
    assert any("1 of 4 values of column 'bmi' of the rows are clipped to [10" in text for text in remarks)
    assert any("1 of 4 values of column 'ward' of the rows are in no category" in text for text in remarks)


def test_types_of_parquet_and_texts_of_csv_give_the_same_numbers() -> None:
    typed = frame(
        age=[40, None, 110, 55],
        bmi=[25.5, 70.0, 10.0, 30.0],
        smoker=pd.array([True, None, False, True], dtype="boolean"),
        admitted=pd.to_datetime(["2020-01-01", "2020-12-31", "2020-07-01", "2020-02-29"]),
        ward=pd.Categorical(["surgery", "icu", "medicine", "surgery"]),
    )
    pd.testing.assert_frame_equal(encoded(typed)[0], encoded(frame())[0])
    commas = frame(age=["40,0", "", "110,0", "55"], bmi=["25,5", "70,0", "10,0", "30,0"])
    pd.testing.assert_frame_equal(encoded(commas)[0], encoded(frame())[0])


def test_commas_that_may_separate_thousands_are_refused_where_the_range_allows_both(tmp_path: Path) -> None:
    """1,088 is 1088 where commas separate thousands, and 1.088 where they are decimal."""
    bmi = ["25", "70", "10", "30"]
    for outside in ("refuse", "clip"):  # beyond the range too, if not far beyond
        by = schema(SCHEMA.replace("[0, 110]", f'[0, 1000]\noutside = "{outside}"'))
        with pytest.raises(ValueError, match=r"has '1,088', which may be 1088 or 1\.0880; write it as one of these"):
            encoded(frame(age=["830", "1,088", "", "1,295"], bmi=bmi), by)
    for clear in (["830", "1,088", "", "1,5"], ["830", "0,125", "", "1,088"]):
        encoded(frame(age=clear, bmi=bmi), by)
    encoded(frame(age=["830", "1,088", "", "90"], bmi=["25,5", "70", "10", "30"]), by)  # commas are decimal there
    encoded(frame(age=["3", "1,250", "", "2,250"], bmi=bmi))  # nobody is 1250
    with pytest.raises(ValueError, match="commas in column 'age' and with points in column 'bmi'"):
        encoded(frame(age=["3", "1,5", "", "2"], bmi=["25.5", "70", "10", "30"]))
    exact = [Decimal("25.5"), Decimal("70.0"), Decimal("10.0"), Decimal("30.0")]  # a type, which has no sign
    encoded(frame(age=["3", "1,5", "", "2"], bmi=exact))
    costs = schema('target = "cost"\nrange = [0, 5000]\n[columns.bmi]\nkind = "number"\nrange = [0, 100]\n')
    table = pd.DataFrame({"bmi": ["25,5", "70"], "cost": ["1.088", "950"]})
    with pytest.raises(ValueError, match="commas in column 'bmi' and with points in column 'cost'"):
        encoded(table, costs)
    rows = "".join(f'"1,{number}",{number % 7},{"yes" if number % 2 else "no"}\n' for number in range(100, 200))
    example = read_csv(csv(tmp_path / "t.csv", f"income,visits,label\n{rows}"), as_text=True)
    assert "# left out: 'income' (it has '1,100', which may be 1100 or 1.100" in draft(example, None, "t.csv")
    with pytest.raises(ValueError, match="the target 'income' has '1,100', which may be"):
        draft(example, "income", "t.csv")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"age": ["400", "1", "2", "3"]}, "has 400, outside of [0.0, 110.0], in 1 of 4 records"),
        ({"age": ["1100", "1", "2", "3"]}, "10 times the largest; another unit?"),
        ({"age": ["forty", "1", "2", "3"]}, "has 'forty', which is no number"),
        ({"age": ["1.000,5", "1", "2", "3"]}, "has commas and points, as in '1.000,5'"),
        ({"age": pd.to_datetime(["2020-01-01"] * 4)}, "has dates, but the schema says numbers"),
        ({"bmi": ["", "1", "2", "3"]}, "has 1 gaps; say what stands for one (missing), or drop the records"),
        ({"smoker": ["maybe", "yes", "no", ""]}, "has 'maybe', which is neither true nor false"),
        ({"admitted": ["01.02.2020"] * 4}, "has '01.02.2020'; write dates as YYYY-MM-DD"),
        ({"admitted": ["2020-02-01 to 2021-05-05"] * 4}, "has '2020-02-01 to 2021-05-05'; write dates as YYYY-MM-DD"),
        ({"admitted": ["2020-02-01 ?", "", "", ""]}, "has '2020-02-01 ?'; write dates as YYYY-MM-DD"),
        ({"admitted": ["2020-02-30"] * 4}, "has '2020-02-30', which is no day of a calendar"),
        ({"admitted": ["2019-12-31"] * 4}, "has 2019-12-31, outside of ['2020-01-01', '2020-12-31']"),
        ({"admitted": [1, 2, 3, 4]}, "has numbers, but the schema says dates"),
        ({"died": ["no", "yes", "maybe", "no"]}, "has the class 'maybe', which is none of no, yes"),
        ({"died": ["no", "yes", "", "no"]}, "has 1 gaps; drop the records without a class"),
        ({"died": ["no", "yes", "Yes", "no"]}, "has the class 'Yes', which is none of no, yes; did you mean yes?"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_the_remedy(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError) as caught:
        encoded(frame(**changes))
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_category_is_refused_where_the_schema_has_no_other() -> None:
    strict = schema(SCHEMA.replace('outside = "other"', ""))
    with pytest.raises(ValueError, match=r"has 'icu', which is none of surgery, medicine; add it to values at every"):
        encoded(frame(), strict)


def test_an_absent_column_is_named_and_others_are_left_out_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"has no column 'age', which the schema names; did you mean Age\?"):
        encoded(frame().rename(columns={"age": "Age"}))
    assert any("not in the schema, so not read: weight" in text for text in encoded(frame(weight=1.0))[1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("range = [0, 110]", "range = [110, 0]"), "the range [110.0, 0.0] is empty"),
        (("range = [0, 110]", ""), "a column of kind 'number' needs its range"),
        (('values = ["surgery", "medicine"]', ""), "a column of kind 'category' needs its values"),
        (('values = ["surgery", "medicine"]', 'values = ["a", "a"]'), "values names 'a' twice"),
        (('classes = ["no", "yes"]', 'classes = ["no"]'), "name each class once, and two at least"),
        (('target = "died"', 'target = "age"'), "'age' is a column of the model, and the target"),
        (('kind = "boolean"', 'kind = "bool"'), "kind is 'bool'"),
        (("missing = 60", "mising = 60"), "mising is not a setting here"),
        (('outside = "clip"', 'outside = "other"'), "outside is 'other', which a column of kind 'number' can't do"),
    ],
)
def test_a_wrong_schema_is_one_sentence(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    csv(tmp_path / "s.toml", SCHEMA.replace(*change, 1))
    with pytest.raises(ValueError) as caught:
        TableSchema.read(tmp_path / "s.toml")
    assert why in str(caught.value) and "s.toml" in str(caught.value)


def test_a_missing_schema_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft one with fedstill data schema FILE"):
        TableSchema.read(tmp_path / "no.toml")


# CSV ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b,label\n1,2.5,0\n3,4,1\n", [[1, 2.5], [3, 4]]),
        ("\ufeffa,b,label\r\n1,2.5,0\r\n3,4,1\r\n", [[1, 2.5], [3, 4]]),
        ("a;b;label\n1;2,5;0\n3;4,0;1\n", [[1, 2.5], [3, 4]]),
        ("a\tb\tlabel\n1\t2.5\t0\n3\t4\t1", [[1, 2.5], [3, 4]]),
        ("a|b|label\n1|2.5|0\n3|4|1\n", [[1, 2.5], [3, 4]]),
        ('"a","b","label"\n"1","2.5","0"\n"3","4","1"\n', [[1, 2.5], [3, 4]]),
        (",a,b,label\n0,1,2.5,0\n1,3,4,1\n", [[1, 2.5], [3, 4]]),  # an index of pandas
        (" a , b ,label\n1,2.5,0\n3,4,1\n", [[1, 2.5], [3, 4]]),
    ],
)
def test_csv_files_are_read_whatever_separates_them(tmp_path: Path, text: str, expected: list[list[float]]) -> None:
    raw = sources.load_raw(str(csv(tmp_path / "t.csv", text)), Reading())
    both = np.concatenate([np.asarray(part[0]) for part in (raw.train, raw.test)])
    assert sorted(both.tolist()) == expected
    assert raw.features == ("a", "b")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,a,label\n1,2,0\n", "has two columns 'a'"),
        ("a,,label\n1,2,0\n", "has a column without a name, number 2"),
        ("a b label\n1 2 0\n", "has one column ('a b label'); separate columns by commas or semicolons"),
        ("a,b,label\n1,2,0\n1,2\n", "cannot be read as CSV"),
        ("a,b,label\n1,,0\n1,2,1\n", "column 'b' of .* has 1 gaps"),
        ("", "has one column"),
        ("a,b,label\n", "has 0 records"),
    ],
)
def test_csv_files_that_would_be_read_wrongly_are_refused(tmp_path: Path, text: str, why: str) -> None:
    import re

    with pytest.raises(ValueError) as caught:
        sources.load(str(csv(tmp_path / "t.csv", text)))
    assert why in str(caught.value) or re.search(why, str(caught.value))


def test_a_csv_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("größe,label\n1,0\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"is not UTF-8 \(byte 2\); save it again as 'CSV UTF-8'"):
        sources.load(str(tmp_path / "t.csv"))


def test_line_breaks_and_separators_inside_quotes_stay_in_their_cell(tmp_path: Path) -> None:
    table = read_csv(csv(tmp_path / "t.csv", 'a,note,label\n1,"x, y\nz",0\n2,"say ""no""",1\n'), as_text=True)
    assert table["note"].to_pylist() == ["x, y\nz", 'say "no"'] and table.num_rows == 2


def test_a_folder_of_csv_files_is_one_table_and_splits_are_told_by_name(tmp_path: Path) -> None:
    csv(tmp_path / "train.csv", "a,label\n1,0\n2,1\n3,1\n")
    csv(tmp_path / "test.csv", "label,a\n0,9\n")
    raw = sources.load_raw(str(tmp_path), Reading())
    assert np.asarray(raw.test[0]).tolist() == [[9]] and len(raw.train[0]) == 3


def test_csv_beside_parquet_is_still_refused(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1.0, 2], "label": [0, 1]}).to_parquet(tmp_path / "one.parquet")
    csv(tmp_path / "two.csv", "a,label\n1,0\n")
    with pytest.raises(ValueError, match="which are not read"):
        sources.load(str(tmp_path))


# Runs -----------------------------------------------------------------------------------------------------------------


def hospital(path: Path, n: int = 400) -> Path:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "patient": [f"P{i // 2}" for i in range(n)],
            "hospital": np.where(np.arange(n) % 4 < 2, "north", "south"),
            "age": rng.integers(18, 95, n),
            "bmi": rng.normal(27, 4, n).round(1),
            "ward": rng.choice(["surgery", "medicine"], n),
            "smoker": rng.choice(["yes", "no", ""], n),
            "admitted": [f"2020-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(n)],
        }
    )
    table["died"] = np.where(table["age"] > 60, "yes", "no")
    table.to_csv(path, index=False)
    return path


def test_a_run_by_a_schema_measures_nothing_from_records(tmp_path: Path) -> None:
    place, by = hospital(tmp_path / "all.csv"), csv(tmp_path / "s.toml", SCHEMA)
    settings: dict[str, Any] = {"clients": 2, "model": "linear", "workers": 0, "partition": "by:hospital"}
    record = fedstill.run(
        "afl", data=place, schema_file=str(by), epsilon=4.0, public="noise", out=tmp_path / "run",
        **settings,
    )  # fmt: skip
    assert record.guarantee.holds, record.guarantee.reason
    assert record["largest_group"]["column"] == "patient"
    config = json.loads((record.folder / "config.json").read_text())
    assert config["experiment"]["schema_file"] == str(by)
    scaled = "would be scaled by the mean and the standard deviation of the private records"
    with pytest.raises(ValueError, match=scaled):
        fedstill.run(
            "afl", data=pd.read_csv(place).drop(columns=["smoker"]), label_column="died", epsilon=4.0, public="noise",
            out=tmp_path / "other", **settings,
        )  # fmt: skip


def test_a_frame_and_a_file_give_the_same_model(tmp_path: Path) -> None:
    place, by = hospital(tmp_path / "all.csv"), csv(tmp_path / "s.toml", SCHEMA)
    settings: dict[str, Any] = {"clients": 2, "model": "linear", "workers": 0, "rounds": 2, "schema_file": str(by)}
    models = [
        fedstill.run("fedavg", data=data, out=tmp_path / name, **settings).folder / "model.safetensors"
        for name, data in (("file", place), ("frame", pd.read_csv(place, dtype=str, keep_default_na=False)))
    ]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_changed_schema_is_read_anew(tmp_path: Path) -> None:
    place = hospital(tmp_path / "all.csv")
    wide = schema(SCHEMA.replace("[0, 110]", "[0, 220]"))
    first, second = (sources.load_raw(str(place), Reading(schema=one)) for one in (schema(), wide))
    assert not np.array_equal(np.asarray(first.train[0]), np.asarray(second.train[0]))
    assert find(str(place), Reading(schema=schema())).folder != find(str(place), Reading(schema=wide)).folder


@pytest.mark.parametrize("data", ["digits", "mnist"])
def test_a_schema_of_a_known_data_set_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match="is a known data set; leave it out"):
        find(data, Reading(schema=schema()))


def test_a_label_column_beside_a_schema_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--label-column is 'age', but the schema's target is 'died'"):
        find(str(hospital(tmp_path / "all.csv")), Reading(label="age", schema=schema()))


# Drafts ---------------------------------------------------------------------------------------------------------------


def test_a_draft_is_a_schema_that_reads_its_own_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = hospital(tmp_path / "all.csv")
    main(["data", "schema", str(place), "--target", "died"])
    text = capsys.readouterr().out
    assert text.startswith("# A draft from 400 rows") and "replace them by public" in text
    by = TableSchema.read(csv(tmp_path / "s.toml", text))
    assert (by.target, by.classes, by.group, by.site) == ("died", ("no", "yes"), "patient", "hospital")
    assert {name: column.kind for name, column in by.columns.items()} == {
        "age": "number", "bmi": "number", "ward": "category", "smoker": "boolean", "admitted": "date",
    }  # fmt: skip
    assert by.columns["smoker"].missing is False and by.columns["age"].missing is None
    by.encode(read_table(place, as_text=True), "the example")


def test_ids_and_constant_columns_are_left_out_of_a_draft_with_the_reason() -> None:
    import pyarrow as pa

    table = pa.table(
        {
            "row": list(range(30)), "same": [1] * 30, "note": [f"text {i}" for i in range(30)],
            "x": [i % 7 for i in range(30)],
            "label": [i % 2 for i in range(30)],
        }
    )  # fmt: skip
    text = draft(table, None, "the example")
    assert "# left out: 'row' (another whole number in each row, as ids have)" in text
    assert "# left out: 'same' (it has one value)" in text and "# left out: 'note' (texts with 30 values)" in text
    assert "[columns.x]" in text and 'classes = ["0", "1"]' in text


def test_a_list_of_a_draft_is_one_line_and_keeps_odd_words(tmp_path: Path) -> None:
    import pyarrow as pa

    odd = ['a, "b"', "[\n    c,\n]", "d]", "é\\", "f\u2028g", "h\x85i", "[", "k,"]
    text = draft(pa.table({"ward": odd * 9, "label": [0, 1] * 36}), None, "the example")
    assert sum("values = [" in line and line.endswith("]") for line in text.split("\n")) == 1
    assert set(TableSchema.read(csv(tmp_path / "s.toml", text)).columns["ward"].values) == set(odd)


def test_a_draft_without_a_target_asks_for_one() -> None:
    import pyarrow as pa

    with pytest.raises(ValueError, match="say with --target which one has the classes"):
        draft(pa.table({"a": [1.5, 2.5, 3.5]}), None, "the example")


@pytest.mark.parametrize(
    "time",
    [
        "",
        " 10",
        "T10:00",
        " 10:00:00",
        "T10:00:00.000000000",
        " 10:00 PM",
        " 00:00:00+00:00",
        "T10:00:00Z",
        " 9:05 UTC",
    ],
)
def test_a_date_may_have_a_time_of_day(time: str) -> None:
    assert re.fullmatch(DAY, f"2020-02-01{time}")
