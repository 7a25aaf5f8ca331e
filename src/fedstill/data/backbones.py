"""Public backbones by name: those of `fedstill.models.pretrained`, and patches, which are learnt from public images."""

import hashlib
from pathlib import Path

import torch

from fedstill import seeds
from fedstill.data import cache, public
from fedstill.models import build, features, pretrained
from fedstill.models.frozen import Backbone, digest
from fedstill.models.patches import Patches
from fedstill.models.preprocessing import Preprocessing
from fedstill.records import Normalisation, Records

_PATCHES = "patches"
_MEAN, _STD = 0.5, 0.25
"""Normalisation of pixels, public and private."""
_PUBLIC = "public="


def public_of(name: str) -> str | None:
    """The public images from which the backbone ``name`` is learnt, as `fedstill.data.public.load` takes them."""
    kind, _, rest = name.partition(":")
    specs = [option.removeprefix(_PUBLIC) for option in rest.split(",") if option.startswith(_PUBLIC)]
    return (specs[-1] if specs else "noise") if kind == _PATCHES else None


def load(name: str, shape: tuple[int, ...], *, download: bool = True, cache_dir: Path | None = None) -> Backbone:
    """The backbone ``name``.

    Args:
        name: as `fedstill.models.pretrained.load` takes it, or ``patches`` with the options of the model and
            ``public=SPEC`` (`fedstill.data.public.load`), the images that the patches are learnt from; ``noise`` by
            default. Each machine learns them once, and the same images give the same weights.
        shape: channels, height and width of an image; empty for texts.
        download: whether a model that is not on this machine may be downloaded.
        cache_dir: folder of the cache.

    Raises:
        ValueError: there is no such backbone or no such public data, or it can't be loaded; one sentence.
    """
    kind, _, rest = name.partition(":")
    if kind != _PATCHES:
        return pretrained.load(name, shape, download=download)
    if len(shape) != 3:
        raise ValueError(pretrained.no_images(name, shape))
    options = [option for option in rest.split(",") if not option.startswith(_PUBLIC)]
    spec = f"{kind}:{','.join(options)}" if any(options) else kind
    normalisation = Normalisation((_MEAN,) * shape[0], (_STD,) * shape[0])
    images = public.load(public_of(name) or "noise", shape, normalisation)
    with seeds.isolated(0):
        net = build(spec, shape, 2)
    assert isinstance(net, Patches)
    learnt = ("centre", "whitening", "centroids")

    def learn() -> cache.CacheEntry:
        net.learn(images, seeds.stream(0, "learn"))
        return cache.CacheEntry({part: getattr(net, part).numpy() for part in learnt}, {})

    state = f"{spec} {shape} {_hash(images)}"
    folder = (cache_dir or cache.default_folder()) / f"patches-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    entry, _ = cache.cached(folder, state, learn)
    weights = {part: torch.from_numpy(entry.arrays[part]).clone() for part in learnt}
    net.load_state_dict({**net.state_dict(), **weights})
    facts = {"spec": spec, "shape": shape}
    return Backbone(name, digest(weights, facts), net.eval(), features, Preprocessing(mean=(_MEAN,), std=(_STD,)))


def _hash(images: Records) -> str:
    return hashlib.sha256(images.images.numpy().tobytes()).hexdigest()
