"""True labels guessed from randomised ones: a network is trained by the likelihood of what the randomiser gave.

Patrini, Rozza, Menon, Nock, Qu 2017 (arXiv:1609.03683), forward correction, with a row for each record in place of one
matrix for all, since the randomiser is known and may have a prior of its own for each record.
"""

import torch
from jaxtyping import Float, Int64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill.evaluate import outputs
from fedstill.records import Examples, Records
from fedstill.train.adam import Adam

_LEAST = 1e-30
"""Likelihoods below this count as this: float32 has logarithms of it."""


class Denoising(Adam):
    """Adam on ``-log sum_y p(y | x) P[given label | y]``, whose optimum is the distribution of true labels."""

    lr: PositiveFloat = 3e-4
    """Learning rate."""
    batch_size: PositiveInt = 64
    """Records per step."""
    epochs: PositiveInt = 10
    """Passes over the records; many make the network remember single labels."""

    def likeliest(
        self, model: nn.Module, records: Records, likelihood: Float[Tensor, "n classes"], rng: torch.Generator
    ) -> Int64[Tensor, " n"]:
        """For each record the label y with the largest ``p(y | x) P[given label | y]``.

        Args:
            model: trained in place; its start is the prior knowledge.
            records: ``n`` images; their own labels are ignored.
            likelihood: the probability of the label that was given, for each true label; rows need no sum.
            rng: draws the batches.

        Raises:
            Diverged: the training left weights that are not finite.
        """
        given = likelihood.float().clamp_min(_LEAST).log()
        self.fit(model, Examples(records, given), rng, loss=_surprise)
        said = torch.cat(outputs(model, records, 500)).log_softmax(1)
        return (said + given).argmax(1)


def _surprise(logits: Float[Tensor, "n classes"], x: Tensor, given: Float[Tensor, "n classes"]) -> Tensor:
    surprise: Tensor = -(logits.log_softmax(1) + given).logsumexp(1).mean()
    return surprise
