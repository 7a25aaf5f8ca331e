"""The rule by which the board and docs/papers.md call a difference decided."""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import binom, norm, t, ttest_1samp

from fedstill.base.seeds import numpy_stream

BOARD = Path(__file__).parents[2] / "benchmarks" / "board"


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BOARD))
    monkeypatch.delitem(sys.modules, "decided", raising=False)
    return importlib.import_module("decided")


def test_it_is_the_t_test_without_test_records_and_the_normal_one_without_seeds(decided: ModuleType) -> None:
    apart = [0.2, 0.4, 1.0]
    mean, error = np.mean(apart), np.std(apart, ddof=1) / math.sqrt(3)
    assert decided.p_value(mean, error**2, 2, 0.0) == pytest.approx(ttest_1samp(apart, 0).pvalue, rel=1e-9)
    assert decided.p_value(2.5, 0.0, 2, 1.0) == pytest.approx(2 * norm.sf(2.5), rel=1e-9)
    assert decided.p_value(0.0, 1.0, 2, 1.0) == 1.0 and 0 < decided.p_value(50.0, 0.0, 2, 1e-6) < 1e-100


@pytest.mark.parametrize("ratio", [0.0, 0.3, 3.0, 30.0])
def test_equal_methods_are_told_apart_no_more_often_than_the_level_says(decided: ModuleType, ratio: float) -> None:
    """Whatever the ratio of the variances of seeds and of test records, at the small levels of Holm's procedure too."""
    rng, draws, level = numpy_stream(0, "seeds"), 20_000, 0.002
    drawn = rng.normal(size=(draws, 1)) + math.sqrt(3 * ratio) * rng.normal(size=(draws, 3))
    means, of_seeds = drawn.mean(1), drawn.var(1, ddof=1) / 3
    rejected = means**2 > t.isf(level / 2, 2) ** 2 * of_seeds + norm.isf(level / 2) ** 2
    assert binom.sf(int(rejected.sum()) - 1, draws, level) > 1e-4
    for i in np.flatnonzero(rejected)[:5]:
        assert decided.p_value(means[i], of_seeds[i], 2, 1.0) <= level
    if ratio == 3.0:  # Welch's degrees of freedom are too sure here
        whole = of_seeds + 1
        welch = np.abs(means) / np.sqrt(whole) > t.isf(level / 2, whole**2 / (of_seeds**2 / 2))
        assert binom.sf(int(welch.sum()) - 1, draws, level) < 1e-6


def test_few_test_records_decide_less(decided: ModuleType) -> None:
    """0.5 points on 10,000 images are within the test set's own error, however well the seeds agree."""
    one, two = {0: 0.900, 1: 0.901, 2: 0.899}, {0: 0.895, 1: 0.896, 2: 0.894}
    assert decided.difference(one, two).p > 0.05 > decided.difference(one, two, 10**6).p
    assert decided.difference({0: 0.9}, {0: 0.1}).p == 1.0, "one seed shows no spread"
    assert decided.difference(one, {**two, 7: 0.1}).seeds == 3
    with pytest.raises(ValueError, match="no seed in common"):
        decided.difference(one, {5: 0.1})


def test_a_leader_has_to_be_apart_from_all_others_and_not_from_the_second_only(decided: ModuleType) -> None:
    leader = {seed: 0.90 + 0.0001 * seed for seed in range(3)}
    second = {seed: 0.80 + 0.0001 * seed for seed in range(3)}
    wild = {0: 0.95, 1: 0.75, 2: 0.60}
    found = decided.answer({"c": wild, "b": second, "a": leader})
    assert (found.leader, found.second, found.nearest, found.not_apart) == ("a", "b", "c", ("c",))
    assert found.p > 0.3 and decided.answer({"b": second, "a": leader}).p < 1e-6
    assert decided.answer({"a": leader}).lead is None
    assert decided.answer({"b": leader, "a": dict(leader)}).leader == "a", "equal ones by name"


def test_holm_keeps_the_chance_of_any_error(decided: ModuleType) -> None:
    assert decided.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert decided.holm([0.5, 0.001]) == pytest.approx([0.5, 0.002]) and decided.holm([]) == []
    rng = numpy_stream(1, "p")
    wrong = sum(min(decided.holm(rng.uniform(size=40).tolist())) <= 0.05 for _ in range(2000))
    alone = sum(min(rng.uniform(size=40)) <= 0.05 for _ in range(2000))
    assert binom.sf(wrong - 1, 2000, 0.05) > 1e-4 and alone > 1500


def test_an_answer_that_is_one_comparison_counts_once(decided: ModuleType) -> None:
    """Sums give the same accuracies on every split, up to rounding: that is no further evidence."""
    one = decided.answer({"a": {0: 0.90, 1: 0.90}, "b": {0: 0.50, 1: 0.50}})
    again = decided.answer({"a": {0: 0.9001, 1: 0.90}, "b": {0: 0.50, 1: 0.5001}})
    other = decided.answer({"a": {0: 0.90, 1: 0.90}, "b": {0: 0.60, 1: 0.50}})
    assert decided.distinct([one, other, again]) == [[0, 2], [1]]
    weak = decided.answer({"a": {0: 0.90, 1: 0.10}, "b": {0: 0.50, 1: 0.50}})
    flags, number, of_all = decided.decide([one, again, weak])
    assert (flags, number, of_all) == ([True, True, False], 1, 2)
    assert decided.decide([]) == ([], 0, 0)
