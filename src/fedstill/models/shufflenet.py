"""ShuffleNet with two groups, the "shufflenet" of FedAUX.

Zhang et al., "ShuffleNet: an extremely efficient convolutional neural network for mobile devices", CVPR 2018
(arXiv:1707.01083), in kuangliu/pytorch-cifar's form for 32x32 images, as in FedAUX's code (fedl-repo/fedaux,
``models.py``).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.backbone import Backbone, conv_norm, stage

_STEM, _GROUPS = 24, 2
_STAGES = ((200, 4), (400, 8), (800, 4))
"""Channels and number of blocks: table 1 of the paper, 2 groups."""


class ShuffleNet(Backbone):
    """A 1x1 stem of 24 channels, then stages of 4, 8 and 4 blocks with 200, 400 and 800 channels.

    800 features; 887,582 parameters for (3, 32, 32). Differs from the paper: the stem is a 1x1 convolution of stride 1
    without pooling, and a ReLU follows the 3x3 convolutions.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        layers = [*conv_norm(shape[0], _STEM, 1), nn.ReLU()]
        channels = _STEM
        for filters, blocks in _STAGES:
            layers += stage(_block, channels, filters, blocks, stride=2)
            channels = filters
        super().__init__("shufflenet", shape, nn.Sequential(*layers), channels, num_classes)


def _block(channels: int, filters: int, stride: int) -> nn.Module:
    # the first convolution has too few channels for groups (section 3.2 of the paper)
    return _Block(channels, filters, 1 if channels == _STEM else _GROUPS, halve=stride == 2)


class _Block(nn.Module):
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
