"""FAFI's accuracy in eval mode, and with the statistics of test batches, as its authors' code evaluates.

The authors' code (zenghui9977/FAFI_ICML25, 26cf90e) keeps the clients' networks in a Python list, so the ensemble's
``model.eval()`` does not reach them, and its accuracy is computed with the batch norms' statistics of the shuffled test
batches of 256. Here are the six runs of `benchmarks/one_upload.sh` in both modes: one number for each run in eval mode,
the mean of five shuffles with the statistics of the batches.

Usage: python benchmarks/batch_statistics.py [OUT]    (half a minute of a core)
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record
import torch
from torch import nn

import fedstill
from fedstill.base.records import Records
from fedstill.evaluation import evaluate
from fedstill.experiment.task import share_out

SETTING: dict[str, Any] = {
    "data": "digits",
    "partition": "dirichlet-capped:0.3",
    "clients": 5,
    "model": "convnet:width=16,depth=2,norm=batch",
    "workers": 0,
    "local": {"lr": 0.05, "epochs": 10, "batch_size": 128},
    "views": {"scale": (0.2, 1.0), "flip": 0.0},
}
"""Of benchmarks/one_upload.sh."""
SEEDS = (0, 1, 2)
SHUFFLES, BATCH = 5, 256


def with_batches(network: nn.Module, test: Records) -> float:
    """Accuracy with each test batch's own statistics, the mean over shuffles."""
    right = []
    network.train()
    for shuffle in range(SHUFFLES):
        order = torch.randperm(len(test), generator=torch.Generator().manual_seed(shuffle))
        with torch.no_grad():
            hits = [(network(test[part].inputs()).argmax(1) == test.labels[part]).sum() for part in order.split(BATCH)]
        right.append(int(torch.stack(hits).sum()) / len(test))
    return sum(right) / SHUFFLES


def main() -> None:
    """Run the six, and evaluate each in both modes."""
    table = []
    for fusion in ("records", "informative"):
        for seed in SEEDS:
            with TemporaryDirectory() as folder:
                run = fedstill.run("fafi", out=Path(folder) / "run", seed=seed, fusion=fusion, **SETTING)
                network = fedstill.load_model(run.folder).network
                fields = {name: SETTING[name] for name in ("data", "partition", "clients", "model")}
                test = share_out(fedstill.Experiment(seed=seed, **fields), None).test
            found = evaluate(network, test)
            assert found == run.accuracy, "the records are those of the run"
            table.append({"fusion": fusion, "seed": seed, "eval": found, "batches": with_batches(network, test)})
            print(table[-1], flush=True)
    place = sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/batch-statistics.json"
    record.keep(place, table, setting=SETTING, shuffles=SHUFFLES, batch=BATCH)


if __name__ == "__main__":
    main()
