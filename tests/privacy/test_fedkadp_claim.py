import math

import pytest

from fedstill.privacy.fedkadp_claim import amplified, claimed_epsilon


@pytest.mark.parametrize(("sigma", "epsilon"), [(5, 8.26), (10, 7.84), (15, 4.97)])
def test_the_paper_s_account(sigma: float, epsilon: float) -> None:
    found = claimed_epsilon([float(sigma)] * 100, rate=0.1, steps=20, clients=10, delta=1e-5)
    assert found == pytest.approx(epsilon, abs=0.005)


@pytest.mark.parametrize(("sigma", "printed", "ours"), [(5, 8.26, 8.26), (10, 7.88, 7.84), (15, 7.81, 4.97)])
def test_the_paper_s_formula_has_no_minimum_and_ours_is_never_larger(sigma: int, printed: float, ours: float) -> None:
    """The numbers of docs/methods/fedkadp.md: section 4 as printed, sum by sum; ten clients, rate .1, 2,000 steps."""

    def divergence(order: int) -> float:
        def base(j: int) -> float:
            return j / (2 * 10 * sigma**2)

        total = 1 + 0.01 * math.comb(order, 2) * min(4 * math.expm1(base(2)), 2 * math.exp(base(2)))
        for j in range(3, order + 1):
            total += 2 * 0.1**j * math.comb(order, j) * math.exp((j - 1) * base(j))
        return math.log(total) / (order - 1)

    formula = min(2000 * divergence(order) + math.log(1e5) / (order - 1) for order in range(2, 257))
    assert formula == pytest.approx(printed, abs=0.005)
    found = claimed_epsilon([float(sigma)] * 100, rate=0.1, steps=20, clients=10, delta=1e-5)
    assert found == pytest.approx(ours, abs=0.005)
    assert found <= formula + 1e-9


@pytest.mark.parametrize(("sigma", "single", "replaced"), [(5, 12.9, 25.3), (10, 9.0, 12.9), (15, 8.3, 10.0)])
def test_without_other_clients_noise_and_with_the_sensitivity_of_a_replaced_record(
    sigma: float, single: float, replaced: float
) -> None:
    half = claimed_epsilon([float(sigma)] * 100, rate=0.1, steps=20, clients=1, delta=1e-5)
    whole = claimed_epsilon([sigma / 2] * 100, rate=0.1, steps=20, clients=1, delta=1e-5)
    assert (half, whole) == (pytest.approx(single, abs=0.05), pytest.approx(replaced, abs=0.05))


def test_the_bound_by_hand() -> None:
    base = {2: 0.1, 3: 0.15}.__getitem__
    sum_of_three = 1 + 0.04 * 3 * 4 * (math.exp(0.1) - 1) + 0.008 * 2 * math.exp(0.3)
    assert amplified(3, 0.2, base) == pytest.approx(math.log(sum_of_three) / 2, rel=1e-12)
    assert amplified(3, 1.0, base) == base(3)  # no subset, no gain
    assert amplified(2, 0.5, {2: 3.0}.__getitem__) == pytest.approx(math.log(1 + 0.25 * 2 * math.exp(3)), rel=1e-12)


def test_rounds_with_other_noise_add_up() -> None:
    def epsilon(noise: list[float]) -> float:
        return claimed_epsilon(noise, rate=0.1, steps=5, clients=4, delta=1e-5, orders=[4])

    free = math.log(1e5) / 3
    assert epsilon([3.0, 2.0, 3.0]) - free == pytest.approx(2 * (epsilon([3.0]) - free) + epsilon([2.0]) - free)


def test_next_to_no_noise_overflows_nothing() -> None:
    assert 500 < claimed_epsilon([0.03], rate=0.1, steps=1, clients=1, delta=1e-5) < 5000
