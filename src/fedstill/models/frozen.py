"""A frozen public network that turns images or texts into vectors, and the hash on which a run agrees."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

_FORMAT = 1
"""Version of the vectors: increased if the same weights give others than before."""
_BLOCK = 32
"""Texts are padded to multiples of this number of tokens."""

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
    """

    name: str
    digest: str
    net: nn.Module
    rows: Rows
    image_input: Callable[[UInt8[Tensor, "c h w"]], Float[Tensor, "1 c h w"]] | None = None
    token_ids: Callable[[str], tuple[list[int], int]] | None = None
    vocabulary: int = 0

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
