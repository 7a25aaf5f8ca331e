"""Sums of clipped per-record gradients, without storing the gradients of all records.

The gradients of one parameter are a `Piece`, which computes their squared lengths and weighted sum.

Book-keeping (Bu, Wang, Zha, Karypis 2023, arXiv:2210.00038): one forward pass and one backward pass that stops at the
layers' outputs. A layer's inputs and the gradients of its outputs give each record's squared length and the weighted
sum. Both are computed from the same values, so that rounding can't make them disagree. If a layer sees one position of
a record, its inputs and gradients suffice; if it sees several, its gradient is computed for each record of a chunk.
Ghost norms (inner products of positions) are not used: where positions cancel, rounding makes them too short.

A record's clipped gradient does not depend on the other records, to the bit (see `fedstill.privacy.rowwise`), and the
sum is float64: otherwise weights for which gradients are nothing but rounding would let one record change all terms.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

from fedstill.privacy import rowwise


@dataclass(frozen=True)
class RecordGradients:
    """A parameter's gradient for each record in ``k`` slices; ``arrange`` turns a sum ``(k, m)`` into its shape."""

    rows: Float32[Tensor, "k n m"]
    arrange: Callable[[Tensor], Tensor]

    def squares(self) -> Float64[Tensor, " n"]:
        """Each record's squared length."""
        lengths = torch.linalg.vector_norm(self.rows, dim=2, dtype=torch.float64)
        total: Tensor = lengths.square().sum(0)
        return total

    def by_record(self) -> list[Float32[Tensor, "n ..."]]:
        """The numbers that define the gradients, a row for each record."""
        return [self.rows.movedim(1, 0)]

    def weighted(self, factors: Float32[Tensor, " n"], chosen: Tensor | None) -> Tensor:
        """The float64 sum of gradients times ``factors``, over the ``chosen`` records; None for all."""
        rows = self.rows if chosen is None else self.rows[:, chosen]
        return self.arrange(torch.stack([factors.double() @ part.double() for part in rows]))


@dataclass(frozen=True)
class OuterProducts:
    """A linear layer's weight gradient for each record: ``outputs[i] inputs[i]^T``."""

    outputs: Float32[Tensor, "n p"]
    inputs: Float32[Tensor, "n d"]
    shape: torch.Size

    def squares(self) -> Float64[Tensor, " n"]:
        """Each record's squared length."""
        lengths = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (self.outputs, self.inputs))
        return math.prod(lengths, start=torch.ones((), dtype=torch.float64)).square()

    def by_record(self) -> list[Float32[Tensor, "n ..."]]:
        """The numbers that define the gradients, a row for each record."""
        return [self.outputs, self.inputs]

    def weighted(self, factors: Float32[Tensor, " n"], chosen: Tensor | None) -> Tensor:
        """The float64 sum of gradients times ``factors``, over the ``chosen`` records; None for all."""
        g, a = (self.outputs, self.inputs) if chosen is None else (self.outputs[chosen], self.inputs[chosen])
        return ((factors[:, None].double() * g.double()).T @ a.double()).view(self.shape)


Piece = RecordGradients | OuterProducts


def supported(m: nn.Module) -> bool:
    """Whether `gradients_of` covers this layer; False for subclasses, which might compute something else."""
    if not {name for name, _ in m.named_parameters(recurse=False)} <= {"weight", "bias"} or is_parametrized(m):
        return False
    if type(m) is nn.Conv2d:
        plain = m.groups == 1 and m.dilation == (1, 1) and m.padding_mode == "zeros"
        return plain and not isinstance(m.padding, str)
    if type(m) is nn.InstanceNorm2d:
        return not m.track_running_stats
    return type(m) in (nn.Linear, nn.GroupNorm, nn.LayerNorm)


def rows_of(gradient: Float32[Tensor, "n ..."]) -> RecordGradients:
    """Per-record gradients ``(n, ...)`` of a parameter, in the form of those that are computed by layers."""
    return RecordGradients(gradient.flatten(1)[None], lambda total: total.view(gradient.shape[1:]))


def gradients_of(m: nn.Module, a: Float32[Tensor, "n ..."], g: Float32[Tensor, "n ..."]) -> dict[str, Piece]:
    """Per-record gradients of a layer's trainable parameters, from its input ``a`` and its output's gradient ``g``."""
    a = a.detach()
    makers: dict[str, Callable[[], Piece]]
    if isinstance(m, nn.Linear):
        makers = {
            "weight": lambda: _linear(a, g, m.weight.shape),
            "bias": lambda: rows_of(g if g.ndim == 2 else g.flatten(1, -2).sum(1)),
        }
    elif isinstance(m, nn.Conv2d):
        makers = {"weight": lambda: _conv(m, a, g), "bias": lambda: rows_of(g.sum((2, 3)))}
    elif isinstance(m, nn.LayerNorm):
        makers = {
            "weight": lambda: rows_of(_by_position(g * functional.layer_norm(a, m.normalized_shape, eps=m.eps), m)),
            "bias": lambda: rows_of(_by_position(g, m)),
        }
    else:
        assert isinstance(m, nn.GroupNorm | nn.InstanceNorm2d)
        groups = m.num_groups if isinstance(m, nn.GroupNorm) else a.shape[1]
        makers = {
            "weight": lambda: rows_of(_by_channel(g * functional.group_norm(a, groups, eps=m.eps))),
            "bias": lambda: rows_of(_by_channel(g)),
        }
    return {name: makers[name]() for name, p in m.named_parameters(recurse=False) if p.requires_grad}


def _by_channel(t: Float32[Tensor, "n c ..."]) -> Float32[Tensor, "n c"]:
    return t.reshape(*t.shape[:2], -1).sum(2)


def _by_position(t: Float32[Tensor, "n ..."], m: nn.LayerNorm) -> Float32[Tensor, "n ..."]:
    return t.reshape(len(t), -1, *m.normalized_shape).sum(1)


def _linear(a: Float32[Tensor, "n *t d"], g: Float32[Tensor, "n *t p"], shape: torch.Size) -> Piece:
    if a.ndim == 2:
        return OuterProducts(g, a, shape)
    return rows_of(torch.bmm(g.flatten(1, -2).mT, a.flatten(1, -2)))


_FEW = 16
"""Number of columns below which matrix products are slow."""


def _conv(m: nn.Conv2d, a: Float32[Tensor, "n c h w"], g: Float32[Tensor, "n k h2 w2"]) -> Piece:
    """A convolution's weight gradient for each record: the input's patches times ``g``.

    With stride 1 and many channels, patches are unfolded in one direction only: shifted in the other direction, they
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
            return OuterProducts(g[:, :, 0], patches[:, :, 0], m.weight.shape)
        rows = torch.bmm(patches, g.mT)
        return RecordGradients(rows.flatten(1)[None], lambda total: total.view(-1, k).T.reshape(m.weight.shape))
    strips = padded.unfold(3, width, 1).transpose(2, 3).contiguous()  # (n, c, kw, rows, width)
    rows = a.new_empty(kh, n, k, c * kw)
    for i, out in enumerate(rows):
        torch.bmm(g, strips[:, :, :, i : i + height].flatten(3).flatten(1, 2).mT, out=out)
    return RecordGradients(rows.flatten(2), lambda total: total.view(kh, k, c, kw).permute(1, 2, 0, 3))


PerRecordLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of a batch's model output, inputs and labels that returns the losses ``(n,)``, each of one record alone."""
_MEMORY = 128 * 2**20
"""Largest size in bytes of the per-record gradients of one pass, unless one record needs more."""
_MARGIN = 2.0**-21
"""Share by which clipped gradients are shorter than allowed, so that rounding in float32 can't make them longer."""
_LEAST = 1e-30
"""Smallest scaling factor; a record that needs a smaller one counts as 0, as float32 has no digits left."""


@dataclass(frozen=True)
class _Call:
    """One use of a layer in a forward pass."""

    layer: nn.Module
    input: Tensor
    version: int
    output: GradientEdge


class ClippedGradients:
    """Sums over records of a model's clipped gradients.

    Linear and convolutional layers, group, instance and layer normalisation use the fast algorithm of this module. Any
    other layer with trainable parameters, a layer used twice, shared parameters, a model that mixes the records of a
    batch, or a module of another package, which may mix them for some weights only, make the whole model use
    ``torch.func``, which runs the model on each record alone.

    Args:
        model: the model, used in its current mode and on its device; it is left without gradients and hooks.
        fast: False always uses ``torch.func``.

    Attributes:
        shapes: shapes of the trainable parameters, in the order of ``model.parameters()``.
        device: device of the parameters.

    Raises:
        ValueError: nothing is trainable, or a layer normalises by the batch (see `check_alone`).
    """

    def __init__(self, model: nn.Module, *, fast: bool = True) -> None:
        check_alone(model)
        self._model = model
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._weights = [p for p in model.parameters() if p.requires_grad]
        if not self._weights:
            raise ValueError(f"{type(model).__name__} has no trainable parameters; set requires_grad on some")
        self.shapes = [w.shape for w in self._weights]
        self.device = self._weights[0].device
        self._layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        owners = Counter(id(p) for layer in self._layers for p in layer.parameters(recurse=False))
        known = rowwise.is_known(model) and all(supported(m) for m in self._layers)
        self._fast = fast and known and max(owners.values()) == 1
        self._wide = False
        self._asked: tuple[object, ...] | None = None
        self._among: tuple[int, ...] = (1,)

    def clipped_sum(
        self, x: Float[Tensor, "n ..."], y: Tensor, clip: float, loss: PerRecordLoss
    ) -> tuple[list[Float64[Tensor, "..."]], Float64[Tensor, " n"]]:
        """The sum over records of ``g_i min(1, clip / |g_i|)``, and the lengths ``|g_i|`` over all parameters.

        The sum is one tensor for each trainable parameter, in the order of ``model.parameters()``.

        Formal guarantees:

        * No record's term is longer than ``clip``, rounding included, and none depends on another record, to the bit.
        * A record's term moves the sum by at most ``clip``, rounding of the sum included, among up to 2^15 records: a
          term is shorter than ``clip`` by `_MARGIN`, and n float64 additions round by at most ``n^2 2^-52 clip``.
        * A record whose gradient is not finite, or longer than ``1e30 clip``, counts as 0.
        """
        check_alone(self._model)
        totals = [torch.zeros_like(w, requires_grad=False, dtype=torch.float64) for w in self._weights]
        norms = [torch.zeros(0, dtype=torch.float64, device=totals[0].device)]
        for where, size in rowwise.batches(len(x), self._sizes(x, y, loss) if len(x) else (1,)):
            count = where.stop - where.start
            pieces = self._pieces(rowwise.padded(x[where], size), rowwise.padded(y[where], size), loss)
            lengths = _squares(pieces).sqrt()
            finite = torch.isfinite(lengths)
            scale = (clip * (1 - _MARGIN) / lengths).clamp_max(1.0)
            f = torch.where(finite & (scale >= _LEAST), scale, 0.0).to(self._weights[0].dtype)
            f[count:] = 0
            norms.append(lengths[:count])
            chosen = None if bool(finite.all()) else finite.nonzero()[:, 0]  # 0 times NaN is not 0
            for total, piece in zip(totals, pieces, strict=True):
                total += piece.weighted(f if chosen is None else f[chosen], chosen)
        return totals, torch.cat(norms)

    def _sizes(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> tuple[int, ...]:
        """Sizes of batches in which a record's gradient depends on the record alone.

        Leaves the fast way where only ``torch.func`` has such sizes, as for layers that mix the records of a batch.
        """
        shapes = (x.shape[1:], x.dtype, x.device, y.shape[1:], y.dtype)
        asked = (*shapes, loss, torch.get_num_threads(), *(m.training for m in self._model.modules()))
        if asked != self._asked:  # a key of the whole model in every step would take longer than a small step
            self._among, self._asked = self._found(x, y, loss), asked
        return self._among

    def _found(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> tuple[int, ...]:
        for wide in (self._wide, True) if self._fast else ():
            if (among := self._tested(True, wide, x, y, loss)) != (1,):
                self._wide = wide
                return among
        among = self._tested(False, False, x, y, loss)
        self._fast = self._fast and among == (1,)
        return among

    def _tested(self, fast: bool, wide: bool, x: Tensor, y: Tensor, loss: PerRecordLoss) -> tuple[int, ...]:
        def make() -> rowwise.Compute:
            other = ClippedGradients(rowwise.randomised(self._model), fast=fast)
            other._wide = wide
            its_loss = rowwise.randomised(loss)

            def rows(x: Tensor) -> list[Tensor]:
                pieces = other._pieces(x, y.new_zeros(len(x), *y.shape[1:]), its_loss)  # labels that any loss takes
                return [_squares(pieces), *(rows for piece in pieces for rows in piece.by_record())]

            return rows

        stored = (p for m in self._layers for p in m.parameters(recurse=False) if not isinstance(m, nn.Linear))
        entries = sum(p.numel() for p in (stored if fast else self._weights))
        among = tuple(size for size in rowwise.SIZES if size <= _MEMORY // (4 * entries + 1)) or (1,)
        return rowwise.sizes(("gradients", fast, wide, rowwise.form(self._model, loss, y[:0])), make, x, among)

    def _pieces(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> list[Piece]:
        fast = self._by_layers(x, y, loss) if self._fast else None
        return fast or self._by_records(x, y, loss)

    def _by_layers(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> list[Piece] | None:
        """Gradients from the layers' inputs and the gradients of their outputs; None if that could be wrong."""
        calls: list[_Call] = []
        if any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers):
            return None
        with torch.enable_grad():
            with _watched(self._layers, calls), rowwise.WideLinear() if self._wide else nullcontext():
                output = self._model(x)
            losses = loss(output, x, y)
        _check_losses(losses, len(x))
        if not self._complete(calls, losses):
            return None
        edges = [call.output for call in calls]
        gradients = torch.autograd.grad(losses.sum(), edges)
        with torch.no_grad():
            by_parameter = {
                id(getattr(call.layer, name)): piece
                for call, g in zip(calls, gradients, strict=True)
                for name, piece in gradients_of(call.layer, call.input, g).items()
            }
        return [by_parameter[id(w)] for w in self._weights]

    def _complete(self, calls: list[_Call], losses: Tensor) -> bool:
        """Whether each trainable parameter was used once, by its layer, for all records, on inputs still unchanged."""
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

    def _by_records(self, x: Tensor, y: Tensor, loss: PerRecordLoss) -> list[Piece]:
        """Gradients by ``torch.func``, of each record alone."""

        def alone(weights: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
            one = record[None]
            losses: Tensor = loss(functional_call(self._model, weights, (one,)), one, label[None])
            _check_losses(losses, 1)
            return losses.sum()

        weights = {name: w.detach() for name, w in zip(self._names, self._weights, strict=True)}
        gradients = vmap(grad(alone), (None, 0, 0), randomness="different")(weights, x, y)
        return [rows_of(gradients[name]) for name in self._names]


def _squares(pieces: list[Piece]) -> Float64[Tensor, " n"]:
    return torch.stack([piece.squares() for piece in pieces]).sum(0)


def _check_losses(losses: Tensor, count: int) -> None:
    if losses.shape != (count,):
        raise ValueError(f"the loss gives {tuple(losses.shape)} for {count} records; it must give one per record")


def check_alone(model: nn.Module) -> None:
    """Raise ValueError if a layer of ``model`` normalises by the batch or updates running statistics."""
    for name, m in model.named_modules():
        by_batch = isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)
        if by_batch or isinstance(m, _InstanceNorm) and m.training and m.track_running_stats:
            raise ValueError(
                f"layer '{name}' is a {type(m).__name__} in train mode, whose statistics mix a batch's records, so "
                "that no clipping bounds one record's influence; take a model whose norms look at one image "
                "alone, for example 'convnet'"
            )


def _batched(call: _Call) -> bool:
    return call.input.ndim == 4 if isinstance(call.layer, nn.Conv2d | nn.InstanceNorm2d) else call.input.ndim > 1


@contextmanager
def _watched(layers: list[nn.Module], calls: list[_Call]) -> Iterator[None]:
    """Record every use of a layer inside the block in ``calls``."""

    def record(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        if given and output.requires_grad:
            # the edge, not the tensor, which later layers may change in place
            calls.append(_Call(layer, given[0], given[0]._version, get_gradient_edge(output)))

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
