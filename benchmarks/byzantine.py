"""Accuracy of FedAvg and of its robust rules while some clients are hostile.

Digits, ten clients, of which the first two are hostile, twenty rounds; the mean and the sample standard deviation over
three seeds. ``away``: a hostile client sends the server's model minus five times its own change. ``noise``: the
server's model plus Gaussian noise ten times as long as its change. ``labels``: it trains on 9 minus each label.
``little``: the mean of the honest models minus 1.5 of their standard deviations in each entry, which is near enough to
be taken for honest (Baruch, Baruch, Goldberg 2019, arXiv:1902.06156); its authors know all honest models.

Usage: python benchmarks/byzantine.py            # --quick: one split, two attacks, two rules
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import record
import torch
from torch import nn
from typing_extensions import override

from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.methods.averaging import mean_weights
from fedstill.methods.fedavg import Update
from fedstill.methods.parts.robust import aggregate
from fedstill.protocol import Client, Federation, Method, Records, State, load, parameters, state, step
from fedstill.train.sgd import SGD

HOSTILE = 2
ATTACKS = ("none", "away", "noise", "labels", "little")
RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")
SPLITS = ("iid", "dirichlet:0.5")
SEEDS = (0, 1, 2)


class Attacked(Method):
    """FedAvg by a rule, with hostile clients."""

    rule: str = "mean"
    """``mean``, or a rule of `fedstill.methods.parts.robust`."""
    attack: str = "none"
    """What the hostile clients do."""

    @override
    def server(self, fed: Federation) -> nn.Module:
        model = fed.new_model()
        for round in fed.rounds(20, model):
            replies = list(fed.ask(self.update, weights=state(model)))
            if self.attack == "little":
                replies[:HOSTILE] = [_near(replies[HOSTILE:])] * HOSTILE
            rule: Any = self.rule
            new = (
                mean_weights(replies, "uniform")
                if rule == "mean"
                else aggregate(rule, replies, HOSTILE, parameters(model).keys())
            )
            load(model, new)
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def update(self, client: Client, weights: State) -> Update:
        """Train from the server's model, or attack."""
        attack = self.attack if client.id < HOSTILE else "none"
        train: Records = client.train
        if attack == "labels":
            train = Records(train.images, 9 - train.labels, train.num_classes, train.normalisation)
        model = client.new_model(weights)
        SGD(lr=0.05, batch_size=32).fit(model, train, client.rng("batches"))
        new = state(model)
        if attack == "away":
            new = {name: weights[name] - 5 * (value - weights[name]) for name, value in new.items()}
        if attack == "noise":
            rng = client.rng("noise")
            new = {
                name: weights[name]
                + 10 * (value - weights[name]).norm() / value.numel() ** 0.5 * torch.randn(value.shape, generator=rng)
                for name, value in new.items()
            }
        return Update(weights=new, num_records=len(train))


def _near(honest: list[Update]) -> Update:
    """The mean of models minus 1.5 standard deviations."""
    new = {}
    for name, value in honest[0].weights.items():
        rows = torch.stack([reply.weights[name].double() for reply in honest])
        new[name] = (rows.mean(0) - 1.5 * rows.std(0)).to(value.dtype)
    return Update(weights=new, num_records=honest[0].num_records)


def main() -> None:
    """Run all, and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one split, two attacks, two rules")
    few = parser.parse_args().quick
    rows = []
    start = time.monotonic()
    for split in SPLITS[:1] if few else SPLITS:
        for attack in ATTACKS[:2] if few else ATTACKS:
            for rule in RULES[:2] if few else RULES:
                found = []
                for seed in SEEDS:
                    task = Experiment(
                        data="digits",
                        partition=split,
                        clients=10,
                        model="convnet:width=32,depth=2",
                        seed=seed,
                        workers=0,
                        evaluate_every=20,
                    )
                    with tempfile.TemporaryDirectory() as folder:
                        done = run(Job(task, Attacked(rule=rule, attack=attack), Path(folder) / "run"))
                    found.append(100 * float(done["accuracy"]))
                mean, spread = statistics.mean(found), statistics.stdev(found)
                rows.append({"split": split, "attack": attack, "rule": rule, "mean": mean, "spread": spread})
                print(f"{split:14} {attack:7} {rule:17} {mean:5.1f} +- {spread:.1f}", flush=True)
    record.keep(record.at("benchmarks/results/byzantine.json", few), rows, seconds=round(time.monotonic() - start))


if __name__ == "__main__":
    main()
