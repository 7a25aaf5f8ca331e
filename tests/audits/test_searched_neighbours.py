"""The search for neighbours, in small form, and that it finds what is wrong."""

from typing import Any

import pytest
import torch
from benchmark import load

from fedstill.privacy import logistic, mechanisms
from fedstill.privacy.solver import NotConverged

benchmark = load("movements")


def searched(kind: str = "LogisticHead", penalty: float = 1.0, many: int = 4000) -> dict[str, Any]:
    h, y = benchmark.pull(many, 4, benchmark.head_of(kind, penalty, 0.1)[1])
    found: dict[str, Any] = benchmark.search_head(kind, h, y, penalty, 32, 2)
    return found


@pytest.mark.parametrize("kind", ["LogisticHead", "BinaryHead"])
@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_increments_of_a_head_are_its_full_movement(kind: str, penalty: float) -> None:
    for found in (
        searched(kind, penalty),
        benchmark.search_head(kind, *benchmark.spectrum(600, 12, 3.0), penalty, 32, 2),
    ):
        assert found["full minus incremental"] < 1e-6 and found["largest"] <= 1
        assert found["outcomes"] == "4 of 4 alike (value)" and not benchmark.different(found["outcomes"])


def test_a_head_s_sensitivity_without_its_root_of_two_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.95 < searched()["largest"] <= 1
    monkeypatch.setattr(logistic.LogisticHead, "steepness", 1.0)
    assert searched()["largest"] > 1.3


def test_an_allowance_for_rounding_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(row["largest"] for row in benchmark.search_roundings(True)) <= 1
    monkeypatch.setattr(mechanisms, "ROUNDING", 1 + 1e-9)
    assert max(row["largest"] for row in benchmark.search_roundings(True)) > 1 + 9e-8


def test_sums_of_rows_that_are_not_clipped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = mechanisms.ClassSums(3, 1.0, 0.0)
    each = benchmark.Sum(mechanism, lambda rows: mechanism(rows, benchmark.quiet()))
    row, label = torch.full((1, 2), 3.0), torch.ones(1, dtype=torch.int64)
    empty = each.value((row[:0], label[:0]))
    assert each.distance(each.value((row, label)), empty) <= mechanism.sensitivity
    monkeypatch.setattr(mechanisms, "clipped", lambda rows, radius: rows.double())
    assert each.distance(each.value((row, label)), empty) > 4 * mechanism.sensitivity


def test_a_record_that_decides_whether_there_is_a_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = logistic.solve

    def ends_for(x: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        if len(x) < 4000:
            raise NotConverged("the gradient is too long")
        return solve(x, *given, **more)

    monkeypatch.setattr(logistic, "solve", ends_for)
    outcomes = searched()["outcomes"]
    assert outcomes == "2 of 4 alike (value)" and benchmark.different(outcomes)
