"""Ensemble distillation: a student learns what several teachers say together about public images.

Lin et al. 2020 (FedDF, arXiv:2006.07242) with equal weights; Sattler et al. 2021 (FedAUX, arXiv:2102.02514, equation 5)
with a weight for every teacher and image.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from fedstill.protocol import Settings
from fedstill.records import Records
from fedstill.seeds import isolated
from fedstill.train.local import Diverged, draw_seed, mode_of, reader


class Ensemble:
    """The weighted mean of teachers' outputs on ``n`` images, taken in one teacher at a time.

    ``y = softmax(sum_k s_k(x) f_k(x) / sum_k s_k(x))`` for outputs f that are logits; for probabilities the weighted
    mean itself.
    """

    def __init__(self, outputs: Literal["logits", "probabilities"]) -> None:
        """``outputs``: what is averaged."""
        self._outputs = outputs
        self._total: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def add(self, logits: Float[Tensor, "n classes"], weight: Float[Tensor, " n"] | float = 1.0) -> None:
        """Take a teacher in.

        Args:
            logits: what it says.
            weight: how much that counts, positive, for every image or for all alike.
        """
        outputs = logits if self._outputs == "logits" else logits.softmax(1)
        self._total = self._total + outputs * (weight[:, None] if isinstance(weight, Tensor) else weight)
        self._weight = self._weight + weight

    def targets(self) -> Float[Tensor, "n classes"]:
        """Probabilities for the student to learn.

        Raises:
            ValueError: there was no teacher.
        """
        if not isinstance(self._total, Tensor):
            raise ValueError("there are 0 teachers to distil from; at least 1 is needed")
        weight = self._weight[:, None] if isinstance(self._weight, Tensor) else self._weight
        mean = self._total / weight
        return mean.softmax(1) if self._outputs == "logits" else mean


class Distillation(Settings):
    """How the student is trained on the public images (FedAUX's protocol)."""

    epochs: PositiveInt = 10
    """Passes over the public images."""
    lr: PositiveFloat = 5e-5
    """Adam's learning rate."""
    batch_size: PositiveInt = 128
    """Images per step."""
    outputs: Literal["logits", "probabilities"] = "logits"
    """What of the clients' outputs is averaged; absent classes make this matter (a logit of 0, a probability of 0)."""

    def fit(
        self,
        student: nn.Module,
        images: Records,
        targets: Float[Tensor, "n classes"],
        rng: torch.Generator,
        on_epoch: Callable[[int, int], None] | None = None,
    ) -> None:
        """Train ``student`` in place to say ``targets``: Adam on the mean of ``KL(target || student)``.

        Raises:
            Diverged: its weights are not finite at the end.
        """
        weights = [p for p in student.parameters() if p.requires_grad]
        device = weights[0].device
        inputs, targets = reader(images, device), targets.to(device, torch.float32)
        adam = torch.optim.Adam(weights, lr=self.lr)
        with mode_of(student, training=True), isolated(draw_seed(rng)):
            for epoch in range(1, self.epochs + 1):
                order = torch.randperm(len(targets), generator=rng).to(device)
                for batch in torch.split(order, self.batch_size):
                    loss = kl_div(log_softmax(student(inputs(batch)), 1), targets[batch], reduction="batchmean")
                    adam.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    adam.step()
                if on_epoch is not None:
                    on_epoch(epoch, self.epochs)
        if not all(torch.isfinite(p).all() for p in student.parameters()):
            raise Diverged(f"distillation with lr={self.lr:g} left weights that are not finite; use a smaller one")
