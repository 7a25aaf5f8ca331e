"""Weights of a public feature extractor: from a file, from the cache, or by pretraining on public images."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock
from jaxtyping import Float
from torch import Tensor, nn

from fedstill import models
from fedstill.base import files
from fedstill.base.files import expanded
from fedstill.base.records import Records
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.settings import Settings
from fedstill.base.weights import read, state
from fedstill.data import cache
from fedstill.models.patches import Patches
from fedstill.protocol import wire
from fedstill.train.contrastive import SimCLR, fingerprint
from fedstill.train.sgd import Adam

__all__ = ["Extractor", "load", "save"]

_FORMAT = 1
"""Version of the weights: increased if the same settings give other weights than before."""

_log = logging.getLogger(__name__)


class Extractor(Settings):
    """Source of a feature extractor's weights."""

    pretrain: Literal["simclr", "none"] = "simclr"
    """Pretraining on the public images without their labels ("simclr"; k-means in its place for the model patches), or
    the random start ("none"), as always for vectors."""
    simclr: SimCLR = SimCLR()
    """Settings of the pretraining."""
    file: str | None = None
    """File of the model's weights to use in place of pretraining: torch.save(model.state_dict(), file), or
    safetensors."""

    def obtain(
        self,
        model: nn.Module,
        public: Records | None,
        rng: torch.Generator,
        *,
        cache_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Tensor]:
        """The state of the pretrained model, on the model's devices; ``model`` itself does not change.

        The cache stores a finished pretraining as ``extractors/<key>.safetensors``; the key is a SHA-256 of everything
        it depends on (images, settings, model, device, ``rng``). An interrupted pretraining resumes from a checkpoint
        beside that file, to the same bits. Processes that need the same one wait for the first.

        Args:
            model: in its random start.
            public: images to pretrain on; labels are ignored.
            rng: a generator, which is only copied: its state is the same with and without a cached result.
            cache_dir: folder of the cache; by default ``$FEDSTILL_CACHE`` or ``~/.cache/fedstill``.
            progress: called with the numbers of epochs done and of all epochs.

        Raises:
            ValueError: the file is missing, damaged or of another model; there are no public images to pretrain on;
                or the cache can't be written.
        """
        if self.file is not None:
            return load(expanded(self.file), model)
        if self.pretrain == "none" or (public is not None and public.are_vectors):
            return {name: value.clone() for name, value in state(model).items()}
        if public is None:
            raise ValueError(
                "the feature extractor is pretrained on public images, but the run has 0; name some with --public, or "
                "choose pretrain=none or a file of weights"
            )
        facts = {
            "format": _FORMAT,
            "recipe": "k-means" if isinstance(model, Patches) else self.simclr.model_dump(mode="json"),
            "rng": rng.get_state().numpy().tobytes().hex(),
        }
        place = (
            (cache_dir or cache.default_folder()) / "extractors" / f"{fingerprint(model, public, facts)}.safetensors"
        )
        weights = _cached(place, model)  # without the lock, which a read-only cache can't give
        if weights is not None:
            return weights
        with _locked(place):
            weights = _cached(place, model)  # another process may have written it while this one waited
            return self._pretrain(model, public, rng, place, progress) if weights is None else weights

    def _pretrain(
        self,
        model: nn.Module,
        public: Records,
        rng: torch.Generator,
        place: Path,
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Tensor]:
        model, checkpoint = deepcopy(model), place.with_suffix(".checkpoint")
        stream = torch.Generator(rng.device)
        stream.set_state(rng.get_state())
        if isinstance(model, Patches):
            model.learn(public, stream)
        else:
            self.simclr.fit(model, public, stream, on_epoch=progress, checkpoint=checkpoint)
        weights = state(model)
        files.write_checked(place, wire.pack(weights, {}))
        checkpoint.unlink(missing_ok=True)
        return weights


def save(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a model's state for ``Extractor(file=...)``, as a safetensors file."""
    files.write_bytes(path, wire.pack(weights, {}))


def load(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The state in a file, on the devices of ``model``.

    Args:
        path: a safetensors file, by `save` or from elsewhere, or what ``torch.save`` made of a state dict.
        model: the model whose state it is.

    Raises:
        ValueError: there is no such file, or its weights are not of this model.
    """
    try:
        return _checked(read(path), model)
    except OSError as error:
        raise ValueError(
            f"the extractor's weights {str(path)!r} can't be read ({error.strerror or error}); check the path"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} holds no weights of this model ({error}); it must be safetensors or "
            "torch.save(model.state_dict(), file), with the same model, image shape and number of classes"
        ) from error


def _checked(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """``weights`` in the order and on the devices of the model's state; a ValueError if they are another model's."""
    expected = state(model)
    if missing := [name for name in expected if name not in weights]:
        raise ValueError(f"{missing[0]!r} is missing")
    if extra := [name for name in weights if name not in expected]:
        raise ValueError(f"the model has no {extra[0]!r}")
    for name, value in expected.items():
        given = weights[name]
        if (given.shape, given.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"{name!r} is {given.dtype} of shape {tuple(given.shape)}, in the model {value.dtype} of shape "
                f"{tuple(value.shape)}"
            )
        if not torch.isfinite(given).all():
            raise ValueError(f"{name!r} has values that are not finite")
    return {name: weights[name].to(value.device) for name, value in expected.items()}


def _cached(place: Path, model: nn.Module) -> dict[str, Tensor] | None:
    """Weights of an earlier pretraining, or None if there are none or they are damaged."""
    try:
        return _checked(wire.unpack(files.read_checked(place, "pretraining again"))[0], model)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("not using a cached extractor: %s", error)
        return None


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the lock of a cache file.

    Raises:
        ValueError: the cache can't be written.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{place}.lock")
        lock.acquire()
    except OSError as error:
        raise ValueError(
            f"the cache {str(place.parent)!r} can't be written ({error.strerror or error}); make room or make it "
            "writable, or name another folder in the environment variable FEDSTILL_CACHE"
        ) from error
    try:
        yield
    finally:
        lock.release()


class _PublicClassifier(nn.Module):
    """A network's features and a linear classifier on them."""

    def __init__(self, network: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(width, num_classes)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n classes"]:
        logits: Tensor = self.head(models.features(self.network, x))
        return logits


def learn_public_classes(model: nn.Module, public: Records, training: Adam, rng: torch.Generator) -> None:
    """Train in place the part of ``model`` that `models.features` runs, with a new linear classifier on it.

    The classifier, of as many classes as ``public`` has, is dropped afterwards; that of ``model`` does not change.
    ``rng`` draws its start and the batches.
    """
    with isolated(draw_seed(rng)):
        both = _PublicClassifier(model, models.feature_width(model, public.shape), public.num_classes)
    training.fit(both.to(public.labels.device), public, rng)
