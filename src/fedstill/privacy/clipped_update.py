"""A client's whole model update as one release, clipped, with Gaussian noise."""

from dataclasses import dataclass

from jaxtyping import Float, Float64
from torch import Tensor
from typing_extensions import override

from fedstill.privacy.mechanisms import ROUNDING, GaussianMechanism, check_noise, check_positive, clipped
from fedstill.seeds import Noise


@dataclass(frozen=True)
class ClippedUpdate(GaussianMechanism[Float[Tensor, " d"], Float64[Tensor, " d"]]):
    """A vector that depends on all records at once, clipped to length ``radius``, with Gaussian noise.

    Attributes:
        radius: S, the largest length of the vector; a longer one is scaled down. Positive, public.
        noise_multiplier: standard deviation of the noise divided by the sensitivity.
    """

    radius: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_positive("radius", self.radius)

    @property
    def sensitivity(self) -> float:
        """2S: the vector lies in a ball of radius S whatever the records are, even if all of them change."""
        return 2 * self.radius * ROUNDING

    @property
    @override
    def theorem(self) -> str:
        return (
            f"the clipped update has length at most {self.radius:g} whatever the records, so that other records, one "
            f"or all, move it by at most {2 * self.radius:g}, the sensitivity; Gaussian mechanism (Balle, Wang 2018, "
            "theorem 8)"
        )

    def __call__(self, rows: Float[Tensor, " d"], noise: Noise) -> Float64[Tensor, " d"]:
        """The clipped vector ``(d,)`` with noise; a vector that is not finite counts as 0."""
        return self.noised(clipped(rows[None], self.radius)[0], noise)
