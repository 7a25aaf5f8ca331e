"""FedRD's network: a small projection that stays at its client, then the task network that all clients share.

FedRD, sections III-A and IV-A. The paper's q = phi o varphi is one module with two parts, ``projection`` (varphi,
weights w_k) and ``task`` (phi, weights theta).
"""

import torch
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import relu

from fedstill.models.cnn import max_pool2

_CHUNK = 16


class Projection(nn.Module):
    """Images to representations of one channel: two 3x3 convolutions of 8 and 16 filters, stride 2, padding 1.

    The 16 x h/4 x w/4 values of the second convolution are read in the order channel, row, column and written row by
    row into 1 x h x w. No ReLU follows the second convolution, so values are unbounded. Height and width must be
    multiples of 4. 1,392 parameters for 3 channels, 1,248 for 1.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = shape
        if height % 4 or width % 4 or min(height, width) < 4:
            raise ValueError(
                f"projected can't use images of {height}x{width} pixels: both sides must be multiples of 4, so that "
                "two convolutions of stride 2 give 16 x h/4 x w/4 = h x w values; pad the images or use 'convnet'"
            )
        self.conv1 = nn.Conv2d(channels, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 1 h w"]:
        """Representations."""
        out: Tensor = self.conv2(relu(self.conv1(x)))
        return out.flatten(1).view(len(x), 1, *x.shape[2:])


class TaskNetwork(nn.Module):
    """Three times (3x3 convolution with padding 1, batch norm, ReLU, 2x2 max pooling), then one linear layer.

    ``width`` is the number of filters of every convolution. For representations of one channel of at least 8x8: 317,706
    parameters for 32x32, 308,746 for 28x28, 502,116 for 32x32 and 100 classes.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, width: PositiveInt = 128) -> None:
        super().__init__()
        channels, height, breadth = shape
        if min(height, breadth) < 8:
            raise ValueError(
                f"projected can't use images of {height}x{breadth} pixels, which three poolings halve; give 8x8 or more"
            )
        self.convs = nn.ModuleList(nn.Conv2d(c, width, 3, padding=1) for c in (channels, width, width))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.fc = nn.Linear(width * (height // 8) * (breadth // 8), num_classes)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """The linear layer's input: 2048 values at width 128 and 32 pixels, 1152 at 28.

        In train mode without a graph, on a CPU, `pool_first` computes the same values.
        """
        is_quick = self.training and x.is_cpu and not torch.is_grad_enabled()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            assert isinstance(norm, nn.BatchNorm2d)
            if is_quick and bool((norm.weight > 0).all()):
                x = pool_first(x, conv, norm)
            else:
                x = relu(max_pool2(norm(conv(x))))  # ReLU after pooling: the same values on a quarter of the elements
        return x.flatten(1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits, ``(n, num_classes)``."""
        logits: Tensor = self.fc(self.features(x))
        return logits


class Projected(nn.Module):
    """``task(projection(x))`` for images whose sides are multiples of 4 and at least 8; ``width`` is `Task`'s."""

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, width: PositiveInt = 128) -> None:
        super().__init__()
        self.projection = Projection(shape)
        self.task = TaskNetwork((1, *shape[1:]), num_classes, width=width)

    @property
    def projection_names(self) -> frozenset[str]:
        """Names of the projection's entries in the state."""
        return frozenset(f"projection.{name}" for name in self.projection.state_dict())

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Penultimate features."""
        return self.task.features(self.projection(x))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits, ``(n, num_classes)``."""
        logits: Tensor = self.task(self.projection(x))
        return logits


def pool_first(x: Float[Tensor, "n c h w"], conv: nn.Module, norm: nn.BatchNorm2d) -> Float[Tensor, "n k h/2 w/2"]:
    """``relu(max_pool2(norm(conv(x))))`` of a batch norm in train mode whose scales are positive, without a graph.

    Normalisation is then increasing, so it may follow the pooling. The convolution, the sums for mean and variance and
    the pooling take a few images at a time, which stay in the cache; only a quarter of the values is normalised.
    """
    pooled, total, squares, size = [], 0.0, 0.0, 0
    for chunk in torch.split(x, _CHUNK):
        y = conv(chunk)
        pooled.append(max_pool2(y))
        planes = y.flatten(2)
        total = total + planes.sum(2).sum(0, dtype=torch.float64)
        squares = squares + torch.linalg.vector_norm(planes, dim=2).double().square().sum(0)
        size += len(y) * planes.shape[2]
    mean = torch.as_tensor(total) / size
    variance = torch.as_tensor(squares) / size - mean.square()
    if bool((variance <= 1e-4 * mean.square()).any()):  # the difference of two nearly equal numbers has few digits
        return relu(max_pool2(norm(conv(x))))
    scale = norm.weight / (variance + norm.eps).sqrt()
    shift = norm.bias - mean * scale
    _update_statistics(norm, mean, variance * (size / max(size - 1, 1)))
    scale, shift = (v.to(x.dtype)[:, None, None] for v in (scale, shift))
    return torch.cat([torch.addcmul(shift, part, scale).relu_() for part in pooled])


def _update_statistics(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as a forward pass of ``norm`` does."""
    if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
        assert norm.momentum is not None
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
        norm.running_var.lerp_(variance.to(norm.running_var.dtype), norm.momentum)
