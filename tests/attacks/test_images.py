"""Nearest real images: copies are flagged, independent images aren't, and the interval holds what it promises."""

import pytest
import torch
from scipy.stats import beta
from torch import nn

from fedstill import models
from fedstill.attacks.images import Nearest, compare, matched_samples, nearest, recognised, share_of
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.data.sources import DataSet
from fedstill.train.sgd import SGD


def network(digits: DataSet) -> nn.Module:
    with isolated(0):
        return models.build("convnet:width=8,depth=2", digits.train.shape, 10)


def made(count: int, seed: int, spread: float = 40.0) -> Records:
    """Images around one grey, so that all are as close to each other."""
    pixels = 128 + spread * torch.randn(count, 1, 4, 4, generator=stream(seed))
    images = pixels.clamp(0, 255).to(torch.uint8)
    return Records(images, torch.zeros(count).long(), 2, Normalisation((0.5,), (0.3,)))


@pytest.mark.parametrize("chunk", [7, 64, 1000])
@pytest.mark.parametrize("by_network", [False, True])
def test_nearest_is_a_full_search_in_any_chunks(digits: DataSet, chunk: int, by_network: bool) -> None:
    images, among, net = digits.test[:40], digits.train[:150], network(digits) if by_network else None
    rows = [
        part.pixels().flatten(1) if net is None else models.features(net.eval(), part.inputs()).detach()
        for part in (images, among)
    ]
    truth = (rows[0][:, None] - rows[1][None]).square().sum(2).sqrt().sort(1)
    found = nearest(images, among, 2, network=net, chunk=chunk)
    assert torch.allclose(found.distances, truth.values[:, :2], rtol=1e-4)
    assert torch.equal(found.indices, truth.indices[:, :2])


def test_the_network_keeps_its_mode_and_its_gradients(digits: DataSet) -> None:
    net = network(digits).train()
    found = nearest(digits.test[:5], digits.train[:9], network=net)
    assert net.training and all(p.grad is None for p in net.parameters()) and not found.distances.requires_grad


def test_distances_of_equal_images_are_0_exactly(digits: DataSet) -> None:
    found = nearest(digits.train[10:20], digits.train)
    assert bool((found.distances == 0).all())
    assert torch.equal(digits.train.images[found.indices[:, 0]], digits.train.images[10:20])


def test_no_images_have_no_neighbours(digits: DataSet) -> None:
    found = nearest(digits.train[:0], digits.train, 3)
    assert isinstance(found, Nearest) and found.distances.shape == found.indices.shape == (0, 3)


@pytest.mark.parametrize("by_network", [False, True])
def test_images_that_are_real_ones_are_flagged(digits: DataSet, by_network: bool) -> None:
    members, others = matched_samples(digits.train, digits.test, stream(0))
    found = compare(members[:60], members, others, network=network(digits) if by_network else None)
    assert found.nearer.value == 1 and found.nearer.low > 0.9 and found.votes > 50
    turned = compare(members[:60], others, members)
    assert turned.nearer.value == 0 and turned.nearer.high < 0.1


def test_images_a_little_off_real_ones_are_flagged(digits: DataSet) -> None:
    members, others = matched_samples(digits.train, digits.test, stream(0))
    noise = 20 * torch.randn(members.images[:80].shape, generator=stream(1))
    blurred = (members.images[:80] + noise).clamp(0, 255).to(torch.uint8)
    close = Records(blurred, members.labels[:80], 10, members.normalisation)
    assert compare(close, members, others).nearer.low > 0.9


def test_independent_images_give_an_interval_with_a_half(digits: DataSet) -> None:
    order = torch.randperm(len(digits.test), generator=stream(7))
    free, rest = digits.test[order[:100]], digits.test[order[100:]]
    members, others = matched_samples(digits.train, rest, stream(1))
    found = compare(free, members, others, confidence=0.99)
    assert found.nearer.low < 0.5 < found.nearer.high and 20 < found.votes <= 100


def test_without_classes_in_step_a_client_of_one_class_would_seem_to_leak_records(digits: DataSet) -> None:
    order = torch.randperm(len(digits.test), generator=stream(8))
    free, rest = digits.test[order[:150]].of_class(3), digits.test[order[150:]]
    ours = digits.train.of_class(3)
    wrong = compare(free, ours, digits.train[: len(ours)])
    assert wrong.nearer.low > 0.5
    right = compare(free, *matched_samples(ours, rest, stream(2)), confidence=0.99)
    assert right.nearer.low < 0.5 < right.nearer.high


def test_the_interval_covers_a_half_as_often_as_it_says_however_few_records_are_near() -> None:
    """200 images, 8 records: a plain binomial would take images with the same nearest record for independent."""
    missed = plain = 0
    for run in range(300):
        found = compare(made(200, 3 * run, 15.0), made(4, 3 * run + 1), made(4, 3 * run + 2), confidence=0.9)
        missed += not found.nearer.low <= 0.5 <= found.nearer.high
        alone = share_of(found.nearer.value, 200, 0.9)
        plain += not alone.low <= 0.5 <= alone.high
        assert 1 <= found.votes <= 8
    # Kish's number is exact for the variance, the binomial shape is not; 300 coins of 0.1 spread by 0.017
    assert missed / 300 < 0.1 + 4 * 0.017 and plain / 300 > 0.4


def test_ties_are_left_out() -> None:
    images, far = made(10, 0), made(10, 2)
    same = compare(images, images, images)
    assert (same.votes, same.nearer.value, same.nearer.low, same.nearer.high) == (0, 0.5, 0, 1)
    half = Records(torch.cat([images.images[:5], far.images[5:]]), images.labels, 2, images.normalisation)
    found = compare(images, images, half)  # five images are in both sets, five in the members only
    assert found.nearer.value == 1 and found.votes == 5


def test_votes_by_hand() -> None:
    """Of six images three are nearest to one member, one to another and two to one other record: 36 / (9 + 1 + 4)."""
    levels = torch.tensor([0, 1, 2, 50, 100, 101, 0, 50, 100, 255]).to(torch.uint8)
    every = Records(levels[:, None, None, None], torch.zeros(10).long(), 2, Normalisation((0.5,), (0.3,)))
    found = compare(every[:6], every[6:8], every[8:])
    assert found.nearer.value == pytest.approx(4 / 6) and found.votes == pytest.approx(36 / 14)


def test_sets_are_drawn_with_the_same_classes(digits: DataSet) -> None:
    ours = digits.train.of_class(4)
    members, others = matched_samples(ours, digits.test, stream(0))
    assert torch.equal(members.class_counts(), others.class_counts())
    assert len(members) == min(len(ours), len(digits.test.of_class(4))) and set(members.labels.tolist()) == {4}
    assert len(members.images.flatten(1).unique(dim=0)) == len(members)
    again, _ = matched_samples(ours, digits.test, stream(0))
    assert torch.equal(again.images, members.images)
    assert not torch.equal(matched_samples(ours, digits.test, stream(1))[0].images, members.images)


def test_real_images_are_recognised_and_noise_is_not(digits: DataSet) -> None:
    model = network(digits)
    SGD(epochs=15).fit(model, digits.train, stream(3))  # far from the limit, whatever the processor rounds
    real = recognised(model, digits.test)
    assert real.low > 0.85 and real.high <= 1
    noise = torch.randint(256, (300, 1, 8, 8), generator=stream(4), dtype=torch.uint8)
    drawn = torch.randint(10, (300,), generator=stream(5))
    chance = recognised(model, Records(noise, drawn, 10, digits.train.normalisation), confidence=0.999)
    assert chance.low < 0.1 < chance.high


def test_intervals_are_those_of_clopper_and_pearson() -> None:
    found = share_of(0.3, 10)
    assert (found.low, found.high) == pytest.approx((beta.ppf(0.025, 3, 8), beta.ppf(0.975, 4, 7)))
    assert share_of(0.0, 10).low == 0 and share_of(1.0, 10).high == 1
    assert share_of(1.0, 10).low == pytest.approx(0.025**0.1)
    assert share_of(0.5, 100).low > share_of(0.5, 10.5).low > share_of(0.5, 10).low


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nearest(made(2, 0), made(3, 1), 4), "k is 4 of 3 records"),
        (lambda: nearest(made(2, 0), made(3, 1), 0), "k is 0"),
        (lambda: compare(made(2, 0), made(3, 1), made(4, 2)), "3 members and 4 other records"),
        (lambda: matched_samples(made(2, 0), made(0, 0), stream(0)), "2 members and 0 pool records share no class"),
        (lambda: share_of(1.1, 10), "share 1.1"),
        (lambda: share_of(0.5, 10, 1.0), "confidence 1.0"),
        (lambda: recognised(nn.Flatten(), made(0, 0)), "there are 0 images"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_images_of_another_task_are_refused(digits: DataSet) -> None:
    with pytest.raises(ValueError, match="must have the same shape"):
        nearest(made(2, 0), digits.train)
