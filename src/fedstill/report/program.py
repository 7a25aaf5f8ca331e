"""A run's model as a program: for plain PyTorch by `torch.export`, and for ONNX Runtime."""

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fedstill import extras, files
from fedstill.data import backbones
from fedstill.data.features import OF_SHAPE
from fedstill.experiment.trained import Trained
from fedstill.models.preprocessing import Preprocessing

TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest, between the run's model and a program."""
_COUNTS = (1, 4, 40)
"""Records of the batches on which they are compared; networks that take images in parts have at most 32 in one."""
Compute = Callable[[Tensor], Tensor]


class _Plain(nn.Module):
    """The normalisation and the network, without the checks of values, which `torch.export` cannot write."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.network, self._normalisation = model.network, model.normalisation
        self.eval()

    def forward(self, images: Float[Tensor, "n ..."]) -> Float[Tensor, "n classes"]:
        logits: Tensor = self.network(self._normalisation.apply(images))
        return logits


class _OnFeatures(_Plain):
    """The same behind the backbone, which takes images of 8 bits."""

    def __init__(self, model: Trained, shape: tuple[int, ...]) -> None:
        super().__init__(model)
        assert model.features is not None
        name = model.features[0]
        try:
            backbone = model.backbone(shape)
        except ValueError as error:
            if name.startswith(OF_SHAPE) and backbones.load(name, shape).digest != model.features[1]:
                raise ValueError(
                    f"{name!r} is made for one shape of images; leave --shape out, or give that of the run's images"
                ) from error
            raise
        if not isinstance(backbone.image_input, Preprocessing):
            raise ValueError(f"the backbone {backbone.name!r} takes texts; a tokenizer is no program")
        self.backbone, self._rows, self._prepare = backbone.net, backbone.rows, backbone.image_input

    def forward(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        pixels = (images * 255).round().to(torch.uint8)
        return super().forward(self._rows(self.backbone, self._prepare.batch(pixels)))

    def refuse_to_resize(self, shape: tuple[int, ...]) -> None:
        """Refuse images that the backbone resizes: ONNX rounds them otherwise."""
        if (side := self._prepare.resized(*shape[1:])) != shape[1:]:
            raise ValueError(
                f"images of {shape[1]} x {shape[2]} pixels are resized to {side[0]} x {side[1]}, which ONNX rounds in "
                f"another way; publish a program for resized ones: --shape {shape[0]} {side[0]} {side[1]}"
            )


def write(model: Trained, shape: tuple[int, ...], path: Path, onnx: Path | None = None) -> None:
    """Write the model as a program for batches of any size, and compare what it computes with the model.

    Args:
        model: the model of a run.
        shape: shape of a record: of an image, also if the model works on features, or of a vector.
        path: file of the program of `torch.export`.
        onnx: file of the program for ONNX Runtime (``fedstill[onnx]``); None for none.

    Raises:
        ValueError: torch or ONNX cannot write the model, a package is missing, or the program computes other logits.
    """
    plain = _Plain(model) if model.features is None else _OnFeatures(model, shape)
    if onnx is not None and isinstance(plain, _OnFeatures):
        plain.refuse_to_resize(shape)
    example = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    kind = type(model.network).__name__
    try:
        program = torch.export.export(plain, (example,), dynamic_shapes=({0: Dim("n", min=1)},))
        content = io.BytesIO()  # torch ends the process if a file cannot be written to its end
        torch.export.save(program, content)
    except Exception as error:  # torch has no common class for what it cannot trace
        raise ValueError(f"torch.export cannot write {kind}: {_first_line(error)}") from error
    files.write_bytes(path, content.getvalue())
    _compare(model, shape, torch.export.load(path).module(), f"the exported {kind}")
    if onnx is not None:
        _compare(model, shape, _write_onnx(program, onnx, kind), f"the ONNX program of {kind}")


def _write_onnx(program: ExportedProgram, path: Path, kind: str) -> Compute:
    """Write the program for ONNX Runtime; returns what this computes."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx says for minutes what it lacks
    except ImportError as error:
        raise ValueError(f"--onnx needs the packages onnxruntime and onnxscript: {extras.install('onnx')}") from error
    log, names = logging.getLogger("torch.onnx"), {"input_names": ["records"], "output_names": ["logits"]}
    before = log.level
    log.setLevel(logging.ERROR)  # it warns of torchvision's absence
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = torch.onnx.export(program, dynamo=True, verbose=False, **names)  # type: ignore[arg-type]
            assert written is not None
            written.save(path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # as above
        raise ValueError(f"ONNX cannot express {kind} ({_first_line(error)}); leave --onnx out") from error
    finally:
        log.setLevel(before)
    return lambda records: torch.from_numpy(session.run(["logits"], {"records": records.numpy()})[0])


def _compare(model: Trained, shape: tuple[int, ...], program: Compute, name: str) -> None:
    for count in _COUNTS:
        pixels = torch.randint(256, (count, *shape), generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected = model(pixels.byte() if len(shape) == 3 else pixels / 255)
            found = program(pixels / 255)
        if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
            raise ValueError(f"{name} computes other logits than the run's model")


def _first_line(error: Exception) -> str:
    """The first line of the error that began it, without colours."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
