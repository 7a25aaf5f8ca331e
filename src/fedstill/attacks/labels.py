"""Which classes a client holds, and what share of its records each has, read off what it uploaded.

From labels, in clear or randomised, and from labelled images: every image's tag and what a classifier makes of its
pixels are evidence about its class, independent given the class, so their log-likelihoods add up. From a model update:
the last layer's change, by

* Zhao, Mopuri, Bilen 2020 (iDLG, arXiv:2001.02610), section 3, for the gradient of one record;
* Wainakh et al. 2021 (LLG and LLG+, arXiv:2105.09369) for whole updates.

Differs from the latter: shares are proportional to what is left of a class's change, where LLG hands out records one by
one, each worth the same, until there are enough (`counts_of` does so for small batches); the bias's change is preferred
to that of the weights' row sums, as it needs no activations above 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor, nn

from fedstill.evaluate import outputs
from fedstill.privacy.randomized_response import probabilities
from fedstill.records import Records

_LEAST = 1e-12


@dataclass(frozen=True)
class LastLayer:
    """What an update or a gradient says about the layer that gives the logits.

    Attributes:
        weight: ``(classes, d)``.
        bias: ``(classes,)``, or None where the layer has none.
    """

    weight: Float64[Tensor, "classes d"]
    bias: Float64[Tensor, " classes"] | None

    @property
    def drift(self) -> Float64[Tensor, " classes"]:
        """The bias's entries or, without a bias, the weights' row sums; negative for classes in the records.

        In one step on n records the bias's entry is ``mean_i p_i[c] - share_c`` times the learning rate. In a row
        sum every record counts by the sum of its activations, which must not be negative then (LLG's property 1).
        """
        return self.weight.sum(1) if self.bias is None else self.bias


@dataclass(frozen=True)
class LabelLeak:
    """How much an attack got right about one client.

    Attributes:
        held_accuracy: share of the classes for which "holds it" or "doesn't" is right, in [0, 1].
        distance: L1 distance of the shares to the true ones, in [0, 2].
        uniform_distance: what equal shares for all classes would get: the attack has learnt something below it.
    """

    held_accuracy: float
    distance: float
    uniform_distance: float


# --- from tags and images


def response(num_classes: int, epsilon: float | None) -> Float64[Tensor, "input output"]:
    """``P[tag | label]``: of labels in clear (None), or of randomised response.

    The latter keeps a label with probability ``e^epsilon / (e^epsilon + num_classes - 1)``. That of RRWithPrior is
    `fedstill.privacy.randomized_response.probabilities`, one matrix for each record.
    """
    if epsilon is None:
        return torch.eye(num_classes, dtype=torch.float64)
    return probabilities(torch.ones(1, num_classes), epsilon, num_classes)[0]


def evidence_of_tags(
    tags: Int64[Tensor, " n"], channel: Float64[Tensor, "input output"] | Float64[Tensor, "n input output"]
) -> Float64[Tensor, "n classes"]:
    """``log P[tag | class]`` for every tag and class; impossible ones count as 1e-12.

    Args:
        tags: labels as they were sent, each in ``[0, output)``.
        channel: as `response` gives it, one for all tags or one for each.
    """
    each = channel.expand(len(tags), -1, -1)
    return each[torch.arange(len(tags), device=tags.device), :, tags].clamp_min(_LEAST).log()


def evidence_of_images(model: nn.Module, images: Records, *, temperature: float = 1.0) -> Float64[Tensor, "n classes"]:
    """``log P[class | image]`` by ``model``: up to a constant the likelihoods, if its classes were trained on alike.

    Args:
        model: trained on other records of the task; judges in eval mode.
        images: their labels are not looked at.
        temperature: divides the logits; above 1 for a model that is surer than it is right, below 1 for one that isn't
            sure enough, whose evidence that of tags would drown.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    logits = torch.cat([torch.empty(0, images.num_classes), *(out.cpu() for out in outputs(model, images))])
    return (logits.double() / temperature).log_softmax(1)


def vote(
    evidence: Float64[Tensor, "n classes"], groups: Int64[Tensor, " n"] | None = None
) -> Float64[Tensor, "groups classes"]:
    """The posterior of every group's class, where all of a group have the same one and all classes are as likely.

    Of randomised response alone its largest entry is the majority vote.

    Args:
        evidence: log-likelihoods; a sum of several is evidence of all of them.
        groups: which group each row is in, from 0; one for all without it.
    """
    groups = torch.zeros(len(evidence), dtype=torch.int64) if groups is None else groups
    number = int(groups.max()) + 1 if len(groups) else 0
    return evidence.new_zeros(number, evidence.shape[1]).index_add(0, groups, evidence).softmax(1)


def shares_of_evidence(evidence: Float64[Tensor, "n classes"], iterations: int = 300) -> Float64[Tensor, " classes"]:
    """The likeliest shares of the classes: expectation maximisation for a mixture's weights, from equal ones.

    Args:
        evidence: log-likelihoods, a row for each image or record.
        iterations: of EM; the likelihood has one maximum, which is reached slowly where evidence is weak.

    Raises:
        ValueError: there is no row.
    """
    if not len(evidence):
        raise ValueError("there are 0 rows of evidence; shares need at least 1")
    shares = evidence.new_full((evidence.shape[1],), 1 / evidence.shape[1])
    for _ in range(iterations):
        shares = (evidence + shares.clamp_min(_LEAST).log()).softmax(1).mean(0)
    return shares


# --- from updates


def descent(start: Mapping[str, Tensor], final: Mapping[str, Tensor]) -> dict[str, Float64[Tensor, "*shape"]]:
    """``start - final`` of all floating-point values, which points as the gradients of the training between them do."""
    return {name: start[name].double() - value.double() for name, value in final.items() if value.is_floating_point()}


def last_layer(change: Mapping[str, Tensor], num_classes: int) -> LastLayer:
    """The part of a gradient, or of `descent`, that belongs to the last linear layer with one row for each class.

    Args:
        change: by parameter name, in the order of the model's layers.
        num_classes: rows of the layer.

    Raises:
        ValueError: there is no such layer.
    """
    names = [name for name, value in change.items() if value.ndim == 2 and len(value) == num_classes]
    if not names:
        raise ValueError(f"none of {len(change)} tensors is a linear layer with {num_classes} rows, one for each class")
    bias = change.get(names[-1].removesuffix("weight") + "bias")
    return LastLayer(change[names[-1]].double().cpu(), None if bias is None else bias.double().cpu())


def single_label(gradient: LastLayer) -> int:
    """The class of the only record that a gradient is of, exactly (iDLG).

    The class's row is ``(p_c - 1) a``, any other ``p_j a``: only the class's bias has a negative entry, and without a
    bias only its row has negative products with all others, whose sum is the least then.

    Raises:
        ValueError: there are two classes and no bias, so that both rows look alike.
    """
    if gradient.bias is not None:
        return int(gradient.bias.argmin())
    if len(gradient.weight) < 3:
        raise ValueError("without a bias, the rows of 2 classes differ in sign only; this needs at least 3 classes")
    products = gradient.weight @ gradient.weight.T
    return int((products.sum(1) - products.diagonal()).argmin())


def offsets(alone: Float64[Tensor, "classes classes"]) -> Float64[Tensor, " classes"]:
    """What the drift of each class is for clients that don't hold it (LLG+'s s): means over the other classes' clients.

    Args:
        alone: row c is the `LastLayer.drift` of an update that the attacker made as a client would, from the same
            start, on other records that are all of class c.
    """
    classes = len(alone)
    return (alone.sum(0) - alone.diagonal()) / (classes - 1)


def shares_of_update(
    drift: Float64[Tensor, " classes"], offset: Float64[Tensor, " classes"] | None = None
) -> Float64[Tensor, " classes"]:
    """Estimated shares of the classes: in proportion to how far each is below its offset.

    Args:
        drift: of `last_layer`.
        offset: as `offsets` gives them; 0 without. Without them only classes with more than the share that the model
            expected of them are found: enough for a client with few classes. With them all classes of a balanced client
            are found, but after many epochs of training also some that a client of few classes doesn't hold.

    Returns:
        Shares that add up to 1; all alike where no class is below its offset.
    """
    below = ((0 if offset is None else offset) - drift).clamp_min(0)
    total = below.sum()
    return below / total if total > 0 else torch.full_like(drift, 1 / len(drift))


def counts_of(shares: Float64[Tensor, " classes"], records: int) -> Int64[Tensor, " classes"]:
    """How many of a few records each class has, as LLG counts: one of each class found, then the furthest below.

    Args:
        shares: of `shares_of_update`.
        records: how many there are; those of classes with the largest shares come first.
    """
    found = torch.zeros(len(shares), dtype=torch.int64)
    found[shares.argsort(descending=True)[:records]] = 1
    found[shares <= 0] = 0
    while found.sum() < records:
        found[(shares - found / records).argmax()] += 1
    return found


# --- how right it is


def held(shares: Float64[Tensor, " classes"], least: float) -> Bool[Tensor, " classes"]:
    """The classes a client is taken to hold: those with a share of ``least`` or more."""
    return shares >= least


def leak(shares: Float64[Tensor, " classes"], counts: Int64[Tensor, " classes"], least: float) -> LabelLeak:
    """Estimated shares against the client's true class counts.

    Args:
        shares: add up to 1.
        counts: records of each class.
        least: see `held`; half a record's share for exact evidence, more for noisy.

    Raises:
        ValueError: the client has no records.
    """
    if not counts.sum():
        raise ValueError("the client has 0 records; there is nothing to find out about it")
    truth = counts.double() / counts.sum()
    right = held(shares, least) == (counts > 0)
    uniform = (truth - 1 / len(truth)).abs().sum()
    return LabelLeak(float(right.double().mean()), float((shares - truth).abs().sum()), float(uniform))
