"""2x2 max pooling that is faster than PyTorch's CPU kernel."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import max_pool2d

_SMALL = 2**16
"""Number of values below which PyTorch's kernel is as fast."""


def max_pool2(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h/2 w/2"]:
    """``max_pool2d(x, 2)`` with the same values and gradients to the bit, faster for large tensors on a CPU.

    PyTorch's CPU kernel visits the elements one by one; comparing whole slices takes a third of the time, forward and
    backward together. Supports ``torch.func`` and second derivatives as the original.
    """
    if torch.compiler.is_compiling():  # a program for batches of any size has no branch by size
        return max_pool2d(x, 2)
    if x.is_cpu and x.numel() >= _SMALL and x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0:
        pooled: Tensor = _MaxPool2.apply(x)  # type: ignore[no-untyped-call]
        return pooled
    return max_pool2d(x, 2)


class _MaxPool2(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        rows = torch.maximum(x[..., 0::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, pooled = ctx.saved_tensors
        places = _first_maxima(x, pooled)
        result: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places
        )
        return result


def _first_maxima(x: Tensor, pooled: Tensor) -> Tensor:
    """Position in its plane of each window's maximum, the first in reading order, as in PyTorch."""
    height, width = x.shape[-2:]
    not_first = x[..., 0::2, 0::2] != pooled
    not_top = not_first & (x[..., 0::2, 1::2] != pooled)
    last = not_top & (x[..., 1::2, 0::2] != pooled)
    # The four places of a window are at 0, 1, width and width + 1 from its corner.
    offsets = not_first.to(torch.int32).add_(not_top, alpha=width - 1).add_(last)
    corners = torch.arange(0, height, 2, device=x.device)[:, None] * width + torch.arange(0, width, 2, device=x.device)
    return offsets + corners
