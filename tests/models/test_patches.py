"""Features of patches against plain loops; learnt from public images only, the same every time, one image at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import noise_images
from torch import Tensor

from fedstill import models
from fedstill.base.seeds import isolated, stream
from fedstill.data.sources import DataSet
from fedstill.models.patches import Patches
from fedstill.protocol import Records, state
from fedstill.train.extractor import Extractor


def made(shape: tuple[int, int, int] = (1, 8, 8), **options: Any) -> Patches:
    with isolated(0):
        return Patches(shape, 10, **{"centroids": 16, "side": 3, **options})


@pytest.fixture
def public(digits: DataSet) -> Records:
    return noise_images(digits, 40)()


def learnt(public: Records, seed: int = 0, **options: Any) -> Patches:
    model = made(public.shape, **options)
    model.learn(public, stream(seed, "learn"))
    return model


def plain(model: Patches, image: Tensor, side: int, stride: int, cells: int) -> np.ndarray[Any, Any]:
    """The features of one image, patch by patch."""
    x = image.double().numpy()
    whitening, centre, centroids = (
        value.double().numpy() for value in (model.whitening, model.centre, model.centroids)
    )
    rows, columns = ((n - side) // stride + 1 for n in x.shape[1:])
    found = np.zeros((cells, cells, len(centroids)))
    for i in range(rows):
        for j in range(columns):
            patch = x[:, i * stride : i * stride + side, j * stride : j * stride + side].flatten()
            patch = (patch - patch.mean()) / np.sqrt(patch.var() + 0.01)
            z = (patch - centre) @ whitening
            distances = np.sqrt(((z - centroids) ** 2).sum(1))
            found[i * cells // rows, j * cells // columns] += np.maximum(0, distances.mean() - distances)
    return found.flatten()


@pytest.mark.parametrize(("side", "stride", "cells"), [(3, 1, 2), (4, 2, 1), (2, 1, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_against_plain_loops(side: int, stride: int, cells: int, channels: int) -> None:
    model = made((channels, 8, 9), side=side, stride=stride, cells=cells)
    values = channels * side**2
    model.whitening.copy_(torch.eye(values) + 0.1 * torch.randn(values, values, generator=stream(1)))
    model.centre.copy_(torch.randn(values, generator=stream(2)))
    x = torch.randn(3, channels, 8, 9, generator=stream(3))
    for image, found in zip(x, model.features(x), strict=True):
        # float32 sums of up to 42 activations
        assert np.allclose(found, plain(model, image, side, stride, cells), rtol=1e-4, atol=1e-4)
    assert model(x).shape == (3, 10)


def test_an_image_s_features_depend_on_no_other_image_to_the_bit(public: Records) -> None:
    model, x = learnt(public), public.inputs()
    together = model.features(x)
    for batch in (1, 7, 32):
        assert torch.equal(torch.cat([model.features(some) for some in x.split(batch)]), together)
    assert torch.equal(model.features(x.flip(0)), together.flip(0))
    assert model.features(x[:0]).shape == (0, together.shape[1])


def test_whitened_public_patches_have_unit_covariance_where_they_vary(public: Records) -> None:
    model = learnt(public, centroids=50)
    patches = model.draw_patches(public, stream(5))
    variance, mean = torch.var_mean(patches, 1, correction=0, keepdim=True)
    z = ((patches - mean) / (variance + 0.01).sqrt() - model.centre) @ model.whitening
    values = torch.linalg.eigvalsh(torch.cov(z.T))
    assert values[0] < 0.1  # along the mean, which normalisation removes
    assert 0.5 < values[3:].min() and values.max() < 1.5


def test_centroids_are_means_of_their_patches(public: Records) -> None:
    from sklearn.cluster import kmeans_plusplus

    model = learnt(public, centroids=8)
    patches = model.draw_patches(public, stream(6))
    variance, mean = torch.var_mean(patches, 1, correction=0, keepdim=True)
    z = ((patches - mean) / (variance + 0.01).sqrt() - model.centre) @ model.whitening

    def cost(centroids: Tensor) -> float:
        return float(torch.cdist(z, centroids).min(1).values.square().mean())

    spread, _ = kmeans_plusplus(z.numpy(), 8, random_state=0)
    assert cost(model.centroids) < cost(torch.from_numpy(spread))  # better than a good start
    assert cost(model.centroids) < 0.9 * cost(torch.zeros_like(model.centroids))


def test_learning_is_deterministic_to_the_bit_and_random_by_its_stream(public: Records) -> None:
    first, again, other = learnt(public), learnt(public), learnt(public, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(state(first).values(), state(again).values(), strict=True))
    assert not torch.equal(first.centroids, other.centroids)


def test_flat_images_and_fewer_patches_than_centroids(digits: DataSet) -> None:
    flat = Records(torch.full((3, 1, 8, 8), 9, dtype=torch.uint8), torch.zeros(3).long(), 1, digits.train.normalisation)
    assert torch.isfinite(learnt(flat).features(digits.train.inputs(slice(4)))).all()


def test_the_cache_keeps_what_was_learnt(public: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(public.shape)
    first = Extractor().obtain(model, public, stream(0), cache_dir=tmp_path)
    assert not torch.equal(first["centroids"], model.centroids)
    monkeypatch.setattr(Patches, "learn", None)  # a call would be an error
    again = Extractor().obtain(model, public, stream(0), cache_dir=tmp_path)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    other_recipe = Extractor(simclr={"epochs": 3}).obtain(model, public, stream(0), cache_dir=tmp_path)  # type: ignore[arg-type]
    assert torch.equal(other_recipe["centroids"], first["centroids"])
    for changed in (made(public.shape, side=4), made(public.shape, stride=2), made(public.shape, cells=1)):
        with pytest.raises(TypeError):
            Extractor().obtain(changed, public, stream(0), cache_dir=tmp_path)
    start = Extractor(pretrain="none").obtain(model, public, stream(0), cache_dir=tmp_path)
    assert torch.equal(start["centroids"], model.centroids)


def test_without_public_images_there_is_nothing_to_learn_from() -> None:
    with pytest.raises(ValueError, match="pretrained on public images, but the run has 0; name some with --public"):
        Extractor().obtain(made(), None, stream(0))


def test_by_name_and_images_that_are_too_small() -> None:
    model = models.build("patches:centroids=4,side=2,cells=3", (3, 8, 8), 10)
    assert models.feature_width(model, (3, 8, 8)) == 36
    with pytest.raises(ValueError, match="they have 1x1 patches, and cells=2 needs at least 2x2; choose a smaller"):
        models.build("patches:side=8", (1, 8, 8), 10)
    with pytest.raises(ValueError, match="can't use 'side=1'"):
        models.build("patches:side=1", (1, 8, 8), 10)
