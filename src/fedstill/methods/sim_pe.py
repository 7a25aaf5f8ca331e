"""Sim-PE: records vote for the nearest public records, with noise, and the server trains on those that are elected.

Lin, Gopi, Kulkarni, Nori, Yekhanin, "Differentially Private Synthetic Data via Foundation Model APIs 1: Images", ICLR
2024 (arXiv:2305.15560), Algorithms 1 and 2, conditional on the class; with a file of public records in place of a
generator as in Lin, Baltrusaitis, Wang, Yekhanin, "Differentially Private Synthetic Data via APIs 3: Using Simulators
Instead of Foundation Models", 2025 (arXiv:2502.05505).

Differs from the papers (docs/methods/sim-pe.md has the whole list):

* the records are the clients', whose votes are added up as a sum with discrete noise;
* all classes begin with the same candidates, and a candidate counts for the class with the most votes alone;
* the threshold is in standard deviations of the noise, and a class of which nothing passes keeps its first candidate;
* the model is a linear head on public features by default, which are also those in which the nearest is sought.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Float64, Int64
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from fedstill.base.records import Examples
from fedstill.base.settings import Epsilon
from fedstill.distill.public_map import PublicFeatures, PublicMap
from fedstill.methods.parts.on_features import OnFeatures, head_model, public_features
from fedstill.models.heads import HeadModel, LinearHead
from fedstill.privacy import rowwise
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import IntegerClassSums
from fedstill.privacy.sum_ranges import check_length
from fedstill.protocol import (
    Client,
    Federation,
    Method,
    Records,
    Reply,
    Summation,
    Summed,
    load,
    public_images,
    step,
)
from fedstill.train.sgd import SGD

_BATCH = 1000
"""Records whose distances to all candidates are computed at a time."""
_COLUMNS = 16
"""Number that divides the candidates of a product, padded with zeros, so that it rounds all rows alike."""

Population = Int64[Tensor, "classes candidates"]
Places = Int64[Tensor, " n"]
Rows = Float[Tensor, "public d"]


class Votes(Reply):
    """A client's votes for each class's candidates, times the steps of a vote, with its share of the noise."""

    votes: Summed[Int64[Tensor, "classes candidates"]]


class SimPE(OnFeatures, Method):
    """Private Evolution among public records: a record's vote is all that leaves of it."""

    protects: ClassVar[str] = "record"
    epsilon: Epsilon = 1.0
    """Privacy cost of all rounds at the run's delta; None adds no noise and guarantees nothing."""
    rounds: PositiveInt = 2
    """Rounds of votes (T), which share the budget."""
    candidates: PositiveInt = 100
    """Public records among which the records of a class choose in one round."""
    neighbours: PositiveInt = 5
    """Nearest public records, itself among them, of which one takes an elected record's place; 1 for itself alone."""
    threshold: NonNegativeFloat = 2.0
    """Votes that are taken off each candidate's (H), in standard deviations of the noise."""
    contrast: bool = True
    """Whether a public record that is a candidate of several classes counts for the one with the most votes alone."""
    images: PositiveInt = 200
    """Draws of elected records, with their votes as probabilities, for each class's part of the training set."""
    space: PublicMap = PublicMap(dims=64, ridge=0.3)
    """Map of the features in which the nearest candidate is sought."""
    student: Literal["head", "network"] = "head"
    """What is trained on the elected records: a linear head on the public features, or the whole network with it."""
    training: SGD = SGD(lr=0.05, epochs=30)
    """The server's training on the elected records, from the public extractor and a head of zeros."""

    @property
    @override
    def constant(self) -> float:
        return 1.0

    @property
    @override
    def clips(self) -> bool:
        return False  # votes need no bound of a row

    @override
    def server(self, fed: Federation) -> nn.Module:
        public, features = public_images(fed.public, "sim-pe"), public_features(fed, self, "sim-pe")
        start = torch.zeros(fed.num_classes, features.projection.shape[1] + 1)
        model = head_model(fed, features, start, self)
        rows = features.rows(model.trunk, public)
        size = min(self.candidates, len(public))
        first = torch.randperm(len(public), generator=fed.rng("candidates"))[:size]  # RANDOM_API
        population = first.repeat(fed.num_classes, 1)  # S_0
        carry = {"population": population, "weights": torch.zeros(population.shape, dtype=torch.float64)}
        for round in fed.rounds(self.rounds, carry):
            if round.number > 1:
                drawn = elected(carry["weights"], size, fed.rng("parents", round.number))
                parents = torch.where(drawn >= 0, carry["population"].gather(1, drawn.clamp_min(0)), population)
                load(carry, {"population": self._varied(rows, parents, fed.rng("variations", round.number))})
            summed = fed.sum(self.vote, exactly={"candidates": size}, features=features, population=carry["population"])
            load(carry, {"weights": self.weights(summed, carry["population"], fed.delta)})
            round.log(elected=float((carry["weights"] > 0).sum()))
        drawn = elected(carry["weights"], self.images, fed.rng("elected"))
        labels, places = (drawn >= 0).nonzero(as_tuple=True)
        if not len(labels):
            raise ValueError("no candidate has a vote, so the server has 0 records to train on; are there any records?")
        chosen = self._varied(rows, carry["population"][labels, drawn[labels, places]], fed.rng("variations", 0))
        self._train(fed, model, rows, chosen.to(rows.device), labels.to(rows.device))
        return model

    @property
    @override
    def first_reply(self) -> tuple[Any, ...]:
        return type(self), self.extractor, self.space, self.epsilon, self.rounds, self.candidates

    def weights(
        self, summed: Summation[Votes], population: Population, delta: float
    ) -> Float64[Tensor, "classes candidates"]:
        """``max(0, votes - H)``: PE's histogram after its threshold, H in deviations of the total's noise.

        A class of which no candidate passes keeps the one with the most votes, if it has any.
        """
        total = summed.total.votes.value
        mechanism = self._mechanism(len(total), delta, summed.adders)
        if summed.records is not None:
            check_length(mechanism, total, summed.records, mechanism.steps, len(summed.clients), "votes")
        votes = total.double() / mechanism.steps
        over = (votes - self.threshold * mechanism.noise_multiplier * summed.spread).clamp_min(0)
        if self.contrast:
            kinds, which = torch.unique(population, return_inverse=True)
            best = votes.new_full((len(kinds),), -math.inf)
            best = best.scatter_reduce(0, which.flatten(), votes.flatten(), "amax")
            over = over * (votes >= best[which])
        most = (votes * (votes == votes.amax(1, keepdim=True))).clamp_min(0)
        return torch.where(over.sum(1, keepdim=True) > 0, over, most)

    def _train(self, fed: Federation, model: HeadModel, rows: Rows, chosen: Places, labels: Places) -> None:
        """Train the student in place on the public records at the places ``chosen``, with the classes ``labels``."""
        public, where = public_images(fed.public, "sim-pe"), chosen.to(fed.device)
        images = Records(public.images.to(fed.device)[where], labels, fed.num_classes, fed.like.normalisation)
        fed.show("elected", images)
        rng, progress = fed.rng("training"), fed.progress("training at the server")
        if self.student == "network":
            self.training.fit(model, images, rng, on_epoch=progress, checkpoint=fed.epochs)
            return
        head, ones = LinearHead(model.head.detach()), rows.new_ones(len(chosen), 1)
        examples = Examples(torch.cat([rows[chosen], ones], 1), labels)
        self.training.fit(head, examples, rng, on_epoch=progress, checkpoint=fed.epochs)
        load(model, {"head": head.weight.detach()})

    def _varied(self, rows: Rows, chosen: Int64[Tensor, "..."], rng: torch.Generator) -> Int64[Tensor, "..."]:
        """VARIATION_API: for each public record one of its nearest ones, at random."""
        degree = min(self.neighbours, len(rows))
        if degree == 1:
            return chosen
        kinds, which = torch.unique(chosen, return_inverse=True)
        near = [
            torch.cdist(some, rows).topk(degree, largest=False).indices.cpu()
            for some in torch.split(rows[kinds.to(rows.device)], _BATCH)
        ]
        return torch.cat(near)[which, torch.randint(degree, chosen.shape, generator=rng)]

    def _mechanism(self, num_classes: int, delta: float, adders: int) -> IntegerClassSums:
        """The mechanism of each round's sum: a record's row is 1 for its candidate, and 0 for all others."""
        noise = release_noise(self.epsilon, delta, precision_share=1 / self.rounds)
        return IntegerClassSums(num_classes=num_classes, radius=1.0, noise_multiplier=noise, adders=adders)

    @step
    def vote(self, client: Client, features: PublicFeatures, population: Population) -> Votes:
        """Release how many records of each class have each of its candidates as their nearest one."""
        public, model = public_images(client.public, "sim-pe"), client.new_model(features.weights)
        kinds, which = torch.unique(population, return_inverse=True)

        def embedded() -> Tensor:
            return features.rows(model, public[kinds.to(public.labels.device)])

        nearest = choices(model, client.train, features, client.once("candidates", embedded), which)
        ballots = functional.one_hot(nearest, population.shape[1]).float()
        mechanism = self._mechanism(client.train.num_classes, client.delta, client.adders)
        released = client.release(mechanism, (ballots, client.train.labels))
        return Votes(votes=released.map(Tensor.cpu))


def choices(
    model: nn.Module,
    records: Records,
    features: PublicFeatures,
    candidates: Float[Tensor, "u d"],
    which: Int64[Tensor, "classes candidates"],
) -> Int64[Tensor, " n"]:
    """The place, among its class's candidates, of the one that is nearest to each record; of equal ones, the first.

    A record's choice depends on no other record, to the bit, so that one record moves one vote.

    Args:
        model: the extractor, with the weights of ``features``.
        records: the records, with classes.
        features: the public map.
        candidates: mapped features of public records.
        which: the candidates of each class, as places in ``candidates``.
    """
    turned = functional.pad(candidates, (0, 0, 0, -len(candidates) % _COLUMNS)).T.contiguous()
    squares, own = turned.square().sum(0), which.to(records.labels.device)
    found = []
    for start in range(0, max(len(records), 1), _BATCH):
        some = records[slice(start, start + _BATCH)]
        rows = Examples(features.rows(model, some), some.labels)
        distances = rowwise.features(_distances, [nn.Identity()], rows, turned, squares)  # squared, but for |row|^2
        found.append(distances.gather(1, own[some.labels]).argmin(1))
    return torch.cat(found)


def _distances(nets: Sequence[nn.Module], rows: Tensor, turned: Tensor, squares: Tensor) -> Tensor:
    return squares - 2 * (rows @ turned)


def elected(
    weights: Float64[Tensor, "classes candidates"], number: int, rng: torch.Generator
) -> Int64[Tensor, "classes number"]:
    """Places of candidates drawn with their weights as probabilities, for each class; -1 for a class without any."""
    drawn = torch.full((len(weights), number), -1)
    for label in (weights.sum(1) > 0).nonzero().flatten().tolist():
        drawn[label] = torch.multinomial(weights[label], number, replacement=True, generator=rng)
    return drawn
