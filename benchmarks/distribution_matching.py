"""Time of one distribution-matching step at a client, as a ratio to a plain loop over classes on the same work.

256 real and 10 synthetic examples of each of 4 and of 10 classes. Two steps: FedDM's (ConvNet-3 on 3x32x32 images in
eval mode, features and logits) and FedRD's (1x32x32 representations of a projection, features of its task network in
train mode). Contenders alternate, each in a process of its own:

* ``as published`` (FedDM): its re-implementation, which runs every batch through the network once for the features and
  once for the logits, real ones with a graph that is then thrown away;
* ``plain``: the same without what is clearly double. One forward pass gives features and logits, real ones without a
  graph. FedRD has no public code; it is DM's branch for batch norm, with all classes in one forward pass;
* ``plain, memory kept``: that, with the allocator told to keep its memory (`fedstill.base.processes`);
* ``fedstill``: `fedstill.distill.distribution_matching.match` with it.

The plain ones run on networks with PyTorch's own pooling. Loss and gradient of FedDM are compared on one and the same
network: a ReLU that flips when pooling adds in another order moves a gradient by more than rounding.

Usage: python benchmarks/distribution_matching.py --threads 1 --repeats 5
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from alternating import seconds_of, show
from torch import Tensor, nn

from fedstill.base.processes import keep_memory
from fedstill.base.seeds import isolated, stream
from fedstill.distill.distribution_matching import DistributionMatching, match
from fedstill.models.cnn import AvgPool2, ConvNet
from fedstill.models.projected import Projected, TaskNetwork

REAL, SYNTHETIC, SHAPE = 256, 10, (3, 32, 32)
SETTINGS = {"feddm": DistributionMatching(), "fedrd": DistributionMatching.published_fedrd()}
Step = Callable[[nn.Module, Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]


class PlainTask(nn.Module):
    """FedRD's task network as one writes it down, with the weights of the library's."""

    def __init__(self, task: TaskNetwork) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for c, n in zip(task.convs, task.norms, strict=True) for m in (c, n, nn.ReLU(), nn.MaxPool2d(2)))
        )

    def features(self, x: Tensor) -> Tensor:
        """The flattened last block."""
        out: Tensor = self.layers(x)
        return out.flatten(1)


def feddm(net: nn.Module, real: Sequence[Tensor], synthetic: Tensor, *, twice: bool) -> tuple[Tensor, Tensor]:
    """One class after the other, a backward pass for the sum."""
    net.eval()
    images = synthetic.clone().requires_grad_()
    loss = torch.zeros(())
    for x, s in zip(real, images, strict=True):
        if twice:
            features, logits = net.features(x).detach(), net(x).detach()
            own_features, own_logits = net.features(s), net(s)
        else:
            with torch.no_grad():
                features = net.features(x)
                logits = net.classifier(features)
            own_features = net.features(s)
            own_logits = net.classifier(own_features)
        loss = loss + ((features.mean(0) - own_features.mean(0)) ** 2).sum()
        loss = loss + ((logits.mean(0) - own_logits.mean(0)) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, images)
    return loss.detach(), gradient


def fedrd(net: nn.Module, real: Sequence[Tensor], synthetic: Tensor) -> tuple[Tensor, Tensor]:
    """All classes through the network, because batch norm needs them; then one class after the other."""
    net.train()
    values = synthetic.clone().requires_grad_()
    with torch.no_grad():
        features = net.features(torch.cat(list(real)))
    own_features = net.features(values.flatten(0, 1))
    loss = torch.zeros(())
    for c in range(len(real)):
        theirs = features[c * REAL : (c + 1) * REAL].mean(0)
        loss = loss + (theirs - own_features[c * SYNTHETIC : (c + 1) * SYNTHETIC].mean(0)).norm()
    (gradient,) = torch.autograd.grad(loss, values)
    return loss.detach(), gradient


def contenders(kind: str) -> dict[str, tuple[Step, bool]]:
    """Step and whether the allocator keeps memory."""
    plain = partial(feddm, twice=False) if kind == "feddm" else fedrd
    published = {"as published": (partial(feddm, twice=True), False)} if kind == "feddm" else {}
    return {
        **published,
        "plain": (plain, False),
        "plain, memory kept": (plain, True),
        "fedstill": (partial(match, settings=SETTINGS[kind]), True),
    }


def task(kind: str, classes: int, width: int) -> tuple[nn.Module, list[Tensor], Tensor]:
    """The library's network, real batches and synthetic examples."""
    rng = stream(0, "images")
    real = [torch.randn(REAL, *SHAPE, generator=rng) for _ in range(classes)]
    with isolated(0):
        if kind == "feddm":
            net: nn.Module = ConvNet(SHAPE, 10, width=width)
        else:
            whole = Projected(SHAPE, 10, width=width)
            net = whole.task
            with torch.no_grad():
                real = [whole.projection(x) for x in real]
    return net, real, torch.randn(classes, SYNTHETIC, *real[0].shape[1:], generator=rng)


def plain_network(net: nn.Module) -> nn.Module:
    """The same weights with PyTorch's own pooling."""
    if isinstance(net, TaskNetwork):
        return PlainTask(net)
    for i, layer in enumerate(net.layers):
        if isinstance(layer, AvgPool2):
            net.layers[i] = nn.AvgPool2d(2)
    return net


def contender(kind: str, name: str, classes: int, width: int, threads: int, pipe: Connection) -> None:
    """A process that makes one step for every message and answers with its seconds."""
    torch.set_num_threads(threads)
    step, kept = contenders(kind)[name]
    if kept:
        keep_memory()
    net, real, synthetic = task(kind, classes, width)
    if name != "fedstill":
        net = plain_network(net)
    while pipe.recv():
        start = time.perf_counter()
        step(net, real, synthetic)
        pipe.send(time.perf_counter() - start)


def differences(kind: str, classes: int, width: int) -> tuple[float, float]:
    """Relative difference of loss and of gradient (largest entry) between the plain loop and the library."""
    net, real, synthetic = task(kind, classes, width)
    other = copy.deepcopy(net)
    if kind == "fedrd":
        other = plain_network(other)
    loss, gradient = contenders(kind)["plain"][0](other, real, synthetic)
    own_loss, own_gradient = match(net, real, synthetic, SETTINGS[kind])
    return float((own_loss - loss).abs() / loss), float((own_gradient - gradient).abs().max() / gradient.abs().max())


def main() -> None:
    """Print one line per method and number of classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--classes", type=int, nargs="+", default=[4, 10])
    parser.add_argument("--steps", nargs="+", choices=("feddm", "fedrd"), default=["feddm", "fedrd"])
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    for kind in args.steps:
        for classes in args.classes:
            names = list(contenders(kind))
            given = {name: (kind, name, classes, args.width, args.threads) for name in names}
            seconds = seconds_of(contender, given, args.repeats)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            loss, gradient = differences(kind, classes, args.width)
            row = {
                "step": kind,
                "classes": classes,
                "width": args.width,
                "threads": args.threads,
                "seconds": {name: round(value, 3) for name, value in medians.items()},
                "best": {name: round(min(values), 3) for name, values in seconds.items()},
                "ratio to": {n: round(medians["fedstill"] / medians[n], 3) for n in names if n != "fedstill"},
                "relative difference of loss": loss,
                "relative difference of gradient": gradient,
            }
            show(row, table, args.json)


if __name__ == "__main__":
    main()
