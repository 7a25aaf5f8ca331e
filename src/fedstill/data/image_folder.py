"""Folders of images as tables: class folders, splits, files of metadata, and a folder for each client.

The layouts are those of ``datasets``' ``imagefolder``, which tests compare. That reader asks a server on the internet
about every folder, drops the class folders where there is a ``metadata.csv``, ignores one beside the splits, and pools
the folders of several clients without a word.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstill.base.files import is_utf8

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Name of a split's folder -> the split."""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of the files that add columns."""
FOLDER = "folder"
"""Column of the folders above the class folders, such as hospitals."""


class _Image(NamedTuple):
    """An image: its path, its split (empty if there are none), and the other folders on the way to it."""

    file: Path
    split: str
    folders: tuple[str, ...]


def read(root: Path, label: Sequence[str]) -> dict[str, "pa.Table"]:
    """A table of image paths (relative to ``root``), classes and other columns for each split.

    The last folder of an image is its class, unless its metadata have one of the columns ``label``. The folders above,
    if they differ, are the column ``folder``. Records are in the order of the metadata, or else of their paths.

    Raises:
        ValueError: there are no images, some are outside of the splits or have no class, or metadata are not readable
            or do not list exactly these images.
    """
    import pyarrow as pa

    images = _images(root)
    rows = _metadata(root)
    if rows:
        images = _listed(images, rows, root)
    columns = {name: None for row in rows.values() for name in row}
    of_label = next((name for name in label if name in columns), None)
    values: dict[str, list[Any]] = {name: [rows[image.file][name] for image in images] for name in columns}
    classes = None if of_label else _last_folders(images, root)
    if classes is not None:
        values[label[0]] = classes
    above = ["/".join(image.folders if of_label else image.folders[:-1]) for image in images]
    if len(set(above)) > 1:
        values.setdefault(FOLDER, above)
    names = _names(values[of_label], images) if of_label else ()
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
    table = pa.table(arrays)
    if of_label and names:
        features = {of_label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    splits = list(dict.fromkeys(image.split for image in images))
    return {
        split or "train": table.take([i for i, image in enumerate(images) if image.split == split]) for split in splits
    }


def _visible(root: Path) -> Iterable[Path]:
    """Everything below ``root`` that is not hidden, sorted; relative."""
    paths = [path.relative_to(root) for path in root.rglob("*")]
    if odd := next((path for path in paths if not is_utf8(str(path))), None):
        raise ValueError(f"the name {str(odd)!r} in {str(root)!r} is not UTF-8; rename it")
    return sorted((p for p in paths if not any(part.startswith((".", "__")) for part in p.parts)), key=str)


def _images(root: Path) -> list[_Image]:
    from PIL import Image

    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    found, archives = [], []
    for path in _visible(root):
        if (root / path).is_dir():
            if (root / path).is_symlink():  # and its images would be missing without a word
                raise ValueError(
                    f"the folder {str(root / path)!r} is a link, which is not followed; put the folder there"
                )
            if not any((root / path).iterdir()):
                raise ValueError(
                    f"the folder {str(root / path)!r} is empty, but each class needs at least 1 image; add images or "
                    "delete it"
                )
        elif path.suffix.lower() in endings:
            parts = path.parts[:-1]
            at = next((i for i, part in enumerate(parts) if part in SPLITS), None)
            split = "" if at is None else SPLITS[parts[at]]
            found.append(_Image(path, split, parts if at is None else parts[:at] + parts[at + 1 :]))
        elif path.suffix == ".zip":
            archives.append(path)
    if archives:
        raise ValueError(f"{str(root / archives[0])!r} is an archive, but only folders are read; unpack and delete it")
    if not found:
        raise ValueError(
            f"{str(root)!r} has 0 images and 0 parquet files; lay the images out as train/<class>/<image>, or give a "
            "folder written by datasets' save_to_disk"
        )
    splits = {image.split for image in found}
    if len(splits) > 1 and "" in splits:
        stray = next(image.file for image in found if not image.split)
        raise ValueError(
            f"the image {str(stray)!r} of {str(root)!r} is in none of the splits "
            f"({', '.join(sorted(splits - {''}))}) that other images are in; move it to a split's folder or delete it"
        )
    return found


def _metadata(root: Path) -> dict[Path, dict[str, Any]]:
    """The columns of each image that some file of metadata lists; all have the same."""
    rows: dict[Path, dict[str, Any]] = {}
    for file in (path for path in _visible(root) if path.name in METADATA):
        for number, row in enumerate(_rows(root / file)):
            name = next((n for n in row if n == "file_name" or n.endswith("_file_name")), None)
            if name is None:
                raise ValueError(
                    f"{str(root / file)!r} has the columns {', '.join(row)}, but none is 'file_name'; add it, with "
                    "paths relative to this file"
                )
            image = Path(*(file.parent / str(row.pop(name)).replace("\\", "/")).parts)
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
    from pyarrow import csv, parquet

    try:
        if file.suffix == ".jsonl":
            lines = [json.loads(line) for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
            if not all(isinstance(line, dict) for line in lines):
                raise ValueError("a line is not an object")
            columns = {name: None for line in lines for name in line}
            table = [{name: line.get(name) for name in columns} for line in lines]
        elif file.suffix == ".csv":
            read = csv.read_csv(file)
            if bad := next((column.name for column in read.schema if pa.types.is_binary(column.type)), None):
                raise ValueError(f"the column {bad!r} is not UTF-8, so save it as UTF-8")
            table = read.to_pylist()
        else:
            table = parquet.read_table(file, partitioning=None).to_pylist()
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the metadata {str(file)!r} cannot be read ({why}); correct the file") from error
    return [{name: _plain(value) for name, value in row.items()} for row in table]


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
                f"{len(image.folders)} folders deep, so their class folders can't be told; move them to one depth"
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
