"""LeNet as federated benchmarks use it (NIID-Bench's "simple-cnn", Li et al. 2022, arXiv:2102.02079)."""

from jaxtyping import Float
from pydantic import NonNegativeInt
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.pooling import max_pool2


class LeNet(nn.Module):
    """Two 5x5 convolutions (6 and 16 filters), each with ReLU and 2x2 max pooling, then layers of 120, 84 and C.

    44,426 parameters for 1x28x28 images and 10 classes, 62,006 for 3x32x32.

    Args:
        shape: channels, height and width of one image; without padding at least 16 pixels a side.
        num_classes: number of outputs C.
        padding: zeros around the input of each convolution, in pixels; 2 keeps the size and suits images under 16.

    Raises:
        ValueError: if the images are too small.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, padding: NonNegativeInt = 0) -> None:
        super().__init__()
        channels, height, width = shape
        smallest = max(16 - 6 * padding, 4)
        h, w = ((((side + 2 * padding - 4) // 2) + 2 * padding - 4) // 2 for side in (height, width))
        if min(h, w) < 1:
            raise ValueError(
                f"lenet can't use images of {height}x{width} pixels: it needs {smallest}x{smallest} with padding="
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
