"""Records that an audit adds: directions of gradients, and searches for what moves most."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from fedstill.audits.lower_bounds import Canaries
from fedstill.base.records import Examples, Normalisation, Records, Trainable
from fedstill.privacy.per_record import PerRecordLoss


def gradient_canaries(
    release: Callable[[Trainable], dict[str, Tensor]],
    model: nn.Module,
    x: Float[Tensor, "m ..."],
    y: Tensor,
    loss: PerRecordLoss,
) -> Canaries[dict[str, Tensor]]:
    """Canaries ``x``, ``y`` with the scores ``<g_i, w_0 - w>``; ``g_i`` is the gradient of canary i at ``w_0``.

    The attack is strongest if the gradients have one length and are orthogonal to each other and to all others.

    Args:
        release: maps records to the trained parameters by name, with fresh noise each time, as `DPSGD` does.
        model: the initial model ``w_0`` of each release.
        x: inputs of the canaries.
        y: labels of the canaries.
        loss: the loss that ``release`` minimises.
    """

    def score(trained: dict[str, Tensor]) -> Tensor:
        change = {name: model.get_parameter(name) - w for name, w in trained.items()}
        return directional_derivatives(model, change, x, y, loss)

    return Canaries(len(x), lambda included: release(Examples(x[included], y[included])), score)


def directional_derivatives(
    model: nn.Module, direction: dict[str, Tensor], x: Float[Tensor, "m ..."], y: Tensor, loss: PerRecordLoss
) -> Float[Tensor, " m"]:
    """``<g_i, direction>`` for each record: the derivatives by v of ``<grad sum_i v_i loss_i, direction>``."""
    v = torch.ones(len(x), requires_grad=True)
    weights = {name: model.get_parameter(name).detach().requires_grad_() for name in direction}
    losses = loss(functional_call(model, weights, (x,)), x, y)
    gradients = torch.autograd.grad(losses, list(weights.values()), v, create_graph=True)
    product = torch.stack([(g * d.detach()).sum() for g, d in zip(gradients, direction.values(), strict=True)]).sum()
    return torch.autograd.grad(product, v)[0]


NORMALISATION = Normalisation((0.5,), (0.25,))
"""That of the audits' images."""


def ascend(
    score: Callable[[Tensor], Float[Tensor, " n"]],
    pixels: Float[Tensor, "n c h w"],
    *,
    steps: int,
    lr: float = 0.05,
) -> Records:
    """Images with large scores, as 8-bit records without classes.

    Args:
        score: function of normalised images ``(n, c, h, w)``, differentiable, with one number for each.
        pixels: where to start, in [0, 1].
        steps: steps of Adam; each image keeps the best place on its way.
        lr: learning rate of Adam.
    """
    free = pixels.clone().requires_grad_()
    adam = torch.optim.Adam([free], lr=lr)
    best, most = pixels.clone(), torch.full((len(pixels),), -torch.inf)
    for step in range(steps + 1):
        for group in adam.param_groups:
            group["lr"] = lr * (1 - step / (steps + 1))
        with torch.no_grad():
            rounded = (free.clamp(0, 1) * 255).round() / 255
        rounded.requires_grad_()
        found = score(NORMALISATION.apply(rounded))
        better = found.detach() > most
        best[better], most = rounded.detach()[better], torch.where(better, found.detach(), most)
        free.grad = torch.autograd.grad(-found.sum(), rounded)[0]
        adam.step()
        with torch.no_grad():
            free.clamp_(0, 1)
    images = (best * 255).round().to(torch.uint8)
    return Records(images, torch.zeros(len(images), dtype=torch.int64), 2, NORMALISATION)


def climb(score: Callable[[Tensor], Float[Tensor, " n"]], images: Records, *, steps: int) -> Records:
    """The images after ``steps`` changes of single pixels by 1, each the best: what rounding to 8 bits has cost."""
    best = []
    count = images.images[0].numel()
    tweaks = torch.cat([torch.eye(count), -torch.eye(count), torch.zeros(1, count)]).view(-1, *images.shape)
    for image in images.images:
        current = image.float()
        for _ in range(steps):
            tried = (current + tweaks).clamp(0, 255)
            with torch.no_grad():
                current = tried[score(NORMALISATION.apply(tried / 255)).argmax()]
        best.append(current.to(torch.uint8))
    return Records(torch.stack(best), images.labels, images.num_classes, images.normalisation)
