"""The numbers of docs/sums.md are those of the files behind it."""

import json
import math
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmark
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sums.md").read_text("utf-8")
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture(scope="module")
def sums() -> ModuleType:
    return benchmark.load("sums")


def test_the_tables_are_those_of_the_runs(sums: ModuleType) -> None:
    runs = json.loads((RESULTS / "sums.json").read_text())["runs"]
    assert sums.page(PAGE, runs) == PAGE, "run: python benchmarks/sums.py --page"
    for method, epsilon, whole in sums.TABLES:
        lines = sums.table(runs, method, epsilon, all=whole)
        assert len(lines) == (6 if whole else 8) and "\n".join(lines) in PAGE
        assert f"| {sums.METHODS[method]} at epsilon {epsilon}{', all records' * whole} | 10 clients |" in PAGE


def test_a_thousand_clients_with_masked_sums_have_what_one_client_has(sums: ModuleType) -> None:
    runs = json.loads((RESULTS / "sums.json").read_text())["runs"]
    cells: dict[tuple[Any, ...], list[float]] = {}
    for run in runs:
        if not run["all"] and run["partition"] == ("iid" if run["sums"] == "one" else "classes:1"):
            key = (run["method"], run["epsilon"], run["data"], run["sums"], run["clients"])
            cells.setdefault(key, []).append(100 * run["accuracy"])
    alone = {key[:3]: values for key, values in cells.items() if key[3] == "one"}
    for key, values in alone.items():
        many = cells[(*key, "masked", 1000)]
        assert len(many) == len(values) in (3, 10)
        spread = math.hypot(statistics.stdev(many), statistics.stdev(values)) / math.sqrt(len(values))
        gap = statistics.mean(many) - statistics.mean(values)
        assert -0.5 < gap < 0.5 + 2 * spread, key
    assert len(alone) == 18


def test_memory_is_flat_in_the_number_of_clients() -> None:
    table = json.loads((RESULTS / "memory-sums.json").read_text())["table"]
    assert [row["clients"] for row in table] == [10, 100, 1000, 10_000]
    for row in table:
        shown = f"{row['clients']:,} | {100 * row['accuracy']:.1f} | {row['memory_MB']:.0f} MB | {row['seconds']:,.0f}"
        assert f"| {shown} |\n" in PAGE
        assert row["memory_MB"] < 1.1 * table[0]["memory_MB"]


def test_the_table_beside_flower_s_workflow_is_that_of_its_file() -> None:
    pytest.importorskip("flwr", reason="the workflow is Flower's, of pip install 'fedstill[flower]'")
    rows = json.loads((RESULTS / "secagg_workflow.json").read_text())["table"]
    assert "\n".join(benchmark.load("secagg_workflow").table(rows)) in PAGE
    assert all(row["secagg_plus"]["largest_error"] < 1e-5 and row["secagg_plus"]["messages"] == 4 for row in rows)


def test_every_row_of_costs_is_on_the_page() -> None:
    for row in json.loads((RESULTS / "sum_costs.json").read_text())["rows"]:
        upload = row["masked"]["client_bytes"]
        shown = f"{upload / 1e6:.1f} MB" if upload >= 1e6 else f"{upload / 1e3:.1f} kB"
        start = f"| {row['clients']:,} | 10^{len(str(row['numbers'])) - 1} |"
        (line,) = [text for text in PAGE.splitlines() if text.startswith(start)]
        assert shown in line
        assert row["masked"]["client_bytes"] <= 1.3 * row["open"]["client_bytes"] + 1000
