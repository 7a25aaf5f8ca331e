"""FedKADP's private training: DP-SGD with a public sampling rate, and feedback from public records.

Jiang, Zhao, Li, Xue 2024 (Electronics 13(17), 3538), section 3.2 and equations 17 and 20. The constants are ours: the
paper prints neither weights, thresholds nor factors.
"""

import math
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from scipy.special import expit
from torch import Tensor, nn

from fedstill.base.settings import Settings
from fedstill.privacy.dp_sgd import DPSGD, per_record_cross_entropy
from fedstill.privacy.mechanisms import gaussian_event
from fedstill.privacy.per_record import PerRecordLoss
from fedstill.privacy.releases import Event


class PrivateSGD(Settings):
    """DP-SGD with a public sampling rate, so that nothing depends on a client's number of records."""

    lr: PositiveFloat = 0.005
    """Learning rate."""
    steps: PositiveInt = 20
    """Steps of one round (E)."""
    clip: PositiveFloat = 1.0
    """Largest length of one record's gradient (c)."""
    batch_size: PositiveInt = 32
    """Expected number of records in a step's batch, for a client with the supposed number of records (B)."""
    supposed_records: Annotated[int, Ge(1)] = 600
    """Public guess of a client's number of records. A record is in a step's batch with probability B over this."""

    @property
    def sampling(self) -> float:
        """q, the probability that a record is in a step's batch."""
        return min(1.0, self.batch_size / self.supposed_records)

    def event(self, noise_multiplier: float) -> Event:
        """The cost of one round with this noise, the same as of `mechanism`, for `Federation.able`."""
        return gaussian_event(noise_multiplier, self.sampling, self.steps)

    def mechanism(
        self,
        model: nn.Module,
        noise_multiplier: float,
        *,
        clip: float | None = None,
        loss: PerRecordLoss = per_record_cross_entropy,
    ) -> DPSGD:
        """The training of ``model`` as one release; ``clip`` replaces the setting."""
        return DPSGD(
            model=model,
            lr=self.lr,
            clip=self.clip if clip is None else clip,
            noise_multiplier=noise_multiplier,
            sampling=self.sampling,
            steps=self.steps,
            batch_size=self.batch_size,
            loss=loss,
        )


_LEAST_GAIN = 0.005
"""Lower limit of the gain in accuracy in a denominator."""


class PublicLoss:
    """The model's loss and accuracy on public records, and its change, by round; round 0 is w_0.

    Attributes:
        tensors: the numbers by name, float64 ``(rounds + 1,)``, to be carried through `Federation.rounds`.
    """

    def __init__(self, rounds: int) -> None:
        """Make an empty record of ``rounds`` rounds."""
        unknown = torch.full((rounds + 1,), math.nan, dtype=torch.float64)
        self.tensors = {name: unknown.clone() for name in ("change", "loss", "accuracy")}

    def record(self, number: int, **numbers: float) -> None:
        """Set a round's ``change`` (``|theta_t - theta_{t-1}|``), ``loss`` or ``accuracy``; 1e300 where not finite."""
        for name, value in numbers.items():
            self.tensors[name][number] = value if math.isfinite(value) else 1e300

    def __getitem__(self, name: str) -> Tensor:
        """The numbers ``name`` of all rounds; NaN for later rounds."""
        return self.tensors[name]


class Feedback(Settings):
    """Settings of the metric, and of the rules for temperature and noise."""

    weights: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (0.25, 0.25, 0.25, 0.25)
    """Weights of the model's change, of loss, of accuracy and of time in the metric (w_g, w_l, w_a, w_t)."""
    time_slope: PositiveFloat = 10.0
    """Steepness of M_t. The paper's formula has 1 and spans only 38 to 62."""
    loss_fall: Literal["signed", "magnitude"] = "signed"
    """Loss's part of the metric where the loss falls by a share r < 0, whose sign is lost in print: 100 (1 - r), which
    is cut to 100, or 100 (1 - |r|)."""
    coldest: PositiveFloat = 2.0
    """Smallest temperature of distillation (rho_min)."""
    hottest: PositiveFloat = 3.0
    """Largest temperature of distillation (rho_max)."""
    steepness: PositiveFloat = 0.1
    """Steepness of the temperature's rise at its threshold (k)."""
    temperature_from: NonNegativeFloat = 70.0
    """Metric at which the temperature is midway (Metric_KD)."""
    noise_from: NonNegativeFloat = 80.0
    """Metric from which on the noise falls (Metric_DP)."""
    decay: Annotated[float, Gt(0), Le(1)] = 0.97
    """Factor by which the noise falls in a round (p)."""
    least_noise: NonNegativeFloat = 1.0
    """Smallest noise multiplier."""

    @model_validator(mode="after")
    def _ordered(self) -> "Feedback":
        if self.coldest > self.hottest:
            raise ValueError(f"coldest is {self.coldest}, hottest {self.hottest}; coldest must not be above hottest")
        return self

    def metric(self, public: PublicLoss, now: int, rounds: int) -> float:
        """Stability of training after round ``now`` of ``rounds``, from 0 to 100 if the weights sum to 1.

        ``M_g = max(100 (1 - |g_t - g_avg| / g_avg), 0)`` with ``g_avg`` the mean of g_1 to g_{t-1};
        ``M_l = 100 (1 - r)`` (or ``100 (1 - |r|)``, see `loss_fall`) for ``r = (L_t - L_{t-1}) / L_{t-1} < 0``, else
        ``100 max(1 - r / 2, 0)``;
        ``M_a = 100 |(a_t - a_{t-1}) / (a_{t-1} - a_{t-2})|``; ``M_t = 100 / (1 + exp(-slope (t / T - 1/2)))``. Each is
        clamped to [0, 100], or 0 if it lacks earlier rounds.
        """
        change, loss, accuracy = (public[name] for name in ("change", "loss", "accuracy"))
        parts = [0.0, 0.0, 0.0, 100 * float(expit(self.time_slope * (now / rounds - 0.5)))]
        if now >= 2 and (usual := float(change[1:now].mean())) > 0:
            parts[0] = 100 * (1 - abs(float(change[now]) - usual) / usual)
        if float(loss[now - 1]) > 0:
            rise = float(loss[now] / loss[now - 1]) - 1
            falling = rise if self.loss_fall == "signed" else -rise
            parts[1] = 100 * (1 - falling) if rise < 0 else 100 * (1 - rise / 2)
        if now >= 2:
            gain = abs(float(accuracy[now - 1] - accuracy[now - 2]))
            parts[2] = 100 * abs(float(accuracy[now] - accuracy[now - 1])) / max(gain, _LEAST_GAIN)
        return sum(w * max(0.0, min(part, 100.0)) for w, part in zip(self.weights, parts, strict=True))

    def temperature(self, metric: float) -> float:
        """``rho = rho_min + (rho_max - rho_min) / (1 + exp(-k (Metric - Metric_KD)))``."""
        share = float(expit(self.steepness * (metric - self.temperature_from)))
        return self.coldest + (self.hottest - self.coldest) * share

    def noise(self, before: float, metric: float) -> float:
        """``sigma_t = p sigma_{t-1}`` if the metric reaches Metric_DP, else ``sigma_{t-1}``."""
        if not metric >= self.noise_from:
            return before
        return max(self.decay * before, min(before, self.least_noise))
