"""Inference of true labels from randomised labels: a network trained on the likelihood of the randomised labels.

Patrini, Rozza, Menon, Nock, Qu 2017 (arXiv:1609.03683), forward correction, with a row of probabilities for each record
in place of one matrix, since the randomiser is known and may have a different prior for each record.
"""

import torch
from jaxtyping import Float, Int64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill.evaluate import outputs
from fedstill.records import Examples, Records
from fedstill.train.adam import Adam

_LEAST = 1e-30
"""Lower limit of likelihoods, of which float32 has the logarithm."""


class Denoising(Adam):
    """Adam on ``-log sum_y p(y | x) P[given label | y]``, whose optimum is the distribution of true labels."""

    lr: PositiveFloat = 3e-4
    """Learning rate."""
    batch_size: PositiveInt = 64
    """Records per step."""
    epochs: PositiveInt = 10
    """Passes over the records. With many passes the network memorises single labels."""

    def likeliest(
        self, model: nn.Module, records: Records, likelihood: Float[Tensor, "n classes"], rng: torch.Generator
    ) -> Int64[Tensor, " n"]:
        """The label y with the largest ``p(y | x) P[given label | y]`` for each record.

        Args:
            model: the network p, trained in place.
            records: ``n`` images; their labels are ignored.
            likelihood: the given label's probability for each true label; rows need not sum to 1.
            rng: draws the batches.

        Raises:
            Diverged: the training left weights that are not finite.
        """
        log_likelihood = likelihood.float().clamp_min(_LEAST).log()
        self.fit(model, Examples(records, log_likelihood), rng, loss=_negative_log_likelihood)
        predicted = torch.cat(outputs(model, records, 500)).log_softmax(1)
        return (predicted + log_likelihood).argmax(1)


def _negative_log_likelihood(logits: Tensor, x: Tensor, log_likelihood: Tensor) -> Tensor:
    loss: Tensor = -(logits.log_softmax(1) + log_likelihood).logsumexp(1).mean()
    return loss
