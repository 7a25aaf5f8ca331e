"""Sums of features and of their products, the one upload of AFL, FedCGS and GH-OFL, with one Gaussian release.

A record with features phi and class y is the row ``r = (sqrt(1 - b^2) phi / max(|phi|, R), b)`` of length at most 1,
with a public radius R and a public constant b, which counts records. A client's sums are ``G = sum r r^T`` and, of the
rows of each class, ``H_y = sum r``; with a number t to predict in [-1, 1] in place of a class, ``H = sum t r``. They
add up over clients to those of all records, however the records are split.

``docs/proofs.md`` has the proof beside those of the other mechanisms.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from fedstill.base.seeds import Noise
from fedstill.privacy.logistic import extend
from fedstill.privacy.mechanisms import ROUNDING, GaussianMechanism, check_noise, check_positive

_BLOCK = 2**17
"""Numbers of the rows that are prepared at a time, so that they stay in the processor's cache."""
Labelled = tuple[Float[Tensor, "n d"], Int64[Tensor, " n"] | Float64[Tensor, " n"]]
"""Features with classes, or with numbers in [-1, 1]."""


@dataclass(frozen=True)
class Moments:
    """Sums of a client's rows, or of all clients' rows.

    Attributes:
        second: upper triangle of G, row by row, ``(1, entries)``; or of each class's own G, ``(classes, entries)``.
        first: H, ``(classes, d + 1)``.
    """

    second: Float[Tensor, "groups entries"]
    first: Float[Tensor, "classes d+1"]


def entries(width: int) -> int:
    """Number of entries of the upper triangle of a matrix ``(width, width)``."""
    return width * (width + 1) // 2


def upper(width: int, device: torch.device | str = "cpu") -> Tensor:
    """The mask of the upper triangle, ``(width, width)``; indexing with it goes row by row."""
    return torch.ones(width, width, dtype=torch.bool, device=device).triu()


def unpacked(triangle: Float[Tensor, " entries"], width: int) -> Float64[Tensor, "width width"]:
    """The symmetric matrix with this upper triangle."""
    matrix = torch.zeros(width, width, dtype=torch.float64, device=triangle.device)
    matrix[upper(width, triangle.device)] = triangle.double()
    return matrix + matrix.triu(1).T


@dataclass(frozen=True, kw_only=True)
class SecondMoments(GaussianMechanism[Iterable[Labelled], Moments]):
    """The sums G and H of rows, with Gaussian noise on every number.

    The noise has one standard deviation on all coordinates of the vector ``v = (D, sqrt(2) U, a H)``, with D the
    diagonal and U the entries above the diagonal of G, and ``a^2 = share / (1 - share)``.

    Theorem: one record adds ``(r r^T, r)``. D and sqrt(2) U have together the length ``|r r^T|_F = |r|^2 <= 1``, and
    a H the length ``a |r| <= a``, so one record moves v by at most ``sqrt(1 + a^2)``, for any numbers of records,
    classes and features. With ``by_class``, r r^T enters one class's G, and the same holds; with numbers, clipped to
    [-1, 1], it adds ``(r r^T, t r)``, and ``a |t r| <= a``. Undoing the scales is
    post-processing: with ``s = noise_multiplier sqrt(1 + a^2)`` the noise of a diagonal entry is s, above the diagonal
    s / sqrt(2), and in H s / a.

    Attributes:
        num_classes: number of classes, public: each has a row of H, even if it is absent; 1 for numbers.
        dims: number of features, d.
        radius: R, positive and public.
        noise_multiplier: standard deviation of the noise of v divided by the sensitivity.
        bias: b, in (0, 1).
        share: H's share of the privacy budget, as precision ``1 / sigma^2``, in (0, 1).
        by_class: whether there is a G of each class.
    """

    theorems = (
        "one record adds its row r, |r| <= 1, to one class and r r^T, whose Frobenius norm is at most 1, so that the "
        "sums, H times {0.weight:.4g}, move by at most {0.sensitivity:.4g}, the sensitivity; Gaussian mechanism "
        "(Balle, Wang 2018, theorem 8)",
        "one record adds its row r, |r| <= 1, times its number, of [-1, 1], and r r^T, whose Frobenius norm is at most "
        "1, so that the sums, H times {0.weight:.4g}, move by at most {0.sensitivity:.4g}, the sensitivity; Gaussian "
        "mechanism (Balle, Wang 2018, theorem 8)",
    )
    """For classes, and for numbers."""

    num_classes: int
    dims: int
    radius: float
    noise_multiplier: float
    bias: float = 0.1
    share: float = 0.5
    by_class: bool = False

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)
        for name, value in (("bias", self.bias), ("share", self.share)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value}; it must lie between 0 and 1")

    @property
    def weight(self) -> float:
        """The factor a of H."""
        return math.sqrt(self.share / (1 - self.share))

    @property
    @override
    def sensitivity(self) -> float:
        return math.sqrt(1 + self.weight**2) * ROUNDING

    @property
    @override
    def theorem(self) -> str:
        """The sentence for classes, or for numbers where H has a single row."""
        return self.theorems[self.num_classes == 1].format(self)

    def __call__(self, rows: Iterable[Labelled], noise: Noise) -> Moments:
        """The sums of batches of features ``(n, d)`` with classes or numbers ``(n,)``, read one at a time."""
        products, first = self.exact(rows)
        places, cut = diagonal_places(self.dims + 1, products.device), products.numel()
        flat = products.new_empty(cut + first.numel())
        flat[cut:] = first.flatten() * self.weight
        flat[:cut] = products.flatten()
        products = flat[:cut].view_as(products)
        kept = products[:, places]
        products.mul_(math.sqrt(2))[:, places] = kept
        flat = self.noised(flat, noise)
        products, sums = flat[:cut].view_as(products), flat[cut:].view_as(first)
        kept = products[:, places]
        products.div_(math.sqrt(2))[:, places] = kept
        return Moments(products, sums / self.weight)

    def rows(self, features: Float[Tensor, "n d"], out: Float64[Tensor, "n d+1"]) -> Float64[Tensor, "n d+1"]:
        """The rows r of features, in ``out``."""
        return extend(features, self.radius, self.bias, out=out)

    def numbers(self, targets: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """The factors t of rows: targets clipped to [-1, 1], 0 where they are no numbers."""
        return targets.double().nan_to_num(0.0).clamp(-1, 1)

    def exact(
        self, rows: Iterable[Labelled]
    ) -> tuple[Float64[Tensor, "groups entries"], Float64[Tensor, "classes d+1"]]:
        """G's upper triangles and H without noise.

        Raises:
            ValueError: features have another shape.
        """
        width, groups = self.dims + 1, self.num_classes if self.by_class else 1
        second = torch.zeros(groups, width, width, dtype=torch.float64)
        first = torch.zeros(self.num_classes, width, dtype=torch.float64)
        with _blas().limit(limits=torch.get_num_threads()):  # the last bits of a sum depend on it
            for features, labels in rows:
                if features.ndim != 2 or features.shape[1] != self.dims:
                    raise ValueError(f"features of shape {tuple(features.shape)}; they must be (records, {self.dims})")
                r = features.new_empty(len(features), width, dtype=torch.float64)
                second, first = second.to(r.device), first.to(r.device)
                blocks = max(1, r.numel() // _BLOCK)
                for some in zip(*(part.tensor_split(blocks) for part in (features, labels, r)), strict=True):
                    row = self.rows(some[0], some[2])
                    if some[1].is_floating_point():
                        first[0] += self.numbers(some[1]).to(row.device) @ row
                    else:
                        first.index_add_(0, some[1], row)
                if self.by_class:
                    for label in torch.bincount(labels).nonzero().flatten().tolist():
                        _add_products(second[label], r[labels == label])
                else:
                    _add_products(second[0], r)
        return _packed(second, second.new_empty(groups, entries(width))), first


def diagonal_places(width: int, device: torch.device | str = "cpu") -> Int64[Tensor, " width"]:
    """Places of the diagonal in the upper triangle of a matrix ``(width, width)``, row by row."""
    places = torch.arange(width, device=device)
    return places * width - places * (places - 1) // 2


def _packed(matrices: Tensor, out: Tensor) -> Tensor:
    """The upper triangles ``(groups, entries)``, row by row, in ``out``."""
    width, start = matrices.shape[1], 0
    for i in range(width):
        out[:, start : start + width - i] = matrices[:, i, i:]
        start += width - i
    return out


@cache
def _blas() -> Any:
    """SciPy's BLAS library, as threadpoolctl finds it."""
    import scipy.linalg.blas  # noqa: F401 - imported here, as below, because it is slow to load
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def _add_products(total: Float64[Tensor, "p p"], rows: Float64[Tensor, "n p"]) -> None:
    """Add ``rows^T rows`` to the upper triangle of ``total`` in place, by BLAS's syrk: half the work of a product."""
    if not total.is_cpu:
        total += rows.T @ rows
        return
    from scipy.linalg.blas import dsyrk

    # SciPy's arrays are stored by columns: the transposes, whose lower triangle is the upper one here
    dsyrk(1.0, rows.contiguous().numpy().T, beta=1.0, c=total.numpy().T, lower=1, overwrite_c=1)
