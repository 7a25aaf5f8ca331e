"""FENS's aggregator and server optimiser against its authors' formulas."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.seeds import isolated, stream
from fedstill.base.weights import flattened, load, load_flat
from fedstill.distill.stacking import Scaling, ServerAdam, StackedModel, aggregator, first_moments, rebuilt
from fedstill.protocol import state


def network(seed: int) -> nn.Module:
    with isolated(seed):
        return models.build("dense-mnist", (1, 8, 8), 3)


def test_the_aggregator_is_the_published_perceptron() -> None:
    """20 networks, 10 classes, d = 2: 200 inputs, 40 units; logits and gradients by hand."""
    with isolated(0):
        head = aggregator(20, 10, 2).double()
    w = {name: value.clone().requires_grad_() for name, value in state(head).items()}
    assert {name: tuple(value.shape) for name, value in w.items()} == {
        "0.weight": (40, 200),
        "0.bias": (40,),
        "2.weight": (10, 40),
        "2.bias": (10,),
    }
    x = torch.randn(6, 200, generator=stream(0), dtype=torch.float64)
    y = torch.arange(6)
    by_hand = (x @ w["0.weight"].T + w["0.bias"]).clamp_min(0) @ w["2.weight"].T + w["2.bias"]
    torch.testing.assert_close(head(x), by_hand, rtol=1e-12, atol=1e-12)  # float64, sums in another order
    loss = (by_hand.logsumexp(1) - by_hand[torch.arange(6), y]).mean()
    found = torch.autograd.grad(cross_entropy(head(x), y), list(head.parameters()))
    for own, theirs in zip(found, torch.autograd.grad(loss, list(w.values())), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_the_stacked_logits_are_in_the_networks_order_and_the_model_comes_back() -> None:
    networks = [network(seed).eval() for seed in range(3)]
    with isolated(9):
        model = StackedModel(networks, aggregator(3, 3, 2)).eval()
    x = torch.rand(4, 1, 8, 8, generator=stream(1))
    stacked = model.stack(x)
    for k, one in enumerate(networks):
        assert torch.equal(stacked[:, 3 * k : 3 * k + 3], one(x))
    again = rebuilt(network(7), state(model)).eval()
    assert torch.equal(again(x), model(x))


def test_a_model_comes_back_from_one_vector_and_another_length_is_refused() -> None:
    first, second = network(1), network(2)
    first(torch.rand(8, 1, 8, 8))  # moves running statistics and counts a batch
    load_flat(second, flattened(first))
    for name, value in state(first).items():
        assert torch.equal(state(second)[name], value)
    with pytest.raises(ValueError, match="a model of 3 values came; the network here has"):
        load_flat(second, torch.zeros(3))


def test_the_server_s_adam_is_the_published_one() -> None:
    """m = b1 m + (1 - b1) D, v = b2 v + (1 - b2) D^2, x += lr m / (sqrt v + 1e-3), moments from 0, no correction."""
    weights = {"a": torch.zeros(2, dtype=torch.float64)}
    moments = first_moments(weights)
    m, v, x = 0.0, 0.0, 0.0
    for value in (0.5, -2.0, 0.25):
        ServerAdam(lr=0.1).step(weights, moments, {"a": torch.full((2,), value)})
        m, v = 0.9 * m + 0.1 * value, 0.99 * v + 0.01 * value**2
        x += 0.1 * m / (v**0.5 + 1e-3)
        assert weights["a"].tolist() == pytest.approx([x, x], rel=1e-12)


def test_the_step_of_a_linear_aggregator_follows_the_gradient() -> None:
    weights: dict[str, Tensor] = {"a": torch.tensor([1.0, 1.0])}
    ServerAdam().step(weights, first_moments(weights), {"a": torch.tensor([0.0, -1.0])})
    assert weights["a"][0] == 1
    assert weights["a"][1] < 1


def test_an_aggregator_on_standardised_inputs_is_folded_and_its_gradient_is_the_chain_rule_s() -> None:
    x = 5 + 3 * torch.randn(40, 6, generator=stream(2), dtype=torch.float64)
    x[:, 2] = 7.0  # a constant input: shifted, not scaled
    parts = x.split((15, 25))
    scaling = Scaling.of_sums((len(part), part.sum(0).float(), part.square().sum(0).float()) for part in parts)
    torch.testing.assert_close(scaling.mean, x.mean(0).float())
    deviation = x.std(0, correction=0).float()
    deviation[2] = 1.0
    torch.testing.assert_close(scaling.deviation, deviation, rtol=1e-5, atol=1e-6)  # float32's sums
    with isolated(0):
        inner = aggregator(2, 3, 2).double()
    raw = aggregator(2, 3, 2).double()
    load(raw, scaling.folded(state(inner)))
    standardised = (x - scaling.mean) / scaling.deviation
    torch.testing.assert_close(raw(x), inner(standardised), rtol=1e-9, atol=1e-9)
    y = torch.arange(40) % 3
    for head, inputs in ((raw, x), (inner, standardised)):
        cross_entropy(head(inputs), y).backward()
    found = scaling.change({name: value.grad for name, value in raw.named_parameters() if value.grad is not None})
    for name, value in inner.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-9, atol=1e-12)


def test_no_scaling_changes_no_bit() -> None:
    weights = state(aggregator(2, 3, 2))
    none = Scaling(torch.zeros(6), torch.ones(6))
    for found in (none.folded(weights), none.change(weights)):
        assert all(torch.equal(found[name], value) for name, value in weights.items())
