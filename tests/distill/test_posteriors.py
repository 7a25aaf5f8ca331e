"""Layers' posteriors against per-record gradients, loops over positions and dense matrices of all weights."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from fedstill.base.records import Examples
from fedstill.base.seeds import isolated, stream
from fedstill.distill.posteriors import (
    LayerPosterior,
    damped,
    fisher_factors,
    layers,
    packed,
    product_mean,
    unpacked,
)
from fedstill.protocol import state

SHAPE, CLASSES = (2, 6, 5), 3


class Small(nn.Module):
    """Two convolutions, of which one has strides, no bias and uneven padding, a norm and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 2, (3, 2), stride=2, padding=(1, 0), bias=False)
        self.hidden = nn.Linear(12, 4)
        self.last = nn.Linear(4, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.tanh(self.norm(self.first(x)))))
        return torch.tanh(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.features(x))
        return logits


def network(seed: int = 0) -> Small:
    with isolated(seed):
        return Small().double()


def examples(number: int, seed: int = 1) -> Examples:
    rng = stream(seed, "examples")
    x = torch.randn(number, *SHAPE, generator=rng, dtype=torch.float64)
    return Examples(x, torch.randint(0, CLASSES, (number,), generator=rng))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of one record's loss in every parameter."""
    loss = cross_entropy(model.eval()(x[None]), y[None])
    found = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


def test_the_layers_are_those_with_factors() -> None:
    model = network()
    assert [(one.name, one.inputs, one.outputs) for one in layers(model, SHAPE)] == [
        ("first", 19, 3),
        ("second", 18, 2),
        ("hidden", 13, 4),
        ("last", 5, 3),
    ]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = nn.Conv2d(2, 2, 3, groups=2)
            self.same = nn.Conv2d(2, 2, 3, padding="same")
            self.mirrored = nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")
            self.twice, self.idle, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.tied, self.twin, self.able = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.frozen.requires_grad_(False)
            self.twin.weight = self.tied.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.grouped(self.same(self.mirrored(x))).flatten(1)[:, :3]
            logits: Tensor = self.able(self.twin(self.tied(self.frozen(self.twice(self.twice(x))))))
            return logits

    odd = Odd()
    assert [one.name for one in layers(odd, SHAPE)] == ["able"]
    assert odd.training and not any(module._forward_hooks for module in odd.modules())


def test_of_one_record_the_factors_of_a_linear_layer_are_its_gradient_twice() -> None:
    model, data = network(), examples(1)
    layer = layers(model, SHAPE)
    for (a, b), one in list(zip(fisher_factors(model, data, layer), layer, strict=True))[2:]:
        slope = one.matrix(gradients(model, data.inputs()[0], data.labels[0]))
        outer = torch.outer(slope.flatten(), slope.flatten())  # W row by row: B varies slowest
        torch.testing.assert_close(torch.kron(b, a), outer, rtol=1e-10, atol=1e-14)


def test_the_factors_are_those_of_gradients_record_by_record() -> None:
    """300 records are more than a pass has, so sums over passes are tested too."""
    model, data = network(), examples(300)
    a, b = fisher_factors(model, data, layers(model, SHAPE))[-1]
    expected = torch.zeros(CLASSES, CLASSES).double()
    mean_input = torch.zeros(5, 5).double()
    for x, y in zip(data.inputs(), data.labels, strict=True):
        slope = gradients(model, x, y)
        expected += torch.outer(slope["last.bias"], slope["last.bias"]) / 300
        row = torch.cat([model.features(x[None])[0].detach(), torch.ones(1).double()])
        mean_input += torch.outer(row, row) / 300
    torch.testing.assert_close(b, expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(a, mean_input, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_factors_of_a_convolution_are_sums_over_its_positions(name: str) -> None:
    model, data = network().eval(), examples(4)
    found = layers(model, SHAPE)
    at = [one.name for one in found].index(name)
    conv = found[at].module
    assert isinstance(conv, nn.Conv2d) and isinstance(conv.padding, tuple)
    seen: dict[str, Tensor] = {}
    handle = conv.register_forward_hook(lambda _module, args, output: seen.update(x=args[0], z=output))
    loss = cross_entropy(model(data.inputs()), data.labels, reduction="sum")
    handle.remove()
    (slopes,) = torch.autograd.grad(loss, seen["z"])
    height, width = slopes.shape[2:]
    (up, left), (down, right) = conv.padding, conv.stride
    image = pad(seen["x"], (left, left, up, up)).detach()
    positions = height * width
    a = torch.zeros(found[at].inputs, found[at].inputs).double()
    b = torch.zeros(found[at].outputs, found[at].outputs).double()
    total = torch.zeros(found[at].outputs, found[at].inputs).double()
    rows, columns = (int(side) for side in conv.kernel_size)
    for i in range(4):
        for h in range(height):
            for w in range(width):
                top, start = h * int(down), w * int(right)
                row = image[i, :, top : top + rows, start : start + columns].flatten()
                row = row if conv.bias is None else torch.cat([row, torch.ones(1).double()])
                a += torch.outer(row, row) / (4 * positions**2)
                b += torch.outer(slopes[i, :, h, w], slopes[i, :, h, w]) * positions / 4
                total += torch.outer(slopes[i, :, h, w], row)
    weights = torch.autograd.grad(
        cross_entropy(model(data.inputs()), data.labels, reduction="sum"), list(conv.parameters())
    )
    names = [f"{name}.{own}" for own, _ in conv.named_parameters()]
    torch.testing.assert_close(total, found[at].matrix(dict(zip(names, weights, strict=True))), rtol=1e-10, atol=1e-14)
    for mine, theirs in zip(fisher_factors(model, data, found)[at], (a, b), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def test_records_do_not_act_on_each_other_and_the_model_stays_as_it_was() -> None:
    """Batch norms have their running statistics: the factors of all records are the mean of each one's."""
    model, data = network().train(), examples(5)
    model(data.inputs())  # statistics unlike those at the start
    before = {name: value.clone() for name, value in state(model).items()}
    found = layers(model, SHAPE)
    whole = fisher_factors(model, data, found)
    alone = [fisher_factors(model, Examples(data.x[i : i + 1], data.labels[i : i + 1]), found) for i in range(5)]
    for at, pair in enumerate(whole):
        for side, factor in enumerate(pair):
            mean = torch.stack([one[at][side] for one in alone]).mean(0)
            torch.testing.assert_close(factor, mean, rtol=1e-10, atol=1e-14)
    assert model.training and all(torch.equal(value, before[name]) for name, value in state(model).items())


def test_a_matrix_and_its_names_are_inverse_and_so_are_packing_and_unpacking() -> None:
    model = network()
    found = layers(model, SHAPE)
    for one in found:
        named = one.named(one.matrix(state(model)))
        assert all(torch.equal(value, state(model)[name]) for name, value in named.items()) and named
    factors = fisher_factors(model, examples(3), found)
    vector = packed(factors)
    assert len(vector) == sum(one.numbers for one in found)
    for before, after in zip(factors, unpacked(vector, found), strict=True):
        assert all(torch.equal(x.triu(), y.triu()) and torch.equal(y, y.T) for x, y in zip(before, after, strict=True))


def posteriors(number: int, *, seed: int = 3, damping: float = 1e-3) -> list[list[LayerPosterior]]:
    """Of clients with networks and records of their own: for each layer, one of each client."""
    clients = []
    for k in range(number):
        model, records = network(seed + k), 10 + 7 * k
        found = layers(model, SHAPE)
        factors = fisher_factors(model, examples(records, seed + k), found)
        clients.append(
            [
                LayerPosterior(records, one.matrix(state(model)), *(damped(factor, damping) for factor in pair))
                for one, pair in zip(found, factors, strict=True)
            ]
        )
    return [list(layer) for layer in zip(*clients, strict=True)]


def block_diagonal(of: Sequence[Tensor]) -> Tensor:
    return torch.block_diag(*of)


def dense_mean(clients: list[list[LayerPosterior]]) -> list[Tensor]:
    """From the precision matrix of all weights of each client: sums of n_k F_k and of n_k F_k w_k."""
    number = len(clients[0])
    whole: Any = 0
    right: Any = 0
    for k in range(number):
        own = [layer[k] for layer in clients]
        precision = own[0].records * block_diagonal([torch.kron(one.outputs, one.inputs) for one in own])
        whole = whole + precision
        right = right + precision @ torch.cat([one.mean.flatten() for one in own])
    weights = torch.linalg.solve(whole, right)
    sizes = [layer[0].mean.numel() for layer in clients]
    parts = zip(weights.split(sizes), clients, strict=True)
    return [part.view_as(layer[0].mean) for part, layer in parts]


def test_the_mean_is_that_of_the_dense_precisions_of_all_weights() -> None:
    clients = posteriors(4)
    for layer, expected in zip(clients, dense_mean(clients), strict=True):
        found = product_mean(layer)
        assert found.residual < 1e-11
        torch.testing.assert_close(found.mean, expected, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(product_mean(layer, exact=False).mean, expected, rtol=1e-3, atol=1e-3)


def test_the_approximation_has_the_mean_factors_in_place_of_the_clients() -> None:
    for layer in posteriors(3):
        records = torch.tensor([one.records for one in layer]).double()
        shares = records / records.sum()
        a = sum(p * one.inputs for p, one in zip(shares, layer, strict=True))
        b = sum(p * one.outputs for p, one in zip(shares, layer, strict=True))
        z = sum(p * one.outputs @ one.mean @ one.inputs for p, one in zip(shares, layer, strict=True))
        expected = torch.linalg.inv(b) @ z @ torch.linalg.inv(a)
        torch.testing.assert_close(product_mean(layer, exact=False).mean, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("exact", [True, False])
def test_one_client_keeps_its_weights_and_equal_factors_give_the_mean_by_records(exact: bool) -> None:
    for layer in posteriors(3):
        torch.testing.assert_close(product_mean(layer[:1], exact=exact).mean, layer[0].mean, rtol=1e-9, atol=1e-9)
        equal = [LayerPosterior(one.records, one.mean, layer[0].inputs, layer[0].outputs) for one in layer]
        expected = sum(one.records * one.mean for one in layer) / sum(one.records for one in layer)
        torch.testing.assert_close(product_mean(equal, exact=exact).mean, expected, rtol=1e-9, atol=1e-9)


def test_much_damping_gives_the_mean_by_records_too() -> None:
    """Every factor is then nearly the same multiple of the identity: 1e3 beside entries below 100."""
    for layer in posteriors(3, damping=1e12):
        expected = sum(one.records * one.mean for one in layer) / sum(one.records for one in layer)
        torch.testing.assert_close(product_mean(layer).mean, expected, rtol=0, atol=1e-3)


def test_a_factor_that_no_client_can_have_loses_its_negative_eigenvalues() -> None:
    good = torch.diag(torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64))
    assert torch.equal(damped(good, 0.04), good + 0.2 * torch.eye(3).double())
    bad = torch.diag(torch.tensor([2.0, -5.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(damped(bad, 0.04), good + 0.2 * torch.eye(3).double(), rtol=1e-12, atol=1e-12)


def test_singular_factors_are_refused_with_the_remedy() -> None:
    nothing = torch.zeros(2, 2).double()
    with pytest.raises(ValueError, match=r"side 2, up to 0, is not positive definite; take a larger --damping"):
        product_mean([LayerPosterior(3, nothing, nothing, nothing)])
