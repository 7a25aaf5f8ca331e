"""docs/board.md and its pictures, from the compact rows alone."""

import math
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import decided
import plan

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
ANSWERED = list(GROUPS)[:3]
"""The groups whose most accurate method is asked for."""
CLASSES = {
    "mnist": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    "fashion_mnist": (1000,),
    "cifar10": (1000,),
}
"""Test records of each class: the accuracy, in records of 10,000, of a model that predicts this class always."""
SHORT = {"classes:1": "one class", "dirichlet:0.1": "Dir(.1)", "dirichlet:0.5": "Dir(.5)", "iid": "IID"}
NAMES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
Place = tuple[str, str, int]
"""Data set, split and number of clients."""


def of(rows: Sequence[Row], place: Place, label: str | None = None) -> list[Row]:
    """The rows of a place, of one label or of all, that are results: others failed, or predict one class."""
    found = [row for row in rows if in_place(row, place)]
    return [row for row in found if "failed" not in row and not is_constant(row) and label in (None, row["label"])]


def is_constant(row: Row) -> bool:
    """Whether a run's model predicts one class: it says so, or its accuracy is exactly the share of a class.

    Runs of before 2026-11-28 did not say it.
    """
    if (number := row.get("predicted_classes")) is not None:
        return bool(number == 1)
    return row["accuracy"] is not None and round(row["accuracy"] * 10000) in CLASSES[row["data"]]


def places() -> list[Place]:
    return [(data, split, clients) for clients in plan.CLIENTS for data in plan.DATA for split in plan.SPLITS]


def accuracy(rows: Sequence[Row], place: Place, label: str) -> str:
    """The mean over seeds in percent, with the standard deviation if there are two; a dash without a run."""
    there = [row for row in rows if in_place(row, place) and row["label"] == label]
    values = [100 * row["accuracy"] for row in of(there, place)]
    constant = sum(map(is_constant, there))
    if not values:
        return "one class" if constant else "–"
    words = f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
    return words + (f" (one class in {constant} of {len(there)})" if constant else "")


def comparable(rows: Sequence[Row], place: Place, group: str | None = None) -> list[Row]:
    """The rows of a place, of one group or of all, without methods that failed there with a seed."""
    there = [row for row in rows if in_place(row, place)]
    failed = {row["label"] for row in there if "failed" in row or is_constant(row)}
    return [row for row in there if row["label"] not in failed and (group is None or GROUPS[group](row))]


def in_place(row: Row, place: Place) -> bool:
    return (row["data"], row["split"], row["clients"]) == place


def on_common_seeds(rows: Sequence[Row]) -> list[Row]:
    """The rows whose seeds all their methods have: others are not drawn."""
    seeds = dict[str, set[int]]()
    for row in rows:
        seeds.setdefault(row["label"], set()).add(row["seed"])
    common = set.intersection(*seeds.values()) if seeds else set[int]()
    return [row for row in rows if row["seed"] in common]


def name_of(row: Row) -> str:
    """The row's name: its label, or that of the variant which its best try is."""
    return str(row.get("name", row["label"]))


def with_names(rows: Sequence[Row], tries: Sequence[Row]) -> list[Row]:
    """The rows with the names of what their commands run."""
    names = dict[tuple[str, str], str]()
    for label in plan.methods():
        for data in plan.DATA:
            if sum((one["label"], one["data"]) == (label, data) for one in tries) == plan.TRIES:
                names[label, data] = plan.name(label, plan.best(label, data, tries))
    return [{**row, "name": names.get((row["label"], row["data"]), row["label"])} for row in rows]


def picture(rows: Sequence[Row], place: Place) -> pareto.Picture | None:
    """The fronts of a place over the seeds that all its methods have; None with less than two of them."""
    points, there = [], on_common_seeds(comparable(rows, place))
    for label in dict.fromkeys(row["label"] for row in there):
        own = of(there, place, label)
        values = [row["accuracy"] for row in own]
        holds = own[0].get("unit") == "record"
        points.append(
            pareto.Point(
                name=name_of(own[0]),
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


class Asked(NamedTuple):
    """The question which method of a group is the most accurate at a place.

    Attributes:
        found: the answer; None without a run.
        missing: what the board lacks there, in words; nothing if every row has its runs, failed ones too.
    """

    place: Place
    group: str
    found: decided.Answer | None
    missing: str = ""


def asked(rows: Sequence[Row]) -> list[Asked]:
    """All questions of the board with their answers."""
    questions = []
    for place in places():
        there = [row for row in rows if in_place(row, place)]  # failed ones too
        planned = [label for label in plan.methods() if plan.seeds(label, *place[1:])]
        seeds = {label: {row["seed"] for row in there if row["label"] == label} for label in planned}
        number = sum(map(bool, seeds.values()))
        short = any(found and not {*plan.SEEDS} <= found for found in seeds.values())
        for group in ANSWERED:
            compared = on_common_seeds(comparable(there, place, group))
            words = [seeds_in_words(compared)] * (short and bool(compared))
            words += [f"{number} of {len(seeds)} methods"] * (number < len(seeds))
            by_method = dict[str, dict[int, float]]()
            for row in comparable(there, place, group):
                by_method.setdefault(name_of(row), {})[row["seed"]] = row["accuracy"]
            found = decided.answer(by_method) if compared else None
            questions.append(Asked(place, group, found, "; ".join(words)))
    return questions


def decisions(questions: Sequence[Asked]) -> tuple[set[tuple[Place, str]], int, int]:
    """The questions that are decided, and the number of distinct decided answers and of distinct answers."""
    complete = [one for one in questions if one.found and not one.missing]
    flags, number, of_all = decided.decide([one.found for one in complete if one.found])
    return {(one.place, one.group) for one, flag in zip(complete, flags, strict=True) if flag}, number, of_all


def lead(question: Asked, is_decided: bool) -> str:
    """An answer in words: the leader, its lead over the second, and how many are not apart from it."""
    found = question.found
    if found is None:
        return "–"
    words = f"{found.leader} {100 * found.accuracy:.1f}"
    if found.lead is not None:
        words += f", {100 * found.lead.mean:.1f} before {found.second}"
        others = len(found.not_apart)
        words = f"**{words}**" if is_decided else f"{words}; {others} not apart" if others else words
    return words + (f" ({question.missing})" if question.missing else "")


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown: words on the left, numbers on the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "".join("| " + " | ".join(line) + " |\n" for line in (headings, rule, *lines))


def accuracies(rows: Sequence[Row], data: str, clients: int) -> str:
    """The table of a data set and a number of clients; methods with a guarantee below those without."""
    own = [row for row in rows if (row["data"], row["clients"]) == (data, clients)]
    headings = ["method", *(SHORT[split] for split in plan.SPLITS), "up/client", "down/client", "epsilon"]
    headings += ["client, s", "server, s", "steps, %", *(["TPR one class, %", "TPR IID, %"] if clients == 10 else [])]
    lines = []
    for belongs in GROUPS.values():
        labels = [label for label in plan.methods() if any(row["label"] == label and belongs(row) for row in own)]
        shown = []
        for label in labels:
            mine = [row for row in own if row["label"] == label and "failed" not in row]
            results = [row["accuracy"] for row in mine if not is_constant(row)]
            if not mine:
                continue
            epsilon = f"{round_up(mine[0]['epsilon'])} per {mine[0]['unit']}" if "epsilon" in mine[0] else "none"
            words = [name_of(mine[0]), *(accuracy(own, (data, split, clients), label) for split in plan.SPLITS)]
            words += [span(mine, way) for way in ("up", "down")] + [epsilon]
            words += [f"{mean(row[side] for row in mine):.2g}" for side in ("client_seconds", "server_seconds")]
            words.append(plan.share_of_steps(label, clients))
            if clients == 10:
                words += [leaked(of(own, (data, split, 10), label)) for split in plan.ATTACKED]
            shown.append((mean(results) if results else 0.0, words))
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


def text(
    rows: Sequence[Row],
    tries: Sequence[Row],
    spent: float,
    left: float,
    jobs: tuple[int, int],
    drawn: Collection[str],
) -> str:
    """The page.

    Args:
        rows: the rows of runs.
        tries: the rows of tries.
        spent: hours of one core in these.
        left: hours of one core that are missing, estimated.
        jobs: the number of jobs that are done, and of all.
        drawn: the files of its pictures.
    """
    rows = with_names(rows, tries)
    failed = [row for row in rows if "failed" in row]
    dates = sorted({row["date"] for row in [*rows, *tries]})
    questions = asked(rows)
    settled, number, of_all = decisions(questions)
    parts = [
        HEAD.format(
            verdict="Little is decided" if 4 * number < of_all else "Decided",
            methods=len(plan.methods()),
            records=plan.RECORDS,
            done=jobs[0],
            all=jobs[1],
            spent=spent,
            left=left,
            hours=(spent + left) / 2,
            runs=len(rows),
            cells=len({(row["data"], row["split"], row["clients"], row["seed"]) for row in rows}),
            dates=" to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "no date",
            leads=number,
            questions=of_all,
            constant=sum(map(is_constant, rows)),
            tries=plan.TRIES,
            tuned=plan.tuning("").split,
        ),
        "## Who leads\n\n" + LEADS + "\n",
    ]
    leads = []
    for place in places():
        if of(rows, place):
            own = [one for one in questions if one.place == place]
            leads.append([in_words(place), *(lead(one, (place, one.group) in settled) for one in own)])
    parts.append(table(["task", *ANSWERED], leads))
    for clients in plan.CLIENTS:
        parts.append(f"\n## {clients} clients\n")
        for data in plan.DATA:
            parts.append(f"\n### {NAMES[data]}, {clients} clients\n\n{accuracies(rows, data, clients)}")
            for place in ((data, split, clients) for split in plan.SPLITS):
                if picture_name(place) in drawn:
                    parts.append(f"\n![Accuracy against bytes up, {in_words(place)}](images/{picture_name(place)})\n")
    parts.append("\n## Variants\n\n" + VARIANTS + "\n" + table(["row", *NAMES.values()], variants(rows)))
    parts.append("\n## Failed\n\n")
    reasons = {(name_of(row), row["data"], row["split"], row["clients"], row["failed"]) for row in failed}
    constant = Counter((name_of(r), r["data"], r["split"], r["clients"]) for r in rows if is_constant(r))
    reasons |= {(*one, f"predicts one class, with {number} of its seeds") for one, number in constant.items()}
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


def variants(rows: Sequence[Row]) -> list[list[str]]:
    """For each row that is a variant somewhere, its name on each data set."""
    found = {(row["label"], row["data"]): name_of(row) for row in rows}
    lines = [[label, *(found.get((label, data), "–") for data in plan.DATA)] for label in plan.methods()]
    return [line for line in lines if {*line[1:]} - {line[0], "–"}]


def example(rows: Sequence[Row]) -> str:
    """The command of a row, with its digest."""
    row = next((row for row in rows if "digest" in row and row["label"] == "fedcgs"), None)
    return f"# digest {row['digest']}\n{shlex.join(shlex.split(row['command']))}" if row else "fedstill methods"


def in_words(place: Place) -> str:
    data, split, clients = place
    return f"{NAMES[data]}, {SHORT[split]}, {clients} clients"


def picture_name(place: Place) -> str:
    """The file of a place's figure."""
    data, split, clients = place
    return f"board-{data}-{split.replace(':', '-')}-{clients}-bytes.svg"


def pictures(rows: Sequence[Row], tries: Sequence[Row]) -> dict[str, str]:
    """Accuracy against bytes up by file name, of the two skewed splits where at least two methods are there."""
    found, rows = {}, with_names(rows, tries)
    for place in places():
        drawn = picture(rows, place) if place[1] in plan.SPLITS[:2] else None
        if drawn is not None:
            found |= {picture_name(place): svg for svg in pareto.cost_figures(drawn, ["bytes"]).values()}
    return found


HEAD = """# The board

Every one-shot method on the same tasks, by one script: {methods} rows (ours, others', private ones at epsilon 1 and 4)
on MNIST, Fashion-MNIST and CIFAR-10, four splits, 10 and 100 clients, three to ten seeds.

* **{verdict}**: {leads} of {questions} distinct answers to "which method is the most accurate here". A leader has to be
  apart from every other method of its column, seeds and test records counted, and all answers together may err with a
  chance of 5 % (Holm). Three seeds show differences of many points at most; "not apart" in the next table says how many
  other methods may be as good.
* **Scale**: {records:,} training records in all, drawn by the seed and dealt to the clients, and the whole test set; a
  ConvNet-3 with 16 filters, or fixed features (distances to 128 centroids of patches of synthetic images). Little work
  at the clients and at the server: all of it was planned for twelve hours on two cores, and by its cost so far takes
  {hours:.0f}. The order of methods at this scale need not be their order at their papers' scale: methods with a
  generator take 1 or 2 % of their authors' steps here (column "steps"), and with a tenth of them
  [gain 17 and 31 points](#how-it-is-made).
* **Variants have names of their own**: the best of a row's tries is a [variant](#variants) that its paper does not have
  in several rows, which then bear another name, as `dense-p`.
* **State**: {done} of {all} jobs are done (tries, attacks, and {runs} runs in {cells} cells, one for each data set,
  split, number of clients and seed), {dates}. They took {spent:.1f} hours of one core; about {left:.1f} are left. A
  dash is a cell that has not been run, a number without ± is one seed, one with ± the mean and the standard deviation
  of the seeds. {constant} runs have a model that predicts one class; these are no results, and a method with such a run
  is not compared there.
* **Tuning**: {tries} tries for each row and data set, on validation records of {tuned} with ten clients and another
  seed; [methods.json](../benchmarks/board/methods.json) has them all. Tries of private methods cost no epsilon here; in
  earnest they would.

"""
LEADS = """\
The most accurate method, its mean accuracy over the seeds that all methods of the column have, its lead over the
second, and how many methods of the column are not apart from it (each tested alone at 5 %, on the seeds that both
have). **Bold**: decided by [the rule](../benchmarks/board/decided.py), which [papers.md](papers.md) has too. For every
other method, the squared mean difference seed by seed has to be above `t^2 a + z^2 b`: `a` is its squared standard
error over the seeds, `b` its variance over the 10,000 test records, as if errors were independent. The leader's p value
is the largest of these. Answers whose leader and nearest rival have the same accuracies on several splits or numbers of
clients, as sums have by construction, are one answer, and Holm's procedure goes over the distinct ones.
"""
VARIANTS = """\
Names of the rows whose best try is a variant that the paper does not have. No published form of these has runs here on
these data sets: its validation accuracy stands among [the tries](#the-tries).

* `fedgm-4`: four images in the bytes of one (IDC's form).
* `real-representatives`: k-means representatives in place of random records.
* `-p`: the mean of the clients' probabilities in place of that of their logits; `-p-in` besides has networks with
  instance norms, which have no stored statistics to match, where the method matches them.
* All methods with a generator start their student from the mean of the clients' models, which no paper does. DENSE's
  clients train their batch norms in train mode ([the authors' freeze after one epoch](methods/dense.md)).
* FedD3 has ten images a client, FedGM, FedDM and REAL ten a class and client: 8 kB against up to 79.
* FedCOF came last: its private rows try widths that had been the best on MNIST's validation records before, 32 to 256,
  where those of AFL and FedCGS are 16 to 128, as chosen for the first board.
"""
CHOSEN = """\
Validation accuracy of each row's tries in the order of [methods.json](../benchmarks/board/methods.json); bold is the
one that its runs have.

"""
COMMANDS = """## How it is made

"Steps" is the share of the authors' steps of the generator, of the pixels or of the matching, in percent. On MNIST,
Dir(.1), ten clients, seed 0, with the settings of the rows but 20 epochs of 30 steps of 128 images and all images kept
(a tenth of the authors' 200 epochs), Co-Boosting's student has 70.9 in place of 40.0, and DENSE's 67.6 in place of 50.6
([runs](../benchmarks/results/board-steps.json)).

Seconds are those of the processor on a busy machine, one thread: of one client, and of the server with the evaluation
on 10,000 test records; until 2026-11-24 also with that of every model that was uploaded. TPR: RMIA with two reference
runs (`fedstill attack`), true positives at 1 % false positives and their 95 % interval, on the client with the most
records, seed 0. The attacker sees the final model only: "real" sends records in clear, whatever its TPR. All attacks of
before 2026-11-25 were withdrawn: their scores were tied where models are not confident. Bytes are the least and the
most of the splits, seconds the mean over them; a figure has those of its own split. "fens" asks its clients again for a
small aggregator after their one upload, "fedgm-labels" asks twice for images, "deepafl" for a sum for each of its
blocks. Records of "sim-pe" elect among the rows' public images, which are generated textures, a poor pool; [its
page](methods/sim-pe.md) has one of real pictures. Left
out: methods with a model for each client (FedRD with records, FedCGS's personal form), since their accuracies
are not those of one model; DENSE with its authors' constants; FAFI and FedSD2C, whose clients train for as long as a
whole row here.

A row is a run folder; [results](../benchmarks/board/results) has its numbers, command, commit of the source, date and
digest of the final weights. Its command repeats it, to the bit on the same kind of processor with one thread
(`OMP_NUM_THREADS=1`). On another kind last bits differ, and with them the digest. For example

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
