"""Folders of images as tables: class folders, splits, files of metadata, and a folder for each client.

The layouts are those of ``datasets``' ``imagefolder``, which tests compare. That reader asks a server on the internet
about every folder, drops the class folders where there is a ``metadata.csv``, ignores one beside the splits, and pools
the folders of several clients without a word.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstill.base.lookup import nfc
from fedstill.data import pictures
from fedstill.data.csv_files import read_csv
from fedstill.data.walk import Walk, check_pictures, places

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "folder"
"""Column of the folders above the class folders, such as hospitals."""
PATIENT = "patient"
"""Column of the patient's id in DICOM files."""


class _Image(NamedTuple):
    """An image: its path, its split (empty if there are none), and the other folders on the way to it."""

    file: Path
    split: str
    folders: tuple[str, ...]


def read(found: Walk, label: Sequence[str], *, stated: bool = False) -> dict[str, "pa.Table"]:
    """A table of image paths (relative to the folder), classes and other columns for each split.

    The last folder of an image is its class, unless its metadata have one of the columns ``label``. The folders above,
    if they differ, are the column ``folder``. DICOM files have the column ``patient``. Records are in the order of the
    metadata, or else of their paths.

    Args:
        found: what lies below the folder.
        label: possible names of the column of classes in the metadata, best first.
        stated: whether the user named it, so that the folders are no classes.

    Raises:
        ValueError: some images are outside of the splits or have no class, or metadata are not readable or do not list
            exactly these images.
    """
    root, rows = found.root, _metadata(found)
    columns = {name: None for row in rows.values() for name in row}
    of_label = next((name for name in label if name in columns), None)
    if stated and of_label is None:
        raise ValueError(
            f"--label-column is {label[0]!r}, but the metadata in {str(root)!r} have the columns "
            f"{', '.join(columns) or 'none'}; name one of them, or leave it out if the folders are the classes"
        )
    images = _images(found, classes=of_label is None)
    if rows:
        images = _listed(images, rows, root)
    values: dict[str, list[Any]] = {name: [rows[image.file][name] for image in images] for name in columns}
    if of_label is None:
        values[label[0]] = [nfc(name) for name in _last_folders(images, root)]
    above = [nfc("/".join(image.folders if of_label else image.folders[:-1])) for image in images]
    if len(set(above)) > 1:
        values.setdefault(FOLDER, above)
    if patients := _patients(images, root):
        values.setdefault(PATIENT, patients)
    table = _table(values, images, root)
    if of_label and (names := _names(values[of_label], images)):
        features = {of_label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    splits = list(dict.fromkeys(image.split for image in images))
    return {
        split or "train": table.take([i for i, image in enumerate(images) if image.split == split]) for split in splits
    }


def _table(values: dict[str, list[Any]], images: list[_Image], root: Path) -> "pa.Table":
    import pyarrow as pa

    arrays = {}
    for name, column in values.items():
        try:
            arrays[name] = pa.array(column)
        except (pa.ArrowException, OverflowError) as error:
            raise ValueError(
                f"column {name!r} of the metadata in {str(root)!r} mixes kinds of values ({error}); write all as text "
                "or all as numbers"
            ) from error
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    arrays["image"] = pa.array([{"bytes": None, "path": str(image.file)} for image in images], kind)
    return pa.table(arrays)


def _patients(images: list[_Image], root: Path) -> list[str | None]:
    """The patient of each DICOM file, and None for others; nothing, if no image has one."""
    others = [pictures.ending(image.file) in pictures.endings() for image in images]
    if all(others):
        return []
    found = [None if other else pictures.patient(root / i.file) for other, i in zip(others, images, strict=True)]
    return found if any(found) else []


def _images(found: Walk, *, classes: bool) -> list[_Image]:
    """The images and their places; ``classes`` tells whether the last folder of each is its class."""
    check_pictures(found)
    placed = places(found.pictures, found.root, classes=classes)
    images = [_Image(file, place.split, place.folders) for file, place in zip(found.pictures, placed, strict=True)]
    splits = {image.split for image in images}
    if len(splits) > 1 and "" in splits:
        stray = next(image.file for image in images if not image.split)
        raise ValueError(
            f"the image {str(stray)!r} of {str(found.root)!r} is in none of the splits "
            f"({', '.join(sorted(splits - {''}))}) that other images are in; move it to a split's folder or delete it, "
            "and put a class with the name of a split into a split's folder, as train/train/<image>"
        )
    return images


def _metadata(found: Walk) -> dict[Path, dict[str, Any]]:
    """The columns of each image that some file of metadata lists, by its path in the folder; all have the same."""
    rows: dict[Path, dict[str, Any]] = {}
    root, on_disk = found.root, {nfc(str(file)): file for file in found.pictures}
    for file in found.metadata:
        for number, row in enumerate(_rows(root / file)):
            name = next((n for n in row if n == "file_name" or n.endswith("_file_name")), None)
            if name is None:
                raise ValueError(
                    f"{str(root / file)!r} has the columns {', '.join(row)}, but none is 'file_name'; add it, with "
                    "paths relative to this file"
                )
            image = Path(*(file.parent / str(row.pop(name)).replace("\\", "/")).parts)
            image = on_disk.get(nfc(str(image)), image)
            if image in rows:
                raise ValueError(f"the metadata in {str(root)!r} list {str(image)!r} twice; keep one of its rows")
            if rows and (differing := row.keys() ^ next(iter(rows.values())).keys()):
                raise ValueError(
                    f"row {number} of {str(root / file)!r} and the first one of all metadata differ in the column "
                    f"{min(differing)!r}; give all files of metadata the same columns"
                )
            rows[image] = row
    return rows


def _rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of metadata; a value is None, an integer, a float or a text."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if file.suffix.lower() == ".jsonl":
            lines = [json.loads(line) for line in file.read_text("utf-8-sig").split("\n") if line.strip()]
            if not all(isinstance(line, dict) for line in lines):
                raise ValueError("a line is not an object")
            columns = {name: None for line in lines for name in line}
            table = [{name: line.get(name) for name in columns} for line in lines]
        elif file.suffix.lower() == ".csv":
            read = read_csv(file, as_text=True, fewest=1)
            typed = {name: _typed(read[name].to_pylist()) for name in read.column_names}
            table = [dict(zip(typed, row, strict=True)) for row in zip(*typed.values(), strict=True)]
        else:
            table = parquet.read_table(file, partitioning=None).to_pylist()
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the metadata {str(file)!r} cannot be read ({why}); correct the file") from error
    return [{name: _plain(value) for name, value in row.items()} for row in table]


def _typed(texts: list[str | None]) -> list[Any]:
    """The values of a CSV file's column: integers, numbers or texts; an empty cell is None.

    Only what is written as an integer is one: ``001`` and ``1e3`` are texts, as they may be somebody's number.
    """
    some = [text for text in texts if text]
    if some and all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text) for text in some):
        return [int(text) if text else None for text in texts]
    if some and all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in some) and any("." in text for text in some):
        return [float(text) if text else None for text in texts]
    return [text or None for text in texts]


def _plain(value: Any) -> Any:
    return value if value is None or type(value) in (int, float, str) else str(value)


def _listed(images: list[_Image], rows: dict[Path, dict[str, Any]], root: Path) -> list[_Image]:
    """The images in the order of the metadata, which list each of them."""
    by_path = {image.file: image for image in images}
    for listed in rows:
        if listed not in by_path:
            raise ValueError(f"the metadata in {str(root)!r} list {str(listed)!r}, which is no image there; correct it")
    for file in by_path:
        if file not in rows:
            raise ValueError(
                f"the image {str(file)!r} of {str(root)!r} has no row in the metadata; if one image has a row, all "
                "need one, in one file at the top or one for train and one for test"
            )
    return [by_path[file] for file in rows]


def _last_folders(images: list[_Image], root: Path) -> list[str]:
    """The class folder of each image."""
    first = images[0]
    for image in images:
        if not image.folders:
            raise ValueError(
                f"the image {str(image.file)!r} of {str(root)!r} has no class; move it to a folder with the class's "
                "name, or add a metadata.csv with the columns file_name and label"
            )
        if len(image.folders) != len(first.folders):
            raise ValueError(
                f"the images {str(first.file)!r} and {str(image.file)!r} of {str(root)!r} lie {len(first.folders)} and "
                f"{len(image.folders)} folders deep, but each image's last folder is its class; move them to one "
                "depth, as train/<class>/<image>"
            )
    return [image.folders[-1] for image in images]


def _names(classes: list[Any], images: list[_Image]) -> tuple[str, ...]:
    """The class folders' names by number, if classes 0 .. C-1 and last folders correspond; else none."""
    pairs = {(number, image.folders[-1:]) for number, image in zip(classes, images, strict=True)}
    folders = {folder[0] for _, folder in pairs if folder}
    if not len(pairs) == len(folders) == len({number for number, _ in pairs}):
        return ()
    if {number for number, _ in pairs} != set(range(len(pairs))):
        return ()
    return tuple(folder[0] for _, folder in sorted(pairs))
