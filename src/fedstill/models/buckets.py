"""Buckets of features in groups: sparse rows on which a linear classifier is a sum of embeddings (SAFLe)."""

from typing import Annotated

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from fedstill.settings import Settings

Thresholds = Float32[Tensor, "dims buckets"]
Order = Int64[Tensor, " bits"]


class Buckets(Settings):
    """Settings of the buckets, and the sparse rows that they make."""

    thresholds: Annotated[int, Ge(1), Le(64)] = 4
    """Thresholds of each feature, each of which gives a bit (L)."""
    group: Annotated[int, Ge(1), Le(12)] = 4
    """Bits of a group, whose 2^group values each have an embedding."""

    def groups(self, dims: int) -> int:
        """Number of groups of ``dims`` features' bits; the last may have fewer than the others."""
        return -(-dims * self.thresholds // self.group)

    def width(self, dims: int) -> int:
        """Number of entries of a sparse row."""
        return int(self.groups(dims) * 2**self.group)

    def quantiles(self, rows: Float[Tensor, "n dims"]) -> Thresholds:
        """The quantiles 1 / (L + 1), ..., L / (L + 1) of each feature of public rows."""
        levels = torch.arange(1, self.thresholds + 1, device=rows.device) / (self.thresholds + 1)
        return rows.float().quantile(levels, dim=0).T.contiguous()

    def values(self, rows: Float[Tensor, "n dims"], cuts: Thresholds, order: Order) -> Int64[Tensor, "n groups"]:
        """The value of each group: its bits ``row_j > cut_jl``, in the given order, as a binary number."""
        bits = (rows[:, :, None] > cuts.to(rows.device)).flatten(1)[:, order.to(rows.device)].long()
        bits = nn.functional.pad(bits, (0, -bits.shape[1] % self.group))
        powers = 2 ** torch.arange(self.group, device=rows.device)
        return (bits.view(len(rows), -1, self.group) * powers).sum(2)

    def sparse(self, rows: Float[Tensor, "n dims"], cuts: Thresholds, order: Order) -> Float[Tensor, "n width"]:
        """A one-hot row for each group, one after another: as many ones as groups."""
        found = nn.functional.one_hot(self.values(rows, cuts, order), 2**self.group)
        return found.flatten(1).to(rows.dtype)


class Bucketed(nn.Module):
    """Logits of rows: for each group the embedding of its value, and their sum.

    Args:
        embeddings: ``(groups, values, classes)``.
        bias: ``(classes,)``.
        thresholds: of each feature, ``(dims, buckets)``.
        order: positions of the bits, ``(dims * buckets,)``.
    """

    embeddings: Tensor
    bias: Tensor
    thresholds: Tensor
    order: Tensor

    def __init__(self, embeddings: Tensor, bias: Tensor, thresholds: Tensor, order: Tensor) -> None:
        super().__init__()
        for name, value in (("embeddings", embeddings), ("bias", bias), ("thresholds", thresholds), ("order", order)):
            self.register_buffer(name, value.clone())

    def forward(self, x: Float[Tensor, "n dims"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        group = (self.embeddings.shape[1] - 1).bit_length()
        settings = Buckets(thresholds=self.thresholds.shape[1], group=group)
        values = settings.values(x, self.thresholds, self.order)
        places = torch.arange(values.shape[1], device=x.device)
        return self.embeddings[places, values].sum(1) + self.bias
