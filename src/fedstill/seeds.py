"""Named random streams.

Every random draw of a run comes from a stream named by ``(seed, *names)``, for example ``(seed, "client", 3, "round",
2, "batches")``. A stream depends on its name and on nothing else: not on the order of calls, not on the number of
workers, not on the engine. That is what makes runs bit-identical everywhere and resumable anywhere.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

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


def draw_seed(rng: torch.Generator) -> int:
    """A seed for another stream: the next value of ``rng``."""
    return int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device))


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Give code that can only draw from torch's global generator (layer initialisation, dropout) a stream of its own.

    The global state is put back on leaving, so nothing outside can tell that the block ran.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():  # torch.manual_seed keeps a stack trace for each device that is not there
            torch.cuda.manual_seed_all(seed)
        yield


class Noise(Protocol):
    """Where a privacy mechanism's randomness comes from; every draw is float64 and independent of all others."""

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        """Standard normal values."""

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Values in [0, 1)."""


class Simulated:
    """Noise of a simulation: from a named stream, so that a run can be repeated to the bit. It protects nobody."""

    def __init__(self, rng: torch.Generator) -> None:
        """``rng`` is a CPU generator that nothing else draws from."""
        self._rng = rng

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        """See `Noise.gaussian`."""
        return torch.randn(*shape, dtype=torch.float64, generator=self._rng)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """See `Noise.uniform`."""
        return torch.rand(*shape, dtype=torch.float64, generator=self._rng)


class Entropy:
    """Noise from the operating system's cryptographic generator: nobody can draw it again."""

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        """See `Noise.gaussian`; the quantiles of 53-bit uniforms in (0, 1), so values reach 8.2 either way."""
        # half a step off the grid: neither 0 nor 1, whose quantiles are infinite
        quantiles: Tensor = torch.special.ndtri(self.uniform(shape) + 2.0**-54)
        return quantiles

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """See `Noise.uniform`."""
        count = math.prod(shape)
        words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
        return torch.from_numpy(words.astype(np.float64) * 2.0**-53).reshape(tuple(shape))
