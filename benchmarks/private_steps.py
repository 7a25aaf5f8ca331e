"""Cost of privacy's steps as a ratio to another checkout, such as a9422ca from before rows were kept apart.

The two take turns, each in a process of its own; a time is that of the processor. A step of DP-SGD is the sum of
clipped gradients of a batch, the noise and the update. The first step of a process also tests the kernels
(`fedstill.privacy.rowwise`).

Usage: git worktree add ../old a9422ca
       python benchmarks/private_steps.py --old ../old --json benchmarks/results/private_steps.json
"""

import argparse
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from alternating import seconds_of, show

MODELS = (
    ("kadp-mnist", (1, 28, 28)),
    ("convnet:width=32,depth=3", (1, 28, 28)),
    ("convnet:width=8,depth=2", (1, 8, 8)),
    ("scattering", (1, 8, 8)),
    ("scattering", (1, 28, 28)),
)
SOURCE = Path(__file__).parents[1] / "src"


class Given(NamedTuple):
    """Images that are normalised already."""

    x: Any
    labels: Any

    def inputs(self, index: Any = slice(None)) -> Any:
        """The images at these places."""
        return self.x[index]


def contender(source: str, spec: str, shape: tuple[int, int, int], size: int, steps: int, pipe: Connection) -> None:
    """A process that makes ``steps`` steps with the library at ``source`` for every message."""
    sys.path.insert(0, source)
    import torch

    from fedstill import models
    from fedstill.privacy.dp_sgd import DPSGD

    try:
        from fedstill.base.processes import keep_memory
        from fedstill.base.seeds import Simulated, isolated, stream
    except ModuleNotFoundError:  # where they were in older checkouts
        from fedstill.seeds import Simulated, isolated, stream
        from fedstill.train.allocator import keep_memory

    torch.set_num_threads(1)
    keep_memory()
    with isolated(0):
        model = models.build(spec, shape, 10)
    rng = stream(0, "batch")
    given = Given(torch.randn(size, *shape, generator=rng), torch.randint(0, 10, (size,), generator=rng))

    def train(count: int) -> float:
        release = DPSGD(
            model=model, lr=0.005, clip=1.0, noise_multiplier=5.0, sampling=1.0, steps=count, batch_size=size
        )
        start = time.process_time()
        release(given, Simulated(stream(0, "noise")))
        return (time.process_time() - start) / count

    first = train(1)
    while pipe.recv():
        pipe.send((train(steps), first))


def main() -> None:
    """Print one line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--size", type=int, default=128, help="records in a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    sources = {"now": str(SOURCE), "old": str((args.old / "src").resolve())}
    table: list[dict[str, Any]] = []
    for spec, shape in MODELS:
        given = {name: (source, spec, shape, args.size, args.steps) for name, source in sources.items()}
        taken: dict[str, Any] = seconds_of(contender, given, args.repeats)
        least = {name: min(each for each, _ in values) for name, values in taken.items()}  # without others' caches
        middle = {name: statistics.median(each for each, _ in values) for name, values in taken.items()}
        row = {
            "model": spec,
            "image": list(shape),
            "batch": args.size,
            "seconds a step": {name: round(value, 5) for name, value in middle.items()},
            "ratio of medians": round(middle["now"] / middle["old"], 3),
            "ratio of the least": round(least["now"] / least["old"], 3),
            "seconds of the first step": {name: round(values[0][1], 3) for name, values in taken.items()},
        }
        show(row, table, args.json)


if __name__ == "__main__":
    main()
