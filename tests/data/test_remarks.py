"""What people bring is read as they mean it: names, columns, groups and copies, each refused or remarked by name."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fedstill
from fedstill.base.lookup import nfc, twins
from fedstill.data import load, sources
from fedstill.data.partition import group_split
from fedstill.data.places import Reading
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import share_out

NFC, NFD = unicodedata.normalize("NFC", "Bösartig"), unicodedata.normalize("NFD", "Bösartig")
NOISE = np.random.default_rng(0).normal(size=(60, 3))
LABELS = np.arange(60) % 2


def table(place: Path, rows: int = 60, **columns: Any) -> str:
    values: dict[str, Any] = {name: NOISE[:rows, i] for i, name in enumerate("abc")}
    pq.write_table(pa.table({**values, "label": LABELS[:rows], **columns}), place)
    return str(place)


def remarks(place: str, tmp_path: Path, **reading: Any) -> str:
    return "; ".join(load(place, Reading(**reading), cache_dir=tmp_path / "cache").remarks)


# Names ---------------------------------------------------------------------------------------------------------------


def test_names_that_differ_in_blanks_and_capitals_are_twins() -> None:
    assert NFC != NFD and nfc(NFD) == NFC
    assert twins(["cat", "dog", "Cat", "cat ", "dogs"]) == [["cat", "Cat", "cat "]]


@pytest.mark.parametrize("kind", ["folders", "labels", "column", "metadata", "npz", "torch"])
def test_a_name_of_a_mac_is_the_same_name(kind: str, tmp_path: Path) -> None:
    names = ["Gut", NFC, "Gut", NFD] * 15
    if kind == "torch":
        assert fedstill.from_torch((NOISE, np.array(names))).class_names == (NFC, "Gut")
        return
    if kind == "npz":
        np.savez(tmp_path / "own.npz", x_train=NOISE, y_train=np.array(names), site=np.array([NFC, NFD] * 30))
        data = load(str(tmp_path / "own.npz"), cache_dir=tmp_path / "cache")
        assert set(data.columns["site"]) == {NFC}
    elif kind in ("labels", "column"):
        columns = {"label": names} if kind == "labels" else {"site": names, "label": [f"x{n}" for n in LABELS]}
        data = load(table(tmp_path / "own.parquet", **columns), cache_dir=tmp_path / "cache")
        if kind == "column":
            assert set(data.columns["site"]) == {NFC, "Gut"}
            return
    else:
        for i, name in enumerate(names[:12]):
            folder = tmp_path / "own" / ("" if kind == "metadata" else f"{'hw'[i % 2]}/{name}")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(i).integers(0, 256, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i} {NFD}.png")
        if kind == "metadata":
            rows = [f"{i} {NFC}.png,{name}" for i, name in enumerate(names[:12])]
            (tmp_path / "own" / "metadata.csv").write_text("\n".join(["file_name,label", *rows]), "utf-8")
        data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert data.class_names == (NFC, "Gut")


def test_near_twins_of_classes_are_named(tmp_path: Path) -> None:
    place = table(tmp_path / "own.parquet", label=["yes", "no", "yes ", "NO"] * 15)
    assert "the classes 'NO', 'no' differ in capitals or blanks only" in remarks(place, tmp_path)
    assert "the classes 'yes', 'yes ' differ" in remarks(place, tmp_path)


def test_numbers_are_in_their_natural_order(tmp_path: Path) -> None:
    place = table(tmp_path / "own.parquet", label=[str(i % 12) for i in range(60)])
    assert load(place, cache_dir=tmp_path / "cache").class_names == tuple(map(str, range(12)))
    place = table(tmp_path / "mixed.parquet", label=["10", "9", "x"] * 20)
    assert load(place, cache_dir=tmp_path / "cache").class_names == ("10", "9", "x")


def test_a_stated_name_may_be_composed_otherwise(tmp_path: Path) -> None:
    place = table(tmp_path / "own.parquet", label=["Gut", NFC] * 30)
    task = share_out(Experiment(data=place, class_names=("Gut", NFD, "offen"), clients=2), None)
    assert task.class_names == ("Gut", NFC, "offen")


def test_identifiers_of_a_csv_file_stay_apart(tmp_path: Path) -> None:
    patients = ["001", "1", "01", "1e3", "1000", "NA"]
    for i in range(12):
        (tmp_path / "own").mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4), 20 * i, np.uint8)).save(tmp_path / "own" / f"{i}.png")
    rows = [f"{i}.png,{i % 2},{patients[i % 6]},{i % 3},{i / 4}" for i in range(12)]
    (tmp_path / "own" / "metadata.csv").write_text("\n".join(["file_name,label,code,site,dose", *rows]))
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert set(data.columns["code"]) == set(patients) and set(data.columns["site"]) == {0, 1, 2}
    assert data.class_names == ("0", "1") and "dose" not in data.columns


# Columns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": range(60)}, "column 'id' of .* numbers the records from 0 to 59, as an index does, .*; drop it"),
        ({"id": np.random.default_rng(0).permutation(60) + 1}, "'id' of .* numbers the records from 1 to 60"),
        ({"target": LABELS}, "has the columns 'label' and 'target', each of which may be the class; drop one"),
        ({"Labels": LABELS}, "has the columns 'label' and 'Labels', each of which may be the class"),
        (
            {"age": ["0,5", "1,25"] * 30},
            "'age' of .* has numbers as texts, such as '0,5'; write them as numbers",
        ),
        ({"age": ["1.234,5", " 7"] * 30}, "column 'age' of .* has numbers as texts, such as '1.234,5'"),
        ({"case": 2**60 + np.arange(60)}, "column 'case' of .* has integers such as 1152921504606846976, which"),
    ],
)
def test_columns_that_are_no_features_are_refused(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(table(tmp_path / "own.parquet", **columns), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("columns", "remark"),
    [
        ({"Unnamed: 0": range(60)}, "not read, as pandas' index: Unnamed: 0"),
        ({"sex": ["f", "m"] * 30, "ward": ["a"] * 60}, "not in the vectors, as they are texts: sex, ward"),
        ({"number": np.arange(60) * 7 + 3}, "the column 'number' has another integer in each record; if it is an id"),
        ({"label_id": LABELS * 5 + 2}, "the column 'label_id' tells the class of every record; if it is the class in"),
        ({"stage": LABELS * 2.5 + np.arange(60) // 30 / 10}, "the column 'stage' tells the class of every record"),
        ({"zip": ["01234", "1234"] * 30}, "not in the vectors, as they are texts: zip"),
    ],
)
def test_columns_that_may_be_no_features_are_named(columns: dict[str, Any], remark: str, tmp_path: Path) -> None:
    assert remark in remarks(table(tmp_path / "own.parquet", **columns), tmp_path)


def test_usual_columns_need_no_remark(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"age": rng.integers(20, 90, 60), "smoker": rng.random(60) < 0.5, "dose": rng.integers(0, 3, 60)}
    assert not remarks(table(tmp_path / "own.parquet", **columns), tmp_path)


def test_a_run_names_the_columns_and_keeps_them_with_the_model(tmp_path: Path, caplog: Any) -> None:
    place = table(tmp_path / "own.parquet", sex=["f", "m"] * 30)
    with caplog.at_level("INFO"):
        fedstill.run("fedavg", data=place, model="linear", clients=2, rounds=1, workers=0, out=tmp_path / "run")
    for sentence in (
        "columns: a, b, c",
        "not in the vectors, as they are texts: sex",
        "train: 48 records, 'own.parquet'",
    ):
        assert sentence in caplog.text
    assert fedstill.load_model(tmp_path / "run").columns == ("a", "b", "c")


# Groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5])
def test_groups_are_whole_and_near_the_fraction(fraction: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        groups = rng.integers(0, 80, 1000)
        labels = (groups % 3 + rng.integers(0, 2, 1000)) % 3
        train, test = group_split(np.arange(1000), fraction=fraction, rng=rng, labels=labels, groups=groups)
        assert not set(groups[train]) & set(groups[test]) and len(train) + len(test) == 1000
        assert abs(len(test) - 1000 * fraction) <= 30
        assert set(labels[train]) == {0, 1, 2}


def people(place: Path, name: str = "patient", per: int = 5) -> str:
    return table(place, **{name: [f"p{i // per:02d}" for i in range(60)]})


@pytest.mark.parametrize("name", ["patient", "Patient_ID", "subject_id", "pid", "lesion", "speaker-id"])
def test_a_person_is_on_one_side_by_default(name: str, tmp_path: Path) -> None:
    data = load(people(tmp_path / "own.parquet", name), cache_dir=tmp_path / "cache")
    assert data.group == name and len(np.unique(data.columns[name])) * 5 == len(data.train)
    assert "whole values of" in data.origin[1]
    alone = load(str(tmp_path / "own.parquet"), Reading(group="none"), cache_dir=tmp_path / "cache")
    assert not alone.group and len(np.unique(alone.columns[name])) == 12


def test_a_column_is_named_for_groups_or_follows_the_partition(tmp_path: Path) -> None:
    place = people(tmp_path / "own.parquet", "house")
    assert not load(place, cache_dir=tmp_path / "cache").group
    assert load(place, Reading(group="house"), cache_dir=tmp_path / "cache").group == "house"
    assert (
        load(place, Experiment(partition="by:house", clients=3).reading, cache_dir=tmp_path / "cache").group == "house"
    )
    assert not load(place, Experiment(partition="by:house", clients=12).reading, cache_dir=tmp_path / "cache").group
    with pytest.raises(ValueError, match="--group is 'hous', but the columns of 'own' are: house; name one of them"):
        load(place, Reading(group="hous"), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("more", [{"validation": 0.3}, {"local_test": 0.3}, {"local_test": 0.3, "validation": 0.3}])
def test_every_split_of_a_run_keeps_groups(more: dict[str, Any], tmp_path: Path) -> None:
    place = people(tmp_path / "own.parquet", per=2)
    data = load(place, Experiment(data=place, **more).reading)
    task = share_out(Experiment(data=place, clients=2, partition="shards:1", **more), None)
    patients = data.columns["patient"]
    for train, test in task.parts:
        assert not set(patients[train]) & set(patients[test])
    dealt = set(np.concatenate([np.concatenate(part) for part in task.parts]))
    apart = [i for i in range(len(patients)) if i not in dealt]
    trained = {patient for train, _ in task.parts for patient in patients[train]}
    assert not {patients[i] for i in apart} & trained


def test_public_records_are_whole_groups(tmp_path: Path) -> None:
    place = people(tmp_path / "own.parquet")
    task = share_out(Experiment(data=place, clients=2, public="held=8"), None)
    patients = load(place, Experiment(data=place).reading).columns["patient"]
    assert task.public is not None and len(task.public) == 10
    assert not set(patients[task.public]) & {p for train, _ in task.parts for p in patients[train]}
    with pytest.raises(ValueError, match="takes whole groups of up to 5 records .--group., which leaves none of 50"):
        share_out(Experiment(data=place, clients=2, public="held=46"), None)


def test_a_person_in_both_splits_of_the_users_own_is_counted(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for split in ("train", "test"):
        people(tmp_path / "own" / f"{split}.parquet")
    assert "values of 'patient' with records in train and in test: 12" in remarks(str(tmp_path / "own"), tmp_path)


# Copies and single classes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_test_records_that_are_train_records_are_counted_in_every_run(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 5, 5), dtype=np.uint8) if kind == "images" else rng.normal(size=(60, 4))
    np.savez(
        tmp_path / "own.npz", x_train=x, y_train=LABELS, x_test=np.concatenate([x[:12], x[:8] + 1]), y_test=LABELS[:20]
    )
    place, settings = str(tmp_path / "own.npz"), {"model": "linear", "clients": 2, "rounds": 1, "workers": 0}
    assert "12 of 20 test records equal a train record" in remarks(place, tmp_path)
    run = fedstill.run("fedavg", data=place, out=tmp_path / "run", **settings)
    assert run.summary["copied_test_records"] == 12 and run.summary["guarantee"]["exposed"] is None


def test_copies_among_validation_records_are_counted(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 4))
    np.savez(tmp_path / "own.npz", x_train=np.concatenate([x, x]), y_train=LABELS, x_test=x + 9, y_test=LABELS[:30])
    task = share_out(Experiment(data=str(tmp_path / "own.npz"), clients=2, validation=0.3), None)
    assert task.copies is not None and task.copies > 3


def test_one_class_in_all_is_refused_with_the_folders(tmp_path: Path) -> None:
    for i in range(12):
        place = tmp_path / "own" / f"n{i % 3}" / "images" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), 20 * i, np.uint8)).save(place)
    with pytest.raises(ValueError, match=r"one class in all .images.*though the folders above it differ .n0, n1, n2"):
        share_out(Experiment(data=str(tmp_path / "own"), clients=2), None)
    assert len(sources.load(f"{tmp_path}/own").class_names) == 1  # public records may have one


@pytest.mark.parametrize(("name", "words"), [("a.xlsx", "no .parquet, .csv or .npz file")])
@pytest.mark.parametrize("label", [None, "died"])
def test_a_file_that_is_not_read_is_named_also_with_a_label(
    name: str, words: str, label: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("age,died\n50,yes\n")
    with pytest.raises(ValueError, match=words):
        fedstill.load_data(tmp_path / name, label_column=label)
