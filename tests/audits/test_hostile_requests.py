"""The search for hostile requests, in small form, and that it finds what is wrong."""

import pytest
from benchmark import load

from fedstill.privacy import logistic

benchmark = load("hostile_requests")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("fedavg-p", 0.85), ("ldp-fedavg", 0.01), ("afl", 0.3), ("fedgm-labels", 0.9)]
)
def test_no_request_moves_a_release_by_more_than_its_sensitivity(
    name: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With some hundred requests, all come close to 1 (see `benchmarks/results/hostile_requests.json`)."""
    monkeypatch.setattr(benchmark, "HEAD_RECORDS", 400)
    row = benchmark.search(name, 12)
    assert row["answered"] > 6 and row["by_one_site_alone"] == 0
    assert 0 < row["honest"] <= row["largest"] <= 1 + 1e-9
    assert row["largest"] > least


@pytest.mark.slow
def test_the_search_finds_clipping_that_trusts_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are divided by the radius but not clipped: what an honest map keeps short, a hostile one makes long."""
    monkeypatch.setattr(logistic, "clipped", lambda rows, radius: rows.double())
    assert benchmark.search("afl", 12)["largest"] > 1.5
