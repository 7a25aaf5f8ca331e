"""Representatives: different members, near the middle of the clusters that are there."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from fedstill.base.seeds import isolated, stream
from fedstill.data.sources import DataSet
from fedstill.distill.coreset import choose, representatives
from fedstill.models import build


def blobs(count: int, each: int, spread: float = 0.05) -> tuple[Tensor, Tensor]:
    """Well separated clusters: features ``(count * each, 3)`` and centres ``(count, 3)``."""
    rng = stream(3, "blobs")
    centres = torch.randn(count, 3, generator=rng) * 5
    return (centres[:, None] + spread * torch.randn(count, each, 3, generator=rng)).flatten(0, 1), centres


def spread(features: Tensor, centres: Tensor) -> float:
    """Mean squared distance to the nearest centre."""
    return float(torch.cdist(features, centres).min(1).values.square().mean())


@pytest.mark.parametrize("count", [1, 7, 60])
def test_as_many_different_records_as_asked(count: int) -> None:
    chosen = representatives(torch.randn(200, 8, generator=stream(0)), count, stream(1))
    assert chosen.dtype == torch.int64 and len(chosen) == count == len(set(chosen.tolist()))
    assert 0 <= int(chosen.min()) and int(chosen.max()) < 200


def test_a_class_with_fewer_records_gives_all_of_them() -> None:
    features = torch.randn(5, 8, generator=stream(0))
    for count in (5, 6, 128):
        assert sorted(representatives(features, count, stream(1)).tolist()) == [0, 1, 2, 3, 4]


def test_one_representative_is_the_record_nearest_to_the_mean() -> None:
    features = torch.randn(50, 8, generator=stream(0)) + 3
    nearest = int((features - features.mean(0)).norm(dim=1).argmin())
    assert representatives(features, 1, stream(1)).tolist() == [nearest]


def test_equal_records_still_give_different_indices() -> None:
    features = torch.cat([torch.zeros(30, 4), torch.ones(2, 4)])
    chosen = representatives(features, 8, stream(1))
    assert len(set(chosen.tolist())) == 8


def test_clusters_are_about_as_tight_as_scikit_learns() -> None:
    features, _ = blobs(12, 40, spread=1.0)
    theirs = KMeans(12, n_init=1, init="random", random_state=0).fit(features.numpy()).cluster_centers_
    best = spread(features, torch.from_numpy(theirs))
    ours = spread(features, features[representatives(features, 12, stream(1))])
    random = spread(features, features[torch.randperm(len(features), generator=stream(2))[:12]])
    # members instead of means, and local optima of two random starts: within 60 %; a random choice must not pass
    assert ours < 1.6 * best < random


def test_each_is_the_nearest_member_of_a_cluster_of_a_fixed_point_of_lloyd() -> None:
    features, _ = blobs(4, 30)
    chosen = representatives(features, 4, stream(5), iterations=100)
    # redo the last assignment from the clusters the representatives stand for
    nearest = torch.cdist(features, features[chosen]).argmin(1)
    for cluster, index in enumerate(chosen.tolist()):
        members = torch.nonzero(nearest == cluster).flatten()
        middle = features[members].mean(0)
        assert index == int(members[(features[members] - middle).norm(dim=1).argmin()])


def test_randomness_is_the_generator_and_nothing_else() -> None:
    features = torch.randn(300, 8, generator=stream(0))
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = representatives(features, 20, stream(1))
    torch.manual_seed(123)
    torch.set_rng_state(before[0])
    assert torch.equal(first, representatives(features, 20, stream(1)))
    assert not torch.equal(first, representatives(features, 20, stream(2)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


@pytest.mark.parametrize(("n", "count"), [(0, 3), (3, 0)])
def test_nothing_to_choose_is_refused(n: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} representatives of {n} records"):
        representatives(torch.zeros(n, 2), count, stream(0))


@pytest.mark.parametrize("pool", [None, 40, 2])
def test_chosen_records_belong_to_the_part_they_are_chosen_from(digits: DataSet, pool: int | None) -> None:
    part = digits.train.of_class(3)
    with isolated(0):
        net = build("convnet:width=8,depth=2", part.shape, 10)
    chosen = choose(part, net, 12, stream(1), pool=pool)
    assert len(set(chosen.tolist())) == 12 and int(chosen.max()) < len(part)
    assert set(part[chosen].labels.tolist()) == {3}
