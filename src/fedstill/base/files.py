"""Files that are whole or absent: each is written under a temporary name, flushed to the disk, then renamed."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fedstill.base.errors import InputError

PART = ".part"
"""Suffix of the temporary name; a file with it, left by a crash, is never read."""
_DIGEST = 32


class Damaged(InputError):
    """A file's content fails its check; the text names the file and a remedy."""


class NewerFormat(Damaged):
    """A file was written by a newer version of fedstill, which can read it; nothing is wrong with it."""


def check_format(place: Path, number: object, newest: int, writer: str | None = None) -> None:
    """Refuse what is in ``place`` if its format has a ``number`` above ``newest``, the last that this version reads.

    Args:
        place: the file or folder.
        number: the number in it; anything else than a number from 1 is refused too.
        newest: the last format that this version reads; the first is 1.
        writer: the version of fedstill that wrote it, if it says so.

    Raises:
        NewerFormat: the number is above ``newest``.
        Damaged: it is no number from 1.
    """
    if type(number) is not int or number < 1:
        raise Damaged(f"{place} has the format {number!r:.80}; it must be a number from 1 to {newest}")
    if number > newest:
        remedy = f"fedstill {writer} or a newer one" if writer else "the newer fedstill that wrote it"
        raise NewerFormat(
            f"{place} has the format {number}; this fedstill reads formats up to {newest}, so install {remedy}"
        )


def without_format(
    content: Mapping[str, Any], place: Path, newest: int = 1, writer: str | None = None
) -> dict[str, Any]:
    """The content of a file without its number ``format``, which is 1 where it is missing.

    Raises:
        NewerFormat: the number is above ``newest``, as in `check_format`.
        Damaged: it is no number from 1.
    """
    check_format(place, content.get("format", 1), newest, writer)
    return {name: value for name, value in content.items() if name != "format"}


def is_utf8(text: str) -> bool:
    """Whether a text, as the name of a file, can be written: a name with other bytes has lone surrogates for them."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def not_utf8(text: str) -> str:
    """The sentence about a word of the command line that is no text, with the remedy.

    In a locale without UTF-8, Python reads the bytes of a name that is UTF-8 as if they were of that locale.
    """
    try:
        right = os.fsencode(text).decode()
    except UnicodeError:
        return f"{text!r} is not UTF-8; rename it, or choose another name"
    locale = sys.getfilesystemencoding()
    return f"{right!r} cannot be read in this locale ({locale}); set LC_ALL=C.UTF-8 before the command"


def path_of(value: object, name: str) -> Path:
    """The path that somebody gave as ``name``, in text or as an object.

    Raises:
        InputError: it is neither, or no path can be so.
    """
    if not isinstance(value, str | os.PathLike) or not (place := os.fsdecode(value)) or "\0" in place:
        raise InputError(f"{name} is {in_words(value)}; give the path of a folder or a file, as 'runs/first'")
    return Path(place)


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home directory that its ``~`` or ``~user`` stands for.

    Raises:
        InputError: there is no such user, or no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        why = f"{str(path)!r} can't be found, as no home directory is known for {user!r}"
        raise InputError(f"{why}; write it in full") from error


def in_words(value: object) -> str:
    """A wrong value in a sentence: itself if it is short, else its type, so that no table of records is printed."""
    whole = repr(value)
    return whole if len(whole) <= 60 and "\n" not in whole else f"a {type(value).__name__}"


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


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read, in such a folder; a crash leaves the old file or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}{PART}")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def fingerprint(content: bytes) -> str:
    """A short fingerprint, which two people can compare on the phone: 80 bits of the SHA-256, in groups of four."""
    digest = hashlib.sha256(content).hexdigest()[:20]
    return "-".join(digest[start : start + 4] for start in range(0, 20, 4))


def write_checked(path: Path, data: bytes, label: bytes = b"") -> None:
    """Write the SHA-256 of ``label`` and ``data``, then ``data``, for `read_checked`."""
    write_bytes(path, _digest(label, data), data)


def _digest(label: bytes, data: bytes | bytearray) -> bytes:
    digest = hashlib.sha256(label)
    digest.update(data)
    return digest.digest()


def read_checked(path: Path, remedy: str, label: bytes = b"") -> bytearray:
    """The data that `write_checked` wrote with the same label.

    Raises:
        Damaged: the checksum differs; ``remedy`` is in the text.
    """
    with path.open("rb") as file:
        digest = file.read(_DIGEST)
        data = bytearray(max(0, os.fstat(file.fileno()).st_size - _DIGEST))
        file.readinto(data)
    if digest != _digest(label, data):
        raise Damaged(f"{path} is damaged (its checksum differs); {remedy}")
    return data


def checksum(path: Path) -> bytes:
    """The SHA-256 that `write_checked` wrote, without the data."""
    with path.open("rb") as file:
        return file.read(_DIGEST)


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


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_seal(path: Path, sealed: Mapping[str, Any], remedy: str) -> None:
    """Raise `Damaged` unless ``path`` starts with the content that was sealed; later lines may follow."""
    data = path.read_bytes()[: sealed["size"]] if path.exists() else b""
    if hashlib.sha256(data).hexdigest() != sealed["sha256"]:
        raise Damaged(f"{path} is damaged (lines of finished rounds are missing or changed); {remedy}")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def append_json(path: Path, value: Any, *, flush: bool = False) -> None:
    """Append ``value`` as one line, flushed to the disk on demand; a last line left unfinished is overwritten."""
    lines = JsonLines(path)
    lines.append(value)
    if flush:
        lines.flush()
    lines.close()


_LINK = "link"
"""Name of the entry of a line with the digest of the line and of all chained lines before it."""


def _linked(link: str, value: Mapping[str, Any]) -> str:
    return hashlib.sha256((link + json.dumps(value, allow_nan=False)).encode()).hexdigest()[:16]


def chained(values: Iterable[Mapping[str, Any]], link: str = "") -> bytes:
    """Lines whose damage `read_json_lines` notices, but not the loss of the last ones; ``link`` is the one before."""
    lines = []
    for value in values:
        link = _linked(link, value)
        lines.append(json.dumps({**value, _LINK: link}, allow_nan=False).encode() + b"\n")
    return b"".join(lines)


class JsonLines:
    """A file of JSON lines that a single writer keeps open; the first line creates it.

    Args:
        path: the file.
        chain: whether to write lines as `chained` does.
    """

    def __init__(self, path: Path, *, chain: bool = False) -> None:
        self._path = path
        self._chain = chain
        self._link: str | None = None
        self._file: BinaryIO | None = None

    def append(self, value: Any) -> None:
        """Append one line, as `append_json` does, and hand it to the operating system.

        Raises:
            OSError: the line does not fit on the disk; the file is as it was.
        """
        link = self._link
        if self._chain:
            link = _read_chain(self._path)[1] if link is None else link
            line, link = chained([value], link), _linked(link, value)
        else:
            line = json.dumps(value, allow_nan=False).encode() + b"\n"
        if self._file is None:
            self._file = self._opened()
        end, left = self._file.tell(), memoryview(line)
        try:
            while left:  # a disk that fills takes a part without an error, and raises for the rest
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise
        self._link = link

    def _opened(self) -> BinaryIO:
        """The file at the end of its last whole line."""
        file: BinaryIO = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if end and file.read(1) != b"\n":
            end = self._path.read_bytes().rfind(b"\n") + 1
            file.truncate(end)
        file.seek(end)
        return file

    def flush(self) -> None:
        """Flush the lines of this object to the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_json_lines(path: Path, remedy: str | None = None) -> list[dict[str, Any]]:
    """The objects that `append_json` wrote; an empty list if there is no file.

    ``remedy`` ends the sentence of `Damaged`; by default it is to delete the file's folder, a run's, and run again.

    A last line that a crash left unfinished is ignored. Any other line that is no JSON object, or that does not follow
    the line before it where lines are `chained`, raises `Damaged`.
    """
    return _read_chain(path, remedy)[0]


def _read_chain(path: Path, remedy: str | None = None) -> tuple[list[dict[str, Any]], str]:
    """The objects, and the last link."""
    values, link, remedy = list[dict[str, Any]](), "", remedy or f"delete {path.parent} and run again"
    if not path.exists():
        return values, link
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Damaged(f"{path} is damaged (line {number} is no JSON object); {remedy}")
        if link or _LINK in value:  # lines of `append_json` have none
            if value.pop(_LINK, None) != (link := _linked(link, value)):
                raise Damaged(f"{path} is damaged (line {number} was changed, or another is missing); {remedy}")
        values.append(value)
    return values, link
