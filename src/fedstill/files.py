"""Files that are either whole or not there: written beside their place, flushed to the disk, then renamed."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_bytes(path: Path, *parts: bytes) -> None:
    """Write ``parts`` one behind the other as ``path``; a crash at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def append_json(path: Path, value: Any) -> None:
    """Append ``value`` as one line; `read_json_lines` drops a line that a crash cut short."""
    with path.open("a+b") as file:
        if file.tell() and _last_byte(path) != b"\n":
            file.write(b"\n")
        file.write(json.dumps(value, allow_nan=False).encode() + b"\n")


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def read_json_lines(path: Path) -> Iterable[Any]:
    """The values of `append_json`, without what a crash left half written; nothing when there is no file."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue
