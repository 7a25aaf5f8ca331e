"""The scene of each private method: records that move its releases most, found by gradient ascent on their pixels.

An auditor chooses all that an adversary may choose: settings, model, public images, all other records and the canaries.
What moves most is then chosen among several by runs without noise (see `fedstill.audit.whole_runs`).
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedstill import methods, models
from fedstill.audit import training_scenes
from fedstill.audit.play import Task
from fedstill.audit.scene import (
    LIKE,
    MODEL,
    Choice,
    Scene,
    first_request,
    joined,
    of,
    public_images,
    random_images,
)
from fedstill.audit.search import ascend, climb
from fedstill.distill.embedding import unit_features
from fedstill.engines.run_spec import RunSpec
from fedstill.protocol import Method
from fedstill.records import Records

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
    method, task, public = of(name, epsilon, **_HEAD, **settings), Task(MODEL), public_images()
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


def _mapped(method: Method, task: Task, public: Records) -> tuple[Callable[[Tensor], Tensor], float]:
    """The public map from inputs to rows, differentiable, and the radius to which rows are clipped."""
    features = first_request(method, task, public)["features"]
    net = RunSpec.of(method, LIKE, model=task.model).new_model(features.weights).eval()
    return lambda x: (models.features(net, x) - features.mean) @ features.projection, features.radius


# --- sums


def _moments(name: str, epsilon: float, **settings: Any) -> Scene:
    """A record along each direction, whose row is clipped, so that its part of the sums is longest."""
    method, task, public = of(name, epsilon, **_FEATURES, **settings), Task(MODEL), public_images()
    rows, radius = _mapped(method, task, public)
    canaries, _ = _along(rows, radius)
    classes = torch.arange(len(canaries)) % LIKE.num_classes
    choice = Choice(random_images(4, "others"), replace(canaries, labels=classes))
    return Scene(method, task, [choice], public, mixing=True)


def _class_sums(name: str, epsilon: float, model: str = MODEL, **settings: Any) -> Scene:
    """A record of each class whose features in a random network are far from the public mean."""
    method, task, public = of(name, epsilon, nets=1, **settings), Task(model), public_images()
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


_STUDENT: dict[str, Any] = {"distillation": {"epochs": 1}}
_FITTED: dict[str, Any] = {"fitting": {"steps": 2}, "training": {"epochs": 1}}
_ENERGY: dict[str, Any] = {"energy_first": 1 - 1e-12, "energy_last": 1 - 1e-12}
_PROJECTED: dict[str, Any] = {"model": "projected:width=4", "dpc": 1, "projection": {"epochs": 1}}
SCENES: dict[str, Callable[[str, float], Scene]] = {
    "fedavg-p": _heads,
    "fedd-p": partial(_heads, **_STUDENT),
    "fedauxfdp": partial(_heads, **_STUDENT, negatives=0.05, scores={"penalty": 0.5}),
    "afl": _moments,
    "fedcgs": _moments,
    "fedcgs-p": partial(_moments, local={"epochs": 1}),
    "gh-ofl": partial(_moments, classifier="qda"),
    "safle": _moments,
    "fedpft": partial(_moments, mixture={"components": 1, "covariance": "full"}),
    "fedgm-records": partial(_class_sums, ipc=1, **_FITTED),
    "fedrd-records": partial(_class_sums, **_PROJECTED, **_FITTED),
    "ldp-fedavg": training_scenes.updates,
    "dp-fl": training_scenes.rounds,
    "adap-dp-fl": training_scenes.rounds,
    "fedkd": partial(training_scenes.rounds, **_ENERGY),
    "fedkadp": training_scenes.rounds,
    "fedgm-labels": training_scenes.labels,
}
"""The maker of each private method's scene, called with the method's name and an epsilon."""


def scene(name: str, epsilon: float) -> Scene:
    """The scene of a private method, or of a class derived from one (``mine.py:Class``).

    Raises:
        ValueError: there is no such method, or none of its bases has a scene.
    """
    kind = methods.find(name)
    for base, make in SCENES.items():
        if issubclass(kind, methods.find(base)):
            return make(name, epsilon)
    raise ValueError(f"'{name}' has no audit; choose {', '.join(SCENES)}, or a class derived from one of them")
