"""Public backbones that turn images or texts into vectors: pretrained ones of ``transformers``, and others, by name."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from fedstill import lookup, seeds
from fedstill.models.build import build, features
from fedstill.models.preprocessing import Preprocessing
from fedstill.weights import state

_FORMAT = 1
"""Version of the vectors: increased if the same weights give others than before."""
_BLOCK = 32
"""Texts are padded to multiples of this number of tokens."""
_SCATTERING = "scattering"

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


def load(name: str, shape: tuple[int, ...], *, download: bool = True) -> Backbone:
    """The backbone ``name``.

    Args:
        name: ``hf:owner/name`` or ``hf:./folder`` for a model of ``transformers``, ``scattering`` with its options, or
            ``package.module:function`` for your own, a function without arguments that returns a module, which maps
            pixels in [0, 1] ``(n, c, h, w)`` to ``(n, d)``.
        shape: channels, height and width of an image; empty for texts.
        download: whether a model that is not on this machine may be downloaded.

    Raises:
        ValueError: there is no such backbone, or it can't be loaded; one sentence.
    """
    if name.startswith("hf:"):
        from fedstill.models.hub import from_transformers  # takes seconds to import

        return from_transformers(name, download=download)
    kind, _, rest = name.partition(":")
    if kind == _SCATTERING:
        if len(shape) != 3:
            raise ValueError(f"the backbone {name!r} takes images, but the records are texts; take an encoder of texts")
        with seeds.isolated(0):
            net = build(name, shape, 2).eval()
        facts = {"spec": name, "shape": shape}
        return Backbone(name, digest({}, facts), net, features, Preprocessing(mean=(0.5,), std=(0.25,)))
    if not rest.isidentifier():
        raise ValueError(
            f"there is no backbone {name!r}; name a model of transformers as hf:owner/name or hf:./folder, "
            f"{_SCATTERING}, or your own function as package.module:function"
        )
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
