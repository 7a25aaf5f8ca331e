"""Seconds a round of FedAvg's local training takes, as ratios to a bare PyTorch loop on the same work.

Ten clients with 6,000 records each train LeNet-5 (44,426 parameters) for one epoch with batches of 50; the round ends
with the mean of their weights. Contenders alternate, each in a fresh process. All but the engine draw the same batches,
so the table also says whether the weights came out the same to the bit.

Usage: python benchmarks/local_training.py --data fashion_mnist --json ratios.json
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import record
import torch
from small import federation
from torch import nn
from torch.nn.functional import cross_entropy

from fedstill.base.processes import keep_memory
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.data import sources
from fedstill.data.shards import Shards
from fedstill.engines.client import Site
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.transport import Workers
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.fedavg import FedAvg
from fedstill.models import build
from fedstill.protocol import load as load_weights
from fedstill.protocol import state
from fedstill.train.sgd import SGD

LR, MOMENTUM, BATCH = 0.01, 0.9, 50
CHANNELS, SIDE, CLASSES = 1, 28, 10

State = dict[str, torch.Tensor]
Trainer = Callable[[int, State, Records, torch.Generator], State]


@dataclass(frozen=True)
class Task:
    """What a round does: the clients' records and how many rounds to time."""

    clients: list[Records]
    rounds: int


@dataclass(frozen=True)
class Result:
    """Seconds of each timed round, and a checksum of the weights after the last."""

    seconds: list[float]
    weights: str


def plain_lenet() -> nn.Module:
    """LeNet-5 as anybody writes it."""
    return nn.Sequential(
        *(nn.Conv2d(CHANNELS, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def rounds(task: Task, model: nn.Module, train: Callable[[Records, torch.Generator], None]) -> Result:
    """Time ``train``, which changes ``model`` in place, on all clients in turn; the first, untimed round warms up."""
    with isolated(0), torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.05)
    weights = [p.detach().clone() for p in model.parameters()]
    seconds = []
    for number in range(task.rounds + 1):
        began = time.perf_counter()
        total = [torch.zeros_like(w) for w in weights]
        for client, records in enumerate(task.clients):
            with torch.no_grad():
                for p, w in zip(model.parameters(), weights, strict=True):
                    p.copy_(w)
            train(records, stream(0, "client", client, "round", number))
            torch._foreach_add_(total, [p.detach() for p in model.parameters()])
        weights = [t / len(task.clients) for t in total]
        seconds.append(time.perf_counter() - began)
    checksum = hashlib.sha256(torch.cat([w.flatten() for w in weights]).numpy().tobytes()).hexdigest()
    return Result(seconds[1:], checksum)


def bare(task: Task) -> Result:
    """The loop of every PyTorch tutorial; the normalised data are ready in memory before the clock starts."""
    model = plain_lenet()
    inputs = {id(records): records.inputs() for records in task.clients}

    def train(records: Records, rng: torch.Generator) -> None:
        x, y = inputs[id(records)], records.labels
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        torch.randint(2**63 - 1, (), generator=rng)  # where SGD.fit draws the seed of dropout
        for batch in torch.randperm(len(y), generator=rng).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    return rounds(task, model, train)


def bare_keep(task: Task) -> Result:
    """The bare loop with the C allocator told to keep its memory."""
    keep_memory()
    return bare(task)


def fit(task: Task) -> Result:
    """``SGD.fit``, one client after the other in one process, from 8-bit records."""
    keep_memory()
    model = build("lenet5", (CHANNELS, SIDE, SIDE), CLASSES)
    sgd = SGD(lr=LR, momentum=MOMENTUM, batch_size=BATCH)

    def train(records: Records, rng: torch.Generator) -> None:
        sgd.fit(model, records, rng)

    return rounds(task, model, train)


def engine(task: Task, workers: int, threads: int) -> Result:
    """Whole rounds through the engine: bytes, checks, journal and all; only the evaluation is left out, as above."""
    keep_memory()
    method = FedAvg(local=SGD(lr=LR, momentum=MOMENTUM, batch_size=BATCH))
    first = task.clients[0]
    everything = Records(
        torch.cat([r.images for r in task.clients]),
        torch.cat([r.labels for r in task.clients]),
        CLASSES,
        first.normalisation,
    )
    shares = np.split(np.arange(len(everything)), len(task.clients))
    spec = RunSpec.of(method, first, model="lenet5")
    with tempfile.TemporaryDirectory() as place:
        shards = Shards(everything, [(share, share[:0]) for share in shares])
        transport = Workers(partial(Site, spec, shards, Path(place) / "clients", threads=threads), workers)
        data = SimpleNamespace(test=everything[:1])
        fed = federation(method, transport, data, Path(place), spec=spec, num_clients=len(shares))
        model, seconds = fed.new_model(), []
        for _ in fed.rounds(task.rounds + 1, model):
            began = time.perf_counter()
            replies = fed.ask(FedAvg.update, weights=state(model))
            load_weights(model, weighted_mean((r.num_records, r.weights) for r in replies))
            seconds.append(time.perf_counter() - began)
        transport.close()
    return Result(seconds[1:], "")


def one_worker(task: Task) -> Result:
    """The engine with one worker that has as many threads as the bare loop."""
    return engine(task, 1, torch.get_num_threads())


def two_workers(task: Task) -> Result:
    """The engine with two workers of one thread each."""
    return engine(task, 2, 1)


CONTENDERS: dict[str, Callable[[Task], Result]] = {
    "bare": bare,
    "bare_keep": bare_keep,
    "fit": fit,
    "one_worker": one_worker,
    "two_workers": two_workers,
}
BASELINE = "bare_keep"


def load(data: str, num_clients: int, records: int) -> list[Records]:
    """Equal shares of a shuffled data set, or of noise."""
    if data == "random":
        rng = stream(0, "noise")
        images = torch.randint(0, 256, (num_clients * records, CHANNELS, SIDE, SIDE), generator=rng, dtype=torch.uint8)
        labels = torch.randint(0, CLASSES, (len(images),), generator=rng)
        everything = Records(images, labels, CLASSES, Normalisation((0.2861,), (0.3530,)))
    else:
        everything = sources.load(data).train
    order = torch.randperm(len(everything), generator=stream(0, "shares"))
    return [everything[share] for share in order[: num_clients * records].split(records)]


def alone(options: argparse.Namespace) -> None:
    """One contender in this process; its result goes to standard output as JSON."""
    torch.set_num_threads(options.threads[0])
    task = Task(load(options.data, options.clients, options.records), options.rounds)
    print(json.dumps(vars(CONTENDERS[options.contender](task))))


def measure(name: str, threads: int, options: argparse.Namespace) -> Result:
    """One contender in a fresh process."""
    words = ["--contender", name, "--threads", str(threads), "--data", options.data, "--rounds", str(options.rounds)]
    words += ["--clients", str(options.clients), "--records", str(options.records)]
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Result(**json.loads(output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion_mnist", help='a data set of 1x28x28 images, or "random"')
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--records", type=int, default=6000, help="records per client")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds in each process")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each contender")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--contender", choices=CONTENDERS, help="run only this one, in this process")
    options = parser.parse_args()
    if options.contender:
        return alone(options)
    rows = [(n, threads) for threads in options.threads for n in CONTENDERS if threads > 1 or n != "two_workers"]
    results: dict[tuple[str, int], list[Result]] = {row: [] for row in rows}
    for repeat in range(options.repeats):
        for row in rows if repeat % 2 == 0 else rows[::-1]:
            results[row].append(measure(*row, options))
    table = []
    for name, threads in rows:
        runs, base = results[name, threads], results[BASELINE, threads]
        # Each ratio is taken within one repeat, so that what else the machine does meanwhile falls on both sides.
        ratios = [min(r.seconds) / min(b.seconds) for r, b in zip(runs, base, strict=True)]
        seconds = [s for r in runs for s in r.seconds]
        same = {r.weights for r in runs} == {b.weights for b in base} if all(r.weights for r in runs) else None
        table.append(
            {
                **{"contender": name, "threads": threads, "median": statistics.median(seconds), "min": min(seconds)},
                **{"ratio": statistics.median(ratios), "ratios": ratios, "same_weights": same},
            }
        )
    print(f"{'contender':12} threads  median s   min s  ratio to {BASELINE}  same weights")
    for line in table:
        times = f"{line['median']:8.2f} {line['min']:8.2f} {line['ratio']:12.2f}"
        print(f"{line['contender']:12} {line['threads']:7} {times} {line['same_weights']!s:>18}")
    if options.json:
        record.keep(options.json, table)


if __name__ == "__main__":
    main()
