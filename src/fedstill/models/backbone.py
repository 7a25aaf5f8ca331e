"""What the feature extractors of FedAUX have in common (Sattler et al. 2021, arXiv:2102.02514; fedl-repo/fedaux)."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

SMALLEST = 8
"""Pixels a side: each of these networks halves its images three times."""


class Backbone(nn.Module):
    """A convolutional body, the mean over all positions of what it gives, and one linear layer ``classifier``.

    Abstract: a network is a subclass whose constructor lays out the body.

    Args:
        name: what error messages call the network.
        shape: channels, height and width of one image, at least 8 pixels a side.
        body: maps images to ``dim`` channels of any size.
        dim: number of features.
        num_classes: number of outputs.

    Raises:
        ValueError: if the images are too small.
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
        """What the linear layer sees: the body's output, averaged over positions."""
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
    """``blocks`` of ``block(channels, filters, stride)``, of which the first changes channels and takes the stride."""
    first = block(channels, filters, stride)
    return [first, *(block(filters, filters, 1) for _ in range(blocks - 1))]


def conv_norm(channels: int, filters: int, side: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size (at stride 1), without bias, and its batch normalisation."""
    return [
        nn.Conv2d(channels, filters, side, stride=stride, padding=side // 2, groups=groups, bias=False),
        nn.BatchNorm2d(filters),
    ]
