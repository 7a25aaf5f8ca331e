"""Records as vectors of a public backbone (``--features``), computed once and cached on disk.

A record's vector does not depend on the other records, to the last bit (`fedstill.privacy.rowwise`).
"""

import copy
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from numpy.typing import NDArray
from torch import Tensor

from fedstill.base import seeds
from fedstill.base.records import AS_THEY_ARE, Normalisation, Records
from fedstill.data import cache, public, sources
from fedstill.data.places import AS_IT_IS, Reading
from fedstill.models import backbones, build, features
from fedstill.models.backbones import LIBRARIES, TOKENS, Backbone, Preprocessing, digest
from fedstill.models.patches import Patches
from fedstill.privacy import rowwise

_PATCHES = "patches"
_MEAN, _STD = 0.5, 0.25
"""Normalisation of pixels, public and private."""
_PUBLIC = "public="


def public_of(name: str) -> str | None:
    """The public images from which the backbone ``name`` is learnt, as `fedstill.data.public.load` takes them."""
    kind, _, rest = name.partition(":")
    specs = [option.removeprefix(_PUBLIC) for option in rest.split(",") if option.startswith(_PUBLIC)]
    return (specs[-1] if specs else "noise") if kind == _PATCHES else None


def load_backbone(
    name: str, shape: tuple[int, ...], *, download: bool = True, cache_dir: Path | None = None
) -> Backbone:
    """The backbone ``name``.

    Args:
        name: as `fedstill.models.backbones.load` takes it, or ``patches`` with the options of the model and
            ``public=SPEC`` (`fedstill.data.public.load`), the images that the patches are learnt from; ``noise`` by
            default. Each machine learns them once, and the same images give the same weights.
        shape: channels, height and width of an image; empty for texts.
        download: whether a model that is not on this machine may be downloaded.
        cache_dir: folder of the cache.

    Raises:
        ValueError: there is no such backbone or no such public data, or it can't be loaded.
    """
    kind, _, rest = name.partition(":")
    if kind != _PATCHES:
        return backbones.load(name, shape, download=download)
    if len(shape) != 3:
        raise ValueError(backbones.no_images(name, shape))
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


SECONDS = 5.0
"""Seconds between two notes of how far the computation is: as much is computed again after a kill."""


class VectorFile:
    """Rows of float32 that are written in a fixed order of groups.

    Args:
        path: the ``.npy`` file; the note of the groups that are done lies beside it. None keeps the rows in memory.
        groups: places of the rows of each group, in the order in which they are computed.
    """

    def __init__(self, path: Path | None, groups: Sequence[Sequence[int]]) -> None:
        self._path, self._groups = path, groups
        self._count = sum(map(len, groups))
        self._noted = time.monotonic()
        self._rows, self._done = self._opened()

    def _opened(self) -> tuple[NDArray[np.float32] | None, int]:
        """The rows of an earlier start and the number of its groups; none if there are no such rows."""
        if self._path is None:
            return None, 0
        try:
            done, count = map(int, json.loads(_note(self._path).read_bytes()))
            rows = np.load(self._path, mmap_mode="r+", allow_pickle=False)
        except (OSError, ValueError, TypeError):
            return None, 0
        if (
            rows.dtype != np.float32
            or rows.ndim != 2
            or len(rows) != self._count
            or done < 0
            or count != self._length(done)
        ):
            return None, 0
        return rows, done

    def _length(self, done: int) -> int:
        return sum(map(len, self._groups[:done]))

    @property
    def count(self) -> int:
        """Number of rows that are there."""
        return self._length(self._done)

    @property
    def left(self) -> Sequence[Sequence[int]]:
        """The groups that are still to be computed."""
        return self._groups[self._done :]

    def put(self, rows: Float32[np.ndarray, "m d"]) -> None:
        """Write the rows of the next group."""
        if self._rows is None:
            shape = (self._count, rows.shape[1])
            self._rows = np.empty(shape, np.float32) if self._path is None else _created(self._path, shape)
        self._rows[self._groups[self._done]] = rows
        self._done += 1
        if time.monotonic() > self._noted + SECONDS:
            self.note()

    def note(self) -> None:
        """Write down which groups are on disk."""
        if self._path is None or not isinstance(self._rows, np.memmap):
            return
        self._rows.flush()
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps([self._done, self.count]))
        os.replace(new, _note(self._path))
        self._noted = time.monotonic()

    def rows(self) -> NDArray[np.float32]:
        """All rows, ``(count, d)``; ``d`` is 1 if there are none."""
        return np.empty((0, 1), np.float32) if self._rows is None else self._rows


def _note(path: Path) -> Path:
    return path.with_suffix(".done")


def _created(path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Make and map a file of zeros; the note of an earlier file is deleted first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _note(path).unlink(missing_ok=True)
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)


Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the number of records done and of all."""
_NOISE_SHAPE = (3, 64, 64)
"""Shape of the generated images of ``--public noise``."""
OF_SHAPE = ("scattering", "patches")
"""Beginnings of the names of backbones that are made for the shape of the records."""
_SECONDS = 5.0
"""Seconds between two lines about the progress."""
_LARGE = (*rowwise.SIZES, 128, 256)
"""Sizes of batches on a GPU."""
_PIXELS = 64 * 3 * 224 * 224
"""Values of the inputs of the largest batch."""

_log = logging.getLogger("fedstill")


def rows_of(
    backbone: Backbone,
    records: Sequence[str] | Tensor,
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    file: Path | None = None,
) -> NDArray[np.float32]:
    """The vectors ``(n, d)`` of images, uint8 ``(n, c, h, w)``, or of texts.

    Networks of ``transformers`` compute in bfloat16 on a GPU, else in float32.

    Args:
        backbone: what makes the vectors.
        records: images or texts.
        device: where it computes.
        progress: observer, called with the number of records done and of all.
        file: ``.npy`` file for the vectors, which are a view of it then. A computation that was stopped goes on where
            it was; the caller names the file by content and backbone. None keeps the vectors in memory.

    Raises:
        ValueError: the backbone takes another kind of records, or gives values that are not finite.
    """
    kind = "texts" if not isinstance(records, Tensor) else "images" if records.ndim == 4 else "numbers"
    if kind != backbone.takes:
        remedy = "; a table's texts are taken if it has no column of numbers" if kind == "numbers" else ""
        raise ValueError(f"the backbone {backbone.name!r} takes {backbone.takes}, but the records are {kind}{remedy}")
    half = is_half(backbone, device)
    if half or torch.device(device).type != "cpu":  # a copy, as the caller's network stays where and what it is
        net = copy.deepcopy(backbone.net).to(device, torch.bfloat16 if half else None)
        backbone = replace(backbone, net=net)
    store = VectorFile(file, _groups(backbone, records))
    done = kept = store.count
    start, said = time.monotonic(), time.monotonic()
    with torch.no_grad():
        for places in store.left:
            inputs = [backbone.input_of(records[i]) for i in places]
            x = torch.cat(inputs).to(device)
            x = x.bfloat16() if half and x.is_floating_point() else x
            rows = _by_row(backbone, x).float().cpu()
            wrong = (~rows.isfinite()).any(1).nonzero().flatten()
            if len(wrong):
                raise ValueError(
                    f"the backbone {backbone.name!r} gives record {places[int(wrong[0])]} a vector that is not finite; "
                    "take another"
                )
            store.put(rows.numpy())
            done += len(places)
            if progress is not None:
                progress(done, len(records))
            if time.monotonic() > said + _SECONDS:
                said = time.monotonic()
                speed = (done - kept) / (said - start)
                _log.info("%s: %d of %d records, %.1f records/s", backbone.name, done, len(records), speed)
    store.note()
    return store.rows()


def is_half(backbone: Backbone, device: str) -> bool:
    """Whether the backbone computes in bfloat16."""
    return torch.device(device).type == "cuda" and backbone.name.startswith("hf:")


def _groups(backbone: Backbone, records: Sequence[str] | Tensor) -> list[list[int]]:
    """Places of records whose inputs have one shape, a few batches each."""
    if isinstance(records, Tensor):
        return [list(range(i, min(i + 256, len(records)))) for i in range(0, len(records), 256)]
    lengths: dict[int, list[int]] = {}
    for i, text in enumerate(records):
        lengths.setdefault(backbone.input_of(text).shape[1], []).append(i)
    return [places[i : i + 256] for _, places in sorted(lengths.items()) for i in range(0, len(places), 256)]


def _by_row(backbone: Backbone, x: Tensor) -> Float[Tensor, "n d"]:
    """Vectors of inputs, each by itself: in batches of sizes that give a row the same bits whatever the others are."""
    net, rows = backbone.net, backbone.rows
    like = x[:1] if x.is_floating_point() else torch.zeros(x[:1].shape, device=x.device)

    def make() -> rowwise.Compute:
        other = rowwise.randomised(net)
        return lambda inputs: [rows(other, backbone.random_input(inputs))]

    possible = _LARGE if x.is_cuda else tuple(size for size in rowwise.SIZES if size <= backbone.batch)
    most = TOKENS if backbone.takes == "texts" and not x.is_cuda else _PIXELS
    among = tuple(size for size in possible if size * like.numel() <= most) or (1,)
    if backbone.name.startswith(LIBRARIES) or rowwise.is_known(net):
        among = rowwise.sizes((rowwise.form(net), rows.__qualname__, "backbone"), make, like, among)
    else:  # code of the user's own may mix the records of a batch
        among = (1,)
    return torch.cat(
        [
            rows(net, _padded(x[where], size))[: where.stop - where.start]
            for where, size in rowwise.batches(len(x), among)
        ]
    )


def _padded(x: Tensor, size: int) -> Tensor:
    """``x`` with further rows: zeros, or copies of the first text."""
    if x.is_floating_point():
        return rowwise.padded(x, size)
    return torch.cat([x, x[:1].expand(size - len(x), -1)])


def load(
    data: str | sources.DataSet,
    name: str,
    *,
    reading: Reading = AS_IT_IS,
    device: str = "cpu",
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> tuple[sources.DataSet, Backbone]:
    """A data set whose records are vectors of the backbone ``name``, and the backbone.

    Args:
        data: images or texts: an argument of `fedstill.data.sources.load`, or a data set of images.
        name: as `fedstill.data.features.load` takes it.
        reading: how to read them.
        device: device of the backbone.
        progress: observer of the work.
        cache_dir: folder of the cache.

    Raises:
        ValueError: there are no such data or no such backbone, or they do not fit.
    """
    raw = sources.load_raw(data, reading, cache_dir=cache_dir)
    backbone = load_backbone(name, raw.shape, cache_dir=cache_dir)
    arrays, fingerprint = _vectors(backbone.digest, lambda: backbone, raw, device, progress, cache_dir)
    train, test = (
        Records(torch.from_numpy(arrays[split]), labels, len(raw.class_names), AS_THEY_ARE)
        for split, (_, labels) in (("train", raw.train), ("test", raw.test))
    )
    made = sources.DataSet(
        name=raw.name,
        train=train,
        test=test,
        class_names=raw.class_names,
        columns=raw.columns,
        test_columns=dict(raw.test_columns),
        fingerprint=fingerprint,
        measured=raw.measured,
        held_out=raw.held_out,
        known=raw.known,
        source=raw.fingerprint,
        pictures=raw.shape,
        group=raw.group,
        copies=raw.copies,
        origin=raw.origin,
        remarks=raw.remarks,
    )
    return made, backbone


def _vectors(
    digest: str,
    load_backbone: Callable[[], Backbone],
    raw: sources.Raw,
    device: str,
    progress: Progress | None,
    cache_dir: Path | None,
    kind: str = "",
) -> tuple[dict[str, np.ndarray], str]:
    """The vectors of both splits by name, from the cache or computed, and their fingerprint."""
    state = f"{digest} {raw.fingerprint} {torch.device(device).type}"
    tag = hashlib.sha256(state.encode()).hexdigest()[:16]
    folder = (cache_dir or cache.default_folder()) / f"features-{tag}"
    begun = folder.with_name(folder.name + ".begun")

    def build() -> cache.CacheEntry:
        found, backbone = {}, load_backbone()
        for split, (records, _) in (("train", raw.train), ("test", raw.test)):
            label = f"features of {kind}{split} records"
            tell = None if progress is None else (lambda done, total, label=label: progress(label, done, total))
            file = begun / f"{split}.npy"
            found[split] = rows_of(backbone, records, device=device, progress=tell, file=file)
        if not len(found["test"]):
            found["test"] = found["test"].reshape(0, 1).repeat(found["train"].shape[1], 1)
        return cache.CacheEntry(found, {"labels": raw.fingerprint})

    entry, fingerprint = cache.cached(folder, state, build)
    shutil.rmtree(begun, ignore_errors=True)
    return entry.arrays, fingerprint


def load_public(
    spec: str,
    backbone: tuple[str, str],
    like: Records,
    *,
    size: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Records:
    """Public records as vectors: as `fedstill.data.public.load`, of a data set's own images or texts.

    Args:
        spec: as `fedstill.data.public.load` takes it.
        backbone: name and digest of the backbone, which is not loaded if the vectors are in the cache.
        like: records with the length and the normalisation of the task's vectors.
        size: as for `fedstill.data.public.load`.
        device: device of the backbone.
        progress: observer of the work.

    Raises:
        ValueError: there are no such data, the backbone has another digest, or the vectors another length.
    """
    base = spec.removesuffix(":unlabeled")
    if public.is_noise(base):
        noise = public.load(base, _NOISE_SHAPE, Normalisation((0.5,) * 3, (0.25,) * 3))
        whole, none = ((noise[part].images, noise[part].labels) for part in (slice(None), slice(0)))
        raw = sources.Raw(base, whole, none, ("",), {}, f"generated {base}", ())
    else:
        raw = sources.load_raw(base, Reading(size))

    def installed() -> Backbone:
        found = load_backbone(backbone[0], raw.shape)
        if found.digest != backbone[1] and found.name.startswith(OF_SHAPE):
            raise ValueError(
                f"the features {found.name!r} are made for the shape of the task's images, and those of the public "
                f"records {spec!r} are {' x '.join(map(str, raw.shape))}; take images of the task's shape"
            )
        check_digest(found, backbone[1])
        return found

    arrays, _ = _vectors(backbone[1], installed, raw, device, progress, None, kind="public ")
    values = torch.from_numpy(np.concatenate([arrays["train"], arrays["test"]]))
    labels = torch.cat([raw.train[1], raw.test[1]])
    if values.shape[1:] != like.shape:
        raise ValueError(
            f"the features of the public records {spec!r} have {values.shape[1]} numbers, but those of the task have "
            f"{like.shape[0]}; take images of the task's shape"
        )
    if base != spec:
        labels = torch.zeros_like(labels)
    return Records(values, labels, 1 if base != spec else len(raw.class_names), like.normalisation)


def load_part(
    path: str, name: str, expected: str, *, reading: Reading = AS_IT_IS, device: str, cache_dir: Path
) -> sources.SiteRecords:
    """A site's own records as vectors of a backbone that is installed there.

    Args:
        path: the records, as for `fedstill.data.sources.load_part`.
        name: the backbone.
        expected: the digest on which the run agreed.
        reading: how to read them.
        device: device of the backbone.
        cache_dir: folder of decoded data and of vectors.

    Raises:
        ValueError: there are no such records or no such backbone, or it has another digest.
    """
    raw = sources.load_raw_part(path, reading, cache_dir=cache_dir)
    backbone = load_backbone(name, raw.shape, download=False, cache_dir=cache_dir)
    check_digest(backbone, expected)
    arrays, _ = _vectors(backbone.digest, lambda: backbone, raw, device, None, cache_dir)
    train, test = (
        (torch.from_numpy(arrays[split]), labels) for split, (_, labels) in (("train", raw.train), ("test", raw.test))
    )
    return sources.SiteRecords(train, test, raw.class_names, raw.fingerprint)


def check_digest(backbone: Backbone, expected: str) -> None:
    """Refuse a backbone with other weights or another preparation than a run's.

    Raises:
        ValueError: its digest is not ``expected``.
    """
    if backbone.digest != expected:
        raise ValueError(
            f"the backbone {backbone.name!r} here has the SHA-256 {backbone.digest[:16]}..., but the run's has "
            f"{expected[:16]}...; install the same weights"
        )
