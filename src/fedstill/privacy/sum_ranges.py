"""Ranges of totals of whole numbers: what clipped records and noise can give, so that a wild upload is noticed.

A masked upload cannot be checked alone, so one hostile client can put any number into a total. The total itself can be
checked: rows have a public largest length L, so N records bound every number of it, and the noise has a known tail.

*Tail.* A discrete Gaussian of parameter v is subgaussian with the variance v (Canonne, Kamath, Steinke 2020,
arXiv:2004.00010, corollary 17), so a sum of n shares is with n v. A number of it passes t with probability at most
``2 exp(-t^2 / 2nv)``, and the length of d of them passes ``sqrt(n v (d + 2 sqrt(d u) + 2 u))`` with probability at
most ``exp(-u)`` (Hsu, Kakade, Zhang 2012, theorem 2.1).
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from fedstill.base.errors import FedstillError
from fedstill.privacy import lattice
from fedstill.privacy.column_sums import ColumnSums, ColumnTotals
from fedstill.privacy.integer_sums import IntegerMoments, IntegerSum
from fedstill.privacy.second_moments import Moments, diagonal_places

MISTAKE = 1e-12
"""Probability, at most, that a total of clients who all follow the protocol is refused."""


class OutOfRange(FedstillError, ValueError):
    """A total that no clipped records and no noise of this size give."""


def check_length(
    mechanism: IntegerSum[Any, Any], total: Int64[Tensor, "..."], rows: int, steps: int, clients: int, of: str
) -> None:
    """Refuse a total that is longer than ``rows`` rows of length ``steps`` and the noise of ``clients`` can be.

    Args:
        mechanism: the clients' mechanism.
        total: the total, in whole numbers.
        rows: most rows in it, a public number.
        steps: the largest length of a row.
        clients: clients in it.
        of: words for the rows, as "updates".

    Raises:
        OutOfRange: it is longer.
    """
    u, d = -math.log(MISTAKE), total.numel()
    length = float(torch.linalg.vector_norm(total.double()))
    tail = math.sqrt(_variance(mechanism, max(mechanism.scales), clients) * (d + 2 * math.sqrt(d * u) + 2 * u))
    most = rows * steps + tail
    if length > most * (1 + 1e-9):  # of float64
        raise _refused(f"has the length {length:.4g}, but {rows} {of} of {clients} clients give {most:.4g} at most")


def check_moments(mechanism: IntegerMoments, total: Moments, clients: int, records: int | None = None) -> None:
    """Refuse sums of rows and of their products that no number of records gives, or not the number that they claim.

    Every row ends with the same constant, whose sums claim the number N of records. Then no entry of G passes
    ``N L^2``, off the diagonal half of that, no diagonal entry and no trace is negative or above ``N L^2``, and no
    entry of H passes ``N L``, or ``N L^2`` with numbers.

    Args:
        mechanism: the clients' mechanism.
        total: its values, summed over clients.
        clients: clients in the total.
        records: a public bound of all clients' records, if there is one.

    Raises:
        OutOfRange: a number lies outside by more than the noise can be.
    """
    second, first, steps = total.second.double(), total.first.double(), mechanism.steps
    diagonal, above, of_first = (_variance(mechanism, scale, clients) for scale in mechanism.scales)
    z = math.sqrt(2 * math.log(2 * (second.numel() + first.numel() + 2 * len(second) + 2) / MISTAKE))
    constant = mechanism.constant
    own = second[:, diagonal_places(mechanism.dims + 1, second.device)]
    if mechanism.num_classes > 1:
        claimed, unsure = float(first[:, -1].sum()) / constant, z * math.sqrt(len(first) * of_first) / constant
    else:  # numbers weigh the constant of H
        claimed, unsure = float(own[:, -1].sum()) / constant**2, z * math.sqrt(len(own) * diagonal) / constant**2
    _check_claimed(claimed, unsure, records)
    most = (claimed + unsure) * steps**2
    apart = second.abs()
    apart[:, diagonal_places(mechanism.dims + 1, second.device)] = 0
    of_rows = most / steps**2 * mechanism.unit_of_first
    found = [
        ("a sum of products", float(apart.max()), most / 2 + z * math.sqrt(above)),
        ("a sum of squares", float(own.max()), most + z * math.sqrt(diagonal)),
        ("minus a sum of squares", float(-own.min()), z * math.sqrt(diagonal)),
        ("the sum of all squares", float(own.sum()), most + z * math.sqrt(own.numel() * diagonal)),
        ("a sum of rows", float(first.abs().max()), of_rows + z * math.sqrt(of_first)),
    ]
    _check_found(found, claimed)


def check_columns(mechanism: ColumnSums, total: ColumnTotals, clients: int, records: int | None = None) -> None:
    """Refuse sums of columns that no number of records gives, or not the number that their counts claim.

    Args:
        mechanism: the clients' mechanism.
        total: its values, summed over clients.
        clients: clients in the total.
        records: a public bound of all clients' records, if there is one.

    Raises:
        OutOfRange: a number lies outside by more than the noise can be.
    """
    z = math.sqrt(2 * math.log(2 * (2 * mechanism.columns + mechanism.num_classes + 2) / MISTAKE))
    of_values, of_squares, of_counts = (z * spread for spread in mechanism.spreads(clients))
    steps = mechanism.steps
    claimed, unsure = float(total.counts.sum()) / steps, of_counts / steps * math.sqrt(mechanism.num_classes)
    _check_claimed(claimed, unsure, records)
    most = (claimed + unsure) * steps
    found = [
        ("a sum of values", float(total.values.abs().max()), most + of_values),
        ("a sum of squares", float(total.squares.abs().max()), most + of_squares),
        ("minus a count", float(-total.counts.min()), of_counts),
    ]
    _check_found(found, claimed)


def _check_claimed(claimed: float, unsure: float, records: int | None) -> None:
    """Refuse a number of records, known to ``unsure``, that is negative or above the public bound."""
    if claimed + unsure < 0 or (records is not None and claimed - unsure > records):
        bound = "0 at least" if claimed < 0 else f"{records} at most"
        raise _refused(f"claims {claimed:.6g} records, give or take {unsure:.3g} of noise, but there are {bound}")


def _check_found(found: Iterable[tuple[str, float, float]], claimed: float) -> None:
    """Refuse a number above its limit, up to rounding of float64; with words on what it is."""
    for what, value, limit in found:
        if value > limit * (1 + 1e-9):
            raise _refused(
                f"has {value:.4g} as {what}, but the {claimed:.6g} records that it claims give {limit:.4g} at most"
            )


def _variance(mechanism: IntegerSum[Any, Any], scale: float, clients: int) -> float:
    """The variance parameter of the noise of all clients in one number."""
    if not mechanism.noise_multiplier:
        return 0.0
    return clients * lattice.share(mechanism.noise_multiplier * scale, mechanism.adders)


def _refused(what: str) -> OutOfRange:
    return OutOfRange(
        f"the total of the clients {what} (all but {MISTAKE:g} of honest totals pass), so a client sent what no "
        "records give; nothing was made of it, and a run with fewer clients shows which"
    )
