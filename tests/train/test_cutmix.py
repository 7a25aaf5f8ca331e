"""CutMix: the rectangle, its partners and the loss of both labels."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedstill.base.seeds import stream
from fedstill.train.augment import CutMix


def same(x: Tensor, rng: torch.Generator) -> Tensor:
    return x


def test_each_image_gets_one_rectangle_of_its_partner_and_the_loss_its_share() -> None:
    x = torch.arange(6.0)[:, None, None, None].expand(6, 1, 12, 10)  # image k is k everywhere
    logits, labels = torch.randn(6, 6, generator=stream(0)), torch.arange(6)
    shares = []
    for seed in range(200):
        mix = CutMix(1.0, same)
        found = mix.augment(x, stream(seed))
        target = torch.zeros(6, 6)
        for k, image in enumerate(found[:, 0]):
            others = image != k
            if others.any():
                rows, columns = others.any(1).nonzero().flatten(), others.any(0).nonzero().flatten()
                box = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                assert len(box.unique()) == 1 and others.sum() == box.numel()
            target[k] = one_hot(image.long().flatten(), 6).float().mean(0)
        expected = cross_entropy(logits, target)  # probabilities in proportion to the areas
        torch.testing.assert_close(mix.loss(logits, found, labels), expected)
        shares.append(1 - mix.kept)
    assert min(shares) < 0.05 < 0.5 < max(shares)
    assert torch.equal(x[:, 0, 0, 0], torch.arange(6.0))  # the batch itself has not changed


@pytest.mark.parametrize(("probability", "mixed"), [(0.0, 0), (0.5, 100), (1.0, 200)])
def test_the_probability_is_that_of_a_batch(probability: float, mixed: int) -> None:
    mix, count = CutMix(probability, same), 0
    for seed in range(200):
        mix.augment(torch.rand(4, 1, 8, 8), stream(seed))
        count += mix.partners is not None
    assert abs(count - mixed) <= (30 if probability == 0.5 else 0)  # four deviations


def test_the_loss_of_a_batch_that_is_not_mixed_is_the_cross_entropy() -> None:
    mix, logits, labels = CutMix(0.0, same), torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    mix.augment(torch.rand(4, 1, 8, 8), stream(0))
    assert mix.loss(logits, torch.empty(0), labels) == cross_entropy(logits, labels)
