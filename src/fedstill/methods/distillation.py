"""What methods share that distil their clients' heads into one network on public images, weighted by certainty or not.

Sattler et al. 2021 (FedAUX, arXiv:2102.02514), sections 3.1 and 3.2.
"""

import hashlib
from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float, Float32
from pydantic import PositiveFloat
from torch import Tensor, nn

from fedstill import models, seeds
from fedstill.distill.ensemble import Distillation, Ensemble
from fedstill.methods.heads import (
    HeadMethod,
    HeadModel,
    LinearHead,
    Rows,
    Share,
    Space,
    final,
    mean_head,
    needed,
    published_epsilon,
)
from fedstill.privacy.accounting import share_noise
from fedstill.privacy.logistic import BinaryHead, PublishedBinaryHead, extend
from fedstill.privacy.mechanisms import Mechanism
from fedstill.protocol import Client, Federation, Records, Released, Settings, load

Start = Literal["mean", "fresh"]
FLOOR = 1e-8
"""Added to every certainty, so that no image is without a teacher."""


class ScoreTraining(Settings):
    """The head whose certainty weighs a client: its records against public negatives."""

    share: Share = 1 / 6
    """Of the privacy budget: of ``1 / sigma^2`` for sound noise, of epsilon for published (0.1 of 0.6 in the paper)."""
    penalty: PositiveFloat = 25.0
    """Lambda beside the sum of losses: the sensitivity is 1 / Lambda."""


class DistillingMethod(HeadMethod):
    """A method with private heads and a student of them."""

    distillation: Distillation = Distillation()
    """The student's training."""
    student: Start = "mean"
    """The student's head at the start: the mean of the clients' heads, or fresh (zeros), as in the paper."""
    negatives: Share = 0.2
    """Share of the public images that stand against a client's records; the student learns on the rest."""

    def begin(self, fed: Federation, here: Space, heads: Iterable[Tensor]) -> HeadModel:
        """The student before its training: the whole network will be trained."""
        head = mean_head(heads)
        start = head if self.student == "mean" else torch.zeros_like(head)
        return final(fed, here, start, self.head.bias, self.published)

    def distil(
        self, fed: Federation, here: Space, model: HeadModel, teachers: Iterable[tuple[Tensor, Tensor | None]]
    ) -> nn.Module:
        """Train ``model`` on what the teachers say about the public images; returns it.

        Args:
            fed: the federation.
            here: the features that heads live on.
            model: the student.
            teachers: class head ``(classes, d + 1)`` and score head ``(d + 1,)`` of every client; None weighs 1.
        """
        public = needed(fed.public, type(self).__name__)
        images, _ = split_public(public, self.negatives)
        some = public[images]
        rows = here.rows(model.trunk, some)
        x = extend(rows, self.scale(here), self.head.bias)
        ensemble = Ensemble(self.distillation.outputs)
        for head, score in teachers:
            weight = 1.0 if score is None else (x @ score.to(x)).sigmoid() + FLOOR  # s_k(x)
            ensemble.add(x @ head.to(x).T, weight)  # f_k(x)
        rng, progress = fed.rng("distillation"), fed.progress("distilling at the server")
        if models.features(model.trunk, some.inputs(slice(0, 1))).requires_grad:
            self.distillation.distil(model, some, ensemble.targets(), rng, on_epoch=progress, keep=fed.epochs)
        else:  # the features stay as they are, so they are not computed again
            alone = LinearHead(model.head.detach())
            seen = Rows(x.float(), some.labels)
            self.distillation.distil(alone, seen, ensemble.targets(), rng, on_epoch=progress, keep=fed.epochs)
            load(model, {"head": alone.weight.detach()})
        return model

    def score_head(
        self,
        client: Client,
        here: Space,
        model: nn.Module,
        rows: Float[Tensor, "n d"],
        penalty: float,
        share: float = 1.0,
    ) -> Released[Float32[Tensor, " coefficients"]]:
        """The client's score head, released.

        Args:
            client: releases it.
            here: the features.
            model: the extractor, for the negatives.
            rows: the client's records there.
            penalty: Lambda beside the sum of losses.
            share: of the budget: of ``1 / sigma^2`` for sound noise, of epsilon for published.
        """
        public = needed(client.public, type(self).__name__)
        negatives = _negatives(here, model, public, self.negatives)
        mechanism: Mechanism[Float[Tensor, "n d"], Tensor]
        if self.published:
            mechanism = PublishedBinaryHead(
                lam=self.head.lam,
                epsilon=published_epsilon(self.epsilon) * share,
                delta=client.delta,
                bias=self.head.bias,
                scaling=self.head.scaling,
                negatives=negatives,
            )
        else:
            mechanism = BinaryHead(
                penalty=penalty,
                radius=here.radius,
                noise_multiplier=share_noise(self.epsilon, client.delta, share),
                bias=self.head.bias,
                negatives=negatives,
            )
        return client.release(mechanism, rows).map(lambda head: head.float().cpu())


def _negatives(here: Space, model: nn.Module, public: Records, share: float) -> Float[Tensor, "m d"]:
    """The negatives' rows; computed once for all clients that one process plays, since they are the same."""
    digest = hashlib.blake2b(f"{public.images.shape} {public.images.data_ptr()} {share}".encode())
    for value in (*here.weights.values(), here.mean, here.projection):
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    key = digest.digest()
    if key not in _HELD:
        rows = here.rows(model, public[split_public(public, share)[1]])
        _HELD.clear()
        _HELD[key] = (rows, public.images)  # holding the images keeps their address theirs
    return _HELD[key][0]


_HELD: dict[bytes, tuple[Tensor, Tensor]] = {}
"""The last public map and images (their digest) with the negatives' rows there."""


def split_public(public: Records, negatives: float) -> tuple[Tensor, Tensor]:
    """Positions of the distillation images and of the negatives: one permutation, cut in two; disjoint.

    Everybody who holds the public images makes the same cut.
    """
    order = torch.randperm(len(public), generator=seeds.stream(0, "public split")).to(public.labels.device)
    cut = min(max(1, round(len(order) * (1 - negatives))), len(order) - 1)
    return order[:cut], order[cut:]
