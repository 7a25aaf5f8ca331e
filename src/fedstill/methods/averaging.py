"""Shared parts of the averaging methods: sums over replies (one pass, one in memory, float64), client sampling."""

import builtins
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Gt, Le
from pydantic import AfterValidator
from torch import Tensor

from fedstill.protocol import Federation, Round
from fedstill.train.sgd import SGD


def weighted_sum(terms: Iterable[tuple[float, Mapping[str, Tensor]]]) -> tuple[float, dict[str, Tensor]]:
    """Total weight and ``sum_i weight_i * tensors_i``, name by name, in float64."""
    total, sums = 0.0, dict[str, Tensor]()
    for weight, tensors in terms:
        total += weight
        for name, value in tensors.items():
            part = value.to(torch.float64)
            if name in sums:
                sums[name].add_(part, alpha=weight)
            else:
                sums[name] = part * weight
    return total, sums


def weighted_mean(terms: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """``sum_i weight_i * tensors_i / sum_i weight_i``, name by name, in float64.

    Copying it into a model rounds it once to the model's types, integer buffers included.
    """
    total, sums = weighted_sum(terms)
    assert total > 0, "a mean needs a positive total weight"
    return {name: value / total for name, value in sums.items()}


Weighting = Literal["records", "uniform"]
"""Weights of the clients in a mean: by their numbers of records, or all alike."""


class Weighted(Protocol):
    """A reply with a model, or a part of one, and the records it was trained on."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by name."""

    @property
    def num_records(self) -> int:
        """Number of the records."""


def mean_weights(replies: Iterable[Weighted], weighting: Weighting) -> dict[str, Tensor]:
    """The mean of the clients' weights (`weighted_mean`)."""
    return weighted_mean((1 if weighting == "uniform" else r.num_records, r.weights) for r in replies)


def _constant_rate(local: SGD) -> SGD:
    if local.milestones:
        raise ValueError(f"milestones {local.milestones} change the learning rate, which this method takes as constant")
    return local


ConstantRate = Annotated[SGD, AfterValidator(_constant_rate)]
"""Local training whose gradients all count with one learning rate, as `accumulated` assumes."""

Participation = Annotated[float, Gt(0), Le(1)]
"""Share of the clients asked in a round."""


def sample(fed: Federation, participation: float, round: Round, of: Sequence[int] | None = None) -> list[int]:
    """The clients of a round: ``max(1, round(participation * K))`` of all K without replacement.

    ``of`` are the clients to draw from, all by default; if they are no more than that number, all of them.
    """
    number = max(1, builtins.round(participation * len(fed.clients)))
    among = fed.clients if of is None else of
    if number >= len(among):
        return list(among)
    order = torch.randperm(len(among), generator=fed.rng("participation", round.number))
    return sorted(among[int(i)] for i in order[:number])


def accumulated(momentum: float, steps: int) -> float:
    """Total weight of the gradients of ``steps`` SGD steps in the model, ``sum_j a_j`` in units of the learning rate.

    Without momentum each counts once; with momentum rho the gradient of step j goes on for the rest of the steps:
    ``(steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho)`` (Wang et al. 2020, arXiv:2007.07481, section 4).
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
