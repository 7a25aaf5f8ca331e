"""A client's synthetic images."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.data.sources import DataSet
from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.models import build
from fedstill.records import Records
from fedstill.seeds import derive, isolated, stream


def new_net(shape: tuple[int, int, int], index: int) -> nn.Module:
    with isolated(derive(0, "net", index)):
        return build("convnet:width=8,depth=2", shape, 10)


def made(data: DataSet, labels: list[int], seed: int = 0, ipc: int = 2, **settings: Any) -> Records:
    held = torch.isin(data.train.labels, torch.tensor(labels))
    quick = GradientMatching(**{"nets": 4, "batch_size": 16, **settings})
    return synthesise(
        data.train[torch.nonzero(held).flatten()], partial(new_net, data.train.shape), ipc, quick, stream(seed)
    )


def test_they_are_8_bit_images_of_the_classes_at_hand(digits: DataSet) -> None:
    found = made(digits, [4, 1], ipc=3)
    assert found.images.dtype == torch.uint8
    assert found.images.shape == (6, 1, 8, 8)
    assert found.labels.tolist() == [1, 1, 1, 4, 4, 4]
    assert found.normalisation == digits.train.normalisation


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init": "noise"},
        {"init": "real"},
        {"choose": "representatives", "interval": 2},
        {"steps": 3, "net_epochs": 2},
        {"distance": "mse", "lr": 0.1},
        {"distance": "cos", "lr": 1.0},
        {"augment": "none", "anneal": False},
    ],
    ids=str,
)
def test_the_same_seed_gives_the_same_images_another_seed_others(digits: DataSet, settings: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    first = made(digits, [3], **settings)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(made(digits, [3], **settings).images, first.images)
    assert not torch.equal(made(digits, [3], seed=1, **settings).images, first.images)


def test_matching_brings_the_gradients_nearer(digits: DataSet) -> None:
    losses: list[float] = []
    settings = GradientMatching(nets=60, batch_size=64, augment="none", init="noise", lr=0.1)
    synthesise(
        digits.train.of_class(2),
        partial(new_net, digits.train.shape),
        2,
        settings,
        stream(0),
        progress=lambda _, loss: losses.append(loss),
    )
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_a_class_with_fewer_records_than_images_is_filled_up(digits: DataSet) -> None:
    few = digits.train.of_class(5)[:2]
    found = synthesise(few, partial(new_net, few.shape), 4, GradientMatching(nets=2), stream(0))
    assert found.labels.tolist() == [5] * 4


def test_no_records_are_refused(digits: DataSet) -> None:
    with pytest.raises(ValueError, match="0 records have no classes to synthesise"):
        synthesise(digits.train[:0], partial(new_net, digits.train.shape), 1, GradientMatching(), stream(0))


def test_the_papers_own_constants() -> None:
    paper = GradientMatching.published(50)
    assert (paper.nets, paper.steps, paper.batch_size, paper.interval, paper.choose) == (
        300,
        100,
        128,
        10,
        "representatives",
    )
    assert paper.lr * 50 == pytest.approx(0.01)
    assert not paper.anneal
