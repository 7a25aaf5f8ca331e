"""Attacks on gradients and weights that other programs saved: which classes, and which images, they give away.

Files may come from plain PyTorch (state dicts or lists of gradients), Flower (``numpy.savez`` of a model's arrays in
order) or NVFlare (a checkpoint with the state dict under "model"). Nothing in a file is run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from pydantic import PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from torch import Tensor, nn

from fedstill import models
from fedstill.attacks import labels
from fedstill.attacks.inversion import GradientInversion
from fedstill.base import files, weights
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.base.settings import Settings

_MOST = 64
"""Maximum number of records whose images are reconstructed."""
_WRAPPED = ("module.", "_module.", "_orig_mod.")
"""Prefixes of names in models that DistributedDataParallel, Opacus or torch.compile wrapped."""
_SUFFIXES = {".pt", ".pth", ".bin", ".npz", ".safetensors"}


class SavedUpdates(Settings):
    """Infer classes and images from gradients or weights that another program saved, one file for each update."""

    model: str = ""
    """The model: a name with options, package.module:function or file.py:function."""
    shape: tuple[int, int, int] | None = None
    """Channels, height and width of an image."""
    num_classes: PositiveInt = 10
    """Number of classes."""
    kind: Literal["gradients", "weights", "changes"] | None = None
    """Content of the files: gradients, weights after training, or their changes (weights after minus before)."""
    start: Path | None = None
    """File of the weights before the update, which reconstruction and ``--kind weights`` need."""
    records: PositiveInt | None = None
    """Number of records of an update; without it only shares of the classes are inferred."""
    images: bool = True
    """Whether to reconstruct the images, if ``records`` is given; 64 at most."""
    least_share: Annotated[float, Ge(0), Le(1)] = 0.01
    """Smallest estimated share of a class that the client is said to have."""
    mean: tuple[float, ...] = (0.5,)
    """Mean of the normalisation of pixels in [0, 1], of each channel or of all."""
    std: tuple[PositiveFloat, ...] = (0.25,)
    """Standard deviation of the normalisation, likewise."""
    training: bool = True
    """Whether the model was in train mode; matters for batch normalisation and dropout."""
    inversion: GradientInversion = GradientInversion(steps=1000)
    """Reconstruction of images."""
    seed: int = 0
    """Seed of the first images."""
    out: Path | None = None
    """Folder for updates.json and the images; by default ``attack`` in the folder of the files."""

    def attack(self, folder: Path, console: Console) -> tuple[dict[str, Any], Iterable[RenderableType]]:
        """Attack each file in ``folder``.

        Returns:
            The results as JSON, with a dictionary of each file, and what a terminal shows of them.

        Raises:
            ValueError: a setting is missing, or a file does not fit the model; one sentence.
        """
        attacked = _Attack(self)
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is {'a file' if folder.exists() else 'missing'}; give the folder of the updates"
            )
        places = sorted(p for p in folder.iterdir() if p.suffix in _SUFFIXES)
        if not places:
            raise ValueError(f"{folder} has no files of updates; they end in {', '.join(sorted(_SUFFIXES))}")
        out = self.out or folder / "attack"
        results = []
        with console.status("attacking updates") as status:
            for place in places:
                status.update(f"attacking {place.name}")
                results.append({"file": place.name, **attacked.result(place, out)})
        place, found = out / "updates.json", {"updates": results}
        files.write_json(place, found)
        return {**found, "numbers": str(place)}, [*_shown(results), f"numbers: {place}"]


class _Attack:
    """The model that made the updates, and the attacks on them."""

    def __init__(self, settings: SavedUpdates) -> None:
        self._settings = s = settings
        if not s.model or s.shape is None or s.kind is None:
            missing = [f for f, v in (("--model", s.model), ("--shape", s.shape), ("--kind", s.kind)) if not v]
            raise ValueError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; for example --model "
                "convnet:width=16 --shape 1 28 28 --kind gradients"
            )
        if any(len(values) not in (1, s.shape[0]) for values in (s.mean, s.std)):
            raise ValueError(f"--mean and --std need 1 or {s.shape[0]} values, one for each channel")
        if s.kind == "weights" and s.start is None:
            raise ValueError("--start is missing: without the weights before, those after tell no change")
        with isolated(0):
            self._model = models.build(s.model, s.shape, s.num_classes).train(s.training)
        if s.start is not None:
            self._model.load_state_dict(named(s.start, self._model, whole=True))
        self._before = {name: value.clone() for name, value in weights.state(self._model).items()}
        mean, std = (v * s.shape[0] if len(v) == 1 else v for v in (s.mean, s.std))
        nothing = torch.zeros(0, *s.shape, dtype=torch.uint8)
        self._like = Records(nothing, torch.zeros(0, dtype=torch.int64), s.num_classes, Normalisation(mean, std))

    def result(self, place: Path, out: Path) -> dict[str, Any]:
        """The classes and, as a file, the images of one update."""
        s, gradient = self._settings, self._gradient(place)
        try:
            layer = labels.last_layer(gradient, s.num_classes)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        shares = labels.shares_of_update(layer.drift)
        found: dict[str, Any] = {
            "shares": shares.tolist(),
            "classes": (shares >= s.least_share).nonzero()[:, 0].tolist(),
        }
        if s.records is None:
            return found
        one = s.records == 1 and not (layer.bias is None and s.num_classes < 3)
        counts = labels.counts_of(shares, s.records)
        each = [labels.single_label(layer)] if one else torch.arange(s.num_classes).repeat_interleave(counts).tolist()
        found |= {"labels": each, "classes": sorted(set(each))}
        if s.images and s.start is not None and s.records <= _MOST:
            rng = stream(s.seed, "attack", place.name)
            inverted = s.inversion.invert(
                self._model, gradient, s.records, self._like, rng, labels=torch.tensor(each, dtype=torch.int64)
            )
            found |= {"distance": inverted.distance, "images": f"{place.stem}.png"}
            _write_png(out / found["images"], inverted.images)
        return found

    def _gradient(self, place: Path) -> dict[str, Tensor]:
        """The direction of the gradient, by parameter name."""
        s = self._settings
        given = named(place, self._model, whole=s.kind == "weights")
        if s.kind == "weights":
            return labels.descent(self._before, given)
        return {name: -value.double() if s.kind == "changes" else value.double() for name, value in given.items()}


def named(place: Path, model: nn.Module, *, whole: bool) -> dict[str, Tensor]:
    """The tensors of a file by the model's names, in the model's order.

    Args:
        place: the file, see `fedstill.base.weights.read`.
        model: the model.
        whole: whether it must have the whole state; otherwise it may lack all but the trainable parameters.

    Raises:
        ValueError: the file can't be read, or does not fit the model; one sentence.
    """
    try:
        read = weights.read(place)
    except OSError as error:
        raise ValueError(f"{place} can't be read ({error.strerror or error}); check the path") from error
    except ValueError as error:
        raise ValueError(f"{place} holds no update ({error}); it must be safetensors, torch's or .npz") from error
    state = weights.state(model)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    orders = [list(state)] if whole else [trainable, list(state)]
    found = read if isinstance(read, dict) else _in_order(place, read, orders)
    for prefix in _WRAPPED:
        if all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    if missing := [name for name in (state if whole else trainable) if name not in found]:
        raise ValueError(f"{place} lacks {len(missing)} tensors of the model, such as '{missing[0]}'; check --model")
    wrong = [name for name, value in found.items() if name in state and value.shape != state[name].shape]
    if wrong:
        raise ValueError(
            f"{place} has '{wrong[0]}' of shape {tuple(found[wrong[0]].shape)}, the model of "
            f"{tuple(state[wrong[0]].shape)}; check --model, --shape and --num-classes"
        )
    if bad := [name for name in trainable if not torch.isfinite(found[name]).all()]:
        raise ValueError(f"{place} has values in '{bad[0]}' that are not finite")
    return {name: found[name].to(state[name].dtype) for name in state if name in found}


def _in_order(place: Path, values: Sequence[Tensor], orders: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    for names in orders:
        if len(names) == len(values):
            return dict(zip(names, values, strict=True))
    counts = " or ".join(str(len(names)) for names in orders)
    raise ValueError(f"{place} has {len(values)} tensors without names, the model {counts}; check --model")


def _write_png(place: Path, records: Records) -> None:
    from PIL import Image

    strip = torch.cat(list(records.images.cpu()), 2)
    pixels = strip[0] if len(strip) != 3 else strip.permute(1, 2, 0)
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.contiguous().numpy()).save(place)


def _shown(results: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    table = Table("file", "classes", "largest share, %", "gradient's distance", "images", box=SIMPLE_HEAD)
    for result in results:
        distance = f"{result['distance']:.3g}" if "distance" in result else "-"
        classes = " ".join(map(str, result["classes"]))
        share = f"{100 * max(result['shares']):.0f}"
        table.add_row(result["file"], classes, share, distance, result.get("images", "-"))
    yield table
    if any("distance" in result for result in results):
        yield "A distance near 0 means that the images have the update's gradient; 1 means no likeness."
