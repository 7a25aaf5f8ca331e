"""Residual networks: ResNet-8 and -18, Wide ResNet, MobileNetV2 and ShuffleNetV2 for small images.

He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016 (arXiv:1512.03385), with torchvision's
blocks and first weights. ResNet-8's stem and number of blocks are those of FedAUX's code (fedl-repo/fedaux,
``models.py``), ResNet-18's those of DENSE's (zj-jayzhang/DENSE, ``models/``).

Zagoruyko, Komodakis, "Wide residual networks", BMVC 2016 (arXiv:1605.07146), without dropout; shortcuts and first
weights as in xternalz/WideResNet-pytorch, which DENSE's code uses.

Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018 (arXiv:1801.04381), in
kuangliu/pytorch-cifar's form for 32x32 images, halved as in FedAUX's code (fedl-repo/fedaux, ``models.py``).

Zhang et al., "ShuffleNet: an extremely efficient convolutional neural network for mobile devices", CVPR 2018
(arXiv:1707.01083), in kuangliu/pytorch-cifar's form for 32x32 images, as in FedAUX's code (fedl-repo/fedaux,
``models.py``).
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import relu

SMALLEST = 8
"""Smallest height and width in pixels, since each of these networks halves its images three times."""


class Trunk(nn.Module):
    """A convolutional body, the mean over positions, and one linear layer ``classifier``.

    Abstract: a network is a subclass whose constructor makes the body, a map of images to ``dim`` channels. ``name`` is
    for error messages.
    """

    def __init__(self, name: str, shape: tuple[int, int, int], body: nn.Module, dim: int, num_classes: int) -> None:
        super().__init__()
        if min(shape[1:]) < SMALLEST:
            raise ValueError(
                f"{name} can't use images of {shape[1]}x{shape[2]} pixels, only {SMALLEST}x{SMALLEST} or more; use "
                "'dense-mnist' or 'convnet'"
            )
        self.body = body
        self.classifier = nn.Linear(dim, num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Inputs of the linear layer: the body's output, averaged over positions."""
        # Never channels last, though faster on a CPU: its backward pass crashes torch 2.13.0 with two threads.
        out: Tensor = self.body(x.contiguous())
        return out.mean((2, 3))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        out: Tensor = self.classifier(self.features(x))
        return out


def stage(
    block: Callable[[int, int, int], nn.Module], channels: int, filters: int, blocks: int, stride: int
) -> list[nn.Module]:
    """A number of blocks ``block(channels, filters, stride)``; the first changes the channels and has the stride."""
    first = block(channels, filters, stride)
    return [first, *(block(filters, filters, 1) for _ in range(blocks - 1))]


def conv_norm(channels: int, filters: int, side: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size (at stride 1), without bias, and its batch normalisation."""
    return [
        nn.Conv2d(channels, filters, side, stride=stride, padding=side // 2, groups=groups, bias=False),
        nn.BatchNorm2d(filters),
    ]


class ResNet8(Trunk):
    """A 3x3 stem without pooling, then four basic blocks of 1, 2, 4 and 8 times ``width`` channels, three of stride 2.

    At width 64: 512 features; 4,903,242 parameters and 5,772 values in buffers for (3, 32, 32).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, width: PositiveInt = 64) -> None:
        super().__init__("resnet8", shape, _body(shape[0], width, 1), 8 * width, num_classes)


class ResNet18(Trunk):
    """A 3x3 stem without pooling, then stages of 64, 128, 256 and 512 channels, each of two basic blocks.

    512 features; 11,173,962 parameters and 9,620 values in buffers for (3, 32, 32).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__("resnet18", shape, _body(shape[0], 64, 2), 512, num_classes)


def _body(channels: int, width: int, blocks: int) -> nn.Sequential:
    """A stem and four stages of ``blocks`` basic blocks; from the second stage on, the first block has stride 2."""
    layers = stage(_BasicBlock, width, width, blocks, 1)
    for factor in (2, 4, 8):
        layers += stage(_BasicBlock, factor * width // 2, factor * width, blocks, 2)
    return nn.Sequential(*conv_norm(channels, width, 3), nn.ReLU(), *layers)  # the stem is drawn last


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *conv_norm(channels, filters, 3, stride=stride), nn.ReLU(), *conv_norm(filters, filters, 3)
        )
        same = stride == 1 and channels == filters
        self.shortcut = nn.Sequential(*([] if same else conv_norm(channels, filters, 1, stride=stride)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        return relu(self.residual(x) + self.shortcut(x))


class WideResNet(Trunk):
    """A 3x3 stem of 16 channels, three stages of pre-activation blocks, batch normalisation and ReLU.

    WRN-d-w has stages of 16w, 32w and 64w channels with n blocks each, the last two of stride 2; its depth d is 6n + 4.
    For (3, 32, 32), WRN-16-1 has 175,066 parameters and WRN-40-1 563,930, both with 64 features.
    """

    def __init__(
        self, shape: tuple[int, int, int], num_classes: int, *, depth: PositiveInt = 16, width: PositiveInt = 1
    ) -> None:
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            low = 6 * max(blocks, 1) + 4
            raise ValueError(
                f"a wide ResNet has depth 6 n + 4 with n of at least 1, not depth={depth}; use {low} or {low + 6}"
            )
        channels = 16
        layers: list[nn.Module] = [nn.Conv2d(shape[0], channels, 3, padding=1, bias=False)]
        for filters, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            layers += stage(_PreActivationBlock, channels, filters, blocks, stride)
            channels = filters
        super().__init__(
            "wrn", shape, nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU()), channels, num_classes
        )
        nn.init.zeros_(self.classifier.bias)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _PreActivationBlock(nn.Module):
    """Batch norm, ReLU, 3x3, batch norm, ReLU, 3x3, and a shortcut, which is the input if its shape fits.

    Otherwise the shortcut is a 1x1 convolution of the input after batch norm and ReLU.
    """

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, filters, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if channels != filters or stride != 1:
            self.shortcut = nn.Conv2d(channels, filters, 1, stride=stride, bias=False)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        active = relu(self.norm1(x))
        residual: Tensor = self.conv2(relu(self.norm2(self.conv1(active))))
        return residual + (x if self.shortcut is None else self.shortcut(active))


_MOBILENET_STEM, _LAST = 32, 640
_MOBILENET_STAGES = (
    (1, 8, 1, 1),
    (6, 12, 2, 1),
    (6, 16, 3, 2),
    (6, 32, 4, 2),
    (6, 48, 3, 1),
    (6, 80, 3, 2),
    (6, 160, 1, 1),
)
"""Expansion, channels, number of blocks, stride of the first block: table 2 of the paper, channels halved."""


class MobileNetV2S(Trunk):
    """A 3x3 stem of stride 1, 17 inverted residual blocks, a 1x1 convolution to 640 channels.

    640 features; 604,178 parameters for (3, 32, 32). Differs from the paper: the stem and the second stage have stride
    1, ReLU replaces ReLU6, and blocks of stride 1 that change the number of channels have a 1x1 convolution as their
    shortcut.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        layers = [*conv_norm(shape[0], _MOBILENET_STEM, 3), nn.ReLU()]
        channels = _MOBILENET_STEM
        for expansion, filters, blocks, stride in _MOBILENET_STAGES:
            layers += stage(partial(_InvertedResidual, expansion), channels, filters, blocks, stride)
            channels = filters
        layers += [*conv_norm(channels, _LAST, 1), nn.ReLU()]
        super().__init__("mobilenetv2s", shape, nn.Sequential(*layers), _LAST, num_classes)


class _InvertedResidual(nn.Module):
    """Widen by a 1x1 convolution, filter each channel by 3x3, narrow by 1x1 without ReLU; a shortcut at stride 1."""

    def __init__(self, expansion: int, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        wide = expansion * channels
        self.residual = nn.Sequential(
            *conv_norm(channels, wide, 1),
            nn.ReLU(),
            *conv_norm(wide, wide, 3, stride=stride, groups=wide),
            nn.ReLU(),
            *conv_norm(wide, filters, 1),
        )
        self.shortcut: nn.Module | None = None
        if stride == 1:
            self.shortcut = nn.Sequential(*([] if channels == filters else conv_norm(channels, filters, 1)))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        out: Tensor = self.residual(x)
        return out if self.shortcut is None else out + self.shortcut(x)


_SHUFFLENET_STEM, _GROUPS = 24, 2
_SHUFFLENET_STAGES = ((200, 4), (400, 8), (800, 4))
"""Channels and number of blocks: table 1 of the paper, 2 groups."""


class ShuffleNet(Trunk):
    """A 1x1 stem of 24 channels, then stages of 4, 8 and 4 blocks with 200, 400 and 800 channels.

    800 features; 887,582 parameters for (3, 32, 32). Differs from the paper: the stem is a 1x1 convolution of stride 1
    without pooling, and a ReLU follows the 3x3 convolutions.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        layers = [*conv_norm(shape[0], _SHUFFLENET_STEM, 1), nn.ReLU()]
        channels = _SHUFFLENET_STEM
        for filters, blocks in _SHUFFLENET_STAGES:
            layers += stage(_block, channels, filters, blocks, stride=2)
            channels = filters
        super().__init__("shufflenet", shape, nn.Sequential(*layers), channels, num_classes)


def _block(channels: int, filters: int, stride: int) -> nn.Module:
    # the first convolution has too few channels for groups (section 3.2 of the paper)
    return _ShuffleUnit(channels, filters, 1 if channels == _SHUFFLENET_STEM else _GROUPS, halve=stride == 2)


class _ShuffleUnit(nn.Module):
    """Narrow to a quarter, shuffle, filter each channel by 3x3, widen; then add the input, or append its halved image.

    If it halves height and width, ``filters`` includes the input's channels.
    """

    def __init__(self, channels: int, filters: int, first_groups: int, *, halve: bool) -> None:
        super().__init__()
        filters -= channels if halve else 0
        narrow = filters // 4
        self.residual = nn.Sequential(
            *conv_norm(channels, narrow, 1, groups=first_groups),
            nn.ReLU(),
            nn.ChannelShuffle(first_groups),
            *conv_norm(narrow, narrow, 3, stride=2 if halve else 1, groups=narrow),
            nn.ReLU(),
            *conv_norm(narrow, filters, 1, groups=_GROUPS),
        )
        self.halved = nn.AvgPool2d(3, stride=2, padding=1) if halve else None

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        out: Tensor = self.residual(x)
        return relu(out + x if self.halved is None else torch.cat([out, self.halved(x)], 1))
