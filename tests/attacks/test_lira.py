"""The likelihood-ratio attack against numbers worked out by hand and distributions whose curves are known."""

import math

import pytest
import torch
from scipy.stats import binomtest, norm

from fedstill.attacks import lira
from fedstill.base.seeds import stream


def test_scores_are_the_log_odds_of_the_label() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    p = logits.double().softmax(1)
    found = lira.phi(logits, torch.tensor([0, 2]))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.log(p[[0, 1], [0, 2]]) - torch.log1p(-p[[0, 1], [0, 2]]))


def test_scores_of_extreme_logits_stay_exact() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 0.0, -1e4], [300.0, 299.0, 0.0], [-3e38, 3e38, 0.0]])
    found = lira.phi(logits, torch.tensor([0, 2, 0, 1]))
    # a softmax gives 1 and 0 for the first two, whose log-odds are infinite
    torch.testing.assert_close(found[:3], torch.tensor([1e4, -2e4, 1.0], dtype=torch.float64))
    assert torch.isfinite(found).all()


def test_views_are_scored_apart() -> None:
    logits = torch.randn(2, 5, 3, generator=stream(0, "logits"))
    labels = torch.tensor([0, 1, 2, 0, 1])
    torch.testing.assert_close(lira.phi(logits, labels)[1], lira.phi(logits[1], labels))


def small() -> tuple[torch.Tensor, torch.Tensor]:
    """Four shadow models, two records: present 5, 7 and 2, 6; absent 1, 2 and 0, 1."""
    scores = torch.tensor([[5.0, 0.0], [7.0, 2.0], [1.0, 1.0], [2.0, 6.0]], dtype=torch.float64)
    member = torch.tensor([[True, False], [True, True], [False, False], [False, True]])
    return scores, member


def test_a_likelihood_ratio_worked_out_by_hand() -> None:
    fitted = lira.fit(*small())
    # medians 6, 4 and 1.5, 0.5; pooled variances (2 + 8) / 2 and (1/2 + 1/2) / 2
    assert fitted.present.mean.tolist() == [6, 4]
    assert fitted.absent.mean.tolist() == [1.5, 0.5]
    assert fitted.present.std.tolist() == pytest.approx([math.sqrt(5)] * 2)
    assert fitted.absent.std.tolist() == pytest.approx([math.sqrt(0.5)] * 2)
    found = lira.online(torch.tensor([4.0, 1.0], dtype=torch.float64), fitted)
    # -(4-6)^2/10 + (4-1.5)^2/1 - ln(sqrt 5 / sqrt .5), and so on
    assert found.tolist() == pytest.approx([-0.4 + 6.25 - math.log(10) / 2, -0.9 + 0.25 - math.log(10) / 2])
    alone = lira.offline(torch.tensor([4.0, 1.0], dtype=torch.float64), fitted.absent)
    assert alone.tolist() == pytest.approx([-norm.logsf(2.5 / math.sqrt(0.5)), -norm.logsf(0.5 / math.sqrt(0.5))])


def test_the_logarithm_of_a_density() -> None:
    gaussian = lira.Normal(torch.tensor([1.0]).double(), torch.tensor([3.0]).double())
    found = gaussian.log_density(torch.tensor([5.0]).double()) - math.log(2 * math.pi) / 2
    assert float(found) == pytest.approx(norm.logpdf(5, 1, 3))


def test_offline_scores_far_out_still_differ() -> None:
    absent = lira.Normal(torch.zeros(3).double(), torch.ones(3).double())
    found = lira.offline(torch.tensor([30.0, 40.0, 50.0]).double(), absent)
    assert torch.isfinite(found).all() and (found.diff() > 0).all()


def test_records_have_deviations_of_their_own_once_there_are_many_models() -> None:
    def stds(worlds: int) -> torch.Tensor:
        half = worlds // 2
        scores = torch.randn(worlds, 2, generator=stream(0, "scores"), dtype=torch.float64)
        member = torch.tensor([True, False]).repeat(half)[:, None].expand(worlds, 2)
        return lira.fit(scores * torch.tensor([1.0, 10.0]), member).present.std

    few, many = stds(lira.PER_RECORD - 2), stds(lira.PER_RECORD)
    assert few[0] == few[1]
    # 32 values: a standard deviation is right within a factor of 2 but for chances below 1e-6
    assert 0.5 < many[0] < 2 and 5 < many[1] < 20


@pytest.mark.parametrize("worlds", [2, 3])
def test_records_must_be_in_half_of_enough_models(worlds: int) -> None:
    with pytest.raises(ValueError, match=f"{worlds} shadow models; there must be 4 or more"):
        lira.fit(torch.zeros(worlds, 1).double(), torch.arange(worlds)[:, None] % 2 == 0)


# --- curves


def normals(n: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``n`` members around ``shift`` and ``n`` others around 0, in no order."""
    scores = torch.randn(2 * n, generator=stream(0, "normals"), dtype=torch.float64)
    member = torch.arange(2 * n) % 2 == 0
    return scores + shift * member, member


@pytest.mark.parametrize("fpr", [0.001, 0.01, 0.1])
def test_rates_of_known_distributions(fpr: float) -> None:
    n, shift = 50_000, 1.5
    scores, member = normals(n, shift)
    rate = lira.tpr_at(fpr, scores, member)
    truth = norm.sf(norm.isf(fpr) - shift)
    # five standard deviations of both counts, that of the threshold carried over by the slope of the curve
    slope = norm.pdf(norm.isf(fpr) - shift) / norm.pdf(norm.isf(fpr))
    tolerance = 5 * math.sqrt(truth * (1 - truth) / n + slope**2 * fpr * (1 - fpr) / n)
    assert abs(rate.tpr - truth) < tolerance
    assert abs(rate.tpr - norm.sf(norm.isf(fpr) - 0.8 * shift)) > tolerance  # a weaker attack is told apart
    assert lira.auc(scores, member) == pytest.approx(norm.cdf(shift / math.sqrt(2)), abs=5 * 0.3 / math.sqrt(n))


def test_a_curve_worked_out_by_hand() -> None:
    scores = torch.tensor([3.0, 2.0, 2.0, 1.0, 0.0]).double()
    member = torch.tensor([True, True, False, False, True])
    fpr, tpr = lira.roc(scores, member)
    assert fpr.tolist() == [0, 0, 0.5, 1, 1]
    assert tpr.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3, 1])
    # pairs of a member and another: 3 beats both, 2 ties and beats, 0 loses to both
    assert lira.auc(scores, member) == pytest.approx((2 + 1.5 + 0) / 6)
    assert lira.tpr_at(0.49, scores, member).tpr == pytest.approx(1 / 3)
    assert lira.tpr_at(0.5, scores, member).tpr == pytest.approx(2 / 3)
    assert lira.tpr_at(1.0, scores, member).tpr == 1


def test_infinite_scores_are_ties_too() -> None:
    """Of infinities, the difference is no number, and the area depended on the order of the records."""
    member = torch.tensor([True, False, True, False])
    for ends in (math.inf, -math.inf):
        assert lira.auc(torch.full((4,), ends, dtype=torch.float64), member) == 0.5


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.5])
def test_the_interval_of_an_area_holds_as_often_as_it_says(shift: float) -> None:
    truth, held = norm.cdf(shift / math.sqrt(2)), 0
    for draw in range(400):
        scores = torch.randn(150, generator=stream(draw, "interval"), dtype=torch.float64)
        member = torch.arange(150) % 3 == 0
        low, high = lira.auc_interval(scores + shift * member, member)
        assert low < lira.auc(scores + shift * member, member) < high
        held += low <= truth <= high
    assert 0.915 < held / 400 < 0.985, held  # three deviations of a share of .95


def test_the_interval_of_areas_without_spread() -> None:
    member = torch.arange(20) < 10
    apart = torch.arange(20.0).flip(0).double()
    assert lira.auc_interval(apart, member) == pytest.approx((0.025**0.1, 1))
    assert lira.auc_interval(-apart, member) == pytest.approx((0, 1 - 0.025**0.1))
    low, high = lira.auc_interval(torch.zeros(20).double(), member)
    assert low == pytest.approx(1 - high) and 0.15 < low < 0.3
    low, high = lira.auc_interval(apart, torch.arange(20) < 1)
    assert high == 1 and low < 0.3


def test_the_interval_of_an_area_holds_with_few_members() -> None:
    held = 0
    for draw in range(400):
        scores = torch.randn(55, generator=stream(draw, "few"), dtype=torch.float64)
        low, high = lira.auc_interval(scores, torch.arange(55) < 5)
        held += low <= 0.5 <= high
    assert held / 400 > 0.915, held


def test_equal_scores_say_nothing() -> None:
    scores, member = torch.zeros(10).double(), torch.arange(10) < 5
    assert lira.auc(scores, member) == 0.5
    assert lira.tpr_at(0.01, scores, member).tpr == 0


def test_there_must_be_members_and_others() -> None:
    with pytest.raises(ValueError, match="3 of 3 records are members"):
        lira.roc(torch.zeros(3).double(), torch.ones(3, dtype=torch.bool))


def test_scores_that_are_no_numbers_are_refused() -> None:
    scores, member = torch.tensor([1.0, math.nan, 0.0]).double(), torch.tensor([True, False, False])
    for judged in (lira.roc, lira.auc, lira.auc_interval):
        with pytest.raises(ValueError, match="1 of 3 scores are not numbers"):
            judged(scores, member)


@pytest.mark.parametrize(("successes", "trials"), [(0, 50), (1, 50), (25, 50), (50, 50), (3, 1000)])
def test_intervals_are_exact(successes: int, trials: int) -> None:
    truth = binomtest(successes, trials).proportion_ci(0.95, method="exact")
    assert lira.interval(successes, trials) == pytest.approx((truth.low, truth.high))


def test_a_rate_carries_its_intervals() -> None:
    member = torch.arange(100) < 50
    scores = torch.arange(100, 0, -1).double()
    rate = lira.tpr_at(0.01, scores, member)
    assert (rate.tpr, (rate.low, rate.high)) == (1.0, lira.interval(50, 50))
    assert rate.fpr_high == lira.interval(0, 50)[1]


# --- what privacy allows


def test_the_bound_is_both_inequalities() -> None:
    for epsilon, delta, fpr in [(1.0, 1e-5, 0.001), (1.0, 1e-5, 0.5), (0.0, 0.0, 0.3), (3.0, 0.01, 0.04)]:
        expected = min(math.exp(epsilon) * fpr + delta, 1 - math.exp(-epsilon) * (1 - delta - fpr))
        assert lira.bound(fpr, epsilon, delta) == pytest.approx(expected)
    assert lira.bound(0.3, 0.0, 0.0) == pytest.approx(0.3)
    assert lira.bound(0.01, 1e6, 0.0) == 1.0
    assert lira.bound(1.0, 2.0, 1e-5) == 1.0


def test_a_gaussian_mechanism_stays_below_its_bound_and_a_weaker_one_does_not() -> None:
    # epsilon 1, delta 1e-5 takes a noise multiplier of 3.73 (Balle, Wang 2018): shift 1 / 3.73
    shift = 1 / 3.73
    for fpr in (1e-4, 1e-3, 1e-2, 0.1, 0.5):
        assert norm.sf(norm.isf(fpr) - shift) < lira.bound(fpr, 1.0, 1e-5)
    assert norm.sf(norm.isf(1e-4) - 4 * shift) > lira.bound(1e-4, 1.0, 1e-5)
