"""--size: pictures of any size, depth and mode become 8-bit squares; checked against Pillow and plain arithmetic."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedstill.base.records import Normalisation
from fedstill.cli import main
from fedstill.data import pictures, sources
from fedstill.data.places import Reading
from fedstill.data.public import load as load_public

SIDES = {"wide": (90, 40), "tall": (31, 77), "square": (50, 50), "small": (9, 12)}


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9 + i) + np.cos(y / (5 + i)) for i in range(3)], -1)
    return Image.fromarray((127 + 50 * waves + rng.normal(0, 8, waves.shape)).clip(0, 255).astype(np.uint8))


def expected(image: Image.Image, size: int) -> np.ndarray[Any, Any]:
    """The centre square cut first, at fractions of pixels, then Pillow's filter."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    cut = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.asarray(cut).reshape(size, size, -1)


def folder(root: Path, images: dict[str, Image.Image], ending: str = "png") -> Path:
    for label in ("cat", "dog"):
        for name, image in images.items():
            place = root / "train" / label / f"{name}.{ending}"
            place.parent.mkdir(parents=True, exist_ok=True)
            image.save(place)
    return root


@pytest.mark.parametrize("shape", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("size", [1, 24, 64])
def test_a_picture_is_the_centre_square_by_pillow(shape: tuple[int, int], size: int) -> None:
    image = photograph(*shape)
    found = pictures.fitted(image, size, "it")
    assert found.shape == (size, size, 3)
    assert found.dtype == np.uint8
    assert np.array_equal(found, expected(image, size))


def test_one_pixel_is_the_mean_of_a_small_picture() -> None:
    image = photograph(16, 16)
    plain = pictures.fitted(image, 2, "it").astype(float).mean((0, 1))
    assert np.abs(plain - np.asarray(image).mean((0, 1))).max() < 3  # the filter overlaps the quarters


def test_sixteen_bits_are_divided_by_257_after_resizing() -> None:
    deep = (np.arange(40 * 40).reshape(40, 40) * 40).astype(np.uint16)
    found = pictures.fitted(Image.fromarray(deep), 40, "it")
    assert np.array_equal(found[:, :, 0], np.rint(deep / 257).astype(np.uint8))
    half = pictures.fitted(Image.fromarray(deep), 20, "it")[:, :, 0].astype(float)
    means = deep.reshape(20, 2, 20, 2).mean((1, 3)) / 257
    assert np.abs(half - means)[1:-1, 1:-1].max() <= 1
    stored = io.BytesIO()
    Image.fromarray(deep).save(stored, "PNG")
    assert np.array_equal(pictures.fitted(Image.open(stored), 40, "it"), found)


def deep_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG of 16 bits, ``(h, w, 1 to 4)``: gray, gray and alpha, RGB or RGBA, which Pillow does not write."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, (0, 4, 2, 6)[channels - 1], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def deep_tiff(pixels: np.ndarray[Any, Any]) -> bytes:
    """A little-endian TIFF of 16-bit RGB, ``(h, w, 3)``."""
    height, width, _ = pixels.shape
    data = pixels.astype("<u2").tobytes()
    bits = 8 + 2 + 12 * 9 + 4  # behind the header, the directory of nine entries and its end
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, bits), (259, 3, 1, 1), (262, 3, 1, 2)]
    entries += [(273, 4, 1, bits + 6), (277, 3, 1, 3), (278, 4, 1, height), (279, 4, 1, len(data))]
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    start = b"II*\0" + struct.pack("<IH", 8, len(entries))
    return start + directory + struct.pack("<IHHH", 0, 16, 16, 16) + data


def stored_in(place: Path, *pictures: bytes) -> str:
    """A parquet file of these pictures, with classes in turn."""
    labels = [i % 2 for i in range(len(pictures))]
    pq.write_table(pa.table({"image": list(pictures), "label": labels}), place / "pictures.parquet")
    return str(place / "pictures.parquet")


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("channels", [2, 3, 4, "tiff"])
def test_sixteen_bits_in_colour_or_with_transparency_are_refused(tmp_path, channels, size) -> None:
    pixels = np.random.default_rng(0).integers(0, 1 << 12, (8, 8, 3 if channels == "tiff" else channels))
    picture = deep_tiff(pixels) if channels == "tiff" else deep_png(pixels)
    assert Image.open(io.BytesIO(picture)).mode in ("LA", "RGB", "RGBA")
    place = stored_in(tmp_path, *[picture] * 4)
    with pytest.raises(ValueError, match="image 0 of .* has 16 bits a channel, of which 8 .* convert the images to 8"):
        sources.load(place, Reading(size), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("size", [None, 8])
def test_a_tiff_of_several_pages_is_refused(tmp_path: Path, size: int | None) -> None:
    pages, stored = [photograph(8, 8, seed) for seed in range(3)], io.BytesIO()
    pages[0].save(stored, "TIFF", save_all=True, append_images=pages[1:])
    place = stored_in(tmp_path, *[stored.getvalue()] * 4)
    with pytest.raises(ValueError, match="image 0 of .* has 3 pages, but a record is one picture; save each of them"):
        sources.load(place, Reading(size), cache_dir=tmp_path / "cache")
    pages[0].save(single := io.BytesIO(), "TIFF")
    place = stored_in(tmp_path, *[single.getvalue()] * 10)
    pixels = sources.load(place, Reading(size), cache_dir=tmp_path / "cache").train.images[0]
    assert np.array_equal(pixels.permute(1, 2, 0), np.asarray(pages[0]))


def test_gray_pictures_of_sixteen_bits_need_a_size(tmp_path: Path) -> None:
    place = stored_in(tmp_path, *[deep_png(np.full((8, 8, 1), 257 * 40))] * 10)
    with pytest.raises(ValueError, match="has the pixel mode I;16, but records are 8-bit gray or RGB; give --size N"):
        sources.load(place, cache_dir=tmp_path / "cache")
    assert (sources.load(place, Reading(8), cache_dir=tmp_path / "cache").train.images == 40).all()


def test_real_valued_pixels_are_refused_without_the_advice_of_a_size(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.float32)).save(stored := io.BytesIO(), "TIFF")
    place = stored_in(tmp_path, *[stored.getvalue()] * 4)
    with pytest.raises(ValueError, match="real-valued pixels, but records are 8-bit gray or RGB; save it with 8 bits$"):
        sources.load(place, cache_dir=tmp_path / "cache")


def test_what_has_no_known_range_is_refused() -> None:
    with pytest.raises(ValueError, match="^it has real-valued pixels"):
        pictures.fitted(Image.fromarray(np.zeros((4, 4), np.float32)), 2, "it")
    with pytest.raises(ValueError, match="values from 0 to 70000, but 16 bits go from 0 to 65535"):
        pictures.fitted(Image.fromarray(np.array([[0, 70000]], np.int32)), 2, "it")


def test_transparent_pixels_show_white_and_opaque_ones_themselves() -> None:
    pixels = np.zeros((10, 10, 4), np.uint8)
    pixels[:, 5:] = (200, 100, 0, 255)
    found = pictures.fitted(Image.fromarray(pixels), 10, "it")
    assert (found[:, :5] == 255).all()
    assert (found[:, 5:] == (200, 100, 0)).all()
    half = Image.fromarray(np.full((4, 4, 4), (100, 100, 100, 128), np.uint8))
    assert np.abs(pictures.fitted(half, 4, "it").astype(int) - (100 * 128 + 255 * 127) / 255).max() <= 1
    gray = Image.fromarray(np.stack([np.full((4, 4), 10), np.zeros((4, 4))], -1).astype(np.uint8), "LA")
    assert pictures.fitted(gray, 4, "it").shape == (4, 4, 1)
    assert (pictures.fitted(gray, 4, "it") == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV"])
def test_every_mode_is_gray_or_rgb(mode: str) -> None:
    found = pictures.fitted(photograph(30, 20).convert(mode), 8, "it")
    assert found.shape == (8, 8, 1 if mode in ("1", "L") else 3)


def test_a_photograph_stands_as_its_camera_says() -> None:
    image = photograph(40, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    stored = io.BytesIO()
    image.save(stored, "PNG", exif=exif)
    assert np.array_equal(pictures.fitted(Image.open(stored), 20, "it"), np.rot90(pictures.fitted(image, 20, "it"), -1))


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_folder_of_unequal_photographs_is_read_with_a_size_only(tmp_path: Path, ending: str) -> None:
    images = {name: photograph(*sides, seed=i) for i, (name, sides) in enumerate(SIDES.items())}
    root = folder(tmp_path / "photos", {**images, "again": images["wide"], "more": images["tall"]}, ending)
    with pytest.raises(ValueError, match="but the first image has .*; give --size N to crop and resize all to N x N"):
        sources.load(str(root), cache_dir=tmp_path / "cache")
    data = sources.load(str(root), Reading(32), cache_dir=tmp_path / "cache")
    assert data.train.shape == (3, 32, 32)
    found = {bytes(image.numpy()) for image in (*data.train.images, *data.test.images)}
    for name in images:
        stored = Image.open(root / "train" / "cat" / f"{name}.{ending}")
        assert bytes(np.ascontiguousarray(expected(stored, 32).transpose(2, 0, 1))) in found


def test_each_size_is_decoded_once_and_always_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = folder(tmp_path / "photos", {str(i): photograph(20 + i, 30, i) for i in range(5)}), tmp_path / "cache"
    first = {size: sources.load(str(root), Reading(size), cache_dir=cache) for size in (8, 16)}
    monkeypatch.setattr(pictures, "fitted", None)  # a second decoding would fail
    for size, data in first.items():
        again = sources.load(str(root), Reading(size), cache_dir=cache)
        assert again.fingerprint == data.fingerprint
        assert torch.equal(again.train.images, data.train.images)
    monkeypatch.undo()
    anew = sources.load(str(root), Reading(8), cache_dir=tmp_path / "other")
    assert anew.fingerprint == first[8].fingerprint
    assert anew.fingerprint != first[16].fingerprint


def test_arrays_are_resized_too_and_a_size_of_their_own_changes_nothing(tmp_path: Path) -> None:
    plain = sources.load("digits", cache_dir=tmp_path)
    assert torch.equal(sources.load("digits", Reading(8), cache_dir=tmp_path).train.images, plain.train.images)
    data = sources.load("digits", Reading(5), cache_dir=tmp_path)
    assert data.train.shape == (1, 5, 5)
    image = Image.fromarray(plain.train.images[3, 0].numpy())
    assert np.array_equal(data.train.images[3, 0].numpy(), expected(image, 5)[:, :, 0])


@pytest.mark.parametrize("size", [0, -1, 4097])
def test_a_size_out_of_range_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--size is {size}; it must be from 1 to 4096 pixels"):
        sources.load("digits", Reading(size), cache_dir=tmp_path)


def test_sites_and_public_pictures_are_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    root = folder(tmp_path / "photos", {str(i): photograph(20 + i, 30, i) for i in range(5)})
    part = sources.load_part(str(root), Reading(12), cache_dir=tmp_path / "site")
    assert part.train[0].shape == (10, 3, 12, 12)
    public = load_public(f"{root}:unlabeled", (1, 12, 12), Normalisation((0.5,), (0.5,)), size=12)
    assert public.shape == (1, 12, 12)


@pytest.mark.slow
def test_a_run_on_unequal_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    root = folder(tmp_path / "photos", {str(i): photograph(20 + i, 30, i) for i in range(8)})
    words = f"run fedavg --data {root} --size 16 --clients 2 --rounds 1 --model convnet:width=8,depth=2 --quiet"
    with pytest.raises(SystemExit) as error:
        main([*words.replace("--size 16 ", "").split(), "--out", str(tmp_path / "none")])
    assert error.value.code == 2
    for workers in ("0", "2"):
        main([*words.split(), "--workers", workers, "--out", str(tmp_path / workers)])
    weights = [(tmp_path / workers / "model.safetensors").read_bytes() for workers in ("0", "2")]
    assert weights[0] == weights[1]
