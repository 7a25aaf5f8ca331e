"""FedGM with label differential privacy: every real label is randomised once, then clients distil and send images.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815,
Algorithm 4, with LP-MST (Ghazi et al., NeurIPS 2021, arXiv:2102.06062).

IMAGES ARE TAKEN AS PUBLIC. Only labels are protected, each for itself; what is sent shows the clients' images.

Differs from the paper (docs/methods/fedgm-labels.md has the whole list):

* ``privacy="sound"`` (the default) randomises the real labels before anything else sees them. "published" distils with
  the true ones and randomises the tags of the finished images, which protects nothing: the images follow the labels;
* clients distil with the likeliest true labels, which they guess from the randomised ones by training a network;
* a client sends ipc images of all classes; the server repeats them as often as randomised labels name the class;
* the matching is that of `fedstill.methods.fedgm`, with its differences.
"""

from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from jaxtyping import Int64, UInt8
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedstill import schema
from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.evaluate import outputs
from fedstill.methods.surrogate import ImageSet, train_on, union
from fedstill.privacy.mechanisms import UnprotectedLabels
from fedstill.privacy.randomized_response import RRWithPrior, probabilities, top_k
from fedstill.privacy.released import map_released
from fedstill.protocol import Client, Federation, Labels, Method, Records, Released, Reply, State, state, step
from fedstill.train.condensation import ServerTraining
from fedstill.train.denoise import Denoising


class RandomisedSet(Reply):
    """Images of all classes made with randomised labels, and how many of these name each class."""

    images: Released[UInt8[Tensor, "n channels height width"]]
    labels: Released[Labels]
    counts: Released[Int64[Tensor, " classes"]]


class TaggedSet(Reply):
    """Of privacy=published: images made with the true labels, which they give away, whatever their tags say."""

    images: UInt8[Tensor, "n channels height width"]
    labels: Released[Labels]


class FedGMLabels(Method):
    """Images distilled with randomised labels in two stages; the first stage's model is the prior of the second."""

    epsilon: PositiveFloat | None = 1.0
    """What the release of a label may cost; None leaves labels as they are and guarantees nothing."""
    privacy: Literal["sound", "published"] = "sound"
    """Randomise real labels before distilling, or the tags of distilled images, which protects nothing."""
    ipc: PositiveInt = 10
    """Synthetic images of every class that a client sends."""
    matching: GradientMatching = GradientMatching()
    """How a client makes them."""
    training: ServerTraining = ServerTraining()
    """The server's training, of the prior and of the final model."""
    first_share: Annotated[float, Gt(0), Lt(1)] = 0.6
    """Share of the records in stage 1. LP-MST takes 0.8 at epsilon 1, 0.7 at 2 and 0.6 from 4 on."""
    temperature: PositiveFloat = 0.5
    """The prior is the softmax of the first model's logits divided by this."""
    relabel: Literal["likeliest", "drop", "none"] = "likeliest"
    """What clients distil with: the likeliest true labels given the randomised ones; these, without those of stage 1
    that the first model ("drop", as in LP-MST's code) does not count among the likeliest; or these as they are."""
    denoising: Denoising = Denoising()
    """How a client finds the likeliest labels."""
    weighting: Literal["counts", "equal"] = "counts"
    """How the server weighs a client's classes: by their randomised labels, or all alike."""

    def server(self, fed: Federation) -> nn.Module:
        """Train M1 on the first upload, send it, train anew on the second (of privacy=published: on both)."""
        most = self.ipc * fed.num_classes
        if self.privacy == "published":
            half = list(map(_tagged, fed.ask(self.send_half, at_most={"n": (most + 1) // 2})))
            prior = train_on(fed, union(fed, half), self.training)
            rest = map(_tagged, fed.ask(self.send_rest, at_most={"n": most // 2}, weights=state(prior)))
            images = union(fed, [*half, *rest])
        else:
            first = union(fed, map(self._weighted, fed.ask(self.distil_part, at_most={"n": most})))
            prior = train_on(fed, first, self.training)
            every = fed.ask(self.distil_all, at_most={"n": most}, weights=state(prior))
            images = union(fed, map(self._weighted, every))
        fed.show("synthetic", images)
        return train_on(fed, images, self.training)

    @step
    def distil_part(self, client: Client) -> RandomisedSet:
        """Stage 1: plain randomised response for a random part of the labels; images of that part."""
        labels = client.train.labels
        if not len(labels):
            raise ValueError("0 records have no labels to randomise; leave this client out or give it records")
        part = torch.randperm(len(labels), generator=client.rng("part"))  # the split knows no label
        part = part[: max(1, round(self.first_share * len(labels)))].to(labels.device)
        prior = torch.ones(len(part), client.train.num_classes, device=labels.device)
        randomised = client.release(self._randomiser(prior), labels[part], part="first")
        client.state["labels"] = torch.full_like(labels, -1).index_put((part,), randomised.value)
        model, rng = client.new_model(), client.rng("denoising")
        return self._distilled(
            client, randomised.map(lambda y: self._cleaned(model, _labelled(client.train[part], y), prior, rng))
        )

    @step
    def distil_all(self, client: Client, weights: State) -> RandomisedSet:
        """Stage 2: RRWithPrior for the other labels, each of them new to it; images of all records."""
        if "labels" not in client.state:
            raise ValueError(
                "this client has no labels of stage 1, so it can't tell which are left; it sits stage 2 out"
            )
        first = Released(client.state["labels"])  # of stage 1, -1 where a label has not been randomised yet
        later = torch.nonzero(first.value < 0).flatten()
        model, rng = client.new_model(weights), client.rng("denoising")
        prior = self._prior(model, client.train)  # from images and other records' randomised labels
        second = client.release(self._randomiser(prior[later]), client.train.labels[later], part="second")

        def merged(first: Tensor, second: Tensor) -> Records:
            records = _labelled(client.train, first.index_put((later,), second))
            if self.relabel == "drop":
                return self._dropped(records, prior, first < 0)
            return self._cleaned(model, records, torch.where((first < 0)[:, None], prior, 1.0), rng)

        return self._distilled(client, map_released(merged, first, second))

    @step
    def send_half(self, client: Client) -> TaggedSet:
        """Algorithm 4, t = 1: images made with the true labels; the tags of one half with a uniform prior."""
        images = synthesise(client.train, partial(_net, client), self.ipc, self.matching, client.rng("images"))
        order = torch.randperm(len(images), generator=client.rng("half")).to(images.labels.device)
        half, rest = (images[index] for index in order.tensor_split([(len(images) + 1) // 2]))
        client.state.update(images=rest.images, labels=rest.labels)
        return self._retagged(client, half, torch.ones(len(half), half.num_classes, device=order.device))

    @step
    def send_rest(self, client: Client, weights: State) -> TaggedSet:
        """Algorithm 4, t = 2: the tags of the other half with the prior s(M1(x))."""
        images, labels = client.state["images"], client.state["labels"]
        rest = Records(images, labels, client.train.num_classes, client.train.normalisation)
        return self._retagged(client, rest, self._prior(client.new_model(weights), rest))

    def _retagged(self, client: Client, half: Records, prior: Tensor) -> TaggedSet:
        reason = "its images were made with the true labels, so that randomising their tags hides nothing"
        tags = client.release(UnprotectedLabels(reason, self._randomiser(prior)), half.labels)
        return TaggedSet(images=half.images, labels=tags.map(lambda y: schema.compact(y, half.num_classes)))

    def _randomiser(self, prior: Tensor) -> RRWithPrior | UnprotectedLabels:
        if self.epsilon is None:
            return UnprotectedLabels("labels are not randomised")
        return RRWithPrior(self.epsilon, prior)

    def _prior(self, model: nn.Module, records: Records) -> Tensor:
        logits = torch.cat(outputs(model, records, 500))
        return (logits.double() / self.temperature).softmax(1)

    def _cleaned(self, model: nn.Module, records: Records, prior: Tensor, rng: torch.Generator) -> Records:
        """The records with their likeliest true labels; randomised labels and public images say these."""
        if self.relabel != "likeliest" or self.epsilon is None or not len(records):
            return records
        given = probabilities(prior, self.epsilon).gather(
            2, records.labels.view(-1, 1, 1).expand(-1, prior.shape[1], 1)
        )
        return _labelled(records, self.denoising.likeliest(model, records, given[:, :, 0], rng))

    def _dropped(self, records: Records, prior: Tensor, later: Tensor) -> Records:
        """The records without those of stage 1 whose randomised label the prior makes unlikely."""
        if self.epsilon is None or not later.any():
            return records
        k = int(top_k(prior[later], self.epsilon).double().mean())  # as the official code, rounded down
        rank = (prior > prior.gather(1, records.labels[:, None])).sum(1)
        return records[later | (rank < k)]

    def _distilled(self, client: Client, records: Released[Records]) -> RandomisedSet:
        """S_k by gradient matching, from randomised labels and public images."""
        whole = records.map(partial(_of_every_class, self.ipc, client.rng("missing classes")))
        nets, rng = partial(_net, client), client.rng("images")
        images = whole.map(lambda s: synthesise(s, nets, self.ipc, self.matching, rng))
        return RandomisedSet(
            images=images.map(lambda s: s.images),
            labels=images.map(lambda s: schema.compact(s.labels, s.num_classes)),
            counts=records.map(Records.class_counts),
        )

    def _weighted(self, reply: RandomisedSet) -> ImageSet:
        """As many images as came, a class's share of them that of its randomised labels."""
        images, labels, counts = reply.images.value, reply.labels.value.long(), reply.counts.value
        if self.weighting == "counts":
            ends = counts[labels].double().cumsum(0)
            index = torch.searchsorted(ends, (torch.arange(len(ends)) + 0.5) / len(ends) * ends[-1], right=True)
            images, labels = images[index], labels[index]
        return ImageSet(images=images, labels=labels)


def _labelled(records: Records, labels: Tensor) -> Records:
    return Records(records.images, labels, records.num_classes, records.normalisation)


def _of_every_class(ipc: int, rng: torch.Generator, records: Records) -> Records:
    """The records, and any ``ipc`` of them again for each class that no label names."""
    missing = torch.nonzero(records.class_counts() == 0).flatten().repeat_interleave(ipc)
    again = torch.randint(len(records), missing.shape, generator=rng).to(missing.device)
    images, labels = torch.cat([records.images, records.images[again]]), torch.cat([records.labels, missing])
    return Records(images, labels, records.num_classes, records.normalisation)


def _net(client: Client, index: int) -> nn.Module:
    return client.new_model(draw=1 + index)  # theta_0 ~ P; draw 0 is the server's own start


def _tagged(reply: TaggedSet) -> ImageSet:
    return ImageSet(images=reply.images, labels=reply.labels.value)
