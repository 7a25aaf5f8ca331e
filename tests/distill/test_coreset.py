"""Centres of classes: how many, which ones, and the same again from the same seed."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import stream
from fedstill.data.sources import DataSet
from fedstill.distill.coreset import Coreset, centres, shares


def two_classes(digits: DataSet) -> Records:
    return digits.train[(digits.train.labels == 3) | (digits.train.labels == 7)]


def clouds() -> tuple[Records, Tensor]:
    """One class around three images far from one another, 20 + 10 + 5 records, and those images."""
    rng = stream(0, "clouds")
    middles = torch.randint(40, 215, (3, 1, 4, 4), generator=rng)
    noise = torch.randint(-3, 4, (35, 1, 4, 4), generator=rng)
    images = middles[torch.tensor([0] * 20 + [1] * 10 + [2] * 5)] + noise
    pixels = Normalisation((0.0,), (1 / 255,))  # inputs are from 0 to 255
    return Records(images.byte(), torch.full((35,), 2), 4, pixels), middles


@pytest.mark.parametrize(
    ("counts", "total", "expected"),
    [
        ([5, 0, 9], 4, {0: 2, 2: 2}),
        ([5, 0, 9, 9], 5, {0: 1, 2: 2, 3: 2}),
        ([5, 7, 9, 7], 2, {1: 1, 2: 1}),
        ([3], 10, {0: 10}),
    ],
)
def test_shares_are_equal_and_the_rest_goes_to_the_largest(
    counts: list[int], total: int, expected: dict[int, int]
) -> None:
    found = shares(torch.tensor(counts), total)
    assert found == expected and list(found) == sorted(found) and sum(found.values()) == total


@pytest.mark.parametrize("settings", [Coreset(), Coreset.published(), Coreset(covariance="spherical")])
def test_a_mixture_finds_the_middles_of_clouds(settings: Coreset) -> None:
    records, middles = clouds()
    made = centres(records, 3, settings, stream(0))
    assert made.labels.tolist() == [2, 2, 2]
    away = torch.cdist(made.inputs().flatten(1), middles.flatten(1).float())
    # Means of 5 or more values of standard deviation 2 in 16 dimensions: 8 / sqrt(5) = 3.6 is their length.
    assert sorted(away.argmin(1).tolist()) == [0, 1, 2] and float(away.min(1).values.max()) < 6
    assert float(torch.pdist(middles.flatten(1).float()).min()) > 50


def test_dbscan_means_clusters_by_size_at_most_the_share() -> None:
    records, _ = clouds()
    settings = Coreset(algorithm="dbscan", eps=20.0)
    expected = [records.inputs(slice(a, b)).mean(0) for a, b in ((0, 20), (20, 30), (30, 35))]
    for total in (5, 2):
        made = centres(records, total, settings, stream(0)).inputs()
        torch.testing.assert_close(made, torch.stack(expected[:total]), rtol=1e-5, atol=1e-3)
    alone = centres(records, 3, Coreset(algorithm="dbscan", eps=1e-3), stream(0))  # no record has a neighbour
    torch.testing.assert_close(alone.inputs(), records.inputs().mean(0, keepdim=True), rtol=1e-5, atol=1e-3)


def test_same_seed_same_centres_of_pixels_in_the_unit_interval(digits: DataSet) -> None:
    records, before = two_classes(digits), torch.get_rng_state()
    first, again, other = (centres(records, 6, Coreset(), stream(s)) for s in (0, 0, 1))
    assert torch.equal(first.inputs(), again.inputs()) and not torch.equal(first.inputs(), other.inputs())
    assert first.labels.tolist() == [3, 3, 3, 7, 7, 7]
    assert first.inputs().shape == (6, 1, 8, 8) and first.inputs().dtype == torch.float32
    rounded = first.rounded(10, records.normalisation)
    assert float((rounded.inputs() - first.inputs()).abs().max()) < 0.51 / 255 / records.normalisation.std[0] + 1e-5
    assert torch.equal(before, torch.get_rng_state())


def test_one_component_is_the_mean_of_the_class(digits: DataSet) -> None:
    records = two_classes(digits)
    made = centres(records, 2, Coreset(), stream(0))
    for value, c in zip(made.inputs(), (3, 7), strict=True):
        torch.testing.assert_close(value, records.of_class(c).inputs().mean(0), rtol=1e-4, atol=1e-4)


def test_small_classes_send_their_records_and_equal_ones_raise_no_warning(digits: DataSet) -> None:
    few = digits.train.of_class(5)[:2]
    made = centres(few, 4, Coreset(), stream(0))
    torch.testing.assert_close(made.inputs(), few.inputs())
    equal = few[torch.tensor([0, 0, 0, 0, 1, 1])]
    assert len(centres(equal, 4, Coreset(), stream(0)).labels) == 4
    with pytest.raises(ValueError, match="0 examples of 1 classes"):
        centres(few, 0, Coreset(), stream(0))
    with pytest.raises(ValidationError):
        Coreset(eps=0.0)
