"""The walk through a folder: every file is read, known to be no record, counted, or a reason to refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedstill.data import load, walk
from fedstill.data.places import Reading
from fedstill.data.walk import Place, places, split_word, table_places


def picture(file: Path, seed: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format=None if file.suffix.lower() in (".png", ".jpg") else "PNG")


def table(file: Path, rows: int = 20, shift: int = 0, **columns: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(rows + shift)
    labels = (np.arange(rows) + shift) % 2
    pq.write_table(pa.table({"a": rng.normal(size=rows), "b": rng.normal(size=rows), "label": labels, **columns}), file)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Ten images of each of two classes."""
    for name in ("cat", "dog"):
        for i in range(10):
            picture(tmp_path / "pets" / name / f"{i}.png", i + 50 * (name == "dog"))
    return tmp_path / "pets"


# Splits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *[(name, "train") for name in ("train", "TRAINING", "training_set", "seg_train", "train-00000-of-00001")],
        *[(name, "test") for name in ("Testing", "adult_test", "eval", "test2017")],
        *[(name, "validation") for name in ("val", "Valid", "dev", "x_val")],
        *[(name, "") for name in ("holdout", "trainer", "contest", "train_test", "berlin", "devil")],
    ],
)
def test_the_split_that_a_name_tells(name: str, split: str) -> None:
    assert split_word(name) == split


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "Test"), ("TRAINING", "TESTING"), ("train", "Test"),
                                   ("training_set", "test_set"), ("seg_train/seg_train", "seg_test/seg_test"),
                                   ("x/train", "x/val"), ("h1/Train", "h1/Test")])  # fmt: skip
@pytest.mark.parametrize("kind", ["images", "tables"])
def test_splits_are_the_same_for_images_and_tables(names: tuple[str, str], kind: str, tmp_path: Path) -> None:
    for name, number in zip(names, (8, 4), strict=True):
        if kind == "tables":
            for part in range(2):
                table(tmp_path / "own" / name / f"part-0000{part}-1f2e.c000.snappy.parquet", number, part)
            (tmp_path / "own" / name / "_SUCCESS").touch()
        else:
            for i in range(number):
                picture(tmp_path / "own" / name / "ab"[i % 2] / f"{i}.png", 10 * number + i)
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert (len(data.train), len(data.test)) == ((8, 4) if kind == "images" else (16, 8))
    assert not data.held_out and set(data.columns) <= {"folder"}
    assert data.origin[0].startswith("train: ") and data.origin[1].startswith("test: ")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ("seg_train/a/1.png", "seg_test/a/1.png", "seg_pred/a/1.png"),
            "seg_.*' has the name of a split, but 'seg_pred' beside it has not",
        ),
        (("train/a/1.png", "holdout/a/1.png"), "'holdout/a/1.png' of .* is in none of the splits .train. that other"),
        (("train/test/a/1.png", "train/b/1.png"), "lies in folders of two splits .train, test.; rename one"),
        (("bus/1.png", "train/2.png"), "put a class with the name of a split into a split's folder"),
    ],
)
def test_folders_that_tell_a_split_by_half_are_refused(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for file in files:
        picture(tmp_path / "own" / file)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    files = [Path(f"{name}/{i}.png") for name in ("bus", "car", "train") for i in range(2)]
    assert {place.split for place in places(files, tmp_path, classes=True)} == {""}
    inside = [Path("train") / file for file in files]
    assert places(inside, tmp_path, classes=True)[-1] == Place("train", ("train",))


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (("train.parquet", "test.parquet"), ("train", "test")),
        (("adult_train.parquet", "adult_test.parquet"), ("train", "test")),
        (("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"), ("train", "train")),
        (("train-00000-of-00001-0a1b2c3d4e5f6071.parquet",), ("train",)),
        (("unsupervised-00000-of-00001.parquet", "test-00000-of-00001.parquet"), ("unsupervised", "test")),
        (("default/train/0000.parquet", "default/test/0000.parquet"), ("train", "test")),
        (("h0/train.parquet", "h0/test.parquet", "h1/train.parquet"), ("train", "test", "train")),
        (("part-00000.parquet", "part-00001.parquet"), ("", "")),
        (("site=berlin/part-0.parquet", "site=wien/part-0.parquet"), ("", "")),
    ],
)
def test_the_splits_of_tables(files: tuple[str, ...], splits: tuple[str, ...], tmp_path: Path) -> None:
    assert tuple(place.split for place in table_places(list(map(Path, files)), tmp_path)) == splits


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("train/test.parquet",), "tells the split 'train', but the file's name another"),
        (("train.parquet", "train-old.parquet"), "would both be the split 'train'; move one away"),
        (("berlin.parquet", "wien.parquet"), "would both be one split; move one away, or give each client's a folder"),
        (("berlin_train.parquet", "wien_train.parquet"), "'wien_train.parquet' .* would both be the split 'train'"),
        (("train.parquet", "more.parquet"), "the table 'more.parquet' of .* is in none of the splits .train."),
    ],
)
def test_tables_whose_split_is_not_told_are_refused(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        table_places(list(map(Path, files)), tmp_path)


@pytest.mark.parametrize("kind", ["table", "metadata"])
def test_a_column_of_splits_is_followed(kind: str, tmp_path: Path) -> None:
    words = ["train"] * 12 + ["test"] * 6 + ["val"] * 2
    if kind == "table":
        table(tmp_path / "own.parquet", 20, split=words)
    else:
        rows = [f"{i}.png,{i % 2},{word}" for i, word in enumerate(words)]
        for i in range(20):
            picture(tmp_path / "own" / f"{i}.png", i)
        (tmp_path / "own" / "metadata.csv").write_text("\n".join(["file_name,label,split", *rows]))
    data = load(str(tmp_path / ("own.parquet" if kind == "table" else "own")), cache_dir=tmp_path / "cache")
    assert (len(data.train), len(data.test)) == (12, 6)
    assert any("not used: the split 'val'" in remark for remark in data.remarks)


def test_a_split_that_is_not_used_is_named(tmp_path: Path) -> None:
    for split, rows in (("train", 20), ("validation", 6), ("test", 8)):
        table(tmp_path / "own" / f"{split}.parquet", rows)
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert (len(data.train), len(data.test)) == (20, 8)
    assert data.remarks == ("not used: the split 'validation' ('validation.parquet')",)


# Files that are not read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.raw", "IMG_1.CR2", "1.2.840.113", "scan", "x.npy", "x.dcm"])
def test_records_of_other_kinds_are_refused_where_a_class_would_lose_them(name: str, pets: Path) -> None:
    for i in range(3):
        (pets / "dog" / f"{i}{name}").write_bytes(b"records")
    with pytest.raises(ValueError, match="dog' has 3 files .* that cannot be read, and its records would be missing"):
        load(str(pets), cache_dir=pets.parent / "cache")


@pytest.mark.parametrize("name", ["bird/x.raw", "bird/.DS_Store", "bird/notes.txt", "bird/a.json", "test/x.raw"])
def test_a_class_or_split_without_a_readable_image_is_refused(name: str, pets: Path) -> None:
    (pets / name).parent.mkdir()
    (pets / name).write_bytes(b"records")
    with pytest.raises(ValueError, match=f"the folder '.*{name[:4]}.*' has (0 images|1 file)"):
        load(str(pets), cache_dir=pets.parent / "cache")


@pytest.mark.parametrize("name", ["dog.zip", "more.ZIP", "dog.tar", "cat/dog.tar.gz", "x.7z", "x.rar"])
def test_archives_are_refused(name: str, pets: Path) -> None:
    (pets / name).touch()
    with pytest.raises(ValueError, match="is an archive, but only folders are read; unpack it"):
        load(str(pets), cache_dir=pets.parent / "cache")


def test_what_is_no_record_is_counted_or_known(pets: Path) -> None:
    for name in ("cat/Thumbs.db", "desktop.ini", ".DS_Store", "README.md", "LICENSE", "cat/cat_boxes.txt"):
        (pets / name).touch()
    data = load(str(pets), cache_dir=pets.parent / "cache")
    assert data.remarks == ()
    for name in ("labels.csv", "cat/1.json", "cat/2.json"):
        (pets / name).touch()
    data = load(str(pets), cache_dir=pets.parent / "cache")
    assert data.remarks == ("not read: 3 files (.json 2, .csv 1)",)


def test_images_and_tables_are_not_mixed(pets: Path) -> None:
    table(pets / "predictions.parquet")
    with pytest.raises(ValueError, match=r"has 20 images and 1 tables .'predictions.parquet'., but records are of one"):
        load(str(pets), cache_dir=pets.parent / "cache")


@pytest.mark.parametrize("name", ["test.csv", "test.feather", "test.npz", "test.xlsx"])
def test_rows_beside_tables_are_not_left_out(name: str, tmp_path: Path) -> None:
    table(tmp_path / "own/train.parquet")
    (tmp_path / "own" / name).touch()
    with pytest.raises(ValueError, match=f"has 1 parquet files and 1 file .* which are not read, such as '{name}'"):
        load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["test.PARQUET", "test.pq", "Test.parq"])
def test_endings_are_read_in_any_letters(name: str, tmp_path: Path) -> None:
    table(tmp_path / "own/train.parquet", 20)
    table(tmp_path / "own" / name, 8)
    assert len(load(str(tmp_path / "own"), cache_dir=tmp_path / "cache").test) == 8
    assert len(load(str(tmp_path / "own" / name), cache_dir=tmp_path / "cache").test) == 2


@pytest.mark.parametrize(
    "hidden", [".ipynb_checkpoints/train-checkpoint", ".Trash-1000/files/train-0", "__MACOSX/train"]
)
def test_hidden_tables_are_not_read(hidden: str, tmp_path: Path) -> None:
    table(tmp_path / "own/train.parquet", 20)
    table(tmp_path / "own" / f"{hidden}.parquet", 20, 1)
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert len(data.train) + len(data.test) == 20


@pytest.mark.parametrize("name", ["a.tar", "a.feather", "a.h5"])
def test_a_file_of_another_kind_is_refused_with_its_remedy(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        ValueError, match="is no .parquet, .csv or .npz file, and others are not read; write a table as"
    ):
        load(str(tmp_path / name), cache_dir=tmp_path / "cache")


def test_a_loop_of_links_is_named(pets: Path) -> None:
    (pets / "cat" / "again").symlink_to(pets)
    with pytest.raises(ValueError, match="leads to a folder above itself; delete it"):
        walk.walk(pets)


# Tables of several files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"age": pa.array([1] * 10)}, {"age": pa.array([1.5] * 10)}),
        ({"age": pa.array([1] * 10, pa.int32())}, {"age": pa.array([2] * 10, pa.int64())}),
        ({"age": pa.array([1.0] * 10, pa.float32())}, {"age": pa.array([2.0] * 10)}),
        ({"site": pa.array(["x"] * 10)}, {"site": pa.array(["y"] * 10, pa.large_string())}),
        ({"site": pa.array(["x"] * 10).dictionary_encode()}, {"site": pa.array(["y"] * 10)}),
    ],
)
def test_hospitals_types_are_unified(first: dict[str, object], second: dict[str, object], tmp_path: Path) -> None:
    table(tmp_path / "own/h0/train.parquet", 10, **first)
    table(tmp_path / "own/h1/train.parquet", 10, 1, **second)
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert len(data.train) + len(data.test) == 20 and set(data.columns["folder"]) == {"h0", "h1"}


def test_columns_are_read_by_name_in_every_file_and_split(tmp_path: Path) -> None:
    for place, reverse in (("h0/train", False), ("h1/train", True), ("h0/test", True)):
        table(tmp_path / "own" / f"{place}.parquet", 10)
        if reverse:
            rows = pq.read_table(tmp_path / "own" / f"{place}.parquet")
            pq.write_table(rows.select(rows.column_names[::-1]), tmp_path / "own" / f"{place}.parquet")
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert data.features == ("a", "b")
    assert (data.train.images[:10] == data.train.images[10:]).all() and (
        data.train.images[:10] == data.test.images
    ).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"age": [1] * 10}, "'h1/train.parquet' of .* has the column 'age', but 'h0/train.parquet' has not"),
        (
            {"label": ["x"] * 10},
            "column 'label' of 'h1/train.parquet' .* has type string, but int64 in 'h0/train.parquet'",
        ),
    ],
)
def test_the_file_and_column_that_differ_are_named(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    table(tmp_path / "own/h0/train.parquet", 10)
    table(tmp_path / "own/h1/train.parquet", 10, **columns)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")


def test_two_columns_of_one_name_are_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table([[1.0] * 4, [2.0] * 4, [0, 1, 0, 1]], names=["age", "age", "label"]), tmp_path / "own.parquet"
    )
    with pytest.raises(ValueError, match="has two columns 'age'; rename or drop one"):
        load(str(tmp_path / "own.parquet"), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("reading", [Reading(label="died"), Reading(label="a")])
def test_the_column_of_classes_may_be_named(reading: Reading, tmp_path: Path) -> None:
    died = [i % 3 == 0 for i in range(30)]
    pq.write_table(
        pa.table({"age": np.arange(30.0) ** 2, "died": died, "a": [i % 5 for i in range(30)]}), tmp_path / "t.parquet"
    )
    data = load(str(tmp_path / "t.parquet"), reading, cache_dir=tmp_path / "cache")
    assert data.class_names == (("False", "True") if reading.label == "died" else tuple("01234"))
    with pytest.raises(ValueError, match="none of which is the label column .label or .*; name the one .* --label"):
        load(str(tmp_path / "t.parquet"), cache_dir=tmp_path / "cache")


def test_a_stated_column_is_not_replaced_by_folders(pets: Path) -> None:
    with pytest.raises(ValueError, match="--label-column is 'species', but the metadata in .* have the columns none"):
        load(str(pets), Reading(label="species"), cache_dir=pets.parent / "cache")
