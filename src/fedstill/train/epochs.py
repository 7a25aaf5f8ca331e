"""Epochs of a training that may outlast its process: everything that one hands to the next can be kept."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fedstill.weights import load

Epochs = Callable[..., Iterator[int]]
"""Numbers epochs from 1, or from where a killed run stood, and keeps models and tensors: `Federation.epochs`."""


def epochs(
    number: int,
    keep: Epochs | None,
    rng: torch.Generator,
    device: torch.device,
    *lasting: nn.Module | dict[str, Tensor],
) -> Iterator[int]:
    """Epochs 1 to ``number``, or those that are left, in which a resumed training draws what it would have drawn.

    Args:
        number: of all.
        keep: keeps ``lasting`` and the states of the random streams; None keeps nothing.
        rng: the training's own stream.
        device: whose global generator it draws from, beside the CPU's (dropout).
        *lasting: what else an epoch hands to the next.
    """
    if keep is None:
        yield from range(1, number + 1)
        return
    streams = _streams(rng, device)
    for i, epoch in enumerate(keep(number, *lasting, streams)):
        if i == 0:
            _go_on(streams, rng, device)
        yield epoch
        load(streams, _streams(rng, device))


def _streams(rng: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    states = {"rng": rng.get_state(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _go_on(streams: dict[str, Tensor], rng: torch.Generator, device: torch.device) -> None:
    rng.set_state(streams["rng"])
    torch.set_rng_state(streams["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(streams["cuda"], device)
