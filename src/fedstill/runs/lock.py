"""The lock of a run's folder, and the removal of a folder in which nothing ran."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedstill import files
from fedstill.errors import InputError

LOCK = ".lock"
_PATIENCE = 0.2
"""Seconds to wait for the lock: `is_locked` holds it for a moment."""


class Taken(InputError):
    """A folder has another run, or another process is writing it."""


def first_other(path: Path) -> str | None:
    """The name of a file that a new run's folder must not have, or None."""
    names = sorted(f.name for f in path.iterdir())
    return next((name for name in names if name != LOCK and not name.endswith(files.PART)), None)


@contextmanager
def locked(path: Path, has_run: Callable[[], bool]) -> Iterator[None]:
    """Make the folder ``path`` and lock it against other processes; the lock ends with the process.

    If the folder was new or empty and the block raises while ``has_run()`` is false, the block's files and all folders
    made here are deleted.

    Raises:
        Taken: another process holds the lock.
    """
    made = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with _held(path):
        new = first_other(path) is None
        try:
            yield
        except BaseException:
            if new and not has_run():
                _clear(path, made)
            raise


def empty(path: Path) -> None:
    """Delete all files of the folder except its lock, which no other process can take meanwhile.

    Raises:
        Taken: another process holds the lock.
    """
    with _held(path):
        for place in path.iterdir():
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            elif place.name != LOCK:
                place.unlink()


@contextmanager
def _held(path: Path) -> Iterator[None]:
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=_PATIENCE, poll_interval=0.05)
    except Timeout as error:
        raise Taken(f"another process is writing {path}; wait for it, or choose another --out") from error
    try:
        yield
    finally:
        lock.release()


def _clear(path: Path, made: list[Path]) -> None:
    """Delete the content of ``path`` and then the empty folders of ``made``."""
    for place in path.iterdir():
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
    with suppress(OSError):  # another run has begun beside this one
        for place in made:
            place.rmdir()


def is_locked(path: Path) -> bool:
    """Whether a process is writing the folder."""
    if not (path / LOCK).exists():
        return False
    try:
        with FileLock(path / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder of somebody else, which this process cannot lock
        return False
