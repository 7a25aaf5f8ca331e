"""Stacking: an aggregator network of several networks' logits, and the server's Adam that trains it in rounds.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma, "Revisiting ensembling in one-shot federated
learning" (FENS), NeurIPS 2024 (arXiv:2411.07182), and the authors' code (sacs-epfl/fens: ``models/smallnn.py``,
``distoptim/FedAdam.py``).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated

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
