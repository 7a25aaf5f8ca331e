"""Scenes of the methods whose clients train: by DP-SGD, with clipped updates, and on randomised labels."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import methods
from fedstill.audit.play import Task
from fedstill.audit.scene import LIKE, MODEL, Choice, Scene, joined, of, public_images, random_images
from fedstill.audit.search import ascend
from fedstill.distill.low_rank import LowRank, expand
from fedstill.engines.run_spec import RunSpec
from fedstill.methods.adap_dp_fl import AdapDPFL
from fedstill.methods.fedkadp import FedKADP
from fedstill.methods.fedkd import FedKD
from fedstill.privacy import accounting
from fedstill.privacy.events import Gaussian


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
    task = Task(MODEL, epsilon if adaptive else None, read=_expanded if issubclass(kind, FedKD) else _moved)
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
    method, task = of(name, epsilon, **_UPDATE), Task(MODEL)
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
    return Scene(method, Task(MODEL, read=counts), [choice], public_images(), labels=True)
