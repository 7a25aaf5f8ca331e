"""Public data: both splits in order, in the form of the task; without labels if wanted."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedstill import methods
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import stream
from fedstill.data import public, sources
from fedstill.engines.run_spec import PublicSample
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run

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


# --- made-up images


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14)], ids=str)
def test_noise_is_the_same_for_every_caller(
    shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = public.load("noise=1010", shape, TASK)  # more than are made at a time
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(public.load("noise=1010", shape, TASK).images, first.images)
    assert first.images.shape == (1010, *shape) and first.images.dtype == torch.uint8
    assert first.num_classes == 1 and first.labels.dtype == torch.int64 and not first.labels.any()
    assert first.normalisation == TASK
    assert torch.equal(public.load("noise=1010:unlabeled", shape, TASK).images, first.images)
    assert not list(tmp_path.iterdir())  # made, not kept


@pytest.mark.slow
def test_noise_in_another_process_is_the_same() -> None:
    code = (
        "import hashlib; from fedstill.data import public; from fedstill.base.records import Normalisation as N; "
        "print(hashlib.sha256(public.load('noise=50', (3, 8, 8), N((.5,), (.25,))).images.numpy().tobytes())"
        ".hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    images = public.load("noise=50", (3, 8, 8), TASK).images
    assert there == hashlib.sha256(images.numpy().tobytes()).hexdigest()


def test_noise_has_shapes_and_each_image_its_own() -> None:
    gray = public.load("noise=200", (1, 28, 28), TASK).images[:, 0]
    colour = public.load("noise=200", (3, 32, 32), COLOUR).images
    assert gray.flatten(1).unique(dim=0).shape[0] > 190  # a few may be all ground
    assert len(colour.flatten(1).unique(dim=0)) == 200
    assert not gray[:, [0, 0, -1, -1], [0, -1, 0, -1]].any()  # a round window
    assert 0.1 < float((gray > 0).float().mean()) < 0.6
    for images in (gray.float(), colour.float().mean(1)):
        # unlike white noise, neighbours are alike
        far = (images[:, :, 1:] - images[:, :, :-1]).abs().mean() / (images[:, 7:] - images[:, :-7]).abs().mean()
        assert far < 0.8
    spread = colour.float().std((2, 3)).mean(1)
    assert float((spread > 5).float().mean()) > 0.9
    assert not torch.equal(colour[:, 0], colour[:, 1])


def test_noise_without_a_number_is_ten_thousand_images() -> None:
    assert len(public.load("noise", (1, 4, 4), TASK)) == 10_000
    assert len(public.load("noise=1", (1, 4, 4), TASK)) == 1


@pytest.mark.parametrize("number", ["", "0", "-5", "1.5", "many", "1000001", "5=5", "1e3"])
def test_a_bad_number_is_one_sentence(number: str) -> None:
    with pytest.raises(ValueError, match=r"write noise=N with N from 1 to 1000000") as caught:
        public.load(f"noise={number}", (1, 8, 8), TASK)
    assert repr(number) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_run_with_noise_as_its_public_images(tmp_path: Path) -> None:
    experiment = Experiment(data="digits", clients=3, model="convnet:width=8,depth=2", public="noise=50", workers=0)
    method = methods.find("fedavg-p")(extractor={"pretrain": "none"}, space={"dims": 16}, epsilon=50.0)
    summary = run(Job(experiment, method, tmp_path / "run"))
    assert summary["accuracy"] > 0.5  # chance is 0.1
    assert summary["guarantee"]["holds"] and summary["guarantee"]["epsilon"] == pytest.approx(50, rel=1e-3)
    again = run(Job(experiment, method, tmp_path / "again"))
    assert again["accuracy"] == summary["accuracy"]
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "again"))
    assert first == second


def test_a_run_with_a_bad_number_of_images_ends_in_that_sentence(tmp_path: Path) -> None:
    experiment = Experiment(data="digits", clients=3, model="convnet:width=8,depth=2", public="noise=x", workers=0)
    with pytest.raises(ValueError, match="write noise=N"):
        run(Job(experiment, methods.find("fedavg-p")(), tmp_path / "run"))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 900])
def test_a_sample_spans_the_records_and_fits_them(digits: sources.DataSet, count: int) -> None:
    records = digits.train[:count]
    stated = public.sample(records)
    assert len(stated["sums"]) == min(count, public.SAMPLED)
    assert public.difference(records, stated) is None
    PublicSample(**stated)


def test_other_public_records_are_noticed_and_another_decoder_is_not(digits: sources.DataSet) -> None:
    records = digits.train[:500]
    stated = public.sample(records)
    for seed in range(20):
        noise = torch.randint(-4, 5, records.images.shape, generator=stream(seed))
        decoded = (records.images.int() + noise).clamp(0, 255).to(torch.uint8)
        assert public.difference(replace(records, images=decoded), stated) is None
    assert public.difference(records[:499], stated) == "there are 499 records, in the run 500"
    relabelled = replace(records, labels=records.labels.clone().index_fill(0, torch.tensor([7]), 9))
    assert public.difference(relabelled, stated) == "the labels differ"
    bare = replace(records, labels=torch.zeros_like(records.labels))
    stated = public.sample(bare)
    sampled = torch.tensor([i * 500 // 64 for i in range(64)])
    order = torch.arange(500)
    rest = order[~torch.isin(order, sampled)]
    order[rest] = rest[torch.randperm(len(rest), generator=stream(1))]  # all but the sample
    shuffled = torch.randperm(500, generator=stream(2))
    for images in (255 - bare.images, bare.images.flip(3), bare.images[shuffled], digits.train[500:1000].images):
        assert str(public.difference(replace(bare, images=images), stated)).startswith("record ")
    assert public.difference(replace(bare, images=bare.images[order]), stated) == "their order differs"


def test_vectors_of_any_scale_are_compared_with_each_other() -> None:
    generator, task = stream(3), Normalisation((0.0,) * 16, (1.0,) * 16)
    for scale in (1e-6, 1.0, 1e6):
        values = nn.functional.normalize(torch.randn(100, 16, generator=generator)) * scale
        values = values - values.mean(1, keepdim=True)  # as a layer norm, whose means tell nothing
        records = Records(values, torch.zeros(100, dtype=torch.int64), 1, task)
        stated = public.sample(records)
        assert public.difference(replace(records, images=values * (1 + 1e-5)), stated) is None
        for others in (values * 1.1, values.flip(0), values.flip(1), -values):
            assert public.difference(replace(records, images=others), stated)


@pytest.mark.slow
def test_cifar100_for_gray_images_of_mnists_size(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", str(real_data))
    if not (real_data / "cifar100").is_dir():
        pytest.skip(f"no CIFAR-100 in {real_data}; set FEDSTILL_DATA")
    records, source = public.load("cifar100:unlabeled", (1, 28, 28), TASK), sources.load("cifar100")
    # 60,000 in all; a copy may hold fewer of the train images.
    assert records.images.shape == (len(source.train) + len(source.test), 1, 28, 28)
    assert len(source.test) == 10_000
    # The means 0.507, 0.487, 0.441 of the channels, weighted as luminance, give 0.488.
    assert abs(records.pixels(slice(0, 5000)).mean() - 0.488) < 0.02
