"""The clients' networks as one ensemble: joint logits, features and batch statistics, differentiable in the images.

The ensemble of DENSE (Zhang et al. 2022, arXiv:2112.12371): ``D(x) = 1/m sum_k f_k(x)`` of logits. The networks may
differ in architecture, as long as they agree on images and classes.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, stack_module_state, vmap
from torch.linalg import vector_norm
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from fedstill.base.records import Trainable

_NetworkOutputs = tuple[Tensor, Tensor, Tensor]
"""One network's logits, its sum in L_BN and its features."""
_PLAIN = (bool, int, float, str, tuple, type(None))
MOST_KEPT = 2**30
"""Bytes of activations that a pass keeps for its backward; networks beyond run again there, to the same bits."""


@dataclass(frozen=True)
class TeacherOutputs:
    """Outputs of ``m`` teachers for one batch.

    Attributes:
        each: the logits of every teacher.
        bn: DENSE's L_BN; 0 if no teacher has batch norms.
        features: the inputs of every teacher's last linear layer, in the teachers' order; empty without such a layer.
        mean: D(x).
    """

    each: Float[Tensor, "n m classes"]
    bn: Float[Tensor, ""]
    features: list[Float[Tensor, "n d"]]
    mean: Float[Tensor, "n classes"]


Average = Literal["logits", "probabilities"]
"""Outputs that the ensemble averages: logits, or probabilities (D(x) is then the log of the mean, so always logits)."""


class Teachers:
    """The ensemble D of networks in eval mode, which share the given networks' weights and do not change.

    Attributes:
        networks: the teachers.
        weights: weights of the teachers in the mean, of which one at least is positive; None weighs all alike.

    Networks of one architecture can run as one, with stacked weights. On a CPU that is slow, because of grouped
    convolutions: one forward and backward pass for 64 images takes, relative to running the networks one after another
    (one thread, 5 and 20 networks), "dense-mnist" 1.4 and 2.1, "dense-cnn1" 1.2 and 2.4, "dense-cnn2" 2.0 and 2.5,
    "convnet:width=32,norm=batch" 1.7 and 3.5, "lenet" 0.8 and 0.7. So they run stacked on other devices only (not
    measured there), unless ``stacked`` says otherwise.

    Networks that run one after another need memory for `MOST_KEPT` bytes of activations and one network's, whatever
    their number.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        average: Average = "logits",
        weights: Float[Tensor, " m"] | None = None,
        stacked: bool | None = None,
    ) -> None:
        """Make teachers of networks without gradients.

        Args:
            networks: at least 1, from images to logits, all on one device.
            average: the outputs that D is the mean of.
            weights: as the attribute; the tensor itself is used, so a later change of its values counts.
            stacked: whether networks of one architecture run as one; None chooses by device. Networks that can't be
                stacked, as their code branches on values, run one after another.

        Raises:
            ValueError: there are no networks.
        """
        if not networks:
            raise ValueError("there are 0 teachers to learn from; at least 1 is needed")
        self.networks = [_frozen(network) for network in networks]
        self._average, self.weights = average, weights
        device = next((p.device for p in networks[0].parameters()), torch.device("cpu"))
        self.groups = _by_architecture(self.networks)
        self._sizes: dict[tuple[object, ...], int] = {}
        self.stacks: dict[int, _Stack] = {}
        if device.type != "cpu" if stacked is None else stacked:
            kinds = [[self.networks[k] for k in group] for group in self.groups]
            self.stacks = {i: _Stack(kind) for i, kind in enumerate(kinds) if len(kind) > 1}

    def __len__(self) -> int:
        """Number of teachers (m)."""
        return len(self.networks)

    @property
    def batch_norms(self) -> tuple[int, ...]:
        """Number of every teacher's batch norms; a teacher with 0 adds nothing to L_BN."""
        return tuple(len(_batch_norms(network)) for network in self.networks)

    def __call__(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """D(x) for normalised images; differentiable in ``x``."""
        return self.averaged(self.each(x))

    def averaged(self, each: Float[Tensor, "n m classes"]) -> Float[Tensor, "n classes"]:
        """D(x) from every teacher's logits: ``mean_k f_k(x)``, or ``log mean_k s(f_k(x))``; the mean has `weights`."""
        if self.weights is not None:
            return weighted(each, self.weights, self._average)
        if self._average == "logits":
            return each.mean(1)
        return each.log_softmax(2).logsumexp(1) - math.log(each.shape[1])

    def each(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n m classes"]:
        """Every teacher's logits for normalised images; differentiable in ``x``."""
        return self._run(x, with_bn=False).each

    def outputs(self, x: Float[Tensor, "n c h w"]) -> TeacherOutputs:
        """Logits, features and L_BN in one pass over normalised images; differentiable in ``x``.

        ``L_BN = 1/m sum_k sum_l ||mu_l(x) - mu_kl||_2 + ||var_l(x) - var_kl||_2`` over the batch norms l of network k
        (DENSE; DeepInversion, arXiv:1912.08795, equation 4): the distance of mean and biased variance of the layer's
        input, over batch and positions, from the running statistics.
        """
        return self._run(x, with_bn=True)

    def predict(self, records: Trainable, batch_size: int = 256) -> Float[Tensor, "n classes"]:
        """D(x) of all records in order, without gradients."""
        with torch.no_grad():
            starts = range(0, len(records.labels), batch_size)
            return torch.cat([self(records.inputs(slice(start, start + batch_size))) for start in starts])

    def _run(self, x: Tensor, *, with_bn: bool) -> TeacherOutputs:
        outputs: dict[int, _NetworkOutputs] = {}
        free = MOST_KEPT
        for index, group in enumerate(self.groups):
            size = self._graph_bytes(index, x, with_bn)
            kept = min(len(group), free // size) if size else len(group)
            free -= kept * size
            outputs.update(zip(group, self._run_group(index, x, with_bn, kept), strict=True))
        each, bn, features = zip(*(outputs[k] for k in range(len(self))), strict=True)
        logits = torch.stack(each, 1)
        return TeacherOutputs(logits, torch.stack(bn).mean(), list(features), self.averaged(logits))

    def _run_group(self, index: int, x: Tensor, with_bn: bool, kept: int) -> list[_NetworkOutputs]:
        if index in self.stacks:
            try:
                return self.stacks[index](x, with_bn)
            except RuntimeError:  # vmap can't run them; if the fault is in x, the next line raises it again
                outputs = self._run_each(index, x, with_bn, kept)
                del self.stacks[index]
                return outputs
        return self._run_each(index, x, with_bn, kept)

    def _run_each(self, index: int, x: Tensor, with_bn: bool, kept: int) -> list[_NetworkOutputs]:
        """The group's networks one after another, the first of which keep their activations."""
        networks = [self.networks[k] for k in self.groups[index]]
        outputs = [_run_network(network, x, with_bn) for network in networks[:kept]]
        return outputs + [
            checkpoint(_run_network, network, x, with_bn, use_reentrant=False) for network in networks[kept:]
        ]

    def _graph_bytes(self, index: int, x: Tensor, with_bn: bool) -> int:
        """Bytes of activations that a backward through a network of the group needs; 0 if there will be none."""
        if not (x.requires_grad and torch.is_grad_enabled()) or index in self.stacks:
            return 0
        key = (index, x.shape, with_bn)
        if key not in self._sizes:
            sizes: list[int] = []

            def count(saved: Tensor) -> None:
                sizes.append(saved.nbytes if saved.requires_grad else 0)  # not weights

            with saved_tensors_hooks(count, lambda _: None):  # type: ignore[arg-type, return-value]
                _run_network(self.networks[self.groups[index][0]], x, with_bn)
            self._sizes[key] = sum(sizes)
        return self._sizes[key]


def weighted(
    each: Float[Tensor, "n m classes"], weights: Float[Tensor, " m"], average: Average = "logits"
) -> Float[Tensor, "n classes"]:
    """``sum_k w_k f_k(x) / sum_k w_k`` of logits, or the log of this mean of probabilities; differentiable in both."""
    share = (weights / weights.sum())[:, None]
    if average == "logits":
        return (each * share).sum(1)
    return (each.softmax(2) * share).sum(1).clamp_min(torch.finfo(each.dtype).tiny).log()


class _Stack:
    """Networks of one architecture, run as one."""

    def __init__(self, networks: list[nn.Module]) -> None:
        self._weights = stack_module_state(networks)
        self._one = networks[0]

    def __call__(self, x: Tensor, with_bn: bool) -> list[_NetworkOutputs]:
        def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> _NetworkOutputs:
            return _run_network(self._one, x, with_bn, (parameters, buffers))

        outputs: _NetworkOutputs = vmap(run)(*self._weights)
        return list(zip(*(part.unbind() for part in outputs), strict=True))


def _run_network(
    network: nn.Module, x: Tensor, with_bn: bool, weights: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
) -> _NetworkOutputs:
    """One pass, with other weights if given, that records the inputs of batch norms and of the last linear layer."""
    terms: list[Tensor] = []
    last: list[Tensor] = []

    def compare(norm: Any, args: tuple[Tensor, ...]) -> None:
        if weights is None:
            terms.append(_moment_distance(args[0], norm.running_mean, norm.running_var))
        else:  # under vmap, which cannot run a Function of this form
            mean, variance = _moments(args[0])
            terms.append((mean - norm.running_mean).norm() + (variance - norm.running_var).norm())

    def record(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        last[:] = args[:1]

    norms = _batch_norms(network) if with_bn else []
    hooks = [norm.register_forward_pre_hook(compare) for norm in norms]
    hooks += [m.register_forward_pre_hook(record) for m in network.modules() if isinstance(m, nn.Linear)]
    try:
        logits: Tensor = network(x) if weights is None else functional_call(network, weights, (x,))
    finally:
        for hook in hooks:
            hook.remove()
    bn = torch.stack(terms).sum() if terms else logits.new_zeros(())
    return logits, bn, last[0].flatten(1) if last else logits.new_zeros(len(logits), 0)


def _moment_distance(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
    distance: Tensor = _MomentDistance.apply(x, m, v)  # type: ignore[no-untyped-call]
    return distance


class _MomentDistance(Function):
    """``||mu(x) - m||_2 + ||var(x) - v||_2`` for constant m and v, whose gradient in channel c of x is ``a x + b``.

    With N values in a channel, ``a = 2 (var - v) / (||var - v|| N)`` and ``b = (mu - m) / (||mu - m|| N) - a mu``,
    where 0 / 0 is 0. The backward of `_moments` makes six tensors of the size of x, this one makes one: the gradient of
    DENSE's loss takes 0.72 ("convnet:width=16,norm=batch") or 0.80 ("dense-mnist") of the time (one thread).
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, m: Tensor, v: Tensor) -> Tensor:
        mean, variance = _moments(x)
        of_mean, of_variance = mean - m, variance - v
        mean_distance: Tensor = vector_norm(of_mean)
        variance_distance: Tensor = vector_norm(of_variance)
        count = x.numel() // len(mean)
        offset = torch.where(mean_distance > 0, of_mean / mean_distance, 0.0) / count
        slope = torch.where(variance_distance > 0, of_variance / variance_distance, 0.0) * 2 / count
        ctx.save_for_backward(x, slope, offset - slope * mean)
        return mean_distance + variance_distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, slope, offset = ctx.saved_tensors
        zero, one = torch.zeros_like(slope), torch.ones_like(slope)
        # in one pass, as a norm that only scales and shifts
        return batch_norm(x, zero, one, gradient * slope, gradient * offset, eps=0.0), None, None


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel's mean and biased variance, over batch and positions; `torch.var_mean` takes twice the time."""
    flat = x.flatten(2) if x.ndim > 2 else x[:, :, None]
    mean = flat.mean(2).mean(0)
    lengths: Tensor = vector_norm(flat - mean[:, None], dim=2)
    return mean, lengths.square().mean(0) / flat.shape[2]


def _batch_norms(network: nn.Module) -> list[_BatchNorm]:
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def _frozen(network: nn.Module) -> nn.Module:
    """The network in eval mode with the same weights in memory, detached; the original keeps mode and gradients."""
    shared: dict[int, Tensor] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in network.parameters()}
    shared.update({id(b): b.detach() for b in network.buffers()})
    return copy.deepcopy(network, shared).eval()


def _by_architecture(networks: Sequence[nn.Module]) -> list[list[int]]:
    """Groups of positions of networks with the same layers, plain attributes of layers and shapes of weights."""
    groups: dict[str, list[int]] = {}
    for k, network in enumerate(networks):
        layers = [
            (name, type(m), sorted((key, value) for key, value in vars(m).items() if isinstance(value, _PLAIN)))
            for name, m in network.named_modules()
        ]
        shapes = [(name, tuple(value.shape), value.dtype) for name, value in network.state_dict().items()]
        groups.setdefault(repr((layers, shapes)), []).append(k)
    return list(groups.values())
