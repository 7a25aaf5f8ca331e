"""The tests that the pages on privacy name exist, and their tables of numbers are those of the benchmarks' files."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FULL = {"docs/assumptions.md": 25, "docs/privacy_review.md": 15}
"""Pages, and the fewest tests that each names."""


@cache
def names_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).exists() else ast.Module([], [])
    return {part.name for part in ast.walk(tree) if isinstance(part, ast.FunctionDef)}


@pytest.mark.parametrize("page", FULL)
def test_every_named_test_exists(page: str) -> None:
    named = NAMED.findall((ROOT / page).read_text())
    assert [f"{file}::{name}" for file, name in named if name not in names_of(file)] == []
    assert len(set(named)) >= FULL[page]
    # nothing looks like a test's name without being checked
    assert len(named) == len(re.findall(r"::test_", (ROOT / page).read_text()))


def keys_of(file: str, name: str) -> set[str]:
    """The keys of a dictionary at the top of a test file."""
    for part in ast.parse((ROOT / file).read_text()).body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id == name:
            return {key.value for key in part.value.keys if isinstance(key, ast.Constant)}  # type: ignore[union-attr]
    raise AssertionError(f"{file} has no {name}")


def test_every_planted_fault_is_caught_twice_by_what_the_page_names() -> None:
    """Cells name cases of the comparison of neighbours and of the audit's tests, or other tests; none is left out."""
    page = (ROOT / "docs" / "privacy.md").read_text()
    table = page[page.index("| fault | caught by a test of the gate |") :].partition("\n\n")[0].splitlines()[2:]
    audits = "tests/audits/test_whole_runs.py"
    cases = (
        keys_of("tests/methods/test_neighbours.py", "FAULTS"),
        keys_of(audits, "FAULTS") | keys_of(audits, "DIFFERENCES"),
    )
    named: tuple[set[str], set[str]] = set(), set()
    for row in table:
        fault, *cells = row.strip("|").split("|")
        for cell, known, seen in zip(cells, cases, named, strict=True):
            quoted, tests = set(re.findall(r'"([^"]+)"', cell)), NAMED.findall(cell)
            assert quoted or tests, fault
            assert quoted <= known, (fault, quoted - known)
            assert all(name in names_of(file) for file, name in tests), (fault, tests)
            seen |= quoted
    assert named == cases


def test_each_section_of_what_is_assumed_names_a_test_or_says_that_none_holds_it() -> None:
    _, *sections = (ROOT / "docs" / "assumptions.md").read_text().split("\n## ")
    for section in sections[:-1]:  # the last is a list for the reader
        assert NAMED.search(section), section.splitlines()[0]


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of a page's table whose first line begins with ``head``."""
    text = (ROOT / "docs" / page).read_text()
    lines = text[text.index(head) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_furthest_neighbours_are_those_of_the_results_and_none_is_further_than_its_sensitivity() -> None:
    found: dict[str, list[Any]] = {}
    for row in results("movements.json")["table"]:
        found.setdefault(row["mechanism"].partition(",")[0], []).append(row)
    expected = []
    for name, rows in found.items():
        numbers = [row["records"] for row in rows if isinstance(row["records"], int)]
        searched, furthest = sum(row["neighbours"] for row in rows), max(row["largest"] for row in rows)
        assert furthest <= 1 and searched >= 10_000
        counted = f"{max(numbers):,}" if numbers else "-"
        expected.append([f"`{name}`", f"{searched:,}", counted, f"{furthest:.3f}"])
    assert rows_of("privacy.md", "| mechanism | neighbours | records, up to |") == expected


def test_times_of_replies_are_those_of_the_results() -> None:
    expected = [
        [
            row["release"],
            row["record"],
            *(f"{row[key]:.3g}" for key in ("median seconds with it", "median seconds without")),
            *(f"{100 * row[key]:.0f}" for key in ("right", "right at multiples")),
        ]
        for row in results("reply_times.json")["table"]
    ]
    assert rows_of("privacy.md", "| release | record | s with it |") == expected


@pytest.mark.parametrize(("file", "head"), [("private_steps_858.json", "| model, images | ratio of a step, 858dc32 |")])
def test_costs_of_a_private_step_are_those_of_the_results(file: str, head: str) -> None:
    table = results(file)["table"]
    expected = [
        [
            f"`{row['model']}`, {row['image'][1]} x {row['image'][2]}",
            f"{row['ratio of medians']:.2f}",
            f"{row['ratio of the least']:.2f}",
        ]
        for row in table
    ]
    assert rows_of("privacy_review.md", head) == expected
    assert max(row["ratio of medians"] for row in table) <= 1.1
