"""ResNet-8 of FedAUX's main experiments and ResNet-18 of DENSE's server, with one and two basic blocks a stage.

He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016 (arXiv:1512.03385), with torchvision's
blocks and first weights. ResNet-8's stem and number of blocks are those of FedAUX's code (fedl-repo/fedaux,
``models.py``), ResNet-18's those of DENSE's (zj-jayzhang/DENSE, ``models/``).
"""

from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.backbone import Backbone, conv_norm, stage


class ResNet8(Backbone):
    """A 3x3 stem without pooling, then four basic blocks of 1, 2, 4 and 8 times ``width`` channels, three of stride 2.

    At width 64: 512 features; 4,903,242 parameters and 5,772 values in buffers for (3, 32, 32).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, width: PositiveInt = 64) -> None:
        super().__init__("resnet8", shape, _body(shape[0], width, 1), 8 * width, num_classes)


class ResNet18(Backbone):
    """A 3x3 stem without pooling, then stages of 64, 128, 256 and 512 channels, each of two basic blocks.

    512 features; 11,173,962 parameters and 9,620 values in buffers for (3, 32, 32).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__("resnet18", shape, _body(shape[0], 64, 2), 512, num_classes)


def _body(channels: int, width: int, blocks: int) -> nn.Sequential:
    """A stem and four stages of ``blocks`` basic blocks; from the second stage on, the first block has stride 2."""
    layers = stage(_Block, width, width, blocks, 1)
    for factor in (2, 4, 8):
        layers += stage(_Block, factor * width // 2, factor * width, blocks, 2)
    return nn.Sequential(*conv_norm(channels, width, 3), nn.ReLU(), *layers)  # the stem is drawn last


class _Block(nn.Module):
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
