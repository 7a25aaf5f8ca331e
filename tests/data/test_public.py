"""Public data: both splits in order, in the form of the task; without labels if wanted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedstill.data import public, sources
from fedstill.records import Normalisation

TASK = Normalisation((0.5,), (0.25,))
COLOUR = Normalisation((0.5, 0.4, 0.3), (0.25, 0.2, 0.1))


def pictures(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def npz(root: Path, *shape: int, train: int = 10, test: int = 4) -> tuple[str, np.ndarray]:
    """A data set of 2 classes and its images, train before test."""
    parts = {"x_train": pictures(train, *shape), "x_test": pictures(test, *shape, seed=1)}
    np.savez(root / "own.npz", y_train=np.arange(train) % 2, y_test=np.arange(test) % 2, **parts)
    return "own.npz", np.concatenate([parts["x_train"], parts["x_test"]])


def test_train_and_test_images_in_order_with_the_tasks_normalisation(digits: sources.DataSet) -> None:
    records = public.load("digits", (1, 8, 8), TASK)
    assert torch.equal(records.images, torch.cat([digits.train.images, digits.test.images]))
    assert torch.equal(records.labels, torch.cat([digits.train.labels, digits.test.labels]))
    assert records.num_classes == 10
    assert records.normalisation == TASK != digits.train.normalisation


def test_unlabeled_drops_the_labels_and_nothing_else() -> None:
    labelled, plain = (public.load(spec, (1, 8, 8), TASK) for spec in ("digits", "digits:unlabeled"))
    assert torch.equal(plain.images, labelled.images)
    assert plain.num_classes == 1
    assert plain.labels.dtype == torch.int64 and not plain.labels.any()
    assert labelled.labels.any()


def test_gray_becomes_three_equal_channels() -> None:
    gray, colour = public.load("digits", (1, 8, 8), TASK), public.load("digits", (3, 8, 8), COLOUR)
    assert torch.equal(colour.images, gray.images.expand(-1, 3, -1, -1))
    assert colour.inputs(slice(0, 2)).shape == (2, 3, 8, 8)


def test_colours_become_their_luminance(data_root: Path) -> None:
    name, pixels = npz(data_root, 6, 5, 3)
    found = public.load(name, (1, 6, 5), TASK).images
    expected = np.rint(pixels @ np.array([0.299, 0.587, 0.114]))[:, None]
    # Sums in float32 may fall on the other side of a half.
    assert np.abs(found.numpy() - expected).max() <= 1
    assert (found.numpy() == expected).mean() > 0.99


@pytest.mark.parametrize("size", [(8, 8), (24, 20), (9, 33)], ids=str)
def test_sizes_change_as_pillow_changes_them(data_root: Path, size: tuple[int, int]) -> None:
    name, pixels = npz(data_root, 16, 18, 3)
    found = public.load(name, (3, *size), COLOUR).images.permute(0, 2, 3, 1).numpy()
    theirs = np.stack([np.asarray(Image.fromarray(p).resize(size[::-1], Image.Resampling.BILINEAR)) for p in pixels])
    # Pillow rounds after each axis, we once.
    assert np.abs(found.astype(int) - theirs.astype(int)).max() <= 1
    nearest = np.stack([np.asarray(Image.fromarray(p).resize(size[::-1], Image.Resampling.NEAREST)) for p in pixels])
    assert np.abs(nearest.astype(int) - theirs.astype(int)).max() > 20  # the test can tell


def test_size_and_channels_change_together(data_root: Path) -> None:
    name, pixels = npz(data_root, 16, 16)
    found = public.load(name, (3, 8, 8), COLOUR).images
    assert torch.equal(found[:, :1].expand(-1, 3, -1, -1), found)
    theirs = np.stack([np.asarray(Image.fromarray(p).resize((8, 8), Image.Resampling.BILINEAR)) for p in pixels])
    assert np.abs(found[:, 0].numpy().astype(int) - theirs.astype(int)).max() <= 1


def test_flat_images_keep_their_value_whatever_the_size(data_root: Path) -> None:
    flat = np.broadcast_to(np.arange(0, 256, 5, dtype=np.uint8)[:, None, None], (52, 7, 7)).copy()
    np.savez(data_root / "flat.npz", x_train=flat, y_train=np.zeros(52, int), x_test=flat[:1], y_test=[0])
    found = public.load("flat.npz", (1, 12, 5), TASK).images[:52]
    assert torch.equal(found, torch.from_numpy(flat)[:, None, :1, :1].expand(-1, 1, 12, 5))


def test_converting_in_chunks_changes_nothing(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = npz(data_root, 16, 16, 3)
    whole = public.load(name, (1, 8, 8), TASK).images
    monkeypatch.setattr(public, "_CHUNK_BYTES", 3 * 4 * 3 * 16 * 16)  # 3 images
    assert torch.equal(public.load(name, (1, 8, 8), TASK).images, whole)


@pytest.mark.parametrize("spec", ["no-such-set", "no-such-set:unlabeled", ":unlabeled", "digits:labelled"])
def test_what_is_not_there_is_one_sentence(data_root: Path, spec: str) -> None:
    with pytest.raises(ValueError, match="neither a known data set") as caught:
        public.load(spec, (1, 8, 8), TASK)
    assert "\n" not in str(caught.value)


def test_other_channels_than_gray_and_colour_are_refused() -> None:
    with pytest.raises(ValueError, match="'digits' have 1 channels and the task has 4"):
        public.load("digits", (4, 8, 8), TASK)


@pytest.mark.slow
def test_cifar100_for_gray_images_of_mnists_size(real_data: Path) -> None:
    if not (real_data / "cifar100").is_dir():
        pytest.skip(f"no CIFAR-100 in {real_data}; set FEDSTILL_DATA")
    records, source = public.load("cifar100:unlabeled", (1, 28, 28), TASK), sources.load("cifar100")
    # 60,000 in all; a copy may hold fewer of the train images.
    assert records.images.shape == (len(source.train) + len(source.test), 1, 28, 28)
    assert len(source.test) == 10_000
    # The means 0.507, 0.487, 0.441 of the channels, weighted as luminance, give 0.488.
    assert abs(records.pixels(slice(0, 5000)).mean() - 0.488) < 0.02
