"""Folders of images in every layout that Hugging Face documents, and one folder for each client."""

import csv
import json
import logging
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedstill.data import image_folder, load, sources, walk
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import share_out


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def place(root: Path, *names: str) -> None:
    """Different images, each at its place; the image number ``i`` is ``pixels(i)``."""
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(i)).save(root / name)


def note(file: Path, rows: list[dict[str, object]]) -> None:
    """Write metadata in the format of the file's ending."""
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        with file.open("w", newline="") as text:
            writer = csv.DictWriter(text, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def order(data: sources.DataSet) -> list[int]:
    """The numbers of the train images."""
    numbers = {pixels(i).transpose(2, 0, 1).tobytes(): i for i in range(50)}
    return [numbers[image.numpy().tobytes()] for image in data.train.images]


SPLIT = ("train/cat/a.png", "train/cat/b.png", "train/dog/a.png", "train/dog/b.png", "test/cat/a.png", "test/dog/a.png")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on this machine concerns nobody else."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"something asks the network: {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


# What `datasets` reads too -------------------------------------------------------------------------------------------

LAYOUTS = {
    "splits": SPLIT,
    "one split": ("cat/1.png", "cat/10.png", "cat/2.png", "dog/1.png", "dog/3.png", "dog/2.png"),
    "names that sort otherwise as parts": ("a/1.png", "a/2.png", "a-b/1.png", "a-b/2.png", "a b/1.png", "a b/3.png"),
    "validation": ("train/cat/a.png", "train/dog/b.png", "validation/cat/c.png", "validation/dog/d.png"),
    "splits in a folder": tuple(f"data/{name}" for name in SPLIT),
    "splits below the folders of clients": tuple(f"{h}/{name}" for h in ("h0", "h1") for name in SPLIT),
    "hidden files": (*SPLIT, "train/.cache/cat/a.png", "__MACOSX/train/cat/a.png"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_records_in_the_same_order_as_datasets(
    layout: str, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)  # it asks a server about every folder
    place(data_root / "pets", *LAYOUTS[layout])
    theirs = datasets.load_dataset("imagefolder", data_dir=str(data_root / "pets"), cache_dir=str(tmp_path / "theirs"))
    ours = image_folder.read(walk.walk(data_root / "pets"), ("label",))
    assert ours.keys() == theirs.keys()
    for split, table in ours.items():
        rows = theirs[split].cast_column("image", datasets.Image(decode=False))
        names = rows.features["label"].names
        assert [str(data_root / "pets" / cell["path"]) for cell in table["image"].to_pylist()] == [
            cell["path"] for cell in rows["image"]
        ]
        assert table["label"].to_pylist() == [names[label] for label in rows["label"]]


@pytest.mark.parametrize("name", walk.METADATA)
@pytest.mark.parametrize("where", ["in each split", "in each split with class folders", "at the root"])
@pytest.mark.parametrize("kind", [str, int])
def test_metadata_with_labels(name: str, where: str, kind: type, data_root: Path) -> None:
    root, names = data_root / "pets", ("cat", "dog")
    files = (
        SPLIT if where != "in each split" else tuple(f.replace("/cat/", "/c-").replace("/dog/", "/d-") for f in SPLIT)
    )
    place(root, *files)
    rows = []
    for i, file in enumerate(files):
        number = int("dog" in SPLIT[i])
        label = number if kind is int else names[number]
        rows.append({"file_name": file, "label": label, "family": "AB"[i % 2], "age": i, "gap": None if i else "x"})
    rows[0], rows[1] = rows[1], rows[0]  # as in `datasets`, the order is that of the metadata
    if where == "at the root":
        note(root / name, rows)
    else:
        for split in ("train", "test"):
            own = [row for row in rows if str(row["file_name"]).startswith(split)]
            note(root / split / name, [{**row, "file_name": str(row["file_name"])[len(split) + 1 :]} for row in own])
    data = load("pets")
    assert order(data) == [1, 0, 2, 3] and data.train.labels.tolist() == [0, 0, 1, 1]
    assert data.test.labels.tolist() == [0, 1]
    known = kind is str or where != "in each split"  # numbers in class folders have the folders' names
    assert data.class_names == (names if known else ("0", "1"))
    assert data.columns["family"].tolist() == ["B", "A", "A", "B"] and data.columns["age"].tolist() == [1, 0, 2, 3]


def test_metadata_without_labels_keep_the_class_folders(data_root: Path) -> None:
    root = data_root / "pets"
    place(root, *SPLIT)
    rows = [{"file_name": file, "family": "AB"[i % 2], "since": "2020-01-02"} for i, file in enumerate(SPLIT)]
    note(root / "metadata.csv", rows)
    data = load("pets")
    assert data.class_names == ("cat", "dog") and data.train.labels.tolist() == [0, 0, 1, 1]
    assert data.columns["family"].tolist() == list("ABAB") and data.columns["since"][0] == "2020-01-02"
    parts = share_out(Experiment(data="pets", partition="by:family", clients=2), None).parts
    assert [own.tolist() for own, _ in parts] == [[0, 2], [1, 3]]


def test_metadata_of_the_train_split_alone(data_root: Path) -> None:
    """As in a data set whose test images have their class from the folder only: refused, since columns would differ."""
    place(data_root / "pets", *SPLIT)
    note(data_root / "pets/train/metadata.csv", [{"file_name": f[6:], "family": "A"} for f in SPLIT[:4]])
    with pytest.raises(ValueError, match=r"image 'test/cat/a.png' of .* has no row in the metadata; if one image has"):
        load("pets")


def test_names_are_numbered_over_both_splits(data_root: Path) -> None:
    place(data_root / "pets", "train/cat/a.png", "train/eel/a.png", "train/dog/a.png", "test/eel/a.png")
    data = load("pets")
    assert data.class_names == ("cat", "dog", "eel")
    assert data.train.labels.tolist() == [0, 1, 2] and data.test.labels.tolist() == [2]
    place(data_root / "more", "train/cat/a.png", "train/dog/a.png", "test/eel/a.png")
    with pytest.raises(ValueError, match=r"class 2 \(eel\) of 'more' has 0 train records"):
        load("more")


# A folder for each client --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["{h}/train/{c}/{i}.png", "train/{h}/{c}/{i}.png"])
def test_the_folder_of_each_hospital_is_a_column(
    layout: str, data_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [layout.format(h=f"hospital{i % 3}", c="ab"[i % 2], i=i) for i in range(12)]
    place(data_root / "scans", *files)
    task = share_out(Experiment(data="scans", partition="by:folder", clients=3), None)
    assert not caplog.text
    data = load("scans")
    place_of = dict(enumerate(files))
    for client, (own, _) in enumerate(task.parts):
        assert own.size and {place_of[order(data)[i]].count(f"hospital{client}/") for i in own} == {1}
    assert task.values == {"folder": [["hospital0"], ["hospital1"], ["hospital2"]]}
    with caplog.at_level(logging.WARNING):
        share_out(Experiment(data="scans", partition="iid", clients=3), None)
    assert (
        "scans has its records in 3 folders (hospital0, hospital1, hospital2), which --partition iid mixes; "
        "--partition by:folder --clients 3 makes each folder a client"
    ) in caplog.text


def test_hospitals_with_metadata_of_their_own(data_root: Path) -> None:
    root = data_root / "scans"
    for h in ("h0", "h1"):
        place(root / h, "1.png", "2.png", "3.png", "4.png")
        note(root / h / "metadata.csv", [{"file_name": f"{i}.png", "label": "ab"[i % 2]} for i in (1, 2, 3, 4)])
    data = load("scans")
    assert data.class_names == ("a", "b") and set(data.columns["folder"]) == {"h0", "h1"}


def test_one_folder_above_the_classes_is_no_column(data_root: Path) -> None:
    place(data_root / "pets", *(f"images/{name}" for name in SPLIT))
    assert not load("pets").columns


def test_a_folder_of_parquet_files_for_each_hospital(data_root: Path) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    place(data_root / "png", *(f"{i}.png" for i in range(6)))
    for h in range(2):
        cells = [{"bytes": (data_root / "png" / f"{3 * h + i}.png").read_bytes(), "path": None} for i in range(3)]
        (data_root / f"scans/h{h}").mkdir(parents=True)
        table = pa.table({"image": pa.array(cells, kind), "label": [0, 1, 0]})
        for split in ("train", "test"):
            pq.write_table(table, data_root / f"scans/h{h}/{split}.parquet")
    data = load("scans")
    assert order(data) == list(range(6)) and data.columns["folder"].tolist() == ["h0"] * 3 + ["h1"] * 3


# What `save_to_disk` writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["numbers", "names"])
@pytest.mark.parametrize("splits", [True, False])
def test_saved_data_sets(splits: bool, labels: str, data_root: Path) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["dog", "cat"]) if labels == "numbers" else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": label, "site": datasets.Value("string")})
    values = [0, 1] * 10 if labels == "numbers" else ["dog", "cat"] * 10
    rows = {"image": [Image.fromarray(pixels(i)) for i in range(20)], "label": values, "site": list("abcd") * 5}
    data = datasets.Dataset.from_dict(rows, features=features)
    saved = datasets.DatasetDict(train=data, test=data.select(range(4))) if splits else data
    saved.save_to_disk(str(data_root / "saved"))
    found = load("saved")
    assert found.class_names == (("dog", "cat") if labels == "numbers" else ("cat", "dog"))
    assert (len(found.train), len(found.test)) == ((20, 4) if splits else (16, 4))
    first = order(found)[0]
    assert found.class_names[found.train.labels[0]] == ("dog", "cat")[first % 2]
    assert found.columns["site"][0] == "abcd"[first % 4]


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "rows", "message"),
    [
        ((), None, "has 0 images and 0 parquet or CSV files; lay images out as train/<class>/<image>"),
        ((*SPLIT, "cat.png"), None, r"the image 'cat.png' of .* is in none of the splits \(test, train\)"),
        (("train/1.png", "test/2.png"), None, r"image 'test/2.png' of .* has no class; move it to a folder with"),
        (("a/1.png", "b/c/1.png"), None, "lie 1 and 2 folders deep, but each image's last folder is its class"),
        (("a/1.png",), [{"name": "a/1.png"}], "has the columns name, but none is 'file_name'"),
        (("a/1.png",), [{"file_name": "a/2.png"}], "list 'a/2.png', which is no image there"),
        (("a/1.png",), [{"file_name": "../../a/1.png"}], "list '../../a/1.png', which is no image there"),
        (("a/1.png",), [{"file_name": "a/1.png"}] * 2, "list 'a/1.png' twice"),
        (("a/1.png", "a/2.png"), [{"file_name": "a/1.png"}], "image 'a/2.png' of .* has no row in the metadata"),
        (("a/1.png",), [{"file_name": "a/1.png", "label": None}], "column 'label' of .* has 1 gaps"),
        (("a/1.png",), [{"file_name": "a/1.png", "label": 0.5}], "column 'label' of .* has type double"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    names: tuple[str, ...], rows: list[dict[str, object]] | None, message: str, data_root: Path
) -> None:
    (data_root / "own").mkdir()
    place(data_root / "own", *names)
    if rows:
        note(data_root / "own/metadata.jsonl", rows)
    with pytest.raises(ValueError, match=message) as refusal:
        load("own")
    assert "\n" not in str(refusal.value)


def test_a_linked_folder_is_read_like_a_linked_file(data_root: Path) -> None:
    place(data_root, "own/train/cat/1.png", "own/test/cat/1.png", "elsewhere/1.png", "own/test/dog/1.png")
    (data_root / "own" / "train" / "dog").symlink_to(data_root / "elsewhere")
    assert load("own").class_names == ("cat", "dog")
    place(data_root, "elsewhere/0.png", "elsewhere/2.png")  # the link's target belongs to the source's state
    assert load("own").train.labels.tolist() == [0, 1, 1, 1]
    (data_root / "own" / "train" / "cat" / "all").symlink_to(data_root / "own")
    with pytest.raises(ValueError, match=r"the link '.*all' leads to a folder above itself; delete it"):
        load("own")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.csv", b"file_name,a\nx.png\n", "metadata .* cannot be read"),
        ("metadata.jsonl", b"{", "metadata .* cannot be read"),
        ("metadata.jsonl", b"[1]\n", "metadata .* cannot be read .a line is not an object."),
        ("metadata.parquet", b"PAR1", "metadata .* cannot be read"),
        ("metadata.jsonl", b'{"file_name": "a/0.png", "x": 1}\n{"file_name": "a/1.png", "x": "b"}', "mixes kinds of"),
        ("train.zip", b"", "is an archive, but only folders are read"),
    ],
)
def test_damaged_metadata_is_one_sentence(name: str, content: bytes, message: str, data_root: Path) -> None:
    place(data_root / "own", "a/0.png", "a/1.png")
    (data_root / "own" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        load("own")
    assert "\n" not in str(refusal.value)


def test_a_missing_column_is_named_with_those_there_are(data_root: Path) -> None:
    files = [f"h{i % 2}/{'ab'[i // 2 % 2]}/{i}.png" for i in range(20)]
    place(data_root / "own", *files)
    note(data_root / "own/metadata.csv", [{"file_name": f, "site": "x"} for f in files])
    with pytest.raises(
        ValueError,
        match="no column 'writer_id' to partition by, of integers or texts without gaps; use by:site or by:folder",
    ):
        share_out(Experiment(data="own", partition="by:writer_id", clients=2), None)
    with pytest.raises(
        ValueError,
        match="no column 'writer_id' to partition by, of integers or texts without gaps; it has no columns but images",
    ):
        share_out(Experiment(data="digits", partition="by:writer_id", clients=2), None)


# A site's own records ------------------------------------------------------------------------------------------------


def test_a_site_decodes_its_images_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path / "scans", "train/b/1.png", "train/b/2.png")
    calls = []
    original = sources.entry_of
    monkeypatch.setattr(sources, "entry_of", lambda source: (calls.append(1), original(source))[1])
    for _ in range(2):
        part = sources.load_part(str(tmp_path / "scans"), cache_dir=tmp_path / "state")
        assert part.class_names == ("b",) and len(part.train[1]) == 2 and len(part.test[1]) == 0
    assert calls == [1]
    place(tmp_path / "scans", "train/b/1.png", "train/b/2.png", "train/a/3.png")
    assert sources.load_part(str(tmp_path / "scans"), cache_dir=tmp_path / "state").class_names == ("a", "b")
    assert calls == [1, 1]


def test_a_table_of_another_encoding_is_refused(tmp_path: Path) -> None:
    """One letter in Latin-1 made every name of its column a text like b'...'."""
    place(tmp_path / "data", "train/a.png", "train/b.png")
    rows = "file_name,label\na.png,gutartig\nb.png,b\u00f6sartig\n"
    (tmp_path / "data" / "train" / "metadata.csv").write_bytes(rows.encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8 .*; save it again as 'CSV UTF-8'"):
        load(str(tmp_path / "data"))
    (tmp_path / "data" / "train" / "metadata.csv").write_bytes(rows.encode())
    assert load(str(tmp_path / "data")).class_names == ("b\u00f6sartig", "gutartig")


def test_metadata_nested_without_end_are_refused(tmp_path: Path) -> None:
    place(tmp_path / "data", "train/a.png")
    (tmp_path / "data" / "train" / "metadata.jsonl").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read"):
        load(str(tmp_path / "data"))
