"""Pictures as a person sees them: upright, one frame, of every kind that can be read."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedstill.data import load, pictures
from fedstill.data.places import Reading

UPRIGHT = np.zeros((6, 8, 3), np.uint8)
UPRIGHT[:3] = 250
UPRIGHT[:, :2, 0] = 90
TURNS = {  # EXIF tag -> how a camera stored what a person saw
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: np.rot90(a, 1)[:, ::-1].transpose(1, 0, 2)[::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


def stored(tag: int, format: str = "PNG") -> bytes:
    exif, content = Image.Exif(), io.BytesIO()
    exif[0x0112] = tag
    turned = {5: UPRIGHT.transpose(1, 0, 2), 7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2)}.get(tag)
    pixels = TURNS[tag](UPRIGHT) if turned is None else turned
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, format, exif=exif)
    return content.getvalue()


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("tag", TURNS)
def test_pictures_are_turned_by_their_tag(tag: int, format: str) -> None:
    content = stored(tag, format)
    if format == "WEBP":
        found = np.asarray(pictures.opened(content, "it"), np.int16)
        assert found.shape == UPRIGHT.shape
        return
    assert np.array_equal(np.asarray(pictures.opened(content, "it")), UPRIGHT)


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("format", ["jpg", "tif", "png"])
def test_a_folder_has_the_same_pixels_with_and_without_a_size(format: str, size: int | None, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(12):
        pixels = rng.integers(0, 60, (16, 16, 3)).astype(np.uint8)
        pixels[:8] += 120
        exif, image = Image.Exif(), Image.fromarray(pixels)
        if i % 2:
            image, exif[0x0112] = image.rotate(180), 3
        place = tmp_path / "photos" / "ab"[i % 3 > 0] / f"{i}.{format}"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place, exif=exif)
    data = load(str(tmp_path / "photos"), Reading(size), cache_dir=tmp_path / "cache")
    assert (data.train.images[:, :, :8].float().mean((1, 2, 3)) > 100).all()


def test_a_damaged_tag_turns_nothing() -> None:
    jpeg = stored(3, "JPEG")
    start = jpeg.index(b"Exif\0\0") + 6
    damaged = jpeg[:start] + b"\xff" * 8 + jpeg[start + 8 :]
    found = np.asarray(pictures.opened(damaged, "it"), int)
    assert 3 * np.abs(found - UPRIGHT[::-1, ::-1]).mean() < np.abs(found - UPRIGHT).mean()


@pytest.mark.parametrize("format", ["GIF", "TIFF", "WEBP", "PNG"])
def test_several_frames_are_refused(format: str) -> None:
    frames = [Image.fromarray(np.full((6, 6, 3), 60 * i, np.uint8)) for i in range(4)]
    content = io.BytesIO()
    frames[0].save(content, format, save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="it has 4 (frames|pages), but a record is one picture; save each of them"):
        pictures.opened(content.getvalue(), "it")


def test_the_second_picture_of_a_stereo_photograph_may_pass() -> None:
    content, pixels = io.BytesIO(), np.full((8, 8, 3), 100, np.uint8)
    Image.fromarray(pixels).save(content, "MPO", save_all=True, append_images=[Image.fromarray(pixels // 2)])
    assert np.abs(np.asarray(pictures.opened(content.getvalue(), "it"), int) - 100).max() <= 2


def test_heic_is_read_where_its_package_is(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    pixels = np.full((16, 16, 3), 90, np.uint8)
    pixels[:8] = 200
    for i, name in enumerate(("cat", "dog")):
        (tmp_path / "own" / name).mkdir(parents=True)
        for k in range(6):
            image = heif.from_bytes(mode="RGB", size=(16, 16), data=(pixels + i + k).astype(np.uint8).tobytes())
            image.save(tmp_path / "own" / name / f"{k}.HEIC", quality=95)
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert len(data.train) + len(data.test) == 12
    assert (data.train.images[:, :, :7].float().mean((1, 2, 3)) > 150).all()


def test_heic_is_named_where_its_package_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = pictures.endings() - {".heic", ".heif", ".hif", ".heics", ".heifs"}
    monkeypatch.setattr(pictures, "endings", lambda: usual)
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.HEIC"):
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(UPRIGHT).save(tmp_path / "own" / name, "PNG")
    with pytest.raises(
        ValueError, match=r"dog' has 1 file \(.heic 1\) that cannot .*; pip install .*pictures.* to read HEIC, convert"
    ):
        load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")


# DICOM ---------------------------------------------------------------------------------------------------------------


def dicom(file: Path, values: np.ndarray, patient: str = "p1", **tags: object) -> None:
    pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    data.PatientID, data.Rows, data.Columns = patient, values.shape[-2], values.shape[-1]
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 12, 11, 0
    data.PixelData = values.astype("<u2").tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    file.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(file, enforce_file_format=True)


RAMP = np.arange(0, 4096, 64).reshape(8, 8)


@pytest.mark.parametrize(
    "tags",
    [
        {"WindowCenter": 1000, "WindowWidth": 800},
        {"WindowCenter": [40, 600], "WindowWidth": [400, 1500], "RescaleSlope": 1, "RescaleIntercept": -1024},
        {"WindowCenter": 1000, "WindowWidth": 800, "VOILUTFunction": "LINEAR_EXACT"},
        {"WindowCenter": 1000, "WindowWidth": 800, "VOILUTFunction": "SIGMOID"},
        {"WindowCenter": 1000, "WindowWidth": 800, "PhotometricInterpretation": "MONOCHROME1"},
    ],
)
def test_dicom_is_windowed_as_pydicom_does(tags: dict[str, object], tmp_path: Path) -> None:
    dicom(tmp_path / "x.dcm", RAMP, **tags)
    from pydicom import dcmread
    from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut

    data = dcmread(tmp_path / "x.dcm")
    theirs = apply_voi_lut(apply_modality_lut(data.pixel_array, data), data).astype(float)
    slope, intercept = float(tags.get("RescaleSlope", 1)), float(tags.get("RescaleIntercept", 0))  # type: ignore[arg-type]
    shares = (theirs - intercept) / (4095 * slope)  # they map to the range of the stored bits
    shares = 1 - shares if "PhotometricInterpretation" in tags else shares
    found = np.asarray(pictures.opened(tmp_path / "x.dcm", "it"), float)
    assert np.abs(found - 255 * shares).max() <= 1.0


def test_dicom_without_a_window_has_its_own_range(tmp_path: Path) -> None:
    dicom(tmp_path / "1.2.840.113", RAMP)
    found = np.asarray(pictures.opened(tmp_path / "1.2.840.113", "it"))
    assert found.min() == 0 and found.max() == 255 and found.dtype == np.uint8


@pytest.mark.parametrize(
    ("values", "tags", "message"),
    [
        (np.stack([RAMP, RAMP]), {"NumberOfFrames": 2}, "has 2 frames, but a DICOM record is one gray picture"),
        (RAMP, {"PixelData": b"\0"}, "cannot be read"),
    ],
)
def test_dicom_that_is_no_gray_picture_is_refused(
    values: np.ndarray, tags: dict[str, object], message: str, tmp_path: Path
) -> None:
    dicom(tmp_path / "x.dcm", values, **tags)
    with pytest.raises(ValueError, match=message):
        pictures.opened(tmp_path / "x.dcm", "it")


def test_a_patient_of_dicom_files_is_on_one_side(tmp_path: Path) -> None:
    for patient in range(10):
        for i in range(3):
            name = f"{patient}.{i}" if i else f"{patient}.dcm"
            dicom(tmp_path / "own" / "ab"[patient % 2] / name, RAMP // (1 + patient) + i, f"p{patient}")
    data = load(str(tmp_path / "own"), cache_dir=tmp_path / "cache")
    assert data.group == "patient" and len(data.train) + len(data.test) == 30
    assert len(data.test) % 3 == 0 and len(np.unique(data.columns["patient"])) == len(data.train) // 3
