"""Pool of the latest epochs' synthetic images, in tensors that a checkpoint can restore in place."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedstill.records import Examples, Records


class Pool:
    """The latest synthetic images, with the teachers' mean logits for them.

    Attributes:
        tensors: the pool's whole content; a checkpoint is restored by changing them in place (`fedstill.weights.load`).
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
