"""Replies whose weights are far longer than those of the other clients, and models that one of them has spoilt."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.engines.replies import Replies
from fedstill.privacy.released import Released
from fedstill.schema import Schema

FACTOR = 1000.0
"""Largest length of a client's weights, as a multiple of the median length of the other clients' (at least 1)."""


def length(values: Mapping[str, Any], fields: Schema) -> float:
    """Euclidean length of all floating-point tensors in fields of named tensors; 0 without such fields."""
    weights = [values[f.name] for f in fields if f.like]
    named = [tensor for part in weights for tensor in (part.value if isinstance(part, Released) else part).values()]
    return math.hypot(*(_norm(tensor) for tensor in named if tensor.is_floating_point()))


def _norm(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(tensor.double()))


def lengths_of(replies: Replies[Any], fields: Schema, known: Mapping[int, float]) -> dict[int, float]:
    """The length of each reply by client, ``known`` or from the journal; empty for replies without such fields."""
    if not any(f.like for f in fields):
        return {}
    return {
        client: known[client] if client in known else length(vars(replies[i]), fields)
        for i, client in enumerate(replies.clients)
    }


def too_long(lengths: Mapping[int, float]) -> dict[int, str]:
    """The clients with an outlying length, each with the reason to refuse its reply."""
    reasons = {}
    for client, own in lengths.items():
        if own <= FACTOR:  # below every limit, so that honest clients cost no median
            continue
        others = [length for other, length in lengths.items() if other != client]
        if others and own > FACTOR * max(1.0, median := statistics.median(others)):
            reasons[client] = (
                f"its weights have length {own:.3g}, the median of the other clients is {median:.3g}; "
                f"the limit is {FACTOR:g} times that"
            )
    return reasons


def check_finite(round: int, carried: Sequence[nn.Module | dict[str, Tensor]], lengths: Mapping[int, float]) -> None:
    """Refuse models that are not finite before they become a checkpoint; a method's own tensors may be infinite.

    Raises:
        ValueError: one is not; the text names the client whose last reply had the longest weights.
    """
    for part in carried:
        if isinstance(part, nn.Module) and (name := not_finite(part)) is not None:
            whose = ""
            if lengths:
                client = max(lengths, key=lengths.__getitem__)
                whose = f"; the longest weights came from client {client} (length {lengths[client]:.3g})"
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
