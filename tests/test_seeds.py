import numpy as np
import torch

from fedstill import seeds


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
