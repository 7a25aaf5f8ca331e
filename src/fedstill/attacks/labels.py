"""The classes of a client's records and their shares, inferred from the last layer of its update or gradient.

After
* Zhao, Mopuri, Bilen 2020 (iDLG, arXiv:2001.02610), section 3, for the gradient of one record;
* Wainakh et al. 2021 (LLG and LLG+, arXiv:2105.09369) for whole updates.

Differs from the latter: shares are proportional to what is left of a class's change, where LLG hands out records one by
one, each worth the same, until there are enough (`counts_of` does so for small batches); the bias's change is preferred
to that of the weights' row sums, as it needs no activations above 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor


@dataclass(frozen=True)
class LastLayer:
    """The part of an update or a gradient that belongs to the layer of the logits.

    Attributes:
        weight: ``(classes, d)``.
        bias: ``(classes,)``, or None where the layer has none.
    """

    weight: Float64[Tensor, "classes d"]
    bias: Float64[Tensor, " classes"] | None

    @property
    def drift(self) -> Float64[Tensor, " classes"]:
        """The bias's entries or, without a bias, the weights' row sums; negative for classes in the records.

        In one step on n records the bias's entry is ``mean_i p_i[c] - share_c`` times the learning rate. In a row
        sum every record counts by the sum of its activations, which must not be negative then (LLG's property 1).
        """
        return self.weight.sum(1) if self.bias is None else self.bias


@dataclass(frozen=True)
class LabelLeak:
    """Accuracy of an attack on one client's classes.

    Attributes:
        held_accuracy: share of the classes for which "holds it" or "doesn't" is right, in [0, 1].
        distance: L1 distance of the shares to the true ones, in [0, 2].
        uniform_distance: what equal shares for all classes would get: the attack has learnt something below it.
    """

    held_accuracy: float
    distance: float
    uniform_distance: float


def descent(start: Mapping[str, Tensor], final: Mapping[str, Tensor]) -> dict[str, Float64[Tensor, "*shape"]]:
    """``start - final`` of all floating-point values, which points as the gradients of the training between them do."""
    return {name: start[name].double() - value.double() for name, value in final.items() if value.is_floating_point()}


def last_layer(change: Mapping[str, Tensor], num_classes: int) -> LastLayer:
    """The part of a gradient, or of `descent`, that belongs to the last linear layer with one row for each class.

    Args:
        change: by parameter name, in the order of the model's layers.
        num_classes: rows of the layer.

    Raises:
        ValueError: there is no such layer.
    """
    names = [name for name, value in change.items() if value.ndim == 2 and len(value) == num_classes]
    if not names:
        raise ValueError(f"none of {len(change)} tensors is a linear layer with {num_classes} rows, one for each class")
    bias = change.get(names[-1].removesuffix("weight") + "bias")
    return LastLayer(change[names[-1]].double().cpu(), None if bias is None else bias.double().cpu())


def single_label(gradient: LastLayer) -> int:
    """The class of the only record that a gradient is of, exactly (iDLG).

    The class's row is ``(p_c - 1) a``, any other ``p_j a``: only the class's bias has a negative entry, and without a
    bias only its row has negative products with all others, whose sum is the least then.

    Raises:
        ValueError: there are two classes and no bias, so that both rows look alike.
    """
    if gradient.bias is not None:
        return int(gradient.bias.argmin())
    if len(gradient.weight) < 3:
        raise ValueError("without a bias, the rows of 2 classes differ in sign only; this needs at least 3 classes")
    products = gradient.weight @ gradient.weight.T
    return int((products.sum(1) - products.diagonal()).argmin())


def shares_of_update(drift: Float64[Tensor, " classes"]) -> Float64[Tensor, " classes"]:
    """Estimated shares of the classes, in proportion to each one's negative drift.

    Only classes with a larger share than the model expected of them are found: enough for a client with few classes.

    Args:
        drift: of `last_layer`.

    Returns:
        Shares that add up to 1; all alike where no class drifts below 0.
    """
    below = (-drift).clamp_min(0)
    total = below.sum()
    return below / total if total > 0 else torch.full_like(drift, 1 / len(drift))


def counts_of(shares: Float64[Tensor, " classes"], records: int) -> Int64[Tensor, " classes"]:
    """Counts of the classes of a few records, as in LLG: one of each class found, then the furthest below.

    Args:
        shares: of `shares_of_update`.
        records: how many there are; those of classes with the largest shares come first.
    """
    found = torch.zeros(len(shares), dtype=torch.int64)
    found[shares.argsort(descending=True)[:records]] = 1
    found[shares <= 0] = 0
    while found.sum() < records:
        found[(shares - found / records).argmax()] += 1
    return found


# --- how right it is


def held(shares: Float64[Tensor, " classes"], least: float) -> Bool[Tensor, " classes"]:
    """The classes a client is taken to hold: those with a share of ``least`` or more."""
    return shares >= least


def leak(shares: Float64[Tensor, " classes"], counts: Int64[Tensor, " classes"], least: float) -> LabelLeak:
    """Estimated shares against the client's true class counts.

    Args:
        shares: add up to 1.
        counts: records of each class.
        least: see `held`; half a record's share for exact evidence, more for noisy.

    Raises:
        ValueError: the client has no records.
    """
    if not counts.sum():
        raise ValueError("the client has 0 records; there is nothing to find out about it")
    truth = counts.double() / counts.sum()
    right = held(shares, least) == (counts > 0)
    uniform = (truth - 1 / len(truth)).abs().sum()
    return LabelLeak(float(right.double().mean()), float((shares - truth).abs().sum()), float(uniform))
