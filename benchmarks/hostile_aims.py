"""Requests that gradient ascent finds: weights and maps under which one record moves a release as far as it can.

Each aim is a differentiable form of what a site computes, on the records of both sites. The searcher then sends what
was found through the real code.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fedstill import models
from fedstill.base.records import Records
from fedstill.base.weights import parameters, state
from fedstill.privacy.logistic import extend
from fedstill.privacy.solver import solve, solve_binary

Values = dict[str, Any]


@dataclass(frozen=True)
class Worlds:
    """What an aim knows: everything but the noise.

    Attributes:
        net: the run's model.
        records: the records of the site that has one more, which is the first.
        negatives: public records that score heads take, or none.
        settings: the method's settings, by their dotted names.
    """

    net: nn.Module
    records: Records
    negatives: Records
    settings: dict[str, float]


def _minimiser(
    x: Float64[Tensor, "n d"], labels: Int64[Tensor, " n"], penalty: float, classes: int | None
) -> Float64[Tensor, " coefficients"]:
    """A head's solution, differentiable in ``x``: a step of Newton's method from it, whose derivative is exact there.

    ``classes`` is None for a score head.
    """
    plain = x.detach()
    if classes is None:
        beta = solve_binary(plain, labels, penalty)[None]
        p, target = (x @ beta.T).sigmoid(), labels[:, None].double()
        curvature = (p * (1 - p))[:, :, None]
    else:
        beta = solve(plain, labels, classes, penalty)
        p, target = (x @ beta.T).softmax(1), one_hot(labels, classes).double()
        curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    gradient = (p - target).T @ x + penalty * beta
    size = beta.numel()
    hessian = torch.einsum("nck,ni,nj->cikj", curvature.detach().view(len(x), len(beta), -1), plain, plain)
    hessian = hessian.reshape(size, size) + penalty * torch.eye(size, dtype=torch.float64)
    moved: Tensor = beta.flatten() - torch.linalg.solve(hessian, gradient.flatten())
    return moved


def _ascended(free: list[Tensor], score: Callable[[], Tensor], steps: int, lr: float) -> Iterator[None]:
    """Adam towards a large score, by ``lr`` of each tensor's size; after each step the tensors are what to send."""
    scales = [float(each.detach().abs().mean()) + 1e-9 for each in free]
    adam = torch.optim.Adam([{"params": [each]} for each in free])
    for step in range(steps):
        for group, scale in zip(adam.param_groups, scales, strict=True):
            group["lr"] = lr * scale * (1 - step / steps)
        adam.zero_grad()
        found = score()
        if not torch.isfinite(found):
            return
        (-found).backward()  # type: ignore[no-untyped-call]
        adam.step()
        yield


def heads(start: Values, worlds: Worlds, room: float, steps: int, *, scores: bool = False) -> Iterator[Values]:
    """Others' short rows make the head sure that the far row has another class, and hold it back as little as possible.

    The map starts as the ridge regression of such rows on the extractor's features; then weights and map follow the
    gradient of the movement of the head's exact solution.

    Args:
        start: the arguments of an honest request.
        worlds: records and settings.
        room: how far others push; from 1 on, about as far as leaves the far row misjudged when it is there.
        steps: number of steps, each of which is a request.
        scores: whether to aim at the score head instead of the class head.
    """
    models_of = worlds.net
    models_of.load_state_dict({**models_of.state_dict(), **start["weights"]})
    x, y = worlds.records.inputs(), worlds.records.labels
    if scores:
        x, y = torch.cat([x, worlds.negatives.inputs()]), (torch.arange(len(x) + len(worlds.negatives)) < len(x)).long()
    penalty = worlds.settings["scores.penalty" if scores else "head.penalty"]
    bias, classes = worlds.settings["head.bias"], None if scores else worlds.records.num_classes
    slope = 1.0 if scores else math.sqrt(2)
    radius, width = 1.0, start["projection"].shape[1]
    push = room * (2 + 8 * penalty) / len(worlds.records)
    with torch.no_grad():
        phi = models.features(models_of, x).double()
        mean = phi[1:].mean(0)
        target = torch.where(y == y[0], -push, push).double()
        target[0] = 2.0
        weight = torch.ones(len(phi), dtype=torch.float64)
        weight[0] = 10.0
        scale = (phi - mean).norm(dim=1).max()
        wide = torch.cat([(phi - mean) / scale, torch.ones(len(phi), 1, dtype=torch.float64)], 1)
        ridge = 1e-9 * len(phi) * torch.eye(wide.shape[1], dtype=torch.float64)
        fitted = torch.linalg.solve((wide.T * weight) @ wide + ridge, (wide.T * weight) @ target)
        column = fitted[:-1] / scale
        mean = mean - column * fitted[-1] / column.square().sum()  # the constant, as a shift of the rows
    projection = torch.zeros(len(mean), width)
    projection[:, 0] = column.float()
    m, w = mean.float().requires_grad_(), projection.requires_grad_()

    def moved() -> Tensor:
        rows = extend((models.features(models_of, x) - m) @ w, radius, bias)
        one = _minimiser(rows, y, penalty, classes)
        other = _minimiser(rows[1:], y[1:], penalty, classes)
        return (one - other).norm() * penalty / slope

    free = [m, w, *parameters(models_of).values()]

    def values() -> Values:
        found = {name: value.detach().clone() for name, value in state(models_of).items()}
        return {
            **start,
            "weights": found,
            "mean": m.detach().clone(),
            "projection": w.detach().clone(),
            "radius": radius,
        }

    yield values()
    for _ in _ascended(free, moved, steps - 1, lr=0.0003):
        yield values()


def updates(start: Values, worlds: Worlds, push: float, steps: int) -> Iterator[Values]:
    """Weights under which the gradient of all records and that of all others have opposite directions.

    Both are clipped to the same length, so that the record turns the update round. ``push`` is the scale of the first
    weights.
    """
    net, x, y = worlds.net, worlds.records.inputs(), worlds.records.labels
    with torch.no_grad():
        for name, w in net.named_parameters():
            w.copy_(push * start["weights"][name])
    free = list(net.parameters())

    def turned() -> Tensor:
        losses = cross_entropy(net(x), y, reduction="none")
        both = []
        for total in (losses.sum(), losses[1:].sum()):
            parts = torch.autograd.grad(total, free, create_graph=True)
            both.append(torch.cat([part.flatten() for part in parts]))
        return -torch.nn.functional.cosine_similarity(both[0], both[1], dim=0)

    def values() -> Values:
        return {**start, "weights": {name: w.detach().clone() for name, w in parameters(net).items()}}

    yield values()
    for _ in _ascended(free, turned, steps - 1, lr=0.1):
        yield values()
