"""A statistical test of a mechanism's noise."""

import numpy as np
from scipy import stats
from torch import Tensor

LEVEL = 1e-6
"""How seldom a test may reject what is right."""


def looks_like(noise: Tensor, std: float) -> bool:
    """Whether ``noise`` can be independent normal values of mean 0 and standard deviation ``std``.

    The sum of squares by its chi-square distribution (both tails), the mean by its normal distribution and the shape by
    Kolmogorov and Smirnov, each at `LEVEL`.
    """
    z = np.asarray(noise.flatten().double()) / std
    squares = float((z**2).sum())
    spread = 2 * min(stats.chi2.cdf(squares, len(z)), stats.chi2.sf(squares, len(z)))
    middle = 2 * stats.norm.sf(abs(z.mean()) * np.sqrt(len(z)))
    shape = stats.kstest(z, "norm").pvalue
    return bool(min(spread, middle, shape) > LEVEL)
