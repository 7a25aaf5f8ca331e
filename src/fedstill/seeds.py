"""Named random streams.

Every random draw of a run comes from a stream named by ``(seed, *names)``, for example ``(seed, "client", 3, "round",
2, "batches")``. A stream depends on its name and on nothing else: not on the order of calls, not on the number of
workers, not on the engine. That is what makes runs bit-identical everywhere and resumable anywhere.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Name = str | int


def derive(seed: int, *names: Name) -> int:
    """A 63-bit seed for the stream called ``names`` under ``seed``: BLAKE2b of the unambiguous text of both."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, *names: Name, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator at the start of the stream called ``names``."""
    return torch.Generator(device).manual_seed(derive(seed, *names))


def numpy_stream(seed: int, *names: Name) -> np.random.Generator:
    """The same stream names for code that draws with NumPy."""
    return np.random.default_rng(derive(seed, *names))


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Give code that can only draw from torch's global generator (layer initialisation, dropout) a stream of its own.

    The global state is put back on leaving, so nothing outside can tell that the block ran.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield
