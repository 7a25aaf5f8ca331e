"""What a server's loop carries, and what it logs and shows, to and from the run's folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fedstill import files
from fedstill.records import Records
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


def metrics_until(done: int, path: Path) -> None:
    """Drop what a killed round had logged to ``path``; the round will log it again.

    Raises:
        Damaged: a line is no round's.
    """
    lines = files.read_json_lines(path)
    if not all(isinstance(line.get("round"), int) for line in lines):
        raise files.Damaged(f"{path} is damaged (a line is no round); delete {path.parent} and run again")
    before = [line for line in lines if line["round"] <= done]
    if before != lines:
        files.write_bytes(path, *(json.dumps(line).encode() + b"\n" for line in before))


def save_images(path: Path, images: Records) -> None:
    """Write records as the run folder's ``images/NAME.npz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, images=images.images.cpu().numpy(), labels=images.labels.cpu().numpy())
