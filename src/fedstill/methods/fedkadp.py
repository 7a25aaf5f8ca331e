"""FedKADP: DP-SGD with the last global model as teacher; a metric of stable training sets temperature and noise.

Jiang, Zhao, Li, Xue, "A personalized federated learning method based on knowledge distillation and differential
privacy", Electronics 2024, 13(17), 3538, Algorithms 1 and 2.

Differs from the paper (docs/methods/fedkadp.md has the whole list):

* each record's gradient is clipped, not a batch's; privacy="published" clips the batch's and guarantees nothing;
* loss and accuracy of the metric are those on public records; a round that no budget covers does not start;
* cross-entropy is at temperature 1 and both losses are means over the batch;
* the paper's own epsilon is logged as `claimed`; ledgers charge the sound one.
"""

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from fedstill.evaluation import mode_of
from fedstill.methods.averaging import sample, weighted_mean
from fedstill.methods.parts.private_rounds import (
    PrivateRounds,
    TrainedModel,
    claimed,
    end_early,
    finite,
    public_scores,
    replace_weights,
    schedule,
)
from fedstill.privacy.dp_sgd import UNBOUNDED, BatchClippedSGD
from fedstill.privacy.per_record import check_alone
from fedstill.privacy.releases import Event
from fedstill.protocol import Client, Federation, Method, Parameters, parameters, step
from fedstill.train.feedback import Feedback, PublicLoss


class FedKADP(PrivateRounds, Method):
    """Private training with the global model as teacher; feedback adapts distillation and noise."""

    needs_public: ClassVar[str] = "labelled"
    feedback: Feedback = Feedback()
    """Rules by which the metric sets temperature and noise."""
    privacy: Literal["sound", "published"] = "sound"
    """Clip every record's gradient, or as published the batch's, for which the noise is B times too small."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()  # w_0
        check_alone(model)
        public = PublicLoss(self.rounds)
        public.record(0, change=0.0, **public_scores(fed, model, self))
        sigma, rho = schedule(self.rounds, self.noise_multiplier), schedule(self.rounds, self.feedback.coldest)
        for round in fed.rounds(self.rounds, model, public.tensors, {"sigma": sigma, "rho": rho}):
            t = round.number
            noise, temperature = float(sigma[t - 1]), float(rho[t - 1])
            event = self.event(noise)
            able = fed.able(event, adaptive=self.adaptive)
            if not able:
                end_early(fed, round, event, noise)
                break
            if not self.adaptive and self.is_over(fed, sigma[: t - 1].tolist()):
                break
            chosen = sample(fed, self.participation, round, able)  # S_t
            replies = fed.ask(self.update, to=chosen, weights=parameters(model), noise=noise, temperature=temperature)
            change = replace_weights(model, weighted_mean((1, r.weights.value) for r in replies))  # w_t = 1/N sum_k w_k
            public.record(t, change=change, **public_scores(fed, model, self))
            metric = self.feedback.metric(public, t, self.rounds)
            rho[t] = self.feedback.temperature(metric)  # equation 17
            sigma[t] = self.feedback.noise(noise, metric)  # equation 20
            round.log(
                accuracy=fed.evaluate(model),
                epsilon=fed.spent(),
                claimed=claimed(fed, self, sigma[:t].tolist()),
                **finite(noise=noise, temperature=temperature, metric=metric, loss=float(public["loss"][t])),
            )
        return model

    @property
    def adaptive(self) -> bool:
        """Whether noise is chosen from earlier releases, so that a privacy filter must bound the total cost."""
        return self.privacy == "sound"

    def event(self, noise: float) -> Event:
        """The cost of one round."""
        return self.local.event(noise) if self.privacy == "sound" else UNBOUNDED

    def is_over(self, fed: Federation, noises: list[float]) -> bool:
        """Whether these rounds' epsilon, by the paper's formula, is above that of T rounds with sigma_0."""
        if not noises:
            return False
        spent, planned = (claimed(fed, self, each) for each in (noises, [self.noise_multiplier] * self.rounds))
        return spent is not None and planned is not None and spent > planned

    @step
    def update(self, client: Client, weights: Parameters, noise: float, temperature: float) -> TrainedModel:
        """Algorithm 1: student and teacher start as w_{t-1}; E noisy steps on CE plus rho^2 KL from the teacher."""
        loss = partial(taught_loss, teacher=client.new_model(weights), temperature=temperature)
        training = self.local.mechanism(client.new_model(weights), noise, loss=loss)
        mechanism = training if self.privacy == "sound" else BatchClippedSGD(training)
        return TrainedModel(weights=client.release(mechanism, client.train, adaptive=self.adaptive))


def taught_loss(output: Tensor, x: Tensor, y: Tensor, *, teacher: nn.Module, temperature: float) -> Tensor:
    """``CE(y, q) + rho^2 KL(p || q)`` of every record, ``(n,)``; p, q: teacher's and student's softmax at rho."""
    with torch.no_grad(), mode_of(teacher, training=False):
        p = (teacher(x) / temperature).log_softmax(1)
    q = (output / temperature).log_softmax(1)
    divergence = (p.exp() * (p - q)).sum(1)
    loss: Tensor = cross_entropy(output, y, reduction="none") + temperature**2 * divergence
    return loss
