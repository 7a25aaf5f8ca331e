"""Shared parts of the feature extractors of FedAUX (Sattler et al. 2021, arXiv:2102.02514; fedl-repo/fedaux)."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

SMALLEST = 8
"""Smallest height and width in pixels, since each of these networks halves its images three times."""


class Backbone(nn.Module):
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
