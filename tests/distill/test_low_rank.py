import pytest
import torch

from fedstill.distill.low_rank import LowRank, compress, expand


def thin(rows: int, columns: int, rank: int) -> torch.Tensor:
    return torch.randn(rows, rank) @ torch.randn(rank, columns)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "conv": thin(16, 8 * 9, 2).view(16, 8, 3, 3),
        "bias": torch.randn(16),
        "whole": torch.randn(6, 6),
        "nothing": torch.zeros(20, 20),
        "scalar": torch.tensor(3.0),
    }


def test_thin_matrices_come_back_from_few_numbers(tensors: dict[str, torch.Tensor]) -> None:
    sent = compress(tensors, 0.999999)
    assert sent.ranks.tolist() == [2, 0, 0]
    assert len(sent.values) == 2 * (16 + 72) + 16 + 36 + 400 + 1
    found = expand(sent, tensors)
    assert found is not None
    for name, value in tensors.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("energy", [0.3, 0.6, 0.95])
def test_the_rank_is_the_smallest_that_keeps_more_than_the_share(energy: float) -> None:
    torch.manual_seed(1)
    values = torch.tensor([4.0, 2.0, 1.0, 0.5])
    u, v = (torch.linalg.qr(torch.randn(40, 4))[0] for _ in range(2))
    sent = compress({"w": u * values @ v.T}, energy)
    (rank,) = sent.ranks.tolist()
    share = values.square().cumsum(0) / values.square().sum()
    assert share[rank - 1] > energy
    assert rank == 1 or share[rank - 2] <= energy


def test_the_best_approximation_of_its_rank() -> None:
    torch.manual_seed(2)
    matrix = torch.randn(30, 50)
    sent = compress({"w": matrix}, 0.4)
    found = expand(sent, {"w": matrix})
    assert found is not None
    s = torch.linalg.svdvals(matrix)
    assert (found["w"] - matrix).norm() == pytest.approx(float(s[int(sent.ranks[0]) :].norm()), rel=1e-5)


def test_what_is_not_finite_is_sent_as_it_is() -> None:
    matrix = torch.full((30, 30), torch.nan)
    sent = compress({"w": matrix}, 0.9)
    assert sent.ranks.tolist() == [0]
    assert len(sent.values) == 900


@pytest.mark.parametrize("wrong", ["ranks", "negative", "large", "short", "long"])
def test_factors_that_do_not_fit_are_no_update(tensors: dict[str, torch.Tensor], wrong: str) -> None:
    ranks, values = compress(tensors, 0.9)
    changed = {
        "ranks": LowRank(ranks[:-1], values),
        "negative": LowRank(ranks - 1, values),
        "large": LowRank(ranks + 1000, values),
        "short": LowRank(ranks, values[:-1]),
        "long": LowRank(ranks, torch.cat([values, values[:1]])),
    }
    assert expand(changed[wrong], tensors) is None


def test_finite_factors_of_what_is_not_are_no_update() -> None:
    like = {"w": torch.zeros(30, 30)}
    given = LowRank(torch.tensor([1], dtype=torch.int32), torch.full((60,), 3e38))
    assert expand(given, like) is None
