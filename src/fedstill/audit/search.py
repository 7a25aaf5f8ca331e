"""Searches for images with a large score, for canaries: gradient ascent on pixels, then single steps of pixels."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from fedstill.records import Normalisation, Records

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
