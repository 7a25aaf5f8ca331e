"""One walk for all folders of records: which files are read, which are none, and in which split each lies.

Every file below a folder is read, known to be no record (hidden files, texts, thumbnails), or counted in one sentence.
Where a class, a split or a hospital would lose records, the folder is refused.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedstill.base.errors import install
from fedstill.base.files import is_utf8
from fedstill.data import pictures

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Word for a split, in small letters -> the split."""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of the files that add columns to images, in small letters."""

TABLES = (".parquet", ".pq", ".parq")
"""Endings of tables, in small letters."""
CSV = (".csv", ".tsv")
"""Endings of CSV files, which are read where there are no pictures and no tables with types."""
_HIDDEN = ("__MACOSX", "__pycache__", "lost+found", "System Volume Information")
_NO_RECORDS = {"thumbs.db", "ehthumbs.db", "desktop.ini", "_success", "_metadata", "_common_metadata"}
_PROSE = {".txt", ".md", ".rst", ".pdf", ".html", ".htm", ".log", ".crc", ".sha256", ".md5", ".lock"}
_DOCUMENTS = {
    *(".json", ".jsonl", ".xml", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".py", ".ipynb", ".sh"),
    *(".xlsx", ".xls", ".ods", ".doc", ".docx", ".bib", ".cff"),
}
"""Endings of files beside images that may describe them, but hold none."""
_ROWS = {".csv", ".tsv", ".feather", ".arrow", ".orc", ".avro", ".xlsx", ".xls", ".ods", ".jsonl", ".npz", ".npy"}
"""Endings of files that may hold rows, which are lost where a table beside them is read."""
_ARCHIVES = {".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar"}
_PART = re.compile(r"part|of|data|c\d+|snappy|gzip|gz|zstd|lz4|\d+|(?=[a-f]*\d)[0-9a-f]{4,}")
"""Words of a file's name that number the parts of one table."""
_SHOWN = 3
"""Number of names in a sentence about many."""


class Walk(NamedTuple):
    """What lies below a folder; paths are relative to it, sorted.

    Attributes:
        root: the folder.
        pictures: files that Pillow, or an installed extra, reads as images.
        tables: parquet files that are no metadata.
        metadata: files that add columns to images.
        others: files that are not read and may be more than a note.
    """

    root: Path
    pictures: list[Path]
    tables: list[Path]
    metadata: list[Path]
    others: list[Path]

    @property
    def unread(self) -> str:
        """One sentence on the files that are not read; empty without any."""
        return f"not read: {kinds(self.others)}" if self.others else ""


def files(root: Path) -> Iterator[Path]:
    """Every file below ``root``, absolute, through links to folders too.

    Raises:
        ValueError: a link leads back to a folder above it, or a folder cannot be read.
    """
    for folder, below, names in os.walk(root, followlinks=True, onerror=partial(missed, root)):
        below.sort()
        for name in below:
            path = Path(folder, name)
            if path.is_symlink() and Path(folder).resolve().is_relative_to(path.resolve()):
                raise ValueError(f"the link {str(path)!r} leads to a folder above itself; delete it")
        yield from (Path(folder, name) for name in sorted(names))


def missed(root: Path, error: OSError) -> None:
    """Refuse a folder that cannot be read, and whose records would be missing; hidden ones have none."""
    below = Path(str(error.filename)).relative_to(root).parts
    if any(part.startswith(".") or part in _HIDDEN for part in below):
        return
    why = f"the folder {str(error.filename)!r} cannot be read ({error.strerror}), and its records would be missing"
    raise ValueError(f"{why}; give the user of this program the right to read it, or move it away") from error


def walk(root: Path) -> Walk:
    """What lies below a folder, by what reads it.

    Raises:
        ValueError: a name is not UTF-8, there is an archive, or a link leads to a folder above itself.
    """
    found = Walk(root, [], [], [], [])
    for file in sorted((file.relative_to(root) for file in files(root)), key=str):
        if not is_utf8(str(file)):
            raise ValueError(
                f"the name {str(file)!r} in {str(root)!r} is not UTF-8; rename it, or if the names are UTF-8 and the "
                "locale is not, set LC_ALL=C.UTF-8"
            )
        if any(part.startswith(".") or part in _HIDDEN for part in file.parts):
            continue
        ending = pictures.ending(file)
        if file.name.casefold() in METADATA:
            found.metadata.append(file)
        elif ending in pictures.endings() or (pictures.reads_dicom() and pictures.is_dicom(root / file)):
            found.pictures.append(file)
        elif ending in TABLES:
            found.tables.append(file)
        elif ending in _ARCHIVES:
            raise ValueError(
                f"{str(root / file)!r} is an archive, but only folders are read; unpack it and delete the archive"
            )
        elif file.name.casefold() not in _NO_RECORDS and ending not in _PROSE and file.stem.upper() != "LICENSE":
            found.others.append(file)
    if found.pictures:
        return found
    if not (found.tables or any(file.suffix.lower() in TABLES for file in found.metadata)):
        rows = [file for file in (*found.others, *found.metadata) if file.suffix.lower() in CSV]
        others = [file for file in found.others if file not in rows]
        return found._replace(tables=sorted(rows, key=str), others=others, metadata=[]) if rows else found
    as_table = [file for file in found.metadata if file.suffix.lower() in TABLES]
    return found._replace(tables=sorted([*found.tables, *as_table], key=str), metadata=[])


def kinds(paths: Collection[Path]) -> str:
    """The number of files, and how many there are of each ending: ``30 files (.heic 28, .dcm 2)``."""
    counts = Counter(pictures.ending(path) or "no ending" for path in paths).most_common()
    shown = ", ".join(f"{ending} {count:,}" for ending, count in counts[:5]) + (", ..." if len(counts) > 5 else "")
    return f"{len(paths):,} file{'s' * (len(paths) != 1)} ({shown})"


def some(names: Sequence[str]) -> str:
    """The first of many names, quoted."""
    more = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {more:,} more" if more > 0 else "")


# What would be lost --------------------------------------------------------------------------------------------------


def check_pictures(found: Walk) -> None:
    """Refuse a folder of images of which a class, a split or a hospital would lose some.

    Raises:
        ValueError: there are tables too; a folder has no image; or files that may be records lie where images do.
    """
    root = found.root
    if found.tables:
        raise ValueError(
            f"{str(root)!r} has {len(found.pictures):,} images and {len(found.tables)} tables "
            f"({some(list(map(str, found.tables)))}), but records are of one kind; move the one or the other away"
        )
    holding = {folder for picture in found.pictures for folder in picture.parents}
    depth = min(len(picture.parts) - 1 for picture in found.pictures)
    for file in found.others:
        lost = len(file.parts) > depth or file.parent not in holding
        if lost and pictures.ending(file) not in _DOCUMENTS:
            of_folder = [other for other in found.others if other.parent == file.parent]
            raise ValueError(
                f"the folder {str(root / file.parent)!r} has {kinds(of_folder)} that cannot be read, and its records "
                f"would be missing; {_remedy({pictures.ending(other) for other in of_folder})}"
            )
    all_folders = {path.relative_to(root) for path in _visible_folders(root)}
    for folder in sorted(all_folders - holding, key=str):
        alone = not any(above in all_folders - holding for above in folder.parents)
        as_class = len(folder.parts) == depth or split_word(folder.name)
        if alone and (as_class or not any(folder in other.parents for other in found.others)):
            raise ValueError(
                f"the folder {str(root / folder)!r} has 0 images, but each class, split and hospital needs at least 1; "
                "add images or delete it"
            )


def _visible_folders(root: Path) -> Iterator[Path]:
    for folder, below, _ in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".") and name not in _HIDDEN]
        yield from (Path(folder, name) for name in below)


def _remedy(endings: set[str]) -> str:
    if endings & {".heic", ".heif", ".hif"}:
        return f"{install('pictures')} to read HEIC, convert them to JPEG, or move them away"
    if endings & {".dcm", ".dicom", ""}:
        return f"{install('pictures')} if they are DICOM, convert them to PNG, or move them away"
    return "convert them to PNG or JPEG, or move them away"


def check_tables(found: Walk) -> None:
    """Refuse a folder of parquet files beside which other files may hold rows.

    Raises:
        ValueError: there are such files.
    """
    if lost := [file for file in found.others if file.suffix.lower() in _ROWS]:
        kind = "CSV" if found.tables and found.tables[0].suffix.lower() in CSV else "parquet"
        raise ValueError(
            f"{str(found.root)!r} has {len(found.tables)} {kind} files and {kinds(lost)}, which are not read, such as "
            f"{str(lost[0])!r}; write them as parquet, or move them away"
        )


# Splits --------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a file: its split (empty if no name tells), and the other folders on the way to it."""

    split: str
    folders: tuple[str, ...]


def split_word(name: str) -> str:
    """The split that a folder's or a file's name tells: the name itself or one of its words, in any letters; or empty.

    ``Training``, ``seg_train``, ``training_set`` and ``train-00000-of-00001`` are the train split; ``train_or_test`` is
    none.
    """
    if exact := SPLITS.get(name.casefold()):
        return exact
    found = {SPLITS[word] for word in re.findall(r"[a-z]+", name.casefold()) if word in SPLITS}
    return found.pop() if len(found) == 1 else ""


def places(paths: Sequence[Path], root: Path, *, classes: bool) -> list[Place]:
    """The place of each file by the folders on its way.

    A folder whose whole name is a word for a split, in any letters, is that split's. Where no file has one, names that
    contain such a word count (``seg_train``), if they do at all folders of one level.

    Args:
        paths: the files, relative to ``root``.
        root: the folder, for error messages.
        classes: whether each file's last folder is its class, which may have the name of a split among others
            (``bus``, ``car``, ``train``).

    Raises:
        ValueError: a path has two splits, or names tell the split of some files only.
    """
    ways = [path.parts[:-1] for path in paths]
    class_names = _class_names(ways) if classes else frozenset()
    exact = [_exact(way, class_names) for way in ways]
    if all(at is None for at in exact):
        exact = [_level(ways, root, classes=classes)] * len(ways)
    found = []
    for path, way, at in zip(paths, ways, exact, strict=True):
        if at is None or at >= len(way):
            found.append(Place("", way))
            continue
        split, others = split_word(way[at]), way[:at] + way[at + 1 :]
        above = others[:-1] if classes else others
        if second := next((name for name in above if split_word(name) not in ("", split)), None):
            raise ValueError(
                f"{str(path)!r} of {str(root)!r} lies in folders of two splits ({way[at]}, {second}); rename one"
            )
        found.append(Place(split, tuple(name for i, name in enumerate(others) if not _repeats(name, split, i, others))))
    return found


def _repeats(name: str, split: str, i: int, others: Sequence[str]) -> bool:
    """Whether a folder says the split again, as in ``seg_train/seg_train/cat``."""
    return i < len(others) - 1 and split_word(name) == split


def _class_names(ways: Sequence[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    """Class folders with the name of a split: those beside two or more class folders that have none."""
    classes = {way for way in ways if way}
    plain = Counter(way[:-1] for way in classes if way[-1].casefold() not in SPLITS)
    return frozenset(way for way in classes if way[-1].casefold() in SPLITS and plain[way[:-1]] >= 2)


def _exact(way: tuple[str, ...], class_names: Collection[tuple[str, ...]]) -> int | None:
    end = len(way) - 1 if way in class_names else len(way)
    return next((i for i, part in enumerate(way[:end]) if part.casefold() in SPLITS), None)


def _level(ways: Sequence[tuple[str, ...]], root: Path, *, classes: bool) -> int | None:
    """The first level of folders whose names contain words for splits; None without one."""
    deepest = max((len(way) for way in ways), default=0) - classes
    for at in range(deepest):
        names = {way[at]: split_word(way[at]) for way in ways if len(way) > at + classes}
        if not any(names.values()):
            continue
        if plain := next((name for name, split in names.items() if not split), None):
            told = next(name for name, split in names.items() if split)
            raise ValueError(
                f"the folder {told!r} of {str(root)!r} has the name of a split, but {plain!r} beside it has not; name "
                "the folders of the splits train and test, and move others away"
            )
        return at
    return None


def table_places(paths: Sequence[Path], root: Path) -> list[Place]:
    """The place of each table by the folders on its way, or else by its own name.

    In the hub's layout (``unsupervised-00000-of-00001.parquet``) other words are splits too, which are not used.

    Raises:
        ValueError: folder and name tell two splits, names tell the split of some files only, or one folder has
            different tables for one split.
    """
    found = []
    for path, place in zip(paths, places(paths, root, classes=False), strict=True):
        hub = re.fullmatch(r"(\w+)-\d{5}-of-\d{5}(-[0-9a-f]+)?", path.stem)
        named = split_word(path.stem) or (hub.group(1) if hub and not _PART.fullmatch(hub.group(1)) else "")
        if place.split and split_word(path.stem) not in ("", place.split):
            raise ValueError(
                f"the folder of {str(path)!r} in {str(root)!r} tells the split {place.split!r}, but the file's name "
                f"another; rename the file"
            )
        found.append(Place(place.split or named, place.folders))
    stray = next((path for path, place in zip(paths, found, strict=True) if not place.split), None)
    splits = sorted({place.split for place in found} - {""})
    if stray is not None and splits:
        raise ValueError(
            f"the table {str(stray)!r} of {str(root)!r} is in none of the splits ({', '.join(splits)}) that other "
            "tables are in; move it to a split's folder, or away"
        )
    _check_parts(paths, found, root)
    return found


def _check_parts(paths: Sequence[Path], found: Sequence[Place], root: Path) -> None:
    """Refuse different tables for one split in one folder, such as ``train.parquet`` and ``train-old.parquet``."""
    first: dict[tuple[Path, str], tuple[Path, frozenset[str]]] = {}
    for path, place in zip(paths, found, strict=True):
        words = {word for word in re.split(r"[^0-9a-z]+", path.stem.casefold()) if word}
        rest = frozenset(word for word in words if not _PART.fullmatch(word) and not split_word(word))
        other, same = first.setdefault((path.parent, place.split), (path, rest))
        if rest != same:
            what = f"the split {place.split!r}" if place.split else "one split"
            raise ValueError(
                f"the tables {str(other)!r} and {str(path)!r} of {str(root)!r} would both be {what}; move one away, or "
                f"give each client's a folder of its own, as {path.stem}/train.parquet"
            )
