"""Time of solving the class heads of 20 clients to a gradient of 1e-9, as a ratio to scikit-learn at its tolerance.

Each client has 2,500 records with 512 features of 10 classes (Dirichlet 0.3 shares): rectified random projections of
a Gaussian mixture, clipped to length 1 at their 90 % quantile, with the constant feature. Both solve the same objective
on the same float64 arrays: fedstill to a Euclidean gradient norm of 1e-9, scikit-learn's lbfgs to its default of 1e-4
per coordinate of the MEAN loss. The two alternate client by client with the same number of threads, in a process each:
idle threads of one's pool would hinder the other. "Residual" is the largest gradient norm of each on the SUM of losses.

Usage: python benchmarks/heads.py --threads 2 --repeats 5 --out heads.json
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import record
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedstill.base.processes import keep_memory
from fedstill.base.seeds import stream
from fedstill.privacy.logistic import extend
from fedstill.privacy.solver import solve

RECORDS, FEATURES, CLASSES, LATENT = 2500, 512, 10, 64
Solver = Callable[[Tensor, Tensor, float], Tensor]


def client(number: int) -> tuple[Tensor, Tensor]:
    """Extended features and labels of one client."""
    world, own = stream(0, "world"), stream(0, "client", number)
    means = torch.randn(CLASSES, LATENT, generator=world)
    mix = torch.randn(LATENT, FEATURES - 1, generator=world) / math.sqrt(LATENT)
    offset = 0.3 * torch.randn(FEATURES - 1, generator=world)
    shares = torch._sample_dirichlet(torch.full((1, CLASSES), 0.3), generator=own)[0]
    labels = torch.multinomial(shares, RECORDS, replacement=True, generator=own)
    z = means[labels] + 1.5 * torch.randn(RECORDS, LATENT, generator=own)
    z = 3 * z * torch.arange(1, LATENT + 1) ** -0.5  # a spectrum that falls, as an extractor's
    h = torch.relu(z @ mix + offset + 0.1 * torch.randn(RECORDS, FEATURES - 1, generator=own))
    return extend(h, float(h.norm(dim=1).quantile(0.9)), 0.1), labels


def ours(x: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """To 1e-9."""
    return solve(x, labels, CLASSES, penalty)


def theirs(x: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """To scikit-learn's default; rows of absent classes stay 0."""
    fitted = LogisticRegression(C=1 / penalty, fit_intercept=False, max_iter=10_000).fit(x.numpy(), labels.numpy())
    head = torch.zeros(CLASSES, x.shape[1], dtype=torch.float64)
    head[torch.from_numpy(fitted.classes_)] = torch.from_numpy(fitted.coef_)
    return head


def residual(x: Tensor, labels: Tensor, penalty: float, head: Tensor) -> float:
    """The gradient's norm, over the classes that occur."""
    present = labels.unique()
    p = torch.full((len(x), CLASSES), 0.0, dtype=torch.float64)
    p[:, present] = (x @ head[present].T).softmax(1)
    # a solver that knows of absent classes moves probability away from them: they count in its own gradient
    if len(present) < CLASSES and bool(head[[c for c in range(CLASSES) if c not in present]].any()):
        p = (x @ head.T).softmax(1)
    return float(((p - torch.nn.functional.one_hot(labels, CLASSES)).T @ x + penalty * head).norm())


def contender(solver: Solver, threads: int, clients: int, pipe: Connection) -> None:
    """A process that answers (client, penalty) with the seconds and the residual."""
    torch.set_num_threads(threads)
    keep_memory()
    data = [client(number) for number in range(clients)]
    with threadpool_limits(threads):
        while (asked := pipe.recv()) is not None:
            number, penalty = asked
            began = time.perf_counter()
            head = solver(*data[number], penalty)
            taken = time.perf_counter() - began
            pipe.send((taken, residual(*data[number], penalty, head)))


def main() -> None:
    """Print one line per penalty."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--penalties", type=float, nargs="+", default=[25.0, 2.5, 0.25])
    parser.add_argument("--out", help="write the table here too")
    args = parser.parse_args()
    contenders: dict[str, Solver] = {"fedstill": ours, "scikit-learn": theirs}
    context = get_context("spawn")
    pipes: dict[str, Connection] = {}
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    for name, solver in contenders.items():
        pipes[name], other = context.Pipe()
        context.Process(target=contender, args=(solver, args.threads, args.clients, other), daemon=True).start()
    table = []
    for penalty in args.penalties:
        taken: dict[str, list[list[float]]] = {name: [[] for _ in range(args.clients)] for name in contenders}
        worst = dict.fromkeys(contenders, 0.0)
        for repeat in range(args.repeats + 1):  # the first warms up
            for number in range(args.clients):
                for name, pipe in pipes.items():
                    pipe.send((number, penalty))
                    seconds, norm = pipe.recv()
                    worst[name] = max(worst[name], norm)
                    taken[name][number] += [seconds] if repeat else []
        medians = {name: sum(map(statistics.median, times)) for name, times in taken.items()}
        best = {name: sum(map(min, times)) for name, times in taken.items()}
        row = {
            "penalty": penalty,
            "clients": args.clients,
            "threads": args.threads,
            "repeats": args.repeats,
            "seconds, medians": {name: round(value, 3) for name, value in medians.items()},
            "seconds, best": {name: round(value, 3) for name, value in best.items()},
            "ratio of medians": round(medians["fedstill"] / medians["scikit-learn"], 3),
            "ratio of best": round(best["fedstill"] / best["scikit-learn"], 3),
            "residual": worst,
        }
        table.append(row)
        print(json.dumps(row), flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    if args.out:
        record.keep(args.out, table)


if __name__ == "__main__":
    main()
