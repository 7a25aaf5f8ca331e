"""Losses for labels that are skewed or randomised: LDAM, and the forward correction of noisy labels.

Cao, Wei, Gaidon, Arechiga, Ma, "Learning imbalanced datasets with label-distribution-aware margin loss", NeurIPS 2019
(arXiv:1906.07413), equations 13 and 14, Algorithm 1, and the authors' code (kaidic/LDAM-DRW, ``losses.py``).

Patrini, Rozza, Menon, Nock, Qu 2017 (arXiv:1609.03683), forward correction, with a row of probabilities for each record
in place of one matrix, since the randomiser is known and may have a different prior for each record.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Le, Lt
from jaxtyping import Float, Int64
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.base.records import Examples, Records
from fedstill.base.settings import Settings
from fedstill.evaluation import outputs
from fedstill.train.sgd import Adam


def margins(counts: Int64[Tensor, " classes"], largest: float = 0.5) -> Float[Tensor, " classes"]:
    """``m_c = largest * n_c^(-1/4) / max_c n_c^(-1/4)``: largest for the rarest class, 0 for absent classes.

    Raises:
        ValueError: no class has a record.
    """
    raw = torch.where(counts > 0, counts.clamp_min(1).float() ** -0.25, 0.0)
    if not raw.any():
        raise ValueError("0 records have no margins; at least 1 is needed")
    return largest * raw / raw.max()


def class_weights(counts: Int64[Tensor, " classes"], beta: float = 0.9999) -> Float[Tensor, " classes"]:
    """``(1 - beta) / (1 - beta^n_c)``, scaled to mean 1 over the classes with records; 0 for absent classes.

    Cui et al. 2019 (arXiv:1901.05555), "effective number of samples".

    Raises:
        ValueError: no class has a record.
    """
    present = counts > 0
    if not present.any():
        raise ValueError("0 records have no class weights; at least 1 is needed")
    # expm1: beta is so near 1 that 1 - beta^n loses digits
    effective = -torch.expm1(counts.clamp_min(1).double() * torch.log(torch.tensor(beta, dtype=torch.float64)))
    raw = torch.where(present, (1 - beta) / effective, 0.0)
    return (raw / raw[present].mean()).float()


class LDAM(Settings):
    """Settings of the margins and class weights, which follow from a client's class counts."""

    largest: PositiveFloat = 0.5
    """Margin of the rarest class, in logits."""
    scale: PositiveFloat = 4.0
    """Factor s of the logits. The paper's 30 is for cosines in [-1, 1]. A linear layer's logits are unbounded, and s
    multiplies its gradients: on digits with 120 records of one class down to 3 of another, accuracies for s of 1, 4, 10
    and 30 were 0.88, 0.88, 0.78 and 0.27, and 0.85 for cross-entropy ("dense-mnist", 20 epochs)."""
    beta: Annotated[float, Ge(0), Lt(1)] = 0.9999
    """Beta of the class weights, in [0, 1); with 0 all classes have equal weights."""
    defer: Annotated[float, Ge(0), Le(1)] = 0.8
    """Share of the epochs before class weights apply (the paper: 160 of 200); with 1 they never apply."""

    def loss(self, counts: Int64[Tensor, " classes"]) -> "LDAMLoss":
        """The loss for one training on records with these class counts; a ValueError if all counts are 0."""
        return LDAMLoss(self, counts)


class LDAMLoss:
    """``CE(s (z - m_y 1_y), y)``, weighted by class after `LDAM.defer` of the epochs, which `on_epoch` counts.

    ::

        loss = ldam.loss(client.train.class_counts())
        sgd.fit(model, client.train, rng, loss=loss, on_epoch=loss.on_epoch)
    """

    def __init__(self, settings: LDAM, counts: Int64[Tensor, " classes"]) -> None:
        """Compute margins and weights from class counts."""
        self._settings = settings
        self._margins = margins(counts, settings.largest)
        self._later = class_weights(counts, settings.beta) if settings.defer < 1 else None
        self._weights = self._later if settings.defer == 0 else None

    def __call__(self, logits: Float[Tensor, "n classes"], x: Tensor, labels: Int64[Tensor, " n"]) -> Float[Tensor, ""]:
        """Mean over the batch; once class weights apply, the weighted mean of `torch.nn.functional.cross_entropy`."""
        margin = self._margins.to(logits.device)[labels]
        lowered = logits.scatter_add(1, labels[:, None], -margin[:, None].to(logits.dtype))
        weights = None if self._weights is None else self._weights.to(logits.device, logits.dtype)
        return cross_entropy(self._settings.scale * lowered, labels, weight=weights)

    def on_epoch(self, done: int, total: int) -> None:
        """Record that ``done`` of ``total`` epochs are over, as ``SGD.fit`` passes them."""
        if done >= self._settings.defer * total:
            self._weights = self._later


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
        self.fit(model, Examples(records, log_likelihood), rng, loss=negative_log_likelihood)
        predicted = torch.cat(outputs(model, records, 500)).log_softmax(1)
        return (predicted + log_likelihood).argmax(1)


def negative_log_likelihood(logits: Tensor, x: Tensor, log_likelihood: Tensor) -> Tensor:
    """The mean of ``-log(sum over classes of p(class | x) P[given label | class])``; shapes ``(n, classes)``."""
    loss: Tensor = -(logits.log_softmax(1) + log_likelihood).logsumexp(1).mean()
    return loss
