"""docs/board_features.md, from the results alone."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "board_features.md"
Row = dict[str, Any]
Content = dict[str, dict[str, tuple[str, str, list[str]]]]
SPLITS = {"classes:1": "one class", "dirichlet:0.1": "Dir(.1)", "iid": "IID"}
CLIENTS = (10, 100)
WAYS = ("", ", epsilon 4", ", epsilon 1", ", epsilon 4, masked", ", epsilon 1, masked")
"""Ends of the labels of sums, in the order of the columns."""


def cell(rows: Iterable[Row]) -> str:
    """Mean and sample standard deviation over seeds in percent; one seed has no deviation, none is a dash."""
    rows = list(rows)
    values = [100 * row["accuracy"] for row in rows if row["accuracy"] is not None]
    if not values:
        return "refused" if rows else "-"
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def size(rows: Iterable[Row], name: str = "up") -> str:
    """Bytes of a client, from the least to the most."""
    found = [row[name] for row in rows if row.get(name) is not None]
    words = list(dict.fromkeys(human(value) for value in (min(found), max(found)))) if found else ["-"]
    return " to ".join(words)


def human(count: float) -> str:
    """A number of bytes with three digits."""
    power = min(3, int(math.log10(max(count, 1)) / 3))
    value = count / 1000**power
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {('B', 'kB', 'MB', 'GB')[power]}"


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, whose first column has words."""
    every = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)


def sums(runs: list[Row], content: Content, clients: int) -> str:
    """The table of the methods of one sum."""
    names = [label for label in content["sums"] if "," not in label]
    lines = []
    for name in names:
        own = [[r for r in runs if r["label"] == name + way and r["clients"] == clients] for way in WAYS]
        lines.append([name, *map(cell, own), size(own[0]), size(own[2])])
    return table(
        ["method", "no noise", "epsilon 4", "epsilon 1", "4, masked", "1, masked", "up, no noise", "up, epsilon 1"],
        lines,
    )


def others(runs: list[Row], content: Content, clients: int, splits: dict[str, str] = SPLITS) -> str:
    """The table of all other methods."""
    lines = []
    for label in content["others"]:
        own = [row for row in runs if row["label"] == label and row["clients"] == clients]
        cells = [cell(row for row in own if row["split"] == split) for split in splits]
        seconds = statistics.mean(row["client_seconds"] for row in own) if own else math.nan
        lines.append([label, *cells, size(own), f"{seconds:.2g}" if own else "-"])
    return table(["method", *splits.values(), "up/client", "client, s"], lines)


def hundred(runs: list[Row], content: Content) -> str:
    """The part on CIFAR-100, of the rows that have runs."""
    labels = {row["label"] for row in runs}
    if not runs:
        return ""
    some = {kind: {label: row for label, row in of.items() if label in labels} for kind, of in content.items()}
    return f"""## A hundred classes

CIFAR-100 in the same way: ten clients with ten classes each that no other has, 20,000 training images (the first of
50,000) and all 10,000 test images. The public images are 5,000 of CIFAR-10. Settings are those that were chosen for
CIFAR-10; nothing was chosen on CIFAR-100. The best constant has 1.0.

{sums(runs, some, 10)}

{others(runs, some, 10, {"classes:10": "ten classes each"})}
"""


def settings(tries: list[Row], content: Content) -> str:
    """The table of the tries, and of the one that was taken."""
    lines = []
    for label, (method, flags, alternatives) in (row for kind in content.values() for row in kind.items()):
        own = sorted((row for row in tries if row["label"] == label), key=lambda row: row["number"])
        if not own:
            continue
        best = max(own, key=lambda row: row["accuracy"] or 0.0)["number"]
        shown = [
            f"{mark}`{alternatives[row['number']]}` {cell([row])}{mark}"
            for row in own
            for mark in ["**" * (row["number"] == best)]
        ]
        lines.append([f"{label}: `{method} {flags}`", *shown])
    return table(["row", "first try", "second", "third"], lines)


def one(runs: list[Row], label: str, split: str = "classes:1", clients: int = 10) -> str:
    """A cell in the text."""
    return cell(row for row in runs if (row["label"], row["split"], row["clients"]) == (label, split, clients))


def leader(runs: list[Row], labels: Iterable[str], clients: int = 10) -> str:
    """The label with the highest mean on one class at a client."""
    means = {}
    for label in labels:
        own = [
            row["accuracy"]
            for row in runs
            if (row["label"], row["split"], row["clients"]) == (label, "classes:1", clients) and row["accuracy"]
        ]
        if own:
            means[label] = statistics.mean(own)
    return max(means, key=lambda label: means[label])


def best_try(tries: list[Row], label: str) -> str:
    """The accuracy of a row's best try, in percent."""
    return f"{max(100 * (row['accuracy'] or 0) for row in tries if row['label'] == label):.1f}"


def leaders(runs: list[Row], content: Content) -> str:
    """Lines on the most accurate sum of each column, one class at each client."""
    names = [label for label in content["sums"] if "," not in label]
    lines = []
    for clients in CLIENTS:
        for way in WAYS:
            labels = [name + way for name in names]
            if not any(row["label"] in labels and row["clients"] == clients for row in runs):
                continue
            first = leader(runs, labels, clients)
            shown = one(runs, first, clients=clients)
            lines.append(
                f"* {clients} clients, {way.removeprefix(', ') or 'no noise'}: `{first.split(',')[0]}` {shown}"
            )
    return "\n".join(lines)


def heads(runs: list[Row]) -> str:
    """A line on private heads as a sum, of a hundred clients with all classes."""
    where = ("iid", 100)
    labels = ("fedavg-p, epsilon 1", "fedavg-p, epsilon 1, masked")
    opened, masked = (one(runs, label, *where) for label in labels)
    own = [row for row in runs if (row["label"], row["split"], row["clients"]) == (labels[1], *where)]
    return (
        f"* **Where clients have all classes**, the mean of private heads ([FedAVG+P](methods/fedavg-p.md)) is a small "
        f"sum:\n  with masked sums a hundred of them have {masked} at epsilon 1 in {size(own)}, and {opened} with open "
        "ones."
    )


def page(every: list[Row], tries: list[Row], content: Content, planned: int, texts: str) -> str:
    """The page, in Markdown; ``texts`` is its part on texts."""
    runs, of_hundred = ([r for r in every if r.get("data", "cifar10") == name] for name in ("cifar10", "cifar100"))
    shown = "\n\n".join(
        f"{words}:\n\n{of(runs, content, clients)}"
        for of in (sums, others)
        for clients, words in ((10, "Ten clients"), (100, "A hundred clients"))
        if any(row["clients"] == clients and row["label"] in content[of.__name__] for row in runs)
    )
    dates = sorted({row["date"] for row in every})
    return f"""# With pretrained features

Photographs at several clients, a public pretrained network, one upload: CIFAR-10 as the 1,280 numbers of
EfficientNet-Lite0 (`--features efficientnet-lite0 --size 224`,
[features.md](features.md#weights-that-pip-installs)); [CIFAR-100](#a-hundred-classes) and [texts](#texts) follow.
All 50,000 training images are the clients'; accuracies are of the 10,000 test images, in percent. [The board](board.md)
has methods without pretraining: there the best of one upload has 50 on a smaller task.

**The most accurate sums**, one class at each client, one upload:

{leaders(runs, content)}

* **Start with a sum**: [AFL](methods/afl.md), [FedCGS](methods/fedcgs.md) or [GH-OFL](methods/gh-ofl.md). The model is
  the same for any split, and with [masked sums](sums.md) the noise of any number of clients is added once.
{heads(runs)}
* **The size of the pictures counts more than the method**: without noise AFL has {best_try(tries, "afl")} on validation
  images of 128 pixels (below), and {one(runs, "afl")} on test images of 224.
* **State**: {len(every)} of {planned} runs are done, the last on {dates[-1]}. A dash is a
  cell that has not been run; a number without ± is one seed, one with ± mean and standard deviation of the seeds.

## Test images

One class at each client (`classes:1`), Dir(.1) or IID; epsilon is per record, at a delta of 1e-5. Masked: the server
sees the total alone. Sums are run on one class at each client.

{shown}

FedProto has no row: each of its clients has a model of its own, and one linear layer has no prototypes but the vectors.

{hundred(of_hundred, content)}
{texts}
## Features

* **Data**: CIFAR-10 is complete. Of CIFAR-100, the first 5,000 training images, without labels, are the public images
  of CIFAR-10; those of CIFAR-100 are the first 5,000 of CIFAR-10.
* **Minutes**: at 224 pixels, 90,000 images (CIFAR-10 and 30,000 of CIFAR-100) took 22.7 minutes of one core, enlarging
  and files included: 66 images a core second, 15 core minutes for CIFAR-10
  ([numbers](../benchmarks/feature_board/results/features.json)). At 128 pixels it is 410 a core second from
  pixels to vectors ([numbers](../benchmarks/results/backbones.json)). They are computed once; the cache has them.

## Settings

Three tries for each row, on a tenth of the training images that no client has, with ten clients, Dir(.1), another seed
and images of 128 pixels; the best, in bold, is run on the test images of 224. Which directions and ridges were worth a
try came from a dozen earlier runs on validation images. Tries of private methods cost no epsilon here; in earnest they
would.

{settings(tries, content)}

## Again

```sh
pip install 'fedstill[backbones]'
python benchmarks/feature_board run --folder runs/feature-board    # goes on where it was stopped
python benchmarks/feature_board page
```

One of its runs, in the folder with the public images (`cifar100-5000.npz`, which the first command writes):

```sh
{runs[0]["command"]}
```

Each line of [runs.jsonl](../benchmarks/feature_board/results/runs.jsonl) and
[tries.jsonl](../benchmarks/feature_board/results/tries.jsonl) has its command, commit, date, bytes, seconds of the
processor and a digest of the model. Those of a commit with `+changes` were run beside a new file in `src` that was not
part of that commit and that nothing imported.
"""
