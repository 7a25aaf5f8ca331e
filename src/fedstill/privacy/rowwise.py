"""Computation whose result for one record does not depend, to the last bit, on the other records.

Kernels of matrix products and convolutions round a row by the shape of the batch and, for some shapes, by the row's
place in it. A server that chooses weights and maps can amplify such last bits without limit, so that one record would
change every other row. So records are computed in batches of a few public sizes, padded, for which `sizes` has tested
that a row's bits depend on the row alone; without such sizes, one record at a time.

The test decides from public facts only: the computation with random weights, on random inputs. Kernels are chosen by
shapes, types, strides and threads, not by values, so that random values show what kernels do to most values.
Elementwise kernels differ for few: they compute whole registers of values by other code than the rest, and a sigmoid in
the rest rounds otherwise for one value of thirty, an exponential for one of millions perhaps. So a size passes only if
no elementwise kernel has a rest, whatever the values are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fedstill.base.records import Trainable
from fedstill.base.seeds import stream
from fedstill.evaluation import device_of, mode_of

Compute = Callable[[Tensor], Sequence[Tensor]]
"""Function of inputs ``(n, ...)`` that returns tensors ``(n, ...)`` with one row for each record."""
SIZES = tuple(range(8, 65, 8))
"""Sizes of batches, ascending: small enough for little padding and for activations to stay in the CPU's cache."""


class _Question:
    """The cache key of one check whether a network treats the rows of a batch independently.

    Equal keys share an answer. `take` gives the check's inputs once, so that the cache keeps no model alive.
    """

    def __init__(self, key: object, make: Callable[[], Compute], like: Tensor, among: tuple[int, ...]) -> None:
        facts = (tuple(like.shape[1:]), like.dtype, like.device, torch.get_num_threads(), among)
        self._key, self._work = (key, facts), [(make, like[:0])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def take(self) -> tuple[Callable[[], Compute], Tensor, tuple[int, ...]]:
        """The arguments, once: the cache of answers must not keep a model alive."""
        make, like = self._work.pop()
        return make, like, self._key[1][-1]


def sizes(key: object, make: Callable[[], Compute], like: Tensor, among: tuple[int, ...] = SIZES) -> tuple[int, ...]:
    """The sizes of ``among`` for which a row's bits depend on the row alone, ascending; ``(1,)`` without any.

    Args:
        key: public facts that determine which kernels run (see `form`); answers are cached by it.
        make: makes the computation with random weights (see `randomised`).
        like: inputs of the computation, for their shape, type and device; their values are not used.
        among: sizes of batches to test, ascending.
    """
    return _sizes(_Question(key, make, like, among))


@lru_cache(maxsize=512)
def _sizes(question: _Question) -> tuple[int, ...]:
    make, like, among = question.take()
    if not like.is_floating_point() or among == (1,):
        return (1,)
    try:
        return _tested(make(), like, among)
    except Exception:  # a model that can't take random weights or inputs; it is not known what its kernels do
        return (1,)


def _tested(compute: Compute, like: Tensor, among: tuple[int, ...]) -> tuple[int, ...]:
    if not among:
        return (1,)
    whole, rng = among[-1], stream(0, "rowwise inputs")
    both = torch.randn(2, whole, *like.shape[1:], generator=rng, dtype=torch.float64).to(like)
    first, others = both[0].clone(), both[1]
    with _Rests() as rests:
        expected = [rows.clone() for rows in compute(first)]
    if rests.found:  # three threads leave none of 48 rows perhaps
        return _tested(compute, like, among[:-1])
    if any(len(rows) != whole or not torch.isfinite(rows).all() for rows in expected):
        return (1,)
    for parity in (0, 1):  # each record one place further, every second neighbour another record
        moved = first.roll(1, 0)
        moved[parity::2] = others[parity::2]
        stay = slice(1 - parity, None, 2)
        if not _equal([rows.roll(1, 0)[stay] for rows in expected], [rows[stay] for rows in compute(moved)]):
            return (1,)

    def stands(size: int) -> bool:
        with _Rests() as rests:
            rows = compute(first[:size].clone())
        return not rests.found and _equal([rows[:size] for rows in expected], rows)

    return tuple(size for size in among if stands(size)) or (1,)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class _Rests(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note whether an elementwise kernel on the CPU computes some values by other code than the rest.

    Such a kernel shares its values out to threads in equal parts, and computes as many of a part as fill two registers
    at a time; the rest of the part, one by one. Kernels that it does not know count as elementwise.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What ``func`` returns."""
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__.rstrip("_")
        is_fused = (kwargs or {}).get("alpha", 1) != 1  # a sum with a factor is rounded once or twice
        is_square = name == "pow" and args[1] == 2
        if is_fused or not (is_square or name in _ALIKE):
            self.found |= any(_has_rest(value) for value in tree_leaves(result) if isinstance(value, Tensor))
        return result


def _has_rest(value: Tensor) -> bool:
    if value.device.type != "cpu" or not value.is_floating_point() or not value.numel():
        return False
    number, most, together = value.numel(), torch.get_num_threads(), _REGISTERS // value.element_size()
    shared = {min(most, -(-number // _GRAIN)), most if number > _SHARED else 1}
    return any(part % together for part in (number, *(-(-number // threads) for threads in shared)))


_REGISTERS = 128
"""Bytes of the two largest registers of any processor (AVX-512) that a kernel computes at a time."""
_GRAIN, _SHARED = 32768, 16384
"""Values of an elementwise kernel for each thread, at least (``at::internal::GRAIN_SIZE``); and number of values above
which some kernels, as that of GELU, take all threads."""
_MOVES = (
    "alias arange as_strided cat clone col2im constant_pad_nd copy detach diagonal empty empty_like expand fill "
    "flip full full_like gather im2col index index_select lift_fresh masked_fill new_empty new_full new_ones "
    "new_zeros ones ones_like permute repeat reshape roll scalar_tensor scatter select select_backward slice "
    "slice_backward split split_with_sizes squeeze stack t transpose unbind unfold unsqueeze "
    "view view_as_complex view_as_real where zero zeros zeros_like _reshape_alias _to_copy _unsafe_view"
)
"""Operations that move values."""
_EXACT = (
    "abs add amax amin clamp clamp_max clamp_min div eq ge gt hardtanh hardtanh_backward isfinite le leaky_relu "
    "leaky_relu_backward lt max maximum min minimum mul ne neg reciprocal relu rsqrt sign sqrt sub threshold "
    "threshold_backward"
)
"""Elementwise operations that any code rounds alike, since IEEE 754 says how, or that do not round."""
_BY_RECORD = (
    "addmm argmax avg_pool2d avg_pool2d_backward baddbmm bmm convolution convolution_backward dot embedding "
    "linalg_vector_norm max_pool2d_with_indices max_pool2d_with_indices_backward mean mkldnn_convolution mm mv "
    "native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm "
    "native_layer_norm_backward nll_loss_backward nll_loss_forward sum _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward _fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _log_softmax "
    "_log_softmax_backward_data _native_batch_norm_legit_no_training _scaled_dot_product_flash_attention_for_cpu "
    "_softmax _softmax_backward_data"
)
"""Products, which `_tested` compares, and operations that take each record, or each of its channels or rows, by itself.

All of their values differ where their code does, so that random values show it.
"""
_ALIKE = frozenset(f"{_MOVES} {_EXACT} {_BY_RECORD}".split())


_COLUMNS = 16
"""Multiple of outputs from which kernels of matrix products treat rows alike, wherever these begin in memory."""


class WideLinear(TorchFunctionMode):
    """Compute linear layers with outputs added up to a multiple of 16, and remove these.

    With few outputs, kernels round a row by its alignment in memory, which depends on its place if its length is odd.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``func`` itself, or the wider form of ``torch.nn.functional.linear``."""
        return (_wide_linear if func is functional.linear else func)(*args, **(kwargs or {}))


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    more = -len(weight) % _COLUMNS
    if not more:
        return functional.linear(x, weight, bias)
    wide = functional.linear(
        x, functional.pad(weight, (0, 0, 0, more)), bias if bias is None else functional.pad(bias, (0, more))
    )
    return wide[..., : len(weight)].clone()  # no view: a layer that changes it in place would bypass its gradient


def form(*parts: object) -> tuple[object, ...]:
    """A key for `sizes`: the structure of modules, functions and tensors, without their values."""
    return tuple(map(_form, parts))


def _form(part: object) -> object:
    if isinstance(part, nn.Module):
        tensors = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in _tensors(part))
        return repr(part), tensors, tuple((type(m), m.training, _settings(m)) for m in part.modules())
    if isinstance(part, partial):
        return form(part.func, *part.args, *part.keywords.values())
    if isinstance(part, Tensor):
        return tuple(part.shape), part.dtype
    if isinstance(part, list | tuple):
        return form(*part)
    if part is None or isinstance(part, str | int | float):
        return part
    return getattr(part, "__code__", type(part))


_OWN = frozenset(vars(nn.Module()))


def _settings(module: nn.Module) -> tuple[object, ...]:
    """What a module keeps beside tensors and modules: ``repr`` may not show the name of its activation."""
    kept = ((name, value) for name, value in vars(module).items() if name not in _OWN)
    return tuple((name, _form(value)) for name, value in sorted(kept) if not isinstance(value, nn.Module))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def randomised(part: Any) -> Any:
    """A copy of a module, or of a partial function of modules, with random weights and without dropout.

    The given weights could hide what kernels do to other inputs than the test's.
    """
    if isinstance(part, partial):
        return partial(part.func, *map(randomised, part.args), **{k: randomised(v) for k, v in part.keywords.items()})
    if isinstance(part, list | tuple):
        return [randomised(each) for each in part]
    if isinstance(part, Tensor):
        return _random(part, stream(0, "rowwise weights"))
    if not isinstance(part, nn.Module):
        return part
    copied, rng = deepcopy(part), stream(0, "rowwise weights")
    for m in copied.modules():
        if isinstance(m, _DropoutNd):
            m.p = 0.0
    stored = copied.state_dict(keep_vars=True)
    for value in (*copied.parameters(), *(t for t in stored.values() if not isinstance(t, nn.Parameter))):
        value.data.copy_(_random(value.data, rng))
    return copied


def _random(like: Tensor, rng: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return like
    if like.ndim < 2:  # biases, scales and variances: positive, so that few activations are 0
        drawn = torch.rand(like.shape, generator=rng, dtype=torch.float64) + 0.5
    else:
        drawn = torch.randn(like.shape, generator=rng, dtype=torch.float64) / math.sqrt(like.numel() / len(like))
    return drawn.to(like)


def is_known(module: nn.Module) -> bool:
    """Whether all modules are torch's or this library's; others may mix records for some weights only."""
    return all(type(m).__module__.partition(".")[0] in ("torch", "fedstill") for m in module.modules())


def batches(count: int, among: tuple[int, ...]) -> Iterator[tuple[slice, int]]:
    """The places of each batch of ``count`` records, and its padded size."""
    for start in range(0, count, among[-1]):
        rest = min(among[-1], count - start)
        yield slice(start, start + rest), next(size for size in among if size >= rest)


def padded(rows: Tensor, size: int) -> Tensor:
    """``rows`` with rows of zeros up to ``size``, in contiguous memory of their own: kernels may look at both."""
    if len(rows) == size:
        return rows.clone(memory_format=torch.contiguous_format)
    return torch.cat([rows.contiguous(), rows.new_zeros(size - len(rows), *rows.shape[1:])])


def features(compute: Callable[..., Tensor], nets: Sequence[nn.Module], records: Trainable, *maps: Tensor) -> Tensor:
    """``compute(nets, x, *maps)`` of all records, ``(n, ...)``, each row by itself; in eval mode, without gradients."""
    device = device_of(nets[0], records)
    with torch.no_grad():
        some = padded(records.inputs(slice(0, 1)).to(device), 1)
        with mode_of(nn.ModuleList(nets), training=False):
            among: tuple[int, ...] = (1,)
            if all(map(is_known, nets)):

                def make() -> Compute:
                    others, more = randomised(list(nets)), [randomised(m) for m in maps]
                    return lambda x: [compute(others, x, *more)]

                among = sizes((form(compute, list(nets), *maps), "features"), make, some)
            rows = [
                compute(nets, padded(records.inputs(where).to(device), size), *maps)[: where.stop - where.start]
                for where, size in batches(len(records.labels), among)
            ]
            return torch.cat(rows) if rows else compute(nets, some, *maps)[:0]
