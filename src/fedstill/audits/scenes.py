"""The scene of each private method: records that move its releases most, found by gradient ascent on their pixels.

An auditor chooses all that an adversary may choose: settings, model, public images, all other records and the canaries.
What moves most is then chosen among several by runs without noise (see `fedstill.audits.whole_runs`).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import methods, models
from fedstill.audits.canaries import NORMALISATION, ascend, climb
from fedstill.audits.neighbours import Heard, difference
from fedstill.audits.play import Copies, Game, Played, play
from fedstill.base import lookup
from fedstill.base.records import Records
from fedstill.base.seeds import stream
from fedstill.base.settings import sentence
from fedstill.distill.embedding import unit_features
from fedstill.distill.low_rank import LowRank, expand
from fedstill.engines.run_spec import RunSpec
from fedstill.methods.adap_dp_fl import AdapDPFL
from fedstill.methods.fedkadp import FedKADP
from fedstill.methods.fedkd import FedKD
from fedstill.privacy import accounting
from fedstill.privacy.releases import Gaussian
from fedstill.protocol import Method

MODEL = "convnet:width=4,depth=1"
MIXING = "convnet:width=4,depth=1,norm=batch"
"""A model that would mix records in train mode."""
LIKE = Records(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), 2, NORMALISATION)
"""The task: small images of two classes."""
Masks = Sequence[Sequence[bool]]
"""For each client, which canaries it has."""


@dataclass(frozen=True)
class Choice:
    """Records of a client, and canaries that each client may or may not have.

    Attributes:
        others: records that every client has.
        canaries: ``m`` records whose presence the attacker infers; each by itself, knowing about the others.
    """

    others: Records
    canaries: Records

    def world(self, mask: Sequence[bool], *, labels: bool = False) -> Records:
        """The records of a client with the canaries of ``mask``; or with all, which have class 1 there, else 0."""
        present = torch.tensor(mask)
        if labels:
            return joined(self.others, replace(self.canaries, labels=present.long()))
        return joined(self.others, self.canaries[present])


@dataclass(frozen=True)
class Scene:
    """One method with choices of canaries.

    Attributes:
        method: the method with the auditor's settings.
        task: the run's other settings.
        choices: what to choose from.
        public: the public records.
        labels: whether the claim protects labels.
        mixing: whether the method also takes a model with batch normalisation; neighbours are compared with it then.
    """

    method: Method
    task: Game
    choices: list[Choice]
    public: Records
    labels: bool = False
    mixing: bool = False

    def difference(self, choice: int) -> str:
        """Sentence on whatever depends on ``choice``'s first canary beside releases (`neighbours`), or is too large."""
        some, heard = self.choices[choice], (Heard(), Heard())
        task = replace(self.task, model=MIXING) if self.mixing else self.task
        for mine, present in zip(heard, (True, False), strict=True):
            world = some.world([present, *[False] * (len(some.canaries) - 1)], labels=self.labels)
            play(self.method, Copies([world], [0], self.public), task, heard=mine)
        return difference(*heard, None if self.labels else len(some.others))

    def played(self, masks: Masks, *, choice: int = 0, first: int = 0, quiet: bool = False) -> Played:
        """A run with a client for each mask of canaries; ``first`` is the number of the first one."""
        distinct = list(dict.fromkeys(map(tuple, masks)))
        worlds = [self.choices[choice].world(mask, labels=self.labels) for mask in distinct]
        data = Copies(worlds, [distinct.index(tuple(mask)) for mask in masks], self.public, first)
        return play(self.method, data, self.task, quiet=quiet)


def random_images(count: int, *name: str) -> Records:
    """Records with random pixels, of both classes in turn."""
    images = torch.randint(256, (count, *LIKE.shape), generator=stream(0, "audit", *name)).to(torch.uint8)
    return replace(LIKE, images=images, labels=torch.arange(count) % LIKE.num_classes)


def joined(*parts: Records) -> Records:
    """The records of all parts."""
    images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    return replace(parts[0], images=images, labels=labels)


def public_images(count: int = 40) -> Records:
    """The public records of a scene."""
    return random_images(count, "public")


def first_request(method: Method, task: Game, public: Records) -> Mapping[str, Any]:
    """The arguments of a run's first request."""
    return play(method, Copies([random_images(4, "others")], [0], public), task, quiet=True).requests[0]


def of(name: str, epsilon: float, **settings: Any) -> Method:
    """A method with an epsilon and other settings."""
    kind: Any = methods.find(name)
    made: Method = kind(epsilon=epsilon, **settings)
    return made


def _gradients(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The length of each record's gradient, differentiable in ``x``."""
    lengths = []
    for one, label in zip(x, y, strict=True):
        loss = cross_entropy(net(one[None]), label[None])
        parts = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        lengths.append(torch.cat([part.flatten() for part in parts]).norm())
    return torch.stack(lengths)


_ROUNDS, _STEPS = 2, 2
_LOCAL: dict[str, Any] = {"steps": _STEPS, "batch_size": 1, "supposed_records": 1, "lr": 0.2, "clip": 0.01}
"""Every record in every batch, and so short steps that a record's gradient keeps its direction."""


def rounds(name: str, epsilon: float, **settings: Any) -> Scene:
    """A record with a long gradient, clipped in every step, and one other."""
    kind = methods.find(name)
    adaptive = issubclass(kind, FedKADP | AdapDPFL)
    noise = (
        _adaptive_noise(epsilon) if adaptive else accounting.gaussian_noise(epsilon, 1e-5) * math.sqrt(_ROUNDS * _STEPS)
    )
    rest = {"rounds": _ROUNDS, "participation": 1.0, "local": _LOCAL, "noise_multiplier": noise}
    method = kind(**rest, **settings)
    task = Game(MODEL, epsilon if adaptive else None, read=_expanded if issubclass(kind, FedKD) else _moved)
    net = RunSpec.of(method, LIKE, model=MODEL).new_model()
    found = []
    for label in range(LIKE.num_classes):
        start = random_images(4, "starts", str(label)).pixels()
        y = torch.full((4,), label)
        images = ascend(partial(_gradients, net, y=y), start, steps=15)
        found.append(replace(images, labels=y))
    canaries, others = joined(*found), random_images(1, "others")
    lengths = _gradients(net, canaries.inputs(), canaries.labels).detach()
    order = lengths.argsort(descending=True)[:3]
    return Scene(method, task, [Choice(others, canaries[i : i + 1]) for i in order.tolist()], public_images())


def _adaptive_noise(epsilon: float) -> float:
    """The least noise multiplier, to a hundredth, with which the filter admits all rounds."""
    noise = 1.0
    renyi = accounting.rdp_filter(epsilon, 1e-5)
    while not renyi.allows([Gaussian(noise_multiplier=noise, count=_ROUNDS * _STEPS)]):
        noise *= 1.01
    return noise


def _expanded(reply: Any, arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    """The update that low-rank factors stand for."""
    update = expand(LowRank(reply.ranks.value, reply.values.value), arguments["weights"])
    assert update is not None
    yield from (part.double().flatten() for part in update.values())


def _moved(reply: Any, arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    """The change of the server's weights."""
    yield from (w.double().flatten() - arguments["weights"][n].flatten() for n, w in reply.weights.value.items())


_UPDATE: dict[str, Any] = {"local": {"lr": 100.0, "batch_size": 8, "epochs": 1}, "clip": 0.01}


def updates(name: str, epsilon: float) -> Scene:
    """A record with the other record's image and another label, which turns the update round."""
    method, task = of(name, epsilon, **_UPDATE), Game(MODEL)
    net = RunSpec.of(method, LIKE, model=MODEL).new_model()

    def margin(x: Tensor) -> Tensor:
        margins: Tensor = net(x).diff(dim=1)[:, 0].abs()
        return margins

    found = ascend(margin, random_images(16, "starts").pixels(), steps=40)
    order = margin(found.inputs()).argsort(descending=True)[:3]
    choices = []
    for i in order.tolist():
        label = net(found[i : i + 1].inputs()).argmax(1)
        one = replace(found[i : i + 1], labels=label)
        choices.append(Choice(one, replace(one, labels=1 - label)))
    return Scene(method, task, choices, public_images())


def labels(name: str, epsilon: float) -> Scene:
    """A record with one label or with the other; the attacker counts randomised labels."""
    still = {"nets": 1, "lr": 1e-9, "init": "real", "batch_size": 2, "augment": "none"}
    method = of(name, epsilon, ipc=1, matching=still, relabel="none", training={"epochs": 1})

    def counts(reply: Any, arguments: Mapping[str, Any]) -> Iterable[Tensor]:
        return [reply.counts.value.double()]

    records = random_images(2, "others")
    choice = Choice(replace(records[:1], labels=torch.zeros(1, dtype=torch.int64)), records[1:])
    return Scene(method, Game(MODEL, read=counts), [choice], public_images(), labels=True)


OTHERS = 2048
"""Other records of a head's client."""

# --- heads

_DIRECTIONS = 8
_FEATURES: dict[str, Any] = {"extractor": {"pretrain": "none"}, "space": {"dims": _DIRECTIONS}}
_HEAD: dict[str, Any] = {**_FEATURES, "head": {"penalty": 0.5, "bias": 0.0}}


def _heads(name: str, epsilon: float, **settings: Any) -> Scene:
    """A record far out along each direction, and many very short ones: of the other class, or on the other side of all.

    Together these push the head so far that it is sure that each canary has the other class, but add little curvature:
    a canary's gradient is longest, and nothing holds the head back.
    """
    method, task, public = of(name, epsilon, **_HEAD, **settings), Game(MODEL), public_images()
    rows, radius = _mapped(method, task, public)
    canaries, signs = _along(rows, radius)
    choices = []
    for push, label in itertools.product((6.0, 9.0), (0, 1)):
        target = push / OTHERS * radius * signs * (1 - 2 * label)  # of the other class, or on the other side

        def score(x: Tensor, target: Tensor = target) -> Tensor:
            return -(rows(x) - target).square().sum(1)

        near = climb(score, ascend(score, random_images(24, "starts").pixels(), steps=80), steps=20)
        some = near[score(near.inputs()).argsort(descending=True)[:8]]
        others = replace(some[torch.arange(OTHERS) % 8], labels=torch.full((OTHERS,), label))
        choices.append(Choice(others, canaries))
    return Scene(method, task, choices, public, mixing=True)


def _along(rows: Callable[[Tensor], Tensor], radius: float) -> tuple[Records, Tensor]:
    """Records of class 1 whose rows are longer than ``radius`` along one direction each, and the directions' signs."""
    found, signs = [], []
    for j in range(_DIRECTIONS):

        def score(x: Tensor, j: int = j, *, sign: float) -> Tensor:
            r = rows(x)
            length = r.norm(dim=1)
            found: Tensor = sign * r[:, j] / length - (1.05 - length / radius).clamp_min(0)
            return found

        start = random_images(8, "starts", str(j)).pixels()
        both = [ascend(partial(score, sign=sign), start, steps=60) for sign in (1.0, -1.0)]
        best = [score(each.inputs(), sign=s).detach().max(0) for each, s in zip(both, (1.0, -1.0), strict=True)]
        side = int(best[1].values > best[0].values)
        found.append(both[side][best[side].indices[None]])
        signs.append(1.0 - 2.0 * side)
    canaries = joined(*found)
    return replace(canaries, labels=torch.ones(len(canaries), dtype=torch.int64)), torch.tensor(signs)


def _mapped(method: Method, task: Game, public: Records) -> tuple[Callable[[Tensor], Tensor], float]:
    """The public map from inputs to rows, differentiable, and the radius to which rows are clipped."""
    features = first_request(method, task, public)["features"]
    net = RunSpec.of(method, LIKE, model=task.model).new_model(features.weights).eval()
    return lambda x: (models.features(net, x) - features.mean) @ features.projection, features.radius


# --- sums


def _moments(name: str, epsilon: float, **settings: Any) -> Scene:
    """A record along each direction, whose row is clipped, so that its part of the sums is longest."""
    method, task, public = of(name, epsilon, **_FEATURES, **settings), Game(MODEL), public_images()
    rows, radius = _mapped(method, task, public)
    canaries, _ = _along(rows, radius)
    classes = torch.arange(len(canaries)) % LIKE.num_classes
    choice = Choice(random_images(4, "others"), replace(canaries, labels=classes))
    return Scene(method, task, [choice], public, mixing=True)


def _class_sums(name: str, epsilon: float, model: str = MODEL, **settings: Any) -> Scene:
    """A record of each class whose features in a random network are far from the public mean."""
    method, task, public = of(name, epsilon, nets=1, **settings), Game(model), public_images()
    asked, spec = first_request(method, task, public), RunSpec.of(method, LIKE, model=model)
    net = spec.new_model(draw=1).eval()
    if hasattr(net, "projection"):
        net.projection = spec.new_model().projection

    def length(x: Tensor) -> Tensor:
        distances: Tensor = (unit_features(net, x) - asked["centre"]).norm(dim=1)
        return distances

    found = ascend(length, random_images(16, "starts").pixels(), steps=60)
    best = found[length(found.inputs()).argmax()[None].expand(LIKE.num_classes)]
    canaries = replace(best, labels=torch.arange(LIKE.num_classes))
    outlying = replace(canaries, images=255 * (canaries.images > 127).to(torch.uint8))
    others = random_images(16, "others")
    alike = replace(others, labels=torch.zeros_like(others.labels))
    choices = [Choice(some, each) for some in (others, alike) for each in (canaries, outlying)]
    return Scene(method, task, choices, public)


def _votes(name: str, epsilon: float) -> Scene:
    """Any record, as each has one vote, among others that vote for the same candidates."""
    method = of(name, epsilon, **_FEATURES, candidates=_DIRECTIONS, training={"epochs": 1})
    choice = Choice(random_images(OTHERS // 8, "others"), random_images(_DIRECTIONS, "canaries"))
    return Scene(method, Game(MODEL), [choice], public_images(), mixing=True)


_STUDENT: dict[str, Any] = {"distillation": {"epochs": 1}}
_FITTED: dict[str, Any] = {"fitting": {"steps": 2}, "training": {"epochs": 1}}
_ENERGY: dict[str, Any] = {"energy_first": 1 - 1e-12, "energy_last": 1 - 1e-12}
_PROJECTED: dict[str, Any] = {"model": "projected:width=4", "dpc": 1, "projection": {"epochs": 1}}
SCENES: dict[str, Callable[[str, float], Scene]] = {
    "fedavg-p": _heads,
    "fedd-p": partial(_heads, **_STUDENT),
    "fedauxfdp": partial(_heads, **_STUDENT, negatives=0.05, scores={"penalty": 0.5}),
    "afl": _moments,
    "deepafl": partial(_moments, rounds=2, width=16, expanded=16, quantile=0.0),
    "fedcgs": _moments,
    "fedcgs-p": partial(_moments, local={"epochs": 1}),
    "gh-ofl": partial(_moments, classifier="qda"),
    "safle": _moments,
    "fedpft": partial(_moments, mixture={"components": 1, "covariance": "full"}),
    "fedcof": _moments,
    "sim-pe": _votes,
    "fedgm-records": partial(_class_sums, ipc=1, **_FITTED),
    "fedrd-records": partial(_class_sums, **_PROJECTED, **_FITTED),
    "ldp-fedavg": updates,
    "dp-fedavg": updates,
    "dp-fl": rounds,
    "adap-dp-fl": rounds,
    "fedkd": partial(rounds, **_ENERGY),
    "fedkadp": rounds,
    "fedgm-labels": labels,
}
"""The maker of each private method's scene, called with the method's name and an epsilon."""


def scene(name: str, epsilon: float) -> Scene:
    """The scene of a private method, of a class derived from one (``mine.py:Class``), or of a method of one's own.

    Raises:
        ValueError: there is no such method, or it has no setting of an epsilon.
    """
    kind = methods.find(name)
    for base, make in SCENES.items():
        if issubclass(kind, methods.find(base)):
            return make(name, epsilon)
    if lookup.is_own(kind) and "epsilon" in kind.model_fields:
        return own(name, epsilon)
    raise ValueError(
        f"'{name}' has no audit; choose {', '.join(SCENES)}, or a class of your own with a setting 'epsilon'"
    )


def own(name: str, epsilon: float) -> Scene:
    """Plain and extreme records, for a method of which nobody has said what moves it most.

    Raises:
        ValueError: the method has settings without defaults.
    """
    try:
        method = of(name, epsilon)
    except ValidationError as error:
        raise ValueError(f"'{name}' cannot be made with an epsilon alone: {sentence(error)}") from error
    noise, place = random_images(4, "canaries"), torch.arange(64).view(1, 8, 8)
    plain = torch.stack([torch.full((1, 8, 8), 255), torch.zeros(1, 8, 8), place % 2 * 255, (place < 32) * 255])
    canaries = joined(noise, replace(noise, images=plain.to(torch.uint8)))
    canaries = replace(canaries, labels=torch.arange(len(canaries)) % LIKE.num_classes)
    others = random_images(16, "others")
    dark = replace(others, images=torch.zeros_like(others.images))
    return Scene(method, Game(MODEL), [Choice(some, canaries) for some in (others, dark)], public_images())
