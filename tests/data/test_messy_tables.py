"""Tables, arrays and pictures as hospitals have them: what would be read wrongly without a word, and what is fine."""

import io
import json
import math
import struct
import unicodedata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import fedstill
from fedstill import InputError
from fedstill.cli import main
from fedstill.data import sources
from fedstill.data.own import given, reading_of
from fedstill.data.places import Reading
from fedstill.report import rows

N = 400
RNG = np.random.default_rng(0)
AGE, CRP = RNG.normal(size=N), RNG.normal(size=N)
PATIENTS = [f"P{i // 4}" for i in range(N)]
TASK: dict[str, Any] = {"model": "linear", "clients": 2, "rounds": 1, "workers": 0}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"age": AGE, "crp": CRP, "label": np.arange(N) % 2, **columns})


def written(text: str, name: str = "t.csv") -> str:
    Path(name).write_text(text)
    return f"./{name}"


def lines(header: str, row: Any, number: int = N) -> str:
    return "\n".join([header, *(row(i) for i in range(number))]) + "\n"


# Whose records are whose ---------------------------------------------------------------------------------------------


def gapped() -> pd.DataFrame:
    return frame(patient=[None if i == 7 else patient for i, patient in enumerate(PATIENTS)])


def test_a_gap_among_patients_is_no_reason_to_mix_their_records() -> None:
    """One gap in 1,000 rows put 144 of 250 patients on both sides."""
    gapped().to_csv("gap.csv", index=False)
    sentence = "the column 'patient' of .* has 1 gaps, .*; give each a value of its own, drop them, name another column"
    for data in ("./gap.csv", gapped(), [frame(patient=PATIENTS), gapped()]):
        with pytest.raises(ValueError, match=sentence):
            given(data)
    with pytest.raises(InputError, match=sentence):
        fedstill.load_data("./gap.csv", group="patient")
    apart = fedstill.load_data("./gap.csv", group="none")
    assert "no columns to group or partition by, as they have gaps: patient (1 of 400)" in apart.remarks


def test_words_blanks_and_floats_among_patients_are_gaps_too() -> None:
    for gap in ("", "  ", "None", "-", "unknown", "NA"):
        patients = [gap if i % 40 == 7 else patient for i, patient in enumerate(PATIENTS)]
        with pytest.raises(ValueError, match="the column 'patient' of .* has 10 gaps"):
            given(frame(patient=patients))
    for name in ("whole", "gapped"):  # pandas writes 1.0 beside a gap
        Path(name, "a").mkdir(parents=True)
        for i in range(20):
            Image.fromarray(np.full((4, 4), 10 * i, np.uint8)).save(f"{name}/a/{i}.png")
        rows = [f"a/{i}.png,{i % 2},{'' if name == 'gapped' and i == 3 else float(i // 4)}" for i in range(20)]
        Path(name, "metadata.csv").write_text("\n".join(["file_name,label,patient", *rows]))
    assert fedstill.load_data("./whole").group == "patient"
    with pytest.raises(InputError, match="the column 'patient' of 'gapped' has 1 gaps"):
        fedstill.load_data("./gapped")


def test_a_column_of_patients_without_any_groups_nothing() -> None:
    data = given(frame(patient=[""] * N))[0]
    assert data.group == "" and any("as they have gaps: patient (400 of 400)" in remark for remark in data.remarks)


def test_an_eye_is_no_person() -> None:
    patients = [None if i == 0 else patient for i, patient in enumerate(PATIENTS)]
    with pytest.raises(ValueError, match="the column 'patient' of .* has 1 gaps"):
        given(frame(eye=["L", "R"] * (N // 2), patient=patients))
    for kind in ("float16", "float32"):
        assert given(frame(patient=np.arange(N, dtype=kind) // 4))[0].group == "patient"
    for values in (
        [1e20 + i // 4 * 1e19 for i in range(N)],
        [i // 4 + (i % 4) / 10 for i in range(N)],
    ):  # patient.visit
        with pytest.raises(ValueError, match="column 'mrn' of .* has numbers that are not whole or beyond 2\\^53"):
            given(frame(mrn=values))
    assert given(frame(eye=[0, 1] * (N // 2)))[0].group == ""  # a fact of a record, not whose it is


def test_a_whole_column_of_patients_counts_before_one_with_gaps() -> None:
    data = given(frame(lesion=[None if i % 5 == 0 else f"l{i}" for i in range(N)], patient=PATIENTS))[0]
    assert data.group == "patient"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ma.masked_equal(np.arange(N) // 4, 3), "have 4 masked values"),
        ([None if i == 7 else "a" for i in range(N)], "column 'patient' of .* has gaps"),
        ([math.nan if i == 7 else 1.0 for i in range(N)], "column 'patient' of .* has gaps"),
        ([math.nan, *PATIENTS[1:]], "column 'patient' of .* has gaps"),
    ],
)
def test_columns_beside_tensors_have_no_gaps(values: Any, message: str) -> None:
    pair = np.stack([AGE, CRP], 1), np.arange(N) % 2
    with pytest.raises(InputError, match=message):
        fedstill.from_torch(pair, columns={"patient": values})
    for whole in (pd.Series(PATIENTS), np.array(PATIENTS, object), pd.Categorical(PATIENTS), pa.array(PATIENTS)):
        assert set(fedstill.from_torch(pair, columns={"patient": whole}).columns["patient"]) <= set(PATIENTS)


def test_one_picture_without_a_patient_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):
        Path(f"own/{'ab'[i % 2]}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), 20 * i, np.uint8)).save(f"own/{'ab'[i % 2]}/{i}.png")
    rows = [f"{'ab'[i % 2]}/{i}.png,{'' if i == 3 else i // 2}" for i in range(8)]
    Path("own/metadata.csv").write_text("\n".join(["file_name,patient", *rows]))
    with pytest.raises(InputError, match="the column 'patient' of 'own' has 1 gaps"):
        fedstill.load_data("./own")


def test_patients_that_differ_in_blanks_only_are_named() -> None:
    patients = ["P1", "P1 ", "p1", "P\u200b1", *PATIENTS[4:]]
    frame(patient=patients).to_csv("t.csv", index=False)
    remarks = fedstill.load_data("./t.csv").remarks
    assert any("values of 'patient' differ in capitals or blanks only, and count as several" in r for r in remarks)


def test_an_array_of_patients_is_that_of_the_train_records_alone(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(20, 3)), np.arange(20) % 2
    np.savez("t.npz", x_train=x, y_train=y, x_test=x + 1, y_test=y, patient=np.arange(20) // 4)
    data = fedstill.load_data("./t.npz")
    assert "patient" in data.columns and not data.test_columns
    assert not any("in train and in test" in remark for remark in data.remarks)


# Indexes of pandas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_a_named_index_is_no_silent_loss(parts: int) -> None:
    def load(index: str) -> sources.DataSet:
        Path("idx").mkdir(exist_ok=True)
        size = N // parts
        for k in range(parts):
            part = frame(patient=PATIENTS)[k * size : k * size + size]
            part.set_index(index).to_parquet(f"idx/part-{k}.parquet")
        return fedstill.load_data("./idx")

    assert "not read, as pandas' index: crp" in load("crp").remarks
    assert load("patient").group == "patient"
    assert load("label").class_names == ("0", "1")
    assert given(frame(patient=PATIENTS).set_index("patient"))[0].group == "patient"
    assert given(frame().set_index("crp"))[0].remarks == ("not read, as pandas' index: crp",)
    assert given(frame()[AGE > 0])[0].remarks == ()


def test_the_order_of_files_decides_no_index() -> None:
    visits = frame(visit=[(i * 37) % 1000 + 5 for i in range(N)])
    for folder, first, second in (("ia", "A", "B"), ("ib", "B", "A")):
        for name in "AB":
            Path(folder, name).mkdir(parents=True)
        visits.set_index("visit").to_parquet(f"{folder}/{first}/train.parquet")
        visits.to_parquet(f"{folder}/{second}/train.parquet")
        data = fedstill.load_data(f"./{folder}")
        assert data.features == ("age", "crp") and "not read, as pandas' index: visit" in data.remarks


HEAD = "target = 'label'\nclasses = ['0', '1']\n"
SCHEMA = f"{HEAD}group = 'patient'\n[columns.age]\nkind = 'number'\nrange = [-9, 9]\n"


def test_a_schema_finds_the_columns_of_an_index() -> None:
    Path("s.toml").write_text(SCHEMA)
    reading = reading_of({"schema_file": "s.toml"})
    for index in ("patient", "age", "label"):
        frame(patient=PATIENTS).set_index(index).to_parquet("one.parquet")
        assert given("./one.parquet", reading)[0].features == ("age",)


# Numbers that are none, or may be two --------------------------------------------------------------------------------


def test_codes_keep_their_zeros() -> None:
    place = written(lines("age,hospital,label", lambda i: f"{i % 7},{('010', '10', '0010', '09')[i % 4]},{i % 2}"))
    data = fedstill.load_data(place)
    assert sorted(set(data.columns["hospital"])) == ["0010", "010", "09", "10"] and data.features == ("age",)
    place = written(lines("age,label", lambda i: f"{i % 7},{('01', '1', '001', '0')[i % 4]}"), "labels.csv")
    assert len(fedstill.load_data(place).class_names) == 4
    place = written(lines("age,code,label", lambda i: f"{i % 7},\t0{i % 90 + 10},{i % 2}"), "tab.csv")
    assert fedstill.load_data(place).features == ("age",)  # a tab keeps zeros through spreadsheets
    place = written(lines("age,code,label", lambda i: f"{i % 7},{('0x10', '16')[i % 2]},{i % 2}"), "hex.csv")
    assert set(fedstill.load_data(place).columns["code"]) == {"0x10", "16"}


def test_codes_of_one_hospital_alone_make_texts_of_all() -> None:
    for name in "ab":
        Path("own", name).mkdir(parents=True)
    written(lines("age,ward,label", lambda i: f"{i % 7},{('010', '10')[i % 2]},{i % 2}"), "own/a/train.csv")
    written(lines("age,ward,label", lambda i: f"{i % 7},{(10, 20)[i % 2]},{i % 2}"), "own/b/train.csv")
    data = fedstill.load_data("./own")
    assert data.features == ("age",) and set(data.columns["ward"]) == {"010", "10", "20"}
    written(lines("age,ward,label", lambda i: f"{i % 7},{('<5', '10')[i % 2]},{i % 2}"), "own/a/train.csv")
    with pytest.raises(
        InputError, match="the column 'ward' of 'b/train.csv' .* has type int64, but string in 'a/train.csv'"
    ):
        fedstill.load_data("./own")


def test_codes_of_the_train_file_alone_make_texts_of_both() -> None:
    Path("own").mkdir()
    written(lines("age,ward,label", lambda i: f"{i % 7},{('010', '10')[i % 2]},{i % 2}"), "own/train.csv")
    written(lines("age,ward,label", lambda i: f"{i % 7},{(10, 20)[i % 2]},{i % 2}"), "own/test.csv")
    data = fedstill.load_data("./own")
    assert data.features == ("age",) and set(data.test_columns["ward"]) == {"10", "20"}


def test_classes_that_differ_in_zeros_are_named() -> None:
    place = written(lines("age,label", lambda i: f"{i % 7},{('01', '1', '0')[i % 3]}"))
    assert (
        "classes differ in zeros only; if they are one, rename them: '01' and '1'" in fedstill.load_data(place).remarks
    )


def test_a_separator_behind_the_last_cell_makes_no_column() -> None:
    place = written(lines("age,crp,label,", lambda i: f"{i % 7},{i % 5}.5,{i % 2},"))
    assert fedstill.load_data(place).features == ("age", "crp")
    with pytest.raises(InputError, match="has a column without a name, number 3"):
        fedstill.load_data(written(lines("age,label,", lambda i: f"{i % 7},{i % 2},{i}"), "u.csv"))


def test_an_id_of_twenty_digits_is_no_feature() -> None:
    place = written(lines("age,patient,label", lambda i: f"{i % 7},{10**22 + i // 4},{i % 2}"))
    data = fedstill.load_data(place)
    assert (data.features, data.group) == (("age",), "patient")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            lambda i: f"{i % 90};{800 + i * 20:,};{i % 2}",
            "has '1,000' in the column 'leuko', which may be 1000 or 1.000",
        ),
        (lambda i: f"{i % 90};{f'{800 + i * 20:,}'.replace(',', '.')};{i % 2}", "may be 1000 or 1.000"),
        (
            lambda i: f"{i % 9},5;{i % 9}.5;{i % 2}",
            "has commas in the column 'age', .*, and points in 'leuko'",
        ),
    ],
)
def test_signs_of_thousands_are_not_taken_for_decimal_ones(row: Any, message: str) -> None:
    """``1,000`` became 1 beside 980 of the same column."""
    with pytest.raises(InputError, match=message):
        fedstill.load_data(written(lines("age;leuko;label", row)))


@pytest.mark.parametrize(
    "row",
    [
        lambda i: f"{i / 8:.3f}".replace(".", ",") + f";{i % 50};{i % 2}",  # the first column
        lambda i: f'"{i / 8:.3f}";"{i % 50}";"{i % 2}"'.replace(".", ","),
        lambda i: f"{'1,5 mg' if i == 3 else 'x'};{i / 8:.3f};{i % 2}",  # whose numbers have points
        lambda i: (f"{i}" if i < 14_000 else f"{i / 8:.3f}".replace(".", ",")) + f";{i % 50};{i % 2}",  # behind 64 kB
    ],
)
def test_decimal_signs_are_those_of_the_numbers(row: Any) -> None:
    number = 16_000 if 14_000 in row.__code__.co_consts else N
    data = fedstill.load_data(written(lines("dose;other;label", row, number)), group="none")
    values = torch.cat([data.train.images, data.test.images])
    dose = values[:, data.features.index("dose" if "dose" in data.features else "other")]
    assert float(dose.min()) == 0 and float(dose.max()) == ((N - 1) / 8 if number == N else 13_999)


@pytest.mark.parametrize("sign", "\t|")
def test_points_of_thousands_in_a_file_with_tabs_are_refused(sign: str) -> None:
    """``1.234`` beside ``567``; a decimal point needs no digits behind it, or not always three."""
    fine: list[Callable[[int], str]] = [
        lambda i: f"{1 + i / 64:.3f}{sign}{i % 2}",  # of a fixed form
        lambda i: f"{1 + round(i / 64, 3)}{sign}{i % 2}",
        lambda i: f"{1 + i % 3 + 0.125 * (i % 2)}{sign}{i % 2}".replace(".0", ""),
        lambda i: f"{round(i / 700, 3) if i % 2 else i}{sign}{i % 2}",
    ]
    for row in fine:
        fedstill.load_data(written(lines(f"dose{sign}label", row)))
    points = written(lines(f"dose{sign}label", lambda i: f"{800 + i * 20:,}{sign}{i % 2}".replace(",", ".")))
    with pytest.raises(InputError, match="has '1.000' in the column 'dose', which may be 1000 or 1.000"):
        fedstill.load_data(points)


def test_a_schema_refuses_points_that_may_be_thousands() -> None:
    Path("s.toml").write_text(
        'target = "label"\nclasses = ["0", "1"]\n[columns.plt]\nkind = "number"\nrange = [0, 900000]\n'
    )
    reading = reading_of({"schema_file": "s.toml"})
    thousands = written(lines("plt;label", lambda i: f"{f'{90_000 + i * 700:,}'.replace(',', '.')};{i % 2}"))
    with pytest.raises(ValueError, match="has '90.000', which may be 90000 or 90.000"):
        given(thousands, reading)
    whole = Path("t.csv").read_text()
    for gap in ("NA", "-", " ", ""):  # a gap hides no thousands, and no proof of a decimal point
        with pytest.raises(ValueError, match="which may be 90700 or 90.7000"):
            given(written(whole.replace("90.000;", f"{gap};"), "g.csv"), reading)
    decimal = written(lines("plt;label", lambda i: f"{i / 8:.3f};{i % 2}"), "d.csv")  # 0.125 is surely decimal
    assert given(decimal, reading)[0].features == ("plt",)


@pytest.mark.parametrize(
    ("decimal", "thousands", "message"),
    [
        (
            lines("plt;label", lambda i: f"{i / 8:.3f};{i % 2}"),
            lines("plt;label", lambda i: f"{f'{90_000 + i * 700:,}'.replace(',', '.')};{i % 2}"),
            "has '1.000', which may be 1000 or 1.0000, as may all numbers with a sign in 'b/train.csv'",
        ),
        (
            lines("plt;label", lambda i: f"{i / 8:.2f};{i % 2}".replace(".", ",")),
            lines("plt,label", lambda i: f'"{90_000 + i * 700:,}",{i % 2}'),
            "has '90,000', which may be 90000 or 90.000",
        ),
    ],
)
def test_a_decimal_file_hides_no_thousands_of_another(decimal: str, thousands: str, message: str) -> None:
    """A decimal number in one file spoke for all files of a folder: 90.000 of another was 90."""
    Path("s.toml").write_text(
        'target = "label"\nclasses = ["0", "1"]\n[columns.plt]\nkind = "number"\nrange = [0, 900000]\n'
    )
    for part in "ab":
        Path("f", part).mkdir(parents=True)
    written(decimal, "f/a/train.csv")
    data = given("f", reading_of({"schema_file": "s.toml"}))[0]
    assert len(data.train.images) + len(data.test.images) == N
    written(thousands, "f/b/train.csv")
    with pytest.raises(ValueError, match=message):
        given("f", reading_of({"schema_file": "s.toml"}))


@pytest.mark.parametrize(
    "text",
    [
        lines("Gewicht, kg\tGroesse, cm\tlabel", lambda i: f"{60 + i % 40}\t{150 + i % 50}\t{i % 2}"),
        lines("Gewicht, kg;Groesse, cm;label", lambda i: f"{60 + i % 40},5;{150 + i % 50},25;{i % 2}"),
        lines('"Gewicht; kg","Groesse; cm",label', lambda i: f"{60 + i % 40},{150 + i % 50},{i % 2}"),
        "sep=;\n" + lines("Gewicht;Groesse;label", lambda i: f"{60 + i % 40};{150 + i % 50};{i % 2}"),
    ],
)
def test_the_separator_is_that_of_all_rows(text: str) -> None:
    data = fedstill.load_data(written(text))
    assert len(data.features) == 2 and 60 <= float(data.train.images[:, 0].min()) < 62


# What no model shall learn from --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("name", "patient", "group"),
    [
        ("patient", lambda i: i // 3, None),
        ("Subject_ID", lambda i: float(i // 3), None),
        ("pat", lambda i: i // 3, "pat"),
        ("mrn", lambda i: None if i % 9 == 0 else i // 3, "none"),
        ("patient", lambda i: None, None),  # an empty column groups nothing
        ("patient", lambda i: i + 1, None),  # a patient for each record
    ],
)
def test_whose_a_record_is_is_no_feature(name: str, patient: Any, group: str | None, suffix: str) -> None:
    """The patient's number was one of the features, and `predict` asked for it."""
    frame = pd.DataFrame({"age": [i % 90 for i in range(N)], "label": [i % 2 for i in range(N)]})
    frame.insert(0, name, [patient(i) for i in range(N)])
    frame.to_csv("t.csv", index=False) if suffix == "csv" else frame.to_parquet("t.parquet")
    data = fedstill.load_data(f"./t.{suffix}", group=group)
    assert data.features == ("age",)
    assert any("tells whose a record is" in remark and name in remark for remark in data.remarks)


def test_a_person_column_of_some_clients_alone_has_gaps() -> None:
    """The other clients' patients were drawn record by record, and nothing said so."""
    whose = written(lines("age,patient,label", lambda i: f"{i % 90},p{i // 3},{i % 2}"), "a.csv")
    nobodys = written(lines("age,label", lambda i: f"{i % 90},{i % 2}"), "b.csv")
    with pytest.raises(ValueError, match="client 0's records have the column 'patient' of persons, and .* client 1"):
        given([whose, nobodys], reading_of({}))
    assert given([whose, nobodys], reading_of({"group": "none"}))[0].features == ("age",)


def test_patients_of_one_number_at_two_clients_are_said() -> None:
    """Of hospitals that each count from 1, patient 1 was one person."""
    text = lines("age,patient,label", lambda i: f"{i % 90},{i // 3},{i % 2}")
    data = given([written(text, "a.csv"), written(text.replace("age", "age", 1), "b.csv")], reading_of({}))[0]
    number = len({i // 3 for i in range(N)})
    assert any(f"{number} values of 'patient' are at several clients" in remark for remark in data.remarks)
    alone = given([written(text, "a.csv")], reading_of({}))[0]
    assert not any("at several clients" in remark for remark in alone.remarks)


@pytest.mark.parametrize("other", ["whole floats", "texts"])
def test_a_stated_group_may_have_numbers_with_a_point_or_texts(other: str) -> None:
    a = frame(stay=[float(i // 4) for i in range(N)])
    b = frame(stay=[f"s{i // 4}" for i in range(N)]) if other == "texts" else a
    data = given([a, b], reading_of({"group": "stay"}))[0]
    assert data.group == "stay" and "stay" not in data.features
    assert not {*data.columns["stay"]} & {*data.test_columns["stay"]}


def test_names_of_classes_of_one_client_alone_are_refused() -> None:
    """They were taken for the other's numbers, which may mean the reverse."""
    rows = {"age": [i % 90 for i in range(N)], "label": [i % 2 for i in range(N)]}
    named = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["ill", "healthy"]))
    with pytest.raises(
        ValueError, match="client 1 has the class 0, an integer, but another client's classes are ill, healthy"
    ):
        given([named, pd.DataFrame(rows)], reading_of({}))


def test_the_names_of_columns_are_part_of_the_records() -> None:
    """A run with a header whose names had changed places was the run before."""
    text = lines("age,dose,label", lambda i: f"{i % 90},{i % 37},{i % 2}")
    first = fedstill.load_data(written(text))
    second = fedstill.load_data(written(text.replace("age,dose", "dose,age")))
    assert torch.equal(first.train.images, second.train.images) and first.fingerprint != second.fingerprint


def test_codes_of_one_client_alone_are_refused_with_the_reason() -> None:
    codes = written(lines("age,ward,label", lambda i: f"{i % 90},01{i % 3},{i % 2}"), "a.csv")
    numbers = written(lines("age,ward,label", lambda i: f"{i % 90},1{i % 3},{i % 2}"), "b.csv")
    with pytest.raises(ValueError, match=r"those of client 0 have texts there \(codes such as 010 are texts\)"):
        given([codes, numbers], reading_of({}))


def test_pictures_in_memory_are_refused_with_what_helps_them() -> None:
    labels = [i % 2 for i in range(N)]
    sizes = [Image.new("L", (8, 8 + i % 2)) for i in range(N)]
    with pytest.raises(ValueError, match=r"item 1 of .* has shape \(1, 9, 8\), but item 0 has \(1, 8, 8\)"):
        given((sizes, labels), reading_of({}))
    deep = [Image.fromarray(np.full((8, 8), 300 + i, np.uint16)) for i in range(N)]
    with pytest.raises(ValueError, match="pixel mode I;16, .*; convert the images first") as refused:
        given((deep, labels), reading_of({}))
    assert "--size" not in str(refused.value)


@pytest.mark.parametrize("values", [lambda i: float(i // 7), lambda i: i / 8])
def test_a_column_of_a_schema_is_what_the_schema_says(values: Any) -> None:
    Path("s.toml").write_text(
        'target = "label"\nclasses = ["0", "1"]\n[columns.subject_number]\nkind = "number"\nrange = [0, 900]\n'
    )
    place = written(lines("subject_number,label", lambda i: f"{values(i)},{i % 2}"))
    assert given(place, reading_of({"schema_file": "s.toml"}))[0].features == ("subject_number",)


def test_pictures_say_that_their_persons_have_fractions() -> None:
    """They were drawn one by one, and nothing said so."""
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "PNG")
    cells = {"image": [content.getvalue()] * N, "label": [i % 2 for i in range(N)]}
    pq.write_table(pa.table({**cells, "patient": [i // 4 + 0.5 for i in range(N)]}), "t.parquet")
    data = fedstill.load_data("./t.parquet")
    assert "no columns to group by, as their numbers are not whole: patient" in data.remarks and data.group == ""


def test_decimal_numbers_of_databases_name_persons() -> None:
    table = pa.table({"age": AGE, "patient": [i // 3 for i in range(N)], "label": [i % 2 for i in range(N)]})
    place = table.schema.get_field_index("patient")
    data = given(table.set_column(place, "patient", table["patient"].cast(pa.decimal128(22, 0))), reading_of({}))[0]
    assert data.group == "patient" and data.features == ("age",)


def test_records_in_memory_are_grouped_by_the_column_of_the_partition() -> None:
    data = given(frame(stay=[i // 4 for i in range(N)]), reading_of({"partition": "by:stay", "clients": 5}))[0]
    assert data.group == "stay" and not {*data.columns["stay"]} & {*data.test_columns["stay"]}
    name = unicodedata.normalize("NFD", "séjour")
    assert given(frame(séjour=[i // 4 for i in range(N)]), reading_of({"group": name}))[0].group == "séjour"


@pytest.mark.parametrize("values", [[i / 8 for i in range(N)], [float(2**24 + i // 4) for i in range(N)]])
def test_a_stated_group_of_other_numbers_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"--group is 'stay', a column of numbers that are not whole or of 2\^24 and"):
        given(frame(stay=values), reading_of({"group": "stay"}))


def test_integers_are_the_classes_of_these_names() -> None:
    rows = {"age": [i % 90 for i in range(N)], "label": [i % 2 for i in range(N)]}
    named = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["1", "2"]))
    data = given([named, pd.DataFrame({**rows, "label": [1 + i % 2 for i in range(N)]})], reading_of({}))[0]
    assert data.class_names == ("1", "2")
    labels = torch.cat([data.train.labels, data.test.labels])
    assert labels.bincount().tolist() == [N, N]


def test_a_stated_group_that_is_the_only_number_is_refused() -> None:
    only = written(lines("patient,label", lambda i: f"{i // 3},{i % 2}"), "p.csv")
    with pytest.raises(InputError, match="has no column of numbers but 'patient', which tells whose a record is"):
        fedstill.load_data(only)
    text = lines("pat,label", lambda i: f"{i // 3},{i % 2}")
    with pytest.raises(InputError, match="the only column of numbers is 'pat', which tells whose records are"):
        fedstill.load_data(written(text), group="pat")


def test_classes_that_differ_in_zeros_alone_are_named() -> None:
    data = fedstill.load_data(written(lines("age,label", lambda i: f"{i % 90},{('01', '001', '2')[i % 3]}")))
    assert "classes differ in zeros only; if they are one, rename them: '001' and '01'" in data.remarks


# Drafts of a schema --------------------------------------------------------------------------------------------------


def drafted(place: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["data", "schema", place, *words])
    text = capsys.readouterr().out
    Path("s.toml").write_text(text)
    return text


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (("none", "mild", "severe"), '"mild", "none", "severe"'),
        (("True", "False"), '"False", "True"'),
        (("01", "02", "03"), '"01", "02", "03"'),
    ],
)
def test_a_draft_fits_the_file_it_was_drafted_from(
    values: tuple[str, ...], classes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft left out the class "none", and the advice of the reading after it was to delete all healthy records."""
    place = written(lines("age,y,code", lambda i: f"{i % 90},{values[i % len(values)]},{('0010', '010', '20')[i % 3]}"))
    text = drafted(place, capsys, "--target", "y")
    assert f"classes = [{classes}]" in text and '"0010"' in text
    data = given(place, reading_of({"schema_file": "s.toml"}))[0]
    assert len(data.class_names) == len(values) and "code=010" in data.features


@pytest.mark.parametrize("name", ["mrn", "pid", "Patient ID", "participant", "subject_no", "subject-id", "patient_num"])
def test_a_draft_has_no_person_among_its_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of the patient was drafted as a feature, with its range, and split no patient off."""
    place = written(lines(f"age,{name},other,label", lambda i: f"{i % 90},{70_000 + i // 3},{i % 7},{i % 2}"))
    text = drafted(place, capsys, "--target", "label")
    assert f'group = "{name}"' in text and "70" not in text.replace(name, "")
    both = written(lines(f"{name},id,mrn2,patient,label", lambda i: f"{i // 3},{i},{i % 5},{i // 3},{i % 2}"))
    text = drafted(both, capsys, "--target", "label")
    assert f'group = "{name}"' in text and "left out: 'patient' (it tells whose a record is)" in text


def test_a_draft_leaves_out_what_may_be_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    thousands = written(lines("v;w;label", lambda i: f"{f'{1100 + 7 * i:,}'.replace(',', '.')};{i % 9};{i % 2}"))
    assert "# left out: 'v' (it has '1.100', which may be 1100 or 1.1000" in drafted(
        thousands, capsys, "--target", "label"
    )
    decimal = written(lines("v,label", lambda i: f"{1.919 + i / 3:.3f},{i % 2}"), "d.csv")  # commas separate there
    drafted(decimal, capsys, "--target", "label")
    assert given(decimal, reading_of({"schema_file": "s.toml"}))[0].features == ("v",)
    mixed = written(lines("v,label", lambda i: f"{i % 7},{('1.0', '0', '1')[i % 3]}"), "m.csv")
    assert 'classes = ["0", "1"]' in drafted(mixed, capsys, "--target", "label")


def test_truth_of_frames_and_of_texts_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = pd.DataFrame({"age": np.arange(N) % 90, "y": np.arange(N) % 3 == 0})
    rows.to_csv("t.csv", index=False)
    rows.to_parquet("t.parquet")
    drafted("t.csv", capsys, "--target", "y")
    reading = reading_of({"schema_file": "s.toml"})
    first, second, third = (given(data, reading)[0] for data in ("./t.csv", "./t.parquet", rows))
    assert first.class_names == second.class_names == third.class_names == ("False", "True")
    assert torch.equal(first.train.labels, second.train.labels) and torch.equal(first.train.labels, third.train.labels)


def test_names_in_two_compositions_are_one() -> None:
    Path("s.toml").write_text(
        'target = "label"\nclasses = ["0", "1"]\n[columns."gro\u0308ße"]\nkind = "number"\nrange = [0, 9]\n'
    )
    reading = reading_of({"schema_file": "s.toml"})
    for name in ("gr\u00f6ße", "gro\u0308ße"):
        pd.DataFrame({name: np.arange(N) % 9, "label": np.arange(N) % 2}).to_parquet("t.parquet")
        assert given("./t.parquet", reading)[0].features == ("gr\u00f6ße",)


# Rare classes --------------------------------------------------------------------------------------------------------


def test_a_class_of_one_record_or_patient_is_not_held_out() -> None:
    """26 of 39 places of one record among 200 ended in "0 train records"."""
    for at in range(0, 200, 5):
        labels = np.array(["rare" if i == at else "kp"[i % 2] for i in range(200)])
        data = given((RNG.normal(size=(200, 2)), labels))[0]
        rare = data.class_names.index("rare")
        assert int((data.train.labels == rare).sum()) == 1 and len(data.test) in (39, 40)
    for patient in range(0, 100, 7):
        labels = np.array(["rare" if i // 4 == patient and i % 2 else "kp"[i // 8 % 2] for i in range(N)])
        data = given(frame(label=labels, patient=PATIENTS))[0]
        assert set(data.train.labels.tolist()) == {0, 1, 2}
        assert not {*data.columns["patient"]} & {*data.test_columns["patient"]}


def test_one_record_of_each_class_is_too_few() -> None:
    with pytest.raises(ValueError, match="no record can be held out as a test record"):
        given((np.eye(5), np.arange(5)))


# Arrays and frames ---------------------------------------------------------------------------------------------------


def test_a_mask_is_not_thrown_away() -> None:
    values = np.where(RNG.random((N, 3)) < 0.1, -999.0, RNG.normal(size=(N, 3)))
    masked, labels = np.ma.masked_equal(values, -999.0), np.arange(N) % 2
    with pytest.raises(ValueError, match=r"the records of the data have \d+ masked values; fill them"):
        given((masked, labels))
    with pytest.raises(ValueError, match="the labels of the data have 133 masked values"):
        given((values, np.ma.masked_equal(np.arange(N) % 3, 2)))
    assert len(given((np.ma.masked_array(values), labels))[0].features) == 0


class Palettes(Dataset[Any]):
    """Pictures whose colours are the reverse of their numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        image = Image.fromarray(np.full((8, 8), i, np.uint8))
        image.putpalette([v for k in range(256) for v in (255 - k,) * 3])
        return image, i % 2


def test_pictures_of_a_data_set_have_their_colours() -> None:
    data = given(Palettes())[0]
    both = torch.cat([data.train.images, data.test.images])
    assert both.shape == (40, 3, 8, 8) and sorted(both[:, 0, 0, 0].tolist()) == list(range(216, 256))


def test_a_list_of_pictures_is_read_as_a_data_set_of_them() -> None:
    images, labels = zip(*(Palettes()[i] for i in range(40)), strict=True)
    assert torch.equal(fedstill.from_torch((list(images), labels)).train.images, given(Palettes())[0].train.images)


def test_a_data_set_of_hugging_face_is_a_client_and_has_predictions(trained: fedstill.Trained) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_pandas(frame())
    assert given([frame(), rows])[1] == given([rows, frame()])[1] == 2
    assert (trained.predict(rows) == trained.predict(frame())).all()
    x = np.stack([AGE, CRP], 1)
    with pytest.raises(ValueError, match="client 1's records have not|have the column"):
        given([frame(), (x, np.arange(N) % 2)])


@pytest.mark.parametrize(
    "data",
    [
        lambda x, y: (pl.DataFrame(x, schema=["a", "b"]), pl.Series(y)),
        lambda x, y: (x, pl.Series(y)),
        lambda x, y: (x, pa.array(y)),
        lambda x, y: (pd.DataFrame(x, columns=["a", "b"]), pd.DataFrame({"y": y})),
        lambda x, y: (torch.tensor(x).bfloat16(), torch.tensor(y)),
        lambda x, y: (torch.tensor(x).to_sparse(), torch.tensor(y)),
        lambda x, y: pa.RecordBatch.from_pydict({"a": x[:, 0], "b": x[:, 1], "label": y}),
        lambda x, y: pd.DataFrame({"a": pd.arrays.SparseArray(x[:, 0]), "b": x[:, 1], "label": y}),
    ],
)
def test_what_others_take_for_a_table_is_one(data: Any) -> None:
    found = given(data(np.stack([AGE, CRP], 1), np.arange(N) % 2))
    assert found[1] is None and found[0].train.images.shape[1:] == (2,)


def test_two_pairs_in_lists_are_two_clients() -> None:
    x, y = RNG.normal(size=(40, 3)), np.arange(40) % 2
    assert given([[x, y], [x[:20], y[:20]]])[1] == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: frame(band=pd.cut(frame().age, 3)), "column 'band' .* has type struct"),
        (lambda: (frame()[["age", "crp"]].astype(object).to_numpy(), np.arange(N) % 2), "of several types .object."),
        (lambda: [frame(), frame().drop(columns="crp")], "client 0's records have the column 'crp' of numbers, and"),
        (lambda: (np.ones((20, 2), complex), np.arange(20) % 2), "are complex128, but numbers are real"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused_in_a_sentence(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given(data())


def test_data_sets_without_rows_or_splits_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_pandas(frame()).to_iterable_dataset()
    with pytest.raises(ValueError, match="of type IterableDataset; give a datasets.Dataset or DatasetDict"):
        given(stream)
    with pytest.raises(ValueError, match="have no split; give one that is called 'train'"):
        given(datasets.DatasetDict())


def test_a_split_without_a_column_names_it() -> None:
    Path("own").mkdir()
    frame().to_csv("own/train.csv", index=False)
    frame(crp=["<0.5" if i == 3 else "1.5" for i in range(N)]).to_csv("own/test.csv", index=False)
    with pytest.raises(InputError, match="numbers as texts|the column 'crp' of numbers is in the train split of 'own'"):
        fedstill.load_data("./own")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fedstill.Trained:
    return fedstill.run("fedavg", data=frame(), out=tmp_path_factory.mktemp("trained") / "run", **TASK).load_model()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (lambda b: b.assign(age=1e39), "record 0 has a value that is not finite"),
        (lambda b: b.assign(age=pd.Timestamp("2024-01-01")), "the column 'age' has type timestamp"),
        (lambda b: b.to_numpy() + 5j, "are complex128, but numbers are real"),
        (lambda b: np.ma.masked_less(b.to_numpy(), 0), r"have \d+ masked values"),
        (lambda b: {"age": [1.0], "crp": [2.0]}, "the records are 'dict'; give numbers, texts or a table"),
        (lambda b: b.to_records(), "the records are 'recarray'; give numbers, texts or a table"),
        (lambda b: pd.concat([b, b], axis=1), "the table have two columns 'age'|two columns 'age'"),
    ],
)
def test_a_model_answers_no_nonsense(trained: fedstill.Trained, records: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        trained.predict(records(frame()[["age", "crp"]]))


def test_a_lazy_frame_is_collected(trained: fedstill.Trained) -> None:
    table = frame()[["age", "crp"]]
    assert (trained.predict(pl.from_pandas(table).lazy()) == trained.predict(table)).all()


def test_columns_that_a_model_does_not_take_are_not_looked_at(trained: fedstill.Trained) -> None:
    expected = trained.predict(frame())
    assert (trained.predict(frame(note=[1, "a"] * (N // 2))) == expected).all()
    assert (trained.predict(pl.from_pandas(frame(note="a"))) == expected).all()
    assert (trained.predict(frame().set_axis([1, "a"] * (N // 2)).rename_axis("k")) == expected).all()
    assert (trained.predict(frame().set_index("age")) == expected).all()
    twice = pa.table([frame().age, frame().age, frame().crp], names=["age", "age", "crp"])
    with pytest.raises(InputError, match="the table have two columns 'age'; drop one"):
        trained.predict(twice)


def test_the_program_reads_files_as_the_run_does(tmp_path: Path) -> None:
    """A row alone has a decimal point; a file with semicolons whose points may separate thousands is refused."""
    Path("s.toml").write_text(f"{HEAD}[columns.crp]\nkind = 'number'\nrange = [0, 400]\n")
    content = lines("crp,label", lambda i: f"{3 + i % 300}.085,{i % 2}")
    run = fedstill.run("fedavg", data=written(content), schema_file="s.toml", out="run", **TASK)
    model = run.load_model()
    schema = model.schema.model_dump(mode="json")
    one = {"crp": "3.085"}
    assert len(model.predict(pd.DataFrame([one]))) == 1 and rows.codes([one], schema)[0, 0] == 3.085
    for text in ("sep=;\ncrp;label\n3.5;0\n", 'crp,"a;b;c;d",label\n3.5,1,0\n'):
        assert rows.codes(rows.records_of(written(text, "new.csv")), schema)[0, 0] == 3.5
    with pytest.raises(ValueError, match="'1.085', which may be 1085 or 1.0850"):
        rows.codes(rows.records_of(written("crp;label\n1.085;0\n980;1\n", "new.csv")), schema)


def test_a_model_with_a_schema_takes_no_raw_numbers() -> None:
    Path("s.toml").write_text(SCHEMA)
    model = fedstill.run("fedavg", data=frame(patient=PATIENTS), schema_file="s.toml", out="run", **TASK).load_model()
    assert len(model.predict(frame()[["age"]])) == N
    with pytest.raises(
        InputError, match=r"have the value 60, but the model's schema scales all to \[-1, 1\]; give the"
    ):
        model.predict(np.full((3, 1), 60.0))


# Pictures ------------------------------------------------------------------------------------------------------------


def tiff(place: Path, pixels: np.ndarray, photometric: int) -> None:
    """A gray TIFF file in which 0 is white (0) or black (1)."""
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(place)
    data = bytearray(place.read_bytes())
    (start,) = struct.unpack("<I", data[4:8])
    for at in range(start + 2, start + 2 + 12 * struct.unpack("<H", data[start : start + 2])[0], 12):
        if struct.unpack("<H", data[at : at + 2])[0] == 262:
            data[at + 8 : at + 10] = struct.pack("<H", photometric)
    place.write_bytes(data)


@pytest.mark.parametrize("photometric", [0, 1])
def test_white_is_zero_in_16_bits_as_in_8(photometric: int) -> None:
    ramp = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (16, 1))
    rows = []
    for name, pixels in (("deep", ramp), ("flat", (ramp // 257).astype(np.uint8))):
        for i in range(10):
            tiff(Path(name, "ab"[i % 2], f"{i}.tif"), pixels, photometric)
        rows.append(fedstill.load_data(f"./{name}", size=16).train.images[0, 0, 0].tolist())
    assert rows[0] == rows[1] and (rows[0][0] == 255) is (photometric == 0)


def test_metadata_are_read_as_other_tables_are() -> None:
    def load(name: str, text: str) -> sources.DataSet:
        for i in range(8):
            Path(f"{name}").mkdir(exist_ok=True)
            Image.fromarray(np.full((4, 4), 20 * i, np.uint8)).save(f"{name}/{i}.png")
        Path(name, "metadata.jsonl" if text.startswith("{") else "metadata.csv").write_text(text)
        return sources.load(f"./{name}", Reading())

    rows = [f"{i}.png;{'ab'[i % 2]};{i // 2}" for i in range(8)]
    assert load("semi", "\n".join(["file_name;label;patient", *rows])).group == "patient"
    with pytest.raises(ValueError, match="has two columns 'patient'; rename or drop one"):
        load("twice", "\n".join(["file_name,label,patient,patient", *(f"{i}.png,{i % 2},1,1" for i in range(8))]))
    note = "one\u2028two"
    objects = [
        json.dumps({"file_name": f"{i}.png", "label": "ab"[i % 2], "note": note}, ensure_ascii=False) for i in range(8)
    ]
    assert set(load("json", "\n".join(objects)).columns["note"]) == {note}


def test_empty_tags_of_dicom_are_none(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    def scan(i: int, **tags: Any) -> None:
        file = pydicom.dataset.FileMetaDataset()
        file.MediaStorageSOPClassUID, file.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", generate_uid()
        file.TransferSyntaxUID = ExplicitVRLittleEndian
        data = pydicom.dataset.Dataset()
        data.file_meta, data.SOPClassUID, data.SOPInstanceUID = file, file.MediaStorageSOPClassUID, generate_uid()
        data.Rows = data.Columns = 16
        data.SamplesPerPixel, data.PhotometricInterpretation, data.PixelRepresentation = 1, "MONOCHROME2", 0
        data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
        data.PatientID = f"P{i // 2}"
        for name, value in tags.items():
            setattr(data, name, value)
        data.PixelData = np.random.default_rng(i).integers(0, 4096, (16, 16)).astype(np.uint16).tobytes()
        Path("own", "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        data.save_as(Path("own", "ab"[i % 2], f"{i}.dcm"), enforce_file_format=True)

    for i in range(8):
        scan(i)
    plain = fedstill.load_data("./own").train.images
    scan(3, WindowCenter="", WindowWidth="", RescaleSlope="", RescaleIntercept="")
    assert torch.equal(fedstill.load_data("./own").train.images, plain)
    scan(3, RescaleSlope="", RescaleIntercept="1")
    with pytest.raises(InputError, match="its RescaleSlope is empty"):
        fedstill.load_data("./own")
    scan(3, PatientID="")
    with pytest.raises(InputError, match="the column 'patient' of 'own' has 1 gaps"):
        fedstill.load_data("./own")
