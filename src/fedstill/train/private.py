"""Settings of a client's training by DP-SGD."""

from typing import Annotated

from annotated_types import Ge
from pydantic import PositiveFloat, PositiveInt
from torch import nn

from fedstill.privacy.dp_sgd import DPSGD, per_record_cross_entropy
from fedstill.privacy.events import Event
from fedstill.privacy.mechanisms import gaussian_event
from fedstill.privacy.per_record import PerRecordLoss
from fedstill.settings import Settings


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
