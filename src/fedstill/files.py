"""Files that are either whole or not there: written beside their place, flushed to the disk, then renamed."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

PART = ".part"
"""How the name of a file that is still being written ends; a crash may leave one, which nobody reads."""
_DIGEST = 32


class Damaged(ValueError):
    """A file is not what was written; the text names it and what to do."""


def write_bytes(path: Path, *parts: bytes) -> None:
    """Write ``parts`` one behind the other as ``path``; a crash at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with beside.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_checked(path: Path, data: bytes) -> None:
    """Write ``data`` behind its SHA-256, for `read_checked`."""
    write_bytes(path, hashlib.sha256(data).digest(), data)


def read_checked(path: Path, remedy: str) -> bytearray:
    """What `write_checked` wrote.

    Raises:
        Damaged: when the checksum differs; the sentence ends in ``remedy``.
    """
    with path.open("rb") as file:
        digest = file.read(_DIGEST)
        data = bytearray(max(0, os.fstat(file.fileno()).st_size - _DIGEST))
        file.readinto(data)
    if hashlib.sha256(data).digest() != digest:
        raise Damaged(f"{path} is damaged (its checksum differs); {remedy}")
    return data


def checked_size(path: Path) -> int:
    """How many bytes `write_checked` was given, without reading them."""
    return path.stat().st_size - _DIGEST


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def append_json(path: Path, value: Any) -> None:
    """Append ``value`` as one line, in place of what a crash may have left of the last one."""
    lines = JsonLines(path)
    lines.append(value)
    lines.close()


class JsonLines:
    """A file of JSON lines that stays open between them, for a single writer; made when the first line comes."""

    def __init__(self, path: Path) -> None:
        """``path`` need not exist."""
        self._path = path
        self._file: BinaryIO | None = None

    def append(self, value: Any) -> None:
        """See `append_json`; the line is with the system when this returns."""
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        if self._file is None:
            self._file = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
            end = self._file.seek(0, os.SEEK_END)
            if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
                end = self._path.read_bytes().rfind(b"\n") + 1
                self._file.truncate(end)
            self._file.seek(end)
        self._file.write(line)

    def close(self) -> None:
        """Close the file; another line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of `append_json`, without what a crash left of the last; nothing when there is no file.

    Raises:
        Damaged: when another line is no JSON object.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    found = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Damaged(f"{path} is damaged (line {number} is no JSON object); delete {path.parent} and run again")
        found.append(value)
    return found
