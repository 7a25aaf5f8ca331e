"""FAFI's two halves: training of features with prototypes, and one network of all clients' features.

Zeng, Huang, Zhou, Wu, Wan, Chen, Cai, "Does one-shot give the best shot? Mitigating model inconsistency in one-shot
federated learning", ICML 2025, and the authors' code (zenghui9977/FAFI_ICML25: ``oneshot_algorithms/ours/``).
"""

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

from fedstill import models
from fedstill.base.weights import load


def prototypes(network: nn.Module) -> Float[Tensor, "classes d"]:
    """The weight of the network's last linear layer, the parameter itself: row c is the prototype of class c.

    Raises:
        ValueError: the network has no linear layer.
    """
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError(f"{type(network).__name__} has 0 linear layers, whose last one would hold the prototypes")
    return linear[-1].weight


class PrototypeNetwork(nn.Module):
    """A network whose output is the pair of its features, scaled to length 1, and its prototypes.

    It shares the network's parameters. The bias of the last layer is not used.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Float[Tensor, "n c h w"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "classes d"]]:
        """Unit features and prototypes."""
        return normalize(models.features(self.network, x)), prototypes(self.network)


def alignment_loss(
    features: Float[Tensor, "m d"], means: Float[Tensor, "classes d"], labels: Int64[Tensor, " n"], temperature: float
) -> Float[Tensor, ""]:
    """``L_con + 2 CE(z P', y) + CE(P P', id)`` of unit features z of one or more views of n records, view by view.

    P are the prototypes. The authors' code adds the second term once as classifier and once as contrast of feature and
    prototype; at their temperature of 1 both are the same.
    """
    y = labels.repeat(len(features) // len(labels))
    apart = cross_entropy(means @ means.T, torch.arange(len(means), device=means.device))
    return supervised_contrast(features, y, temperature) + 2 * cross_entropy(features @ means.T, y) + apart


def supervised_contrast(
    features: Float[Tensor, "m d"], labels: Int64[Tensor, " m"], temperature: float
) -> Float[Tensor, ""]:
    """``-mean_i mean_{p in P(i)} log(exp(z_i z_p / t) / sum_{k != i} exp(z_i z_k / t))``, P(i) the others of i's class.

    Khosla et al., "Supervised contrastive learning", NeurIPS 2020 (arXiv:2004.11362), eq. 2, of unit features z. A
    feature alone in its class adds 0.
    """
    similar = features @ features.T / temperature
    itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
    log_shares = similar - similar.masked_fill(itself, -math.inf).logsumexp(1, keepdim=True)
    partners = (labels[:, None] == labels) & ~itself
    return -((log_shares * partners).sum(1) / partners.sum(1).clamp_min(1)).mean()


class FusedModel(nn.Module):
    """Networks as one: the weighted sum of their features, scaled to length 1, against the mean of their prototypes.

    ``normalize(sum_k w_k f_k(x)) P'``. With ``noise``, an input without information, client k's weight for an image is
    ``w_k (1 - cos(f_k(x), f_k(noise)))``.
    """

    shares: Tensor
    noise: Tensor | None

    def __init__(
        self,
        networks: Sequence[nn.Module],
        shares: Float[Tensor, " m"],
        noise: Float[Tensor, "1 c h w"] | None = None,
    ) -> None:
        """Stack the networks with their weights w."""
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.register_buffer("shares", shares)
        self.register_buffer("noise", noise)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Similarities to the mean prototypes, as logits."""
        fused = torch.zeros((), device=x.device)
        for network, share in zip(self.networks, self.shares, strict=True):
            features = models.features(network, x)
            weight = share
            if self.noise is not None:
                empty = models.features(network, self.noise)
                weight = share * (1 - cosine_similarity(features, empty))[:, None]
            fused = fused + weight * features
        means = torch.stack([prototypes(network) for network in self.networks]).mean(0)
        return normalize(fused) @ means.T


def rebuilt(network: nn.Module, weights: Mapping[str, Tensor]) -> FusedModel:
    """A `FusedModel` from its state; ``network`` is one of its networks, with any weights."""
    shares = weights["shares"]
    noise = torch.zeros_like(weights["noise"]) if "noise" in weights else None
    model = FusedModel([copy.deepcopy(network) for _ in shares], torch.zeros_like(shares), noise)
    load(model, weights)
    return model
