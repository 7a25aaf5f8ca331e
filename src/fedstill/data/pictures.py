"""Pictures as a person sees them: one upright frame of a file, of the kinds that Pillow and installed extras read."""

import io
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

Fit = Callable[["Image", str], NDArray[np.uint8]]
"""A function of a picture and of words for it, which returns its pixels ``(height, width, 1 or 3)``."""
_ONE = ("MPO", "PSD", "ICO", "ICNS")
"""Formats whose further frames are the same picture: of the other eye, its layers, or its other sizes."""
_NOTES = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}
"""Where a picture may have that tag."""
_ORIENTATION = 0x0112
"""The EXIF tag that says how a picture is turned."""


@lru_cache
def endings() -> frozenset[str]:
    """The endings, in small letters, of the images that Pillow reads here; of HEIC too, if pillow-heif is installed."""
    from PIL import Image

    if find_spec("pillow_heif"):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return frozenset(e for e, kind in Image.registered_extensions().items() if kind in Image.OPEN) | {".mpo"}


def ending(file: Path) -> str:
    """A file's ending in small letters; none where it is a number, as in the names of DICOM files (1.2.840.113)."""
    return "" if file.suffix[1:].isdigit() else file.suffix.lower()


@lru_cache
def reads_dicom() -> bool:
    """Whether pydicom is installed."""
    return find_spec("pydicom") is not None


def is_dicom(file: Path) -> bool:
    """Whether a file has the mark of DICOM after its preamble of 128 bytes."""
    try:
        with file.open("rb") as content:
            return content.read(132)[128:] == b"DICM"
    except OSError:
        return False


def opened(source: bytes | Path, name: str) -> "Image":
    """One picture, upright, loaded and closed.

    Args:
        source: the file, or its content.
        name: words for the picture, for error messages.

    Raises:
        ValueError: it cannot be read, has several frames, or has colours of more than 8 bits.
    """
    from PIL import Image, ImageOps

    if isinstance(source, Path) and ending(source) not in endings() and is_dicom(source):
        return dicom(source, name)
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        bits = _depth(image)
        frames = 1 if image.format in _ONE else getattr(image, "n_frames", 1)
        is_negative = image.format == "TIFF" and image.mode.startswith("I;16") and _is_white_zero(image)
        image.load()  # and closes the file
    except Exception as error:  # Pillow's parsers raise many kinds of errors on damaged files
        raise ValueError(f"{name} cannot be read ({error}); export it again or drop the record") from error
    if frames > 1:
        what = "pages" if image.format == "TIFF" else "frames"
        raise ValueError(
            f"{name} has {frames} {what}, but a record is one picture; save each of them, or the one that counts, as a "
            "file of its own"
        )
    if bits > 8 and not image.mode.startswith(("I", "F")):
        raise ValueError(
            f"{name} has {bits} bits a channel, of which 8 at most can be read in colour or with transparency; "
            "convert the images to 8 bits first"
        )
    upright: Image.Image = ImageOps.exif_transpose(image) if _is_turned(image) else image
    if is_negative:  # Pillow inverts those of 8 bits alone
        return Image.fromarray(65535 - np.asarray(upright).astype(np.uint16))
    return upright


def _is_white_zero(image: Any) -> bool:
    """Whether the least values of a TIFF file are white."""
    from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION

    return bool(image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0)


def _is_turned(image: "ImageFile") -> bool:
    """Whether the picture is stored turned or mirrored; a damaged tag turns nothing, as in viewers of pictures."""
    if image.format != "TIFF" and not _NOTES & image.info.keys():  # most pictures have no notes: they are read faster
        return False
    try:
        return bool(image.getexif().get(_ORIENTATION, 1) != 1)
    except Exception:  # Pillow's parser of EXIF raises many kinds of errors
        return False


def _depth(image: "ImageFile") -> int:
    """Bits of a channel in an open PNG or TIFF file, of which Pillow drops all but 8 in most modes; 8 for others."""
    from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(BITSPERSAMPLE, 1)
        return max(bits) if isinstance(bits, tuple) else int(bits)
    if image.format != "PNG" or image.fp is None:
        return 8
    place = image.fp.tell()
    image.fp.seek(24)  # in the header IHDR
    (bits,) = image.fp.read(1)
    image.fp.seek(place)
    return bits


def exact(image: "Image", name: str, *, is_file: bool = True) -> NDArray[np.uint8]:
    """Pixels ``(height, width, 1 or 3)`` with exactly the file's colours; of an object, no ``--size`` is advised."""
    gray = image.mode in ("1", "L", "LA")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            raise ValueError(
                f"{name} has transparent pixels, but records are opaque; "
                + ("give --size N, which lays it over white, or " if is_file else "")
                + "lay it over a colour first"
            )
    elif image.mode == "F":
        raise ValueError(f"{name} has real-valued pixels, but records are 8-bit gray or RGB; save it with 8 bits")
    elif image.mode not in ("1", "L", "P", "RGB"):
        raise ValueError(
            f"{name} has the pixel mode {image.mode}, but records are 8-bit gray or RGB; "
            + ("give --size N, which converts it, or " if is_file else "")
            + "convert the images first"
        )
    pixels = np.asarray(image.convert("L" if gray else "RGB"))
    return pixels.reshape(*pixels.shape[:2], -1)


def with_channels(pixels: NDArray[np.uint8], channels: int, name: str) -> NDArray[np.uint8]:
    """Gray pixels as RGB, or RGB pixels as gray if that loses nothing."""
    if pixels.shape[2] == channels:
        return pixels
    if pixels.shape[2] == 1:
        return np.broadcast_to(pixels, (*pixels.shape[:2], channels))
    if (pixels == pixels[:, :, :1]).all():
        return pixels[:, :, :1]
    raise ValueError(f"{name} is in colour, but the first image is gray; convert all images to one of the two")


_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow's modes of gray pictures of 16 bits."""
_GRAY = ("1", "L", "LA", "La", *_DEEP)


def fitted(image: "Image", size: int, name: str) -> NDArray[np.uint8]:
    """Pixels ``(size, size, 1 or 3)`` of the largest centred square of a picture.

    The picture is turned as its EXIF tag says and laid over white where it is transparent; 16 bits become 8 by division
    by 257, after resizing; other modes than gray become RGB. Sizes change by Pillow's bilinear filter, which averages
    over all pixels that a smaller one covers.

    Args:
        image: a decoded picture.
        size: height and width of the result.
        name: words for the picture, for error messages.

    Raises:
        ValueError: the picture has real-valued pixels, values of more than 16 bits, or of 8 bits in 32.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    gray = image.mode in _GRAY
    if image.mode in _DEEP:
        wide = np.asarray(image).astype(np.float32)
        if wide.min() < 0 or wide.max() > 65535:
            raise ValueError(
                f"{name} has values from {wide.min():.0f} to {wide.max():.0f}, but 16 bits go from 0 to 65535; save it "
                "with 16 or 8 bits"
            )
        if image.mode == "I" and 0 < wide.max() < 256:
            raise ValueError(
                f"{name} has 32 bits a pixel and values up to {wide.max():.0f}, which may be meant as 8 bits or as 16; "
                "save it with these"
            )
        image = Image.fromarray(wide)
    elif image.mode == "F":
        raise ValueError(f"{name} has real-valued pixels, whose range is not known; save it with 8 or 16 bits")
    elif image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("L" if gray else "RGB")
    else:
        image = image.convert("L" if gray else "RGB")
    square = ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)
    pixels = np.asarray(square)
    if pixels.dtype != np.uint8:
        pixels = (pixels / 257).round().clip(0, 255).astype(np.uint8)
    return pixels.reshape(size, size, -1)


# DICOM ---------------------------------------------------------------------------------------------------------------


def dicom(file: Path, name: str) -> "Image":
    """A gray picture of 8 bits from a DICOM file, as its window shows it.

    Stored values become those of the modality (slope and intercept, or a table). The file's first window, or else its
    first table of values of interest, maps them to 0..255 (DICOM PS3.3, C.11.2.1); without both, their least and
    largest value do. MONOCHROME1 is inverted.

    Raises:
        ValueError: the file has no image, several frames, or colours.
    """
    from PIL import Image
    from pydicom import dcmread
    from pydicom.pixels.processing import apply_modality_lut

    try:
        data = dcmread(file)
        frames = int(data.get("NumberOfFrames", 1) or 1)
        kind = str(data.get("PhotometricInterpretation", ""))
        empty = [name for name in ("RescaleSlope", "RescaleIntercept") if name in data and data[name].is_empty]
        if len(empty) == 1:
            raise ValueError(f"its {empty[0]} is empty")
        for name in empty:
            del data[name]
        shares = _windowed(data, np.asarray(apply_modality_lut(data.pixel_array, data)))
    except Exception as error:  # pydicom and its decoders raise many kinds of errors
        raise ValueError(f"{name} cannot be read ({error}); export it as PNG or drop the record") from error
    if frames != 1 or shares.ndim != 2 or not kind.startswith("MONOCHROME"):
        what = f"{frames} frames" if frames != 1 else f"the colours {kind}"
        raise ValueError(f"{name} has {what}, but a DICOM record is one gray picture; export it as PNG")
    if kind == "MONOCHROME1":
        shares = 1 - shares
    return Image.fromarray((shares * 255).round().astype(np.uint8))


def _windowed(data: Any, values: NDArray[Any]) -> NDArray[np.float64]:
    """Brightness in [0, 1] of each value."""
    from pydicom.multival import MultiValue
    from pydicom.pixels.processing import apply_voi_lut

    if all(data.get(name) not in (None, "") for name in ("WindowWidth", "WindowCenter")):  # an empty one is None
        centre, width = (
            float(value[0] if isinstance(value, MultiValue) else value)
            for value in (data.WindowCenter, data.WindowWidth)
        )
        function = str(data.get("VOILUTFunction", "LINEAR") or "LINEAR")
        if function == "SIGMOID":
            return np.asarray(1 / (1 + np.exp(-4 * (values - centre) / width)), np.float64)
        if function == "LINEAR":
            centre, width = centre - 0.5, width - 1
        low, high = centre - width / 2, centre + width / 2
    elif "VOILUTSequence" in data:
        values = np.asarray(apply_voi_lut(values, data))
        low, high = 0.0, 2.0 ** int(data.VOILUTSequence[0].LUTDescriptor[2]) - 1
    else:
        low, high = float(values.min()), float(values.max())
    return np.clip((values.astype(np.float64) - low) / max(high - low, 1e-12), 0, 1)


def patient(file: Path) -> str | None:
    """The patient's id in a DICOM file's header; None if it has none."""
    from pydicom import dcmread

    found = dcmread(file, stop_before_pixels=True, specific_tags=["PatientID"]).get("PatientID")
    return str(found) if found else None
