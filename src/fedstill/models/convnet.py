"""ConvNet-3, the network of the dataset-condensation papers.

Zhao, Mopuri, Bilen, "Dataset condensation with gradient matching", ICLR 2021 (arXiv:2006.05929), section 4 and the
authors' code (``networks.py``).
"""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

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
