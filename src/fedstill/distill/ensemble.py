"""Ensemble distillation: training of a student on several teachers' joint prediction for public images.

Lin et al. 2020 (FedDF, arXiv:2006.07242) with equal weights; Sattler et al. 2021 (FedAUX, arXiv:2102.02514, equation 5)
with a weight for every teacher and image. `distillation_loss` is the loss of DENSE's student.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from fedstill.base.records import Examples, Trainable
from fedstill.train.sgd import Adam, Epochs

Temperature = Annotated[float, Ge(0.01), Le(1000)]
"""T of a softmax; outside these limits, rounding errors dominate."""


class Ensemble:
    """A weighted mean of teachers' outputs on ``n`` images; teachers are added one at a time.

    ``y = softmax(sum_k s_k(x) f_k(x) / sum_k s_k(x))`` if the outputs f are logits; the weighted mean itself if they
    are probabilities.
    """

    def __init__(self, outputs: Literal["logits", "probabilities"]) -> None:
        """Start the mean of ``outputs`` without a teacher."""
        self._outputs = outputs
        self._total: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def add(self, logits: Float[Tensor, "n classes"], weight: Float[Tensor, " n"] | float = 1.0) -> None:
        """Add a teacher's logits with a positive weight, one for each image or one for all."""
        outputs = logits if self._outputs == "logits" else logits.softmax(1)
        self._total = self._total + outputs * (weight[:, None] if isinstance(weight, Tensor) else weight)
        self._weight = self._weight + weight

    def targets(self) -> Float[Tensor, "n classes"]:
        """Target probabilities of the student; a ValueError without teachers."""
        if not isinstance(self._total, Tensor):
            raise ValueError("there are 0 teachers to distil from; at least 1 is needed")
        weight = self._weight[:, None] if isinstance(self._weight, Tensor) else self._weight
        mean = self._total / weight
        return mean.softmax(1) if self._outputs == "logits" else mean


class Distillation(Adam):
    """Training of the student on public images: Adam on the mean of ``KL(target || student)``."""

    lr: PositiveFloat = 5e-5
    """Learning rate."""
    batch_size: PositiveInt = 128
    """Images per step."""
    epochs: PositiveInt = 10
    """Passes over the public images."""
    outputs: Literal["logits", "probabilities"] = "logits"
    """Teachers' outputs to average. For absent classes the two differ: a logit of 0 or a probability of 0."""

    def distil(
        self,
        student: nn.Module,
        images: Trainable,
        targets: Float[Tensor, "n classes"],
        rng: torch.Generator,
        on_epoch: Callable[[int, int], None] | None = None,
        checkpoint: Epochs | None = None,
    ) -> None:
        """Train ``student`` in place to predict ``targets`` for ``images``, as `Adam.fit`."""
        examples = Examples(images, targets.float())
        self.fit(student, examples, rng, loss=_divergence_loss, on_epoch=on_epoch, checkpoint=checkpoint)


def distillation_loss(
    logits: Float[Tensor, "n classes"], teacher: Float[Tensor, "n classes"], temperature: float = 1.0
) -> Float[Tensor, ""]:
    """``T^2 mean_i KL(softmax(teacher_i / T) || softmax(logits_i / T))``: DENSE's L_dis (Hinton, arXiv:1503.02531).

    Only ``logits``, the student's, get gradients. ``teacher`` has the teachers' mean logits.
    """
    # T^2 compensates for the gradients, which fall with 1 / T^2
    return temperature**2 * _divergence(logits / temperature, (teacher.detach() / temperature).softmax(1))


def _divergence(logits: Tensor, targets: Tensor) -> Tensor:
    return kl_div(log_softmax(logits, 1), targets, reduction="batchmean")


def _divergence_loss(logits: Tensor, x: Tensor, targets: Tensor) -> Tensor:
    return _divergence(logits, targets)
