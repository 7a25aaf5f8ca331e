"""Wide residual networks of the clients in DENSE's heterogeneous runs (WRN-16-1 and WRN-40-1).

Zagoruyko, Komodakis, "Wide residual networks", BMVC 2016 (arXiv:1605.07146), without dropout; shortcuts and first
weights as in xternalz/WideResNet-pytorch, which DENSE's code uses.
"""

from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.backbone import Backbone, stage


class WideResNet(Backbone):
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
