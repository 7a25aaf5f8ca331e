"""Training on a small synthetic set, as in the evaluation protocol of dataset condensation."""

from collections.abc import Callable
from typing import Annotated

import torch
from annotated_types import Ge, Le, Lt
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from fedstill.base.records import Examples, Records
from fedstill.base.settings import Settings
from fedstill.train.augment import DSA, CutMix, Strategy
from fedstill.train.sgd import SGD, Augment, Epochs, Loss, cross_entropy


class CondensedTraining(Settings):
    """SGD with DSA whose learning rate falls to a tenth after half of the epochs (DC's evaluation protocol)."""

    epochs: PositiveInt = 500
    """Passes over the synthetic set."""
    lr: PositiveFloat = 0.1
    """Learning rate in the first half of the epochs; a tenth of it after."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Momentum in [0, 1)."""
    weight_decay: NonNegativeFloat = 5e-4
    """Weight decay."""
    batch_size: PositiveInt = 256
    """Records per step."""
    augment: Strategy = "color_crop_cutout_scale_rotate"
    """Operations of DSA, joined by "_", from color, crop, cutout, flip, scale, rotate, one drawn for every batch with
    parameters for each image; or "none"."""
    cutmix: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the batches in which each image gets a rectangle of another one (CutMix), as in IDC; 0 for none."""

    def fit(
        self,
        model: nn.Module,
        records: Records | Examples,
        rng: torch.Generator,
        on_epoch: Callable[[int, int], None] | None = None,
        checkpoint: Epochs | None = None,
        loss: Loss | None = None,
    ) -> int:
        """Train ``model`` in place on ``records``, with the arguments and the result of `SGD.fit`; no DSA for vectors.

        A ``loss`` takes the place of the cross-entropy, and gets the inputs as they are augmented and mixed.

        The learning rate falls after epoch ``floor(epochs / 2) + 1``, as in DC, which runs one epoch more with a tenth
        of this learning rate.
        """
        sgd = SGD(
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
            epochs=self.epochs,
            milestones=(self.epochs // 2 + 1,),
        )
        augment: Augment = DSA(self.augment if records.inputs(slice(0, 1)).ndim == 4 else "none")
        usual: Loss = cross_entropy
        if self.cutmix:
            mix = CutMix(self.cutmix, augment)
            augment, usual = mix.augment, mix.loss
        return sgd.fit(
            model, records, rng, augment=augment, loss=loss or usual, on_epoch=on_epoch, checkpoint=checkpoint
        )
