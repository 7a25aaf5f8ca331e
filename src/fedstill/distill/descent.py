"""What all makers of images by gradient descent share: Adam that a checkpoint can hold, its step, pixels to bytes."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedstill.train.local import Diverged


def to_bytes(pixels: Float[Tensor, "n c h w"], lr: float) -> Tensor:
    """Pixels in [0, 1] rounded to 8 bits.

    Raises:
        Diverged: they are not finite; ``lr`` is what to blame.
    """
    if not pixels.numel() or not torch.isfinite(pixels).all():
        raise Diverged(
            f"making images with lr={lr:g} left pixels or a loss that are not finite; use a smaller learning rate, for "
            f"example {lr / 10:g}"
        )
    return (pixels.detach() * 255).round().to(torch.uint8)


def adam_of(weights: Iterable[Tensor], lr: float, beta1: float) -> torch.optim.Adam:
    """Adam with its moments in place from the start, so that a checkpoint finds them; beta_2 is 0.999."""
    adam = torch.optim.Adam(list(weights), lr=lr, betas=(beta1, 0.999))
    for weight in adam.param_groups[0]["params"]:
        moments = {name: torch.zeros_like(weight, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[weight] = {"step": torch.zeros(()), **moments}
    return adam


def descend(adam: torch.optim.Adam, loss: Float[Tensor, ""]) -> None:
    """One step of ``adam`` down the gradient of ``loss`` by its own weights; no other tensor gets a gradient."""
    weights = adam.param_groups[0]["params"]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    adam.step()
    adam.zero_grad()


def lasting(generator: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """The live tensors of both by name, detached: writing into them changes generator and Adam."""
    tensors = {f"generator.{name}": value.detach() for name, value in generator.state_dict().items()}
    for i, weight in enumerate(adam.param_groups[0]["params"]):
        tensors.update({f"adam.{i}.{name}": value for name, value in adam.state[weight].items()})
    return tensors
