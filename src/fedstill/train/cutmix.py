"""CutMix: a rectangle of each image comes from another image of its batch, and the loss counts both labels.

Yun, Han, Oh, Chun, Choe, Yoo, "CutMix: regularization strategy to train strong classifiers with localizable features",
ICCV 2019 (arXiv:1905.04899), section 3.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.train.loop import Augment


class CutMix:
    """An augmentation of batches and the loss that belongs to its latest batch, for ``SGD.fit``.

    Args:
        probability: share of the batches that are mixed.
        before: augmentation of a batch before it is mixed.
    """

    def __init__(self, probability: float, before: Augment) -> None:
        self._probability, self._before = probability, before
        self._partners: Int64[Tensor, " n"] | None = None
        self._kept = 1.0

    def augment(self, x: Float[Tensor, "n c h w"], rng: torch.Generator) -> Float[Tensor, "n c h w"]:
        """The batch with one random rectangle of each image from another one; ``rng`` is a CPU generator.

        The rectangle's share of the area is uniform on [0, 1] and its centre uniform; the part outside is cut off.
        """
        x = self._before(x, rng)
        mixed, share, row, column = torch.rand(4, generator=rng).tolist()
        self._partners = None
        if mixed >= self._probability:
            return x
        (top, bottom), (left, right) = (
            _span(size, math.sqrt(share), centre) for size, centre in ((x.shape[2], row), (x.shape[3], column))
        )
        self._partners = torch.randperm(len(x), generator=rng).to(x.device)
        self._kept = 1 - (bottom - top) * (right - left) / (x.shape[2] * x.shape[3])
        result = x.clone()
        result[:, :, top:bottom, left:right] = x[self._partners, :, top:bottom, left:right]
        return result

    def loss(self, output: Float[Tensor, "n classes"], x: Tensor, y: Int64[Tensor, " n"]) -> Float[Tensor, ""]:
        """``k CE(output, y) + (1 - k) CE(output, y of the partners)``, k the share of the area that stayed."""
        own = cross_entropy(output, y)
        if self._partners is None:
            return own
        return self._kept * own + (1 - self._kept) * cross_entropy(output, y[self._partners])


def _span(size: int, share: float, centre: float) -> tuple[int, int]:
    """First and last edge of an interval of ``share`` of ``size`` pixels around ``centre``, within the image."""
    half, middle = int(size * share) // 2, int(size * centre)
    return max(0, middle - half), min(size, middle + half)
