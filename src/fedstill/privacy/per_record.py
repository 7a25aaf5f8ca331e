"""Sums of per-record gradients, each clipped to a length, without holding all of them.

Book-keeping (Bu, Wang, Zha, Karypis 2023, arXiv:2210.00038): one forward pass and one backward pass that stops at the
layers' outputs. A layer's inputs and the gradients of its outputs give each record's squared length; the weighted sum
comes from what gave the length, so that rounding can't make one disagree with the other. Where a layer looks at one
position of a record, length and sum follow from input and gradient alone; where it looks at several, the
gradient of that layer is made for each record of a chunk. The length of several positions could also be had from their
inner products, which rounding makes worthless where positions cancel: a record could be longer than it seems.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

PerRecordLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps a batch's model output, inputs and labels to one loss per record ``(n,)``; a record's depends on it alone."""

_CHUNK = 64
"""Records of one pass: their activations should stay in the cache."""

_KEPT_BYTES = 128 * 2**20
"""Per-record gradients of one pass take no more than this, if one record's do not."""

_HAIR = 2.0**-21
"""Clipped gradients are shorter than allowed by this share, so that rounding in float32 can't make them longer."""

_LEAST = 1e-30
"""A record that had to be scaled by less counts as 0: float32 has no digits left there."""


@dataclass(frozen=True)
class _Rows:
    """A parameter's gradient for each record, in ``k`` slices; ``arrange`` gives a sum ``(k, m)`` its shape."""

    rows: Float32[Tensor, "k n m"]
    arrange: Callable[[Tensor], Tensor]

    def squares(self) -> Float64[Tensor, " n"]:
        lengths = torch.linalg.vector_norm(self.rows, dim=2, dtype=torch.float64)
        total: Tensor = lengths.square().sum(0)
        return total

    def weighted(self, factors: Float32[Tensor, " n"], kept: Tensor | None) -> Tensor:
        rows = self.rows if kept is None else self.rows[:, kept]
        return self.arrange(torch.stack([factors @ part for part in rows]))


@dataclass(frozen=True)
class _Outer:
    """A linear layer's weight gradient for each record: ``outputs[i] inputs[i]^T``."""

    outputs: Float32[Tensor, "n p"]
    inputs: Float32[Tensor, "n d"]
    shape: torch.Size

    def squares(self) -> Float64[Tensor, " n"]:
        lengths = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (self.outputs, self.inputs))
        return math.prod(lengths, start=torch.ones((), dtype=torch.float64)).square()

    def weighted(self, factors: Float32[Tensor, " n"], kept: Tensor | None) -> Tensor:
        g, a = (self.outputs, self.inputs) if kept is None else (self.outputs[kept], self.inputs[kept])
        return ((factors[:, None] * g).T @ a).view(self.shape)


_Piece = _Rows | _Outer


@dataclass(frozen=True)
class _Call:
    """One use of a layer in a forward pass."""

    layer: nn.Module
    input: Tensor
    version: int
    output: GradientEdge


class ClippedGradients:
    """Sums over records of a model's clipped gradients.

    Linear and convolutional layers, group, instance and layer normalisation have the fast way of this module. Any other
    layer with trainable parameters, a layer used twice, shared parameters and a model that mixes the records of a batch
    lead to ``torch.func`` for the whole model, where each record is seen alone.

    Args:
        model: used in place, in the mode and on the device that it has; gets no gradients and keeps no hooks.
        fast: False for ``torch.func`` anyway.

    Attributes:
        shapes: of the trainable parameters, in the order of ``model.parameters()``.
        device: where they are.

    Raises:
        ValueError: nothing is trainable, or a layer normalises by the batch (see `check_alone`).
    """

    def __init__(self, model: nn.Module, *, fast: bool = True) -> None:
        check_alone(model)
        self._model, self._checked = model, False
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._weights = [p for p in model.parameters() if p.requires_grad]
        if not self._weights:
            raise ValueError(f"{type(model).__name__} has no trainable parameters; set requires_grad on some")
        self.shapes = [w.shape for w in self._weights]
        self.device = self._weights[0].device
        self._layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        owners = Counter(id(p) for layer in self._layers for p in layer.parameters(recurse=False))
        self._fast = fast and all(_supported(m) for m in self._layers) and max(owners.values()) == 1
        held = (p for m in self._layers for p in m.parameters(recurse=False) if not isinstance(m, nn.Linear))
        size = sum(p.numel() for p in (held if self._fast else self._weights))
        self._chunk = max(1, min(_CHUNK, _KEPT_BYTES // (4 * size + 1)))

    def clipped_sum(
        self, x: Float[Tensor, "n ..."], y: Tensor, clip: float, loss: PerRecordLoss
    ) -> tuple[list[Tensor], Float64[Tensor, " n"]]:
        """The sum over records of ``g_i min(1, clip / |g_i|)``, and the lengths ``|g_i|`` over all parameters.

        A record whose gradient is not finite, or longer than ``1e30 clip``, counts as 0. No record's part is longer
        than ``clip``, rounding included; the sum itself is rounded as float32 sums are.

        Args:
            x: inputs.
            y: labels, ``n`` of them.
            clip: largest length. Positive.
            loss: see `PerRecordLoss`.

        Returns:
            One tensor for each trainable parameter in the order of ``model.parameters()``, and the lengths ``(n,)``.
        """

        def factors(norms: Tensor, _start: int) -> Tensor:
            scale = (clip * (1 - _HAIR) / norms).clamp_max(1.0)
            return torch.where(scale >= _LEAST, scale, 0.0)

        return self._sum(x, y, loss, factors)

    def weighted_sum(
        self, x: Float[Tensor, "n ..."], y: Tensor, weights: Float[Tensor, " n"], loss: PerRecordLoss
    ) -> tuple[list[Tensor], Float64[Tensor, " n"]]:
        """The sum over records of ``weights[i] g_i``, otherwise as `clipped_sum`."""
        return self._sum(x, y, loss, lambda norms, start: weights[start : start + len(norms)])

    def _sum(
        self, x: Tensor, y: Tensor, loss: PerRecordLoss, factors: Callable[[Tensor, int], Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        check_alone(self._model)
        totals = [torch.zeros_like(w, requires_grad=False) for w in self._weights]
        norms = [torch.zeros(0, dtype=torch.float64, device=totals[0].device)]
        for start in range(0, len(x), self._chunk):
            some = slice(start, start + self._chunk)
            pieces = self._pieces(x[some], y[some], loss)
            squares = [piece.squares() for piece in pieces]
            norms.append(torch.stack(squares).sum(0).sqrt())
            finite = torch.isfinite(norms[-1])
            f = torch.where(finite, factors(norms[-1], start), 0.0).to(totals[0].dtype)
            kept = None if bool(finite.all()) else finite.nonzero()[:, 0]  # 0 times NaN is not 0
            for total, piece in zip(totals, pieces, strict=True):
                total += piece.weighted(f if kept is None else f[kept], kept)
        return totals, torch.cat(norms)

    def _pieces(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> list[_Piece]:
        """Every parameter's gradients."""
        return (self._by_layers(x, y, loss) if self._fast else None) or self._by_records(x, y, loss)

    def _by_layers(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> list[_Piece] | None:
        """From the layers' inputs and the gradients of their outputs; None where that could be wrong."""
        calls: list[_Call] = []
        if any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers):
            return None
        new = not self._checked and len(x) > 1
        start = x.detach().clone().requires_grad_(x.is_floating_point()) if new else x
        with torch.enable_grad():
            given = start.clone() if new else x
            with _watched(self._layers, calls):
                output = self._model(given)
            losses = loss(output, given, y)
        if losses.shape != (len(x),):
            raise ValueError(f"the loss gives {tuple(losses.shape)} for {len(x)} records; it must give one per record")
        if not self._complete(calls, losses):
            return None
        edges = [call.output for call in calls]
        if new:  # a batch that is not the first dimension, or one whose records meet
            ends = [*edges, get_gradient_edge(start)] if start.requires_grad else edges
            one = torch.autograd.grad(losses[0], ends, retain_graph=True, allow_unused=True)
            if any(g is not None and bool((g[1:] != 0).any()) for g in one):
                return None
            self._checked = all(g is not None and bool((g[0] != 0).any()) for g in one)
        gradients = torch.autograd.grad(losses.sum(), edges)
        with torch.no_grad():
            found = {
                id(getattr(call.layer, name)): piece
                for call, g in zip(calls, gradients, strict=True)
                for name, piece in _layer(call.layer, call.input, g).items()
            }
        return [found[id(w)] for w in self._weights]

    def _complete(self, calls: list[_Call], losses: Tensor) -> bool:
        """Whether each trainable parameter was used once, by its layer, for all records, on inputs still there."""
        once = Counter(id(call.layer) for call in calls) == Counter(id(layer) for layer in self._layers)
        whole = all(c.input._version == c.version and len(c.input) == len(losses) and _batched(c) for c in calls)
        if not (once and whole and losses.grad_fn is not None):
            return False
        uses: Counter[int] = Counter()
        seen, waiting = {losses.grad_fn}, [losses.grad_fn]
        while waiting:
            for node, _ in waiting.pop().next_functions:
                if node is not None and hasattr(node, "variable"):
                    uses[id(node.variable)] += 1
                elif node is not None and node not in seen:
                    seen.add(node)
                    waiting.append(node)
        return all(uses[id(w)] == 1 for w in self._weights)

    def _by_records(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> list[_Piece]:
        """From a function of one record, by ``torch.func``."""

        def alone(weights: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
            one = record[None]
            found: Tensor = loss(functional_call(self._model, weights, (one,)), one, label[None])
            return found.sum()

        weights = {name: w.detach() for name, w in zip(self._names, self._weights, strict=True)}
        gradients = vmap(grad(alone), (None, 0, 0), randomness="different")(weights, x, y)
        return [_rows(gradients[name]) for name in self._names]


def check_alone(model: nn.Module) -> None:
    """Raise ValueError if a layer of ``model`` normalises by the batch, or keeps statistics of the records it saw."""
    for name, m in model.named_modules():
        by_batch = isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)
        if by_batch or isinstance(m, _InstanceNorm) and m.training and m.track_running_stats:
            raise ValueError(
                f"layer '{name}' is a {type(m).__name__} in train mode, whose statistics mix a batch's records, so "
                "that no clipping bounds one record's influence; take a model whose norms look at one image "
                "alone, for example 'convnet'"
            )


def _supported(m: nn.Module) -> bool:
    """Whether `_layer` knows this layer; no subclass, which might do something else."""
    if not {name for name, _ in m.named_parameters(recurse=False)} <= {"weight", "bias"} or is_parametrized(m):
        return False
    if type(m) is nn.Conv2d:
        plain = m.groups == 1 and m.dilation == (1, 1) and m.padding_mode == "zeros"
        return plain and not isinstance(m.padding, str)
    if type(m) is nn.InstanceNorm2d:
        return not m.track_running_stats
    return type(m) in (nn.Linear, nn.GroupNorm, nn.LayerNorm)


def _batched(call: _Call) -> bool:
    return call.input.ndim == 4 if isinstance(call.layer, nn.Conv2d | nn.InstanceNorm2d) else call.input.ndim > 1


@contextmanager
def _watched(layers: list[nn.Module], calls: list[_Call]) -> Iterator[None]:
    """Inside the block every use of a layer is added to ``calls``."""

    def note(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        if given and output.requires_grad:
            # the edge, not the tensor: what follows may change that in place
            calls.append(_Call(layer, given[0], given[0]._version, get_gradient_edge(output)))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rows(gradient: Float32[Tensor, "n ..."]) -> _Rows:
    return _Rows(gradient.flatten(1)[None], lambda total: total.view(gradient.shape[1:]))


def _layer(m: nn.Module, a: Float32[Tensor, "n ..."], g: Float32[Tensor, "n ..."]) -> dict[str, _Piece]:
    """Per-record gradients of a layer's trainable parameters by name, from its input and its output's gradient."""
    a = a.detach()
    makers: dict[str, Callable[[], _Piece]]
    if isinstance(m, nn.Linear):
        makers = {
            "weight": lambda: _linear(a, g, m.weight.shape),
            "bias": lambda: _rows(g if g.ndim == 2 else g.flatten(1, -2).sum(1)),
        }
    elif isinstance(m, nn.Conv2d):
        makers = {"weight": lambda: _conv(m, a, g), "bias": lambda: _rows(g.sum((2, 3)))}
    elif isinstance(m, nn.LayerNorm):
        makers = {
            "weight": lambda: _rows(_by_position(g * functional.layer_norm(a, m.normalized_shape, eps=m.eps), m)),
            "bias": lambda: _rows(_by_position(g, m)),
        }
    else:
        assert isinstance(m, nn.GroupNorm | nn.InstanceNorm2d)
        groups = m.num_groups if isinstance(m, nn.GroupNorm) else a.shape[1]
        makers = {
            "weight": lambda: _rows(_by_channel(g * functional.group_norm(a, groups, eps=m.eps))),
            "bias": lambda: _rows(_by_channel(g)),
        }
    return {name: makers[name]() for name, p in m.named_parameters(recurse=False) if p.requires_grad}


def _by_channel(t: Float32[Tensor, "n c ..."]) -> Float32[Tensor, "n c"]:
    return t.reshape(*t.shape[:2], -1).sum(2)


def _by_position(t: Float32[Tensor, "n ..."], m: nn.LayerNorm) -> Float32[Tensor, "n ..."]:
    return t.reshape(len(t), -1, *m.normalized_shape).sum(1)


def _linear(a: Float32[Tensor, "n *t d"], g: Float32[Tensor, "n *t p"], shape: torch.Size) -> _Piece:
    if a.ndim == 2:
        return _Outer(g, a, shape)
    return _rows(torch.bmm(g.flatten(1, -2).mT, a.flatten(1, -2)))


_FEW = 16
"""Products with fewer columns than this are slow."""


def _conv(m: nn.Conv2d, a: Float32[Tensor, "n c h w"], g: Float32[Tensor, "n k h2 w2"]) -> _Piece:
    """A convolution's weight gradient for each record: the input's patches times ``g``.

    With steps of one pixel and many channels, patches are written out in one direction only: moved in the other, they
    are the same rows.
    """
    (n, c), (k, height, width), (kh, kw) = a.shape[:2], g.shape[1:], m.kernel_size
    assert not isinstance(m.padding, str)
    ph, pw = m.padding
    padded = functional.pad(a, (pw, pw, ph, ph)) if ph or pw else a
    g = g.flatten(2)
    if m.stride != (1, 1) or c * kw < _FEW or height * width == 1:
        patches = padded.unfold(2, kh, m.stride[0]).unfold(3, kw, m.stride[1]).permute(0, 1, 4, 5, 2, 3)
        patches = patches.reshape(n, c * kh * kw, height * width)
        if height * width == 1:
            return _Outer(g[:, :, 0], patches[:, :, 0], m.weight.shape)
        rows = torch.bmm(patches, g.mT)
        return _Rows(rows.flatten(1)[None], lambda total: total.view(-1, k).T.reshape(m.weight.shape))
    strips = padded.unfold(3, width, 1).transpose(2, 3).contiguous()  # (n, c, kw, rows, width)
    rows = a.new_empty(kh, n, k, c * kw)
    for i, out in enumerate(rows):
        torch.bmm(g, strips[:, :, :, i : i + height].flatten(3).flatten(1, 2).mT, out=out)
    return _Rows(rows.flatten(2), lambda total: total.view(kh, k, c, kw).permute(1, 2, 0, 3))
