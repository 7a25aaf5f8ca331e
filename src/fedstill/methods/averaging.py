"""Shared parts of the averaging methods: weighted sums over replies (one in memory at a time), client sampling."""

import builtins
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Gt, Le
from pydantic import AfterValidator
from torch import Tensor, nn

from fedstill.base.records import Records
from fedstill.base.seeds import isolated
from fedstill.evaluation import device_of, mode_of
from fedstill.protocol import Federation, Round
from fedstill.train.sgd import SGD, has_batch_norms


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
    """``sum_i weight_i * tensors_i / sum_i weight_i``, name by name, in float64; `load` rounds to the model's types."""
    total, sums = weighted_sum(terms)
    assert total > 0, "a mean needs a positive total weight"
    return {name: value / total for name, value in sums.items()}


Weighting = Literal["records", "uniform"]
"""Weights of the clients in a mean: their numbers of records, or equal weights."""


class Weighted(Protocol):
    """A reply with a model, or a part of one, and the number of records it was trained on."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by name."""

    @property
    def num_records(self) -> int:
        """Number of the records."""


def mean_weights(replies: Iterable[Weighted], weighting: Weighting) -> dict[str, Tensor]:
    """The mean of the clients' models."""
    return weighted_mean((1 if weighting == "uniform" else r.num_records, r.weights) for r in replies)


def _constant_rate(local: SGD) -> SGD:
    if local.milestones:
        raise ValueError(
            f"milestones {local.milestones} change the learning rate, but this method needs a constant one; leave "
            "milestones out"
        )
    return local


ConstantRate = Annotated[SGD, AfterValidator(_constant_rate)]
"""Local training with a constant learning rate, as `gradient_weight` assumes."""


def check_any_number(model: nn.Module, like: Records, method: str) -> None:
    """Refuse a model whose training can fail by the number of a client's records: that it failed would tell the number.

    Raises:
        ValueError: the model has BatchNorm, or fails on a batch of one record or of two.
    """
    if has_batch_norms(model):
        raise ValueError(
            f"{method} can't protect BatchNorm's running statistics, and a batch of one record has none, which would "
            "tell how many a client has; take a model without BatchNorm, as convnet"
        )
    for number in (1, 2):
        try:
            with mode_of(model, training=True), isolated(0), torch.no_grad():
                model(torch.zeros(number, *like.shape, device=device_of(model, like)))
        except Exception as error:
            words = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{method}'s network fails on a batch of {number} ({words}), so that a client without a reply would "
                "tell how many records it has; take layers that train on any number"
            ) from error


Participation = Annotated[float, Gt(0), Le(1)]
"""Share of the clients asked in a round."""


def sample(fed: Federation, participation: float, round: Round, of: Sequence[int] | None = None) -> list[int]:
    """Draw the clients of a round without replacement: ``max(1, round(participation * K))`` for K clients in all.

    ``of`` are the clients to draw from, by default all. If there are fewer of them than the number to draw, take all.
    """
    number = max(1, builtins.round(participation * len(fed.clients)))
    candidates = fed.clients if of is None else of
    if number >= len(candidates):
        return list(candidates)
    order = torch.randperm(len(candidates), generator=fed.rng("participation", round.number))
    return sorted(candidates[int(i)] for i in order[:number])


def gradient_weight(momentum: float, steps: int) -> float:
    """Total weight of the gradients of ``steps`` SGD steps in the model, ``sum_j a_j`` in units of the learning rate.

    Without momentum each gradient counts once. With momentum rho, a gradient also acts in all later steps:
    ``(steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho)`` (Wang et al. 2020, arXiv:2007.07481, section 4).
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
