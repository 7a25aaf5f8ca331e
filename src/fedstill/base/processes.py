"""Processes and threads: locks, worker processes, the memory that their allocator keeps."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

PROCESS = threading.RLock()
"""Held while torch's global generator, the number of threads or Python's warning filters are changed: in every step of
a client in this process, and in every training. So the runs of several threads take turns; worker processes do not."""
LITERALS = threading.Lock()
"""Held while NumPy reads the header of a ``.npy`` file: it calls `ast.literal_eval`, which fails at times in two
threads at once. No other lock is requested meanwhile."""


_PRELOADED = "fedstill.experiment.run"
"""The module that the copied process imports; that starts no thread and touches no GPU (tests/test_processes.py)."""


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a daemonic process that calls a function with arguments, which must be picklable."""
    process = _context().Process(target=_work, args=(dict(os.environ), target, args), daemon=True)
    process.start()
    return process


def pool(number: int, begin: Callable[[], None]) -> ProcessPoolExecutor:
    """A pool of processes, each of which calls ``begin`` first."""
    return ProcessPoolExecutor(number, mp_context=_context(), initializer=_work, initargs=(dict(os.environ), begin, ()))


def _context() -> ForkServerContext | SpawnContext:
    """Python's way to start processes: copies of one without threads on Linux; elsewhere each imports anew."""
    if sys.platform != "linux":
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
