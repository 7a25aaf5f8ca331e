"""The numbers of docs/sums.md are those of the files behind it."""

import json
import statistics
from pathlib import Path
from types import ModuleType

import benchmark
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sums.md").read_text("utf-8")
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture(scope="module")
def sums() -> ModuleType:
    return benchmark.load("sums")


@pytest.mark.parametrize("epsilon", [1, 4])
def test_the_table_is_that_of_the_runs(sums: ModuleType, epsilon: int) -> None:
    runs = json.loads((RESULTS / "sums.json").read_text())["runs"]
    lines = sums.table(runs, "afl", epsilon, all=False)
    assert len(lines) == 8 and "\n".join(lines) in PAGE
    for data, name in sums.NAMES.items():
        key = ("afl", data, "one", epsilon)
        some = [r["accuracy"] for r in runs if (r["method"], r["data"], r["sums"], r["epsilon"]) == key]
        assert len(some) == 3
        text = " ".join(PAGE.split())
        said = (
            text[text.index(f"{name} ", text.index("One client with all 4,000 records")) :]
            .split(",")[0]
            .split(".  ")[0]
        )
        assert f"{100 * statistics.mean(some):.1f}" in said


def test_the_other_tables_are_those_of_the_runs(sums: ModuleType) -> None:
    runs = json.loads((RESULTS / "sums.json").read_text())["runs"]
    for method, epsilon, whole in (
        ("fedcgs", 1, False),
        ("gh-ofl", 1, False),
        ("fedcgs", 4, False),
        ("gh-ofl", 4, False),
        ("afl", 1, True),
    ):
        lines = sums.table(runs, method, epsilon, all=whole)
        assert len(lines) > 3 and "\n".join(lines) in PAGE


def test_memory_is_flat_in_the_number_of_clients() -> None:
    table = json.loads((RESULTS / "memory-sums.json").read_text())["table"]
    assert [row["clients"] for row in table] == [10, 100, 1000, 10_000]
    for row in table:
        shown = f"{row['clients']:,} | {100 * row['accuracy']:.1f} | {row['memory_MB']:.0f} MB | {row['seconds']:,.0f}"
        assert f"| {shown} |\n" in PAGE
        assert row["memory_MB"] < 1.1 * table[0]["memory_MB"]


def test_every_row_of_costs_is_on_the_page() -> None:
    for row in json.loads((RESULTS / "sum_costs.json").read_text())["rows"]:
        upload = row["masked"]["client_bytes"]
        shown = f"{upload / 1e6:.1f} MB" if upload >= 1e6 else f"{upload / 1e3:.1f} kB"
        start = f"| {row['clients']:,} | 10^{len(str(row['numbers'])) - 1} |"
        (line,) = [text for text in PAGE.splitlines() if text.startswith(start)]
        assert shown in line
        assert row["masked"]["client_bytes"] <= 1.3 * row["open"]["client_bytes"] + 1000
