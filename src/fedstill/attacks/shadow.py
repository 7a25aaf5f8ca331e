"""The shadow-model attack on membership: a network that tells members' posteriors from others'.

Shokri, Stronati, Song, Shmatikov, "Membership inference attacks against machine learning models", IEEE S&P 2017
(arXiv:1610.05820), in the form of Salem et al., NDSS 2019 (arXiv:1806.01246): one attack network for all classes, on
the whole posterior or on its three largest entries. Settings are those with which FedKADP judges itself.

Differs from these: the shadow models are those of the likelihood-ratio attack, of the same clients and about the same
records as the target, which makes the attack stronger; the last epoch counts, not the best on held-out rows.

Its figures at argmax are averages over all records: near one half they say little of privacy. `fedstill.attacks.lira`
asks for the few records that are surely found.
"""

import torch
from jaxtyping import Bool, Float
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.evaluate import predictions
from fedstill.records import Examples
from fedstill.seeds import draw_seed, isolated
from fedstill.settings import Settings
from fedstill.train.adam import Adam

KINDS = ("others", "members")
"""The attack network's classes: 0 and 1."""


class ShadowAttack(Settings):
    """The attack network and its training."""

    top: PositiveInt | None = None
    """Number of largest entries of a posterior that it sees; None for the whole posterior, by class."""
    hidden: PositiveInt = 128
    """Width of the hidden layer."""
    training: Adam = Adam(lr=0.001, weight_decay=1e-7, batch_size=10, epochs=50)
    """Training on posteriors of shadow models."""

    def fit(self, logits: Float[Tensor, "m classes"], member: Bool[Tensor, " m"], rng: torch.Generator) -> nn.Module:
        """Train the attack network on shadow models' logits of members and of others."""
        rows = self._rows(logits, member)
        with isolated(draw_seed(rng)):
            layers = nn.Linear(rows.inputs().shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, len(KINDS))
        model = nn.Sequential(*layers)
        self.training.fit(model, rows, rng)
        return model

    def judge(
        self, model: nn.Module, logits: Float[Tensor, "n classes"], member: Bool[Tensor, " n"]
    ) -> dict[str, dict[str, float]]:
        """Precision, recall and F1 of `KINDS` at argmax, with how many records each has (``support``).

        Precision where nothing is taken for a kind, and recall where there is none of it, are 0.
        """
        guessed = predictions(model, self._rows(logits, member))
        return {kind: _rates(guessed == k, member == bool(k)) for k, kind in enumerate(KINDS)}

    def _rows(self, logits: Tensor, member: Tensor) -> Examples:
        posteriors = logits.double().softmax(1)
        if self.top is not None:
            posteriors = posteriors.topk(min(self.top, posteriors.shape[1]), 1).values
        return Examples(posteriors.float(), member.long())


def _rates(guessed: Bool[Tensor, " n"], true: Bool[Tensor, " n"]) -> dict[str, float]:
    right, taken, support = (int(mask.sum()) for mask in (guessed & true, guessed, true))
    precision, recall = right / max(taken, 1), right / max(support, 1)
    f1 = 2 * right / max(taken + support, 1)
    return {"precision": precision, "recall": recall, "f1": f1, "support": support}
