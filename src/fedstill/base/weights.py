"""Weights of a network: as named tensors, and as one vector."""

import hashlib
import io
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedstill.base.errors import first_line

_NESTED = ("state_dict", "model")
"""Names under which checkpoints of others have a state dict."""


def state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state (parameters and buffers) by name, detached."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's trainable parameters by name, detached."""
    return {name: value.detach() for name, value in model.named_parameters()}


def content_digest(model: nn.Module) -> str:
    """SHA-256 of the model's layers, as their ``repr`` shows them, and of all parameters and buffers."""
    digest = hashlib.sha256(repr(model).encode())
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load(target: nn.Module | dict[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy ``source`` into the tensors of the same names in ``target``, rounding values to integers where needed."""
    targets = target.state_dict() if isinstance(target, nn.Module) else target
    for name, value in source.items():
        into = targets[name]
        into.copy_(value.round() if value.is_floating_point() and not into.is_floating_point() else value)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors in a file by name, without running anything in it.

    Args:
        path: a safetensors file, or what ``torch.save`` made of a state dict, or of a dictionary with one as
            ``state_dict`` or ``model``.

    Raises:
        OSError: the file can't be read.
        ValueError: it holds something else.
    """
    content = path.read_bytes()
    if not content.startswith((b"PK", b"\x80")):  # neither a zip archive nor a pickle, as torch.save writes them
        try:
            return safetensors.torch.load(content)
        except safetensors.SafetensorError as error:
            raise ValueError(f"its format is neither safetensors nor torch's: {error}") from error
    loaded = plain(content)
    if isinstance(loaded, Mapping):
        loaded = next((loaded[name] for name in _NESTED if isinstance(loaded.get(name), Mapping)), loaded)
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"it has a {type(loaded).__name__} that is not a state dict of names and tensors")
    return dict(loaded)


def plain(content: bytes) -> Any:
    """Content that ``torch.save`` wrote, of tensors, numbers, texts and plain containers: nothing in it is run.

    Raises:
        ValueError: it holds something else, or is damaged.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch and its unpickler raise many kinds of errors on damaged and on foreign files
        why = first_line(error).split(". ")[0]
        raise ValueError(f"torch can't read it as plain tensors: {why}") from error


def flattened(model: nn.Module) -> Float[Tensor, " values"]:
    """All entries of the model's state as one float32 vector."""
    return torch.cat([value.flatten().float() for value in state(model).values()])


def load_flat(model: nn.Module, values: Float[Tensor, " values"]) -> None:
    """Copy a vector of `flattened` into ``model``; a ValueError if its length is another."""
    own = state(model)
    sizes = [value.numel() for value in own.values()]
    if sum(sizes) != len(values):
        raise ValueError(f"a model of {len(values)} values came; the network here has {sum(sizes)}")
    parts = values.split(sizes)  # type: ignore[no-untyped-call]
    load(model, {name: part.view_as(like) for (name, like), part in zip(own.items(), parts, strict=True)})
