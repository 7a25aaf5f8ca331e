"""The epsilon that the FedKADP paper claims, for comparison with the epsilon that holds.

Jiang, Zhao, Li, Xue, "A personalized federated learning method based on knowledge distillation and differential
privacy", Electronics 2024, 13(17), 3538, section 4, applies the bound of Wang, Balle, Kasiviswanathan 2019
(arXiv:1808.00087, theorem 9) for a subset drawn without replacement and neighbours that differ by one replaced record.
It does not fit the algorithm: the paper uses the share of clients asked as the share of records used, the noise of the
sum over all clients as the noise of one client, and half the sensitivity of a replaced record. So no ledger charges by
it (docs/privacy.md).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

ORDERS = tuple(range(2, 257))
"""Renyi orders over which epsilon is minimised."""


def amplified(order: int, rate: float, base: Callable[[int], float]) -> float:
    """The divergence at an integer ``order`` >= 2 of a mechanism on a random subset with share ``rate`` of the records.

    ``1/(a-1) ln(1 + g^2 C(a,2) min{4(e^eps(2) - 1), 2 e^eps(2)} + 2 sum_{j=3..a} g^j C(a,j) e^((j-1) eps(j)))``, or
    ``base(order)`` if that is less, a minimum that the FedKADP paper does not take; for a mechanism like the Gaussian
    one, whose divergence of infinite order is infinite.

    Args:
        order: a.
        rate: gamma, in (0, 1].
        base: eps(j), the mechanism's own divergence at order j.
    """
    j = np.arange(3, order + 1)
    choose = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    rest = math.log(2) + j * math.log(rate) + choose + (j - 1) * np.array([base(int(i)) for i in j])
    second = min(math.log(4) + base(2) + math.log(-math.expm1(-base(2))), math.log(2) + base(2))
    pairs = 2 * math.log(rate) + math.log(math.comb(order, 2)) + second
    return min(float(logsumexp(np.array([0.0, pairs, *rest]))) / (order - 1), base(order))


def claimed_epsilon(
    noise: Sequence[float], *, rate: float, steps: int, clients: int, delta: float, orders: Iterable[int] = ORDERS
) -> float:
    """FedKADP's epsilon after ``len(noise)`` rounds, which does not hold (section 4.2).

    ``min_a sum_t E eps'_t(a) + ln(1/delta) / (a - 1)``, with ``eps(a) = a / (2 n sigma_t^2)`` amplified by ``rate``.
    The paper does not say which orders it tries.

    Args:
        noise: sigma of each round, positive.
        rate: s, the share of clients asked in a round.
        steps: E, number of a client's steps in a round.
        clients: n, number of clients asked in a round.
        delta: the delta of the claim.
        orders: Renyi orders to minimise over.
    """
    rounds = {sigma: noise.count(sigma) for sigma in dict.fromkeys(noise)}

    def total(order: int) -> float:
        spent = (many * _gaussian(order, rate, clients * sigma**2) for sigma, many in rounds.items())
        return steps * sum(spent) + math.log(1 / delta) / (order - 1)

    return min(map(total, orders))


@lru_cache(maxsize=1 << 16)
def _gaussian(order: int, rate: float, variance: float) -> float:
    """The divergence of one round; cached because a run asks for all rounds so far after each round."""
    return amplified(order, rate, lambda j: j / (2 * variance))
