"""What the 10,000 steps of gradient descent in FedLPA's code reach, beside their start and the exact solution.

The code (lebronlambert/FedLPA_NeurIPS2024, ``experiments_our.py``) starts each layer at the expectation approximation W
and takes steps ``W - dL/dW`` of ``L = mean((sum_k p_k B_k W A_k - Z)^2)``, a mean over the layer's entries: a step is
2 / entries, whatever the curvature. Here is what that reaches with the uploads of finished runs, in closed form, and
step by step too for layers of at most `LITERAL` entries.

Usage: python benchmarks/posterior_descent.py RUN [RUN ...] [--steps 10000]    (RUN as of benchmarks/posteriors.sh)
       python benchmarks/posterior_descent.py --quick --to OUT.json            (a small run of its own, and 100 steps)
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

import fedstill
from fedstill.attacks.uploads import read_simulated, share_out, spec_of
from fedstill.base.records import Records
from fedstill.distill.posteriors import Layer, LayerPosterior, layers, product_mean
from fedstill.evaluation import evaluate
from fedstill.methods.averaging import mean_weights
from fedstill.methods.fedlpa import FedLPA
from fedstill.protocol import load, wire
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import Journal

PRODUCTS = 120
"""Products with S of the closed form; half of them are tried too."""
LITERAL = 1000
"""Entries of the largest layer whose steps are taken one by one."""


def descended(clients: list[LayerPosterior], start: Tensor, steps: int, most: int) -> tuple[Tensor, float, float]:
    """W after the steps, and the shares of Z that are left before and after them.

    With S the map ``W -> sum_k p_k B_k W A_k``, c = 2 / entries and r what W leaves of Z, n steps add
    ``S^-1 (1 - (1 - c S^2)^n) r`` in exact arithmetic: a function of S, which Lanczos's method applies in ``most``
    products in place of 2 n.
    """
    apply, z = equation(clients)
    rest = z - apply(start)
    directions, values, vectors = lanczos(apply, rest, most)
    step = 2 / start.numel()
    assert step * float(values.max()) ** 2 < 2, "the descent diverges"
    gains = (1 - (1 - step * values**2) ** steps) / values
    weights = float(rest.norm()) * (vectors @ (gains * vectors[0]))
    w = start + (directions.T @ weights).view_as(start)
    return w, float(rest.norm() / z.norm()), float((apply(w) - z).norm() / z.norm())


def equation(clients: list[LayerPosterior]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """S and Z of a layer."""
    records = sum(one.records for one in clients)
    a = torch.stack([one.inputs for one in clients])
    b = torch.stack([one.outputs * (one.records / records) for one in clients])
    z = torch.bmm(b, torch.stack([one.mean for one in clients]) @ a).sum(0)
    return lambda w: torch.bmm(b, w @ a).sum(0), z


def lanczos(apply: Callable[[Tensor], Tensor], start: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal rows that begin with ``start``'s direction, and eigenvalues and -vectors of S between them."""
    rows = [start.flatten() / start.norm()]
    diagonal, beside = list[Tensor](), list[Tensor]()
    for _ in range(min(most, start.numel())):
        image = apply(rows[-1].view_as(start)).flatten()
        diagonal.append(image @ rows[-1])
        known = torch.stack(rows)
        for _ in range(2):  # so that rounding does not bring back what was there
            image = image - known.T @ (known @ image)
        if image.norm() <= 1e-12 * diagonal[0].abs():
            break
        beside.append(image.norm())
        rows.append(image / image.norm())
    number = len(diagonal)
    inner = torch.diag(torch.stack(diagonal))
    if number > 1:
        off = torch.diag(torch.stack(beside[: number - 1]), 1)
        inner = inner + off + off.T
    values, vectors = torch.linalg.eigh(inner)
    return torch.stack(rows[:number]), values, vectors


def step_by_step(clients: list[LayerPosterior], start: Tensor, steps: int) -> float:
    """The share of Z that is left after the steps, taken one by one."""
    apply, z = equation(clients)
    w = start
    for _ in range(steps):
        w = w - 2 / w.numel() * apply(apply(w) - z)
    return float((apply(w) - z).norm() / z.norm())


def read(folder: Path) -> tuple[nn.Module, list[Layer], list[list[LayerPosterior]], Records]:
    """A run's mean model, its layers, each layer's posteriors, and the test records."""
    job = read_simulated(folder, "")
    task = share_out(job.experiment, None)
    spec, method = spec_of(job, task), job.method
    assert isinstance(method, FedLPA)
    journal, step = Journal(RunFolder(folder).journal), FedLPA.train
    clients, name = journal.replies_to(0, step.name)[0], step.name
    replies = [
        step.reply(**wire.decode(journal.read_reply(0, name, client), step.reply.schema, spec.facts)[0])
        for client in clients
    ]
    model = spec.new_model()
    load(model, mean_weights(replies, "records"))
    known = layers(model, spec.shape)
    posteriors = [method.posteriors(one, known) for one in replies]
    return model, known, [list(layer) for layer in zip(*posteriors, strict=True)], task.test


def measured(folder: Path, steps: int) -> dict[str, Any]:
    """Accuracies of the three solutions, and the shares of Z that they leave, layer by layer."""
    model, known, posteriors, test = read(folder)
    found: dict[str, Any] = {"run": "/".join(folder.parts[-2:]), "layers": []}
    forms: dict[str, dict[str, Tensor]] = {"expectation": {}, "descent": {}, "exact": {}}
    for layer, clients in zip(known, posteriors, strict=True):
        start = product_mean(clients, exact=False).mean
        w, before, after = descended(clients, start, steps, PRODUCTS)
        exact = product_mean(clients)
        for form, solution in (("expectation", start), ("descent", w), ("exact", exact.mean)):
            forms[form] |= layer.named(solution)
        distance = float((w - exact.mean).norm() / (start - exact.mean).norm())
        found["layers"].append(
            {"layer": layer.name, "entries": w.numel(), "left before": before, "left after": after}
            | {"left by exact": exact.residual, "distance after to before": distance}
            | {"left after, half the products": descended(clients, start, steps, PRODUCTS // 2)[2]}
            | ({"left after, step by step": step_by_step(clients, start, steps)} if w.numel() <= LITERAL else {})
        )
        print(found["layers"][-1], flush=True)
    for form, weights in forms.items():
        load(model, weights)
        found[form] = evaluate(model, test)
    print({form: found[form] for form in forms}, flush=True)
    return found


def main() -> None:
    """Measure the runs, one after another; the file has those that are done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--to", default="benchmarks/results/fedlpa-descent.json")
    args = parser.parse_args()
    if args.quick:
        folder = Path(args.to).with_suffix("")
        local = {"lr": 0.05, "epochs": 2}
        fedstill.run("fedlpa", data="digits", model="lenet:padding=2", clients=3, workers=0, local=local, out=folder)
        args.runs, args.steps = [folder], 100
    elif not args.runs:
        parser.error("there are 0 runs; name the folders of some, as of benchmarks/posteriors.sh")
    table: list[dict[str, Any]] = []
    for folder in args.runs:
        table.append(measured(folder, args.steps))
        record.keep(args.to, table, steps=args.steps)


if __name__ == "__main__":
    main()
