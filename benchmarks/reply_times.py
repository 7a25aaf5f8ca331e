"""How much the time of a release tells of one record: pairs of data sets that take turns, with and without it.

    python benchmarks/reply_times.py --json benchmarks/results/reply_times.json

The records are those that change the work: one that is not finite, one that a search needs more steps for, one that
begins another batch. Times are of the processor, which vary less than what a server sees. "right" is the share of right
guesses of the best threshold on one time, chosen on one half of the pairs and tried on the other; 0.5 is a coin toss.
"right at multiples" is the same where a reply waits for a multiple of `EVERY` seconds, as ``reply_seconds`` in a site's
policy makes it.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import movements
import record
import torch
from torch import Tensor

from fedstill import models
from fedstill.base.seeds import Simulated, isolated, stream
from fedstill.privacy.dp_sgd import DPSGD
from fedstill.privacy.logistic import LogisticHead
from fedstill.privacy.mechanisms import ClassSums
from fedstill.privacy.second_moments import SecondMoments

EVERY = 10.0
"""Seconds of which "right at multiples" supposes that replies leave at multiples."""


class Pair(NamedTuple):
    """Two computations, with a record and without it, and what the record is."""

    name: str
    record: str
    with_it: Callable[[], Any]
    without: Callable[[], Any]


class Images(NamedTuple):
    """Images that are normalised already."""

    x: Tensor
    labels: Tensor

    def inputs(self, index: Any = slice(None)) -> Tensor:
        """The images at these places."""
        return self.x[index]


def pairs() -> Iterator[Pair]:
    """Closed-form and trained releases."""
    rng = stream(0, "rows")
    h, y = torch.randn(20_000, 512, generator=rng), torch.randint(0, 10, (20_000,), generator=rng)
    odd = h.clone()
    odd[7, 3] = math.nan
    sums = ClassSums(10, 10.0, 1.0)
    whole = SecondMoments(num_classes=10, dims=512, radius=10.0, noise_multiplier=1.0)
    for name, release in {
        "ClassSums": lambda rows: sums((rows[0], rows[1]), noise()),
        "SecondMoments": lambda rows: whole([rows], noise()),
    }.items():
        yield Pair(name, "one more of 20,000", lambda r=release: r((h, y)), lambda r=release: r((h[1:], y[1:])))
        yield Pair(name, "one that is not finite", lambda r=release: r((odd, y)), lambda r=release: r((h, y)))
    for penalty in (0.01, 0.1):
        head = LogisticHead(num_classes=2, penalty=penalty, radius=1.0, noise_multiplier=1.0)
        rows = movements.pull(60_000, 4, penalty / 2)
        one = torch.zeros(1, 4, dtype=torch.float64)
        one[0, 0] = 1
        more = (torch.cat([rows[0], one]), torch.cat([rows[1], rows[1][1:2]]))
        yield Pair(
            f"LogisticHead, penalty {penalty:g}",
            "the one that moves it most",
            lambda head=head, more=more: head(more, noise()),
            lambda head=head, rows=rows: head(rows, noise()),
        )
    with isolated(0):
        model = models.build("convnet:width=8,depth=2", (1, 8, 8), 10)
    x, y = torch.randn(129, 1, 8, 8, generator=rng), torch.randint(0, 10, (129,), generator=rng)
    odd = x.clone()
    odd[5, 0, 0, 0] = math.inf
    for sampling, name in ((1.0, "all records in each step"), (0.5, "half of the records in each step")):
        train = DPSGD(model=model, lr=0.01, clip=1.0, noise_multiplier=2.0, sampling=sampling, steps=20, batch_size=64)
        yield Pair(
            f"DPSGD, {name}",
            "the 129th",
            lambda train=train: train(Images(x, y), noise()),
            lambda train=train: train(Images(x[:128], y[:128]), noise()),
        )
        yield Pair(
            f"DPSGD, {name}",
            "one that is not finite",
            lambda train=train: train(Images(odd, y), noise()),
            lambda train=train: train(Images(x, y), noise()),
        )


def noise() -> Simulated:
    """Noise, another in each computation."""
    return Simulated(stream(time.monotonic_ns(), "noise"))


def right(more: list[float], less: list[float]) -> float:
    """The share of right guesses of a threshold that is chosen on every second pair and tried on the others."""

    def share(threshold: float, sign: int, some: list[float], other: list[float]) -> float:
        hits = [sign * (one - threshold) > 0 for one in some] + [sign * (one - threshold) <= 0 for one in other]
        return sum(hits) / len(hits)

    _, threshold, sign = max(
        (share(threshold, sign, more[::2], less[::2]), threshold, sign)
        for threshold in (*more[::2], *less[::2])
        for sign in (1, -1)
    )
    return share(threshold, sign, more[1::2], less[1::2])


def main() -> None:
    """Print and keep a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=24, help="turns of each pair")
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for pair in pairs():
        times: dict[str, list[float]] = {"with": [], "without": []}
        for turn in range(args.repeats + 1):
            both = [("with", pair.with_it), ("without", pair.without)]
            for name, compute in both if turn // 2 % 2 else both[::-1]:
                start = time.process_time()
                compute()
                times[name] += [time.process_time() - start] if turn else []
        waited = {name: [float(math.ceil(one / EVERY)) for one in values] for name, values in times.items()}
        row = {
            "release": pair.name,
            "record": pair.record,
            "median seconds with it": round(statistics.median(times["with"]), 5),
            "median seconds without": round(statistics.median(times["without"]), 5),
            "right": round(right(times["with"], times["without"]), 3),
            "right at multiples": round(right(waited["with"], waited["without"]), 3),
            "turns": args.repeats,
        }
        table.append(row)
        print(row, flush=True)
        if args.json:
            record.keep(args.json, table)


if __name__ == "__main__":
    main()
