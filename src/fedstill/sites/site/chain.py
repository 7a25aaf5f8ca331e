"""A file of JSON lines that is a chain of MACs: a line that is changed, missing, added or moved is noticed.

A line ends with the HMAC-SHA256 of its text and of the previous line's MAC. The head, a file of its own, has the number
of lines, the last MAC and the size of the file. One line more than that comes from a crash between the two files, and
counts. An incomplete last line comes from a crash before `Chain.append` returned, and does not count. Any other
difference is damage. A reader of the key can forge a chain, so only its owner may have access to the folder.

The chain goes on over several files: `Chain.rotate` renames one to ``NAME-NUMBER.jsonl``, by the number of its last
line, and begins another. A reader of the last files alone checks them as well as a reader of all does: their first line
has a MAC that covers the line before, and the head fixes the last one.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from fedstill.base import files

VERSION = 2
"""Version of the head's format."""
START = bytes(32)
"""The value in place of the MAC before the first line."""
_TAIL = len(',"mac":""}') + 2 * len(START)


@dataclass(frozen=True)
class ChainEnd:
    """The end of a chain of files."""

    count: int = 0
    """Number of lines in all files."""
    last: bytes = START
    """MAC of the last line."""
    size: int = 0
    """Bytes of the current file."""
    begun: int = 0
    """Number of lines in the files before the current one."""

    def after(self, line: bytes, mac: bytes) -> "ChainEnd":
        """The head after one more line."""
        return replace(self, count=self.count + 1, last=mac, size=self.size + len(line) + 1)

    def encode(self, key: bytes) -> bytes:
        """The file's bytes; they are signed, since any key would fit an empty chain otherwise."""
        text = json.dumps({"version": VERSION, **asdict(self), "last": self.last.hex()})
        return signed(key, b"head", text.encode())[0] + b"\n"


class Line(NamedTuple):
    """A line: its number from 1, its JSON object without the MAC, and the MAC."""

    number: int
    text: bytes
    mac: bytes


class Chain:
    """A chain on disk; make its files with `create`.

    Args:
        folder: folder of the files.
        name: first part of the files' names: ``NAME.jsonl``, ``NAME.key``, ``NAME.head`` and ``NAME.lock``.
        remedy: end of the sentence of `files.Damaged`.
    """

    def __init__(self, folder: Path, name: str, remedy: str) -> None:
        self._folder, self._name, self._remedy = folder, name, remedy
        self._key = b""
        self._head = ChainEnd()  # of what was read or synchronised last
        self._is_between = False  # a copy from the middle of `rotate`, which its reader can't repair
        self.lock = FileLock(folder / f"{name}.lock", timeout=60)
        """A lock against other processes; an instance may take it again."""

    @property
    def count(self) -> int:
        """Number of lines, as last read."""
        return self._head.count

    @property
    def last(self) -> bytes:
        """MAC of the last line, as last read."""
        return self._head.last

    @property
    def size(self) -> int:
        """Bytes of the current file, as last read."""
        return self._head.size

    @property
    def lines(self) -> int:
        """Number of lines of the current file, as last read."""
        return self._head.count - self._head.begun

    def create(self) -> None:
        """Make the files of an empty chain, for their owner alone.

        Raises:
            FileExistsError: there is such a file.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = secrets.token_bytes(len(START))
        for part, data in (("key", key), ("jsonl", b""), ("head", ChainEnd().encode(key))):
            place = self._place(part)
            with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            flush(place)
        self._place("lock").touch(mode=0o600)  # by the owner: another user's reading must not be the first to make it
        flush(self._folder)
        flush(self._folder.parent)

    @property
    def places(self) -> list[Path]:
        """The files of lines, in order."""
        return [self._folder / name for name in self._names()]

    @property
    def begins(self) -> list[int]:
        """For each file of lines, in order, the number of lines in those before it."""
        return _begins(self._names())

    def _names(self) -> list[str]:
        """The names of the files of lines, in order; as text, since years of a journal are thousands of files."""
        earlier = re.compile(rf"{re.escape(self._name)}-[0-9]{{9}}\.jsonl")
        there = os.listdir(self._folder) if self._folder.is_dir() else []
        return [*sorted(filter(earlier.fullmatch, there)), self._place("jsonl").name]

    def read(self, since: int = 0) -> list[Line]:
        """The lines of the file that has line ``since + 1``, or is to have it, and of all later files.

        Each of them is checked. A file whose lines this object has seen before is read again.

        Raises:
            Damaged: the files were changed.
        """
        key = self._load_key()  # before the lock, which would make a file in the folder
        with self._for_reading():
            head, names = self._load_head(key), self._names()
            begins = _begins(names)
            if self._key:
                since = min(since, self._head.count)  # what was seen must still be there
            first = sum(begin <= since for begin in begins) - 1
            start = self._last_mac(self._folder / names[first - 1]) if first else START
            parts = [self._read(self._folder / name) for name in names[first:]]
            *raw, torn = b"".join(parts).split(b"\n")
            lines = self._checked(key, begins[first], start, raw)
            size = len(parts[-1]) - len(torn)
            begun = begins[first] + len(lines) - parts[-1].count(b"\n")
            if begun != begins[-1]:
                raise self._damaged(f"{names[-2]} has another number than its last line")
            now = shorter = ChainEnd(begins[first] + len(lines), lines[-1].mac if lines else start, size, begun)
            if size:
                before = lines[-2].mac if len(lines) > 1 else start
                length = len(lines[-1].text) + _TAIL
                shorter = replace(now, count=now.count - 1, last=before, size=size - length)
            self._check(key, head, now, shorter)
            self._check_seen(key, [start, *(line.mac for line in lines)], begins[first])
            self._key, self._head = key, now
            return lines

    def mac_of(self, number: int) -> bytes | None:
        """The MAC of a line, after a check of the one file that has it; None if there is no such line.

        Raises:
            Damaged: that file was changed.
        """
        key = self._load_key()
        with self._for_reading():
            self._load_head(key)
            names = self._names()
            begins = _begins(names)
            file = sum(begin < number for begin in begins) - 1
            start = self._last_mac(self._folder / names[file - 1]) if file else START
            lines = self._checked(key, begins[file], start, self._read(self._folder / names[file]).split(b"\n")[:-1])
            return next((line.mac for line in lines if line.number == number), None)

    def _for_reading(self) -> AbstractContextManager[Any]:
        """The lock; nothing for an auditor's copy, which can't be locked or whose lock file would be another user's."""
        there = self._place("lock")
        return self.lock if self._may_write() or (there.exists() and os.access(there, os.W_OK)) else nullcontext()

    def _may_write(self) -> bool:
        """Whether this user may make and repair files here; root's would be closed to the site's own user."""
        return os.access(self._folder, os.W_OK) and (os.geteuid() != 0 or self._folder.stat().st_uid == 0)

    def _checked(self, key: bytes, number: int, before: bytes, raw: list[bytes]) -> list[Line]:
        """The lines after line ``number``, whose MAC is ``before``."""
        lines = list[Line]()
        for each in raw:
            number, text = number + 1, each[:-_TAIL] + b"}"
            good, mac = signed(key, before, text)
            if not hmac.compare_digest(good, each):
                name = self._place("jsonl").name
                raise self._damaged(f"line {number} of {name} was changed, moved or added, or the key is another's")
            lines.append(Line(number, text, mac))
            before = mac
        return lines

    def _check_seen(self, key: bytes, macs: list[bytes], begin: int) -> None:
        """Compare the MACs of lines from ``begin`` on with the end that this object saw last."""
        if not self._key:
            return
        place = self._head.count - begin
        if self._key != key or not 0 <= place < len(macs) or macs[place] != self._head.last:
            raise self._damaged(f"{self._place('jsonl').name} was replaced by another copy")

    def _last_mac(self, place: Path) -> bytes:
        """The last MAC in an earlier file, as it says; a wrong one does not fit the next file's first line."""
        try:
            return bytes.fromhex(self._read(place)[-2 * len(START) - 3 : -3].decode())
        except ValueError as error:
            raise self._damaged(f"the end of {place.name} was changed") from error

    def synchronise(self) -> None:
        """Read the end of the chain, for `append`; only the last lines are checked.

        Raises:
            Damaged: the end does not fit the head.
        """
        key = self._load_key()
        with self.lock:
            head = self._decode(key, self._load_head(key))
            begin = max(0, head.size - _TAIL - 1)
            tail = self._read(self._place("jsonl"), begin)
            seam, end = tail[: head.size - begin], tail[head.size - begin :]
            if head.size and seam[-len(head.last.hex()) - 3 :] != b'%s"}\n' % head.last.hex().encode():
                raise self._damaged(f"{self._place('head').name} does not fit {self._place('jsonl').name}")
            *lines, _ = end.split(b"\n")
            for line in lines:
                good, mac = signed(key, head.last, line[:-_TAIL] + b"}")
                if len(lines) > 1 or not hmac.compare_digest(good, line):
                    raise self._damaged(f"{self._place('jsonl').name} has lines that the chain lacks")
                head = head.after(line, mac)
            if lines:
                self._write_head(key, head)
            self._key, self._head = key, head

    def append(self, facts: Mapping[str, Any]) -> bytes:
        """Write one more line, flush it to disk, and return its MAC; call this with the `lock`, after a reading.

        Raises:
            OSError: the line can't be written.
        """
        head = self._head
        text = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()
        line, mac = signed(self._key, head.last, text)
        with self._place("jsonl").open("r+b") as file:
            file.truncate(head.size)  # removes an incomplete last line
            file.seek(head.size)
            file.write(line + b"\n")
        self._write_head(self._key, head.after(line, mac))
        self._head = head.after(line, mac)
        return mac

    def rotate(self) -> None:
        """Begin another file; call this with the `lock`, after a reading of a file with lines."""
        os.replace(self._place("jsonl"), self._folder / f"{self._name}-{self._head.count:09d}.jsonl")
        flush(self._folder)  # before the head, which no longer has the lines of that file
        self._head = self._begin_file(self._key, self._head)

    def _begin_file(self, key: bytes, head: ChainEnd) -> ChainEnd:
        place = self._place("jsonl")
        with open(os.open(place, os.O_WRONLY | os.O_CREAT, 0o600), "wb"):
            pass
        head = replace(head, size=0, begun=head.count)
        self._write_head(key, head)
        return head

    def _load_head(self, key: bytes) -> bytes:
        """The head's bytes, after what a crash in `rotate` left undone; NewerFormat if they are of another format.

        A reader who may not write, of a copy that was made meanwhile, has what would be written.
        """
        raw = self._bytes("head")
        head = self._decode(key, raw)
        place, closed = self._place("jsonl"), f"{self._name}-{head.count:09d}.jsonl"
        begins_none = head.size and not (place.exists() and place.stat().st_size)
        self._is_between = bool(begins_none) and self._names()[-2:-1] == [closed]
        if not self._is_between:
            return raw
        if self._may_write():
            return self._begin_file(key, head).encode(key)
        return replace(head, size=0, begun=head.count).encode(key)

    def _decode(self, key: bytes, raw: bytes) -> ChainEnd:
        try:
            facts = json.loads(raw)
            text = {name: value for name, value in facts.items() if name != "mac"}
            if not hmac.compare_digest(signed(key, b"head", json.dumps(text).encode())[0] + b"\n", raw):
                raise ValueError
            files.check_format(self._place("head"), text["version"], VERSION)
            head = ChainEnd(**{n: v for n, v in text.items() if n != "version"} | {"last": bytes.fromhex(text["last"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, files.NewerFormat):
                raise
            raise self._damaged(f"{self._place('head').name} was changed, or the key is another's") from error
        return head

    def _check(self, key: bytes, raw: bytes, now: ChainEnd, shorter: ChainEnd) -> None:
        """Compare the head's bytes with what the lines say; repair them after a crash."""
        if raw == now.encode(key):
            return
        if raw != shorter.encode(key):
            head, lines = self._place("head").name, self._place("jsonl").name
            raise self._damaged(f"{head} does not fit {lines}, which lacks lines or has too many, or the key")
        if self._may_write():
            self._write_head(key, now)

    def _write_head(self, key: bytes, head: ChainEnd) -> None:
        flush(self._place("jsonl"))
        files.write_bytes(self._place("head"), head.encode(key))
        flush(self._folder)

    def _load_key(self) -> bytes:
        key = self._bytes("key")
        if len(key) != len(START):  # HMAC fills keys up with zeros
            raise self._damaged(f"{self._place('key').name} has {len(key)} bytes in place of {len(START)}")
        return key

    def _place(self, part: str) -> Path:
        return self._folder / f"{self._name}.{part}"

    def _bytes(self, part: str) -> bytes:
        return self._read(self._place(part))

    def _read(self, place: Path, begin: int = 0) -> bytes:
        if self._is_between and place == self._place("jsonl") and not place.exists():
            return b""
        try:
            with place.open("rb") as file:
                file.seek(begin)
                return file.read()
        except PermissionError as error:
            owner = self._folder.stat().st_uid
            raise files.Damaged(
                f"{place} can't be read by this user ({error.strerror}); nothing is damaged: run this as its owner, or "
                f"give the file back (chown --reference={self._folder} {place}), whose user has the number {owner}"
            ) from error
        except OSError as error:
            raise self._damaged(f"{place.name} can't be read ({error.strerror})") from error

    def _damaged(self, what: str) -> files.Damaged:
        return files.Damaged(f"{self._folder} is damaged: {what}; {self._remedy}")


def _begins(names: list[str]) -> list[int]:
    """For each file of lines the number of lines before it, which the names of closed files have."""
    return [0, *(int(name[-15:-6]) for name in names[:-1])]


def signed(key: bytes, before: bytes, text: bytes) -> tuple[bytes, bytes]:
    """The JSON object ``text`` with its MAC appended, and the MAC."""
    mac = hmac.digest(key, before + text, hashlib.sha256)
    return text[:-1] + b',"mac":"%s"}' % mac.hex().encode(), mac


def flush(place: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
