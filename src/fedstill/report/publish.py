"""``fedstill publish``: a run's model as files that need no fedstill, with a model card."""

import io
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import fedstill
from fedstill import methods
from fedstill.base import errors, files
from fedstill.base.errors import first_line
from fedstill.base.weights import state
from fedstill.data import features, sources
from fedstill.data.features import OF_SHAPE
from fedstill.data.places import Reading
from fedstill.experiment.reuse import check_code, read_job
from fedstill.experiment.trained import Trained, model_of
from fedstill.models.backbones import Preprocessing
from fedstill.report import caveats, guarantees, regression
from fedstill.report.groups import setting_words
from fedstill.report.record import RunRecord, accuracy_words, human_bytes, read_run
from fedstill.report.tables import balanced_accuracy
from fedstill.schema import clean

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
            if name.startswith(OF_SHAPE) and features.load_backbone(name, shape).digest != model.features[1]:
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
        raise ValueError(f"torch.export cannot write {kind}: {first_line(_begun_by(error))}") from error
    files.write_bytes(path, content.getvalue())
    content.seek(0)  # torch opens no path whose letters the locale lacks
    _compare(model, shape, torch.export.load(content).module(), f"the exported {kind}")
    if onnx is not None:
        _compare(model, shape, _write_onnx(program, onnx, kind), f"the ONNX program of {kind}")


def _write_onnx(program: ExportedProgram, path: Path, kind: str) -> Compute:
    """Write the program for ONNX Runtime; returns what this computes."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx says for minutes what it lacks
    except ImportError as error:
        raise ValueError(f"--onnx needs the packages onnxruntime and onnxscript: {errors.install('onnx')}") from error
    log, names = logging.getLogger("torch.onnx"), {"input_names": ["records"], "output_names": ["logits"]}
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
    return lambda records: torch.from_numpy(session.run(["logits"], {"records": records.numpy()})[0])


def _compare(model: Trained, shape: tuple[int, ...], program: Compute, name: str) -> None:
    for count in _COUNTS:
        pixels = torch.randint(256, (count, *shape), generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected = model(pixels.byte() if len(shape) == 3 else pixels / 255)
            found = program(pixels / 255)
        if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
            raise ValueError(f"{name} computes other logits than the run's model")


def _begun_by(error: BaseException) -> BaseException:
    """The error that began the chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


_RESIZED = {
    "rotation": "as the EXIF tag says",
    "transparency": "over white",
    "crop": "largest centred square",
    "resize": "bilinear, antialiased (Pillow)",
    "scale": "pixels / 255, to [0, 1]; gray of 16 bits / 65535",
}
"""The work of `fedstill.data.pictures.fitted` on a picture, in its order, and the scale of the program's input."""
_LONGEST = 1000
"""Largest length of a text on the card."""
PROGRAM, ONNX, WEIGHTS, CARD, FACTS = "model.pt2", "model.onnx", "model.safetensors", "README.md", "config.json"


def publish(
    run: Path,
    out: Path,
    *,
    shape: tuple[int, ...] = (),
    onnx: bool = False,
    attacks: Sequence[str] = (),
    gate: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the model of the finished run ``run`` to the new folder ``out``.

    ``model.pt2`` is a program of `torch.export`: it takes images ``(n, c, h, w)``, floats in [0, 1], or vectors
    ``(n, d)``, and returns logits ``(n, classes)``; that of a run on features begins with the backbone.
    ``model.safetensors`` has the network's weights, ``config.json`` shape, classes and normalisation, ``README.md``
    what the model is and what its guarantee rests on.

    Args:
        run: folder of the run.
        out: folder of the files.
        shape: for a run on features of images, channels, height and width of the images that the program takes; by
            default those of the run's data, which are read for that.
        onnx: whether to write ``model.onnx`` too, for ONNX Runtime.
        attacks: what attacks on the run have found, in words (`fedstill.attacks.results.stored`).
        gate: what a policy asked and what was found (`fedstill.attacks.release_policy.pass_gate`).

    Returns:
        The folder, the files and the number of parameters.

    Raises:
        ValueError: there is no finished run or no model for all, ``out`` has files, ``shape`` does not fit, code of the
            user's own has changed since, or torch or ONNX cannot write the model; one sentence. No file is left then.
    """
    record, job = read_run(run), read_job(run, run, "")
    check_code(run, job)
    model = model_of(job)
    taken = _shape(record, model, shape)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists; choose an empty folder")
    part = out / f".{os.getpid()}{files.PART}"
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    part.mkdir(parents=True)
    try:
        write(model, taken, part / PROGRAM, part / ONNX if onnx else None)
        weights = {name: tensor.contiguous() for name, tensor in state(model.network).items()}
        files.write_bytes(part / WEIGHTS, save(weights))
        facts = _facts(record, model, taken)
        files.write_bytes(part / FACTS, (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode())
        files.write_bytes(part / CARD, _card(record, facts, onnx=onnx, attacks=attacks, gate=gate).encode())
        for path in part.iterdir():
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for folder in missing:
            with suppress(OSError):  # it has the model
                folder.rmdir()
    return {"folder": str(out), "files": sorted(path.name for path in out.iterdir()), **facts}


def _shape(record: RunRecord, model: Trained, given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the records that the program takes."""
    if model.features is None:
        if given not in ((), model.shape):
            raise ValueError(f"--shape is {given}, but the model takes {model.shape}; leave it out")
        return model.shape
    if given:
        if len(given) != 3 or min(given) < 1:
            raise ValueError(f"--shape is {given}; give channels, height and width of an image: --shape 3 224 224")
        return given
    experiment = record.config["experiment"]
    try:
        return sources.load_raw(
            experiment["data"], Reading(experiment.get("size"), experiment.get("label_column"))
        ).shape
    except ValueError as error:
        raise ValueError(
            f"the shape of the images is that of {experiment['data']!r}, which can't be read here ({error}); give it: "
            "--shape 3 224 224"
        ) from error


def upload(folder: Path, name: str) -> str:
    """Upload a published folder to the Hugging Face hub as the model ``owner/name``; returns its address.

    Raises:
        ValueError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        api = HfApi(library_name="fedstill", library_version=fedstill.__version__)
        api.create_repo(name, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="Publish a model of fedstill"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        why = first_line(error)
        raise ValueError(
            f"{folder} is complete, but {name} was not uploaded ({why}); log in with 'hf auth login'"
        ) from error


def _facts(record: RunRecord, model: Trained, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a program needs to use the model; mean and standard deviation are of its input, or of the features."""
    behind = {} if model.features is None else dict(zip(("backbone", "backbone_sha256"), model.features, strict=True))
    size = record.config["experiment"].get("size")
    resized = {} if size is None else {"preprocessing": {"size": size, **_RESIZED}}
    return {
        "model": record.config["experiment"]["model"],
        **behind,
        "num_parameters": sum(weight.numel() for weight in model.network.parameters()),
        "shape": list(shape),
        **({"columns": list(model.columns)} if model.columns else {}),
        **_said(model),
        "mean": list(model.normalisation.mean),
        "std": list(model.normalisation.std),
        **resized,
        "version": fedstill.__version__,
    }


def _said(model: Trained) -> dict[str, Any]:
    """What the program's outputs are: logits of classes, or a number that its range has scaled to [-1, 1]."""
    if model.target is None:
        return {"class_names": list(model.class_names)}
    return {"target": model.class_names[0], "target_range": list(model.target)}


def _card(
    record: RunRecord,
    facts: dict[str, Any],
    *,
    onnx: bool = False,
    attacks: Sequence[str] = (),
    gate: Sequence[str] = (),
) -> str:
    """The model card, with the header that the hub reads."""
    summary = record.summary
    shape = ", ".join(map(str, facts["shape"]))
    kind, tag, values = (
        ("vectors", "tabular", "floats, not normalised")
        if len(facts["shape"]) == 1
        else ("images", "image", "floats in [0, 1], not normalised")
    )
    tuned = ", after each client's own training, which is not in this model"
    tuned = tuned if methods.find(str(record.config["method"]["name"])).personal else ""
    mean = balanced_accuracy(record)
    balanced = (
        "" if mean is None else f"| balanced accuracy, mean recall of the classes | {accuracy_words(mean, None)} % |\n"
    )
    scored = f"| accuracy on {_plain(summary['judged_on'])}{tuned} | {accuracy_words(summary['accuracy'], None)} % |\n"
    task, what, behind = "classification", "classifier of", ""
    if "target" in facts:
        task, what, (low, high) = "regression", f"regression of {_plain(facts['target'])} on", facts["target_range"]
        scored, balanced = "".join(_errors(record)), ""
        outputs = (
            f"The output (n, 1) is scaled: {_plain(facts['target'])} = {low:g} + (output + 1) * {(high - low) / 2:g}."
        )
    else:
        outputs = f"Classes, in the order of the logits: {', '.join(map(_plain, facts['class_names']))}."
    if "backbone" in facts:
        behind = (
            f"\nIt works on the features of the public network {_plain(facts['backbone'])} (SHA-256 "
            f"{facts['backbone_sha256'][:16]}...), which no\nclient trained. `{PROGRAM}` contains that network, under "
            "its own licence.\n"
        )
    hidden = "".join(f"* {_plain(text[0].upper() + text[1:])}.\n" for text in caveats.of_run(record))
    hidden = f"\nWhat the measures hide:\n\n{hidden}" if hidden else ""
    tried = [f"* {_plain(text)}" for text in attacks]
    tried = tried or ["* No attack on this run is stored (`fedstill attack`), which says nothing of its success."]
    return f"""---
library_name: pytorch
pipeline_tag: {tag}-{task}
tags: [federated-learning, fedstill]
---

# {_plain(record.label)} on {_plain(summary["data"])}

A {what} {kind} ({_plain(facts["model"])}, {facts["num_parameters"]:,} parameters) that
{_clients(summary)} trained with fedstill's method {_plain(summary["method"])}.
{behind}
| | |
|---|---|
{scored}{balanced}| task | {_plain(setting_words(record))} |
| upload of a client, mean of all | {human_bytes(summary["bytes_up_per_client"])} |
| download of a client, mean of all | {human_bytes(summary["bytes_down_per_client"])} |
| rounds | {summary["rounds"]} |
| seed | {summary["seed"]} |
{hidden}
## Use

```python
import torch

model = torch.export.load("{PROGRAM}").module()
logits = model(torch.rand(1, {shape}))  # {kind} (n, {shape}), {values}
```

{_pictures(facts)}{_onnx(facts["shape"]) if onnx else ""}{outputs}
`{WEIGHTS}` has the network's weights alone.

## Privacy

{chr(10).join(_privacy(record))}

## Attacks

{chr(10).join(tried)}

{_asked(gate)}{_reproduce(record)}fedstill {_plain(str(summary["version"]))}, {_plain(str(summary["finished"]))}.
"""


def _errors(record: RunRecord) -> Iterator[str]:
    """The lines of the card's table on a predicted number."""
    for name, words in regression.measures((record.numbers or {})["all"]).items():
        yield f"| {name} on {_plain(record.summary['judged_on'])}, with its 95 % interval | {words} |\n"


def _privacy(record: RunRecord) -> list[str]:
    """The lines of the card on the run's guarantee."""
    promised = record.guarantee
    holds = guarantees.is_finite(promised)
    lines = [f"* {guarantees.words(promised) if holds else 'No guarantee.'}"]
    lines += [
        f"* {_plain(sentence, 4 * _LONGEST)}"
        for sentence in guarantees.explained(promised, sent=record.summary["bytes_up"] > 0)
    ]
    if holds:
        lines += [f"* Neighbours: {_plain(promised.adjacency)}.", f"* Composed by: {_plain(promised.accountant)}."]
    if guarantees.is_simulated(promised):
        lines.append("* **The noise came from the run's seed, so whoever knows the seed can remove it.**")
    return lines


def _asked(gate: Sequence[str]) -> str:
    """The section on the policy that let the model out, if one did."""
    lines = "".join(f"* {_plain(text, 4 * _LONGEST)}\n" for text in gate)
    opening = "The model was published under a policy (`fedstill publish --gate`):"
    return f"## Policy\n\n{opening}\n\n{lines}\n" if gate else ""


def _clients(summary: Mapping[str, Any]) -> str:
    """How many clients have a part in the model."""
    without = len({refusal["client"] for refusal in summary["refused"]})
    return f"{summary['clients']} clients" + (f" ({without} of them without all of their replies)" if without else "")


def _pictures(facts: Mapping[str, Any]) -> str:
    """The way from a picture, or the row of a table, to the program's input."""
    if "columns" in facts:
        return (
            f"The numbers of a vector are these columns, in this order: {', '.join(map(_plain, facts['columns']))}.\n\n"
        )
    if len(facts["shape"]) == 1:
        return ""
    if "preprocessing" not in facts:
        return "Pictures were turned as their EXIF tag says (Pillow's ImageOps.exif_transpose), in their own size.\n\n"
    channels, size = facts["shape"][0], facts["preprocessing"]["size"]
    mode = "L" if channels == 1 else "RGB"
    return f"""Pictures were turned as their EXIF tag says, laid over white where transparent, cut to the largest
centred square, resized to {size} x {size} (bilinear, antialiased) and scaled to [0, 1]. With 8 bits:

```python
import numpy as np
import torch
from PIL import Image, ImageOps

picture = ImageOps.exif_transpose(Image.open("picture.jpg")).convert("RGBA")
opaque = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("{mode}")
square = ImageOps.fit(opaque, ({size}, {size}), method=Image.Resampling.BILINEAR)
images = torch.from_numpy(np.array(square)).reshape(1, {size}, {size}, {channels}).permute(0, 3, 1, 2) / 255
```

"""


def _onnx(shape: list[int]) -> str:
    return f"""With ONNX Runtime:

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{ONNX}")
logits = session.run(["logits"], {{"records": np.random.rand(1, {", ".join(map(str, shape))}).astype(np.float32)}})[0]
```

"""


def _reproduce(record: RunRecord) -> str:
    """The command on a line of code: a fence that no backticks within it end."""
    if not (command := clean(" ".join(str(record.config.get("command") or "").split()), 4 * _LONGEST)):
        return ""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"## Reproduce\n\n{fence}\n{command}\n{fence}\n\n"


def _plain(text: object, longest: int = _LONGEST) -> str:
    """Text on one line without control characters and Markdown's and HTML's special ones."""
    line = clean(" ".join(str(text).split()), longest)
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in line)
