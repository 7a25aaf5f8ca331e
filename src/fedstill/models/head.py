"""Linear heads on public features: alone, or as the last layer of a whole network."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedstill.models.build import features


class LinearHead(nn.Linear):
    """A linear head ``(classes, d + 1)`` alone, for rows that already have the constant feature."""

    def __init__(self, head: Float[Tensor, "classes d"]) -> None:
        super().__init__(head.shape[1], head.shape[0], bias=False, device=head.device)
        with torch.no_grad():
            self.weight.copy_(head)


class HeadModel(nn.Module):
    """An extractor, an affine map of its features and a linear head.

    Args:
        trunk: the extractor, which is trained if its parameters require gradients.
        mean: ``(p,)``, subtracted from the extractor's features.
        projection: ``(p, d)``, applied to the centred features.
        radius: length to which rows are clipped.
        head: ``(classes, d + 1)``, the bias last.
        bias: value of the constant feature.
        clip: whether rows are clipped; false for published heads.
    """

    mean: Tensor
    projection: Tensor
    radius: Tensor

    def __init__(
        self,
        trunk: nn.Module,
        mean: Tensor,
        projection: Tensor,
        radius: float,
        head: Tensor,
        *,
        bias: float,
        clip: bool,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.register_buffer("mean", mean.clone())
        self.register_buffer("projection", projection.clone())
        self.head = nn.Parameter(head.clone())
        self.register_buffer("radius", torch.tensor(radius))
        self.bias = bias
        self.clip = clip

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        rows = (features(self.trunk, x) - self.mean) @ self.projection
        if self.clip:
            length = rows.norm(dim=1, keepdim=True).clamp_min(self.radius)
            rows = rows * (math.sqrt(1 - self.bias**2) / length)
        logits: Tensor = rows @ self.head[:, :-1].T + self.bias * self.head[:, -1]
        return logits
