"""The cache of decoded data sets: folders of memory-mapped ``.npy`` files with checksums.

A cache entry is one folder: ``<name>.npy`` for each array, and ``meta.json`` with the source's state, a SHA-256 of
every array file and other facts. It is written under another name and renamed while a file lock is held, so a reader
sees a whole entry or none, and two processes never decode the same source twice.

A process checks all checksums at its first read, which takes about 0.1 s for CIFAR-10 (184 MB) and half a minute at 224
pixels a side (9 GB), and again after every change of a file. An entry is rebuilt if it is damaged, has another format
version, or its source has changed.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from fedstill.base import processes
from fedstill.base.files import expanded


def packed(texts: Sequence[str], name: str) -> dict[str, np.ndarray]:
    """The arrays of ``texts``, for `unpacked` with the same ``name``."""
    encoded = [text.encode(errors="replace") for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return {f"{name}-texts": np.frombuffer(b"".join(encoded), np.uint8), f"{name}-ends": ends}


def unpacked(arrays: Mapping[str, np.ndarray], name: str) -> list[str]:
    """The texts of `packed` arrays."""
    content, ends = arrays[f"{name}-texts"].tobytes(), arrays[f"{name}-ends"].tolist()
    return [content[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


FORMAT = 4
"""Version of the format; entries of another version are rebuilt."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """The content of a cache folder.

    Attributes:
        arrays: arrays by file-safe name; after reading, copy-on-write views of the mapped files.
        facts: other values, as JSON.
        notes: values, as JSON, that tell how the source says the same; equal content may have others.
    """

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    notes: dict[str, Any] = field(default_factory=dict)


def default_folder() -> Path:
    """``$FEDSTILL_CACHE``, else ``~/.cache/fedstill``."""
    return expanded(os.environ.get("FEDSTILL_CACHE") or "~/.cache/fedstill")


def cached(folder: Path, source: str, build: Callable[[], CacheEntry]) -> tuple[CacheEntry, str]:
    """The entry in ``folder``, built anew if it is missing, damaged or made from another state of its source.

    Args:
        folder: the entry's own folder; its parents are created.
        source: text that changes when the source changes.
        build: function that decodes the source; called at most once, by one process at a time.

    Returns:
        The entry and its fingerprint: SHA-256 over the checksums of its arrays and its facts. Equal content has an
        equal fingerprint, from any source.

    Raises:
        ValueError: the cache cannot be written.
    """
    stored = _read(folder, source)
    if stored is not None:
        return stored
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # whose names and entries are nobody else's
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        stored = _read(folder, source)  # another process may have written it meanwhile
        if stored is None:
            entry = build()
            try:
                _write(folder, source, entry)
            except OSError as error:
                raise _unwritable(folder, error) from error
            stored = _read(folder, source)
    finally:
        lock.release()
    assert stored is not None, f"{folder} cannot be read back"
    return stored


def forget(names: Sequence[str]) -> list[Path]:
    """Delete the entries of data sets, and vectors that a backbone has made of them; a run makes them again.

    Args:
        names: names or paths of data sets, which may be gone; or ``"all"``, for extractors and checks too.

    Returns:
        The folders that were deleted.
    """
    root, texts = default_folder(), [text for name in names for text in (Path(name).name, Path(name).stem)]
    wanted = {re.sub(r"[^A-Za-z0-9_]+", "-", text) for text in texts}  # as `fedstill.data.places.Source.folder`
    found = [place for place in _entries(root) if "all" in names or place.name.rpartition("-")[0] in wanted]
    gone = {_fact(place, "fingerprint") for place in found}
    found += [place for place in _vectors_of(root, gone) if place not in found]
    begun = [place for place in root.glob("features-*.begun") if found]
    for place in (*found, *begun):
        _delete(place)
    if "all" in names:
        made = [place for name in ("extractors", "checks") if (place := root / name).is_dir()]
        for place in made:
            shutil.rmtree(place)
        for lock in root.glob("*.lock"):
            lock.unlink(missing_ok=True)
        found += made
    return found


def _vectors_of(root: Path, fingerprints: Collection[Any]) -> list[Path]:
    """The entries below ``root`` of vectors that a backbone has made of records with these fingerprints."""
    return [place for place in _entries(root) if _fact(place, "content", "facts", "labels") in fingerprints]


def _entries(root: Path) -> list[Path]:
    return [place for place in root.glob("*-*") if (place / "meta.json").is_file()]


def _delete(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.with_name(f"{entry.name}.lock").unlink(missing_ok=True)


def _fact(place: Path, *path: str) -> Any:
    """A value in an entry's ``meta.json``; its own path, which equals nothing else, where there is none."""
    try:
        value = json.loads((place / "meta.json").read_bytes())
        for key in path:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError):
        return place
    return value


def fingerprint(entry: CacheEntry) -> str:
    """The fingerprint that `cached` would give with ``entry``, without writing anything."""
    checksums = {}
    for name, array in entry.arrays.items():
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        checksums[name] = hashlib.sha256(content.getbuffer()).hexdigest()
    return _fingerprint({"arrays": checksums, "facts": entry.facts})


def _unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"the data cache {str(folder.parent)!r} cannot be written ({error.strerror or error}); make room or make it "
        "writable, or name another folder in the environment variable FEDSTILL_CACHE"
    )


def _fingerprint(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_SETTLED = 2.0
"""Seconds after its last change from which a file that changes again has another time of change."""
_known: dict[tuple[str, int, int, int, int], str] = {}


def _checksum(path: Path) -> str:
    """SHA-256 of a file; computed once in a process, as long as nobody writes to the file."""
    with path.open("rb") as file:
        begun, facts = time.time(), os.fstat(file.fileno())
        state = (str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if state not in _known or begun - facts.st_ctime < _SETTLED:
            _known[state] = hashlib.file_digest(file, "sha256").hexdigest()
        return _known[state]


def _read(folder: Path, source: str) -> tuple[CacheEntry, str] | None:
    """The entry; None if it is missing, damaged or out of date."""
    try:
        begun = (folder / "meta.json").read_bytes()
        meta = json.loads(begun)
        if (meta["format"], meta["source"]) != (FORMAT, source):
            return None
        content, fingerprint = meta["content"], meta["fingerprint"]
        if _fingerprint(content) != fingerprint:
            raise ValueError("meta.json does not match its checksum")
        arrays = {}
        for name, checksum in content["arrays"].items():
            path = folder / f"{name}.npy"
            if _checksum(path) != checksum:
                raise ValueError(f"{path.name} does not match its checksum")
            with processes.LITERALS:
                arrays[name] = np.load(path, mmap_mode="c", allow_pickle=False)
        if (folder / "meta.json").read_bytes() != begun:  # another process has put another entry here meanwhile
            return _read(folder, source)
        return CacheEntry(arrays, content["facts"], meta["notes"]), fingerprint
    except (OSError, ValueError, KeyError, TypeError) as error:
        if folder.exists():
            _log.warning("rebuilding the damaged cache entry %s: %s", folder, error)
        return None


def _write(folder: Path, source: str, entry: CacheEntry) -> None:
    """Write an entry under another name and rename it; the caller holds the lock."""
    new, old = (folder.with_name(folder.name + suffix) for suffix in (".new", ".old"))
    for leftover in (new, old):  # from a process that was killed here
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(mode=0o700)  # decoded pictures of patients are not for others of the machine, as their source is not
    for name, array in entry.arrays.items():
        np.save(new / f"{name}.npy", array, allow_pickle=False)
    content = {"arrays": {name: _checksum(new / f"{name}.npy") for name in entry.arrays}, "facts": entry.facts}
    meta = {"format": FORMAT, "source": source, "fingerprint": _fingerprint(content), "content": content}
    meta["notes"] = entry.notes
    (new / "meta.json").write_text(json.dumps(meta, indent=1))
    former = _fact(folder, "fingerprint")
    if folder.exists():
        folder.rename(old)  # processes that have mapped it keep their pages
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    if isinstance(former, str):  # of an entry that was there, and was not damaged
        _forget_vectors(folder.parent, former)


def _forget_vectors(root: Path, fingerprint: Any) -> None:
    """Delete vectors of records that no entry has any more, as after one was taken out of its source."""
    if all(_fact(place, "fingerprint") != fingerprint for place in _entries(root)):
        for place in _vectors_of(root, [fingerprint]):
            _delete(place)
