"""FedKD with DP: every client keeps a mentor network and sends only the mentee's update, as low-rank factors.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature Communications
13, 2032 (2022); with DP-SGD it is a baseline of FedKADP.

Differs from the paper (docs/methods/fedkd.md has the whole list):

* one DP-SGD trains mentor and mentee and clips their joint gradient, since each enters the other's loss;
* there is no loss on hidden states and attention, which only transformers have; networks have the run's architecture;
* the server sends the whole mentee, since a client that is not asked in every round lacks the updates in between.
"""

from collections.abc import Iterable
from typing import Annotated

import torch
from annotated_types import Gt, Lt
from jaxtyping import Float32, Int32
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from fedstill.distill.low_rank import LowRank, compress, expand, matrices
from fedstill.methods.averaging import sample, weighted_sum
from fedstill.methods.parts.private_rounds import PrivateRounds, claimed, end_early
from fedstill.privacy.per_record import check_alone
from fedstill.protocol import Client, Federation, Method, Parameters, Released, Reply, load, parameters, step

Energy = Annotated[float, Gt(0), Lt(1)]

_LEAST_LOSS = 1e-3
"""Lower limit of the divergences' divisor, the sum of both cross-entropies."""


class Factors(Reply):
    """A client's update of the mentee as low-rank factors (see `fedstill.distill.low_rank`)."""

    ranks: Released[Int32[Tensor, " matrices"]]
    values: Released[Float32[Tensor, " n"]]


class FedKD(PrivateRounds, Method):
    """Mutual distillation under DP with compressed updates."""

    energy_first: Energy = 0.95
    """Share of a matrix's squared singular values that is sent in the first round (T_min)."""
    energy_last: Energy = 0.98
    """Share that is sent in the last round (T_max); it grows linearly."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model, noise = fed.new_model(), self.noise_multiplier  # the mentee
        check_alone(model)
        event = self.local.event(noise)
        for round in fed.rounds(self.rounds, model):
            able = fed.able(event)
            if not able:
                end_early(fed, round, event, noise)
                break
            weights = parameters(model)
            replies = fed.ask(
                self.update,
                to=sample(fed, self.participation, round, able),
                at_most={"n": sum(w.numel() for w in weights.values())},
                exactly={"matrices": len(matrices(weights))},
                weights=weights,
                noise=noise,
                energy=self.energy_first + (self.energy_last - self.energy_first) * round.number / self.rounds,
            )
            load(model, mean_update(replies, weights))
            round.log(
                accuracy=fed.evaluate(model),
                epsilon=fed.spent(),
                claimed=claimed(fed, self, [noise] * round.number),
                noise=noise,
            )
        return model

    @step
    def update(self, client: Client, weights: Parameters, noise: float, energy: float) -> Factors:
        """Take E noisy steps for mentee and mentor together; the mentor stays at the client."""
        mentor = client.new_model(client.state or None, draw=1)
        mechanism = self.local.mechanism(_Pair(client.new_model(weights), mentor), noise, loss=mutual_loss)
        released = client.release(mechanism, client.train)
        client.state |= _part(released.value, "mentor.")
        factors = released.map(
            lambda both: compress({n: w - weights[n].to(w.device) for n, w in _part(both, "mentee.").items()}, energy)
        )
        return Factors(ranks=factors.map(lambda f: f.ranks), values=factors.map(lambda f: f.values))


def mean_update(replies: Iterable[Factors], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` plus the plain mean of the updates; updates that don't fit the model are left out.

    Raises:
        ValueError: no update fits.
    """
    expanded = (expand(LowRank(r.ranks.value, r.values.value), weights) for r in replies)
    total, sums = weighted_sum((1.0, update) for update in expanded if update is not None)
    if not total:
        raise ValueError("no client's update has the model's shapes, so none can be averaged; check the clients")
    return {name: w + (sums[name] / total).to(w.device) for name, w in weights.items()}


class _Pair(nn.Module):
    """Mentee and mentor as one module, on the same images."""

    def __init__(self, mentee: nn.Module, mentor: nn.Module) -> None:
        super().__init__()
        self.mentee, self.mentor = mentee, mentor

    def forward(self, x: Tensor) -> Tensor:
        """Logits of mentee and mentor, ``(n, 2, classes)``."""
        return torch.stack([self.mentee(x), self.mentor(x)], 1)


def mutual_loss(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``CE_t + CE_s + (KL(s || t) + KL(t || s)) / (CE_t + CE_s)`` of every record, ``(n,)``.

    Divergences are means over classes, as in the authors' code; nothing is detached.
    """
    hard = sum((cross_entropy(output[:, i], y, reduction="none") for i in range(2)), output.new_zeros(len(y)))
    s, t = output.log_softmax(2).unbind(1)
    soft = ((s.exp() - t.exp()) * (s - t)).mean(1)  # both divergences
    total: Tensor = hard + soft / hard.clamp_min(_LEAST_LOSS)
    return total


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
