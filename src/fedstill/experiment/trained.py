"""The model of a finished run, for use on images."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from fedstill import models
from fedstill.base import seeds
from fedstill.base.errors import front_door
from fedstill.base.files import in_words, path_of
from fedstill.base.records import Normalisation
from fedstill.base.settings import is_truth
from fedstill.base.weights import load, state
from fedstill.data import features, own, vectors
from fedstill.data.decode import plain_types
from fedstill.data.readers import rows_of
from fedstill.data.table_schema import TableSchema
from fedstill.evaluation import in_unit
from fedstill.experiment.job import Job
from fedstill.experiment.reuse import changed_code, read_job
from fedstill.models.backbones import Backbone
from fedstill.protocol import Method
from fedstill.runs.folder import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
_ROUNDING = 1e-3
"""Largest distance from [0, 1] of a pixel that rounding explains, in half precision too."""

_BATCH = 256
"""Records of which predictions are computed at a time."""


class Trained(nn.Module):
    """A run's network with the normalisation of its data; in eval mode, on the CPU.

    Attributes:
        network: the run's final model.
        shape: channels, height and width of an image, or the length of a vector.
        class_names: name of each class; its number if the data set has no names.
        normalisation: mean and standard deviation of each channel, which the forward pass applies.
        features: name and SHA-256 of the backbone (``--features``) that makes vectors of images or texts; or None.
        columns: names of the columns of a table's vectors, in the order that the model takes; empty for others.
        target: range of the number that the model predicts, whose name is the only one of ``class_names``; None for
            classes.
        schema: the schema of the run's table, which makes vectors of raw rows; or None.
        pictures: channels, height and width of the images that ``features`` take; empty for texts, and where the server
            of the run had none.
    """

    def __init__(
        self,
        network: nn.Module,
        shape: tuple[int, ...],
        class_names: tuple[str, ...],
        normalisation: Normalisation,
        features: tuple[str, str] | None = None,
        columns: tuple[str, ...] = (),
        target: tuple[float, float] | None = None,
        schema: TableSchema | None = None,
        pictures: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.network = network
        self.shape = shape
        self.class_names = class_names
        self.normalisation = normalisation
        self.features = features
        self.columns = columns
        self.target = target
        self.schema = schema
        self.pictures = pictures
        self._backbone: Backbone | None = None
        self.eval()

    @front_door
    def forward(
        self, images: UInt8[Tensor, "n c h w"] | Float[Tensor, "n ..."] | Sequence[str]
    ) -> Float[Tensor, "n classes"]:
        """Compute logits; of a number, its value ``(n, 1)``, scaled from its range to [-1, 1].

        Args:
            images: uint8, or floats in [0, 1]; or vectors ``(n, d)``. They are not normalised. With `features`, images
                of the run's size, uint8, or a list of texts.

        Raises:
            InputError: images have another shape or type, or values outside of their range, or the backbone can't be
                loaded or has changed.
        """
        if self.features is not None:
            images = self._vectors(images)
        kind = "vectors" if len(self.shape) == 1 else "images"
        if not isinstance(images, Tensor):
            raise ValueError(f"{kind} are {type(images).__name__}; they must be a tensor or an array of numbers")
        if images.ndim < 2 or tuple(images.shape[1:]) != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"{kind} have shape {tuple(images.shape)}; this model takes (n, {wanted})")
        if kind == "vectors":
            outputs: Tensor = self.network(self.normalisation.apply(images.float()))
            return outputs
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}; they must be uint8, or floats in [0, 1]")
        if images.is_floating_point() and len(images) and not _in_range(images):
            least, most = float(images.min()), float(images.max())
            raise ValueError(f"images have values from {least:g} to {most:g}; floats must be in [0, 1], bytes be uint8")
        pixels = images / 255 if images.dtype == torch.uint8 else images.float()
        logits: Tensor = self.network(self.normalisation.apply(pixels))
        return logits

    @front_door
    def predict_proba(self, records: Any) -> NDArray[np.float32]:
        """Probabilities of the classes (softmax of the logits), ``(n, classes)``, in the order of ``class_names``.

        Args:
            records: what `forward` takes, or an array; or a pandas, polars or Arrow table, whose columns are found by
                the model's `columns`, or turned into them by its `schema`; others are left out.

        Raises:
            InputError: as `forward`; or a column is missing, a value or an output is not finite, or the model predicts
                a number.
        """
        if self.target is not None:
            raise ValueError(f"the model predicts a number, {self.class_names[0]!r}, which has no classes; use predict")
        return self._outputs(records).softmax(1).numpy()

    def _outputs(self, records: Any) -> Float[Tensor, "n classes"]:
        """What `forward` returns of records of any kind, without gradients."""
        if hasattr(records, "collect"):  # a lazy frame of polars
            records = records.collect()
        if hasattr(records, "with_format") and not isinstance(records, Mapping):  # a data set of Hugging Face
            records = rows_of(records, "the data set")
        if hasattr(records, "columns") and (self.schema is not None or self.columns):
            needed = self.columns if self.schema is None else tuple(self.schema.columns)
            records = self._rows(plain_types(own.table(records, "the table", needed)))
        if not isinstance(records, Tensor | list | tuple | str):
            found = own.array_of(records, "the records")
            if found.dtype.kind not in "biufUO" or not found.ndim:
                raise ValueError(f"the records are {in_words(type(records).__name__)}; give numbers, texts or a table")
            kind = np.float64 if found.dtype == np.longdouble else found.dtype.newbyteorder("=")
            made = found.tolist() if found.dtype.kind in "UO" else torch.from_numpy(np.ascontiguousarray(found, kind))
            records = made
        if isinstance(records, Tensor):
            records = records if records.layout == torch.strided else records.to_dense()
            if records.is_complex():
                raise ValueError(f"the records are {records.dtype}; give real numbers")
            finite = (records.float() if records.is_floating_point() else records).isfinite()  # as the model has them
            if not bool(finite.all()):
                row = int((~finite).flatten(1).any(1).nonzero()[0])
                raise ValueError(f"record {row} has a value that is not finite; fill it or drop the record")
            if (
                self.schema is not None
                and len(records)
                and (most := float(records.float().abs().max())) > 1 + _ROUNDING
            ):
                raise ValueError(
                    f"the records have the value {most:g}, but the model's schema scales all to [-1, 1]; give the "
                    "table with its columns, or the vectors that the schema makes of it"
                )
        with torch.no_grad():
            made = torch.cat([self(records[at : at + _BATCH]) for at in range(0, max(len(records), 1), _BATCH)])
        if len(made) and not (known := made.amax(1).isfinite()).all():
            at = int((~known).int().argmax())
            raise ValueError(f"the model's outputs for record {at} are no finite numbers; train it at a lower rate")
        return made

    def _rows(self, table: "pa.Table") -> NDArray[np.float32] | NDArray[np.float64]:
        """The vectors of a table's rows, by the model's schema or the names of its columns."""
        if self.schema is not None:
            rows, remarks = self.schema.vectors(table, "the table")
            for remark in remarks:
                _log.warning(remark)
            return rows
        if lacking := next((name for name in self.columns if name not in table.column_names), None):
            raise ValueError(f"the table lacks the column {lacking!r}; the model takes {', '.join(self.columns)}")
        for name in self.columns:
            if not vectors.is_number(table.schema.field(name).type):
                raise ValueError(f"the column {name!r} has type {table.schema.field(name).type}; give numbers")
        return np.stack([table[name].to_numpy().astype(np.float64) for name in self.columns], 1)

    @front_door
    def predict(self, records: Any) -> NDArray[np.str_] | NDArray[np.float64]:
        """Names of the most probable classes, or the number in its unit, ``(n,)``; arguments as of `predict_proba`."""
        if self.target is not None:
            return in_unit(self._outputs(records)[:, 0].double().numpy(), self.target)
        names: NDArray[np.str_] = np.array(self.class_names)[self.predict_proba(records).argmax(1)]
        return names

    def decided(self, positive: str | int | None, threshold: float | None) -> int:
        """The number of the class of two that ``threshold`` is for, by default the last, as of other models too.

        Args:
            positive: its name, or the number that is its name.
            threshold: the probability from which it is predicted; None where the likelier class is.

        Raises:
            ValueError: one is given and there are not two classes, or none of that name; or no such probability is.
        """
        if self.target is not None and (positive, threshold) != (None, None):
            raise ValueError("positive and threshold are for two classes, but the model predicts a number; drop them")
        names, given = self.class_names, (positive, threshold) != (None, None)
        if len(names) != 2 and given:
            raise ValueError(f"positive and threshold are for two classes, but the model has {len(names)}; drop them")
        if len(names) != 2:
            return len(names) - 1
        if threshold is not None and not 0 <= _number(threshold) <= 1:
            raise ValueError(f"threshold is {in_words(threshold)}; it must be a probability, a number in [0, 1]")
        if positive is not None and str(positive) not in names:
            raise ValueError(f"positive is {positive!r}; it must be one of two classes: {', '.join(names)}")
        return 1 if positive is None else names.index(str(positive))

    @property
    def side(self) -> int | None:
        """Height and width of the images that it takes; None of others, or if the two differ."""
        shape = self.shape if self.features is None else self.pictures
        return shape[-1] if len(shape) == 3 and shape[-1] == shape[-2] else None

    def _vectors(self, records: Tensor | Sequence[str]) -> Float[Tensor, "n d"]:
        if isinstance(records, str):
            raise ValueError("a text alone is no list of texts; put it into one: [text]")
        shape = tuple(records.shape[1:]) if isinstance(records, Tensor) and records.ndim == 4 else ()
        if shape and self.pictures and shape != self.pictures:
            wanted = ", ".join(map(str, self.pictures))
            given = ", ".join(map(str, shape))
            raise ValueError(f"images have shape (n, {given}); this model takes (n, {wanted}), as those of its run")
        backbone = self.backbone(self.pictures or shape)
        if isinstance(records, Tensor):
            if backbone.takes == "images" and (records.dtype != torch.uint8 or records.ndim != 4):
                raise ValueError(
                    f"images are {records.dtype} of shape {tuple(records.shape)}; a backbone takes uint8 (n, c, h, w)"
                )
        elif (wrong := next((i for i, text in enumerate(records) if not isinstance(text, str)), None)) is not None:
            raise ValueError(f"record {wrong} is {type(records[wrong]).__name__}, and a text is a str")
        if not len(records):
            return torch.zeros(0, *self.shape)
        return torch.from_numpy(features.rows_of(backbone, records))

    @front_door
    def backbone(self, shape: tuple[int, ...]) -> Backbone:
        """The backbone of a run on `features`; it is loaded once.

        Args:
            shape: channels, height and width of an image; empty for texts.

        Raises:
            InputError: it can't be loaded or has changed.
        """
        if self._backbone is None:
            assert self.features is not None, "not a run on features"
            name, expected = self.features
            found = features.load_backbone(name, shape)
            features.check_digest(found, expected)
            self._backbone = found
        return self._backbone


def _in_range(images: Tensor) -> bool:
    """Whether all values are in [0, 1], up to rounding."""
    return bool(images.min() >= -_ROUNDING) and bool(images.max() <= 1 + _ROUNDING)


@front_door
def load_model(folder: str | os.PathLike[str]) -> Trained:
    """The final model of a finished run.

    Code of the user's own that has changed since the run is named in a warning.

    Args:
        folder: the run's folder, or its record. If its ``config.json`` names a method or model of another package
            (``package.module:name``), that code is imported and called, so check a folder that you did not write.

    Raises:
        InputError: there is no finished run, its file is damaged or of an early version, or each client has its own
            model.
    """
    folder = path_of(folder, "the run")
    job = read_job(folder, folder, "")
    if changed := changed_code(folder, job):
        _log.warning("the code of %s has changed since %s; the model may compute otherwise", changed, folder)
    return model_of(job)


def _number(value: object) -> float:
    """A number of any kind, that of an array of one too; not a number for what is none."""
    if isinstance(value, str | bytes) or is_truth(value):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def model_of(job: Job) -> Trained:
    """The final model of a finished run, whose job is `fedstill.experiment.reuse.read_job` of its own folder.

    Raises:
        ValueError: as `load_model`.
    """
    return RunFolder(job.out).read_model(partial(_restored, job.out, job.name, job.method))


def _restored(folder: Path, name: str, method: Method, weights: dict[str, Tensor], header: dict[str, Any]) -> Trained:
    shape, class_names = tuple(map(int, header["shape"])), tuple(map(str, header["class_names"]))
    with seeds.isolated(0):
        network = models.build(header["model"], shape, len(class_names))
    if own := method.own(network):
        raise ValueError(f"{name} gives every client its own model ({sorted(own)[0]}, ...); there is no model for all")
    if method.rebuilds:
        network = method.rebuild(network, weights)
    else:
        load(network, weights)
    if {key: value.shape for key, value in state(network).items()} != {key: w.shape for key, w in weights.items()}:
        raise KeyError(f"its tensors are not those of {header['model']}")
    backbone = (str(header["features"]), str(header["backbone"])) if "features" in header else None
    normalisation = Normalisation(tuple(header["mean"]), tuple(header["std"]))
    target = tuple(map(float, header["target"])) if "target" in header else None
    assert target is None or len(target) == 2, "a range has two ends"
    columns = tuple(map(str, header.get("columns", ())))
    kept = RunFolder(folder).read_config().table_schema
    schema = None if kept is None or backbone is not None else TableSchema.kept(kept, str(folder))
    pictures = tuple(map(int, header.get("pictures", ())))
    return Trained(network, shape, class_names, normalisation, backbone, columns, target, schema, pictures)
