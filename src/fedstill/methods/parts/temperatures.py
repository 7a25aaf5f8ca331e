"""The temperature of scores by least squares, from the sums that they were fitted to.

Least squares gives each class a score near 1 for its own records and near 0 for others', and the softmax of such scores
is no probability: of two classes nearly all lie between .27 and .73. A factor t of all scores changes no class and no
order of two classes, and brings their softmax near to probabilities. The sums that gave the scores give t too, so that
it costs no further reply and no privacy. The scores z of N records, with d degrees of freedom, have the means and the
covariance

    m_c = (sum of the scores of class c's records) / N_c
    V   = (sum of z z^T over all records) / N - sum_c (N_c / N) m_c m_c^T.

Those of new records are less apart: of h = d / N, the share of a record in its own score, ``(m_c - h e_c) / (1 - h)``
and ``V / (1 - h)^2`` have none (the mean of what leaving out each record by itself gives). Taken for Student's
distribution with five degrees of freedom, as real scores have long tails, they have the least expected log loss of
``softmax(t z)`` at t, in which it is convex. A t below 1 counts as 1, and each class counts one record more, with the
mean scores of the others (as in Laplace's rule), so that few records never make sure.

Noise has a share in its own scores too. t is the smaller of two estimates. In one the share stays in the means, and the
damping of the solution in V, so that both are too large: few classes make up for the one with the other. The second has
neither, and is without bias, but where nearly all is noise it may be anything.
"""

import math
from functools import cache

import torch
from jaxtyping import Float64
from torch import Tensor

from fedstill.methods.parts.feature_sums import Total, cleaned

_LARGEST = 100.0
"""The largest temperature of ten classes or fewer; of more classes, in proportion."""
_TAIL = 5
"""Degrees of freedom of Student's distribution."""
_SHARE = 0.9
"""The largest share of a record in its own score; with more, the sums say nothing of new records."""
_DRAWS = 1 << 22
"""Scores that are drawn to find the temperature, of all classes together."""


def tempered(head: Float64[Tensor, "classes p"], total: Total, ridge: float) -> Float64[Tensor, "classes p"]:
    """The solution ``W^T`` of ``(G + ridge I) W = H^T`` times its temperature."""
    counts, noises = counts_of(total), (total.noise, total.first_std)
    return head * of_solution(head, total.matrix(), total.first, counts, ridge, *noises)


def counts_of(total: Total) -> Float64[Tensor, " classes"]:
    """Numbers of records of each class; one below the standard deviation of its noise is that."""
    return (total.first[:, -1] / total.bias).clamp_min(total.count_std)


def of_solution(
    head: Float64[Tensor, "classes p"],
    matrix: Float64[Tensor, "p p"],
    first: Float64[Tensor, "classes p"],
    counts: Float64[Tensor, " classes"],
    ridge: float,
    noise: float,
    std: float,
) -> float:
    """The temperature of ``W^T``, which solves ``(G + ridge I) W = H^T``; 1 for a single output.

    Args:
        head: ``W^T``.
        matrix: G.
        first: H.
        counts: as of `counts_of`.
        ridge: multiple of the identity.
        noise: the expected spectral norm of the noise in G; 0 for none.
        std: standard deviation of the noise in H.
    """
    if len(head) == 1:
        return 1.0
    sums = first @ head.T
    if not noise:
        values = torch.linalg.eigvalsh(matrix).clamp_min(0)
        return temperature(sums, head @ matrix @ head.T, counts, float((values / (values + ridge)).sum()))
    values, vectors = torch.linalg.eigh(matrix)
    damped, signal, rows = values.clamp_min(0) + ridge, cleaned(values, noise).clamp_min(0), head @ vectors
    degrees = float((signal / damped).sum())
    own = std**2 * float((1 / damped).sum()) * torch.eye(len(head)).to(sums)
    plain = temperature(sums, (rows * damped) @ rows.T, counts, degrees)
    return min(plain, temperature(sums - own, (rows * signal) @ rows.T, counts, degrees))


def temperature(
    sums: Float64[Tensor, "classes classes"],
    products: Float64[Tensor, "classes classes"],
    counts: Float64[Tensor, " classes"],
    degrees: float,
) -> float:
    """The factor of scores with the least expected log loss; 1 of too few records for their degrees of freedom.

    Args:
        sums: the sum of scores over each class's records, a row for a class.
        products: the sum of ``z z^T`` over all records.
        counts: numbers of records; classes with less than one count as absent.
        degrees: degrees of freedom of each class's scores.
    """
    from scipy.optimize import brentq  # imported here because it is slow to load

    there = (counts >= 1).nonzero().flatten().cpu()
    counts, sums, products = (values.double().cpu() for values in (counts, sums, products))
    number = counts[there].sum()
    if not len(there) or (own := degrees / float(number)) > _SHARE:
        return 1.0
    shares = counts[there] / number
    means = sums[there] / counts[there, None]
    spread = (products / number - (means.T * shares) @ means) / (1 - own) ** 2
    means[torch.arange(len(there)), there] -= own
    means /= 1 - own
    others = (shares @ means - shares[:, None] * means) / (1 - shares[:, None]).clamp_min(1e-12)
    one = (1 / (counts[there] + 1))[:, None]

    def slopes(scores: Float64[Tensor, "present n classes"], t: float) -> Float64[Tensor, "present n"]:
        own = scores.gather(2, there[:, None, None].expand(-1, scores.shape[1], 1))[:, :, 0]
        return ((t * scores).softmax(2) * scores).sum(2) - own

    scores = means[:, None] + _drawn(spread, len(there))

    @cache
    def slope(t: float) -> float:
        """The derivative of the expected log loss."""
        expected = (1 - one) * slopes(scores, t).mean(1, keepdim=True) + one * slopes(others[:, None], t)
        return float(shares @ expected[:, 0])

    low, high = 1.0, _LARGEST * max(1.0, len(counts) / 10)
    if slope(low) >= 0:
        return low
    if slope(high) <= 0:
        return high
    return math.exp(brentq(lambda t: slope(math.exp(t)), math.log(low), math.log(high), xtol=1e-7))


def _drawn(spread: Float64[Tensor, "classes classes"], present: int) -> Float64[Tensor, "n classes"]:
    """Differences to a class's mean with this covariance, the same for every class, in pairs of opposites."""
    values, vectors = torch.linalg.eigh((spread + spread.T) / 2)
    number = min(max(_DRAWS // (present * len(spread)), 4), 8192) // 2
    rng = torch.Generator().manual_seed(0)
    drawn, tails = (torch.randn(number, n, dtype=torch.float64, generator=rng) for n in (len(spread), _TAIL))
    drawn *= ((_TAIL - 2) / tails.square().sum(1, keepdim=True)).sqrt()
    rows: Tensor = torch.cat([drawn, -drawn]) * values.clamp_min(0).sqrt() @ vectors.T
    return rows
