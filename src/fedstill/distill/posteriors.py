"""Gaussian posteriors of networks' layers: Kronecker factors of their precisions, and the mean of a product of them.

Laplace's approximation with Kronecker-factored Fisher information: Martens, Grosse, "Optimizing neural networks with
Kronecker-factored approximate curvature", ICML 2015 (arXiv:1503.05671); Grosse, Martens, ICML 2016 (arXiv:1602.01407)
for convolutions; Ritter, Botev, Barber, ICLR 2018, for posteriors. The product over clients: Liu et al. 2024
(arXiv:2310.00339).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn.functional import unfold

from fedstill.base.records import Trainable, answers
from fedstill.evaluation import device_of, mode_of
from fedstill.ticks import tick
from fedstill.train.sgd import usual_loss

_BATCH = 128
"""Records of one pass."""
_TOLERANCE = 1e-12
"""Length of what conjugate gradients leave of an equation, relative to its right side."""
_MOST_STEPS = 2000
"""Steps of conjugate gradients."""


class Layer(NamedTuple):
    """A layer ``z = W a`` whose posterior has Kronecker factors; its bias is the last column of W, for the input 1."""

    name: str
    module: nn.Linear | nn.Conv2d

    @property
    def outputs(self) -> int:
        """Number of rows of W."""
        return int(self.module.weight.shape[0])

    @property
    def inputs(self) -> int:
        """Number of columns of W: a convolution's channels times the size of its kernel, and 1 for the bias."""
        return math.prod(self.module.weight.shape[1:]) + (self.module.bias is not None)

    @property
    def numbers(self) -> int:
        """Entries in the upper triangles of both factors."""
        return (self.inputs * (self.inputs + 1) + self.outputs * (self.outputs + 1)) // 2

    def matrix(self, weights: Mapping[str, Tensor]) -> Float64[Tensor, "outputs inputs"]:
        """W of a network's state."""
        parts = [weights[f"{self.name}.weight"].flatten(1)]
        if self.module.bias is not None:
            parts.append(weights[f"{self.name}.bias"][:, None])
        return torch.cat(parts, 1).double()

    def named(self, matrix: Float[Tensor, "outputs inputs"]) -> dict[str, Tensor]:
        """The entries of a state that W stands for."""
        columns = math.prod(self.module.weight.shape[1:])
        found = {f"{self.name}.weight": matrix[:, :columns].reshape(self.module.weight.shape)}
        return found | ({} if self.module.bias is None else {f"{self.name}.bias": matrix[:, -1]})

    def rows(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n positions inputs"]:
        """The inputs a of each record, one for each position of a convolution's output."""
        if isinstance(self.module, nn.Conv2d):
            conv = self.module
            assert isinstance(conv.padding, tuple), "`layers` leaves others out"
            rows = unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride).transpose(1, 2)
        else:
            rows = x.reshape(len(x), -1, x.shape[-1])
        if self.module.bias is None:
            return rows
        return torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], 2)


def layers(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """The model's layers that have Kronecker factors, in the order of its modules.

    These are linear ones and plain convolutions (no groups, zeros as padding) whose weights are trained, belong to no
    other layer and run once in a pass. ``shape`` is that of a record; ``model`` does not change.
    """
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    able = [
        Layer(name, module)
        for name, module in model.named_modules()
        if _is_able(module) and all(p.requires_grad and owners[id(p)] == 1 for p in module.parameters(recurse=False))
    ]
    if not able:
        return []
    with mode_of(model, training=False), torch.no_grad(), _passes(able) as seen:
        model(able[0].module.weight.new_zeros(1, *shape))
    return [layer for layer in able if len(seen[layer.name]) == 1]


def _is_able(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and isinstance(module.padding, tuple)
    return isinstance(module, nn.Linear)


@contextmanager
def _passes(of: Sequence[Layer]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Input and output of each layer in the passes inside, by name."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {layer.name: [] for layer in of}

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _module, args, output: seen[name].append((args[0].detach(), output))

    hooks = [layer.module.register_forward_hook(noting(layer.name)) for layer in of]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def fisher_factors(
    model: nn.Module, records: Trainable, of: Sequence[Layer]
) -> list[tuple[Float64[Tensor, "inputs inputs"], Float64[Tensor, "outputs outputs"]]]:
    """The factors A and B of each layer's empirical Fisher information, of one record on the mean.

    With a_it the layer's inputs for record i at position t of T (1 for a linear layer) and g_it the gradient of the
    record's loss in the layer's outputs there, the loss being that of its true label:
    ``A = mean_i sum_t a_it a_it^T / T^2`` and ``B = mean_i sum_t T g_it g_it^T``. Their Kronecker product is that of
    Grosse and Martens; how T is split between them is FedLPA's code's.

    Args:
        model: in eval mode while it runs, so that records do not act on each other.
        records: at least one.
        of: layers of ``model``.
    """
    device, labels, number = device_of(model, records), answers(records), len(records.labels)
    sums = [
        (torch.zeros(one.inputs, one.inputs).double(), torch.zeros(one.outputs, one.outputs).double()) for one in of
    ]
    with mode_of(model, training=False):
        for start in range(0, number, _BATCH):
            batch = slice(start, start + _BATCH)
            x, y = records.inputs(batch).to(device), labels[batch].to(device)
            with _passes(of) as seen:
                total = usual_loss(model(x), x, y) * len(x)
            caught = [seen[layer.name][0] for layer in of]
            gradients = torch.autograd.grad(total, [output for _, output in caught])
            for layer, (given, _), gradient, (a, b) in zip(of, caught, gradients, sums, strict=True):
                rows = layer.rows(given)
                slopes = gradient.flatten(2).transpose(1, 2) if gradient.ndim == 4 else gradient
                slopes = slopes.reshape(-1, layer.outputs)
                positions, rows = rows.shape[1], rows.reshape(-1, layer.inputs)
                a += (rows.T @ rows).cpu().double() / (number * positions**2)
                b += (slopes.T @ slopes).cpu().double() * (positions / number)
            tick("measuring curvature", min(start + _BATCH, number), number)
    return sums


def packed(factors: Sequence[tuple[Tensor, Tensor]]) -> Float[Tensor, " numbers"]:
    """The upper triangles of all factors, A before B, row by row, as one vector."""
    both = [matrix for pair in factors for matrix in pair]
    return torch.cat([matrix[tuple(torch.triu_indices(*matrix.shape))] for matrix in both] or [torch.zeros(0)])


def unpacked(numbers: Float[Tensor, " numbers"], of: Sequence[Layer]) -> list[tuple[Tensor, Tensor]]:
    """The factors that `packed` made a vector of, in float64."""
    sides = [side for layer in of for side in (layer.inputs, layer.outputs)]
    parts = numbers.double().split([side * (side + 1) // 2 for side in sides])  # type: ignore[no-untyped-call]
    whole = []
    for part, side in zip(parts, sides, strict=True):
        upper = part.new_zeros(side, side)
        upper[tuple(torch.triu_indices(side, side))] = part
        whole.append(upper + upper.triu(1).T)
    return list(zip(whole[::2], whole[1::2], strict=True))


@dataclass(frozen=True)
class LayerPosterior:
    """A client's Gaussian posterior of a layer's W: precision ``records (A' x B')``, both positive definite.

    Attributes:
        records: the client's number of records.
        mean: the client's W.
        inputs: A', the damped factor A.
        outputs: B', the damped factor B.
    """

    records: int
    mean: Float64[Tensor, "outputs inputs"]
    inputs: Float64[Tensor, "inputs inputs"]
    outputs: Float64[Tensor, "outputs outputs"]


def damped(factor: Float64[Tensor, "d d"], damping: float) -> Float64[Tensor, "d d"]:
    """``factor + sqrt(damping) I``; of a factor with negative eigenvalues beyond that, which no client can have, 0s."""
    identity = torch.eye(len(factor), dtype=factor.dtype)
    found = factor + math.sqrt(damping) * identity
    if torch.linalg.cholesky_ex(found).info.item():
        values, vectors = torch.linalg.eigh(factor)
        found = (vectors * values.clamp_min(0)) @ vectors.T + math.sqrt(damping) * identity
    return found


class Solution(NamedTuple):
    """A layer's W, and the share of the equation's right side that it leaves."""

    mean: Float64[Tensor, "outputs inputs"]
    residual: float


def product_mean(posteriors: Sequence[LayerPosterior], *, exact: bool = True) -> Solution:
    """The mean of the product of clients' posteriors: W with ``sum_k p_k B_k W A_k = sum_k p_k B_k W_k A_k``.

    p_k are shares of the records. Without ``exact`` the mean factors stand for the clients', FedLPA's expectation
    approximation: ``(sum_k p_k B_k)^-1 (sum_k p_k B_k W_k A_k) (sum_k p_k A_k)^-1``. From there conjugate gradients,
    preconditioned by it, solve the equation. Both give the clients' W if all have the same, and the mean weighted by
    records if all have the same factors.

    Raises:
        ValueError: the mean factors are singular in double precision.
    """
    records = sum(one.records for one in posteriors)
    shares = torch.tensor([one.records / records for one in posteriors], dtype=torch.float64)[:, None, None]
    a = torch.stack([one.inputs for one in posteriors])
    b = torch.stack([one.outputs for one in posteriors]) * shares
    means = torch.stack([one.mean for one in posteriors])
    left, right = _triangle(b.sum(0)), _triangle((shares * a).sum(0))

    def precision(w: Tensor) -> Tensor:
        return torch.einsum("kop,kpi->oi", b, w @ a)

    def approximate(z: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.cholesky_solve(z, left).T, right).T

    wanted = torch.einsum("kop,kpi->oi", b, means @ a)
    found = approximate(wanted)
    rest = wanted - precision(found)
    if exact:
        found, rest = _conjugate_gradients(precision, approximate, found, rest, _TOLERANCE * float(wanted.norm()))
    return Solution(found, float(rest.norm()) / max(float(wanted.norm()), torch.finfo(torch.float64).tiny))


def _triangle(factor: Float64[Tensor, "d d"]) -> Float64[Tensor, "d d"]:
    triangle, failed = torch.linalg.cholesky_ex(factor)
    if failed.item():
        raise ValueError(
            f"the mean of the clients' factors of side {len(factor)}, up to {float(factor.abs().max()):.3g}, is not "
            "positive definite; take a larger --damping"
        )
    found: Tensor = triangle
    return found


def _conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    found: Tensor,
    rest: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """The solution of ``apply(x) = b`` from ``found``, of which ``rest`` is left, and what is left of it at the end."""
    better = precondition(rest)
    direction, size = better, float((rest * better).sum())
    for _ in range(_MOST_STEPS):
        if float(rest.norm()) <= limit or size <= 0:
            break
        applied = apply(direction)
        curvature = float((direction * applied).sum())
        if curvature <= 0:  # by rounding alone
            break
        length = size / curvature
        found, rest = found + length * direction, rest - length * applied
        better = precondition(rest)
        size, former = float((rest * better).sum()), size
        direction = better + size / former * direction
    return found, rest
