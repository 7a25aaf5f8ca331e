"""Training of a network's features on public records with classes of their own."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedstill import models
from fedstill.records import Records
from fedstill.seeds import draw_seed, isolated
from fedstill.train.adam import Adam


class _PublicClassifier(nn.Module):
    """A network's features and a linear classifier on them."""

    def __init__(self, network: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(width, num_classes)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n classes"]:
        logits: Tensor = self.head(models.features(self.network, x))
        return logits


def learn_public_classes(model: nn.Module, public: Records, training: Adam, rng: torch.Generator) -> None:
    """Train in place the part of ``model`` that `models.features` runs, with a new linear classifier on it.

    The classifier, of as many classes as ``public`` has, is dropped afterwards; that of ``model`` does not change.
    ``rng`` draws its start and the batches.
    """
    with isolated(draw_seed(rng)):
        both = _PublicClassifier(model, models.feature_width(model, public.shape), public.num_classes)
    training.fit(both.to(public.labels.device), public, rng)
