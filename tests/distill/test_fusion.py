"""FAFI's losses and fused network against formulas written out one pair at a time."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fedstill import models
from fedstill.base.seeds import isolated, stream
from fedstill.distill.fusion import (
    FusedModel,
    PrototypeNetwork,
    alignment_loss,
    prototypes,
    rebuilt,
    supervised_contrast,
)
from fedstill.protocol import state

LABELS = torch.tensor([0, 1, 1, 2])


def unit_features() -> Tensor:
    x = torch.randn(8, 5, generator=stream(0), dtype=torch.float64)
    return normalize(x).requires_grad_()


def network(seed: int) -> nn.Module:
    with isolated(seed):
        return models.build("dense-mnist", (1, 8, 8), 3).eval()


def contrast_by_hand(z: Tensor, labels: list[int], temperature: float) -> Tensor:
    total = z.new_zeros(())
    for i, label in enumerate(labels):
        others = [k for k in range(len(labels)) if k != i]
        denominator = sum((z[i] @ z[k] / temperature).exp() for k in others)
        positives = [k for k in others if labels[k] == label]
        for p in positives:
            total = total - ((z[i] @ z[p] / temperature).exp() / denominator).log() / len(positives)
    return total / len(labels)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_the_contrast_and_its_gradient_are_those_of_the_sum_over_pairs(temperature: float) -> None:
    z, labels = unit_features(), LABELS.repeat(2)
    found, expected = supervised_contrast(z, labels, temperature), contrast_by_hand(z, labels.tolist(), temperature)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)  # float64, sums in another order
    gradients = [torch.autograd.grad(loss, z)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_features_alone_in_their_class_add_nothing() -> None:
    z = unit_features()[:3].detach()
    assert float(supervised_contrast(z, torch.tensor([0, 1, 2]), 0.1)) == 0
    pair = supervised_contrast(z, torch.tensor([0, 0, 2]), 0.1)
    torch.testing.assert_close(pair, contrast_by_hand(z, [0, 0, 2], 0.1), rtol=1e-12, atol=0)


def test_the_loss_is_the_sum_of_the_authors_four_terms() -> None:
    z = unit_features()
    means = torch.randn(3, 5, generator=stream(1), dtype=torch.float64).requires_grad_()
    y = LABELS.repeat(2)
    classifier, pull = cross_entropy(z @ means.T, y), cross_entropy(z @ means.T / 1.0, y)
    apart = -(means @ means.T).log_softmax(1).diagonal().mean()
    expected = classifier + contrast_by_hand(z, y.tolist(), 0.07) + apart + pull
    found = alignment_loss(z, means, LABELS, 0.07)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for own, theirs in zip(*(torch.autograd.grad(loss, (z, means)) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


def test_the_last_layer_holds_the_prototypes_and_the_features_have_length_1() -> None:
    net = network(0)
    x = torch.rand(4, 1, 8, 8, generator=stream(2))
    features, means = PrototypeNetwork(net)(x)
    assert means is prototypes(net)
    assert means.shape == (3, features.shape[1])
    torch.testing.assert_close(features.norm(dim=1), torch.ones(4))
    with pytest.raises(ValueError, match="Conv2d has 0 linear layers"):
        prototypes(nn.Conv2d(1, 1, 3))


@pytest.mark.parametrize("informative", [False, True])
def test_the_fused_logits_are_the_weighted_features_against_the_mean_prototypes(informative: bool) -> None:
    nets, shares = [network(seed) for seed in range(3)], torch.tensor([0.5, 0.3, 0.2])
    noise = torch.randn(1, 1, 8, 8, generator=stream(3)) if informative else None
    model = FusedModel(nets, shares, noise).eval()
    x = torch.rand(4, 1, 8, 8, generator=stream(2))
    with torch.no_grad():
        for i, image in enumerate(x):
            fused = torch.zeros(prototypes(nets[0]).shape[1])
            for net, share in zip(nets, shares.tolist(), strict=True):
                f = models.features(net, image[None])[0]
                if noise is not None:
                    g = models.features(net, noise)[0]
                    share *= 1 - float(f @ g) / math.sqrt(float(f @ f) * float(g @ g))
                fused += share * f
            means = sum(prototypes(net) for net in nets) / 3
            torch.testing.assert_close(model(x)[i], fused / fused.norm() @ means.T, rtol=1e-4, atol=1e-5)  # float32
        again = rebuilt(network(7), state(model)).eval()
        assert torch.equal(again(x), model(x))


def test_equal_features_have_equal_logits_whatever_the_shares() -> None:
    """The scaling to length 1 takes a common factor out, so weights that are equal for all clients change nothing."""
    net = network(0)
    x = torch.rand(4, 1, 8, 8, generator=stream(2))
    with torch.no_grad():
        one, other = (FusedModel([net, net], torch.tensor([s, s])).eval()(x) for s in (0.5, 0.125))
    torch.testing.assert_close(one, other)


def test_eval_mode_reaches_every_network_so_no_prediction_depends_on_the_batch() -> None:
    """In the authors' code it does not reach them (docs/methods/fafi.md, difference 10)."""
    with isolated(0):
        networks = [models.build("convnet:width=4,depth=1,norm=batch", (1, 8, 8), 3) for _ in range(2)]
        images = torch.randn(6, 1, 8, 8)
    model = FusedModel(networks, torch.full((2,), 0.5)).eval()
    torch.testing.assert_close(model(images)[:2], model(images[:2]))
    model.train()
    assert not torch.allclose(model(images)[:2], model(images[:2]))
