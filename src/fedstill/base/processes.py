"""Processes and threads: locks, worker processes, the memory that their allocator keeps."""

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PROCESS = threading.RLock()
"""Held while torch's global generator, the number of threads or Python's warning filters are changed: in every step of
a client in this process, and in every training. So the runs of several threads take turns; worker processes do not."""
LITERALS = threading.Lock()
"""Held while NumPy reads the header of a ``.npy`` file: it calls `ast.literal_eval`, which fails at times in two
threads at once. No other lock is requested meanwhile."""


_PRELOADED = "fedstill.experiment.run"
"""The module that the copied process imports; that starts no thread and touches no GPU (tests/test_processes.py)."""


_IMPORTED_BY = os.getpid()
_LONGEST = 60
"""Longest name of the folder for temporary files in which a socket has place (108 bytes with its own name)."""


def cores(own: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of cores that this process may use: those of its affinity, or fewer by a container's quota (cgroups).

    Args:
        own: file with the control groups of the process.
        groups: folder of all control groups, of version 2 or 1.
    """
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = [line.split(":", 2) for line in own.read_text("utf-8").splitlines()]
    except OSError:  # no Linux
        return number
    for _, kinds, path in lines:
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = groups / kinds if kinds else groups
        for folder in {top / path.lstrip("/"), top, groups / "cpu" if kinds else top}:
            if quota := _quota(folder):
                number = min(number, quota)
    return number


def _quota(folder: Path) -> int | None:
    """The cores that a control group's quota allows, rounded up; None without a quota."""
    try:
        if (file := folder / "cpu.max").exists():
            limit, period = file.read_text("utf-8").split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text("utf-8") for name in ("quota", "period"))
        return max(1, math.ceil(int(limit) / int(period))) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return None


def is_copy() -> bool:
    """Whether this process was copied from one that had imported this module, whose threads it lacks."""
    return os.getpid() != _IMPORTED_BY


def why_no_workers() -> str:
    """Why this process can start no others that import its code; empty if it can."""
    if multiprocessing.current_process().daemon:
        return "this is a daemonic process, which may have no children, as of multiprocessing.Pool"
    if is_copy():
        return "this process is a copy of another, as os.fork makes"
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and not Path(script).exists():
        return f"the script {script} is no file that others could import"
    return ""


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a daemonic process that calls a function with arguments, which must be picklable."""
    process = _context().Process(target=_work, args=(dict(os.environ), target, args), daemon=True)
    process.start()
    return process


def pool(number: int, begin: Callable[[], None]) -> ProcessPoolExecutor:
    """A pool of processes, each of which calls ``begin`` first."""
    return ProcessPoolExecutor(number, mp_context=_context(), initializer=_work, initargs=(dict(os.environ), begin, ()))


def _context() -> ForkServerContext | SpawnContext:
    """Python's way to start processes: copies of one without threads on Linux; elsewhere each imports anew.

    So it is where the folder for temporary files has a name too long for the socket of that one process.
    """
    if sys.platform != "linux" or len(os.fsencode(tempfile.gettempdir())) > _LONGEST:
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([_PRELOADED])
    resource_tracker.ensure_running()  # which would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # while it imports, Ctrl-C would end it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return server


def _work(environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call a function with this process's own parent and its environment, which the copied process need not have."""
    global _IMPORTED_BY
    _IMPORTED_BY = os.getpid()  # its parent, that one process without threads, computed nothing
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for programs that the target starts
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(*args)


def _end_with_parent() -> None:
    """End this process with its parent, so that a parent killed by `kill -9` leaves no process computing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# Parameters of glibc's mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_GIB = 2**30
_SMALL = 2**17


def keep_memory() -> bool:
    """Make this process keep up to 1 GiB of freed memory, and give no block under 1 GiB its own mapping.

    Each training step allocates and frees the same tensors. By default glibc returns large ones to the operating system
    every time, and clearing the new pages can take a third of a small model's step. Arithmetic does not change.

    Returns:
        Whether it took effect; False if the C library is not glibc.
    """
    libc = _glibc()
    return libc is not None and all([libc.mallopt(name, _GIB) == 1 for name in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)])


@contextmanager
def returning_memory() -> Iterator[None]:
    """Inside the block, return freed blocks from 128 KiB on to the operating system at once; then `keep_memory` again.

    Large messages are assembled from pieces that other threads free in another order. Keeping these would fragment the
    process's memory.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _SMALL)
        libc.malloc_trim(0)
    try:
        yield
    finally:
        keep_memory()


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
