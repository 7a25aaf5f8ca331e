"""Where a public feature extractor comes from: a file, the cache, or pretraining on public images."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock
from torch import Tensor, nn

from fedstill import files, wire
from fedstill.data import cache
from fedstill.records import Records
from fedstill.settings import Settings
from fedstill.train.contrastive import SimCLR, fingerprint
from fedstill.weights import state

__all__ = ["Extractor", "load", "save"]

_FORMAT = 1
"""Raised whenever the same settings would give other weights than an older version's."""

_log = logging.getLogger(__name__)


class Extractor(Settings):
    """Source of a model's first weights, for the sake of its features."""

    pretrain: Literal["simclr", "none"] = "simclr"
    """simclr: on the public images, without their labels; none: the features are those of the random start."""
    simclr: SimCLR = SimCLR()
    """The pretraining."""
    file: str | None = None
    """Take the weights from this file, written by fedstill.train.extractor.save, in place of pretraining."""

    def obtain(
        self,
        model: nn.Module,
        public: Records | None,
        rng: torch.Generator,
        *,
        cache_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Tensor]:
        """The state of the pretrained model, on the model's devices; ``model`` itself stays as it is.

        A finished pretraining is kept as ``extractors/<key>.safetensors``, where the key is a SHA-256 of everything it
        depends on: the images' bytes and normalisation, the settings, the model's structure, weights and kind of
        device, and the state of ``rng``. One that is killed goes on from a checkpoint beside that file, to the same
        bits; of several processes that want the same one, the others wait.

        Args:
            model: in its random start.
            public: images to pretrain on; labels are not looked at.
            rng: `SimCLR.fit` draws from a copy of it, so that it stands the same with and without a cached result.
            cache_dir: where extractors are kept; ``$FEDSTILL_CACHE``, else ``~/.cache/fedstill``.
            progress: called with the number of epochs done and the number of all.

        Raises:
            ValueError: the file is missing, damaged or of another model; there are no public images to pretrain on;
                or the cache can't be written.
        """
        if self.file is not None:
            return load(Path(self.file).expanduser(), model)
        if self.pretrain == "none":
            return {name: value.clone() for name, value in state(model).items()}
        if public is None:
            raise ValueError(
                "the feature extractor is pretrained on public images, of which there are none; name some with "
                "--public, or choose pretrain=none or a file of weights"
            )
        facts = {
            "format": _FORMAT,
            "recipe": self.simclr.model_dump(mode="json"),
            "rng": rng.get_state().numpy().tobytes().hex(),
        }
        place = (
            (cache_dir or cache.default_folder()) / "extractors" / f"{fingerprint(model, public, facts)}.safetensors"
        )
        found = _cached(place, model)  # without the lock, which a read-only cache can't give
        if found is not None:
            return found
        with _alone(place):
            found = _cached(place, model)  # another process may have made it while this one waited
            if found is None:
                found = self._trained(model, public, rng, place, progress)
        return found

    def _trained(
        self,
        model: nn.Module,
        public: Records,
        rng: torch.Generator,
        place: Path,
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Tensor]:
        trained, checkpoint = deepcopy(model), place.with_suffix(".checkpoint")
        own = torch.Generator(rng.device)
        own.set_state(rng.get_state())
        self.simclr.fit(trained, public, own, on_epoch=progress, checkpoint=checkpoint)
        found = state(trained)
        files.write_checked(place, wire.pack(found, {}))
        checkpoint.unlink(missing_ok=True)
        return found


def save(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a model's state for ``Extractor(file=...)``: a safetensors file that other programs read as well."""
    files.write_bytes(path, wire.pack(weights, {}))


def load(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The state that `save` wrote, on the devices of ``model``.

    Raises:
        ValueError: there is no such file, or it doesn't hold what ``model`` needs.
    """
    try:
        return _fitting(wire.unpack(path.read_bytes())[0], model)
    except OSError as error:
        raise ValueError(
            f"the extractor's weights {str(path)!r} can't be read ({error.strerror or error}); check the path"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} holds no weights of this model ({error}); give the file of an extractor with the same "
            "model, image shape and number of classes"
        ) from error


def _fitting(found: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """``found`` in the order and on the devices of the model's state; raises ValueError if it is another model's."""
    held = state(model)
    if lacking := [name for name in held if name not in found]:
        raise ValueError(f"{lacking[0]!r} is missing")
    if extra := [name for name in found if name not in held]:
        raise ValueError(f"the model has no {extra[0]!r}")
    for name, value in held.items():
        if (found[name].shape, found[name].dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"{name!r} is {found[name].dtype} of shape {tuple(found[name].shape)}, in the model {value.dtype} of "
                f"shape {tuple(value.shape)}"
            )
        if not torch.isfinite(found[name]).all():
            raise ValueError(f"{name!r} has values that are not finite")
    return {name: found[name].to(value.device) for name, value in held.items()}


def _cached(place: Path, model: nn.Module) -> dict[str, Tensor] | None:
    """Weights of an earlier pretraining, or None if there are none that can be used."""
    try:
        return _fitting(wire.unpack(files.read_checked(place, "pretraining again"))[0], model)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("not using a cached extractor: %s", error)
        return None


@contextmanager
def _alone(place: Path) -> Iterator[None]:
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
