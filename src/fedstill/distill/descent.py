"""Gradient descent on images: a step of Adam, the tensors of a checkpoint, pixels to bytes."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedstill.train.adam import moments
from fedstill.train.loop import Diverged, lower_rate


def to_bytes(pixels: Float[Tensor, "n c h w"], lr: float) -> Tensor:
    """Round pixels in [0, 1] to 8 bits.

    Raises:
        Diverged: some pixels are not finite; the error names ``lr`` as the cause.
    """
    if not pixels.numel() or not torch.isfinite(pixels).all():
        raise Diverged(f"making images with lr={lr:g} left pixels or a loss that are not finite; {lower_rate(lr)}")
    return (pixels.detach() * 255).round().to(torch.uint8)


def adam_step(adam: torch.optim.Adam, loss: Float[Tensor, ""]) -> None:
    """Take one step of ``adam`` on ``loss``; only its own weights get gradients."""
    weights = adam.param_groups[0]["params"]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    adam.step()
    adam.zero_grad()


def live_tensors(generator: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Live tensors of the generator and Adam by name, detached: writing into them changes both."""
    tensors = {f"generator.{name}": value.detach() for name, value in generator.state_dict().items()}
    return tensors | {f"adam.{name}": value for name, value in moments(adam).items()}
