"""Small convolutional networks of DENSE's clients and of FedKADP.

DENSE: Zhang et al. 2022 (arXiv:2112.12371), as in its code (zj-jayzhang/DENSE, models/). FedKADP's paper names layers
without their sizes, which are chosen here; there are no norms, so that each record has its own gradient.
"""

from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.pooling import max_pool2


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
