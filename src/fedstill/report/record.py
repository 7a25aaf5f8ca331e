"""Reading run folders: what one finished run left on disk, checked.

A run folder holds ``config.json`` and ``summary.json``; every other file may be missing. Nothing here is trusted: a
folder may have been edited, cut short or copied from elsewhere, so each file is checked before anything is shown.
"""

import json
import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedstill import files

Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Images = tuple[NDArray[np.uint8], NDArray[np.int64]]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


_AnyPart = TypeVar("_AnyPart", bound=_Part)


class _Guarantee(_Part):
    holds: bool
    unit: str | None = None
    epsilon: Annotated[float, Field(ge=0)] | None = None
    delta: Share | None = None
    adversary: str | None = None
    adjacency: str | None = None
    accountant: str | None = None
    reason: str = ""


class _Refusal(_Part):
    client: int
    step: str
    round: int | None = None
    reason: str


class _Summary(_Part):
    method: str
    label: str
    data: str
    partition: str
    clients: Annotated[int, Field(ge=1)]
    rounds: Count
    seed: int
    accuracy: Share | None
    bytes_up: Amount
    bytes_down: Amount
    bytes_up_per_client: Amount
    bytes_down_per_client: Amount
    seconds: Amount
    model: str | None = None
    num_parameters: Count | None = None
    judged_on: str = "test records"
    guarantee: _Guarantee
    refused: tuple[_Refusal, ...] = ()
    version: str | None = None


class _Config(_Part):
    experiment: dict[str, Any]
    method: dict[str, Any]
    label: str
    command: str | None = None
    version: str | None = None


class _Metric(_Part):
    round: Count
    accuracy: Share | None = None
    bytes_up: Amount | None = None
    bytes_down: Amount | None = None
    seconds: Amount | None = None


class _Partition(_Part):
    class_names: tuple[str, ...]
    counts: tuple[tuple[Count, ...], ...]


class _Evaluation(_Part):
    confusion: tuple[tuple[Count, ...], ...]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One finished run, as read from its folder (K clients, C classes).

    Attributes:
        folder: where it was read from.
        label: the name the run goes by in tables and figures; runs that differ in the seed only share it.
        config: ``experiment``, ``method``, ``label`` and, where known, ``command`` and ``version``.
        summary: the results; ``accuracy`` in [0, 1] or None, ``guarantee`` and ``refused`` always present.
        metrics: one entry per logged round, in order of rounds; bytes are cumulative over all clients.
        class_names: C names, empty when the folder has no ``partition.json``.
        counts: records of each class at each client, int64 ``(K, C)``, or None.
        confusion: test records by true (rows) and predicted class, int64 ``(C, C)``, or None.
        images: sample images by name, uint8 ``(n, c, h, w)`` with labels int64 ``(n,)``; ``"real"`` holds test images.
    """

    folder: Path
    label: str
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: tuple[dict[str, Any], ...] = ()
    class_names: tuple[str, ...] = ()
    counts: NDArray[np.int64] | None = None
    confusion: NDArray[np.int64] | None = None
    images: dict[str, Images] | None = None

    def class_name(self, label: int) -> str:
        """The name of class ``label``; its number when the run did not record names."""
        return self.class_names[label] if label < len(self.class_names) else str(label)


def find_runs(folder: str | Path) -> list[Path]:
    """The finished runs under ``folder``: itself, or those nested in it, in natural order (seed-2 before seed-10).

    Raises:
        ValueError: when there is no such folder or no finished run in it.
    """
    folder = files.folder_of_run(Path(folder))
    found = []
    for parent, children, names in os.walk(folder):
        if {"config.json", "summary.json"} <= set(names):
            found.append(Path(parent))
            children.clear()
        children[:] = [name for name in children if not name.startswith(".")]
    if not found:
        raise ValueError(f"{folder} holds no finished run; give the run's folder, or repeat its command to resume it.")
    return sorted(found, key=lambda path: [(t.isdigit() and len(t), t) for t in re.split(r"(\d+)", str(path))])


def read_run(folder: str | Path) -> RunRecord:
    """Read one finished run.

    Raises:
        ValueError: when ``config.json`` or ``summary.json`` is missing, or any file of the folder is damaged.
    """
    folder = Path(folder)
    config = _parse(folder / "config.json", _Config)
    summary = _parse(folder / "summary.json", _Summary)
    partition = _parse(folder / "partition.json", _Partition) if (folder / "partition.json").exists() else None
    counts = None
    if partition is not None:
        file, shape = folder / "partition.json", (len(partition.counts), len(partition.class_names))
        _require(shape[0] == summary.clients, file, f"counts of {shape[0]} clients where the run has {summary.clients}")
        counts = _matrix(partition.counts, shape, file)
    confusion = None
    if (file := folder / "evaluation.json").exists():
        rows = _parse(file, _Evaluation).confusion
        size = len(partition.class_names) if partition is not None else len(rows)
        confusion = _matrix(rows, (size, size), file)
    return RunRecord(
        folder=folder,
        label=summary.label,
        config=config.model_dump(),
        summary=summary.model_dump(),
        metrics=_read_metrics(folder / "metrics.jsonl"),
        class_names=partition.class_names if partition is not None else (),
        counts=counts,
        confusion=confusion,
        images={file.stem: _read_images(file) for file in sorted(folder.glob("images/*.npz"))},
    )


def _damaged(file: Path, problem: str) -> ValueError:
    return ValueError(f"{file} is damaged ({problem}); delete its folder and repeat the run, or leave it out.")


def _require(condition: bool, file: Path, problem: str) -> None:
    if not condition:
        raise _damaged(file, problem)


def _parse(file: Path, kind: type[_AnyPart]) -> _AnyPart:
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing, so the run has not finished; repeat its command to resume it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from None
    return _check(content, kind, file)


def _check(content: Any, kind: type[_AnyPart], file: Path) -> _AnyPart:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise _damaged(file, f"{where}: {first['msg'].lower()}") from None


def _matrix(rows: tuple[tuple[int, ...], ...], shape: tuple[int, int], file: Path) -> NDArray[np.int64]:
    fits = len(rows) == shape[0] and all(len(row) == shape[1] for row in rows)
    _require(fits, file, f"its numbers do not form a {shape[0]} x {shape[1]} table")
    return np.array(rows, dtype=np.int64).reshape(shape)


def _read_metrics(file: Path) -> tuple[dict[str, Any], ...]:
    rounds: dict[int, dict[str, Any]] = {}
    for values in files.read_json_lines(file):
        metric = _check(values, _Metric, file).model_dump(exclude_unset=True)
        rounds[metric["round"]] = rounds.get(metric["round"], {}) | metric  # a round may log more than once
    rounds = {number: _Metric(round=number).model_dump() | metric for number, metric in rounds.items()}
    return tuple(rounds[number] for number in sorted(rounds))


def _read_images(file: Path) -> Images:
    try:
        # allow_pickle: a pickle in a copied folder would run its author's code.
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(file, str(error)) from None
    _require(images.dtype == np.uint8 and images.ndim == 4, file, "images must be uint8 of shape (n, c, h, w)")
    _require(images.shape[1] in (1, 3) and min(images.shape[2:]) > 0, file, "images must have 1 or 3 channels")
    _require(np.issubdtype(labels.dtype, np.integer), file, "labels must be integers")
    fits = labels.shape == images.shape[:1] and bool(((labels >= 0) & (labels < 2**31)).all())
    _require(fits, file, "every image needs one label from 0 up")
    return images, labels.astype(np.int64)
