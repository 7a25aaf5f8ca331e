"""Programs of a run's model for plain PyTorch and ONNX Runtime, which begin with the raw row or picture."""

import copy
import io
import logging
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, UInt8
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from typing_extensions import override

from fedstill.base import errors, files
from fedstill.base.errors import first_line
from fedstill.data import features, pictures
from fedstill.data.features import OF_SHAPE
from fedstill.data.table_schema import Column, TableSchema
from fedstill.evaluation import in_unit
from fedstill.experiment.trained import Trained
from fedstill.models.backbones import Preprocessing
from fedstill.models.scattering import Scattering
from fedstill.report import rows

TOLERANCE = 1e-5
"""Largest difference of an output, relative to the largest, between the run's model and a program."""
_COUNTS = (1, 4, 40)
"""Records of the batches on which they are compared; networks that take images in parts have at most 32 in one."""
_SIDES = ((40, 61), (128, 96), (33, 33))
"""Height and width of the pictures of any size on which they are compared."""
_BITS = 22
"""Bits after the point of the weights with which Pillow resizes pictures of 8 bits."""
_TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node")
"""What torch notes of each step of a program: files of this machine, whose folders may name persons."""
Compute = Callable[[Tensor], Tensor]


class _Vectors(nn.Module):
    """The normalisation and the network, without the checks of values, which `torch.export` cannot write."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.network, self._normalisation, self._target = model.network, model.normalisation, model.target
        self.eval()

    def forward(self, vectors: Float[Tensor, "n ..."]) -> Float[Tensor, "n outputs"]:
        """Logits ``(n, classes)``; or the number in its unit, float64 ``(n, 1)``."""
        outputs: Tensor = self.network(self._normalisation.apply(vectors))
        if self._target is None:
            return outputs
        low, high = self._target
        return low + (outputs.double().clamp(-1, 1) + 1) * ((high - low) / 2)


class _Rows(_Vectors):
    """The same of the raw rows of a table, of which a schema makes vectors as `TableSchema.encode` does.

    A row is float64: numbers as they are, dates as days since 1 January of year 1, which is day 1, booleans 0 and 1,
    categories as their place in the schema's values, and NaN for a gap. The outputs of a row that the schema refuses
    are NaN.
    """

    def __init__(self, model: Trained, schema: TableSchema) -> None:
        super().__init__(model)
        self._columns = tuple(schema.columns.values())

    @override
    def forward(self, table: Float64[Tensor, "n columns"]) -> Float[Tensor, "n outputs"]:
        parts: list[Tensor] = []
        refused = torch.zeros_like(table[:, 0], dtype=torch.bool)
        for i, column in enumerate(self._columns):
            numbers, wrong = _encoded(table[:, i], column)
            parts += numbers
            refused = refused | wrong
        vectors = torch.stack(parts, 1).to(torch.float32)
        outputs = super().forward(torch.where(refused[:, None], 0.0, vectors))
        return torch.where(refused[:, None], float("nan"), outputs)


def _encoded(values: Float64[Tensor, " n"], column: Column) -> tuple[list[Tensor], Bool[Tensor, " n"]]:
    """The numbers of a column's values, and which of them the schema refuses."""
    gaps = torch.isnan(values)
    filled = torch.where(gaps, _stand_in(column), values)
    wrong = gaps & (column.missing is None)
    parts: list[Tensor] = []
    if column.kind in ("number", "date"):
        low, high = column.bounds
        if column.outside == "refuse":
            wrong = wrong | (filled < low) | (filled > high)
        parts.append((filled.clamp(low, high) - low) * (2 / (high - low)) - 1)
    elif column.kind == "boolean":
        wrong = wrong | ((filled != 0) & (filled != 1))
        parts.append(filled)
    else:
        own = [filled == place for place in range(len(column.values))]
        known = torch.stack(own).any(0)
        parts += [some.double() for some in own]
        if column.outside == "other":
            parts.append((~known).double())
        else:
            wrong = wrong | ~known
    return [*parts, *[gaps.double()] * (column.missing is not None)], wrong


def _stand_in(column: Column) -> float:
    """What stands for a gap, as a program takes it."""
    if column.missing is None:
        return 0.0
    if column.kind == "boolean":
        return float(column.is_true)
    if column.kind == "category":
        return float([*column.values, str(column.missing)].index(str(column.missing)))
    return rows.code(column.missing, column.model_dump(mode="json"))


class _Pictures(_Vectors):
    """The same of pictures of 8 bits; of any height and width with a ``size``, that of their largest square."""

    def __init__(self, model: Trained, size: int | None) -> None:
        super().__init__(model)
        self._size = size

    @override
    def forward(self, pixels: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n outputs"]:
        return super().forward(self._squares(pixels).float() / 255)

    def _squares(self, pixels: UInt8[Tensor, "n c h w"]) -> Tensor:
        return pixels if self._size is None else squares(pixels, self._size)


class _OnFeatures(_Pictures):
    """The same behind the backbone."""

    def __init__(self, model: Trained, shape: tuple[int, ...], size: int | None) -> None:
        super().__init__(model, size)
        assert model.features is not None
        name = model.features[0]
        try:
            backbone = model.backbone(shape)
        except ValueError as error:
            if name.startswith(OF_SHAPE) and features.load_backbone(name, shape).digest != model.features[1]:
                raise ValueError(
                    f"{name!r} is made for one shape of images; leave --shape out, or give that of the run's images"
                ) from error
            raise
        if not isinstance(backbone.image_input, Preprocessing):
            raise ValueError(f"the backbone {backbone.name!r} takes texts; a tokenizer is no program")
        self.backbone, self._rows, self._prepare = backbone.net, backbone.rows, backbone.image_input

    @override
    def forward(self, pixels: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n outputs"]:
        vectors = self._rows(self.backbone, self._prepare.batch(self._squares(pixels).to(torch.uint8)))
        return _Vectors.forward(self, vectors)

    def refuse_to_resize(self, shape: tuple[int, ...]) -> None:
        """Refuse images that the backbone resizes: ONNX rounds them otherwise."""
        if (side := self._prepare.resized(*shape[1:])) != shape[1:]:
            raise ValueError(
                f"images of {shape[1]} x {shape[2]} pixels are resized to {side[0]} x {side[1]}, which ONNX rounds in "
                f"another way; publish a program for resized ones: --shape {shape[0]} {side[0]} {side[1]}"
            )


def squares(pixels: UInt8[Tensor, "n c h w"], size: int) -> Float64[Tensor, "n c size size"]:
    """The largest centred squares of pictures, resized to whole numbers as `fedstill.data.pictures.fitted` does.

    Pillow's bilinear filter (``ImagingResample``): each output is a mean over the pixels that it covers, weighted by a
    triangle, with weights of `_BITS` bits; first along the rows, then along the columns, rounded after each. Pillow 13
    takes the columns of high pictures first, which moves some values by one.
    """
    height, width = (torch.ones_like(pixels[0, 0, :, 0]), torch.ones_like(pixels[0, 0, 0]))
    side = torch.minimum(height.double().sum(), width.double().sum())
    across, down = _weights(width, side, size), _weights(height, side, size)
    return _whole(down @ _whole(pixels.double() @ across.T))


def _weights(ones: UInt8[Tensor, " length"], side: Tensor, size: int) -> Float64[Tensor, "size length"]:
    """The weights of a line's pixels, of which there are as many as ``ones``, for each of ``size`` outputs."""
    middles = ones.double().cumsum(0) - 0.5
    scale = side / size
    centres = (ones.double().sum() - side) / 2 + (torch.arange(size, dtype=torch.float64) + 0.5) * scale
    triangle = (1 - (middles[None] - centres[:, None]).abs() / scale.clamp(min=1.0)).clamp(min=0.0)
    weights: Tensor = (triangle / triangle.sum(1, keepdim=True) * 2**_BITS + 0.5).floor() / 2**_BITS
    return weights


def _whole(values: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    levels: Tensor = (values + 0.5).floor().clamp(0.0, 255.0)
    return levels


def write(
    model: Trained,
    shape: tuple[int, ...],
    path: Path,
    onnx: Path | None = None,
    *,
    schema: TableSchema | None = None,
    size: int | None = None,
) -> None:
    """Write the model as a program for batches of any size, and compare what it computes with the model.

    Args:
        model: the model of a run.
        shape: shape of a record: of an image, also if the model works on features, or of a vector.
        path: file of the program of `torch.export`.
        onnx: file of the program for ONNX Runtime (``fedstill[onnx]``); None for none.
        schema: schema of the table whose raw rows the program takes; None for vectors and pictures.
        size: height and width of the squares that the program makes of pictures of any size; None for those of
            ``shape``.

    Raises:
        ValueError: torch or ONNX cannot write the model, a package is missing, or the program computes other outputs.
    """
    program = _program(model, shape, schema, size)
    if onnx is not None and isinstance(program, _OnFeatures):
        program.refuse_to_resize(shape)
    kind = type(model.network).__name__
    example, _ = _examples(model, shape, 4, schema, size)
    dynamic = {0: Dim("n", min=1)}
    if size is not None:
        dynamic |= {2: Dim("height", min=1), 3: Dim("width", min=1)}
    exported = _exported(program, example, dynamic, kind)
    content = io.BytesIO()  # torch ends the process if a file cannot be written to its end
    torch.export.save(exported, content)
    files.write_bytes(path, content.getvalue())
    content.seek(0)  # torch opens no path whose letters the locale lacks
    written: dict[str, Compute] = {f"the exported {kind}": torch.export.load(content).module()}
    if onnx is not None:
        program = copy.deepcopy(program)
        for net in (module for module in program.modules() if isinstance(module, Scattering)):
            net.avoid_complex_numbers()
            exported = _exported(program, example, dynamic, kind)
        written[f"the ONNX program of {kind}"] = _write_onnx(exported, onnx, kind, output_name(model))
    for count in _COUNTS:
        taken, expected = _examples(model, shape, count, schema, size)
        for name, compute in written.items():
            with torch.no_grad():
                found = compute(taken)
            if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
                raise ValueError(f"{name} computes other outputs than the run's model")


def _exported(program: nn.Module, example: Tensor, dynamic: dict[int, Any], kind: str) -> ExportedProgram:
    try:
        exported = torch.export.export(program, (example,), dynamic_shapes=(dynamic,))
    except Exception as error:  # torch has no common class for what it cannot trace
        raise ValueError(f"torch.export cannot write {kind}: {first_line(_begun_by(error))}") from error
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            for key in _TRACES:
                node.meta.pop(key, None)
    return exported


def output_name(model: Trained) -> str:
    """Name of the output of a program for ONNX Runtime."""
    return "logits" if model.target is None else "prediction"


def _program(model: Trained, shape: tuple[int, ...], schema: TableSchema | None, size: int | None) -> nn.Module:
    if model.features is not None:
        return _OnFeatures(model, shape, size)
    if len(shape) == 3:
        return _Pictures(model, size)
    return _Vectors(model) if schema is None else _Rows(model, schema)


def _examples(
    model: Trained, shape: tuple[int, ...], count: int, schema: TableSchema | None, size: int | None
) -> tuple[Tensor, Tensor]:
    """Random records as a program takes them, and the model's outputs."""
    generator = torch.Generator().manual_seed(count)
    if schema is not None:
        table, vectors = _rows_of(schema, count)
        taken, known = torch.from_numpy(table), torch.from_numpy(vectors)
    elif len(shape) == 3:
        sides = shape[1:] if size is None else _SIDES[_COUNTS.index(count)]
        taken = torch.randint(256, (count, shape[0], *sides), generator=generator).byte()
        known = taken if size is None else _checked_squares(taken, size)
    else:
        taken = known = torch.rand(count, *shape, generator=generator)
    with torch.no_grad():
        outputs: Tensor = model(known)
    if model.target is not None:
        outputs = torch.from_numpy(in_unit(outputs.double().numpy(), model.target))
    return taken, outputs


def _checked_squares(taken: UInt8[Tensor, "n c h w"], size: int) -> UInt8[Tensor, "n c size size"]:
    """`squares`, compared with what the run's own reader makes of the first picture.

    Raises:
        ValueError: a value is further from it than one of 255 levels.
    """
    found = squares(taken, size)
    pixels = taken[0].permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    usual = torch.from_numpy(pictures.fitted(image, size, "an example").transpose(2, 0, 1).copy())
    if (found[0] - usual.double()).abs().max() > 1:
        raise ValueError("this version of Pillow resizes pictures in another way than a program; leave --size out")
    return found.to(torch.uint8)


def _rows_of(schema: TableSchema, count: int) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Random rows that the schema takes, gaps among them, as a program takes them and as vectors."""
    import pyarrow as pa

    rng = np.random.default_rng(count)
    table: dict[str, list[str | None]] = {}
    for name, column in schema.columns.items():
        words = _words(column, count, rng)
        gaps = rng.random(count) < (0.0 if column.missing is None else 0.3)
        table[name] = [None if gap else word for gap, word in zip(gaps, words, strict=True)]
    records = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    low = schema.range[0] if schema.range else 0
    others = {schema.target: [schema.classes[0] if schema.classes else str(low)] * count}
    others |= {name: ["1"] * count for name in (schema.group, schema.site) if name is not None}
    encoded, _ = schema.encode(pa.table({**table, **others}), "an example")
    vectors = np.stack([encoded[name].to_numpy() for name in schema.features], 1).astype(np.float32)
    return rows.codes(records, schema.model_dump(mode="json")), vectors


def _words(column: Column, count: int, rng: np.random.Generator) -> list[str]:
    """Random values of a column as texts, beyond its range or categories where the schema has a way for them."""
    if column.kind == "boolean":
        return [str(word) for word in rng.choice(["true", "false"], count)]
    if column.kind == "category":
        return [str(word) for word in rng.choice([*column.values, *["elsewhere"] * (column.outside == "other")], count)]
    low, high = column.bounds
    beyond = (high - low) / 4 if column.outside == "clip" else 0.0
    numbers = rng.uniform(low - beyond, high + beyond, count)
    if column.kind == "number":
        return [repr(float(number)) for number in numbers]
    days = (min(max(1, round(number)), date.max.toordinal()) for number in numbers)
    return [date.fromordinal(day).isoformat() for day in days]


def _write_onnx(program: ExportedProgram, path: Path, kind: str, output: str) -> Compute:
    """Write the program for ONNX Runtime; returns what this computes."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx says for minutes what it lacks
    except ImportError as error:
        raise ValueError(f"--onnx needs the packages onnxruntime and onnxscript: {errors.install('onnx')}") from error
    log, names = logging.getLogger("torch.onnx"), {"input_names": ["records"], "output_names": [output]}
    before = log.level
    log.setLevel(logging.ERROR)  # it warns of torchvision's absence
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = torch.onnx.export(program, dynamo=True, verbose=False, **names)  # type: ignore[arg-type]
            assert written is not None
            written.save(path)
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    except Exception as error:  # as above
        raise ValueError(f"ONNX cannot express {kind} ({first_line(_begun_by(error))}); leave --onnx out") from error
    finally:
        log.setLevel(before)
    return lambda records: torch.from_numpy(session.run([output], {"records": records.numpy()})[0])


def _begun_by(error: BaseException) -> BaseException:
    """The error that began the chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
