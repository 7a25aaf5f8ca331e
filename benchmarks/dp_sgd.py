"""Time of one DP-SGD step, as a ratio to Opacus in its two modes, to torch.func and to a loop over records.

FedKADP's network for MNIST (215,370 parameters), one and the same for all. A step is the sum of clipped gradients, the
noise and the update. Contenders alternate, each in a process of its own whose allocator keeps its memory, as in the
library's runs; a time is that of the processor for `--steps` steps, by their number. Ours draws noise in float64, the
others in float32. The difference is of the clipped sum from the loop's, by its largest entry. Opacus is no dependency:
without it, its two rows are left out (pip install opacus).

Usage: python benchmarks/dp_sgd.py --json benchmarks/results/dp_sgd.json
"""

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from alternating import seconds_of, show
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.processes import keep_memory
from fedstill.base.seeds import Simulated, isolated, stream
from fedstill.privacy.dp_sgd import DPSGD, per_record_cross_entropy
from fedstill.privacy.per_record import ClippedGradients

LR, CLIP, SIGMA = 0.005, 1.0, 5.0
Train = Callable[[nn.Module, Tensor, Tensor, int], None]


@dataclass(frozen=True)
class Given:
    """Images that are normalised already."""

    images: Tensor
    labels: Tensor

    def inputs(self, index: Tensor | slice = slice(None)) -> Tensor:
        """The images at these places."""
        return self.images[index]


def network() -> nn.Module:
    with isolated(0):
        return models.build("kadp-mnist", (1, 28, 28), 10)


def batch(size: int) -> tuple[Tensor, Tensor]:
    rng = stream(0, "batch")
    return torch.randn(size, 1, 28, 28, generator=rng), torch.randint(0, 10, (size,), generator=rng)


# --- contenders: so many steps on the same batch


def fedstill(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """The library's release."""
    release = DPSGD(model=model, lr=LR, clip=CLIP, noise_multiplier=SIGMA, sampling=1.0, steps=steps, batch_size=len(x))
    release(Given(x, y), Simulated(stream(0, "noise")))


def by_functions(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """torch.func with all gradients held."""
    for _ in range(steps):
        step(model, functions_sum(model, x, y), len(x))


def by_loop(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """One backward pass for each record."""
    for _ in range(steps):
        step(model, loop_sum(model, x, y), len(x))


def functions_sum(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    def loss(weights: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (record[None],)), label[None])

    found = list(vmap(grad(loss), (None, 0, 0))(dict(model.named_parameters()), x, y).values())
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in found]).norm(dim=0)
    factors = (CLIP / norms).clamp_max(1)
    return [torch.tensordot(factors, g.detach(), 1) for g in found]


def loop_sum(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    weights = list(model.parameters())
    totals = [torch.zeros_like(w) for w in weights]
    for i in range(len(x)):
        gradients = torch.autograd.grad(cross_entropy(model(x[i : i + 1]), y[i : i + 1]), weights)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        torch._foreach_add_(totals, torch._foreach_mul(gradients, (CLIP / norm).clamp_max(1)))
    return totals


def step(model: nn.Module, sums: list[Tensor], size: int) -> None:
    with torch.no_grad():
        for w, total in zip(model.parameters(), sums, strict=True):
            w -= LR / size * (total + SIGMA * CLIP * torch.randn(w.shape))


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Opacus with per-record gradients by hooks."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    sgd = torch.optim.SGD(wrapped.parameters(), lr=LR)
    optimizer = DPOptimizer(sgd, noise_multiplier=SIGMA, max_grad_norm=CLIP, expected_batch_size=len(x))
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    wrapped.remove_hooks()
    del_attributes(model)


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Opacus with ghost clipping: two backward passes."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
    sgd = torch.optim.SGD(wrapped.parameters(), lr=LR)
    optimizer = DPOptimizerFastGradientClipping(
        sgd, noise_multiplier=SIGMA, max_grad_norm=CLIP, expected_batch_size=len(x)
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()
    wrapped.remove_hooks()
    del_attributes(model)


def del_attributes(model: nn.Module) -> None:
    """Opacus adds attributes to a model's parameters and refuses a model that has them."""
    for p in model.parameters():
        for name in ("grad_sample", "_forward_counter", "_current_grad_sample", "_norm_sample", "summed_grad"):
            if hasattr(p, name):
                delattr(p, name)


CONTENDERS: dict[str, Train] = {
    "fedstill": fedstill,
    "Opacus, hooks": opacus_hooks,
    "Opacus, ghost clipping": opacus_ghost,
    "torch.func": by_functions,
    "loop over records": by_loop,
}


def contender(train: Train, threads: int, size: int, steps: int, pipe: Connection) -> None:
    """A process that makes ``steps`` steps for every message and answers with the seconds of one."""
    warnings.simplefilter("ignore")  # of Opacus, about hooks on modules whose inputs need no gradient
    torch.set_num_threads(threads)
    keep_memory()
    model, (x, y) = network(), batch(size)
    while pipe.recv():
        start = time.process_time()
        train(model, x, y, steps)
        pipe.send((time.process_time() - start) / steps)


def difference(own: list[Tensor], theirs: list[Tensor]) -> float:
    """Of the two sums, largest entry by largest entry."""
    pairs = list(zip(own, theirs, strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)


def main() -> None:
    """Print one line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    names = list(CONTENDERS)
    if importlib.util.find_spec("opacus") is None:
        print("Opacus is not installed: its two rows are left out (pip install opacus)")
        names = [name for name in names if not name.startswith("Opacus")]
    table: list[dict[str, Any]] = []
    for size in args.sizes:
        given = {name: (CONTENDERS[name], args.threads, size, args.steps) for name in names}
        seconds = {
            name: statistics.median(values) for name, values in seconds_of(contender, given, args.repeats).items()
        }
        model, (x, y) = network(), batch(size)
        sums, _ = ClippedGradients(model).clipped_sum(x, y, CLIP, per_record_cross_entropy)
        row = {
            "batch": size,
            "threads": args.threads,
            "seconds a step": {name: round(value, 4) for name, value in seconds.items()},
            "ratio of fedstill to": {n: round(seconds["fedstill"] / v, 3) for n, v in seconds.items() if n != names[0]},
            "relative difference": difference(sums, loop_sum(model, x, y)),
        }
        show(row, table, args.json)


if __name__ == "__main__":
    main()
