"""Labelled examples that no record is: what distillation makes and sends."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedstill.records import Normalisation, Records


@dataclass(frozen=True)
class Synthetic:
    """Labelled real-valued examples, which a model can be trained on as on records.

    Attributes:
        values: float32, as the network sees them: normalised images, or representations; ``(n, c, h, w)``.
        labels: classes, ``(n,)``.
    """

    values: Float[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"]

    def inputs(self, index: Tensor | slice = slice(None)) -> Float[Tensor, "n c h w"]:
        """What the model sees."""
        return self.values[index]

    def rounded(self, num_classes: int, normalisation: Normalisation) -> Records:
        """Normalised images as records: pixels limited to [0, 1] and rounded to 8 bits, one byte each."""
        black, white = pixel_limits(normalisation, self.values.device)
        pixels = ((self.values - black) / (white - black)).clamp(0, 1)
        return Records((pixels * 255).round().to(torch.uint8), self.labels, num_classes, normalisation)


def pixel_limits(
    normalisation: Normalisation, device: torch.device
) -> tuple[Float[Tensor, "c 1 1"], Float[Tensor, "c 1 1"]]:
    """What the pixels 0 and 1 are as normalised values."""
    black, white = (
        normalisation.apply(torch.full((1, len(normalisation.mean), 1, 1), v, device=device))[0] for v in (0.0, 1.0)
    )
    return black, white
