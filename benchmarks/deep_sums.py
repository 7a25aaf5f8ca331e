"""DeepAFL beside AFL on features that are computed once: ten clients with one class each, accuracy after each block.

The features of all images are kept in a folder, as by `moments.py`. The sums of each client come from the method's own
network and mechanism, in single precision, and the server's part is the method's own. Seeds are those of the random
layers and of the noise. `--validate` holds out the last tenth of the training records and never reads the test set.

Usage: python benchmarks/deep_sums.py --data fashion_mnist --model scattering --public noise --folder /tmp/features \
    --methods afl:dims=512 deepafl:dims=512,width=512,expanded=512,rounds=6 --out found.json
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import record
import torch
from moments import DELTA, Mapped, arguments, raw_features, settings_of, summed
from torch import Tensor

from fedstill import methods
from fedstill.base.seeds import Simulated, draw_seed, stream
from fedstill.methods.deepafl import Built, DeepAFL
from fedstill.methods.parts.feature_sums import Total, add_up
from fedstill.methods.parts.moments import Sums, mechanism_facts
from fedstill.models.residual import Residual
from fedstill.privacy.logistic import extend
from fedstill.privacy.second_moments import SecondMoments
from fedstill.protocol import Released

CLASSES = 10


class Task:
    """Rows of length at most 1 of public, training and judged records, without their constant, and labels."""

    def __init__(self, mapped: Mapped, raw: dict[str, Any], bias: float, *, validate: bool) -> None:
        self.radius, self.bias = mapped.radius, bias
        count = len(raw["train_y"])
        kept = torch.arange(count - count // 10 if validate else count)
        judged = torch.arange(len(kept), count) if validate else torch.arange(len(raw["test_y"]))
        self.x, self.y = self._all(mapped, "train", kept)
        self.judged, self.right = self._all(mapped, "train" if validate else "test", judged)
        self.public, _ = self._all(mapped, "public", torch.arange(len(raw["public_y"])))

    def _all(self, mapped: Mapped, part: str, index: Tensor) -> tuple[Tensor, Tensor]:
        batches = mapped.rows(part, index)
        short = ((extend(rows, self.radius, self.bias)[:, :-1].float(), labels) for rows, labels in batches)
        rows, labels = zip(*short, strict=True)
        return torch.cat(rows), torch.cat(labels)


def total_of(method: Any, task: Task, dims: int, net: Residual | None, seed: int, t: int) -> Total:
    """What the server adds up of ten clients, of which client k has the records of class k."""
    radius = float(net.radii[-1]) if net else (1 - task.bias**2) ** 0.5
    facts = mechanism_facts(method, DELTA, num_classes=CLASSES, dims=dims, radius=radius, by_class=False)
    replies = []
    for label in range(CLASSES):
        own = task.x[task.y == label]
        found = SecondMoments(**facts)(_batches(own, label, net), Simulated(stream(seed, "noise", label, t)))
        replies.append(Sums(second=Released(found.second.float()), first=Released(found.first.float())))
    return add_up(summed(replies), method, DELTA, torch.device("cpu"))


def _batches(rows: Tensor, label: int, net: Residual | None) -> Iterator[tuple[Tensor, Tensor]]:
    for some in rows.split(2000):
        with torch.no_grad():
            yield (net(some) if net else some), torch.full((len(some),), label)


def deep(method: DeepAFL, task: Task, seed: int) -> list[float]:
    """Accuracy after each block, as `DeepAFL.server` goes."""
    drawn, known, found = draw_seed(stream(seed, "random layers")), method._empty(CLASSES), []
    for t in range(method.blocks + 1):
        built = Built.after(t, known, drawn)
        built.radii[t] = method._radius(method.network(task.x.shape[1], built), task.public.double())
        net = method.network(task.x.shape[1], built)
        known |= method.next_block(total_of(method, task, method.entries(t), net, seed, t), known, t)
        net = method.network(task.x.shape[1], Built.after(t, known, drawn), known["head"])
        with torch.no_grad():
            logits = torch.cat([net(some) for some in task.judged.split(2000)])
        found.append(float((logits.argmax(1) == task.right).double().mean()))
    return found


def shallow(method: Any, task: Task, seed: int) -> list[float]:
    """Accuracy of AFL's head."""
    head = method.head(total_of(method, task, task.x.shape[1], None, seed, 0))
    logits = task.judged.double() @ head[:, :-1].T + task.bias * head[:, -1]
    return [float((logits.argmax(1) == task.right).double().mean())]


def size_of(method: Any, dims: int) -> int:
    """Bytes that a client sends in all, without headers."""
    widths = [dims]
    if isinstance(method, DeepAFL):
        widths = [method.entries(t) for t in range(method.rounds)]
    return sum(4 * ((w + 1) * (w + 2) // 2 + CLASSES * (w + 1)) for w in widths)


def run(texts: Sequence[str], raw: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each method, with the accuracies of its seeds."""
    tasks: dict[int, Task] = {}
    for text in texts:
        name, changes = settings_of(text)
        dims, epsilon = int(changes.pop("dims", 512)), changes.pop("epsilon", None)
        method: Any = methods.find(name)(epsilon=epsilon, **changes)
        if dims not in tasks:
            tasks = {dims: Task(Mapped(raw, dims, args), raw, method.bias, validate=args.validate)}
        depths, began = [], time.perf_counter()
        for seed in range(args.seeds if name == "deepafl" or epsilon else 1):
            depths.append((deep if name == "deepafl" else shallow)(method, tasks[dims], seed))
            print(f"{text:60} {seed}", *(f"{100 * a:.2f}" for a in depths[-1]), flush=True)
        row = {"method": text, "dims": dims, "epsilon": epsilon, "depths": depths, "bytes": size_of(method, dims)}
        yield row | {"accuracies": [each[-1] for each in depths], "seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--methods", nargs="+", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {key: str(value) for key, value in vars(args).items() if key not in ("out", "folder")}
    found: list[dict[str, Any]] = []
    for row in run(args.methods, raw_features(args), args):
        found.append(row)
        if args.out:
            record.keep(args.out, found, **chosen)


if __name__ == "__main__":
    main()
