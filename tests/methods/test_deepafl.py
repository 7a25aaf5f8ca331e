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
from torch import Tensor, nn

from fedstill.base.records import Examples
from fedstill.base.seeds import Simulated, stream
from fedstill.data.sources import DataSet
from fedstill.methods.deepafl import DeepAFL, _rows
from fedstill.methods.parts.feature_sums import Total, add_up
from fedstill.methods.parts.moments import Sums
from fedstill.models.residual import Residual, random_layer
from fedstill.privacy import rowwise
from fedstill.privacy.accounting import gaussian_epsilon, release_noise
from fedstill.privacy.second_moments import SecondMoments
from fedstill.protocol import Released, Summation

TINY: dict[str, Any] = {
    "extractor": {"pretrain": "none"},
    "space": {"dims": 8},
    "blocks": 3,
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


def trained(few: DataSet, method: DeepAFL, split: str, folder: Path) -> nn.Module:
    parts = [(part.numpy(), part[:0].numpy()) for part in splits(few.train.labels)[split]]
    fed = small.world(method, few, folder, parts, small.noise_images(few), local_test=False).federation
    return method.server(fed)


@pytest.mark.parametrize("quantile", [1.0, 0.5])
@pytest.mark.parametrize("split", ["one client", "a class each", "uneven"])
def test_the_network_is_the_paper_s_on_pooled_records(
    split: str, quantile: float, digits: DataSet, tmp_path: Path
) -> None:
    few = replace(digits, train=digits.train[:300], test=digits.test[:50])
    method = DeepAFL(**TINY, epsilon=None, quantile=quantile)
    model = trained(few, method, split, tmp_path)
    net: Any = model[1]  # type: ignore[index]
    with torch.no_grad():
        mapped = model[0](few.train.inputs()).double().numpy()  # type: ignore[index]
    u = mapped / np.sqrt(1 - method.bias**2) * np.sqrt(8)  # rows of the length sqrt(p) at most
    x = np.tanh(u @ net.first.numpy().T + net.first_bias.numpy())
    heads, maps = by_the_paper(x, np.eye(10)[few.train.labels.numpy()], net, method)
    assert near(net.head.T, heads[-1], 1e-5)  # inputs here are float32's
    for t, found in enumerate(maps):
        assert near((net.up[t] @ net.down[t]).T, found, 1e-5)
    with torch.no_grad():
        logits = model(few.test.inputs())
    assert float((logits.argmax(1) == few.test.labels).float().mean()) > 0.7
