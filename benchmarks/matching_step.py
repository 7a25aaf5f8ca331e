"""Time of one gradient-matching step, as a ratio to a plain loop over classes on the same work.

Ten classes with 128 real and 10 synthetic images each, ConvNet-3. The plain loop is DC's: one ``autograd.grad`` over
all parameters for each class's real batch, one with a graph for its synthetic images, one backward pass for the sum,
on a ConvNet with PyTorch's own pooling. Three contenders alternate, each in a process of its own: the plain loop, the
same with the allocator told to keep its memory (`fedstill.base.processes`), and `fedstill.distill`'s step with it.

Loss and image gradient are compared with the plain loop's on one and the same network: PyTorch's pooling adds its four
pixels in another order, and a ReLU that flips over that moves a gradient by more than rounding.

Usage: python benchmarks/matching_step.py --threads 2 --repeats 7
"""

import argparse
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from alternating import compared, seconds_of, show
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill.base.processes import keep_memory
from fedstill.base.seeds import isolated, stream
from fedstill.distill.gradient_matching import match
from fedstill.models.cnn import AvgPool2, ConvNet

CLASSES, REAL, SYNTHETIC = 10, 128, 10
Step = Callable[[nn.Module, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def plain(model: nn.Module, real: Sequence[Tensor], synthetic: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """DC's loop over classes."""
    parameters = list(model.parameters())
    images = [x.clone().requires_grad_() for x in synthetic]
    loss = torch.zeros(())
    for label, (x, s) in enumerate(zip(real, images, strict=True)):
        target = torch.autograd.grad(cross_entropy(model(x), torch.full((len(x),), label)), parameters)
        target = [h.detach() for h in target]
        ours = torch.autograd.grad(cross_entropy(model(s), torch.full((len(s),), label)), parameters, create_graph=True)
        for g, h in zip(ours, target, strict=True):
            if g.dim() > 1:
                g, h = g.flatten(1), h.flatten(1)
                loss = loss + (1 - (g * h).sum(1) / (g.norm(dim=1) * h.norm(dim=1) + 1e-6)).sum()
    return loss.detach(), torch.autograd.grad(loss, images)


def fast(model: nn.Module, real: Sequence[Tensor], synthetic: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The library's step."""
    return match(model, real, synthetic, range(CLASSES))


def network(shape: tuple[int, int, int], width: int, *, own_pooling: bool) -> nn.Module:
    """The same ConvNet-3 for all, with the library's average pooling or with PyTorch's."""
    with isolated(0):
        model = ConvNet(shape, CLASSES, width=width)
    if not own_pooling:
        for i, layer in enumerate(model.layers):
            if isinstance(layer, AvgPool2):
                model.layers[i] = nn.AvgPool2d(2)
    return model


def contender(step: Step, kept: bool, threads: int, shape: tuple[int, int, int], width: int, pipe: Connection) -> None:
    """A process that makes one step for every message and answers with its seconds."""
    torch.set_num_threads(threads)
    if kept:
        keep_memory()
    rng = stream(0, "images")
    real, synthetic = ([torch.randn(n, *shape, generator=rng) for _ in range(CLASSES)] for n in (REAL, SYNTHETIC))
    model = network(shape, width, own_pooling=step is fast)
    while pipe.recv():
        start = time.perf_counter()
        step(model, real, synthetic)
        pipe.send(time.perf_counter() - start)


def differences(shape: tuple[int, int, int], width: int) -> tuple[float, float]:
    """Relative difference of loss and of image gradient (largest entry) between the plain loop and the library."""
    rng = stream(0, "images")
    real, synthetic = ([torch.randn(n, *shape, generator=rng) for _ in range(CLASSES)] for n in (REAL, SYNTHETIC))
    model = network(shape, width, own_pooling=True)
    (loss, gradient), (own_loss, own_gradient) = plain(model, real, synthetic), fast(model, real, synthetic)
    theirs, own = torch.stack(list(gradient)), torch.stack(list(own_gradient))
    return float((own_loss - loss).abs() / loss), float((own - theirs).abs().max() / theirs.abs().max())


def main() -> None:
    """Print one line per input shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    contenders = {"plain": (plain, False), "plain, memory kept": (plain, True), "fedstill": (fast, True)}
    table: list[dict[str, Any]] = []
    for shape in ((1, 28, 28), (3, 32, 32)):
        given = {name: (*step_and_kept, args.threads, shape, args.width) for name, step_and_kept in contenders.items()}
        seconds = seconds_of(contender, given, args.repeats)
        loss, gradient = differences(shape, args.width)
        row = {
            "shape": shape,
            "width": args.width,
            "threads": args.threads,
            **compared(seconds),
            "relative difference of loss": loss,
            "relative difference of gradient": gradient,
        }
        show(row, table, args.json)


if __name__ == "__main__":
    main()
