"""Files that are whole or absent: each is written under a temporary name, flushed to the disk, then renamed."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fedstill.errors import InputError

PART = ".part"
"""Suffix of the temporary name; a file with it, left by a crash, is never read."""
_DIGEST = 32


class Damaged(InputError):
    """A file's content fails its check; the text names the file and a remedy."""


def write_bytes(path: Path, *parts: bytes) -> None:
    """Write ``parts``, concatenated, to ``path``; a crash at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with beside.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # as of a full disk
            error.filename = str(path)
        raise


def write_checked(path: Path, data: bytes, label: bytes = b"") -> None:
    """Write the SHA-256 of ``label`` and ``data``, then ``data``, for `read_checked`."""
    write_bytes(path, _digest(label, data), data)


def _digest(label: bytes, data: bytes | bytearray) -> bytes:
    digest = hashlib.sha256(label)
    digest.update(data)
    return digest.digest()


def read_checked(path: Path, remedy: str, label: bytes = b"") -> bytearray:
    """The data that `write_checked` wrote with the same label; the data of earlier versions have no label.

    Raises:
        Damaged: the checksum differs; ``remedy`` is in the text.
    """
    with path.open("rb") as file:
        digest = file.read(_DIGEST)
        data = bytearray(max(0, os.fstat(file.fileno()).st_size - _DIGEST))
        file.readinto(data)
    if digest not in (_digest(label, data), _digest(b"", data)):
        raise Damaged(f"{path} is damaged (its checksum differs); {remedy}")
    return data


def checked_size(path: Path) -> int:
    """Number of data bytes that `write_checked` wrote, without reading them."""
    return path.stat().st_size - _DIGEST


def seal(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, which is flushed to the disk, for `check_seal`; an absent file has size 0."""
    if not path.exists():
        return {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    with path.open("r+b") as file:  # Windows flushes only files that are open for writing
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256")
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def check_seal(path: Path, sealed: Mapping[str, Any], remedy: str) -> None:
    """Raise `Damaged` unless ``path`` starts with the content that was sealed; later lines may follow."""
    data = path.read_bytes()[: sealed["size"]] if path.exists() else b""
    if hashlib.sha256(data).hexdigest() != sealed["sha256"]:
        raise Damaged(f"{path} is damaged (lines of finished rounds are missing or changed); {remedy}")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def append_json(path: Path, value: Any) -> None:
    """Append ``value`` as one line; a last line that a crash left unfinished is overwritten."""
    lines = JsonLines(path)
    lines.append(value)
    lines.close()


class JsonLines:
    """A file of JSON lines that a single writer keeps open; the first line creates it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def append(self, value: Any) -> None:
        """Append one line, as `append_json` does, and hand it to the operating system."""
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        if self._file is None:
            self._file = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
            end = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, end - 1))
            if end and self._file.read(1) != b"\n":
                end = self._path.read_bytes().rfind(b"\n") + 1
                self._file.truncate(end)
            self._file.seek(end)
        self._file.write(line)

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects that `append_json` wrote; an empty list if there is no file.

    A last line that a crash left unfinished is ignored; any other line that is no JSON object raises `Damaged`.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    values = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Damaged(f"{path} is damaged (line {number} is no JSON object); delete {path.parent} and run again")
        values.append(value)
    return values
