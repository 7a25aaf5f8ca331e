"""The page of pretrained features: it is what its results give, and each run has the best of its row's tries."""

import re
import shlex
from pathlib import Path
from types import ModuleType

import benchmark
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def board() -> ModuleType:
    """The script, as ``python benchmarks/feature_board`` imports it."""
    return benchmark.load("feature_board")


def test_the_page_is_what_the_results_give(board: ModuleType) -> None:
    again = "run: python benchmarks/feature_board page"
    assert (ROOT / "docs" / "board_features.md").read_text() == board.written(), again


def test_every_line_has_the_command_of_the_plan_with_its_best_try(board: ModuleType) -> None:
    """So results of other settings, of a try that is not the best, or chosen on test records, are noticed."""
    tries, runs, planned = board.read("tries.jsonl"), board.read("runs.jsonl"), set(board.jobs())
    assert runs and len(tries) == board.TRIES * len(board.ROWS)
    for row in [*tries, *runs]:
        job = board.key(row)
        assert job in planned, row
        chosen = 0 if job.number is not None else board.best(job.label, tries)
        assert row["command"] == shlex.join(["fedstill", "run", *board.words(job, chosen)])
        assert ("--validation" in row["command"]) == (job.number is not None)
        assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", row["commit"]) and ("digest" in row) != ("failed" in row)


def test_a_row_without_all_its_tries_is_not_run(board: ModuleType) -> None:
    with pytest.raises(ValueError, match="'afl' has 2 of 3 tries"):
        board.best("afl", [row for row in board.read("tries.jsonl") if row["number"] != 1])
