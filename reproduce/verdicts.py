"""What the seeds of the stored runs carry of the papers' claims: a table of docs/papers.md, by the rule of the board.

    python reproduce/verdicts.py            # write the table into docs/papers.md

A claim says that one method is above another, or above each of several, on one task. Its p value is that of
``benchmarks/board/decided.py``; Holm's procedure goes over the claims of each paper, so that all that is called apart
there errs with a chance of 5 % at most.
"""

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks" / "board"))

import decided  # noqa: E402

RUNS = ROOT / "reproduce" / "results"
PAGE = ROOT / "docs" / "papers.md"
BEGIN, END = "<!-- seeds: written by reproduce/verdicts.py -->", "<!-- seeds end -->"
LOOKED = 3
EXTENDED = (
    "one-class-mnist.json",
    "one-class-fashion_mnist.json",
    "two-classes-fashion_mnist.json",
    "dirichlet-fashion_mnist.json",
    "four-in-one-mnist.json",
    "fedkadp-mnist-shards-2-clip-5.json",
    "fedkadp-mnist-shards-2-clip-2.json",
    "fedkadp-fedavg-same-schedule.json",
    "fedauxfdp-cifar10-0.01-one-extractor.json",
)
"""Files whose runs were looked at with `LOOKED` seeds, and got more afterwards: their p values count twice."""
INFINITE = 10**12
"""Test records of a value that no test records were drawn for, or that each seed draws its own for."""


@dataclass(frozen=True)
class Summary:
    """The mean, the standard deviation and the number of seeds, where a file has no more."""

    mean: float
    spread: float
    seeds: int


Values = Mapping[int, float] | Summary


@dataclass(frozen=True)
class Claim:
    """A claim: the first is above each of the others.

    Attributes:
        paper: whose claim.
        words: the task and the two sides.
        first: its accuracies from 0 to 1, by seed; or a loss, negative.
        others: those of each other method.
        source: file below the root.
        records: test records on which all of them are evaluated.
    """

    paper: str
    words: str
    first: Values
    others: Sequence[Values]
    source: str
    records: int = decided.TEST_RECORDS


def stored(file: str, label: str, *, last: int = 1, name: str = "accuracy", part: slice = slice(None)) -> Values:
    """The values of a label in a file of `collect.py`: of the last evaluation, or the mean of the last few."""
    runs = [run for run in json.loads((RUNS / file).read_text())["runs"] if run["label"] == label][part]
    if last > 1:
        return {run["seed"]: mean([one for one in run["accuracies"] if one is not None][-last:]) for run in runs}
    return {run["seed"]: run["last"][name] if name != "accuracy" else run["accuracy"] for run in runs}


def with_more(file: str, label: str) -> Values:
    """The values of a label in a file, and in that of further seeds, ``NAME-more.json``, if there is one."""
    more = file.replace(".json", "-more.json")
    return both(stored(file, label), stored(more, label)) if (RUNS / more).exists() else stored(file, label)


def both(one: Values, two: Values) -> Values:
    """The seeds of two files."""
    assert not isinstance(one, Summary) and not isinstance(two, Summary)
    return {**one, **two}


def from_pareto(data: str, label: str) -> Summary:
    """The row of a label in benchmarks/results/pareto-DATA.csv."""
    with (ROOT / "benchmarks" / "results" / f"pareto-{data}.csv").open(newline="") as lines:
        row = next(row for row in csv.DictReader(lines) if row["method"] == label)
    return Summary(float(row["accuracy"]), float(row["accuracy_spread"]), int(row["seeds"]))


def in_percent(*values: float) -> Values:
    """The values of seeds 0, 1, 2 of a page's table, in percent: a test looks for them there."""
    return {seed: value / 100 for seed, value in enumerate(values)}


def losses(images: str, name: str) -> Values:
    """Minus the matching losses with ten images of a class, of figure 11."""
    table: list[dict[str, Any]] = json.loads((RUNS / "fedgm-figure-11.json").read_text())["table"]
    return {row["seed"]: -row[name] for row in table if row["ipc"] == 10 and row["real images"] == images}


def claims() -> list[Claim]:
    """All claims that stored runs with more than one seed speak to."""
    found = []
    averaging = ("fedavg", "fedprox", "fednova", "scaffold")
    for file, name in (
        ("one-class-mnist.json", "MNIST, #C=1"),
        ("one-class-fashion_mnist.json", "Fashion-MNIST, #C=1"),
        ("two-classes-mnist.json", "MNIST, #C=2"),
        ("two-classes-fashion_mnist.json", "Fashion-MNIST, #C=2"),
        ("dirichlet-fashion_mnist.json", "Fashion-MNIST, Dir(0.5)"),
    ):
        fedgm = with_more(file, "fedgm")
        for rounds, words in ((1, "one round"), (20, "20 rounds")):
            others = [with_more(file, f"{method}-{rounds}") for method in averaging]
            claim = f"{name}: FedGM above all averaging after {words}"
            found.append(Claim("FedGM", claim, fedgm, others, place(file)))
        found.append(Claim("FedGM", f"{name}: FedGM above REAL", fedgm, [with_more(file, "real")], place(file)))
    for data, name in (("mnist", "MNIST"), ("fashion_mnist", "Fashion-MNIST"), ("cifar10", "CIFAR-10")):
        pareto = f"benchmarks/results/pareto-{data}.csv"
        one, most = from_pareto(data, "fedgm-50"), from_pareto(data, "fedavg-20")
        if data == "cifar10":
            words = f"{name}, #C=1: FedGM with 50 images above FedAvg after 20 rounds"
            found.append(Claim("FedGM", words, one, [most], pareto))
        words = f"{name}, #C=1: FedGM with one image (four in one) above FedAvg after one round"
        sides, source = (from_pareto(data, "fedgm-1"), from_pareto(data, "fedavg-1")), pareto
        if data == "mnist":
            file = "four-in-one-mnist.json"  # the runs of that table again, and two more seeds
            sides, source = (stored(file, "fedgm-1"), stored(file, "fedavg-1")), place(file)
        found.append(Claim("FedGM", words, sides[0], sides[1:], source))
    found += by_heterogeneity() + of_label_privacy()
    words = "figure 11: a smaller matching loss with representatives, ten images"
    name = "mean of the last 100"
    sides = [losses(images, name) for images in ("representatives", "random")]
    found.append(Claim("FedGM", words, sides[0], sides[1:], place("fedgm-figure-11.json"), INFINITE))
    return found + of_fedkadp() + of_fedrd() + of_fedauxfdp() + of_dense()


def of_board(data: str, label: str, split: str, clients: int = 10) -> Values:
    """The accuracies of a row of the board, by seed; the row's label has to be that of the method as published."""
    place = ROOT / "benchmarks" / "board" / "results" / f"{data}.jsonl"
    rows = [json.loads(line) for line in place.read_text().splitlines()]
    cell = {"label": label, "split": split, "clients": clients}
    return {row["seed"]: row["accuracy"] for row in rows if cell.items() <= row.items()}


def by_heterogeneity() -> list[Claim]:
    """FedGM and FedAvg with the board's records of Fashion-MNIST, where its FedGM is the published one."""
    board, data = "benchmarks/board/results/fashion_mnist.jsonl", "fashion_mnist"
    same, one = of_board(data, "fedgm", "iid"), of_board(data, "fedgm", "classes:1")
    many = "fedgm-iid-fashion_mnist.json"
    setting = "Fashion-MNIST, 4,000 records, ten clients"
    return [
        Claim("FedGM", f"{setting}: FedGM better under IID than with one class a client", same, [one], board),
        Claim(
            "FedGM", f"{setting}, IID: FedAvg after 50 rounds above FedGM", stored(many, "fedavg"), [same], place(many)
        ),
    ]


def of_label_privacy() -> list[Claim]:
    """Figures 8 to 10: Algorithm 4 beside averaging in rounds whose noise protects each record."""
    labels, averaging = "fedgm-labels-published-mnist.json", "fedgm-labels-averaging-mnist.json"
    return [
        Claim(
            "FedGM",
            f"MNIST, IID, epsilon {epsilon}: Algorithm 4 above DP-FL (100 noisy steps, each record protected)",
            stored(labels, f"published-eps{epsilon}"),
            [stored(averaging, f"dp-fl-eps{epsilon}")],
            place(averaging),
        )
        for epsilon in (1, 5, 10)
    ]


def of_fedkadp() -> list[Claim]:
    """Two blocks a client at clipping length 5, and the shares of clients."""
    five, two = "fedkadp-mnist-shards-2-clip-5.json", "fedkadp-mnist-shards-2-clip-2.json"
    setting = "MNIST, two blocks a client, clipping length 5"
    found = []
    for last, words in ((1, "last round"), (5, "mean of the last five evaluations")):
        fedkadp = stored(five, "fedkadp", last=last)
        sides = [stored(five, "dp-fl", last=last)], [stored(two, "dp-fl", last=last)]
        found.append(Claim("FedKADP", f"{setting}: FedKADP above DP-FL, {words}", fedkadp, sides[0], place(five)))
        words = f"{setting}: FedKADP above DP-FL at its best length (2), {words}"
        found.append(Claim("FedKADP", words, fedkadp, sides[1], place(two)))
    files = {5: five, **{sigma: f"fedkadp-mnist-{sigma}-shards-2-clip-5.json" for sigma in (10, 15)}}
    for last, words in ((1, "last round"), (5, "mean of the last five evaluations")):
        for less, more in ((5, 10), (10, 15)):
            one, other = (stored(files[sigma], "fedkadp", last=last) for sigma in (less, more))
            claim = f"{setting}: FedKADP better at sigma {less} than at {more}, {words}"
            found.append(Claim("FedKADP", claim, one, [other], place(files[more])))
    many, few = (stored(f"fedkadp-mnist-5-{share}.json", "fedkadp", last=5) for share in ("0.1", "0.01"))
    words = "MNIST, one block: FedKADP better with .1 of the clients than with .01, mean of the last five"
    found.append(Claim("FedKADP", words, many, [few], place("fedkadp-mnist-5-0.1.json")))
    return [*found, of_memberships()]


def of_memberships() -> Claim:
    """Table 2's question on one schedule: how well an attack tells members, as one minus the area under its curve."""
    file = "fedkadp-fedavg-same-schedule.json"
    runs = json.loads((RUNS / file).read_text())["runs"]
    kept = {
        label: {r["seed"]: 1 - r["membership"][0]["online"]["auc"] for r in runs if r["label"] == label}
        for label in ("fedkadp", "fedavg")
    }
    words = "Fashion-MNIST, one schedule: a smaller AUC of LiRA against FedKADP than against FedAvg"
    return Claim("FedKADP", words, kept["fedkadp"], [kept["fedavg"]], place(file), 350)


def of_fedrd() -> list[Claim]:
    """The tables of its page: each seed has test records of its own clients."""
    page = "docs/methods/fedrd.md"
    fashion = {"FedRD": (92.9, 92.6, 94.6), "FedDM": (78.9, 81.0, 82.6), "averaging": (46.6, 40.5, 48.2)}
    fashion |= {"FedRep": (94.6, 94.0, 94.8), "fine-tuned FedAvg": (88.5, 90.0, 88.5)}
    cifar = {"FedRD": (77.0, 69.6, 71.6), "FedDM": (36.6, 35.7, 38.6), "averaging": (20.2, 14.0, 17.5)}
    cifar |= {"FedRep": (79.2, 69.5, 70.7), "fine-tuned FedAvg": (77.4, 65.8, 63.6)}
    found = []
    for name, rows in (("Fashion-MNIST", fashion), ("CIFAR-10", cifar)):
        fedrd = in_percent(*rows["FedRD"])
        found += [
            Claim("FedRD", f"{name}: FedRD above {other}", fedrd, [in_percent(*rows[other])], page, INFINITE)
            for other in ("FedDM", "fine-tuned FedAvg", "FedRep")
        ]
    file, averaging = "fedrd-cifar10-50000-first-round.json", "fedrd-cifar10-50000-averaging.json"
    first = {label: stored(file, label) for label in ("fedrd", "fedavg-ft", "fedrep")}
    others = {"FedAvg after five": stored(averaging, "fedavg"), "fine-tuned FedAvg": first["fedavg-ft"]}
    others["FedRep"] = first["fedrep"]
    return found + [
        Claim(
            "FedRD",
            f"CIFAR-10, 50,000 records, one round: FedRD above {name}",
            first["fedrd"],
            [other],
            place(file),
            INFINITE,
        )
        for name, other in others.items()
    ]


def of_fedauxfdp() -> list[Claim]:
    """Sound heads at three alphas and between two, and the published ones with the penalty of the paper's text."""
    names = ("fedauxfdp", "fedavg-p", "fedd-p")
    few, many = "fedauxfdp-cifar10-0.01-one-extractor.json", "fedauxfdp-cifar10-10.24.json"
    found = []
    for alpha, file in {"01": few, "04": "fedauxfdp-cifar10-0.04.json", "16": "fedauxfdp-cifar10-0.16.json"}.items():
        own, *baselines = (stored(file, label) for label in names)
        words = f"CIFAR-10, alpha .{alpha}, sound heads: FedAUXfdp above FedAVG+P and FedD+P"
        found.append(Claim("FedAUXfdp", words, own, baselines, place(file)))
    zero, others = "fedauxfdp-cifar10-0.01.json", "fedauxfdp-cifar10-0.01-seeds-1-2.json"
    # the third run of FedAUXfdp in the first file is that of the table's budget; of the baselines there is one each
    parts = {"fedauxfdp": slice(2, 3), "fedavg-p": slice(1), "fedd-p": slice(1)}
    own, *baselines = (
        both(stored(zero, f"paper-{name}", part=parts[name]), stored(others, f"paper-{name}")) for name in names
    )
    words = "CIFAR-10, alpha .01, published heads, lambda times n: FedAUXfdp above FedAVG+P and FedD+P"
    found.append(Claim("FedAUXfdp", words, own, baselines, place(others)))
    words = "CIFAR-10, sound heads: FedAUXfdp better at alpha .01 than at 10.24"
    own, at_most = stored(few, "fedauxfdp"), stored(many, "fedauxfdp")
    own = {seed: value for seed, value in own.items() if seed in at_most}
    return [*found, Claim("FedAUXfdp", words, own, [at_most], place(few))]


def of_dense() -> list[Claim]:
    """The authors' clients: ten seeds of MNIST .1, and the number of local epochs at .3."""
    ten, epochs = "dense-authors-mnist-0.1.json", "dense-local-epochs-mnist-0.3.json"
    dense = stored(ten, "dense")
    others = {name: stored(ten, name) for name in ("feddf", "fed-adi", "fed-dafl")}
    others["one-shot FedAvg"] = stored(ten, "dense", name="average")
    names = {"feddf": "FedDF", "fed-adi": "Fed-ADI", "fed-dafl": "Fed-DAFL"}
    setting = "MNIST .1, the authors' clients, logits"
    found = [
        Claim("DENSE", f"{setting}: DENSE above {names.get(name, name)}", dense, [values], place(ten))
        for name, values in others.items()
    ]
    for name, words in (("ensemble", "ensemble better"), ("average", "FedAvg worse")):
        sign = 1 if name == "ensemble" else -1
        many, few = (
            {seed: sign * value + (sign < 0) for seed, value in stored(epochs, "dense", name=name, part=part).items()}
            for part in (slice(0, 3), slice(6, 9))  # 100 and 5 epochs
        )
        words = f"MNIST .3, the authors' clients: {words} with 100 local epochs than with 5"
        found.append(Claim("DENSE", words, many, [few], place(epochs)))
    return found


def looks(claim: Claim, seeds: int) -> int:
    """How often the runs of a claim were looked at: whoever adds seeds until they are apart has that many chances."""
    return 2 if Path(claim.source).name in EXTENDED and seeds > LOOKED else 1


def place(file: str) -> str:
    """The file's place in the repository."""
    return f"reproduce/results/{file}"


def test(claim: Claim) -> decided.Difference:
    """The difference to the other that is the least apart."""
    found = [compare(claim.first, other, claim.records) for other in claim.others]
    return max(found, key=lambda one: one.p if one.mean > 0 else 2 - one.p)


def compare(first: Values, second: Values, records: int) -> decided.Difference:
    """The difference of two methods; of summaries without their seeds, as if their seeds were independent."""
    if isinstance(first, Summary) and isinstance(second, Summary):
        size = first.mean - second.mean
        of_seeds = first.spread**2 / first.seeds + second.spread**2 / second.seeds
        of_tests = (decided.variance(first.mean) + decided.variance(second.mean)) / records
        least = min(first.seeds, second.seeds)  # fewer degrees of freedom than Welch's: not too sure
        return decided.Difference(
            size, math.sqrt(of_seeds * least), least, decided.p_value(size, of_seeds, least - 1, of_tests)
        )
    assert not isinstance(first, Summary) and not isinstance(second, Summary)
    return decided.difference(first, second, records)


def table() -> str:
    """The table of all claims in Markdown."""
    every = claims()
    found = [test(claim) for claim in every]
    after = [math.nan] * len(every)
    for paper in dict.fromkeys(claim.paper for claim in every):
        own = [i for i, claim in enumerate(every) if claim.paper == paper]
        counted = [min(1.0, found[i].p * looks(every[i], found[i].seeds)) if found[i].mean > 0 else 1.0 for i in own]
        for i, value in zip(own, decided.holm(counted), strict=True):
            after[i] = value
    lines = ["| paper | claim, [runs](../reproduce/results) | seeds | difference | p | after Holm | |"]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    for claim, one, value in zip(every, found, after, strict=True):
        is_apart = value <= decided.LEVEL
        sign = 1 if "figure 11" in claim.words else 100
        amounts = f"{sign * one.mean:.1f} ± {sign * one.spread:.1f}"
        verdict = "**apart**" if is_apart else "not apart"
        words = f"{claim.words} ([from](../{claim.source}))".replace("../docs/", "")
        p = f"{one.p:.2g}" + (" x 2" if looks(claim, one.seeds) > 1 else "")
        lines.append(f"| {claim.paper} | {words} | {one.seeds} | {amounts} | {p} | {value:.2g} | {verdict} |")
    apart = sum(value <= decided.LEVEL for value in after)
    return f"{apart} of {len(every)} are apart.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Put the table between its two marks."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
