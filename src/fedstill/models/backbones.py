"""Public backbones by name: pretrained ones in wheels and of other libraries, scattering, and your own."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from typing_extensions import override

from fedstill.base import errors, files, lookup, seeds
from fedstill.base.files import expanded
from fedstill.base.weights import read, state
from fedstill.models import mobile
from fedstill.models.build import build
from fedstill.models.heads import features

_FORMAT = 1
"""Version of the vectors: increased if the same weights give others than before."""
_BLOCK = 32
"""Texts are padded to multiples of this number of tokens."""

TOKENS = 512
"""Tokens of the largest batch of texts on a CPU. Longer texts go one by one, which is as fast; the test of a larger
batch, one for each length, costs as many tokens as hundreds of texts."""

LIBRARIES = ("hf:", "timm:", "torchvision:")
"""Beginnings of the names of backbones of other libraries, whose networks treat each record by itself."""

Rows = Callable[[nn.Module, Tensor], Float[Tensor, "n d"]]


@dataclass(frozen=True)
class Backbone:
    """A frozen public network that gives a vector for each image or text.

    Attributes:
        name: its name in ``--features``.
        digest: SHA-256 of its weights and of its preparation of images or texts, on which a run agrees.
        net: the network, in eval mode.
        rows: vectors of a batch of inputs: ``rows(net, x)``.
        image_input: an image, uint8 ``(c, h, w)``, as float input ``(1, ...)``; None if the backbone takes texts.
        token_ids: numbers of a text's tokens and of the token that pads; None if the backbone takes images.
        vocabulary: number of tokens, for a backbone of texts.
        batch: largest number of images in a batch on a CPU.
    """

    name: str
    digest: str
    net: nn.Module
    rows: Rows
    image_input: Callable[[UInt8[Tensor, "c h w"]], Float[Tensor, "1 c h w"]] | None = None
    token_ids: Callable[[str], tuple[list[int], int]] | None = None
    vocabulary: int = 0
    batch: int = 64

    @property
    def takes(self) -> str:
        """The kind of records: "images" or "texts"."""
        return "images" if self.token_ids is None else "texts"

    def input_of(self, record: Tensor | str) -> Tensor:
        """An image as float input ``(1, c, h, w)``; a text as numbers of tokens ``(1, L)``, padded with -1.

        L is the text's own multiple of 32 tokens and leaves room for at least one of padding, since attention takes
        other kernels without any.
        """
        if isinstance(record, Tensor):
            assert self.image_input is not None, "a backbone of texts"
            return self.image_input(record)
        assert self.token_ids is not None, "a backbone of images"
        ids, _ = self.token_ids(record)
        return torch.tensor([ids + [-1] * (_BLOCK - len(ids) % _BLOCK)])

    def random_input(self, x: Tensor) -> Tensor:
        """Valid inputs from random floats ``x`` of the shape of inputs, each value by itself."""
        if self.token_ids is None:
            return x
        ids = (x.abs() * self.vocabulary).long() % self.vocabulary
        ids[:, -1] = -1
        return ids


def digest(weights: Mapping[str, Tensor], facts: Mapping[str, object], files: Sequence[Path] = ()) -> str:
    """SHA-256 of weights by name, of facts as JSON and of files."""
    total = hashlib.sha256(json.dumps({"format": _FORMAT, **facts}, sort_keys=True, default=str).encode())
    for name, value in sorted(weights.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for file in files:
        total.update(file.name.encode())
        total.update(file.read_bytes())
    return total.hexdigest()


_MODES = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}
"""Pillow's number of a resampling filter -> torch's name."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_SMALL = 384
"""ConvNeXt's smallest side that is resized without a crop."""


@dataclass(frozen=True)
class Preprocessing:
    """Resizing, a central crop, and normalisation of pixels in [0, 1].

    Attributes:
        shortest: length of the shorter side after resizing; 0 for none.
        size: height and width after resizing, in place of ``shortest``; empty for none.
        crop: height and width of the central crop, padded with black where the image is smaller; empty for none.
        resample: Pillow's number of the filter: 0 nearest, 2 bilinear, 3 bicubic.
        mean: of each channel; one number is for all. Three make gray images colour images.
        std: standard deviation of each channel.
    """

    shortest: int = 0
    size: tuple[int, ...] = ()
    crop: tuple[int, ...] = ()
    resample: int = 2
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def read(cls, folder: Path, side: int) -> Self:
        """The preparation that the files of a model describe; ``side`` pixels a side if there are none.

        Raises:
            ValueError: it takes a filter that torch lacks.
        """
        file = next((folder / name for name in _FILES if (folder / name).exists()), None)
        facts = {} if file is None else json.loads(file.read_text("utf-8"))
        facts = facts.get("image_processor", facts)
        found = cls._resizing(facts, side)
        resample = int(facts.get("resample", 2))
        if resample not in _MODES:
            raise ValueError(f"{str(file)!r} resizes by filter {resample}; only {sorted(_MODES)} are supported")
        mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
        if facts.get("do_normalize", True):
            mean, std = tuple(facts.get("image_mean", mean)), tuple(facts.get("image_std", std))
        else:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return cls(**found, resample=resample, mean=mean, std=std)

    @staticmethod
    def _resizing(facts: Mapping[str, Any], side: int) -> dict[str, Any]:
        size, cropped = facts.get("size", side), facts.get("crop_size", side)
        if facts.get("crop_pct") is not None and isinstance(size, dict) and "shortest_edge" in size:  # ConvNeXt's
            edge = int(size["shortest_edge"])
            if edge >= _SMALL:
                return {"size": (edge, edge)}
            return {"shortest": int(edge / facts["crop_pct"]), "crop": (edge, edge)}
        found: dict[str, Any] = {}
        if facts.get("do_resize", True):
            if isinstance(size, dict) and "shortest_edge" in size:
                found["shortest"] = int(size["shortest_edge"])
            else:
                found["size"] = _pair(size)
        if facts.get("do_center_crop", False):
            found["crop"] = _pair(cropped)
        return found

    def __call__(self, image: UInt8[Tensor, "c h w"]) -> Float[Tensor, "1 c h w"]:
        """The input of one image."""
        return self.batch(image[None])

    def batch(self, x: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """The inputs of images of one size; each of the two passes of resizing rounds to 8 bits, as Pillow's."""
        if (size := self.resized(*x.shape[2:])) != tuple(x.shape[2:]):
            x = interpolate(x, size, mode=_MODES[self.resample], antialias=self.resample != 0)
        if self.crop:
            x = _central(x, *self.crop)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (x / 255 - mean) / std  # three means make three channels of one

    def resized(self, height: int, width: int) -> tuple[int, ...]:
        """Height and width of an image after resizing, before the crop."""
        if self.size:
            return self.size
        if not self.shortest:
            return height, width
        shorter, longer = sorted((height, width))
        other = int(self.shortest * longer / shorter)
        return (self.shortest, other) if height <= width else (other, self.shortest)


@dataclass(frozen=True)
class UpTo(Preprocessing):
    """The same for images that are larger than the crop; smaller ones are used as they are, not enlarged."""

    @override
    def resized(self, height: int, width: int) -> tuple[int, ...]:
        """Height and width of an image after resizing, before the crop."""
        return (height, width) if self._is_small(height, width) else super().resized(height, width)

    @override
    def batch(self, x: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """The inputs of images of one size."""
        if self._is_small(*x.shape[2:]):
            return Preprocessing(mean=self.mean, std=self.std).batch(x)
        return super().batch(x)

    def _is_small(self, height: int, width: int) -> bool:
        return min(height, width) <= min(self.crop)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return int(size), int(size)


def _central(x: Tensor, height: int, width: int) -> Tensor:
    """The central part of images, padded with 0 where they are smaller."""
    missing = [max(0, want - have) for want, have in ((height, x.shape[2]), (width, x.shape[3]))]
    if any(missing):
        x = pad(x, (missing[1] // 2, missing[1] - missing[1] // 2, missing[0] // 2, missing[0] - missing[0] // 2))
    top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
    return x[:, :, top : top + height, left : left + width]


IMAGES = ("vit", "dinov2", "clip", "clip_vision_model", "convnext", "convnextv2", "resnet")
"""Kinds of networks of images (``model_type`` of ``config.json``) that are supported."""
TEXTS = ("bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "electra", "albert")
"""Kinds of encoders of texts that are supported."""
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]
_LONGEST = 511
"""Largest number of tokens of a text; the rest is cut."""


def from_transformers(name: str, *, download: bool) -> Backbone:
    """The backbone ``hf:owner/name`` or ``hf:./folder`` (see `fedstill.models.backbones.load`)."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"--features {name} needs the package transformers: {errors.install('hf')}") from error
    folder = _folder(name, name.removeprefix("hf:"), download)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet(transformers.utils.logging):
            config = transformers.AutoConfig.from_pretrained(folder, **options)
            kind = str(config.model_type)
            if kind not in (*IMAGES, *TEXTS):
                raise ValueError(f"its kind is {kind!r}; supported are {', '.join((*IMAGES, *TEXTS))}")
            chosen: Any = transformers.CLIPVisionModel if kind.startswith("clip") else transformers.AutoModel
            more = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
            with seeds.isolated(0):
                net, facts = chosen.from_pretrained(folder, **more, **options)
            if missing := [key for key in sorted(facts["missing_keys"]) if not _is_unused(key, kind)]:
                raise ValueError(f"its weights lack {missing[0]!r}")
            net = net.eval().requires_grad_(False)
            weights = {key: value for key, value in state(net).items() if not _is_unused(key, kind)}
            if kind in IMAGES:
                return _of_images(name, kind, net, weights, folder)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            return _of_texts(name, net, weights, tokenizer, folder)
    except Exception as error:  # transformers, tokenizers and safetensors raise many kinds on damaged files
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the backbone {name!r} can't be loaded from {str(folder)!r} ({why}); the folder needs config.json, "
            "model.safetensors, and the files of the image processor or the tokenizer"
        ) from error


def _is_unused(key: str, kind: str) -> bool:
    """Whether a weight is of a pooler that no vector uses; files often lack it, and it is then random."""
    return key.startswith("pooler.") and (kind == "vit" or kind in TEXTS)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Let transformers draw no bars and list no weights inside the block."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


def _folder(name: str, model: str, download: bool) -> Path:
    if model.startswith((".", "~", "/")):
        if not (folder := expanded(model)).is_dir():
            raise ValueError(f"there is no folder {model!r} with a backbone; check the path")
        return folder
    root = os.environ.get("FEDSTILL_BACKBONES")
    if root and (expanded(root) / model).is_dir():
        return expanded(root) / model
    from huggingface_hub import HfApi, snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True, allow_patterns=_PATTERNS))
    except Exception as missing:  # its errors differ between versions
        try:
            if not download:
                raise missing
            HfApi().model_info(model, timeout=10)  # the hub's own retries take half a minute
            return Path(snapshot_download(model, allow_patterns=_PATTERNS))
        except Exception as error:
            raise ValueError(
                f"the backbone {name!r} is not on this machine; where there is a network, run 'hf download {model} "
                f"--local-dir {model}' and put the folder at $FEDSTILL_BACKBONES/{model}"
                + ("" if root else " (set FEDSTILL_BACKBONES to a folder of backbones)")
            ) from error


def _of_images(name: str, kind: str, net: nn.Module, weights: dict[str, Tensor], folder: Path) -> Backbone:
    config: Any = net.config
    prepare = Preprocessing.read(folder, int(getattr(config, "image_size", 224)))
    rows = _first_token if kind == "vit" else _pooled
    return Backbone(name, digest(weights, {"kind": kind, "images": vars(prepare)}), net, rows, prepare)


def _of_texts(name: str, net: nn.Module, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> Backbone:
    config: Any = net.config
    longest = min(_LONGEST, int(tokenizer.model_max_length), int(config.max_position_embeddings) - 2)

    def token_ids(text: str) -> tuple[list[int], int]:
        ids = tokenizer(text, truncation=True, max_length=longest)["input_ids"]
        return ids, int(tokenizer.pad_token_id or 0)

    files = [folder / part for part in ("tokenizer.json", "vocab.txt", "sentencepiece.bpe.model")]
    facts = {"texts": longest, "pad": tokenizer.pad_token_id, "batch": TOKENS}
    return Backbone(
        name,
        digest(weights, facts, [file for file in files if file.exists()]),
        net,
        _mean_token,
        token_ids=token_ids,
        vocabulary=int(config.vocab_size),
    )


def _first_token(net: nn.Module, x: Tensor) -> Tensor:
    rows: Tensor = net(pixel_values=x).last_hidden_state[:, 0]
    return rows


def _pooled(net: nn.Module, x: Tensor) -> Tensor:
    rows: Tensor = net(pixel_values=x).pooler_output.flatten(1)
    return rows


def _mean_token(net: nn.Module, ids: Tensor) -> Tensor:
    """The mean of the last hidden states over a text's tokens, as sentence encoders do."""
    there = ids >= 0
    states = net(input_ids=ids.clamp_min(0), attention_mask=there.long()).last_hidden_state
    rows: Tensor = (states * there[:, :, None]).sum(1) / there.sum(1, keepdim=True)
    return rows


def from_timm(name: str, *, download: bool) -> Backbone:
    """The backbone ``timm:NAME``, prepared as the package's evaluation does."""
    timm = _package("timm", name)
    model = name.removeprefix("timm:")
    facts = timm.get_pretrained_cfg(model)
    if facts is None or not facts.hf_hub_id:
        near = lookup.suggestion(model, timm.list_models(pretrained=True), "timm:")
        raise ValueError(f"timm has no pretrained model {model!r}{near or '; choose one of timm.list_models()'}")
    if facts.crop_mode != "center" or facts.interpolation not in _NAMES:
        raise ValueError(
            f"{name!r} resizes by {facts.interpolation} with the crop {facts.crop_mode!r}; only a crop at the center, "
            f"resized by {' or '.join(_NAMES)}, is supported"
        )
    file = _folder(name, facts.hf_hub_id, download) / "model.safetensors"
    _, height, width = facts.input_size
    prepare = Preprocessing(
        shortest=int(min(height, width) / facts.crop_pct),
        crop=(height, width),
        resample=_NAMES[facts.interpolation],
        mean=tuple(facts.mean),
        std=tuple(facts.std),
    )
    with _loading(name, file), seeds.isolated(0):
        net = timm.create_model(model, pretrained=True, pretrained_cfg_overlay={"file": str(file)})
        net.reset_classifier(0)
    return _published(name, net, prepare, _call)


def from_torchvision(name: str, *, download: bool) -> Backbone:
    """The backbone ``torchvision:NAME`` or ``torchvision:NAME.WEIGHTS``: the input of its last linear layer."""
    models = _package("torchvision", name).models
    model, _, which = name.removeprefix("torchvision:").partition(".")
    known = models.list_models(module=models)
    if model not in known:
        near = lookup.suggestion(model, known, "torchvision:")
        near = near or f"; choose one of {', '.join(known)}"
        raise ValueError(f"torchvision has no classifier {model!r}{near}")
    all_weights = models.get_model_weights(model)
    if which and which not in all_weights.__members__:
        raise ValueError(f"{model!r} has no weights {which!r}; choose one of {', '.join(all_weights.__members__)}")
    chosen = all_weights[which] if which else all_weights.DEFAULT
    file, steps = _checkpoint(name, chosen.url, download), chosen.transforms()
    prepare = Preprocessing(
        shortest=steps.resize_size[0],
        crop=(steps.crop_size[0],) * 2,
        resample=_NAMES[steps.interpolation.value],
        mean=tuple(steps.mean),
        std=tuple(steps.std),
    )
    with _loading(name, file), seeds.isolated(0):
        net = models.get_model(model, weights=None)
        net.load_state_dict(read(file))
    return _published(name, net, prepare, features)


_NAMES = {"nearest": 0, "bilinear": 2, "bicubic": 3}
"""torch's name of a resampling filter -> Pillow's number."""


def _package(package: str, name: str) -> Any:
    try:
        return import_module(package)
    except Exception as error:  # torchvision for another torch raises a RuntimeError, say
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        why = "which is not installed" if missing else f"which can't be imported ({errors.first_line(error)})"
        raise ValueError(
            f"--features {name} needs the package {package}, {why}; install the version for torch {torch.__version__}: "
            f"pip install {package}"
        ) from error


@contextmanager
def _loading(name: str, file: Path) -> Iterator[None]:
    """Turn whatever damaged or foreign weights raise inside the block into one sentence."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"the backbone {name!r} can't be loaded from {str(file)!r} ({errors.first_line(error)}); remove the file, "
            "and fetch it again"
        ) from error


def _checkpoint(name: str, url: str, download: bool) -> Path:
    """The file of weights of torchvision, whose name ends with the beginning of its SHA-256."""
    file = url.rpartition("/")[2]
    root, cache = os.environ.get("FEDSTILL_BACKBONES"), Path(torch.hub.get_dir()) / "checkpoints"
    places = [*([expanded(root) / file] if root else []), cache / file]
    place = next((place for place in places if place.is_file()), None)
    begin = file.rpartition("-")[2].partition(".")[0]
    try:
        if place is None:
            if not download:
                raise FileNotFoundError(file)
            cache.mkdir(parents=True, exist_ok=True)
            place = cache / file
            torch.hub.download_url_to_file(url, str(place), begin, progress=False)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"the backbone {name!r} is not on this machine; where there is a network, download {url} and put the file "
            f"into {places[0].parent}"
        ) from error
    if not (found := files.digest(place)).startswith(begin):
        raise ValueError(
            f"the weights {str(place)!r} of the backbone {name!r} have the SHA-256 {found[:16]}..., not {begin}...; "
            "remove the file, and fetch it again"
        )
    return place


def _published(name: str, net: nn.Module, prepare: Preprocessing, rows: Rows) -> Backbone:
    """A backbone whose digest covers the weights without the classifier's name, and the preparation."""
    net = net.eval().requires_grad_(False)
    return Backbone(name, digest(state(net), {"name": name, "images": vars(prepare)}), net, rows, prepare)


_LEAST, _SIDE = 64, 224
"""Smallest side of an image that a mobile network takes, and that of the published networks' images."""


def from_wheel(name: str, shape: tuple[int, ...]) -> Backbone:
    """A network of `fedstill.models.mobile`; images up to 224 pixels a side are used as they are.

    Larger ones are prepared as the papers do: the shorter side becomes 256 pixels, of which the central 224 are used.
    """
    if min(shape[1:]) < _LEAST:
        raise ValueError(
            f"the backbone {name!r} takes images of {_LEAST} pixels a side or more, and these are "
            f"{shape[1]} x {shape[2]}; enlarge them, as with --size 128"
        )
    net, facts = mobile.load(name), mobile.PUBLISHED[name]
    prepare = UpTo(shortest=_SIDE + 32, crop=(_SIDE, _SIDE), resample=facts.resample, mean=facts.mean, std=facts.std)
    found = digest({}, {"weights": facts.sha256, "images": vars(prepare)})
    return Backbone(name, found, net, _call, prepare, batch=mobile.BATCH)


_SCATTERING = "scattering"


def load(name: str, shape: tuple[int, ...], *, download: bool = True) -> Backbone:
    """The backbone ``name``.

    Args:
        name: ``mobilenet-v2`` or ``efficientnet-lite0`` (``fedstill[backbones]``), ``hf:owner/name`` or
            ``hf:./folder`` for a model of ``transformers``, ``timm:NAME``, ``torchvision:NAME`` or
            ``torchvision:NAME.WEIGHTS``, ``scattering`` with its options, or ``package.module:function`` for your own,
            a function without arguments that returns a module, which maps pixels in [0, 1] ``(n, c, h, w)`` to
            ``(n, d)``.
        shape: channels, height and width of an image; empty for texts.
        download: whether a model that is not on this machine may be downloaded.

    Raises:
        ValueError: there is no such backbone, or it can't be loaded.
    """
    if name.startswith("hf:"):
        return from_transformers(name, download=download)
    kind, _, rest = name.partition(":")
    of_images = name in mobile.PUBLISHED or kind in ("timm", "torchvision", _SCATTERING)
    if of_images and len(shape) != 3:
        raise ValueError(no_images(name, shape))
    if name in mobile.PUBLISHED:
        return from_wheel(name, shape)
    if kind in ("timm", "torchvision"):
        return (from_timm if kind == "timm" else from_torchvision)(name, download=download)
    if kind == _SCATTERING:
        with seeds.isolated(0):
            net = build(name, shape, 2).eval()
        facts = {"spec": name, "shape": shape}
        return Backbone(name, digest({}, facts), net, features, Preprocessing(mean=(0.5,), std=(0.25,)))
    if not rest.isidentifier():
        near = lookup.suggestion(name, [*mobile.PUBLISHED, _SCATTERING, "patches"])
        known = (
            f"; name {', '.join(mobile.PUBLISHED)}, a model of another library as hf:owner/name, hf:./folder, "
            f"timm:NAME or torchvision:NAME, {_SCATTERING}, patches, or your own function as package.module:function"
        )
        raise ValueError(f"there is no backbone {name!r}{near or known}")
    return _own(name)


def _own(name: str) -> Backbone:
    try:
        with seeds.isolated(0):
            net = lookup.import_own(name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the backbone {name!r} can't be made ({error}); name a function without arguments that returns a module"
        ) from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"the backbone {name!r} is a {type(net).__name__}; the function must return a torch.nn.Module")
    return Backbone(name, digest(state(net), {"name": name}), net.eval().requires_grad_(False), _call, Preprocessing())


def _call(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = net(x)
    return result.flatten(1)


def no_images(name: str, shape: tuple[int, ...]) -> str:
    """The sentence for a backbone of images and records of this shape, which are vectors or texts."""
    what, remedy = ("vectors already", "leave --features out") if shape else ("texts", "take an encoder of texts")
    return f"the backbone {name!r} takes images, but the records are {what}; {remedy}"
