"""Arrays decoded once: a checksummed folder of memory-mapped ``.npy`` files.

A cache entry is one folder: ``<name>.npy`` for each array and ``meta.json`` with the state of the source it was made
from, a SHA-256 of every array file and some facts. It is written next to its place and renamed into it under a file
lock, so a reader sees a whole entry or none and two processes never decode the same source twice.

Every read checks every byte against its checksum. That costs about 0.1 s for CIFAR-10 (184 MB), bytes which the run is
about to use anyway, and it finds any damage: truncation, a changed size, a flipped bit. A damaged entry, one of another
format version and one whose source has changed since are rebuilt.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

FORMAT = 1
"""Raised whenever an entry written by an older version must not be read any more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What a cache folder holds.

    Attributes:
        arrays: by file-safe name; as read back, copy-on-write views of the mapped files.
        facts: whatever else belongs to the data, as JSON can say it.
    """

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def default_folder() -> Path:
    """``$FEDSTILL_CACHE``, else ``~/.cache/fedstill``."""
    return Path(os.environ.get("FEDSTILL_CACHE") or "~/.cache/fedstill").expanduser()


def cached(folder: Path, source: str, build: Callable[[], Entry]) -> tuple[Entry, str]:
    """Read the entry in ``folder``; make it with ``build`` if it is missing, damaged or of another ``source``.

    Args:
        folder: the entry's own folder; its parents are created.
        source: says in what state the source is; an entry made from another state is stale.
        build: makes the content; called at most once, and by one process at a time.

    Returns:
        The entry and its fingerprint: SHA-256 over the checksums of its arrays and its facts, so equal content has an
        equal fingerprint wherever it came from.

    Raises:
        ValueError: the cache cannot be written.
    """
    found = _read(folder, source)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        found = _read(folder, source)  # another process may have made it while this one waited
        if found is None:
            entry = build()
            try:
                _write(folder, source, entry)
            except OSError as error:
                raise _unwritable(folder, error) from error
            found = _read(folder, source)
    finally:
        lock.release()
    assert found is not None, f"{folder} cannot be read back"
    return found


def _unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"the data cache {str(folder.parent)!r} cannot be written ({error.strerror or error}); make room or make it "
        "writable, or name another folder in the environment variable FEDSTILL_CACHE"
    )


def _fingerprint(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder: Path, source: str) -> tuple[Entry, str] | None:
    """The entry, or ``None`` where there is none that can be used."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
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
            arrays[name] = np.load(path, mmap_mode="c", allow_pickle=False)
        return Entry(arrays, content["facts"]), fingerprint
    except (OSError, ValueError, KeyError, TypeError) as error:
        if folder.exists():
            _log.warning("rebuilding the damaged cache entry %s: %s", folder, error)
        return None


def _write(folder: Path, source: str, entry: Entry) -> None:
    """Write an entry beside ``folder`` and rename it into place; the caller holds the lock."""
    new, old = (folder.with_name(folder.name + suffix) for suffix in (".new", ".old"))
    for leftover in (new, old):  # of a process that was killed here
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    for name, array in entry.arrays.items():
        np.save(new / f"{name}.npy", array, allow_pickle=False)
    content = {"arrays": {name: _checksum(new / f"{name}.npy") for name in entry.arrays}, "facts": entry.facts}
    meta = {"format": FORMAT, "source": source, "fingerprint": _fingerprint(content), "content": content}
    (new / "meta.json").write_text(json.dumps(meta, indent=1))
    if folder.exists():
        folder.rename(old)  # a process that has it mapped keeps its pages
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
