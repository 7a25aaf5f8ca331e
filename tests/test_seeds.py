import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fedstill.base import seeds


def test_same_name_same_numbers_another_name_others() -> None:
    def draw(*names: str | int) -> list[float]:
        return torch.rand(4, generator=seeds.stream(0, *names)).tolist()

    assert draw("client", 1) == draw("client", 1)
    assert draw("client", 1) != draw("client", 2)
    assert draw("client", 1) != draw("client", "1")
    assert draw("ab", "c") != draw("a", "bc")
    assert torch.rand(4, generator=seeds.stream(1, "client", 1)).tolist() != draw("client", 1)


def test_a_stream_neither_reads_nor_moves_the_global_state() -> None:
    torch.manual_seed(3)
    first = torch.rand(4, generator=seeds.stream(0, "x"))
    moved = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), moved)
    assert torch.equal(torch.rand(4, generator=seeds.stream(0, "x")), first)


def test_isolated_gives_a_stream_and_puts_the_global_state_back() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeds.isolated(1):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeds.isolated(1):
        assert torch.equal(torch.rand(3), inside)
    with seeds.isolated(2):
        assert not torch.equal(torch.rand(3), inside)


def test_streams_of_neighbouring_names_are_unrelated() -> None:
    draws = np.stack([seeds.numpy_stream(0, "client", i).standard_normal(2000) for i in range(8)])
    correlations = np.corrcoef(draws)[np.triu_indices(8, 1)]
    # 28 correlations of 2,000 pairs: |r| > 5 / sqrt(2000) has a chance of 28 * 6e-7
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)


def test_two_threads_have_the_global_generator_in_turn() -> None:
    """The second thread tries to enter while the first draws; without a lock it would reseed the first one's stream."""
    with seeds.isolated(1):
        alone = torch.rand(4)
    first_is_in, second_is_in = threading.Event(), threading.Event()
    drawn: list[torch.Tensor] = []

    def first() -> None:
        with seeds.isolated(1):
            half = torch.rand(2)
            first_is_in.set()
            assert not second_is_in.wait(0.3)
            drawn.append(torch.cat([half, torch.rand(2)]))

    def second() -> None:
        assert first_is_in.wait(10)
        with seeds.isolated(2):
            second_is_in.set()
            torch.rand(3)

    before = torch.get_rng_state()
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result()
    assert torch.equal(drawn[0], alone)
    assert torch.equal(torch.get_rng_state(), before)
