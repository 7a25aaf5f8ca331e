"""LeNet of the federated benchmarks (NIID-Bench's "simple-cnn", Li et al. 2022, arXiv:2102.02079)."""

from jaxtyping import Float
from pydantic import NonNegativeInt
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.pooling import max_pool2


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
