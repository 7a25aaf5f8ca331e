"""Inference of a client's classes and their shares from the last layer of its update or gradient.

After
* Zhao, Mopuri, Bilen 2020 (iDLG, arXiv:2001.02610), section 3, for the gradient of one record;
* Wainakh et al. 2021 (LLG and LLG+, arXiv:2105.09369) for whole updates.

Differs from the latter: shares are proportional to a class's negative change, where LLG assigns records one by one with
equal weight (`counts_of` does so for small batches); the change of the bias is used before that of the weights' row
sums, as it does not require activations above 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor


@dataclass(frozen=True)
class LastLayer:
    """The part of an update or a gradient of the layer of the logits; ``bias`` is None if the layer has none."""

    weight: Float64[Tensor, "classes d"]
    bias: Float64[Tensor, " classes"] | None

    @property
    def drift(self) -> Float64[Tensor, " classes"]:
        """The bias or, without one, the weights' row sums; negative for the classes of the records.

        After one step on n records the bias's entry is ``mean_i p_i[c] - share_c`` times the learning rate. A row sum
        weights every record by the sum of its activations, which must not be negative (LLG's property 1).
        """
        return self.weight.sum(1) if self.bias is None else self.bias


@dataclass(frozen=True)
class LabelLeak:
    """Accuracy of an attack on one client's classes.

    Attributes:
        held_accuracy: accuracy in [0, 1] over the classes of "the client has the class".
        distance: L1 distance of the shares to the true ones, in [0, 2].
        uniform_distance: the same distance for equal shares; a useful attack has less.
    """

    held_accuracy: float
    distance: float
    uniform_distance: float


def descent(start: Mapping[str, Tensor], final: Mapping[str, Tensor]) -> dict[str, Float64[Tensor, "*shape"]]:
    """``start - final`` of all floating-point values: the direction of the gradients of the training between them."""
    return {name: start[name].double() - value.double() for name, value in final.items() if value.is_floating_point()}


def last_layer(change: Mapping[str, Tensor], num_classes: int) -> LastLayer:
    """The last linear layer with one row per class, in a gradient or a `descent`.

    Args:
        change: the gradient by parameter name, in the order of the model's layers.
        num_classes: number of rows of the layer.

    Raises:
        ValueError: there is no such layer.
    """
    names = [name for name, value in change.items() if value.ndim == 2 and len(value) == num_classes]
    if not names:
        raise ValueError(f"none of {len(change)} tensors is a linear layer with {num_classes} rows, one per class")
    bias = change.get(names[-1].removesuffix("weight") + "bias")
    return LastLayer(change[names[-1]].double().cpu(), None if bias is None else bias.double().cpu())


def single_label(gradient: LastLayer) -> int:
    """The class of the record of a one-record gradient, exactly (iDLG).

    The class's row is ``(p_c - 1) a``, any other ``p_j a``: only the class's bias is negative. Without a bias, only its
    row has negative products with all others, so that their sum is the least.

    Raises:
        ValueError: there are two classes and no bias, so that the rows are symmetric.
    """
    if gradient.bias is not None:
        return int(gradient.bias.argmin())
    if len(gradient.weight) < 3:
        raise ValueError("without a bias, the rows of 2 classes differ in sign only; there must be at least 3 classes")
    products = gradient.weight @ gradient.weight.T
    return int((products.sum(1) - products.diagonal()).argmin())


def shares_of_update(drift: Float64[Tensor, " classes"]) -> Float64[Tensor, " classes"]:
    """Estimated shares of the classes, proportional to the negative drift.

    Only classes with a larger share than the model predicts get a share, which suits clients with few classes.

    Args:
        drift: the drift of a `LastLayer`.

    Returns:
        Shares with sum 1; equal shares if no drift is negative.
    """
    below = (-drift).clamp_min(0)
    total = below.sum()
    return below / total if total > 0 else torch.full_like(drift, 1 / len(drift))


def counts_of(shares: Float64[Tensor, " classes"], records: int) -> Int64[Tensor, " classes"]:
    """Counts of the classes of a few records, as in LLG: one per class with a share, then by the largest deficit.

    Args:
        shares: the result of `shares_of_update`.
        records: number of records.
    """
    counts = torch.zeros(len(shares), dtype=torch.int64)
    counts[shares.argsort(descending=True)[:records]] = 1
    counts[shares <= 0] = 0
    while counts.sum() < records:
        counts[(shares - counts / records).argmax()] += 1
    return counts


def leak(shares: Float64[Tensor, " classes"], counts: Int64[Tensor, " classes"], least: float) -> LabelLeak:
    """Compare estimated shares with the client's true class counts.

    Args:
        shares: estimated shares with sum 1.
        counts: number of records of each class.
        least: smallest share of a class that the client is estimated to have.

    Raises:
        ValueError: the client has no records.
    """
    if not counts.sum():
        raise ValueError("the client has 0 records; there is nothing to infer")
    truth = counts.double() / counts.sum()
    right = (shares >= least) == (counts > 0)
    uniform = (truth - 1 / len(truth)).abs().sum()
    return LabelLeak(float(right.double().mean()), float((shares - truth).abs().sum()), float(uniform))
