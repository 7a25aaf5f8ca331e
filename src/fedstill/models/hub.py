"""Backbones of Hugging Face's ``transformers``, from a folder, from the cache of the hub, or downloaded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedstill import extras, seeds
from fedstill.models.frozen import Backbone, digest
from fedstill.models.preprocessing import Preprocessing
from fedstill.weights import state

IMAGES = ("vit", "dinov2", "clip", "clip_vision_model", "convnext", "convnextv2", "resnet")
"""Kinds of networks of images (``model_type`` of ``config.json``) that are supported."""
TEXTS = ("bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "electra", "albert")
"""Kinds of encoders of texts that are supported."""
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]
_LONGEST = 511
"""Largest number of tokens of a text; the rest is cut."""


def from_transformers(name: str, *, download: bool) -> Backbone:
    """The backbone ``hf:owner/name`` or ``hf:./folder`` (see `fedstill.models.pretrained.load`)."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"--features {name} needs the package transformers: {extras.install('hf')}") from error
    folder = _folder(name.removeprefix("hf:"), download)
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


def _folder(model: str, download: bool) -> Path:
    if model.startswith((".", "~", "/")):
        if not (folder := Path(model).expanduser()).is_dir():
            raise ValueError(f"there is no folder {model!r} with a backbone; check the path")
        return folder
    root = os.environ.get("FEDSTILL_BACKBONES")
    if root and (Path(root).expanduser() / model).is_dir():
        return Path(root).expanduser() / model
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
                f"the backbone 'hf:{model}' is not on this machine; where there is a network, run 'hf download {model} "
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
    facts = {"texts": longest, "pad": tokenizer.pad_token_id}
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
