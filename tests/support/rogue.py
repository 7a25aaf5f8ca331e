"""A client whose well-formed replies are changed on their way, and the reasons why a run refuses them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from method_settings import SMALL
from small import noise_images, world

from fedstill import methods
from fedstill.data.sources import DataSet
from fedstill.engines.transport import Arrival, Inline
from fedstill.protocol import wire

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


class Rogue:
    """A transport on which client 0's tensors are changed."""

    def __init__(self, inner: Any, change: Change) -> None:
        self.inner, self.change = inner, change

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        for arrival in self.inner.exchange(request, clients, sent):
            if arrival.client == 0:
                tensors, header = wire.unpack(arrival.reply)
                arrival = arrival._replace(reply=wire.pack(self.change(tensors), header))
            yield arrival


def reasons(name: str, change: Change, data: DataSet, folder: Path) -> set[str]:
    """Reasons to refuse replies in a run of three clients, the first of which is a rogue."""
    method = methods.find(name)(**SMALL[name])
    here = world(
        method, data, folder, 3, noise_images(data), transport=lambda s: Rogue(Inline(s), change), min_clients=1
    )
    method.server(here.federation)
    refusals = here.federation.journal.refusals()
    assert {refusal.client for refusal in refusals} <= {0}
    return {refusal.reason for refusal in refusals}


def of(size: float) -> Change:
    return lambda tensors: {
        name: torch.full_like(value, size) if value.is_floating_point() else value for name, value in tensors.items()
    }


def times(factor: float) -> Change:
    return lambda tensors: {
        name: value * factor if value.is_floating_point() else value for name, value in tensors.items()
    }


def counting(number: int) -> Change:
    return lambda tensors: {**tensors, "counts": torch.full_like(tensors["counts"], number)}


def none(tensors: Tensors) -> Tensors:
    return {name: value[:0] if value.ndim else value for name, value in tensors.items()}


MAX = torch.finfo(torch.float32).max
