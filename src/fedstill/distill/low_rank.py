"""Low-rank factors of updates: the compression of FedKD.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature Communications
13, 2032 (2022), equations 7 and 8.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int32
from torch import Tensor


class LowRank(NamedTuple):
    """Tensors, with matrices as low-rank factors.

    Attributes:
        ranks: the rank of each matrix in order; 0 for a matrix that is not factored.
        values: for each tensor in order, its values or its factors ``u s (m, r)`` and ``v (r, n)``.
    """

    ranks: Int32[Tensor, " matrices"]
    values: Float32[Tensor, " n"]


def matrices(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with two axes or more. The rows of a convolution's matrix are its filters."""
    return [name for name, value in tensors.items() if value.dim() > 1]


def compress(tensors: Mapping[str, Tensor], energy: float) -> LowRank:
    """Truncated SVD of each matrix: the fewest singular values with more than a share ``energy`` of their squares' sum.

    A matrix is not factored if it is 0 or not finite, or if its factors have as many values (``r (m + n) >= m n``).
    """
    ranks, values = [], []
    for value in tensors.values():
        exact = value.detach().cpu().float()
        if value.dim() > 1:
            matrix = exact.flatten(1)
            factors = _factors(matrix, energy)
            ranks.append(0 if factors is None else factors[0].shape[1])
            if factors is not None:
                values += [part.flatten() for part in factors]
                continue
        values.append(exact.flatten())
    return LowRank(torch.tensor(ranks, dtype=torch.int32), torch.cat(values))


def _factors(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    rows, columns = matrix.shape
    if not torch.isfinite(matrix).all():
        return None
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    share = s.square().cumsum(0) / s.square().sum()
    rank = int((share <= energy).sum()) + 1  # a matrix of zeros has no shares, and a rank that is too large
    if rank > len(s) or rank * (rows + columns) >= rows * columns or not torch.isfinite(share).all():
        return None
    return (u[:, :rank] * s[:rank]).float(), v[:rank].float()


def expand(given: LowRank, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The tensors with the names and shapes of ``like``; None if ranks or values don't fit or are not finite."""
    names = matrices(like)
    if len(given.ranks) != len(names):
        return None
    ranks = dict(zip(names, given.ranks.tolist(), strict=True))
    tensors, start = {}, 0
    for name, value in like.items():
        rank, rows = ranks.get(name, 0), value.shape[0] if value.dim() else 1
        columns = value.numel() // max(rows, 1)
        if not 0 <= rank <= min(rows, columns):
            return None
        sizes = [rows * rank, rank * columns] if rank else [value.numel()]
        if start + sum(sizes) > len(given.values):
            return None
        parts = torch.split(given.values[start : start + sum(sizes)], sizes)
        start += sum(sizes)
        matrix = parts[0].double()
        if rank:
            matrix = matrix.view(rows, rank) @ parts[1].double().view(rank, columns)
        tensors[name] = matrix.float().view(value.shape)
        if not torch.isfinite(tensors[name]).all():
            return None
    return tensors if start == len(given.values) else None
