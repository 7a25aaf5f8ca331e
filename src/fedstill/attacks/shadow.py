"""The shadow-model attack on membership: a network that classifies posteriors as of members or of others.

Shokri, Stronati, Song, Shmatikov, "Membership inference attacks against machine learning models", IEEE S&P 2017
(arXiv:1610.05820), in the form of Salem et al., NDSS 2019 (arXiv:1806.01246): one attack network for all classes, on
the whole posterior or on its three largest entries. Settings are those of FedKADP's own evaluation.

Differs from these: the shadow models are those of the likelihood-ratio attack, with the same clients and records as the
target, which makes the attack stronger; the network of the last epoch is used, not the best on validation rows.

Its rates at argmax are averages over all records, so values near one half do not show privacy. `fedstill.attacks.lira`
measures the few records that are identified with confidence.
"""

import torch
from jaxtyping import Bool, Float
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.base.records import Examples
from fedstill.base.seeds import draw_seed, isolated
from fedstill.base.settings import Settings
from fedstill.evaluation import predictions
from fedstill.train.sgd import Adam

KINDS = ("others", "members")
"""The attack network's classes: 0 and 1."""


class ShadowAttack(Settings):
    """The attack network and its training."""

    top: PositiveInt | None = None
    """Number of largest posterior entries used as features; None uses the full posterior in class order."""
    hidden: PositiveInt = 128
    """Width of the hidden layer."""
    training: Adam = Adam(lr=0.001, weight_decay=1e-7, batch_size=10, epochs=50)
    """Training on the posteriors of shadow models."""

    def fit(self, logits: Float[Tensor, "m classes"], member: Bool[Tensor, " m"], rng: torch.Generator) -> nn.Module:
        """Train the attack network on shadow models' logits."""
        rows = self._rows(logits, member)
        with isolated(draw_seed(rng)):
            layers = nn.Linear(rows.inputs().shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, len(KINDS))
        model = nn.Sequential(*layers)
        self.training.fit(model, rows, rng)
        return model

    def rates(
        self, model: nn.Module, logits: Float[Tensor, "n classes"], member: Bool[Tensor, " n"]
    ) -> dict[str, dict[str, float]]:
        """Precision, recall, F1 and number of records (``support``) of each of `KINDS`, at argmax.

        Precision is 0 without predictions of a kind, and recall is 0 without records of it.
        """
        guessed = predictions(model, self._rows(logits, member))
        return {kind: _rates(guessed == k, member == bool(k)) for k, kind in enumerate(KINDS)}

    def _rows(self, logits: Tensor, member: Tensor) -> Examples:
        posteriors = logits.double().softmax(1)
        if self.top is not None:
            posteriors = posteriors.topk(min(self.top, posteriors.shape[1]), 1).values
        return Examples(posteriors.float(), member.long())


def _rates(guessed: Bool[Tensor, " n"], true: Bool[Tensor, " n"]) -> dict[str, float]:
    right, predicted, support = (int(mask.sum()) for mask in (guessed & true, guessed, true))
    precision, recall = right / max(predicted, 1), right / max(support, 1)
    f1 = 2 * right / max(predicted + support, 1)
    return {"precision": precision, "recall": recall, "f1": f1, "support": support}
