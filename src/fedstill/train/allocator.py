"""The C allocator's treatment of large blocks: kept during training, returned at once during communication."""

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
    """Make this process keep up to 1 GiB of freed memory, and give no block under 1 GiB a mapping of its own.

    Each training step allocates and frees the same tensors. By default glibc gets the larger ones from the operating
    system and hands them back every time, and clearing the new pages can take a third of a small model's step. Call it
    before training. Arithmetic does not change.

    Returns:
        Whether it took effect; False where the C library is not glibc.
    """
    libc = _glibc()
    return libc is not None and all([libc.mallopt(name, _GIB) == 1 for name in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)])


@contextmanager
def handing_back() -> Iterator[None]:
    """Give every block from 128 KiB a mapping of its own meanwhile, which is gone when it is freed.

    Large messages are put together from pieces that are freed in another order than they came, by other threads than
    those that fetched them; kept, they would fill the process with holes. Afterwards it is as `keep_memory` wants it.
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
