"""FedKADP: DP-SGD that also listens to the last global model; temperature and noise follow how stable training is.

Jiang, Zhao, Li, Xue, "A personalized federated learning method based on knowledge distillation and differential
privacy", Electronics 2024, 13(17), 3538, Algorithms 1 and 2.

Differs from the paper (docs/methods/fedkadp.md has the whole list):

* gradients of single records are clipped, not a batch's; `privacy` "published" does as printed, and guarantees nothing;
* loss and accuracy of the metric are those on public records, and a round that a budget does not cover is not begun;
* cross-entropy is at temperature 1 and both losses are means over the batch;
* the paper's account of epsilon is logged as `claimed` and charged to nobody.
"""

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.evaluate import mode_of
from fedstill.methods.dp_fl import DPFL, Trained
from fedstill.privacy.batch_clipping import BatchClippedSGD
from fedstill.protocol import Client, Federation, Parameters, step
from fedstill.train.feedback import Course, Feedback


class FedKADP(DPFL):
    """Private training with the global model as teacher, and feedback between distillation and noise."""

    looks: ClassVar[bool] = True
    feedback: Feedback = Feedback()
    """How temperature and noise follow the metric."""
    privacy: Literal["sound", "published"] = "sound"
    """Every record's gradient clipped, or the batch's as printed, whose noise is B times too little."""

    @property
    def adaptive(self) -> bool:
        """See `PrivateRounds.adaptive`."""
        return self.privacy == "sound"

    def over(self, fed: Federation, noises: Tensor, asked: Tensor, done: int) -> bool:
        """As printed: once the paper's epsilon is above that of all rounds with sigma_0."""
        if self.privacy == "sound" or not done:
            return False
        spent = self.claimed(fed, noises[:done], asked)
        planned = self.claimed(fed, torch.full((self.rounds,), self.noise_multiplier), asked)
        return spent is not None and planned is not None and spent > planned

    def spent(self, fed: Federation, noises: Tensor, asked: Tensor) -> float | None:
        """See `PrivateRounds.spent`; None as printed."""
        return super().spent(fed, noises, asked) if self.privacy == "sound" else None

    def controls(self) -> dict[str, Tensor]:
        """sigma_0 and rho_0."""
        return {**super().controls(), "temperature": torch.tensor(self.feedback.coldest, dtype=torch.float64)}

    def adapt(self, course: Course, now: int, controls: dict[str, Tensor]) -> dict[str, float]:
        """sigma_t and rho_t from the metric."""
        metric = self.feedback.metric(course, now, self.rounds)
        controls["temperature"].fill_(self.feedback.temperature(metric))
        controls["noise"].fill_(self.feedback.noise(float(controls["noise"]), metric))
        return {"metric": metric, "loss": float(course["loss"][now])}

    @step
    def update(self, client: Client, weights: Parameters, noise: float, temperature: float) -> Trained:
        """Algorithm 1: student <- teacher <- w_{t-1}; E noisy steps on CE and rho^2 KL from the teacher."""
        loss = partial(taught_loss, teacher=client.new_model(weights), temperature=temperature)
        training = self.local.mechanism(client.new_model(weights), noise, loss=loss)
        mechanism = training if self.privacy == "sound" else BatchClippedSGD(training)
        return Trained(weights=client.release(mechanism, client.train, adaptive=self.adaptive))


def taught_loss(output: Tensor, x: Tensor, y: Tensor, *, teacher: nn.Module, temperature: float) -> Tensor:
    """``CE(y, q) + rho^2 KL(p || q)`` of every record, ``(n,)``: p the teacher's, q the student's softmax at rho."""
    with torch.no_grad(), mode_of(teacher, training=False):
        p = (teacher(x) / temperature).log_softmax(1)
    q = (output / temperature).log_softmax(1)
    divergence = (p.exp() * (p - q)).sum(1)
    loss: Tensor = cross_entropy(output, y, reduction="none") + temperature**2 * divergence
    return loss
