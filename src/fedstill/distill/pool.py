"""Synthetic images on the server: bytes of pixels, images in one image, the pool of the latest.

Kim, Kim, Oh, Yun, Song, Jeong, Ha, Song, "Dataset condensation via efficient synthetic-data parameterization" (IDC),
ICML 2022 (arXiv:2205.14959), section 4, uniform multi-formation.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

from fedstill.base.errors import Diverged
from fedstill.base.records import Examples, Records
from fedstill.train.sgd import lower_rate, moments


def to_bytes(pixels: Float[Tensor, "n c h w"], lr: float) -> Tensor:
    """Round pixels in [0, 1] to 8 bits.

    Raises:
        Diverged: some pixels are not finite; the error names ``lr`` as the cause.
    """
    if not pixels.numel() or not torch.isfinite(pixels).all():
        raise Diverged(f"making images with lr={lr:g} left pixels or a loss that are not finite; {lower_rate(lr)}")
    return (pixels.detach() * 255).round().to(torch.uint8)


def adam_step(adam: torch.optim.Adam, loss: Float[Tensor, ""]) -> None:
    """Take one step of ``adam`` on ``loss``; only its own weights get gradients."""
    weights = adam.param_groups[0]["params"]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    adam.step()
    adam.zero_grad()


def live_tensors(generator: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Live tensors of the generator and Adam by name, detached: writing into them changes both."""
    tensors = {f"generator.{name}": value.detach() for name, value in generator.state_dict().items()}
    return tensors | {f"adam.{name}": value for name, value in moments(adam).items()}


def unfold(images: Float[Tensor, "n c h w"], parts: int) -> Float[Tensor, "n*parts**2 c h w"]:
    """The ``parts**2`` images that each stored image holds, row by row, enlarged bilinearly; differentiable."""
    if parts == 1:
        return images
    n, c, h, w = images.shape
    grid = images.reshape(n, c, parts, h // parts, parts, w // parts).permute(0, 2, 4, 1, 3, 5)
    return interpolate(grid.reshape(-1, c, h // parts, w // parts), size=(h, w), mode="bilinear", align_corners=False)


def fold(images: Float[Tensor, "n*parts**2 c h w"], parts: int) -> Float[Tensor, "n c h w"]:
    """Stored images that hold ``parts**2`` images each, reduced by averaging square blocks of pixels."""
    if parts == 1:
        return images
    m, c, h, w = images.shape
    grid = avg_pool2d(images, parts).reshape(m // parts**2, parts, parts, c, h // parts, w // parts)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, c, h, w)


def unfolded(records: Records, parts: int) -> Records:
    """The records that 8-bit stored images hold, rounded to 8 bits."""
    if parts == 1:
        return records
    pixels = torch.cat([unfold(chunk.float(), parts) for chunk in torch.split(records.images, 256)])
    labels = records.labels.repeat_interleave(parts**2)
    return Records(pixels.round().to(torch.uint8), labels, records.num_classes, records.normalisation)


def check_divides(parts: int, shape: tuple[int, ...]) -> None:
    """A ValueError if ``parts`` is not 1 and records are vectors, or it does not divide both sides of the images."""
    if parts > 1 and len(shape) == 1:
        raise ValueError(f"formation={parts} needs images, but the records are vectors of {shape[0]} numbers; take 1")
    if any(side % parts for side in shape[1:]):
        raise ValueError(
            f"formation={parts} does not divide images of {shape[1]}x{shape[2]} pixels; take a divisor of both sides"
        )


class Pool:
    """The latest synthetic images, with the teachers' mean logits for them.

    Attributes:
        tensors: the pool's whole content; a checkpoint is restored by changing them in place
            (`fedstill.base.weights.load`).
    """

    def __init__(self, like: Records, capacity: int) -> None:
        """Make an empty pool.

        Args:
            like: a record set with the images' shape, classes, normalisation and device.
            capacity: maximum number of images; further ones replace the oldest. An image takes a byte a pixel, 8 bytes
                for its label and 4 for every class.
        """
        device = like.images.device
        self._like, self._capacity = like, capacity
        self.tensors = {
            "images": torch.zeros(capacity, *like.shape, dtype=torch.uint8, device=device),
            "labels": torch.zeros(capacity, dtype=torch.int64, device=device),
            "logits": torch.zeros(capacity, like.num_classes, device=device),
            "added": torch.zeros((), dtype=torch.int64),
        }

    def __len__(self) -> int:
        return min(int(self.tensors["added"]), self._capacity)

    def add(self, records: Records, logits: Float[Tensor, "n classes"]) -> None:
        """Add images with the teachers' mean logits for them."""
        added = int(self.tensors["added"])
        last = slice(max(0, len(records) - self._capacity), None)
        places = torch.arange(added, added + len(records), device=logits.device)[last] % self._capacity
        for name, value in (("images", records.images), ("labels", records.labels), ("logits", logits)):
            self.tensors[name][places] = value[last]
        self.tensors["added"] += len(records)

    @property
    def images(self) -> Records:
        """The images with the labels that they were generated for."""
        images, labels = (self.tensors[name][: len(self)] for name in ("images", "labels"))
        return Records(images, labels, self._like.num_classes, self._like.normalisation)

    def examples(self) -> Examples:
        """The images with the teachers' logits as labels: the student's training set."""
        return Examples(self.images, self.tensors["logits"][: len(self)])
