"""Print how many steps a second processes make side by side, to choose JOBS of the queue: a client's step, batch 128.

python reproduce/gpu/throughput.py [PROCESSES] [SECONDS]
"""

import multiprocessing
import sys
import time

import torch

from fedstill import models
from fedstill.base.records import Normalisation, Records
from fedstill.train.sgd import SGD

BATCHES = 100


def steps_a_second(ready: "multiprocessing.synchronize.Barrier", seconds: float) -> float:
    """Of one process, after all have started."""
    model = models.build("dense-mnist", (1, 28, 28), 10).to("cuda")
    images = torch.randint(0, 256, (128 * BATCHES, 1, 28, 28), dtype=torch.uint8)
    records = Records(images, torch.arange(len(images)) % 10, 10, Normalisation((0.5,), (0.5,)))
    training, rng, done = SGD(batch_size=128), torch.Generator().manual_seed(0), 0
    training.fit(model, records, rng)
    ready.wait()
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        done += training.fit(model, records, rng)
        torch.cuda.synchronize()
    return done / (time.monotonic() - start)


def _work(ready: "multiprocessing.synchronize.Barrier", seconds: float, found: "multiprocessing.Queue[float]") -> None:
    found.put(steps_a_second(ready, seconds))


def main(processes: int = 1, seconds: float = 5.0) -> None:
    """All of them, together."""
    context = multiprocessing.get_context("spawn")
    ready, found = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=_work, args=(ready, seconds, found)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    each = [found.get() for _ in workers]
    print(f"{processes} processes: {sum(each):.0f} steps/s, the slowest {min(each):.0f}", flush=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:3]))
