"""Write CIFAR-10 with the clients that zj-jayzhang/DENSE's README prints for its seed 1: a file for ``by:client``.

python reproduce/gpu/authors_split.py OUT.npz

The loop is that of its ``helpers/datasets.py`` (capped Dirichlet, beta 0.5, five clients, NumPy's old generator).
"""

import os
import sys
from pathlib import Path

import numpy as np

from fedstill.data import load

PRINTED = """0: 156 709 301 2629 20 651 915 113 180 2133
1: 1771 2695 1251 1407 665 314 1419 3469 0 0
2: 236 15 1715 76 1304 34 1773 75 3289 2360
3: 2809 575 157 853 2555 2557 203 1213 0 0
4: 28 1006 1576 35 456 1444 690 130 1531 507"""


def authors_clients(labels: np.ndarray, beta: float = 0.5, clients: int = 5, seed: int = 1) -> np.ndarray:
    """Client of every record, ``(n,)``."""
    rng = np.random.RandomState(seed)  # the stream that is repeated
    parts: list[list[int]] = [[]]
    while min(map(len, parts)) < 10:
        parts = [[] for _ in range(clients)]
        for label in range(10):
            index = np.where(labels == label)[0]
            rng.shuffle(index)
            shares = rng.dirichlet(np.repeat(beta, clients))
            shares = np.array([p * (len(part) < len(labels) / clients) for p, part in zip(shares, parts, strict=True)])
            cuts = (np.cumsum(shares / shares.sum()) * len(index)).astype(int)[:-1]
            parts = [part + more.tolist() for part, more in zip(parts, np.split(index, cuts), strict=True)]
    owner = np.empty(len(labels), np.int64)
    for client, part in enumerate(parts):
        owner[part] = client
    return owner


def main(out: Path) -> None:
    """Write the file, unless it is there."""
    if out.exists():
        return
    data = load("cifar10")
    labels = data.train.labels.numpy()
    owner = authors_clients(labels)
    counts = "\n".join(f"{k}: " + " ".join(str(np.sum(labels[owner == k] == c)) for c in range(10)) for k in range(5))
    if counts != PRINTED:
        raise SystemExit(f"these are not the clients that the README prints:\n{counts}")
    splits = {"train": data.train, "test": data.test}
    arrays = {f"x_{name}": split.images.numpy().transpose(0, 2, 3, 1) for name, split in splits.items()}
    arrays |= {f"y_{name}": split.labels.numpy() for name, split in splits.items()}
    part = out.with_name(f".{os.getpid()}-{out.name}")
    np.savez(part, **arrays, client=owner)
    part.rename(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
