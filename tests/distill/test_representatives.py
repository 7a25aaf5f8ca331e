"""Representatives are records of the class, one of each cluster."""

import pytest
import torch
from sklearn.cluster import KMeans

from fedstill.data.sources import DataSet
from fedstill.distill.representatives import choose, representatives
from fedstill.models import build
from fedstill.seeds import isolated, stream


def blobs() -> torch.Tensor:
    """Five far-apart clusters of 20 points each."""
    rng = stream(0, "blobs")
    centres = 100 * torch.eye(5)
    return (centres.repeat_interleave(20, 0) + torch.randn(100, 5, generator=rng))[torch.randperm(100, generator=rng)]


def test_each_cluster_gives_the_record_nearest_to_its_mean() -> None:
    points = blobs()
    # five random first centres rarely lie in five clusters; far-apart clusters are found from many starts
    found = min(
        (representatives(points, 5, stream(s, "k"), iterations=50) for s in range(40)), key=lambda i: spread(points, i)
    )
    cluster = points.argmax(1)
    assert sorted(cluster[found].tolist()) == [0, 1, 2, 3, 4]
    for index in found.tolist():
        own = torch.nonzero(cluster == cluster[index]).flatten()
        distances = (points[own] - points[own].mean(0)).norm(dim=1)
        assert own[distances.argmin()] == index


def spread(points: torch.Tensor, index: torch.Tensor) -> float:
    return float(torch.cdist(points, points[index]).min(1).values.square().sum())


@pytest.mark.parametrize("count", [1, 3, 10, 99, 100, 500])
def test_they_are_different_records_as_many_as_asked_for_or_all(count: int) -> None:
    found = representatives(blobs(), count, stream(0, "k")).tolist()
    assert len(found) == len(set(found)) == min(count, 100)
    assert 0 <= min(found) and max(found) < 100


def test_equal_records_are_not_chosen_twice() -> None:
    found = representatives(torch.zeros(6, 3), 4, stream(0, "k")).tolist()
    assert len(set(found)) == 4


def test_clusters_are_as_tight_as_those_of_scikit_learn(digits: DataSet) -> None:
    points = digits.train.of_class(3).pixels().flatten(1)
    ours = spread(points, representatives(points, 10, stream(0, "k"), iterations=30))
    theirs = KMeans(10, n_init=1, init="random", random_state=0).fit(points.numpy())
    nearest = torch.cdist(torch.from_numpy(theirs.cluster_centers_), points).argmin(1)
    assert ours < 1.15 * spread(points, nearest)
    assert ours < 0.8 * spread(points, torch.arange(10))  # and much tighter than any ten records


def test_chosen_records_are_members_of_their_class(digits: DataSet) -> None:
    with isolated(0):
        net = build("convnet:width=8,depth=2", digits.train.shape, 10)
    part = digits.train.of_class(7)
    for pool in (None, 20):
        index = choose(part, net, 8, stream(0, "choice"), pool=pool)
        assert len(set(index.tolist())) == 8
        assert int(index.max()) < len(part)
    assert torch.equal(choose(part, net, 8, stream(0, "a")), choose(part, net, 8, stream(0, "a")))


@pytest.mark.parametrize(("n", "count"), [(0, 3), (3, 0)])
def test_impossible_choices_are_refused(n: int, count: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        representatives(torch.zeros(n, 2), count, stream(0, "k"))
