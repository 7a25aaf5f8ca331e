"""Loading data: every kind of source, the cache, and refusals that say what to do."""

import hashlib
import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedstill.data import KNOWN, cache, load, places, sources
from fedstill.data.readers import read_npz


def pictures(n=12, height=6, width=5, channels=3, seed=0):
    shape = (n, height, width, channels) if channels > 1 else (n, height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(pixels, mode=None, kind="PNG"):
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file, kind)
    return file.getvalue()


def parquet(folder: Path, split: str, images, labels, names=None, image="image", label="label", **columns):
    """Write one split in the hub's layout; ``images`` are arrays or encoded bytes."""
    cells = [{"bytes": cell if isinstance(cell, bytes | None) else encoded(cell), "path": None} for cell in images]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({image: pa.array(cells, kind), label: labels, **columns})
    if names:
        features = {label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    folder.mkdir(exist_ok=True, parents=True)
    pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def image_folder(root: Path, splits=("train", "test"), classes=("cat", "dog"), n=4):
    for split in splits:
        for seed, label in enumerate(classes):
            (root / split / label).mkdir(parents=True)
            for i, picture in enumerate(pictures(n, seed=seed)):
                Image.fromarray(picture).save(root / split / label / f"{i}.png")


def as_pixels(records):
    return records.images.permute(0, 2, 3, 1).squeeze(-1).numpy()


# Each kind of source -------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_with_a_fixed_stratified_test_set(data_root):
    from sklearn.datasets import load_digits

    data, again = load("digits"), load("digits", cache_dir=data_root)  # made twice
    assert data.train.images.shape == (1438, 1, 8, 8) and data.test.images.shape == (359, 1, 8, 8)
    assert torch.equal(data.test.images, again.test.images) and data.fingerprint == again.fingerprint
    assert data.class_names == tuple("0123456789") and data.train.num_classes == 10
    theirs = load_digits()
    ours = torch.cat([data.train.images, data.test.images]).reshape(-1, 64).double() * 16 / 255
    # 0..16 on 0..255 is exact to half a step: 16 / 255 / 2.
    assert np.abs(np.sort(ours.numpy(), 0) - np.sort(theirs.data, 0)).max() <= 16 / 255 / 2
    shares = data.test.class_counts() / torch.tensor(np.bincount(theirs.target))
    assert (shares - 0.2).abs().max() < 1 / 174  # of each class to within one record; the smallest has 174
    inputs = data.train.inputs()
    assert inputs.mean().abs() < 1e-5 and (inputs.std() - 1).abs() < 1e-4


def test_a_parquet_folder_keeps_pixels_labels_names_and_columns(data_root):
    images, labels = pictures(), np.arange(12) % 3
    columns = {"site": list("abcabcabcabc"), "writer": list(range(12)), "weight": [0.5] * 12, "gap": [None, *range(11)]}
    parquet(data_root / "own", "train", images, labels, names=["x", "y", "z"], **columns)
    parquet(data_root / "own", "test", images[:4], labels[:4], names=["x", "y", "z"])
    data = load("own")
    np.testing.assert_array_equal(as_pixels(data.train), images)
    np.testing.assert_array_equal(as_pixels(data.test), images[:4])
    np.testing.assert_array_equal(data.train.labels, labels)
    assert data.class_names == ("x", "y", "z") and data.train.shape == (3, 6, 5)
    assert {name: column.tolist() for name, column in data.columns.items()} == {
        "site": columns["site"],
        "writer": columns["writer"],
    }
    # the same by its path: same content, same fingerprint
    assert load(str(data_root / "own")).fingerprint == data.fingerprint


def test_unknown_normalisation_comes_from_the_train_pixels(data_root):
    images = pictures(2500)  # more than one chunk of the histogram
    images[..., 2] = 51
    np.savez(data_root / "own.npz", x_train=images, y_train=np.arange(2500) % 2)
    norm = load(str(data_root / "own.npz")).train.normalisation
    train = as_pixels(load("own.npz").train) / 255.0
    np.testing.assert_allclose(norm.mean, train.mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(norm.std[:2], train.std((0, 1, 2))[:2], rtol=1e-9)
    assert norm.std[2] == 1.0  # constant: nothing to divide by


@pytest.mark.parametrize("channels", [1, 3])
def test_npz_files_are_read_as_keras_writes_them(data_root, channels):
    images, labels = pictures(channels=channels), (np.arange(12) % 3)
    shape = {1: (12,), 3: (12, 1)}[channels]  # Keras gives CIFAR's labels as a column
    path = data_root / "own.npz"
    hospital = np.array(list("aabbccaabbcc"))
    np.savez(path, x_train=images, y_train=labels.reshape(shape), x_test=images, y_test=labels, hospital=hospital)
    data = load("own.npz")
    np.testing.assert_array_equal(as_pixels(data.train), images)
    assert data.train.labels.tolist() == labels.tolist() and data.name == "own"
    assert data.train.images.is_contiguous() and data.columns["hospital"].tolist() == hospital.tolist()


def test_labels_in_an_npz_file_may_be_names(data_root):
    """They are numbered in the order of the names of both splits."""
    train, test = np.array(list("bcabcabcabca")), np.array(list("bbbbbbbbcccc"))
    np.savez(data_root / "own.npz", x_train=pictures(), y_train=train, x_test=pictures(), y_test=test[:, None])
    data = load("own.npz")
    assert data.class_names == ("a", "b", "c")
    assert [data.class_names[i] for i in data.train.labels] == train.tolist()
    assert [data.class_names[i] for i in data.test.labels] == test.tolist()


@pytest.mark.parametrize("shape", [(12, 1), (12,)])
def test_an_npz_file_of_medmnist_is_read_as_it_is(data_root, shape):
    """Its validation records are neither train nor test records, nor a column."""
    names, labels = ("train", "val", "test"), np.arange(12).reshape(shape) % 3
    arrays = {f"{name}_images": pictures(seed=i) for i, name in enumerate(names)}
    np.savez(data_root / "pathmnist.npz", **arrays, **{f"{name}_labels": labels.astype(np.uint8) for name in names})
    data = load("pathmnist.npz")
    np.testing.assert_array_equal(as_pixels(data.train), pictures(seed=0))
    np.testing.assert_array_equal(as_pixels(data.test), pictures(seed=2))
    assert data.test.labels.tolist() == labels.reshape(-1).tolist() and not data.columns


def test_an_image_folder_is_read_by_class_folder(data_root):
    image_folder(data_root / "pets")
    data = load("pets")
    assert data.class_names == ("cat", "dog") and data.train.labels.tolist() == [0] * 4 + [1] * 4
    np.testing.assert_array_equal(as_pixels(data.train), np.concatenate([pictures(4, seed=0), pictures(4, seed=1)]))
    assert len(data.test) == 8


def test_without_a_test_split_a_fixed_fifth_of_each_class_is_held_out(data_root):
    images, labels = pictures(50), np.arange(50) % 5
    parquet(data_root / "one", "all", images, labels, site=list(range(50)))
    data = load("one")
    assert data.test.class_counts().tolist() == [2] * 5 and data.train.class_counts().tolist() == [8] * 5
    np.testing.assert_array_equal(as_pixels(data.train), images[data.columns["site"]])
    held_out = np.setdiff1d(np.arange(50), data.columns["site"])
    np.testing.assert_array_equal(as_pixels(data.test), images[held_out])


def test_the_hub_is_asked_for_what_the_table_says(data_root, monkeypatch):
    import datasets

    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=list("0123456789"))}
        )
        table = {"image": [{"bytes": encoded(p), "path": None} for p in pictures(20)], "label": [*range(10)] * 2}
        split = datasets.Dataset.from_dict(table, features=features)
        return datasets.DatasetDict(train=split, test=split.select(range(5)), extra=split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("svhn")
    assert asked == [("ufldl-stanford/svhn", "cropped_digits")]
    assert data.train.normalisation == KNOWN["svhn"].normalisation
    np.testing.assert_array_equal(as_pixels(data.train), pictures(20))
    assert len(data.test) == 5
    load("svhn")
    assert len(asked) == 1  # the second start needs no network
    assert load("owner/name").name == "owner/name" and asked[1] == ("owner/name", None)


def test_an_unreachable_hub_is_one_sentence_without_retries(data_root, monkeypatch):
    import datasets
    from huggingface_hub import HfApi

    offline = []

    def load_dataset(*arguments):
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("Couldn't reach the hub\nsecond line")

    def dataset_info(*arguments, **options):
        raise TimeoutError

    before = datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    with pytest.raises(
        ValueError, match=r"'uoft-cs/cifar10' cannot be loaded \(ConnectionError: Couldn't reach"
    ) as why:
        load("cifar10")
    assert "hf download uoft-cs/cifar10 --repo-type dataset --local-dir cifar10" in str(why.value)
    assert "put the folder at $FEDSTILL_DATA/cifar10" in str(why.value) and "shared/data" not in str(why.value)
    assert offline == [True] and datasets.config.HF_HUB_OFFLINE == before  # so that `datasets` looks in its cache alone


def test_a_hub_that_replies_is_asked_even_if_it_refuses(data_root, monkeypatch):
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    class Refusal(HfHubHTTPError):
        def __init__(self):  # other versions of the hub's client want other arguments
            Exception.__init__(self, "no such data set")

    def dataset_info(*arguments, **options):
        raise Refusal

    def load_dataset(*arguments):
        raise ValueError(f"offline: {datasets.config.HF_HUB_OFFLINE}")

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="offline: False"):
        load("owner/name")


def test_without_a_folder_of_data_sets_none_is_searched(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path.parent / "shared" / "data" / "ours").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"nor an existing file or folder, here or in \$FEDSTILL_DATA \(not set\)"):
        load("ours")
    assert places.local_copy("ours") is None


def test_the_real_data_sets_agree_with_the_table(real_data):
    for name in ("mnist", "fashion_mnist", "cifar10"):
        schema = pq.read_schema(real_data / name / "test-00000-of-00001.parquet")
        info = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        assert tuple(info["label"]["names"]) == KNOWN[name].class_names


def test_mnist_has_the_published_size_and_statistics(real_data, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "test-0.parquet").symlink_to(real_data / "mnist" / "test-00000-of-00001.parquet")
    data = load("mnist", cache_dir=tmp_path / "cache")  # its test split alone: quick to decode
    assert len(data.train) + len(data.test) == 10000 and data.train.shape == (1, 28, 28)
    assert data.train.normalisation == KNOWN["mnist"].normalisation
    # .1307 / .3081 are of the 60,000 train images; the test images are close.
    assert data.train.inputs().mean().abs() < 0.02 and (data.train.inputs().std() - 1).abs() < 0.02
    assert set(data.columns) <= {"writer_id"}  # the hub's copy has none


# Pixel formats -------------------------------------------------------------------------------------------------------


def mixed(data_root, *cells):
    parquet(data_root / "mixed", "train", list(cells), [0] * len(cells))
    parquet(data_root / "mixed", "test", list(cells), [0] * len(cells))
    return load("mixed").train


def test_gray_among_colour_and_gray_stored_as_colour_lose_nothing(data_root):
    colour, gray = pictures(1)[0], pictures(1, channels=1)[0]
    as_rgb = np.repeat(gray[..., None], 3, 2)
    records = mixed(data_root, colour, gray)
    np.testing.assert_array_equal(as_pixels(records), [colour, as_rgb])
    records = mixed(data_root, gray, as_rgb)
    assert records.shape == (1, 6, 5)
    np.testing.assert_array_equal(as_pixels(records), [gray, gray])


def test_palettes_bilevel_and_opaque_alpha_are_read_exactly(data_root):
    few = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [0, 0, 0]]], np.uint8)  # on Pillow's palette
    opaque = np.dstack([few, np.full((2, 2), 255, np.uint8)])
    bits = np.array([[0, 255], [255, 0]], np.uint8)
    records = mixed(data_root, few, encoded(few, "P"), opaque, encoded(bits, "1"))
    np.testing.assert_array_equal(as_pixels(records), [few, few, few, np.repeat(bits[..., None], 3, 2)])


# Refusals ------------------------------------------------------------------------------------------------------------


def bad_images():
    colour, gray, wide = pictures(1)[0], pictures(1, channels=1)[0], pictures(1, width=9)[0]
    clear = np.dstack([colour, np.full((6, 5), 128, np.uint8)])
    deep = encoded(gray.astype(np.uint16))
    return {
        "image 1 of the split 'train' .* cannot be read .*; export it again": [colour, b"not an image"],
        "image 1 .* cannot be read": [colour, encoded(pictures(1, 60, 60)[0])[:500]],
        "image 1 .* is missing; drop": [colour, None],
        "image 1 .* has height x width 6 x 9, but the first image has 6 x 5; give --size N": [colour, wide],
        "image 1 .* is in colour, but the first image is gray; convert": [gray, colour],
        "image 0 .* has transparent pixels": [clear],
        "image 0 .* has the pixel mode I;16": [deep],
        "image 0 .* has the pixel mode CMYK": [encoded(colour, "CMYK", "JPEG")],
    }  # fmt: skip


@pytest.mark.parametrize("message", bad_images())
def test_an_image_that_does_not_fit_is_named(data_root, message):
    with pytest.raises(ValueError, match=message) as refusal:
        mixed(data_root, *bad_images()[message])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 1, 2, 4], {}, r"class 3 \(3\) of 'own' has 0 train records"),
        (
            [0, 1, 2, 3],
            {"names": ["a", "b", "c"]},
            r"record 3 of the train split .* has the class 3, but classes are 0..2",
        ),
        ([0, 1, 2, -1], {}, "record 3 of the train split .* has the class -1"),
        ([0.0, 1.0, 2.0, 3.0], {}, "column 'label' of the split 'train' .* has type double, but classes are integers"),
        (["a", None, "c", "d"], {}, "has 1 gaps"),
        ([0, 1, 2, None], {}, "has 1 gaps"),
        ([0, 1, 2, 3], {"label": "kind"}, r"columns image, kind, none of which is the label column \(label or labels"),
        ([0, 1, 2, 3], {"image": "scan"}, "columns scan, label, none of which is the image column"),
        ([], {}, "has 0 records"),
    ],
)
def test_labels_and_columns_that_do_not_fit_are_named(data_root, labels, options, message):
    for split in ("train", "test"):
        parquet(
            data_root / "own", split, pictures(len(labels)), pa.array(labels, None if labels else pa.int64()), **options
        )
    with pytest.raises(ValueError, match=message) as refusal:
        load("own")
    assert "\n" not in str(refusal.value) and not list((data_root.parent / "cache").glob("*/meta.json"))


def test_train_and_test_must_match(data_root):
    parquet(data_root / "own", "train", pictures(2), [0, 1], names=["a", "b"])
    parquet(data_root / "own", "test", pictures(2), [0, 1], names=["b", "a"])
    with pytest.raises(ValueError, match="names its classes b, a"):
        load("own")
    parquet(data_root / "own", "test", pictures(2, height=7), [0, 1], names=["a", "b"])
    with pytest.raises(
        ValueError, match="test records of 'own' are images of 3 x 7 x 5, but the train records are images of 3 x"
    ):
        load("own")
    shutil.move(data_root / "own/train-00000-of-00001.parquet", data_root / "own/fold1.parquet")
    with pytest.raises(ValueError, match="the table 'fold1.parquet' of .* is in none of the splits .test. that other"):
        load("own")


def test_a_damaged_parquet_file_is_named(data_root):
    parquet(data_root / "own", "train", pictures(2), [0, 1])
    file = data_root / "own/train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="train-00000-of-00001.parquet' cannot be read .*; copy it again"):
        load("own")


@pytest.mark.parametrize("name", ["", "cifar11", "./cifar10", "no/such/folder", "/no/such", "~/no-such.npz"])
def test_what_does_not_exist_is_refused_with_what_would(data_root, name):
    with pytest.raises(ValueError, match="is neither a known data set .digits, mnist, .* nor an existing file"):
        load(name)


def test_an_empty_class_folder_is_named(data_root):
    image_folder(data_root / "pets")
    (data_root / "pets/train/eel").mkdir()
    with pytest.raises(ValueError, match="eel' has 0 images, but each class, split and hospital needs"):
        load("pets")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": pictures().astype(np.float32)}, r"x_train in .* is float32 of shape .*, but images are uint8"),
        ({"x_train": pictures(channels=4)}, r"shape \(12, 6, 5, 4\)"),
        (
            {"y_train": np.arange(11)},
            r"y_train in .* has the shape \(11,\), but there are 12 records; give one label for",
        ),
        ({"y_train": np.eye(12, dtype=int)}, r"y_train in .* has the shape \(12, 12\), but there are 12 records"),
        ({"y_train": np.array(3)}, r"y_train in .* has the shape \(\), but there are 12 records"),
        ({"y_train": np.zeros(12)}, "y_train in .* is float64, but classes are integers from 0 or names; convert it"),
        ({"y_train": None}, r"has x_train, but no y_train; add it, with the class of each record \(12\)"),
        ({"x_test": pictures()}, r"has x_test, but no y_test; add it"),
        ({"x_test": pictures(), "y_test": np.array(["a"] * 12)}, "has names as labels and the other numbers"),
        ({"x_train": None, "images": pictures()}, "holds the arrays y_train, images, but x_train"),
        ({"x_train": pictures()[:0], "y_train": np.arange(0)}, r"shape \(0, 6, 5.*\): there is no record in it"),
        ({"x_test": pictures()[:0], "y_test": np.arange(0)}, "x_test in .* there is no record in it"),
        ({"x_train": pictures()[:, :0]}, "there is no record in it"),
        ({"y_train": np.array([object()] * 12)}, "not a readable .npz file of plain arrays"),
    ],
)
def test_npz_arrays_that_do_not_fit_are_named(tmp_path, arrays, message):
    arrays = {"x_train": pictures(), "y_train": np.arange(12), **arrays}
    np.savez(tmp_path / "own.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match=message):
        read_npz(tmp_path / "own.npz")


def test_a_pickle_in_a_file_never_runs(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "own.npz", x_train=pictures(), y_train=np.array([Bomb()] * 12))
    (tmp_path / "raw.npz").write_bytes(pickle.dumps(Bomb()))
    for name in ("own.npz", "raw.npz"):
        with pytest.raises(ValueError, match="not a readable .npz file") as refused:
            read_npz(tmp_path / name)
        assert "unsafely" not in str(refused.value)  # NumPy's advice on pickles
    assert not (tmp_path / "ran").exists()


# The cache -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(data_root):
    """A small data set, and how often it has been decoded."""
    parquet(data_root / "own", "train", pictures(), np.arange(12) % 3)
    parquet(data_root / "own", "test", pictures(), np.arange(12) % 3)
    return data_root


@pytest.fixture
def decodings(monkeypatch):
    calls = []
    original = sources.complete

    def counted(train, test, name, *facts):
        calls.append(name)
        return original(train, test, name, *facts)

    monkeypatch.setattr(sources, "complete", counted)
    return calls


def entry(own):
    (folder,) = (own.parent / "cache").glob("own-*/")
    return folder


def test_the_second_load_maps_the_cache(own, decodings):
    first, second = load("own"), load("own")
    assert decodings == ["own"] and first.fingerprint == second.fingerprint
    assert torch.equal(first.train.images, second.train.images)
    second.train.images.zero_()  # copy on write: neither the file nor another reader sees it
    assert torch.equal(load("own").train.images, first.train.images) and first.train.images.any()


def test_a_process_checks_a_file_again_only_when_it_has_changed(own, decodings, monkeypatch):
    monkeypatch.setattr(cache, "_SETTLED", -1.0)  # the files are as if they were old
    read, original = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: (read.append(file.name), original(file, name))[1])
    load("own")
    first = len(read)
    load("own")
    assert first >= 4 and len(read) == first
    time.sleep(0.05)
    flip(entry(own) / "train-images.npy", -1)
    load("own")
    assert len(decodings) == 2 and len(read) > first


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "train-images.npy", 300),
        lambda folder: (folder / "test-labels.npy").unlink(),
        lambda folder: (folder / "meta.json").write_text("{"),
        lambda folder: flip(folder / "train-images.npy", -1),
        lambda folder: flip(folder / "train-labels.npy", 10),
        lambda folder: (folder / "meta.json").write_text(
            (folder / "meta.json").read_text().replace('"0"', '"zero"')  # a class renamed by hand
        ),
    ],
)
def test_a_damaged_cache_is_found_and_made_again(own, decodings, damage, caplog):
    before = load("own")
    expected = before.train.images.clone()
    damage(entry(own))
    with caplog.at_level(logging.WARNING):
        after = load("own")
    assert len(decodings) == 2 and "rebuilding the damaged cache entry" in caplog.text
    assert torch.equal(after.train.images, expected) and after.fingerprint == before.fingerprint
    load("own")
    assert len(decodings) == 2


def flip(path: Path, position: int):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_changed_source_is_decoded_again_in_place(own, decodings, caplog):
    old = load("own")
    parquet(own / "own", "test", pictures(6, seed=9), np.arange(6) % 3)
    new = load("own")
    assert len(decodings) == 2 and len(new.test) == 6 and new.fingerprint != old.fingerprint
    assert not caplog.text  # nothing was damaged
    assert len(old.test) == 12 and old.test.images.any()  # whoever has the old one mapped keeps it
    assert {path.name for path in entry(own).parent.iterdir()} == {entry(own).name, entry(own).name + ".lock"}


def test_a_source_of_equal_size_and_time_is_decoded_again(own, decodings):
    place = own / "own.npz"
    images, labels = pictures(), np.arange(12) % 3
    np.savez(place, x_train=images, y_train=labels, x_test=images, y_test=labels)
    before, old = place.stat(), load(str(place))
    np.savez(place, x_train=255 - images, y_train=labels, x_test=images, y_test=labels)
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (place.stat().st_size, place.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    new = load(str(place))
    assert len(decodings) == 2 and torch.equal(new.train.images, 255 - old.train.images)


def test_a_build_that_was_killed_leaves_nothing_in_the_way(own, decodings):
    load("own")
    folder = entry(own)
    shutil.move(folder, f"{folder}.old")
    Path(f"{folder}.new").mkdir()
    Path(f"{folder}.new/half.npy").write_bytes(b"half")
    assert len(load("own").train) == 12 and len(decodings) == 2
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, folder.name + ".lock"}


def test_of_builders_at_once_one_decodes_and_the_others_wait(own, decodings, monkeypatch):
    counted = sources.complete
    monkeypatch.setattr(sources, "complete", lambda *args: (time.sleep(0.3), counted(*args))[1])
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load("own").fingerprint, range(4)))
    assert len(set(loaded)) == 1 and decodings == ["own"]


@pytest.mark.slow
def test_two_processes_at_once_both_get_the_data(own):
    code = "from fedstill.data import load; print(load('own').fingerprint)"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate()[0] for process in running)
    assert first == second and len(first) == 65


def test_a_cache_that_cannot_be_written_is_named(own, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="the data cache .* cannot be written .* environment variable FEDSTILL_CACHE"):
        load("own", cache_dir=tmp_path / "file" / "cache")


@pytest.mark.slow
def test_importing_the_package_is_quick():
    code = (
        "import sys, fedstill.data; print([m for m in ('datasets', 'PIL', 'sklearn', 'pyarrow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_patients_number_is_no_class(tmp_path):
    """A name for each number up to 2^33 filled the memory."""
    labels = np.arange(12, dtype=np.int64) % 3
    np.savez(tmp_path / "ids.npz", x_train=pictures(), y_train=labels + 2**33)
    with pytest.raises(ValueError, match="class 0 .0. of 'ids' has 0 train records"):
        load(str(tmp_path / "ids.npz"))
    with pytest.raises(ValueError, match="has the class 8589934594, but there are at most 32768 classes"):
        sources.load_part(str(tmp_path / "ids.npz"), cache_dir=tmp_path / "cache")
    np.savez(tmp_path / "gap.npz", x_train=pictures(), y_train=labels * 2)
    with pytest.raises(ValueError, match="class 1 .1. of 'gap' has 0 train records"):
        load(str(tmp_path / "gap.npz"))


def test_an_archive_of_something_else_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x_train.npy", b"not npy")
    with pytest.raises(ValueError, match="not a readable .npz file of plain arrays .ValueError: x_train is no array"):
        read_npz(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "metadata",
    ["[]", '{"info": 3}', '{"info": null}', '{"info": {"features": []}}', '{"info": {"features": {"label": null}}}',
     "[" * 50_000, "{"],
    ids=range(7),
)  # fmt: skip
def test_a_parquet_file_with_odd_metadata_has_numbers_for_names(data_root, metadata):
    parquet(data_root / "odd", "train", pictures(), np.arange(12) % 2)
    file = next((data_root / "odd").iterdir())
    pq.write_table(pq.read_table(file).replace_schema_metadata({"huggingface": metadata}), file)
    assert load("odd").class_names == ("0", "1")


def test_a_class_that_cannot_be_written_is_named(data_root):
    image_folder(data_root / "odd", classes=("cat", os.fsdecode(b"d\xff")))
    with pytest.raises(ValueError, match="is not UTF-8; rename it"):
        load("odd")
