"""The models and tensors that a server's loop carries from round to round, as one set of tensors and back."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from fedstill import files
from fedstill.weights import load, state

Carried = Sequence[nn.Module | dict[str, Tensor]]
"""The models and tensors of a loop."""


def tensors(carried: Carried) -> dict[str, Tensor]:
    """All of it as one set of named tensors."""
    parts = [state(part) if isinstance(part, nn.Module) else part for part in carried]
    return {f"{i}/{name}": value for i, part in enumerate(parts) for name, value in part.items()}


def put_back(carried: Carried, saved: Mapping[str, Tensor], path: Path) -> None:
    """Write ``saved``, made by `tensors`, into what a loop carries now; ``path`` is where it was read from.

    Raises:
        Damaged: names or shapes differ; nothing was written.
    """
    sizes = {key: value.shape for key, value in tensors(carried).items()}
    if sizes != {key: value.shape for key, value in saved.items()}:
        raise files.Damaged(
            f"{path} does not fit what this run carries (is it of another version?); delete it and run again"
        )
    for i, part in enumerate(carried):
        prefix = f"{i}/"
        load(part, {name.removeprefix(prefix): v for name, v in saved.items() if name.startswith(prefix)})
