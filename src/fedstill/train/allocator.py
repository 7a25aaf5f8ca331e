"""Settings of the C allocator: keep freed memory during training, return large blocks during communication."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
