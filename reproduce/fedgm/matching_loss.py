"""FedGM's figure 11: the matching loss of a client with representative and with random real images.

python reproduce/fedgm/matching_loss.py --to reproduce/results/fedgm-figure-11.json

Client 0 of ten with IID records of Fashion-MNIST, the paper's steps (100 at each network, representatives chosen anew
every 10, 128 real images, no augmentation), but fewer and narrower networks. Two losses: the one that is minimised, in
which the real images are the chosen ones, and at the end the distance between the gradient of all records of a class
and that of its synthetic images, at networks that no fit has seen.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedstill.base.records import Records
from fedstill.base.seeds import derive, isolated, stream
from fedstill.data.partition import split
from fedstill.data.sources import load_data
from fedstill.distill.gradient_matching import match
from fedstill.distill.synthesis import GradientMatching, synthesise
from fedstill.models import build

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from record import keep

WIDTH = 32
CLIENTS = 10
UNSEEN = 5
"""Networks of the last comparison."""


def new_net(seed: int, index: int) -> nn.Module:
    """A random network; all fits of a seed use the same."""
    with isolated(derive(seed, "net", index)):
        return build(f"convnet:width={WIDTH}", (1, 28, 28), 10)


def distance(records: Records, images: Records, seed: int) -> float:
    """The matching loss of all records against the images, the mean over unseen networks."""
    labels = sorted(set(records.labels.tolist()))
    real, made = ([part.of_class(c).inputs() for c in labels] for part in (records, images))
    nets = [new_net(seed, 10_000 + i) for i in range(UNSEEN)]
    return sum(float(match(net, real, made, labels)[0]) for net in nets) / len(nets)


def main() -> None:
    """Fit all images and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ipc", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--nets", type=int, default=5)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = load_data("fashion_mnist"), []
    for seed in given.seeds:
        own = split("iid", data.train.labels.numpy(), CLIENTS, rng=np.random.default_rng(seed))[0]
        records = data.train[torch.from_numpy(own)]
        for ipc in given.ipc:
            for chosen in ("representatives", "random"):
                settings = GradientMatching.published(ipc).model_copy(update={"nets": given.nets, "choose": chosen})
                losses: list[float] = []
                rng, begun = stream(seed, "images"), time.time()
                made = synthesise(records, partial(new_net, seed), ipc, settings, rng, on_loss=losses.append)
                row = {"seed": seed, "ipc": ipc, "real images": chosen, "losses": [round(loss, 4) for loss in losses]}
                row |= {"mean of the last 100": round(sum(losses[-100:]) / 100, 4)}
                row |= {"all records": round(distance(records, made, seed), 4), "seconds": round(time.time() - begun)}
                rows.append(row)
                print({key: value for key, value in row.items() if key != "losses"}, flush=True)
    keep(given.to, rows)


if __name__ == "__main__":
    main()
