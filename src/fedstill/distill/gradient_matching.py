"""Gradient matching: the distance between the gradients of synthetic and real images, minimised over the synthetic.

Zhao, Mopuri, Bilen, "Dataset condensation with gradient matching", ICLR 2021 (arXiv:2006.05929), section 3.2 and the
authors' code (``utils.py``, ``match_loss``).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from fedstill.train.sgd import has_batch_norms

Distance = Literal["grouped", "mse", "cos", "convolutions"]
"""Distance between gradients, by `gradient_distance`."""
_EPS = 1e-6
_CHUNK = 16
_CONVOLUTION = 4
"""Dimensions of a convolution's weights."""


def gradient_distance(
    synthetic: Sequence[Tensor], real: Sequence[Tensor], kind: Distance = "grouped"
) -> Float[Tensor, ""]:
    """Distance between two gradients g and h, each with a tensor for every parameter.

    * "grouped": every tensor of two or more dimensions as a matrix with one row per output unit, sum over tensors and
      rows r of ``1 - <g_r, h_r> / (|g_r| |h_r| + 1e-6)``; vectors (biases, normalisation) count 0. Formula of DC.
    * "mse": ``sum (g - h)^2`` over all entries of all tensors.
    * "convolutions": the same of the weights of convolutions only, as in IDC (arXiv:2205.14959).
    * "cos": ``1 - <g, h> / (|g| |h| + 1e-6)`` of all entries as one vector.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    pairs = list(zip(synthetic, real, strict=True))
    if kind == "grouped":
        terms = [_rowwise(g.flatten(1), h.flatten(1)) for g, h in pairs if g.dim() > 1]
        return torch.stack(terms).sum()
    if kind == "convolutions":
        pairs = [(g, h) for g, h in pairs if g.dim() == _CONVOLUTION]
        if not pairs:
            raise ValueError(
                "distance='convolutions' needs a network with convolutions; take 'grouped', 'mse' or 'cos'"
            )
    if kind in ("mse", "convolutions"):
        return torch.stack([(g - h).square().sum() for g, h in pairs]).sum()
    if kind == "cos":
        one, other = (torch.cat([t.flatten() for t in side])[None] for side in (synthetic, real))
        return _rowwise(one, other)
    raise ValueError(f"distance={kind!r} is unknown; use 'grouped', 'mse', 'cos' or 'convolutions'")


def _rowwise(g: Float[Tensor, "rows d"], h: Float[Tensor, "rows d"]) -> Float[Tensor, ""]:
    product = (g * h).sum(1)
    result: Tensor = (1 - product / (g.norm(dim=1) * h.norm(dim=1) + _EPS)).sum()
    return result


def matched_parameters(model: nn.Module, kind: Distance) -> list[nn.Parameter]:
    """The parameters whose gradients `gradient_distance` compares.

    For "grouped" all but vectors, for "convolutions" the weights of convolutions, else all.
    """
    least = {"grouped": 2, "convolutions": _CONVOLUTION}.get(kind, 0)
    return [p for p in model.parameters() if p.requires_grad and p.dim() >= least]


def real_gradient(
    model: nn.Module, inputs: Float[Tensor, "n c h w"], label: int, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Gradient of the mean cross-entropy of real images of one class, without a graph.

    Images go through the model 16 at a time, so that activations stay in the processor's cache; with batch norms, the
    whole batch goes through at once.
    """
    total: list[Tensor] | None = None
    for chunk in torch.split(inputs, len(inputs) if has_batch_norms(model) else _CHUNK):
        loss = _cross_entropy(model, chunk, label, "sum") / len(inputs)
        part = torch.autograd.grad(loss, parameters)
        if total is None:
            total = list(part)
        else:
            torch._foreach_add_(total, part)
    assert total is not None, "a class without real images has no gradient"
    return total


def match(
    model: nn.Module,
    real: Sequence[Float[Tensor, "n c h w"]],
    synthetic: Sequence[Float[Tensor, "m c h w"]],
    labels: Sequence[int],
    kind: Distance = "grouped",
) -> tuple[Float[Tensor, ""], list[Float[Tensor, "m c h w"]]]:
    """The sum over classes of the gradient distance, and its gradient by each batch of ``synthetic``.

    Args:
        model: the network at which gradients are compared; its parameters do not change.
        real: a batch of real images for every class, normalised and augmented.
        synthetic: all synthetic images of every class, augmented like the real ones.
        labels: the class of each batch.
        kind: the distance, as for `gradient_distance`.

    Raises:
        ValueError: a class has one image, and the model's batch norms need two values of a channel.
    """
    parameters = matched_parameters(model, kind)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for real_batch, synthetic_batch, label in zip(real, synthetic, labels, strict=True):
        target = real_gradient(model, real_batch, label, parameters)
        images = synthetic_batch.detach().requires_grad_()
        loss = _cross_entropy(model, images, label, "mean")
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        distance = gradient_distance(gradient, target, kind)
        gradients += torch.autograd.grad(distance, [images])
        losses.append(distance.detach())
    return torch.stack(losses).sum(), gradients


def _cross_entropy(model: nn.Module, inputs: Tensor, label: int, reduction: str) -> Float[Tensor, ""]:
    labels = torch.full((len(inputs),), label, device=inputs.device)
    try:
        logits = model(inputs)
    except ValueError as error:
        if len(inputs) > 1 or not has_batch_norms(model):
            raise
        raise ValueError(
            f"1 image of a class is too few for the batch norms of {type(model).__name__}, which need 2 values per "
            "channel; take --ipc 2, if clients have 2 records of each class, or a model without batch norms"
        ) from error
    return functional.cross_entropy(logits, labels, reduction=reduction)
