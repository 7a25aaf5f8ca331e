"""Public data: records that the server and all clients have, converted to the shape of the task's records."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from fedstill.base.records import Normalisation, Records, in_words, luminance
from fedstill.base.seeds import stream
from fedstill.data import places, sources
from fedstill.data.names import KNOWN
from fedstill.data.places import AS_IT_IS, Reading

_CHUNK_BYTES = 64 * 2**20
"""Size of a converted chunk in float32."""
_UNLABELED = ":unlabeled"
SAMPLED = 64
"""Maximum number of public records that a server describes to its sites."""


def load(spec: str, like_shape: tuple[int, ...], normalisation: Normalisation, *, size: int | None = None) -> Records:
    """The train records and then the test records of a data set, converted to the shape of a task's images.

    Vectors are not converted: they must have the task's length.

    Gray becomes three equal channels, colours become their luminance. Sizes change by bilinear interpolation with
    antialiasing. Values are rounded to 8 bits once, at the end.

    Args:
        spec: ``noise`` or ``noise=N`` for 10,000 or N synthetic images (textured shapes, always the same, without
            labels), or as many normal vectors with the mean and deviation of ``normalisation``; or an argument of
            `fedstill.data.sources.load`, with the suffix ``:unlabeled`` for images without labels: all labels are then
            0 and there is 1 class. It drops labels and adds no images, as only train and test splits are read, not
            STL-10's unlabeled one.
        like_shape: the task's channels (1 or 3), height and width; or the length of its vectors.
        normalisation: the task's normalisation, which replaces that of the public data.
        size: height and width to which pictures are cropped and resized when they are read, or None; not
            those of known sets.

    Raises:
        ValueError: there is no such data set, it can't be converted to the task's channels, or its vectors have
            another length.
    """
    if held_out_count(spec) is not None:
        raise ValueError(
            f"public data {spec!r} are some of a simulation's own records; real sites need a data set that all have"
        )
    name = spec.removesuffix(_UNLABELED)
    if is_noise(name):
        return _noise(name, like_shape, normalisation)
    with _other_kinds(name):
        data = sources.load(name, AS_IT_IS if name in KNOWN else Reading(size))  # known sets have one size
    if len(like_shape) == 1 or data.train.are_vectors:
        return _vectors(data, name, like_shape, normalisation, labelled=name == spec)
    channels = data.train.shape[0]
    if {channels, like_shape[0]} - {1, 3} and channels != like_shape[0]:
        raise ValueError(
            f"the public images {name!r} have {channels} channels and the task has {like_shape[0]}; only gray (1) and "
            "colour (3) can be turned into each other"
        )
    parts = (data.train, data.test)
    images = torch.empty(sum(map(len, parts)), *like_shape, dtype=torch.uint8)
    largest = max(data.train.images[0].numel(), images[0].numel())
    chunk = max(1, _CHUNK_BYTES // (4 * largest))
    done = 0
    for part in parts:
        for some in torch.split(part.images, chunk):
            images[done : done + len(some)] = _converted(some, like_shape)
            done += len(some)
    if name != spec:
        return Records(images, torch.zeros(len(images), dtype=torch.int64), 1, normalisation)
    labels = torch.cat([part.labels for part in parts])
    return Records(images, labels, data.train.num_classes, normalisation)


def is_noise(spec: str) -> bool:
    """Whether public records are synthetic."""
    return spec.removesuffix(_UNLABELED).split("=")[0] == "noise"


def is_own(spec: str) -> bool:
    """Whether public records come from a file or folder here."""
    return held_out_count(spec) is None and places.is_own(spec.removesuffix(_UNLABELED))


def fingerprint(spec: str, size: int | None = None) -> str | None:
    """The digest of the data set of ``spec``; None for noise and for records of the task itself.

    Raises:
        ValueError: as `load`.
    """
    name = spec.removesuffix(_UNLABELED)
    if held_out_count(spec) is not None or is_noise(name):
        return None
    with _other_kinds(name):
        return sources.fingerprint(name, AS_IT_IS if name in KNOWN else Reading(size))


@contextmanager
def _other_kinds(name: str) -> Iterator[None]:
    """The message about an unknown data set with what else public data may be."""
    try:
        yield
    except places.UnknownData:
        raise places.UnknownData(name, ("noise", "noise=N", "held=N")) from None


def sample(records: Records) -> dict[str, Any]:
    """Facts that a server tells its sites of the public records (a `fedstill.engines.run_spec.PublicSample`).

    The number of records, the SHA-256 of all labels, checksums of up to `SAMPLED` records,
    evenly spaced, and one checksum of all.
    """
    count = min(len(records), SAMPLED)
    sums = _sums(records)
    some = [sums[i * len(records) // count] for i in range(count)]
    signs = torch.randint(2, (len(records),), generator=stream(0, "public order")).double() * 2 - 1
    labels = hashlib.sha256(records.labels.to(torch.int64).cpu().numpy().tobytes()).hexdigest()
    total = float(signs @ sums) / len(records) ** 0.5
    rounded = [float(f"{value:.6g}") for value in (*map(float, some), total)]
    return {"records": len(records), "labels": labels, "sums": rounded[:-1], "total": rounded[-1]}


def difference(records: Records, stated: Mapping[str, Any]) -> str | None:
    """Words on how ``records`` differ from those that a `sample` states; None if they do not.

    Sums may differ by 20 for images, which is five times what decoders of pictures that differ by 4 levels make of it,
    and by a hundredth of their root mean square for vectors. So the order of records is compared as a whole, but a few
    records between those of the sample may be others.
    """
    if len(records) != stated["records"]:
        return f"there are {len(records)} records, in the run {stated['records']}"
    own = sample(records)
    if own["labels"] != stated["labels"]:
        return "the labels differ"
    tolerance = 20.0
    if records.are_vectors:
        tolerance = 0.01 * float(records.images.double().square().mean()) ** 0.5
    rows = zip([*own["sums"], own["total"]], [*stated["sums"], stated["total"]], strict=True)
    apart = [abs(here - there) for here, there in rows]
    if not max(apart) <= tolerance:
        place = next(i for i, difference in enumerate(apart) if not difference <= tolerance)
        where = "their order" if place == len(own["sums"]) else f"record {place * len(records) // len(own['sums'])}"
        return f"{where} differs"
    return None


def _sums(records: Records) -> Float[Tensor, " n"]:
    """``sum_i r_i x_i / sqrt(d)`` of each record, with public random signs r and pixels from 0 to 255."""
    size = records.images[0].numel()
    signs = torch.randint(2, (size,), generator=stream(0, "public signs")).float() * 2 - 1
    chunk = max(1, _CHUNK_BYTES // (4 * size))
    parts = torch.split(records.images.flatten(1), chunk)
    sums: Tensor = torch.cat([part.float().cpu() @ signs for part in parts]).double() / size**0.5
    return sums


def _vectors(
    data: sources.DataSet, name: str, shape: tuple[int, ...], normalisation: Normalisation, *, labelled: bool
) -> Records:
    if data.train.shape != shape:
        theirs, ours = in_words(data.train.shape), in_words(shape)
        raise ValueError(
            f"the public records {name!r} are {theirs}, but the task's are {ours}; give some of that shape"
        )
    values = torch.cat([data.train.images, data.test.images])
    labels = torch.cat([data.train.labels, data.test.labels])
    if not labelled:
        return Records(values, torch.zeros_like(labels), 1, normalisation)
    return Records(values, labels, data.train.num_classes, normalisation)


def held_out_count(spec: str | None) -> int | None:
    """N of ``held=N``, the number of a simulation's training records that are public and no client's; else None.

    Raises:
        ValueError: N is no number from 1.
    """
    if spec is None or spec.split("=")[0] != "held":
        return None
    number = spec.partition("=")[2]
    if not number.isdecimal() or not int(number):
        raise ValueError(f"public data {spec!r} asks for {number!r} records; write held=N with N from 1")
    return int(number)


def _converted(images: UInt8[Tensor, "n c h w"], shape: tuple[int, ...]) -> UInt8[Tensor, "n c2 h2 w2"]:
    channels, *size = shape
    if images.shape[1] > channels:
        x = luminance(images.float())
    elif list(images.shape[2:]) == size:
        return images.expand(-1, channels, -1, -1)
    else:
        x = images.float()
    if list(x.shape[2:]) != size:
        x = interpolate(x, size=size, mode="bilinear", antialias=True)
    return x.round_().clamp_(0, 255).to(torch.uint8).expand(-1, channels, -1, -1)


def _noise(name: str, shape: tuple[int, ...], normalisation: Normalisation) -> Records:
    """Ellipses with a ragged edge, filled with smooth noise, on a dark or coloured ground, one in each image.

    Baradad et al. 2021 (arXiv:2106.05963) show that features can be learnt from structured noise.
    """
    _, equals, number = name.partition("=")
    if equals and not (number.isdecimal() and 0 < int(number) <= 10**6):
        raise ValueError(f"public data {name!r} asks for {number!r} images; write noise=N with N from 1 to 1000000")
    count = int(number) if equals else 10_000
    rng = stream(0, "public noise")
    if len(shape) == 1:
        mean, std = (torch.tensor(values, dtype=torch.float32) for values in (normalisation.mean, normalisation.std))
        vectors = mean + std * torch.randn(count, *shape, generator=rng)
        return Records(vectors, torch.zeros(count, dtype=torch.int64), 1, normalisation)
    channels, height, width = shape
    images = torch.empty(count, *shape, dtype=torch.uint8)
    y, x = (torch.linspace(-1, 1, n) for n in (height, width))
    pixel = max(height, width) / 28
    for start in range(0, count, 1000):
        n = len(images[start : start + 1000])
        half = torch.rand(2, n, 1, 1, 1, generator=rng) * 0.6 + 0.35  # of each axis
        edge = 0.6 * _smooth(torch.randn(n, 1, height, width, generator=rng), torch.full((n, 1, 1, 1), 4 * pixel))
        inside = ((y[:, None] / half[0]) ** 2 + (x / half[1]) ** 2 + edge < 1).float()
        scale = 2.0 ** torch.randint(3, (n, 1, 1, 1), generator=rng) * pixel
        texture = _smooth(torch.randn(n, channels, height, width, generator=rng), scale)
        level = torch.rand(n, channels, 1, 1, generator=rng) * 0.7 + 0.3
        strength = torch.rand(n, 1, 1, 1, generator=rng) * 0.3
        ground = torch.rand(n, channels, 1, 1, generator=rng) * (channels > 1)
        some = inside * (level + strength * texture) + (1 - inside) * ground
        images[start : start + n] = (some * 255).round().clamp(0, 255).to(torch.uint8)
    return Records(images, torch.zeros(count, dtype=torch.int64), 1, normalisation)


def _smooth(noise: Float[Tensor, "n c h w"], scale: Float[Tensor, "n 1 1 1"]) -> Float[Tensor, "n c h w"]:
    """Noise blurred by a Gaussian of 0.7 * ``scale`` pixels, to variance 1."""
    y, x = (torch.fft.fftfreq(n) for n in noise.shape[2:])
    low = torch.exp(-2 * (torch.pi * 0.7 * scale) ** 2 * (y[:, None] ** 2 + x[None, :] ** 2))
    field: Tensor = torch.fft.ifft2(torch.fft.fft2(noise) * low).real
    return field / field.flatten(1).std(1)[:, None, None, None].clamp_min(1e-6)
