"""Shared parts of the methods whose clients train by DP-SGD in rounds (DP-FL, Adap DP-FL, FedKD and FedKADP).

As in Jiang et al. 2024, Algorithm 2, with two changes: a round that no client's budget covers does not start, and each
client has its own budget, since the server knows which clients it asked.
"""

import math
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.evaluation import outputs
from fedstill.methods.averaging import Participation
from fedstill.privacy.fedkadp_claim import claimed_epsilon
from fedstill.privacy.releases import Event, Unbounded
from fedstill.protocol import Federation, Parameters, Released, Reply, Round, Settings, load, parameters
from fedstill.train.feedback import PrivateSGD


class PrivateRounds(Settings):
    """Settings of rounds of DP-SGD at the clients."""

    protects: ClassVar[str] = "record"
    rounds: PositiveInt = 100
    """Maximum number of communication rounds (T)."""
    participation: Participation = 0.1
    """Share of the clients asked in each round, drawn anew each time (s)."""
    local: PrivateSGD = PrivateSGD()
    """A client's training in one round."""
    noise_multiplier: NonNegativeFloat = 5.0
    """Initial standard deviation of a step's noise, in multiples of the clipping length (sigma_0); 0 guarantees
    nothing."""


class TrainedModel(Reply):
    """A client's model after DP-SGD from the server's model."""

    weights: Released[Parameters]


def end_early(fed: Federation, round: Round, event: Event, noise: float) -> None:
    """Let a run end before this round, whose release ``event`` no client's budget covers.

    Raises:
        ValueError: the round is the first, so the run would return its random start.
    """
    if round.number > 1:
        return
    remedy = "; raise --budget or --noise-multiplier"
    if noise and isinstance(event, Unbounded):
        remedy = f", since {event.reason}; leave out --budget"
    raise ValueError(f"a budget of {fed.budget} does not cover one round with noise multiplier {noise:g}{remedy}")


def schedule(rounds: int, start: float) -> Tensor:
    """A quantity that the server adapts, ``(rounds + 1,)``: entry t is its value after round t, at first ``start``."""
    return torch.full((rounds + 1,), start, dtype=torch.float64)


def replace_weights(model: nn.Module, weights: Parameters) -> float:
    """Load ``weights`` into ``model``; returns ``|theta_t - theta_{t-1}|``."""
    before = {name: w.clone() for name, w in parameters(model).items()}
    load(model, weights)
    return math.sqrt(sum(float((w - before[name]).double().square().sum()) for name, w in parameters(model).items()))


def public_scores(fed: Federation, model: nn.Module, method: Settings) -> dict[str, float]:
    """Loss and accuracy of ``model`` on the public records of the task.

    Raises:
        ValueError: there are no public records with the task's labels.
    """
    if fed.public is None or fed.public.num_classes != fed.num_classes:
        raise ValueError(
            f"{type(method).__name__} adapts to the model's loss, which must not come from private records; give the "
            "server public records of the task, as --public held=1000"
        )
    logits = torch.cat(outputs(model, fed.public))
    labels = fed.public.labels.to(logits.device)
    return {
        "loss": float(cross_entropy(logits, labels)),
        "accuracy": float((logits.argmax(1) == labels).double().mean()),
    }


def claimed(fed: Federation, settings: PrivateRounds, noises: list[float]) -> float | None:
    """FedKADP's own epsilon after rounds with these noise multipliers, for comparison; None if one is 0."""
    if min(noises) <= 0:
        return None
    clients = max(1, round(settings.participation * len(fed.clients)))
    rate = clients / len(fed.clients)
    return claimed_epsilon(noises, rate=rate, steps=settings.local.steps, clients=clients, delta=fed.delta)


def finite(**numbers: float) -> dict[str, float]:
    """The numbers without those that overflowed or are NaN, for the log."""
    return {name: value for name, value in numbers.items() if abs(value) < 1e300}
