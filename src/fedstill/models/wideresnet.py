"""Wide residual networks, two of the clients' networks in DENSE's heterogeneous runs (WRN-16-1 and WRN-40-1).

Zagoruyko, Komodakis, "Wide residual networks", BMVC 2016 (arXiv:1605.07146), without dropout; the wiring of shortcuts
and first weights as in xternalz/WideResNet-pytorch, which DENSE's code has.
"""

from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.backbone import Backbone, stage


class WideResNet(Backbone):
    """A 3x3 stem of 16 channels, three stages of pre-activation blocks, batch normalisation and ReLU.

    WRN-d-w has stages of 16w, 32w and 64w channels with (d - 4) / 6 blocks each, the last two of stride 2. WRN-16-1:
    175,066 parameters, WRN-40-1: 563,930, both with 64 features, for (3, 32, 32) and 10 classes.

    Args:
        shape: channels, height and width of one image, at least 8 pixels a side.
        num_classes: number of outputs.
        depth: 6 n + 4 for n blocks a stage.
        width: factor of the channels.

    Raises:
        ValueError: if the images are too small or no number of blocks gives that depth.
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
            layers += stage(_Block, channels, filters, blocks, stride)
            channels = filters
        super().__init__(
            "wrn", shape, nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU()), channels, num_classes
        )
        nn.init.zeros_(self.classifier.bias)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _Block(nn.Module):
    """Normalise, ReLU, 3x3, normalise, ReLU, 3x3, beside a shortcut.

    Where the shape changes the shortcut is a 1x1 convolution of the activated input, else the input itself.
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
