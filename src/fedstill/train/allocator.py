"""Tell the C allocator to keep its memory: training then reuses its buffers from step to step."""

import ctypes
import sys

# Parameters of glibc's mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_GIB = 2**30


def keep_memory() -> bool:
    """Make this process keep up to 1 GiB of freed memory, and give no block under 1 GiB a mapping of its own.

    Each training step allocates and frees the same tensors. By default glibc gets the larger ones from the operating
    system and hands them back every time, and clearing the new pages can take a third of a small model's step. Call it
    once per process, before training; it can't be undone. Arithmetic does not change.

    Returns:
        Whether it took effect; False where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    done = [libc.mallopt(name, _GIB) == 1 for name in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)]
    return all(done)


def give_back() -> bool:
    """Hand the memory that this process has freed back to the system, after large things that won't come again soon.

    Returns:
        Whether anything was handed back; False where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    return hasattr(libc, "gnu_get_libc_version") and bool(libc.malloc_trim(0))
