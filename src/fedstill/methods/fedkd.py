"""FedKD with DP: every client has a mentor of its own, only a mentee travels, its update as thin matrices.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature Communications
13, 2032 (2022); with DP-SGD it is a baseline of FedKADP.

Differs from the paper (docs/methods/fedkd.md has the whole list):

* mentor and mentee are trained by one DP-SGD whose clipping spans both: each enters the other's loss;
* no term for hidden states and attention, which are a transformer's; networks for images have the run's architecture;
* the server sends the whole mentee, since a client that is asked now and then lacks what others were sent between.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Gt, Lt
from jaxtyping import Float32, Int32
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.distill.low_rank import LowRank, compress, expand, matrices
from fedstill.methods.averaging import weighted_sum
from fedstill.methods.private_rounds import PrivateRounds
from fedstill.protocol import Client, Federation, Parameters, Released, Reply, parameters, step

Energy = Annotated[float, Gt(0), Lt(1)]

_LEAST_LOSS = 1e-3
"""The sum of both cross-entropies that the divergences are divided by is not taken to be less."""


class Factors(Reply):
    """What a client's training added to the mentee, see `fedstill.distill.low_rank`."""

    ranks: Released[Int32[Tensor, " matrices"]]
    values: Released[Float32[Tensor, " n"]]


class FedKD(PrivateRounds):
    """Mutual distillation under DP, and compressed updates."""

    energy_first: Energy = 0.95
    """Share of a matrix's squared singular values that is sent in the first round (T_min)."""
    energy_last: Energy = 0.98
    """And in the last (T_max); it grows evenly between."""

    def exchange(
        self, fed: Federation, chosen: Sequence[int], model: nn.Module, controls: dict[str, Tensor], now: int
    ) -> dict[str, Tensor]:
        """See `PrivateRounds.exchange`."""
        weights = parameters(model)
        replies = fed.ask(
            self.update,
            to=chosen,
            at_most={"n": sum(w.numel() for w in weights.values())},
            exactly={"matrices": len(matrices(weights))},
            weights=weights,
            noise=float(controls["noise"]),
            energy=self.energy_first + (self.energy_last - self.energy_first) * now / self.rounds,
        )
        expanded = (expand(LowRank(r.ranks.value, r.values.value), weights) for r in replies)
        total, sums = weighted_sum((1.0, update) for update in expanded if update is not None)
        if not total:
            raise ValueError("no client's update has the form of the model; nothing can be averaged")
        return {name: w + (sums[name] / total).to(w.device) for name, w in weights.items()}

    @step
    def update(self, client: Client, weights: Parameters, noise: float, energy: float) -> Factors:
        """E noisy steps for mentee and mentor together; the mentor stays."""
        mentor = client.new_model(client.state or None, draw=1)
        mechanism = self.local.mechanism(_Pair(client.new_model(weights), mentor), noise, loss=mutual_loss)
        released = client.release(mechanism, client.train)
        client.state |= _named(released.value, "mentor.")
        factors = released.map(
            lambda both: compress({n: w - weights[n].to(w.device) for n, w in _named(both, "mentee.").items()}, energy)
        )
        return Factors(ranks=factors.map(lambda f: f.ranks), values=factors.map(lambda f: f.values))


class _Pair(nn.Module):
    """Both networks on the same images."""

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


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
