"""Fed-DAFL: DAFL's generator with the clients' models for its teacher; a baseline of DENSE.

Chen et al., "Data-free learning of student networks", ICCV 2019 (arXiv:1904.01186), as Zhang et al. (DENSE,
arXiv:2112.12371, section 4) compare with it.

Differs from the paper (docs/methods/fed-dafl.md has the whole list):

* the teacher is the mean of the clients' logits;
* weights of the loss are those of Fast-Datafree's re-run; the student learns with DENSE's settings.
"""

from dataclasses import dataclass

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.distill.dafl import DAFL, DAFLSynthesis
from fedstill.distill.teachers import Teachers
from fedstill.methods.datafree import DataFreeMethod, Images
from fedstill.protocol import Records


class FedDAFL(DataFreeMethod):
    """One upload of each client's model; DAFL's generator and a student at the server, and no data."""

    generation: DAFL = DAFL()
    """How images are made."""
    pool: PositiveInt = 1
    """How many epochs' images the student sees: DAFL's are used once."""

    @property
    def images_per_epoch(self) -> int:
        """See `DataFreeMethod`."""
        return self.generation.steps * self.generation.batch_size

    def images(self, like: Records, rng: torch.Generator) -> Images:
        """A generator that wants the teachers sure, awake and balanced."""
        return _Alone(self.generation.start(like, rng))


@dataclass(frozen=True)
class _Alone:
    """DAFL's images, which don't depend on the student."""

    inner: DAFLSynthesis

    @property
    def tensors(self) -> dict[str, Tensor]:
        """See `Images`."""
        return self.inner.tensors

    def epoch(self, teachers: Teachers, student: nn.Module, rng: torch.Generator) -> tuple[Records, Tensor]:
        """See `Images`."""
        return self.inner.epoch(teachers, rng)
