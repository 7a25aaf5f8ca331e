"""Hundreds of inputs, generated over kinds and readers: each is read as it is meant, or refused with a remedy.

The same 24 records, whose class and split are known by their content, are laid out in every way that people have. A
layout that is read must give each record its class and its split; any other must be refused in one sentence. The
library, the command line and a site must agree.
"""

import io
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedstill import load_data
from fedstill.cli import main
from fedstill.data import sources
from fedstill.data.places import AS_IT_IS

CLASSES = ("Gut", "Bösartig")
TRAIN, TEST = range(16), range(16, 24)


def pixels(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (6, 6, 3), dtype=np.uint8)


def vector(i: int) -> list[float]:
    return np.random.default_rng(i).normal(size=3).astype(np.float32).tolist()


def label(i: int) -> str:
    return CLASSES[i % 2]


Change = Callable[[pa.Table], pa.Table]


class Case(NamedTuple):
    """An input: its name, what makes it, and the words of its refusal, if it is refused."""

    name: str
    make: Callable[[Path], Path]
    refused: str = ""


def save(place: Path, i: int, **options: Any) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(i)).save(place, **options)


def rows(which: range, **more: Any) -> pa.Table:
    x = np.array([vector(i) for i in which])
    columns: dict[str, Any] = {name: x[:, k] for k, name in enumerate("abc")}
    return pa.table({**columns, "label": [label(i) for i in which], **more})


def write(place: Path, table: pa.Table) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, place)


# Layouts -------------------------------------------------------------------------------------------------------------

WORDS = [
    ("train", "test"), ("Train", "Test"), ("TRAIN", "TEST"), ("training", "testing"), ("Training", "Testing"),
    ("train", "val"), ("train", "valid"), ("train", "validation"), ("train", "dev"), ("train", "eval"),
    ("training_set", "test_set"), ("x_train", "x_test"), ("seg_train", "seg_test"), ("train2017", "val2017"),
    ("train-set", "test-set"), ("my train", "my test"), ("Train", "test"), ("training", "evaluation"),
]  # fmt: skip
IMAGES = {
    "split/class": "{split}/{cls}/{i}.png",
    "hospital/split/class": "h{h}/{split}/{cls}/{i}.png",
    "split/hospital/class": "{split}/h{h}/{cls}/{i}.png",
    "data/split/class": "data/{split}/{cls}/{i}.png",
    "split/split/class": "{split}/{split}/{cls}/{i}.png",
    "decomposed": "{split}/{nfd}/{i} ü.png",
    "half decomposed": "{split}/{some}/{i}.png",
}
ENDINGS = ["png", "bmp", "tif", "webp", "gif", "PNG", "ppm", "tga"]
TABLES = {
    "name": "{split}.parquet",
    "hub": "{split}-00000-of-00001.parquet",
    "prefix": "adult_{split}.parquet",
    "folder": "{split}/part-00000-1f2e.c000.snappy.parquet",
    "hub converted": "default/{split}/0000.parquet",
    "two parts": "{split}/part-0000{part}.parquet",
    "hospitals": "h{part}/{split}.parquet",
    "hive": "{split}/site=h{part}/part-0.parquet",
    "capital ending": "{split}.PARQUET",
    "short ending": "{split}.pq",
}


def images(layout: str, words: tuple[str, str], ending: str = "png") -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        for i in (*TRAIN, *TEST):
            cls = label(i)
            place = layout.format(
                split=words[i in TEST],
                cls=cls,
                nfd=unicodedata.normalize("NFD", cls),
                some=unicodedata.normalize("NFD" if i % 3 else "NFC", cls),
                i=i,
                h=i % 3,
            )
            save(
                (root / "own" / place).with_suffix(f".{ending}"), i, **({"lossless": True} if ending == "webp" else {})
            )
        return root / "own"

    return make


def tables(layout: str, words: tuple[str, str], change: Change = lambda t: t) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        for split, which in zip(words, (TRAIN, TEST), strict=True):
            half = len(which) // 2
            parts = [which[:half], which[half:]] if "{part}" in layout else [which]
            for part, some in enumerate(parts):
                table = rows(some)
                write(
                    root / "own" / layout.format(split=split, part=part),
                    change(table) if part or len(parts) == 1 else table,
                )
        return root / "own"

    return make


def reading() -> Iterator[Case]:
    """Inputs that are read as they are meant."""
    for (name, layout), words in itertools.product(IMAGES.items(), WORDS):
        yield Case(f"images, {name}, {words[0]}/{words[1]}", images(layout, words))
    for ending in ENDINGS:
        if ending != "gif":  # of 256 colours
            yield Case(f"images, .{ending}", images(IMAGES["split/class"], WORDS[0], ending))
    for (name, layout), words in itertools.product(TABLES.items(), WORDS):
        yield Case(f"tables, {name}, {words[0]}/{words[1]}", tables(layout, words))
    for name, change in CHANGES.items():
        for layout in ("two parts", "hospitals"):
            yield Case(f"tables, {layout}, {name}", tables(TABLES[layout], WORDS[0], change))
    for column, (first, second) in itertools.product(("split", "Set", "subset"), WORDS[:10]):
        words = [first] * len(TRAIN) + [second] * len(TEST)
        yield Case(f"one table, column {column}, {second}", partial_table(column, words))
    for name in ("x_train y_train x_test y_test", "train_images train_labels test_images test_labels"):
        yield Case(f"npz, {name.split()[0]}", arrays(name.split()))


def cast(kind: pa.DataType) -> Change:
    return lambda t: t.set_column(t.column_names.index("label"), "label", t["label"].cast(kind))


CHANGES: dict[str, Change] = {
    "reversed columns": lambda t: t.select(t.column_names[::-1]),
    "large strings": cast(pa.large_string()),
    "string views": cast(pa.string_view()),
    "categories": lambda t: t.set_column(3, "label", t["label"].dictionary_encode()),
    "decomposed names": lambda t: t.set_column(
        3, "label", pa.array([unicodedata.normalize("NFD", name) for name in t["label"].to_pylist()])
    ),
    "an index of pandas": lambda t: t.append_column("__index_level_0__", pa.array(range(t.num_rows))),
    "floats of 32 bits": lambda t: t.set_column(0, "a", t["a"].cast(pa.float32())),
}


def partial_table(column: str, words: list[str]) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        write(root / "own.parquet", rows(range(24), **{column: words}))
        return root / "own.parquet"

    return make


def arrays(names: list[str]) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        parts: list[Any] = []
        for which in (TRAIN, TEST):
            parts += [np.stack([pixels(i) for i in which]), np.array([label(i) for i in which])]
        np.savez(root / "own.npz", **dict(zip(names, parts, strict=True)))
        return root / "own.npz"

    return make


# Inputs that would lose or change something --------------------------------------------------------------------------


def beside(name: str, content: bytes = b"x", copies: int = 3) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        place = images(IMAGES["split/class"], WORDS[0])(root)
        for i in range(copies):
            (place / name.format(i=i)).parent.mkdir(parents=True, exist_ok=True)
            (place / name.format(i=i)).write_bytes(content)
        return place

    return make


def changed(change: Change) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        table = rows(range(24))
        write(root / "own.parquet", change(table))
        return root / "own.parquet"

    return make


def files(*names: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        for k, name in enumerate(names):
            if name.endswith((".parquet", ".pq")):
                write(root / "own" / name, rows(range(4 * k, 4 * k + 4)))
            elif name.endswith(".png"):
                save(root / "own" / name, k)
            else:
                (root / "own" / name).parent.mkdir(parents=True, exist_ok=True)
                (root / "own" / name).write_bytes(b"x")
        return root / "own"

    return make


def refusing() -> Iterator[Case]:
    """Inputs that are refused in one sentence."""
    for ending, place in itertools.product(
        (".dcm", ".npy", ".cr2", ".nii", "", ".raw", ".mat"), ("train/Gut", "test/Gut", "train/neu", "test/neu")
    ):
        yield Case(
            f"{place}/{{i}}{ending}", beside(f"{place}/{{i}}{ending}"), refused="cannot be read, and its records"
        )
    for name in ("a.zip", "a.ZIP", "train.tar", "train/Gut.tar.gz", "x.7z", "train/Gut/x.rar", "a.tgz"):
        yield Case(name, beside(name), refused="is an archive, but only folders are read; unpack")
    for name in ("train/leer/.DS_Store", "train/leer/notes.txt", "val/.keep", "train/leer/Thumbs.db"):
        yield Case(name, beside(name), refused="has 0 images, but each class, split and hospital needs at least 1")
    for name in ("predictions.parquet", "train/labels.pq"):
        yield Case(name, beside(name, copies=1), refused="but records are of one kind; move the one or the other away")
    for name in ("stray.png", "neu/stray.png"):
        yield Case(name, beside(name, _png(), 1), refused="is in none of the splits")
    for other in ("test.csv", "test.tsv", "test.feather", "test.npz", "test.xlsx", "test.jsonl", "test.arrow"):
        yield Case(f"table beside {other}", files("train.parquet", other), refused="which are not read, such as")
    for names in (
        ("a.parquet", "b.parquet"),
        ("train.parquet", "train_old.parquet"),
        ("h1_train.parquet", "h2_train.parquet"),
    ):
        yield Case(" and ".join(names), files(*names), refused="would both be")
    for names in (("train.parquet", "more.parquet"), ("train/0.parquet", "x/0.parquet")):
        yield Case(" and ".join(names), files(*names), refused="is in none of the splits|beside it has not")
    yield Case(
        "train/test.parquet", files("train/test.parquet"), refused="tells the split 'train', but the file's name"
    )
    numbers = {"id": range(24), "index": [*range(1, 25)][::-1]}
    for name, values in numbers.items():
        yield Case(name, changed(add(name, list(values))), refused="numbers the records from .*; drop it")
    for name in ("target", "labels", "Label", "fine_label"):
        yield Case(
            f"second {name}", changed(add(name, [i % 2 for i in range(24)])), refused="each of which may be the class"
        )
    for words in (["1,5", "2,25"], ["1.5", "2.25"], ["1.234,5", "7"], ["1e-3", "2.5"], ["-0,5", "+1,0"]):
        yield Case(
            f"numbers as texts {words}", changed(add("age", words * 12)), refused="has numbers as texts, such as"
        )
    for value in (2**53 + 1, 2**60 + 1, -(2**55) - 3):
        yield Case(
            f"integers of {value}",
            changed(add("case", [value + i for i in range(24)])),
            refused="cannot hold; subtract",
        )
    for gap in (None, float("nan"), float("inf"), 1e39):
        yield Case(
            f"a gap {gap}",
            changed(add("age", [gap] + [1.0 + i for i in range(23)])),
            refused="gaps|finite|in column 'age'",
        )
    for odd in (pa.array([b"x"] * 24), pa.array([{"x": 1}] * 24), pa.array([0] * 24, pa.timestamp("s"))):
        yield Case(f"a column of {odd.type}", changed(add("odd", odd)), refused="which no vector has|finite|texts")


def add(name: str, values: Any) -> Change:
    return lambda t: t.append_column(name, values if isinstance(values, pa.Array) else pa.array(values))


def _png() -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels(99)).save(content, "PNG")
    return content.getvalue()


READ, REFUSED = list(reading()), list(refusing())


def keys(images: Any) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


@pytest.fixture(scope="module")
def known() -> dict[bytes, int]:
    found = {pixels(i).transpose(2, 0, 1).tobytes(): i for i in range(24)}
    return found | {np.array(vector(i), np.float32).tobytes(): i for i in range(24)}


def test_there_are_three_hundred() -> None:
    assert len(READ) + len(REFUSED) >= 300
    assert len({case.name for case in (*READ, *REFUSED)}) == len(READ) + len(REFUSED)


@pytest.mark.parametrize("case", READ, ids=lambda case: case.name)
def test_an_input_is_read_as_it_is_meant(
    case: Case,
    known: dict[bytes, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    place = case.make(tmp_path)
    data = load_data(place)
    for records, which in ((data.train, TRAIN), (data.test, TEST)):
        order = [known[key] for key in keys(records.images)]
        assert sorted(order) == list(which)
        assert [data.class_names[int(k)] for k in records.labels] == [label(i) for i in order]
    part = sources.load_part(str(place), AS_IT_IS, cache_dir=tmp_path / "site")
    assert keys(part.train[0]) == keys(data.train.images) and part.class_names == data.class_names
    main(["data", "show", str(place), "--clients", "2", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["records"] == 16 and shown["test_records"] == 8 and shown["class_names"] == list(data.class_names)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_an_input_that_would_lose_something_is_refused(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    place = case.make(tmp_path)
    with pytest.raises(ValueError, match=case.refused) as refusal:
        load_data(place)
    sentence = str(refusal.value)
    assert "\n" not in sentence and ("; " in sentence or ", but " in sentence)
    with pytest.raises(ValueError, match=case.refused):
        sources.load_part(str(place), AS_IT_IS, cache_dir=tmp_path / "site")
    with pytest.raises(SystemExit) as end:
        main(["data", "show", str(place), "--clients", "2"])
    assert end.value.code == 2 and re.search(case.refused, capsys.readouterr().err.replace("\n", " "))
