"""Convolutional networks: LeNet-5, the ConvNet of dataset condensation, and those of DENSE and FedKADP.

Zhao, Mopuri, Bilen, "Dataset condensation with gradient matching", ICLR 2021 (arXiv:2006.05929), section 4 and the
authors' code (``networks.py``).

DENSE: Zhang et al. 2022 (arXiv:2112.12371), as in its code (zj-jayzhang/DENSE, models/). FedKADP's paper names layers
without their sizes, which are chosen here; there are no norms, so that each record has its own gradient.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import max_pool2d, relu

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


class LeNet(nn.Module):
    """Two 5x5 convolutions (6 and 16 filters) with ReLU and 2x2 max pooling, then layers of 120, 84 and the classes.

    ``padding`` is the width of the zeros around each convolution's input. Without padding, images need 16x16 pixels; 2
    keeps the size. 44,426 parameters for 1x28x28, 62,006 for 3x32x32.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, padding: NonNegativeInt = 0) -> None:
        super().__init__()
        channels, height, width = shape
        smallest = max(16 - 6 * padding, 4)
        h, w = ((((side + 2 * padding - 4) // 2) + 2 * padding - 4) // 2 for side in (height, width))
        if min(h, w) < 1:
            raise ValueError(
                f"lenet can't use images of {height}x{width} pixels, only {smallest}x{smallest} or more with padding="
                f"{padding}; use 'lenet:padding=2' or 'convnet'"
            )
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=padding)
        self.fc1 = nn.Linear(16 * h * w, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 84"]:
        """Penultimate features."""
        # ReLU after pooling: the same values and gradients as before it, on a quarter of the elements.
        x = relu(max_pool2(self.conv1(x)))
        x = relu(max_pool2(self.conv2(x)))
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.fc3(self.features(x))
        return logits


Norm = Literal["instance", "batch", "layer", "group", "none"]
Pooling = Literal["avg", "max", "none"]
Activation = Literal["relu", "sigmoid", "leaky_relu", "swish"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": lambda: nn.LeakyReLU(0.01),
    "swish": nn.SiLU,
}


class ConvNet(nn.Module):
    """``depth`` times (3x3 convolution, normalisation, activation, 2x2 pooling), then one linear layer.

    "Instance" normalisation is that of the papers' code: GroupNorm with as many groups as channels, affine, eps 1e-5,
    no running statistics. In the first convolution, 1-channel images of at least 16 pixels get padding 3 (28 becomes
    32, as the papers intend; 32 becomes 36, which also ends at 4x4). Smaller ones get padding 1, since a border of 4
    empty pixels would be half of an 8x8 digit.

    With width 128 and depth 3 it has 317,706 parameters for (1, 28, 28), 320,010 for (3, 32, 32), and 504,420 for
    (3, 32, 32) and 100 classes.

    Args:
        shape: channels, height and width of an image.
        num_classes: number of outputs.
        width: filters of every convolution.
        depth: number of blocks; with pooling each halves height and width.
        norm: "instance", "batch", "layer" (over channels and positions), "group" (4 groups) or "none".
        pooling: "avg", "max" or "none".
        activation: "relu", "sigmoid", "leaky_relu" (slope 0.01) or "swish".

    Attributes:
        positions: height times width in the last block; instance normalisation of 4 or fewer leaves next to nothing of
            an image (8x8 pixels at depth 3).

    Raises:
        ValueError: an option is unknown, or ``depth`` poolings leave less than one pixel.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_classes: int,
        *,
        width: int = 128,
        depth: int = 3,
        norm: Norm = "instance",
        pooling: Pooling = "avg",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        if width < 1 or depth < 1:
            raise ValueError(f"width={width} and depth={depth} must both be at least 1")
        channels, height, breadth = shape
        first_padding = 3 if channels == 1 and min(height, breadth) >= 16 else 1
        blocks: list[nn.Module] = []
        for block in range(depth):
            padding = first_padding if block == 0 else 1
            height, breadth = height + 2 * padding - 2, breadth + 2 * padding - 2
            self.positions = height * breadth
            blocks.append(nn.Conv2d(channels, width, 3, padding=padding))
            blocks += _norm(norm, width, height, breadth)
            blocks += _layers("activation", activation, _ACTIVATIONS)
            blocks += _layers("pooling", pooling, _POOLINGS)
            if pooling != "none":
                height, breadth = height // 2, breadth // 2
            if min(height, breadth) < 1:
                raise ValueError(
                    f"depth={depth} halves images of {shape[1]}x{shape[2]} pixels to nothing; "
                    f"use depth={block} or larger images"
                )
            channels = width
        self.layers = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width * height * breadth, num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Inputs of the linear layer: the last block's output, flattened (2048 values at width 128, 28-32 pixels)."""
        out: Tensor = self.layers(x)
        return out.flatten(1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits, ``(n, num_classes)``."""
        out: Tensor = self.classifier(self.features(x))
        return out


class AvgPool2(nn.Module):
    """``nn.AvgPool2d(2, 2)``; on a CPU as two sums of slices, which PyTorch vectorises, unlike its kernel.

    Forward and backward of ConvNet-3 take 0.82 (width 32) to 0.90 (width 128) of the time with PyTorch's kernel.
    """

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h2 w2"]:
        """Means over 2x2 squares; a last odd row or column is dropped."""
        if x.is_cuda:
            return functional.avg_pool2d(x, 2)
        n, c, h, w = x.shape
        # two slices in place of unbind would each have a gradient of the size of x
        upper, lower = x[:, :, : h // 2 * 2].reshape(n, c, h // 2, 2, w).unbind(3)
        halves = upper + lower
        return (halves[..., 0 : w // 2 * 2 : 2] + halves[..., 1::2]) * 0.25


_POOLINGS: dict[str, Callable[[], nn.Module]] = {
    "avg": AvgPool2,
    "max": lambda: nn.MaxPool2d(2, 2),
    "none": nn.Identity,
}


def _layers(option: str, name: str, table: dict[str, Callable[[], nn.Module]]) -> list[nn.Module]:
    """The layer of an option's value, none for the value "none"."""
    if name not in table:
        raise ValueError(f"{option}={name!r} is unknown; use one of {', '.join(table)}")
    return [] if name == "none" else [table[name]()]


def _norm(name: str, width: int, height: int, breadth: int) -> list[nn.Module]:
    if name == "group" and width % 4:
        raise ValueError(f"norm='group' makes 4 groups of width={width} channels; use a multiple of 4")
    table: dict[str, Callable[[], nn.Module]] = {
        "instance": lambda: nn.GroupNorm(width, width),
        "batch": lambda: nn.BatchNorm2d(width),
        "layer": lambda: nn.LayerNorm([width, height, breadth]),
        "group": lambda: nn.GroupNorm(4, width),
        "none": nn.Identity,
    }
    return _layers("norm", name, table)


def _side_after_valid_convolutions(name: str, shape: tuple[int, int, int]) -> int:
    """Number of positions after conv3, pool2, conv3, pool2, conv3 without padding."""
    height, width = shape[1:]
    h, w = (((side - 2) // 2 - 2) // 2 - 2 for side in (height, width))
    if min(h, w) < 1:
        raise ValueError(
            f"{name} can't use images of {height}x{width} pixels, only 18x18 or more; use 'dense-mnist' or 'convnet'"
        )
    return h * w


class DenseCNN1(nn.Module):
    """CNN1 of the heterogeneous runs: convolutions 32, 64, 64 (3x3, no padding), layers of 64 and the classes.

    For images of at least 18x18 pixels; 122,570 parameters for 3x32x32.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        positions = _side_after_valid_convolutions("dense-cnn1", shape)
        self.conv1 = nn.Conv2d(shape[0], 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.fc1 = nn.Linear(64 * positions, 64)
        self.fc2 = nn.Linear(64, num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 64"]:
        """Penultimate features."""
        # ReLU after pooling: the same values and gradients as before it, on a quarter of the elements.
        x = relu(max_pool2(self.conv1(x)))
        x = relu(max_pool2(self.conv2(x)))
        x = relu(self.conv3(x))
        return relu(self.fc1(x.flatten(1)))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.fc2(self.features(x))
        return logits


class DenseCNN2(nn.Module):
    """CNN2, also of the homogeneous CIFAR-10 and SVHN runs: convolutions w, w, 128 (3x3, no padding), one layer.

    ``width`` is w. For images of at least 18x18 pixels; 319,242 parameters for 3x32x32, and 1,097,188 with width 256
    and 100 classes (CIFAR-100).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, width: PositiveInt = 128) -> None:
        super().__init__()
        positions = _side_after_valid_convolutions("dense-cnn2", shape)
        self.conv1 = nn.Conv2d(shape[0], width, 3)
        self.conv2 = nn.Conv2d(width, width, 3)
        self.conv3 = nn.Conv2d(width, 128, 3)
        self.fc = nn.Linear(128 * positions, num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Penultimate features."""
        x = relu(max_pool2(self.conv1(x)))
        x = relu(max_pool2(self.conv2(x)))
        return relu(self.conv3(x)).flatten(1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.fc(self.features(x))
        return logits


class DenseMnistCNN(nn.Module):
    """The network of the MNIST and Fashion-MNIST runs: convolutions 16, 32 (5x5, padding 2, batch norm), one layer.

    For images of at least 4x4 pixels; 29,034 parameters for 1x28x28.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise ValueError(f"dense-mnist can't use images of {height}x{width} pixels; give 4x4 or more")
        self.conv1 = nn.Conv2d(channels, 16, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * (height // 4) * (width // 4), num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Penultimate features."""
        x = relu(max_pool2(self.norm1(self.conv1(x))))
        x = relu(max_pool2(self.norm2(self.conv2(x))))
        return x.flatten(1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.fc(self.features(x))
        return logits


class _KadpCNN(nn.Module):
    """FedKADP's networks: convolutions that keep the size, each with ReLU and 2x2 pooling, then two linear layers."""

    def __init__(
        self, name: str, shape: tuple[int, int, int], num_classes: int, filters: tuple[int, ...], kernel: int
    ) -> None:
        super().__init__()
        channels, height, width = shape
        shrunk = 2 ** len(filters)
        if min(height, width) < shrunk:
            raise ValueError(f"{name} can't use images of {height}x{width} pixels; give {shrunk}x{shrunk} or more")
        sizes = zip((channels, *filters), filters, strict=False)
        self.convs = nn.ModuleList(nn.Conv2d(c, k, kernel, padding=kernel // 2) for c, k in sizes)
        self.fc1 = nn.Linear(filters[-1] * (height // shrunk) * (width // shrunk), 128)
        self.fc2 = nn.Linear(128, num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 128"]:
        """Penultimate features."""
        for conv in self.convs:
            x = relu(max_pool2(conv(x)))
        return relu(self.fc1(x.flatten(1)))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.fc2(self.features(x))
        return logits


class KadpMnistCNN(_KadpCNN):
    """FedKADP's network for MNIST: convolutions 16 and 32 (5x5, padding 2), layers of 128 and the classes.

    For images of at least 4x4 pixels; 215,370 parameters for 1x28x28.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__("kadp-mnist", shape, num_classes, (16, 32), 5)


class KadpCifarCNN(_KadpCNN):
    """FedKADP's network for CIFAR-10: convolutions 32, 64 and 64 (3x3, padding 1), layers of 128 and the classes.

    For images of at least 8x8 pixels; 188,810 parameters for 3x32x32.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__("kadp-cifar", shape, num_classes, (32, 64, 64), 3)
