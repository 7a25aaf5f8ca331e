"""Epochs of a training that an interrupted run resumes, with checkpoints of everything that epochs hand on."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fedstill.weights import load

Epochs = Callable[..., Iterator[int]]
"""Numbers of the remaining epochs, with checkpoints of models and tensors: `Federation.epochs`."""


def epochs(
    number: int,
    checkpoint: Epochs | None,
    rng: torch.Generator,
    device: torch.device,
    *tensors: nn.Module | dict[str, Tensor],
) -> Iterator[int]:
    """Epochs 1 to ``number``, or the remaining ones; a resumed training draws the same random numbers.

    Args:
        number: number of all epochs.
        checkpoint: saves ``tensors`` and the states of the random streams; None saves nothing.
        rng: the training's own stream.
        device: the training's device, whose global generator dropout draws from.
        *tensors: everything else that an epoch hands to the next.
    """
    if checkpoint is None:
        yield from range(1, number + 1)
        return
    streams = _streams(rng, device)
    for i, epoch in enumerate(checkpoint(number, *tensors, streams)):
        if i == 0:
            _restore(streams, rng, device)
        yield epoch
        load(streams, _streams(rng, device))


def _streams(rng: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    states = {"rng": rng.get_state(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore(streams: dict[str, Tensor], rng: torch.Generator, device: torch.device) -> None:
    rng.set_state(streams["rng"])
    torch.set_rng_state(streams["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(streams["cuda"], device)
