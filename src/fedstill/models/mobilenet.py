"""MobileNetV2 at half width, the "mobilenetv2s" of FedAUX.

Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018 (arXiv:1801.04381), in
kuangliu/pytorch-cifar's form for 32x32 images, halved as in FedAUX's code (fedl-repo/fedaux, ``models.py``).
"""

from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from fedstill.models.backbone import Backbone, conv_norm, stage

_STEM, _LAST = 32, 640
_STAGES = ((1, 8, 1, 1), (6, 12, 2, 1), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1))
"""Expansion, channels, number of blocks, stride of the first block: table 2 of the paper, channels halved."""


class MobileNetV2S(Backbone):
    """A 3x3 stem of stride 1, 17 inverted residual blocks, a 1x1 convolution to 640 channels.

    640 features; 604,178 parameters for (3, 32, 32). Differs from the paper: the stem and the second stage have stride
    1, ReLU replaces ReLU6, and blocks of stride 1 that change the number of channels have a 1x1 convolution as their
    shortcut.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        layers = [*conv_norm(shape[0], _STEM, 3), nn.ReLU()]
        channels = _STEM
        for expansion, filters, blocks, stride in _STAGES:
            layers += stage(partial(_Block, expansion), channels, filters, blocks, stride)
            channels = filters
        layers += [*conv_norm(channels, _LAST, 1), nn.ReLU()]
        super().__init__("mobilenetv2s", shape, nn.Sequential(*layers), _LAST, num_classes)


class _Block(nn.Module):
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
