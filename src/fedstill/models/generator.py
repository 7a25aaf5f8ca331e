"""Image generators of DENSE and DAFL, and the upsampling convolution that both use."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

_PARITIES = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""Parities of a pixel's row and column: 1 for odd."""


class Generator(nn.Module):
    """DENSE's generator: normal latents of length ``nz`` to images with pixels in [0, 1].

    Linear to 2 ngf channels of H/4 x W/4, batch norm, nearest x2, convolution 2 ngf, batch norm, LeakyReLU 0.2,
    nearest x2, convolution ngf, batch norm, LeakyReLU 0.2, convolution c, sigmoid. 2,328,899 parameters for nz 256, ngf
    64 and 3x32x32. Weights start as N(0, 0.02), those of batch norms as N(1, 0.02), biases as 0 (DENSE's
    ``reset_model``). It stays in train mode: batch norms use the batch's statistics.

    Raises:
        ValueError: a side of the image is not a multiple of 4.
    """

    def __init__(self, shape: tuple[int, ...], nz: int = 256, ngf: int = 64) -> None:
        super().__init__()
        channels, quarter = shape[0], quarter_of(shape)
        self.linear = nn.Linear(nz, 2 * ngf * math.prod(quarter))
        self.body = nn.Sequential(
            nn.Unflatten(1, (2 * ngf, *quarter)),
            nn.BatchNorm2d(2 * ngf),
            UpsampledConv(2 * ngf, 2 * ngf),
            nn.BatchNorm2d(2 * ngf),
            nn.LeakyReLU(0.2),
            UpsampledConv(2 * ngf, ngf),
            nn.BatchNorm2d(ngf),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ngf, channels, 3, padding=1),
            nn.Sigmoid(),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0, 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, z: Float[Tensor, "n nz"]) -> Float[Tensor, "n c h w"]:
        """Pixels in [0, 1]."""
        pixels: Tensor = self.body(self.linear(z))
        return pixels


class DAFLGenerator(nn.Module):
    """DAFL's generator: normal latents of length ``nz`` to images whose channels have mean 0 and variance 1 in a batch.

    Linear to 128 channels of H/4 x W/4, batch norm, nearest x2, convolution 128, batch norm (eps 0.8), LeakyReLU 0.2,
    nearest x2, convolution 64, batch norm (eps 0.8), LeakyReLU 0.2, convolution c, tanh, batch norm without weights.
    Layers have PyTorch's first weights.

    Raises:
        ValueError: a side of the image is not a multiple of 4.
    """

    def __init__(self, shape: tuple[int, ...], nz: int = 256) -> None:
        super().__init__()
        channels, quarter = shape[0], quarter_of(shape)
        self.linear = nn.Linear(nz, 128 * math.prod(quarter))
        self.body = nn.Sequential(
            nn.Unflatten(1, (128, *quarter)),
            nn.BatchNorm2d(128),
            UpsampledConv(128, 128, bias=True),
            nn.BatchNorm2d(128, 0.8),
            nn.LeakyReLU(0.2),
            UpsampledConv(128, 64, bias=True),
            nn.BatchNorm2d(64, 0.8),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, channels, 3, padding=1),
            nn.Tanh(),
            nn.BatchNorm2d(channels, affine=False),
        )

    def forward(self, z: Float[Tensor, "n nz"]) -> Float[Tensor, "n c h w"]:
        """Normalised images: distances from the data set's mean, in standard deviations."""
        images: Tensor = self.body(self.linear(z))
        return images


class UpsampledConv(nn.Conv2d):
    """Nearest x2, then a 3x3 convolution with zero padding, computed as four 2x2 convolutions before the upsampling.

    Two of the three upsampled rows under a filter are copies of one row, so their weights add up; the parity of the
    output's row decides which two. A pixel takes 16 products in place of 36, and forward and backward 0.5 to 0.6 of the
    time on a CPU. Results are equal up to rounding.
    """

    _halves: Tensor  # [parity of the output's row, row before the upsampling, row of the filter]

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        """Make a convolution from ``inputs`` to ``outputs`` channels."""
        super().__init__(inputs, outputs, 3, bias=bias)
        halves = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
        self.register_buffer("_halves", halves, persistent=False)

    def forward(self, x: Float[Tensor, "n inputs h w"]) -> Float[Tensor, "n outputs 2*h 2*w"]:
        """The image of twice the size."""
        n, _, h, w = x.shape
        outputs, inputs = self.weight.shape[:2]
        filters = torch.einsum("par,qbs,ocrs->pqocab", self._halves, self._halves, self.weight)
        filters = filters.reshape(4 * outputs, inputs, 2, 2)
        bias = None if self.bias is None else self.bias.repeat(4)
        every = conv2d(x, filters, bias, padding=1).view(n, 2, 2, outputs, h + 1, w + 1)
        image: Tensor = _Interleaved.apply(every, h, w)  # type: ignore[no-untyped-call]
        return image


class _Interleaved(torch.autograd.Function):
    """``out[.., 2 i + p, 2 j + q] = every[:, p, q, :, i + p, j + q]``: each pixel of the doubled image from its filter.

    With slices and stacks in place of this function, the gradient would allocate a tensor of zeros for every slice.
    """

    @staticmethod
    def forward(ctx: Any, every: Tensor, h: int, w: int) -> Tensor:
        ctx.sizes = every.shape, h, w
        out = every.new_empty(every.shape[0], every.shape[3], h, 2, w, 2)
        for p, q in _PARITIES:
            out[:, :, :, p, :, q] = every[:, p, q, :, p : p + h, q : q + w]
        return out.flatten(4).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shape, h, w = ctx.sizes
        result = gradient.new_zeros(shape)
        parts = gradient.reshape(*gradient.shape[:2], h, 2, w, 2)
        for p, q in _PARITIES:
            result[:, p, q, :, p : p + h, q : q + w] = parts[:, :, :, p, :, q]
        return result, None, None


def quarter_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """A quarter of height and width, at which generators start; ValueError unless both are multiples of 4."""
    _, height, width = shape
    if height % 4 or width % 4:
        raise ValueError(f"the generator can't make images of {height}x{width} pixels, only multiples of 4 a side")
    return height // 4, width // 4
