"""FedGM with label differential privacy: every real label is randomised once, then clients distil and send images.

Chen, Zhou, Jiang, "One-Shot Federated Learning with Label Differential Privacy", Electronics 2024, 13(10), 1815,
Algorithm 4, with LP-MST (Ghazi et al., NeurIPS 2021, arXiv:2102.06062).

IMAGES ARE TREATED AS PUBLIC. Only labels are protected, each by itself; the upload reveals the clients' images.

Differs from the paper (docs/methods/fedgm-labels.md has the whole list):

* ``privacy="sound"`` (the default) randomises the real labels before anything else sees them. "published" distils with
  the true ones and randomises the tags of the finished images, which protects nothing: the images follow the labels;
* clients distil with the likeliest true labels, which they infer from the randomised labels by training a network;
* a client sends ipc images of each class; the server repeats them in proportion to the class's randomised labels;
* gradient matching is as in `fedstill.methods.fedgm`, with its differences.
"""

from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Lt
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from typing_extensions import override

from fedstill import schema
from fedstill.distill.synthesis import GradientMatching, SingleFormation, synthesise
from fedstill.methods.parts import label_sets
from fedstill.methods.parts.label_sets import (
    ClassWeighting,
    RandomisedSet,
    TaggedSet,
    image_set,
    randomiser,
    tag,
    weigh,
)
from fedstill.methods.parts.surrogate import random_net, train_on, union
from fedstill.privacy.releases import map_released
from fedstill.protocol import Client, Federation, Method, Part, Records, Released, State, state, step
from fedstill.train.condensation import CondensedTraining
from fedstill.train.losses import Denoising


class FedGMLabels(Method):
    """Images distilled with randomised labels in two stages; the first stage's model gives the prior of the second."""

    images_only: ClassVar[bool] = True
    protects: ClassVar[str] = "label"
    epsilon: PositiveFloat | None = 1.0
    """Cost of a label's release. None leaves labels unchanged and guarantees nothing."""
    privacy: Literal["sound", "published"] = "sound"
    """Randomise real labels before distilling, or the labels of distilled images, which protects nothing."""
    ipc: PositiveInt = 10
    """Synthetic images of every class that a client sends."""
    matching: SingleFormation = GradientMatching()
    """Settings of a client's synthesis."""
    training: CondensedTraining = CondensedTraining()
    """The server's training, of the prior and of the final model."""
    first_share: Annotated[float, Gt(0), Lt(1)] = 0.6
    """Share of the records in stage 1. LP-MST takes 0.8 at epsilon 1, 0.7 at 2 and 0.6 from 4 on."""
    temperature: PositiveFloat = 0.5
    """Temperature of the prior, a softmax of the first model's logits."""
    relabel: Literal["likeliest", "drop", "none"] = "likeliest"
    """Labels that clients distil with: the likeliest true labels given the randomised ones; the randomised ones
    without those of stage 1 that the first model finds unlikely ("drop", as in LP-MST's code); or the randomised."""
    denoising: Denoising = Denoising()
    """Training of the network that predicts the likeliest labels."""
    weighting: ClassWeighting = "counts"
    """Weights of a client's classes at the server: their numbers of randomised labels, or equal weights."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        """Train M1 on the first upload, send it, train anew on the second (for privacy=published: on both)."""
        most = self.ipc * fed.num_classes
        if self.privacy == "published":
            half = list(map(image_set, fed.ask(self.send_half, at_most={"n": (most + 1) // 2})))
            prior = train_on(fed, union(fed, half), self.training)
            rest = map(image_set, fed.ask(self.send_rest, at_most={"n": most // 2}, weights=state(prior)))
            images = union(fed, [*half, *rest])
        else:
            weighted = partial(weigh, self.weighting)
            first = union(fed, map(weighted, fed.ask(self.distil_part, at_most={"n": most})))
            prior = train_on(fed, first, self.training)
            second = fed.ask(self.distil_all, at_most={"n": most}, weights=state(prior))
            images = union(fed, map(weighted, second))
        fed.show("synthetic", images)
        return train_on(fed, images, self.training)

    @step
    def distil_part(self, client: Client) -> RandomisedSet:
        """Stage 1: randomise a random part of the labels with a uniform prior; distil images of that part."""
        labels = client.train.labels
        if not len(labels):
            raise ValueError("0 records have no labels to randomise; leave this client out or give it records")
        part = torch.randperm(len(labels), generator=client.rng("part"))  # the split is independent of the labels
        part = part[: max(1, round(self.first_share * len(labels)))].to(labels.device)
        prior = torch.ones(len(part), client.train.num_classes, device=labels.device)
        randomised = client.release(randomiser(self.epsilon, prior), labels, part=Part("first", part))
        client.state["labels"] = torch.full_like(labels, -1).index_put((part,), randomised.value)
        denoise = partial(self._denoise, client.new_model(), prior, client.rng("denoising"))
        return self._distil(client, randomised.map(lambda y: denoise(label_sets.with_labels(client.train[part], y))))

    @step
    def distil_all(self, client: Client, weights: State) -> RandomisedSet:
        """Stage 2: randomise the other labels by RRWithPrior; distil images of all records."""
        if "labels" not in client.state:
            raise ValueError("this client has no labels of stage 1, so it can't tell which are left; it skips stage 2")
        first = Released(client.state["labels"])  # of stage 1, -1 where a label has not been randomised yet
        later = first.value < 0
        model, rng = client.new_model(weights), client.rng("denoising")
        prior = label_sets.predicted_prior(model, client.train, self.temperature)  # other records' randomised labels
        rest = Part("second", later.nonzero()[:, 0])
        second = client.release(randomiser(self.epsilon, prior[later]), client.train.labels, part=rest)

        def merge(first: Tensor, second: Tensor) -> Records:
            records = label_sets.with_labels(client.train, first.masked_scatter(later, second))
            if self.relabel == "drop" and self.epsilon is not None:
                return label_sets.without_unlikely(records, prior, self.epsilon, later)
            return self._denoise(model, torch.where(later[:, None], prior, 1.0), rng, records)

        return self._distil(client, map_released(merge, first, second))

    @step
    def send_half(self, client: Client) -> TaggedSet:
        """Algorithm 4, t = 1: distil with the true labels; randomise one half's labels with a uniform prior."""
        images = synthesise(client.train, partial(random_net, client), self.ipc, self.matching, client.rng("images"))
        order = torch.randperm(len(images), generator=client.rng("half")).to(images.labels.device)
        half, rest = (images[index] for index in order.tensor_split([(len(images) + 1) // 2]))
        client.state.update(images=rest.images, labels=rest.labels)
        uniform = torch.ones(len(half), half.num_classes, device=order.device)
        return tag(client, half, uniform, self.epsilon)

    @step
    def send_rest(self, client: Client, weights: State) -> TaggedSet:
        """Algorithm 4, t = 2: randomise the other half's labels with the prior s(M1(x))."""
        images, labels = client.state["images"], client.state["labels"]
        rest = Records(images, labels, client.train.num_classes, client.train.normalisation)
        prior = label_sets.predicted_prior(client.new_model(weights), rest, self.temperature)
        return tag(client, rest, prior, self.epsilon)

    def _denoise(self, model: nn.Module, prior: Tensor, rng: torch.Generator, records: Records) -> Records:
        if self.relabel != "likeliest" or self.epsilon is None or not len(records):
            return records
        return label_sets.likeliest(records, prior, self.epsilon, model, self.denoising, rng)

    def _distil(self, client: Client, records: Released[Records]) -> RandomisedSet:
        """Fit S_k by gradient matching, from randomised labels and public images."""
        missing, rng = client.rng("missing classes"), client.rng("images")
        complete = records.map(lambda s: label_sets.with_every_class(s, self.ipc, missing))
        images = complete.map(lambda s: synthesise(s, partial(random_net, client), self.ipc, self.matching, rng))
        return RandomisedSet(
            images=images.map(lambda s: s.images),
            labels=images.map(lambda s: schema.compact(s.labels, s.num_classes)),
            counts=records.map(Records.class_counts),
        )
