"""A small training: records, a model, a stream of random numbers and the batches that a fit draws."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedstill import models
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated


def small_records(n: int = 50, shape: tuple[int, int, int] = (1, 8, 8), num_classes: int = 3) -> Records:
    rng = torch.Generator().manual_seed(n)
    images = torch.randint(0, 256, (n, *shape), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, num_classes, (n,), generator=rng)
    return Records(images, labels, num_classes, Normalisation((0.3,) * shape[0], (0.5,) * shape[0]))


def new_model(spec: str = "dense-mnist") -> nn.Module:
    with isolated(0):
        return models.build(spec, (1, 8, 8), 3)


def stream(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(model: nn.Module) -> Tensor:
    """Every entry of the state, running statistics included, in one vector."""
    return torch.cat([t.detach().flatten().double() for t in model.state_dict().values()])


def shuffled(records: Records, rng: torch.Generator, batch_size: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    torch.randint(2**63 - 1, (), generator=rng)  # the seed of dropout
    for _ in range(epochs):
        for batch in torch.randperm(len(records), generator=rng).split(batch_size):
            yield records.inputs(batch), records.labels[batch]
