"""docs/board.md and its pictures, from the compact rows alone."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import plan
from scipy.stats import t

from fedstill.report import pareto
from fedstill.report.guarantees import round_up
from fedstill.report.record import human_bytes

Row = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs"
GROUPS = {
    "no guarantee": lambda row: row.get("epsilon") is None,
    "epsilon 4 per record": lambda row: row.get("unit") == "record" and row["epsilon"] > 2,
    "epsilon 1 per record": lambda row: row.get("unit") == "record" and row["epsilon"] <= 2,
    "epsilon per label or client": lambda row: row.get("epsilon") is not None and row.get("unit") != "record",
}
SHORT = {"classes:1": "one class", "dirichlet:0.1": "Dir(.1)", "dirichlet:0.5": "Dir(.5)", "iid": "IID"}
NAMES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
Place = tuple[str, str, int]
"""Data set, split and number of clients."""


def of(rows: Sequence[Row], place: Place, label: str | None = None) -> list[Row]:
    """The rows of a place, of one label or of all, that have not failed."""
    found = [row for row in rows if (row["data"], row["split"], row["clients"]) == place]
    return [row for row in found if "failed" not in row and label in (None, row["label"])]


def places() -> list[Place]:
    return [(data, split, clients) for clients in plan.CLIENTS for data in plan.DATA for split in plan.SPLITS]


def accuracy(rows: Sequence[Row]) -> str:
    """The mean over seeds in percent, with the standard deviation if there are two; a dash without a run."""
    values = [100 * row["accuracy"] for row in rows]
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def comparable(rows: Sequence[Row], place: Place, group: str | None = None) -> list[Row]:
    """The rows of a place, of one group or of all, whose seeds all its methods have: others are not compared."""
    there = [row for row in of(rows, place) if group is None or GROUPS[group](row)]
    seeds = dict[str, set[int]]()
    for row in there:
        seeds.setdefault(row["label"], set()).add(row["seed"])
    common = set.intersection(*seeds.values()) if seeds else set[int]()
    return [row for row in there if row["seed"] in common]


def picture(rows: Sequence[Row], place: Place) -> pareto.Picture | None:
    """The fronts of a place over the seeds that all its methods have; None with less than two of them."""
    points, there = [], comparable(rows, place)
    for label in dict.fromkeys(row["label"] for row in there):
        own = of(there, place, label)
        values = [row["accuracy"] for row in own]
        holds = own[0].get("unit") == "record"
        points.append(
            pareto.Point(
                name=label,
                method=plan.methods()[label]["method"],
                accuracy=mean(values),
                spread=stdev(values) if len(values) > 1 else None,
                up=mean(row["up"] for row in own),
                epsilon=max(row["epsilon"] for row in own) if holds else math.inf,
                seconds=mean(row["client_seconds"] for row in own),
                seeds=len(own),
            )
        )
    points.sort(key=lambda point: -point.accuracy)
    data, split, clients = place
    if len(points) < 2:
        return None
    words = f"{NAMES[data]}, {split}, {clients} clients, {plan.RECORDS:,} records, {seeds_in_words(there)}"
    return pareto.Picture(words, points)


def seeds_in_words(rows: Sequence[Row]) -> str:
    numbers = sorted({row["seed"] for row in rows})
    return f"seed {numbers[0]}" if len(numbers) == 1 else f"seeds {', '.join(map(str, numbers))}"


def lead(rows: Sequence[Row], place: Place, group: str) -> str:
    """The most accurate method of a group over the seeds that all of it have, and whether its lead is decided.

    It is if every row of the board has its runs there, with all seeds, and a two-sided t test of the differences seed
    by seed (seeds give the same splits to all) finds the margin at a level of 5 %.
    """
    there = [row for row in rows if (row["data"], row["split"], row["clients"]) == place]  # failed ones too
    seeds = {label: {row["seed"] for row in there if row["label"] == label} for label in plan.methods()}
    compared = comparable(rows, place, group)
    by_label = {
        label: {row["seed"]: 100 * row["accuracy"] for row in of(compared, place, label)}
        for label in sorted({row["label"] for row in compared})  # equal ones by name
    }
    ranked = sorted(by_label, key=lambda label: -mean(by_label[label].values()))
    if not ranked:
        return "–"
    first = by_label[ranked[0]]
    if len(ranked) == 1:
        return f"{ranked[0]} {mean(first.values()):.1f}"
    both = [accuracy - by_label[ranked[1]][seed] for seed, accuracy in first.items()]
    complete = all(found == {*plan.SEEDS} for found in seeds.values())
    decided = complete and len(both) == len(plan.SEEDS) and is_apart(both)
    words = f"{ranked[0]} {mean(first.values()):.1f}, {mean(both):.1f} before {ranked[1]}"
    if decided:
        return f"**{words}**"
    number, some = sum(map(bool, seeds.values())), seeds_in_words(compared)
    missing = [some] * (len(first) < len(plan.SEEDS)) + [f"{number} of {len(seeds)} methods"] * (number < len(seeds))
    return words + (f" ({'; '.join(missing)})" if missing else "")


def is_apart(differences: Sequence[float]) -> bool:
    """Whether paired differences have a positive mean by a two-sided t test at a level of 5 %."""
    error = stdev(differences) / math.sqrt(len(differences))
    return mean(differences) > float(t.ppf(0.975, len(differences) - 1)) * error


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown: words on the left, numbers on the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "".join("| " + " | ".join(line) + " |\n" for line in (headings, rule, *lines))


def accuracies(rows: Sequence[Row], data: str, clients: int) -> str:
    """The table of a data set and a number of clients; methods with a guarantee below those without."""
    own = [row for row in rows if (row["data"], row["clients"]) == (data, clients)]
    headings = ["method", *(SHORT[split] for split in plan.SPLITS), "up/client", "down/client", "epsilon"]
    headings += ["client, s", "server, s", *(["TPR one class, %", "TPR IID, %"] if clients == 10 else [])]
    lines = []
    for belongs in GROUPS.values():
        labels = [label for label in plan.methods() if any(row["label"] == label and belongs(row) for row in own)]
        shown = []
        for label in labels:
            mine = [row for row in own if row["label"] == label and "failed" not in row]
            if not mine:
                continue
            epsilon = f"{round_up(mine[0]['epsilon'])} per {mine[0]['unit']}" if "epsilon" in mine[0] else "none"
            words = [label, *(accuracy(of(own, (data, split, clients), label)) for split in plan.SPLITS)]
            words += [span(mine, way) for way in ("up", "down")] + [epsilon]
            words += [f"{mean(row[side] for row in mine):.2g}" for side in ("client_seconds", "server_seconds")]
            if clients == 10:
                words += [leaked(of(own, (data, split, 10), label)) for split in plan.ATTACKED]
            shown.append((mean(row["accuracy"] for row in mine), words))
        lines += [words for _, words in sorted(shown, key=lambda pair: -pair[0])]
    return table(headings, lines) if lines else "No row yet.\n"


def span(rows: Sequence[Row], way: str) -> str:
    """The bytes of one way: the least and the most of the splits, each the mean over its seeds."""
    splits = dict[str, list[float]]()
    for row in rows:
        splits.setdefault(row["split"], []).append(row[way])
    amounts = [mean(amount) for amount in splits.values()]
    return " to ".join(dict.fromkeys([human_bytes(min(amounts)), human_bytes(max(amounts))]))


def leaked(rows: Sequence[Row]) -> str:
    """The true positive rate of the attack at 1 % false positives, with its interval."""
    found = [row["attack"] for row in rows if "attack" in row]
    if not found:
        return "–"
    return f"{100 * found[0]['tpr']:.1f} ({100 * found[0]['low']:.1f} to {100 * found[0]['high']:.1f})"


def text(rows: Sequence[Row], tries: Sequence[Row], spent: float, left: float, jobs: tuple[int, int]) -> str:
    """The page.

    Args:
        rows: the rows of runs.
        tries: the rows of tries.
        spent: hours of one core in these.
        left: hours of one core that are missing, estimated.
        jobs: the number of jobs that are done, and of all.
    """
    failed = [row for row in rows if "failed" in row]
    dates = sorted({row["date"] for row in [*rows, *tries]})
    asked = [(place, group, lead(rows, place, group)) for place in places() for group in list(GROUPS)[:3]]
    # methods that do not depend on the split have one answer for all
    decided = {(data, clients, group, words) for (data, _, clients), group, words in asked if words != "–"}
    parts = [
        HEAD.format(
            methods=len(plan.methods()),
            records=plan.RECORDS,
            done=jobs[0],
            all=jobs[1],
            spent=spent,
            left=left,
            hours=(spent + left) / 2,
            runs=len(rows),
            cells=len({(row["data"], row["split"], row["clients"], row["seed"]) for row in rows}),
            of=len(plan.DATA) * len(plan.SPLITS) * len(plan.CLIENTS) * len(plan.SEEDS),
            dates=" to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "no date",
            leads=sum(words.startswith("**") for *_, words in decided),
            questions=len(decided),
            tries=plan.TRIES,
            tuned=plan.tuning("").split,
        ),
        "## Who leads\n\n" + LEADS + "\n",
    ]
    leads = [
        [in_words(place), *(lead(rows, place, g) for g in list(GROUPS)[:3])] for place in places() if of(rows, place)
    ]
    parts.append(table(["task", *list(GROUPS)[:3]], leads))
    drawn = pictures(rows)
    for clients in plan.CLIENTS:
        parts.append(f"\n## {clients} clients\n")
        for data in plan.DATA:
            parts.append(f"\n### {NAMES[data]}, {clients} clients\n\n{accuracies(rows, data, clients)}")
            for place in ((data, split, clients) for split in plan.SPLITS):
                if picture_name(place) in drawn:
                    parts.append(f"\n![Accuracy against bytes up, {in_words(place)}](images/{picture_name(place)})\n")
    parts.append("\n## Failed\n\n")
    reasons = {(row["label"], row["data"], row["split"], row["clients"], row["failed"]) for row in failed}
    lines = [[label, in_words((d, s, c)), why.replace("|", "/")] for label, d, s, c, why in sorted(reasons)]
    parts.append(table(["method", "task", "reason"], lines) if lines else "No run has failed.\n")
    parts.append("\n## The tries\n\n" + CHOSEN)
    parts.append(table(["method", *(NAMES[data] for data in plan.DATA)], chosen(tries)))
    parts.append("\n" + COMMANDS.format(example=example(rows)))
    return "".join(parts)


def chosen(tries: Sequence[Row]) -> list[list[str]]:
    """For each row the number of its best try on each data set, with the validation accuracies of all."""
    lines = []
    for label in plan.methods():
        cells = []
        for data in plan.DATA:
            own = sorted((t for t in tries if (t["label"], t["data"]) == (label, data)), key=lambda t: t["number"])
            values = ["failed" if t["accuracy"] is None else f"{100 * t['accuracy']:.1f}" for t in own]
            best = max(range(len(own)), key=lambda i: own[i]["accuracy"] or 0.0) if own else 0
            cells.append(", ".join(f"**{value}**" if i == best else value for i, value in enumerate(values)) or "–")
        lines.append([label, *cells])
    return lines


def example(rows: Sequence[Row]) -> str:
    """The command of a row, with its digest."""
    row = next((row for row in rows if "digest" in row), None)
    return f"# digest {row['digest']}\n{shlex.join(shlex.split(row['command']))}" if row else "fedstill methods"


def in_words(place: Place) -> str:
    data, split, clients = place
    return f"{NAMES[data]}, {SHORT[split]}, {clients} clients"


def picture_name(place: Place) -> str:
    """The file of a place's figure."""
    data, split, clients = place
    return f"board-{data}-{split.replace(':', '-')}-{clients}-bytes.svg"


def pictures(rows: Sequence[Row]) -> dict[str, str]:
    """Accuracy against bytes up by file name, of the two skewed splits where at least two methods are there."""
    found = {}
    for place in places():
        drawn = picture(rows, place) if place[1] in plan.SPLITS[:2] else None
        if drawn is not None:
            found |= {picture_name(place): svg for cost, svg in pareto.cost_figures(drawn).items() if cost == "bytes"}
    return found


HEAD = """# The board

Every one-shot method on the same tasks, by one script: {methods} rows (ours, others', private ones at epsilon 1 and 4)
on MNIST, Fashion-MNIST and CIFAR-10, four splits, 10 and 100 clients, three seeds.

* **Scale**: {records:,} training records in all, drawn by the seed and dealt to the clients, and the whole test set; a
  ConvNet-3 with 16 filters, or fixed features (distances to 128 centroids of patches of synthetic images). Little work
  at the clients and at the server: all of it was planned for twelve hours on two cores, and by its cost so far takes
  {hours:.0f}. The order of methods at this scale need not be their order at their papers' scale.
* **State**: {done} of {all} jobs are done (tries, attacks, and {runs} runs in {cells} of {of} cells, one for each data
  set, split, number of clients and seed), {dates}. They took {spent:.1f} hours of one core; about {left:.1f} are left.
  A dash is a cell that has not been run, a number without ± is one seed, one with ± the mean and the standard deviation
  of the seeds.
* **Decided**: {leads} of {questions} answers to "which method is the most accurate here", in the next table; an answer
  that a method gives alike on several splits counts once. The others lack methods or seeds, or a margin that a t test
  over the seeds finds at a level of 5 %.
* **Tuning**: {tries} tries for each row and data set, on validation records of {tuned} with ten clients and another
  seed; [methods.json](../benchmarks/board/methods.json) has them all. Tries of private methods cost no epsilon here; in
  earnest they would.

"""
LEADS = """\
The most accurate method, its mean accuracy over the seeds that all methods of the column have and its lead over the
second. **Bold**: decided, that is all methods with three seeds, and a margin that a two-sided t test over the seeds
finds at a level of 5 %. Plain: undecided.
"""
CHOSEN = """\
Validation accuracy of each row's tries in the order of [methods.json](../benchmarks/board/methods.json); bold is the
one that its runs have.

"""
COMMANDS = """## How it is made

Seconds are those of the processor on a busy machine, one thread: of one client, and of the server with the evaluation
on 10,000 test records; until 2026-11-24 also with that of every model that was uploaded. TPR: RMIA with two reference
runs (`fedstill attack`), true positives at 1 % false positives and their 95 % interval, on the client with the most
records, seed 0. The attacker sees the final model only: "real" sends records in clear, whatever its TPR. All attacks of
before 2026-11-25 were withdrawn: their scores were tied where models are not confident. Bytes are the least and the
most of the splits, seconds the mean over them; a figure has those of its own split. "fens" asks its clients again for a
small aggregator after their one upload, "fedgm-labels" asks twice for images. Left out: methods with a model for each
client (FedRD with records, FedCGS's personal form), since their accuracies are not those of one model;
DENSE with its authors' constants; FAFI and FedSD2C, whose clients train for as long as a whole row
here.

A row is a run folder; [results](../benchmarks/board/results) has its numbers, command, commit of the source, date and
digest of the final weights. Its command repeats it, to the bit on the same kind of processor with one thread
(`OMP_NUM_THREADS=1`). On another kind and with a later commit, 105 rows of 2026-11-23 to 25 were repeated: 37 had the
same digest, 56 of the others an accuracy within .1 points, 60 within .5; the most that rounding moved was 4.2 points
(fedgm-records-eps1), 2.7 (fedgm-labels-eps1) and 1.4 (dense). For example

```sh
{example}
```

```sh
python benchmarks/board left                # what is missing, and its hours
python benchmarks/board run                 # go on, the most valuable cells first; stop it at any moment
python benchmarks/board take                # copy finished rows into benchmarks/board/results
python benchmarks/board page                # this page and its pictures
python benchmarks/board add LABEL METHOD FLAGS TRY TRY TRY      # a new row, and all its runs
python benchmarks/board remove LABEL        # a row and its results
```
"""
