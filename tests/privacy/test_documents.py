"""The tests that the pages on privacy name exist, so that no promise there stands alone after a test is renamed."""

import ast
import re
from functools import cache
from pathlib import Path

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


def test_each_section_of_what_is_assumed_names_a_test_or_says_that_none_holds_it() -> None:
    _, *sections = (ROOT / "docs" / "assumptions.md").read_text().split("\n## ")
    for section in sections[:-1]:  # the last is a list for the reader
        assert NAMED.search(section), section.splitlines()[0]
