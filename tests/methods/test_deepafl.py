"""DeepAFL: its network is the paper's on pooled records, whoever holds them, and its releases share one epsilon."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from scipy.special import erf
from torch import Tensor

from fedstill.base.records import Examples
from fedstill.base.seeds import Simulated, stream
from fedstill.data.sources import DataSet
from fedstill.distill.public_map import PublicMap
from fedstill.methods.deepafl import Built, DeepAFL, hidden_rows
from fedstill.methods.parts.feature_sums import Total, add_up
from fedstill.methods.parts.moments import Sums
from fedstill.models.residual import Residual, random_layer
from fedstill.privacy import rowwise
from fedstill.privacy.accounting import gaussian_epsilon, release_noise
from fedstill.privacy.logistic import extend
from fedstill.privacy.second_moments import SecondMoments
from fedstill.protocol import Released, Summation

TINY: dict[str, Any] = {
    "extractor": {"pretrain": "none"},
    "space": {"dims": 8},
    "rounds": 4,
    "gain": 1.3,
    "width": 24,
    "expanded": 20,
    "ridge": 0.01,
    "block_ridge": 0.02,
    "precision": "double",
}
Array = np.ndarray[Any, Any]


def gelu(z: Array) -> Array:
    found: Array = z * (1 + erf(z / math.sqrt(2))) / 2
    return found


def shortened(z: Array, radius: float) -> Array:
    found: Array = z * np.minimum(1, radius / np.linalg.norm(z, axis=1, keepdims=True))
    return found


def sandwiched(ff: Array, wrf: Array, w: Array, gamma: float) -> Array:
    """The authors' closed form: both matrices are diagonalised in full."""
    sw, u = np.linalg.eigh(w @ w.T)
    sf, v = np.linalg.eigh(ff)
    found: Array = (u @ ((u.T @ wrf @ v) / (gamma + np.outer(sw, sf))) @ v.T).T
    return found


def by_the_paper(x: Array, y: Array, net: Residual, method: DeepAFL) -> tuple[list[Array], list[Array]]:
    """Heads and maps on all records at once: X_0, then block by block a head, its residuals, and a map of F."""
    heads, maps, d = [], [], x.shape[1]
    for t in range(method.blocks + 1):
        f = gelu(x @ net.layers[t].numpy().T + net.biases[t].numpy()) if t < method.blocks else x[:, :0]
        z = shortened(np.hstack([x, f]), float(net.radii[t]))
        x, f = z[:, :d], z[:, d:]
        w = np.linalg.inv(x.T @ x + method.ridge * np.eye(d)) @ (x.T @ y)
        heads.append(w)
        if t < method.blocks:
            r = y - x @ w
            maps.append(sandwiched(f.T @ f, w @ r.T @ f, w, method.block_ridge))
            x = x + f @ maps[-1]
    return heads, maps


def near(found: Any, expected: Any, rel: float) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    return bool(np.abs(found - expected).max() <= rel * np.abs(expected).max())


def splits(labels: Tensor) -> dict[str, list[Tensor]]:
    n = len(labels)
    return {
        "one client": [torch.arange(n)],
        "a class each": [torch.nonzero(labels == c).flatten() for c in range(10)],
        "uneven": list(torch.randperm(n, generator=stream(0, "order")).tensor_split([3, 4, 200])),
    }


def inputs(method: DeepAFL, fed: Any, few: DataSet) -> Tensor:
    """The rows that clients compute of their records, of the length 1.3 sqrt(p) at most; in float64."""
    net, map_ = fed.new_model(), PublicMap(dims=8)
    features = map_.fit(net, fed.public, fed.rng("public map"))
    found = extend(features.rows(net, few.train), features.radius, method.bias)[:, :-1]
    return found * 1.3 * math.sqrt(8 / (1 - method.bias**2))


@pytest.mark.parametrize("quantile", [1.0, 0.5])
@pytest.mark.parametrize("split", ["one client", "a class each", "uneven"])
def test_the_network_is_the_paper_s_on_pooled_records(
    split: str, quantile: float, digits: DataSet, tmp_path: Path
) -> None:
    few = replace(digits, train=digits.train[:300], test=digits.test[:50])
    method = DeepAFL(**TINY, epsilon=None, quantile=quantile)
    parts = [(part.numpy(), part[:0].numpy()) for part in splits(few.train.labels)[split]]
    fed = small.world(method, few, tmp_path, parts, small.noise_images(few), local_test=False).federation
    model: Any = method.server(fed)
    net = model[1]
    x = np.tanh(inputs(method, fed, few).numpy() @ net.first.numpy().T + net.first_bias.numpy())
    heads, maps = by_the_paper(x, np.eye(10)[few.train.labels.numpy()], net, method)
    factor = float(net.head.norm()) / np.linalg.norm(heads[-1])  # the temperature of the scores
    assert factor > 2 and near(net.head.T / factor, heads[-1], 1e-9)
    for t, found in enumerate(maps):
        assert near((net.up[t] @ net.down[t]).T, found, 1e-9)
    with torch.no_grad():
        logits = model(few.test.inputs())
    assert float((logits.argmax(1) == few.test.labels).float().mean()) > 0.7


def sums_of(x: Tensor, targets: Tensor, radius: float, method: DeepAFL, classes: int) -> Total:
    """What the server adds up of one client without noise."""
    mechanism = SecondMoments(
        num_classes=classes, dims=x.shape[1], radius=radius, noise_multiplier=0.0, bias=method.bias
    )
    exact = mechanism([(x, targets)], Simulated(stream(0, "noise")))
    total = Sums(second=Released(exact.second.double()), first=Released(exact.first.double()))
    return add_up(Summation(total, [0]), method, 1e-5, torch.device("cpu"))


def test_a_number_less_its_mean_is_one_output_of_the_same_formulas() -> None:
    rng, method = stream(0, "rows"), DeepAFL(**TINY, epsilon=None)
    x = torch.randn(200, method.width, generator=rng).double().tanh()
    t = (0.4 + 0.3 * x[:, 0] - 0.2 * x[:, 1] * x[:, 2]).clamp(-1, 1)
    known = method.unsolved(1)
    known["radii"] += 50.0
    net = method.network(5, Built.after(0, known, 7))
    f = torch.nn.functional.gelu(x @ net.layers[0].T + net.biases[0])
    found = method.next_block(sums_of(torch.cat([x, f], 1), t, 50.0, method, 1), known, 0)
    centred = (t - t.mean())[:, None].numpy()
    heads, maps = by_the_paper(x.numpy(), centred, method.network(5, Built.after(3, known, 7)), method)
    assert near(found["head"].T, heads[0], 1e-9)
    assert near((found["up"][0] @ found["down"][0]).T, maps[0], 1e-9)
    model = method.network(5, Built.after(0, known, 7), found)
    u = torch.randn(9, 5, generator=rng)
    said = model.rows(u)[:, : method.width] @ found["head"].T + t.mean()
    assert near(model(u), said.numpy(), 1e-6)


# --- rows


@pytest.mark.parametrize(("width", "expanded", "blocks"), [(24, 20, 2), (13, 7, 3), (64, 96, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_a_row_depends_on_its_record_alone_to_the_bit(width: int, expanded: int, blocks: int, last: bool) -> None:
    rng = stream(0, "network")
    many = blocks if last else blocks + 1
    first, first_bias = random_layer(11, width, 0, 0)
    net = Residual(
        first=first,
        first_bias=first_bias,
        layers=torch.randn(many, expanded, width, generator=rng),
        biases=torch.randn(many, expanded, generator=rng),
        down=torch.randn(blocks, 10, expanded, generator=rng),
        up=torch.randn(blocks, width, 10, generator=rng),
        radii=torch.rand(blocks + 1, generator=rng) + 1,
    )
    x = torch.randn(97, 11, generator=rng)
    whole = rowwise.features(hidden_rows, [net], Examples(x, x[:, 0]))
    assert whole.shape == (97, width if last else width + expanded)
    order = torch.randperm(97, generator=rng)
    for some in (torch.arange(1, 97), torch.arange(96), order, torch.tensor([33])):
        assert torch.equal(rowwise.features(hidden_rows, [net], Examples(x[some], x[some, 0])), whole[some])
    assert float(whole.norm(dim=1).max()) <= float(net.radii[-1]) * (1 + 1e-6)


def test_random_layers_are_those_of_torch_s_linear_layers_and_no_two_are_alike() -> None:
    weight, bias = random_layer(400, 300, 3, 1)
    like = torch.nn.Linear(400, 300)
    assert weight.shape == like.weight.shape and bias.shape == like.bias.shape
    for drawn in (weight, bias):
        assert float(drawn.abs().max()) <= 0.05 and float(drawn.std()) == pytest.approx(0.05 / math.sqrt(3), rel=0.06)
    others = [random_layer(400, 300, *key)[0] for key in ((3, 2), (4, 1))]
    assert torch.equal(random_layer(400, 300, 3, 1)[0], weight)
    assert not any(torch.equal(other, weight) for other in others)


# --- privacy


def test_the_sums_of_all_blocks_cost_epsilon_together(digits: DataSet, tmp_path: Path) -> None:
    few = replace(digits, train=digits.train[:200], test=digits.test[:50])
    small_ones = {**TINY, "precision": "single", "rounds": 3, "width": 8, "expanded": 8}
    _, fed = small.run(DeepAFL(**small_ones, epsilon=1.0), few, tmp_path, public=small.noise_images(few))
    found = fed.guarantee()
    assert found.holds and found.unit == "record" and found.epsilon == pytest.approx(1.0, rel=1e-3)
    each = release_noise(1.0, fed.delta) * math.sqrt(3)
    assert gaussian_epsilon(each, fed.delta) < 0.6  # what one of the three costs
    assert DeepAFL(**TINY).releases == 4


def test_noise_adds_to_both_penalties_its_own_largest_eigenvalue() -> None:
    rng, method = stream(0, "rows"), DeepAFL(**TINY)
    z = torch.randn(500, method.width + method.expanded, generator=rng).double()
    labels, d, std = (z[:, 0] + z[:, 30] > 0).long(), method.width, 0.3
    known = method.unsolved(2)
    known["radii"] += 20.0
    found = method.next_block(replace(sums_of(z, labels, 20.0, method, 2), std=std), known, 0)
    x, f, y = z[:, :d].numpy(), z[:, d:].numpy(), np.eye(2)[labels.numpy()]
    spread = [method.noise_ridge * std * math.sqrt(2 * size) * 20**2 / (1 - method.bias**2) for size in f.shape[1:]]
    (of_f,), of_x = spread, spread[0] * math.sqrt(d / method.expanded)
    w = np.linalg.solve(x.T @ x + (method.ridge + of_x) * np.eye(d), x.T @ y)
    assert near(found["head"].T, w, 1e-9)
    a = sandwiched(f.T @ f + of_f * np.eye(method.expanded), w @ (y - x @ w).T @ f, w, method.block_ridge)
    assert near((found["up"][0] @ found["down"][0]).T, a, 1e-9)


def test_an_upload_that_is_too_large_is_refused_with_the_settings_that_make_it_smaller(
    digits: DataSet, tmp_path: Path
) -> None:
    method = DeepAFL(**{**TINY, "width": 3000, "expanded": 3000})
    parts, public = small.of_sizes(20, 20), small.noise_images(digits)
    fed = small.world(method, digits, tmp_path, parts, public, local_test=False).federation
    fed.max_bytes = 10**8
    with pytest.raises(ValueError, match=r"would send 145 MB.*the limit is 100 MB; use a smaller --width, --expanded"):
        method.server(fed)
