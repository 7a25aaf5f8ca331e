"""Training that is killed between two epochs goes on as if nothing had happened."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from doubles import Killed
from torch import Tensor, nn

from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated
from fedstill.protocol import load, state
from fedstill.train.condensation import CondensedTraining
from fedstill.train.sgd import SGD, Adam

TRAININGS = {
    "sgd": SGD(lr=0.05, weight_decay=0.01, batch_size=16, epochs=4),
    "milestones": SGD(lr=0.05, batch_size=16, epochs=4, milestones=(1, 2, 3)),
    "few steps": SGD(lr=0.05, batch_size=16, epochs=4, max_steps=9),
    "adam": Adam(lr=0.01, weight_decay=0.01, batch_size=16, epochs=4),
    "server": CondensedTraining(lr=0.05, batch_size=16, epochs=4),
}


class Keeper:
    """Keeps copies, as a checkpoint does, and dies behind a certain epoch."""

    def __init__(self, dies_behind: int) -> None:
        self.dies_behind, self.done, self.saved, self.seen = dies_behind, 0, [{}], list[int]()

    def epochs(self, number: int, *keep: nn.Module | dict[str, Tensor]) -> Iterator[int]:
        if self.done:
            for part, saved in zip(keep, self.saved, strict=True):
                load(part, saved)
        for epoch in range(self.done + 1, number + 1):
            self.seen.append(epoch)
            yield epoch
            parts = (state(part) if isinstance(part, nn.Module) else part for part in keep)
            self.saved = [{name: value.clone() for name, value in part.items()} for part in parts]
            self.done = epoch
            if epoch == self.dies_behind:
                raise Killed


def records() -> Records:
    rng = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (50, 1, 8, 8), generator=rng, dtype=torch.uint8)
    return Records(images, torch.randint(0, 3, (50,), generator=rng), 3, Normalisation((0.3,), (0.5,)))


def forgetful() -> nn.Module:
    """A network with everything that lasts: weights, running statistics, dropout."""
    with isolated(0):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3)
        )


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in model.state_dict().values()])


every = pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)


@every
@pytest.mark.parametrize("dies_behind", [1, 2, 3])
def test_a_killed_training_ends_as_an_undisturbed_one(training: Any, dies_behind: int) -> None:
    undisturbed, keeper = forgetful(), Keeper(dies_behind)
    steps = training.fit(undisturbed, records(), rng(3))
    with pytest.raises(Killed):
        training.fit(forgetful(), records(), rng(3), checkpoint=keeper.epochs)
    resumed = forgetful()
    assert training.fit(resumed, records(), rng(3), checkpoint=keeper.epochs) == steps
    assert keeper.seen == [1, 2, 3, 4]
    assert torch.equal(flat(resumed), flat(undisturbed))


def without(name: str) -> Callable[[Keeper], None]:
    """Makes a keeper lose the tensors of that name."""

    def lose(keeper: Keeper) -> None:
        for part in keeper.saved:
            for key in [key for key in part if key == name]:
                part[key] = torch.zeros_like(part[key]) if part[key].dtype != torch.uint8 else other_stream()

    return lose


def other_stream() -> Tensor:
    return rng(99).get_state()


@pytest.mark.parametrize(
    ("training", "lost"),
    [("sgd", "0"), ("adam", "0.exp_avg"), ("adam", "0.exp_avg_sq"), ("adam", "0.step"), ("sgd", "rng"), ("sgd", "cpu")],
)
def test_nothing_of_what_is_kept_is_idle(training: str, lost: str) -> None:
    undisturbed, keeper = forgetful(), Keeper(2)
    TRAININGS[training].fit(undisturbed, records(), rng(3))  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        TRAININGS[training].fit(forgetful(), records(), rng(3), checkpoint=keeper.epochs)  # type: ignore[attr-defined]
    without(lost)(keeper)
    resumed = forgetful()
    TRAININGS[training].fit(resumed, records(), rng(3), checkpoint=keeper.epochs)  # type: ignore[attr-defined]
    assert not torch.equal(flat(resumed), flat(undisturbed))
