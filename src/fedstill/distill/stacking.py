"""Stacking: an aggregator network of several networks' logits, and the server's Adam that trains it in rounds.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma, "Revisiting ensembling in one-shot federated
learning" (FENS), NeurIPS 2024 (arXiv:2411.07182), and the authors' code (sacs-epfl/fens: ``models/smallnn.py``,
``distoptim/FedAdam.py``).
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor, nn

from fedstill.base.seeds import isolated
from fedstill.base.settings import Settings
from fedstill.base.weights import load


def aggregator(networks: int, num_classes: int, hidden: int) -> nn.Sequential:
    """A perceptron from the logits of all networks, side by side, to the classes; ``hidden`` units for each network.

    Weights have PyTorch's random start.
    """
    units = networks * hidden
    return nn.Sequential(nn.Linear(networks * num_classes, units), nn.ReLU(), nn.Linear(units, num_classes))


@dataclass(frozen=True)
class Scaling:
    """Mean and deviation of each of an aggregator's inputs, by which it is trained on standardised inputs.

    An aggregator W, b of the inputs ``(x - mean) / deviation`` is the aggregator ``W / deviation``,
    ``b - W (mean / deviation)`` of the inputs x, so nobody else has to know.

    Attributes:
        mean: of each input, 0 for none.
        deviation: of each input, 1 for none.
    """

    mean: Float[Tensor, " inputs"]
    deviation: Float[Tensor, " inputs"]

    @classmethod
    def of_sums(cls, sums: Iterable[tuple[int, Float[Tensor, " inputs"], Float[Tensor, " inputs"]]]) -> Self:
        """From each client's number of records, their inputs' sums and sums of squares; a constant input stays."""
        counts, totals, squares = zip(*sums, strict=True)
        number = sum(counts)
        mean = torch.stack(totals).double().sum(0) / number
        variance = torch.stack(squares).double().sum(0) / number - mean.square()
        is_constant = variance <= 1e-6 * mean.square()  # up to float32's rounding
        return cls(mean.float(), variance.where(~is_constant, 1.0).sqrt().float())

    def folded(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of `aggregator` on the inputs as they are, from those on standardised inputs."""
        mean, deviation = (value.to(weights["0.weight"]) for value in (self.mean, self.deviation))
        first = weights["0.weight"] / deviation
        return {**weights, "0.weight": first, "0.bias": weights["0.bias"] - first @ mean}

    def change(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradient by the weights on standardised inputs, from that by the folded weights (the chain rule)."""
        mean, deviation = (value.to(change["0.weight"]) for value in (self.mean, self.deviation))
        first = (change["0.weight"] - change["0.bias"][:, None] * mean) / deviation
        return {**change, "0.weight": first}


class StackedModel(nn.Module):
    """Networks and the aggregator of their logits: ``g([f_1(x), ..., f_m(x)])``."""

    def __init__(self, networks: Sequence[nn.Module], head: nn.Module) -> None:
        """Stack the networks, in the order of the aggregator's inputs."""
        super().__init__()
        self.networks, self.head = nn.ModuleList(networks), head

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        logits: Tensor = self.head(self.stack(x))
        return logits

    def stack(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n inputs"]:
        """The networks' logits side by side: the aggregator's inputs."""
        return torch.cat([network(x) for network in self.networks], 1)


def rebuilt(network: nn.Module, weights: Mapping[str, Tensor]) -> StackedModel:
    """A `StackedModel` from its state; ``network`` is one of its networks, with any weights."""
    count = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("networks."))
    classes, units = weights["head.2.weight"].shape
    with isolated(0):  # the random start is overwritten
        model = StackedModel([copy.deepcopy(network) for _ in range(count)], aggregator(count, classes, units // count))
    load(model, weights)
    return model


class ServerAdam(Settings):
    """Adam at the server on the mean change of the clients' weights, without correction of the first steps' bias.

    Reddi et al., "Adaptive federated optimization", ICLR 2021 (arXiv:2003.00295), FedAdam of Algorithm 2, from moments
    of 0.
    """

    lr: PositiveFloat = 1e-3
    """Learning rate."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the mean change, in [0, 1)."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Decay of the mean square change, in [0, 1)."""
    adaptivity: PositiveFloat = 1e-3
    """Number added to the root of the mean square (tau)."""

    def step(self, weights: dict[str, Tensor], moments: dict[str, Tensor], change: Mapping[str, Tensor]) -> None:
        """Change ``weights`` and ``moments`` in place; ``moments`` holds ``m.NAME`` and ``v.NAME`` for each weight."""
        for name, value in weights.items():
            delta = change[name].to(value)
            m, v = moments[f"m.{name}"], moments[f"v.{name}"]
            m.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
            v.mul_(self.beta2).add_(delta.square(), alpha=1 - self.beta2)
            value.add_(m / (v.sqrt() + self.adaptivity), alpha=self.lr)


def first_moments(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments of `ServerAdam` before the first step: zeros."""
    return {f"{kind}.{name}": torch.zeros_like(value) for kind in ("m", "v") for name, value in weights.items()}
