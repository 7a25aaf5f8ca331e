"""Replies whose numbers are far larger than those of the other clients, and models that one of them has spoilt."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.engines.replies import Replies
from fedstill.privacy.released import Released
from fedstill.schema import Field, Refused, Schema

FACTOR = 1000.0
"""Largest size of a client's reply, as a multiple of the median size of the other clients' (at least 1)."""
LARGEST = 1e18
"""Largest magnitude in a private release: sums grow with a client's records, so other clients' are no measure."""


def size(values: Mapping[str, Any], fields: Schema) -> float:
    """Size of a reply's numbers: the length of its named tensors, or a larger root mean square of another tensor.

    Integers and tensors of a private release do not count; 0 without others.
    """
    parts = [(f, _plain(values[f.name])) for f in fields if _is_measured(f)]
    named = [tensor for f, part in parts if f.like for tensor in part.values() if tensor.is_floating_point()]
    others = [part for f, part in parts if not f.like and part.numel() and part.is_floating_point()]
    return max([math.hypot(*map(_norm, named)), *(_norm(tensor) / math.sqrt(tensor.numel()) for tensor in others)])


def _plain(part: Any) -> Any:
    return part.value if isinstance(part, Released) else part


def _is_measured(f: Field) -> bool:
    return f.like is not None or f.is_tensor and not f.is_released


def _norm(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(tensor.double()))


def check_released(values: Mapping[str, Any], fields: Schema) -> None:
    """Raise `Refused` if a tensor of a private release has a magnitude above `LARGEST`."""
    for f in fields:
        if not (f.is_released and f.is_tensor):
            continue
        tensor = _plain(values[f.name])
        if tensor.is_floating_point() and tensor.numel():
            low, high = map(float, torch.aminmax(tensor))
            if (largest := max(-low, high)) > LARGEST:
                raise Refused(f"field '{f.name}' has a value of magnitude {largest:.3g}; the limit is {LARGEST:g}")


def sizes_of(replies: Replies[Any], fields: Schema, known: Mapping[int, float]) -> dict[int, float]:
    """The size of each reply by client, ``known`` or from the journal; empty for replies without measured numbers."""
    if not any(map(_is_measured, fields)):
        return {}
    found = {
        client: known[client] if client in known else size(vars(replies[i]), fields)
        for i, client in enumerate(replies.clients)
    }
    return found if any(found.values()) else {}


def too_large(sizes: Mapping[int, float]) -> dict[int, str]:
    """The clients with an outlying size, each with the reason to refuse its reply."""
    reasons = {}
    for client, own in sizes.items():
        if own <= FACTOR:  # below every limit, so that honest clients cost no median
            continue
        others = [size for other, size in sizes.items() if other != client]
        if others and own > FACTOR * max(1.0, median := statistics.median(others)):
            reasons[client] = (
                f"its numbers have size {own:.3g}, the median of the other clients is {median:.3g}; "
                f"the limit is {FACTOR:g} times that"
            )
    return reasons


def check_finite(round: int, carried: Sequence[nn.Module | dict[str, Tensor]], sizes: Mapping[int, float]) -> None:
    """Refuse models that are not finite before they become a checkpoint; a method's own tensors may be infinite.

    Raises:
        ValueError: one is not; the text names the client whose last reply had the largest numbers.
    """
    for part in carried:
        if isinstance(part, nn.Module) and (name := not_finite(part)) is not None:
            whose = ""
            if sizes:
                client = max(sizes, key=sizes.__getitem__)
                whose = f"; the largest numbers came from client {client} (size {sizes[client]:.3g})"
            raise ValueError(
                f"round {round} gave '{name}' values that are not finite, so nothing of it was saved{whose}; lower "
                "the learning rate, or leave that client out"
            )


def not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter or buffer with an infinite value or NaN, or None."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return str(name)
    return None


def checked_model(name: str, model: object) -> nn.Module:
    """The final model of the method called ``name``.

    Raises:
        ValueError: its server gave no model, another type of numbers, or values that are not finite; one sentence.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the server of {name} returned {type(model).__name__}; it must return the final model")
    if other := [p.dtype for p in model.parameters() if p.dtype != torch.float32]:
        raise ValueError(f"the final model of {name} has parameters of {other[0]}; they must be torch.float32")
    if (where := not_finite(model)) is not None:
        raise ValueError(
            f"the final model of {name} has values that are not finite in '{where}', so the run has no result; lower "
            "the learning rate"
        )
    return model
