"""The clients' networks as one ensemble: joint logits, features and batch statistics, differentiable in the images.

The ensemble of DENSE (Zhang et al. 2022, arXiv:2112.12371): ``D(x) = 1/m sum_k f_k(x)`` of logits, differentiable in x.
The networks may differ in architecture, as long as they agree on images and classes.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedstill.records import Trainable

_Found = tuple[Tensor, Tensor, Tensor]
"""One network's logits, its sum in L_BN and its features."""
_PLAIN = (bool, int, float, str, tuple, type(None))


@dataclass(frozen=True)
class Look:
    """Outputs of ``m`` teachers for one batch.

    Attributes:
        each: their logits.
        bn: DENSE's L_BN, 0 where no teacher has batch normalisation.
        features: of every teacher, in their order, what its last linear layer sees; empty for one without any.
        mean: D(x).
    """

    each: Float[Tensor, "n m classes"]
    bn: Float[Tensor, ""]
    features: list[Float[Tensor, "n d"]]
    mean: Float[Tensor, "n classes"]


Average = Literal["logits", "probabilities"]
"""Outputs that the ensemble averages: logits, or probabilities (D(x) is then the log of their mean, so logits)."""


def averaged(each: Float[Tensor, "n m classes"], average: Average) -> Float[Tensor, "n classes"]:
    """D(x): ``mean_k f_k(x)``, or ``log mean_k s(f_k(x))``."""
    if average == "logits":
        return each.mean(1)
    return each.log_softmax(2).logsumexp(1) - math.log(each.shape[1])


class Teachers:
    """Networks that are asked together, in eval mode; their weights get no gradients and nothing about them changes.

    Attributes:
        networks: these, sharing their weights with those that were given.

    Networks of one architecture can run as one, their weights stacked. One forward and backward pass for 64 images,
    times relative to running them one after another (one thread of a CPU, medians of 3, 5 and 20 networks):
    "dense-mnist" 1.4 and 2.1, "dense-cnn1" 1.2 and 2.4, "dense-cnn2" 2.0 and 2.5, "convnet:width=32,norm=batch" 1.7
    and 3.5, "lenet" 0.8 and 0.7. Grouped convolutions are what's slow. So on a CPU they run one after another, and
    stacked on other devices (not measured there), unless ``stacked`` says otherwise.
    """

    def __init__(
        self, networks: Sequence[nn.Module], *, average: Average = "logits", stacked: bool | None = None
    ) -> None:
        """Share the networks' weights, without the graph.

        Args:
            networks: at least 1, from images to logits, all on one device.
            average: what D is the mean of.
            stacked: whether those of one architecture run as one; None chooses by device. Where a network can't (its
                code branches on values, say), its kind runs one after another all the same.

        Raises:
            ValueError: there are none.
        """
        if not networks:
            raise ValueError("there are 0 teachers to learn from; at least 1 is needed")
        self.networks = [_frozen(network) for network in networks]
        self._average = average
        device = next((p.device for p in networks[0].parameters()), torch.device("cpu"))
        self._groups = _by_architecture(self.networks)
        self._stacks: dict[int, _Stack] = {}
        if device.type != "cpu" if stacked is None else stacked:
            kinds = [[self.networks[k] for k in group] for group in self._groups]
            self._stacks = {i: _Stack(kind) for i, kind in enumerate(kinds) if len(kind) > 1}

    def __len__(self) -> int:
        """Number of teachers (m)."""
        return len(self.networks)

    @property
    def batch_norms(self) -> tuple[int, ...]:
        """Number of every teacher's layers with batch statistics; a teacher with 0 adds nothing to L_BN."""
        return tuple(len(_batch_norms(network)) for network in self.networks)

    def __call__(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """D(x) for normalised images; differentiable in ``x``."""
        return self.averaged(self.each(x))

    def averaged(self, each: Float[Tensor, "n m classes"]) -> Float[Tensor, "n classes"]:
        """D(x) from every teacher's logits."""
        return averaged(each, self._average)

    def each(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n m classes"]:
        """Every teacher's logits for normalised images; differentiable in ``x``."""
        return self._look(x, with_bn=False).each

    def look(self, x: Float[Tensor, "n c h w"]) -> Look:
        """Logits, features and L_BN in one pass over normalised images; differentiable in ``x``.

        ``L_BN = 1/m sum_k sum_l ||mu_l(x) - mu_kl||_2 + ||var_l(x) - var_kl||_2`` over the batch normalisation layers
        l of each network (DENSE; DeepInversion, arXiv:1912.08795, equation 4): mean and biased variance of the layer's
        input over batch and positions against the running ones. A network without such layers adds nothing.
        """
        return self._look(x, with_bn=True)

    def predict(self, records: Trainable, batch_size: int = 256) -> Float[Tensor, "n classes"]:
        """D of all records in order, without gradients."""
        with torch.no_grad():
            starts = range(0, len(records.labels), batch_size)
            return torch.cat([self(records.inputs(slice(start, start + batch_size))) for start in starts])

    def _look(self, x: Tensor, *, with_bn: bool) -> Look:
        found: list[_Found] = [None] * len(self)  # type: ignore[list-item]
        for index, group in enumerate(self._groups):
            for k, one in zip(group, self._of_group(index, x, with_bn), strict=True):
                found[k] = one
        each, bn, features = zip(*found, strict=True)
        logits = torch.stack(each, 1)
        return Look(logits, torch.stack(bn).mean(), list(features), self.averaged(logits))

    def _of_group(self, index: int, x: Tensor, with_bn: bool) -> list[_Found]:
        if index in self._stacks:
            try:
                return self._stacks[index](x, with_bn)
            except RuntimeError:  # vmap can't; where the fault is in x, the loop below says so again
                result = [_watched(self.networks[k], x, with_bn) for k in self._groups[index]]
                del self._stacks[index]
                return result
        return [_watched(self.networks[k], x, with_bn) for k in self._groups[index]]


class _Stack:
    """Networks of one architecture, run as one."""

    def __init__(self, networks: list[nn.Module]) -> None:
        self._weights = stack_module_state(networks)
        self._one = networks[0]

    def __call__(self, x: Tensor, with_bn: bool) -> list[_Found]:
        def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> _Found:
            return _watched(self._one, x, with_bn, (parameters, buffers))

        found: _Found = vmap(run)(*self._weights)
        return list(zip(*(part.unbind() for part in found), strict=True))


def _watched(
    network: nn.Module, x: Tensor, with_bn: bool, weights: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
) -> _Found:
    """One pass, with other weights if given, that looks at the inputs of batch norms and of the last linear layer."""
    terms: list[Tensor] = []
    seen: list[Tensor] = []

    def compare(norm: Any, args: tuple[Tensor, ...]) -> None:
        mean, variance = _moments(args[0])
        terms.append((mean - norm.running_mean).norm() + (variance - norm.running_var).norm())

    def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[:] = args[:1]

    norms = _batch_norms(network) if with_bn else []
    hooks = [norm.register_forward_pre_hook(compare) for norm in norms]
    hooks += [m.register_forward_pre_hook(keep) for m in network.modules() if isinstance(m, nn.Linear)]
    try:
        logits: Tensor = network(x) if weights is None else functional_call(network, weights, (x,))
    finally:
        for hook in hooks:
            hook.remove()
    bn = torch.stack(terms).sum() if terms else logits.new_zeros(())
    return logits, bn, seen[0].flatten(1) if seen else logits.new_zeros(len(logits), 0)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel's mean and biased variance, over batch and positions; `torch.var_mean` takes twice the time."""
    flat = x.flatten(2) if x.ndim > 2 else x[:, :, None]
    mean = flat.mean(2).mean(0)
    return mean, (flat - mean[:, None]).square().mean(2).mean(0)


def _batch_norms(network: nn.Module) -> list[_BatchNorm]:
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def _frozen(network: nn.Module) -> nn.Module:
    """The network in eval mode with the same weights in memory, detached; the original keeps mode and gradients."""
    shared: dict[int, Tensor] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in network.parameters()}
    shared.update({id(b): b.detach() for b in network.buffers()})
    return copy.deepcopy(network, shared).eval()


def _by_architecture(networks: Sequence[nn.Module]) -> list[list[int]]:
    """Positions of networks whose layers, plain attributes of layers and shapes of weights are the same."""
    groups: dict[str, list[int]] = {}
    for k, network in enumerate(networks):
        layers = [
            (name, type(m), sorted((key, value) for key, value in vars(m).items() if isinstance(value, _PLAIN)))
            for name, m in network.named_modules()
        ]
        shapes = [(name, tuple(value.shape), value.dtype) for name, value in network.state_dict().items()]
        groups.setdefault(repr((layers, shapes)), []).append(k)
    return list(groups.values())
