"""Named random streams.

Every random draw of a run comes from a stream named by ``(seed, *names)``, for example ``(seed, "client", 3, "round",
2, "batches")``. A stream depends only on its name, not on the order of calls, the number of workers or the engine. So
runs are bit-identical on every engine and can be resumed at any point.
"""

import hashlib
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from fedstill.base import processes

Name = str | int


def derive(seed: int, *names: Name) -> int:
    """A 63-bit seed for the stream ``(seed, *names)``: BLAKE2b of an unambiguous text of it."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, *names: Name, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator at the start of the stream ``(seed, *names)``."""
    return torch.Generator(device).manual_seed(derive(seed, *names))


def numpy_stream(seed: int, *names: Name) -> np.random.Generator:
    """A new NumPy generator at the start of the stream ``(seed, *names)``."""
    return np.random.default_rng(derive(seed, *names))


def draw_seed(rng: torch.Generator) -> int:
    """A seed for another stream: the next value of ``rng``."""
    return int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device))


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python inside the block; restore their states afterwards.

    It is for code that can only draw from a global generator: layer initialisation, dropout, scikit-learn's methods.
    Other threads wait at their own block meanwhile.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with processes.PROCESS, torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():  # without a GPU, torch's seeding would store a stack trace at each call
            torch.cuda.manual_seed_all(seed)
        numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002 - others draw from it
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


class Noise(Protocol):
    """Source of a privacy mechanism's randomness; all draws are float64 and independent."""

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        """Standard normal values."""

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Values in [0, 1)."""

    def words(self, count: int) -> NDArray[np.uint64]:
        """Words of 64 fair bits, ``(count,)``."""

    def added(self, exact: Tensor, std: float) -> Tensor:
        """``exact`` (float64) plus Gaussian noise of standard deviation ``std``."""
        return exact + std * self.gaussian(exact.shape).to(exact.device)


class Simulated(Noise):
    """Noise of a simulation, from a CPU generator of its own; whoever knows the seed can remove it."""

    def __init__(self, rng: torch.Generator) -> None:
        self._rng = rng

    @override
    def gaussian(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self._rng)

    @override
    def uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self._rng)

    @override
    def words(self, count: int) -> NDArray[np.uint64]:
        some = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=self._rng)
        return some.numpy().view(np.uint64)


class Entropy(Noise):
    """Noise from the operating system's cryptographic generator, which nobody can repeat.

    A float64 sum of a value and noise has last bits that depend on the value (Mironov 2012, "On significance of the
    least significant bits for differential privacy"). `added` therefore releases whole multiples of a public grid: the
    exact sum, rounded, so that rounding is post-processing. Each multiple's probability differs from that of the
    rounded real Gaussian by a factor within ``exp(+-1e-10)``: a quantile is wrong by at most 1e-14 standard deviations
    and a uniform by 2^-52 of itself, where a cell of the grid is 2^-11 standard deviations wide or wider. Tails end at
    8.2 standard deviations, which have a probability of 2^-54. So d numbers add at most ``2e-10 d`` to epsilon and
    ``(1 + e^epsilon) 2^-54 d`` to delta: what one side cannot reach, the other may reach e^epsilon times as often.
    """

    @override
    def gaussian(self, shape: Sequence[int]) -> Tensor:
        words = self.words(2 * math.prod(shape)).reshape(2, -1)
        # a uniform in (0, 1/2), as exact near 0 as elsewhere: an exponent, 1 with half the probability of 2 and so on,
        # 52 digits, and a sign; both tails are the lower one, as no float64 near 1 resolves the upper
        exponent = np.frexp((words[0] >> np.uint64(11)).astype(np.float64))[1] - 54  # -1 to -54
        digits = 1 + (words[1] >> np.uint64(12)).astype(np.float64) * 2.0**-52
        lower = torch.from_numpy(np.ldexp(digits, exponent - 1))
        sign = torch.from_numpy((words[1] & np.uint64(1)).astype(np.float64) * 2 - 1)
        quantiles: Tensor = (torch.special.ndtri(lower) * sign).reshape(tuple(shape))
        return quantiles

    @override
    def uniform(self, shape: Sequence[int]) -> Tensor:
        words = self.words(math.prod(shape)) >> np.uint64(11)
        return torch.from_numpy(words.astype(np.float64) * 2.0**-53).reshape(tuple(shape))

    @override
    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    @override
    def added(self, exact: Tensor, std: float) -> Tensor:
        if not std:
            return exact
        grid = 2.0 ** (math.frexp(std)[1] - 11)  # std / 2048 < grid <= std / 1024
        most = 2.0**51 * grid  # values that float64 can't add to the noise exactly; no honest one is as large
        whole = (exact.clamp(-most, most) / grid).floor()
        rest = exact.clamp(-most, most) - whole * grid  # exact, as the grid is a power of 2
        noise = std * self.gaussian(exact.shape).to(exact.device)
        return (whole + ((rest + noise) / grid).round()) * grid
