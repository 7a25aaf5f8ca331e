"""Same seed, same result: whatever carries the messages, in whatever order they come."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import Probe, run, weights


@pytest.fixture(scope="module")
def inline(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int, int]:
    model, federation = run(Probe(), digits, tmp_path_factory.mktemp("inline"))
    return weights(model), federation.journal.bytes_up, federation.journal.bytes_down


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_weights_and_bytes(
    workers: int, digits: Any, inline: tuple[bytes, int, int], tmp_path: Path
) -> None:
    model, federation = run(Probe(), digits, tmp_path, workers=workers)
    assert (weights(model), federation.journal.bytes_up, federation.journal.bytes_down) == inline


def test_the_order_of_replies_does_not_matter(digits: Any, inline: tuple[bytes, int, int], tmp_path: Path) -> None:
    model, _ = run(Probe(), digits, tmp_path, shuffle=True)
    assert weights(model) == inline[0]


def test_the_global_generator_does_not_matter(digits: Any, inline: tuple[bytes, int, int], tmp_path: Path) -> None:
    torch.manual_seed(99)
    torch.rand(5)
    model, _ = run(Probe(), digits, tmp_path)
    assert weights(model) == inline[0]


def test_another_seed_gives_another_result(digits: Any, inline: tuple[bytes, int, int], tmp_path: Path) -> None:
    model, _ = run(Probe(), digits, tmp_path, seed=1)
    assert weights(model) != inline[0]
