"""The synthetic images of the latest epochs, in tensors that a checkpoint can restore in place."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedstill.records import Records
from fedstill.train.sgd import Taught


class Pool:
    """The last images that were put in, with what the teachers said about them.

    Attributes:
        tensors: all it holds; changing them in place (`fedstill.protocol.load`) restores a pool.
    """

    def __init__(self, like: Records, capacity: int) -> None:
        """An empty pool.

        Args:
            like: carries shape, classes, normalisation and device.
            capacity: how many images fit; further ones replace the oldest. An image takes a byte a pixel and 8 plus 4
                for every class.
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
        """Put images in, with the teachers' mean logits for them."""
        added = int(self.tensors["added"])
        last = slice(max(0, len(records) - self._capacity), None)
        places = torch.arange(added, added + len(records), device=logits.device)[last] % self._capacity
        for name, value in (("images", records.images), ("labels", records.labels), ("logits", logits)):
            self.tensors[name][places] = value[last]
        self.tensors["added"] += len(records)

    def taught(self) -> Taught:
        """The images as something to train a student on by `fedstill.distill.ensemble.distillation_loss`."""
        n, held = len(self), self.tensors
        images = Records(held["images"][:n], held["labels"][:n], self._like.num_classes, self._like.normalisation)
        return Taught(images, held["logits"][:n])
