"""The page of peers: it is what its results give, and what it compares is the same work."""

import json
from types import ModuleType

import benchmark
import pytest


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """The script, as ``python benchmarks/peers`` imports it."""
    return benchmark.load("peers")


def test_the_page_is_what_the_results_give(peers: ModuleType) -> None:
    files = [json.loads(place.read_text("utf-8")) for place in (peers.RESULTS, peers.PRIVATE)]
    page = peers.page(*files)
    assert peers.PAGE.read_text("utf-8") == page, "run: python benchmarks/peers page"


def test_all_did_the_same_work(peers: ModuleType) -> None:
    """A peer that trained on fewer records, or for fewer epochs, would be quicker and less accurate."""
    found = json.loads(peers.RESULTS.read_text("utf-8"))
    right = [row["accuracy"] for row in found["table"]]
    assert {"plain loop", "fedstill", "Flower"} <= {row["name"] for row in found["table"]}
    assert max(right) - min(right) < 0.02


def test_a_peer_that_is_not_installed_is_absent(peers: ModuleType) -> None:
    assert peers.there("fedstill") and peers.there("") == ""
    assert peers.there("no-such-package") is None and peers.there("fedstill", "no_such_module") is None
