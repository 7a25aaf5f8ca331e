"""Numbers in the methods' pages are those of the files behind them."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def result(name: str) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["table"]
    return table


def cells(page: str, first: str) -> list[str]:
    """The cells of the row of a page whose first cell is this."""
    lines = (ROOT / "docs" / "methods" / page).read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {first} |")]
    return [cell.replace("*", "").strip() for cell in row.strip("|").split("|")]


def spread(values: list[float], digits: int = 1) -> str:
    return f"{100 * mean(values):.{digits}f} ± {100 * stdev(values):.{digits}f}"


@pytest.mark.parametrize(("words", "fusion"), [("records", "records"), ("informativeness", "informative")])
def test_fafi_in_two_modes(words: str, fusion: str) -> None:
    rows = [row for row in result("batch-statistics.json") if row["fusion"] == fusion]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    row = cells("fafi.md", f"FAFI, by {words}")
    for at, mode in ((1, "eval"), (3, "batches")):
        values = [one[mode] for one in rows]
        assert row[at] == spread(values)
        assert row[at + 1] == ", ".join(f"{100 * value:.1f}" for value in values)


def runs_of(name: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["runs"]
    return runs


def reproduced(name: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((ROOT / "reproduce" / "results" / name).read_text())["runs"]
    return runs


def test_fedcof_beside_fedcgs() -> None:
    names = {"cgs": "FedCGS, {}", "cof": "FedCOF, {}", "cof-20": "FedCOF, {}, 20 means"}
    names = {key: words.format("no epsilon") for key, words in names.items()}
    names |= {f"{key}-eps{e}": f"Fed{key.upper()}, epsilon {e}" for key in ("cgs", "cof") for e in (4, 1)}
    runs = runs_of("fedcof-mnist.json")
    for label, first in names.items():
        row = cells("fedcof.md", first)
        for at, cell in enumerate(("classes-1-10", "dirichlet-0-1-10", "dirichlet-0-1-100"), 1):
            own = [run["accuracy"] for run in runs if run["label"] == f"{label}-{cell}"]
            assert len(own) == 3 and row[at] == spread(own)


def test_the_label_privacy_of_the_paper_s_algorithm() -> None:
    runs = reproduced("fedgm-labels-published-mnist.json")
    row = cells("fedgm-labels.md", "the paper's Algorithm 4 (`--privacy published`)")
    for at, epsilon in enumerate((1, 2, 5, 10), 1):
        own = {run["seed"]: run["accuracy"] for run in runs if run["method"]["epsilon"] == epsilon}
        assert sorted(own) == [0, 1, 2] and row[at] == spread([*own.values()])
        assert epsilon == 2 or row[at] in (ROOT / "docs" / "papers.md").read_text()  # the figures have no 2


def test_averaging_with_noise_beside_label_privacy() -> None:
    runs, tries = (reproduced(f"fedgm-labels-{name}-mnist.json") for name in ("averaging", "averaging-tries"))
    own, beside = cells("dp-fl.md", "accuracy, %"), cells("fedgm-labels.md", DP_FL)
    for at, epsilon in enumerate((1, 2, 5, 10), 1):
        values = [run["accuracy"] for run in runs if run["label"] == f"dp-fl-eps{epsilon}"]
        assert len(values) == 3 and own[at] == beside[at] == spread(values)
    whole = cells("fedgm-labels.md", "LDP-FedAvg, 20 rounds of ten steps")
    for at, epsilon in ((1, 1), (3, 5), (4, 10)):
        values = [run["accuracy"] for run in runs if run["method"].get("epsilon") == epsilon]
        assert len(values) == 3 and whole[at] == spread(values)
    words = ", ".join(f"{100 * run['accuracy']:.1f} at {run['method']['local']['lr']:g}" for run in by_rate(tries))
    assert words.replace(" 0.", " .") in (ROOT / "docs" / "methods" / "dp-fl.md").read_text()
    sound, row = reproduced("fedgm-labels-sound-mnist.json"), cells("fedgm-labels.md", "FedGM with label privacy")
    for at, epsilon in enumerate((1, 2, 5, 10), 1):
        values = [run["accuracy"] for run in sound if run["method"]["epsilon"] == epsilon]
        assert len(values) == 3 and row[at] == spread(values)


DP_FL = "[DP-FL](dp-fl.md#results): ten rounds, noise in each of 100 steps"


def by_rate(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(runs, key=lambda run: float(run["method"]["local"]["lr"]))


def test_real_with_crops_and_soft_labels() -> None:
    rows = {
        "real": "random, classes",
        "client": "random, client's labels",
        "client-crops-4": "crops, client's labels, four in one",
        "server": "random, server's labels",
    }
    runs = runs_of("real-soft-fashion_mnist.json")
    for label, first in rows.items():
        row = cells("real.md", first)
        for at, split in ((1, "classes-1"), (2, "dirichlet-0-1")):
            own = [run["accuracy"] for run in runs if run["label"] == f"{label}-{split}"]
            assert row[at] == (spread(own) if len(own) == 3 else ", ".join(f"{100 * value:.1f}" for value in own))


def test_fens_with_raw_and_standardised_inputs() -> None:
    runs = runs_of("fens-inputs-mnist.json")
    for form, first in (("raw", "raw, as published"), ("standardised", "standardised")):
        row = cells("fens.md", first)
        for at, split in ((1, "classes-1"), (2, "dirichlet-0-1")):
            own = [run["accuracy"] for run in runs if run["label"] == f"{form}-{split}"]
            assert len(own) == 3 and row[at].startswith(spread(own))


def test_fedlpa_beside_the_mean_and_the_ensemble_of_the_same_uploads() -> None:
    runs = runs_of("fedlpa-fashion_mnist.json")
    rows = {
        "FedLPA": ("exact", "accuracy"),
        "FedLPA, mean factors": ("expectation", "accuracy"),
        "FedLPA, lambda .01": ("more", "accuracy"),
        "FedLPA, lambda .0001": ("less", "accuracy"),
        "the mean of the models: FedAvg, 1 round": ("exact", "average"),
        "the mean of their probabilities": ("exact", "ensemble"),
        "the models alone": ("exact", "clients_alone"),
    }
    for first, (label, key) in rows.items():
        row = cells("fedlpa.md", first)
        for at, cell in enumerate(("linear-dirichlet-0-1", "linear-iid", "lenet-dirichlet-0-1", "lenet-iid"), 1):
            own = [run["last"][key] for run in runs if run["label"] == f"{label}-{cell}"]
            assert len(own) == 3 and row[at] == spread(own)


def test_what_the_descent_of_fedlpa_s_code_reaches() -> None:
    runs = result("fedlpa-descent.json")
    for split, name in (("Dir(.1)", "dirichlet-0-1"), ("IID", "iid")):
        own = [run for run in runs if name in run["run"]]
        assert len(own) == 3
        assert cells("fedlpa.md", split)[1:] == [
            spread([run[form] for run in own]) for form in ("expectation", "descent", "exact")
        ]
    page = " ".join((ROOT / "docs" / "methods" / "fedlpa.md").read_text().split())
    later = [layer for run in runs for layer in run["layers"][1:]]
    for words, values in (
        ("% of the way to the solution", [1 - layer["distance after to before"] for layer in later]),
        ("% of the equation's right side.", [layer["left after"] for layer in later]),
    ):
        assert f"{100 * min(values):.1f} to {100 * max(values):.1f} {words}" in page


def test_deepafl_beside_afl() -> None:
    rows = {row["method"]: row for row in result("deepafl-fashion_mnist.json")}
    deep = "deepafl:dims=512,width=512,expanded=512,rounds=6"
    assert len(rows) == 4 and len(rows[deep]["accuracies"]) == 3
    for dims in (512, 1024, 2048):
        (alone,) = rows[f"afl:dims={dims}"]["accuracies"]
        assert cells("deepafl.md", f"AFL, {dims:,} directions")[1:] == [
            size(rows[f"afl:dims={dims}"]["bytes"]),
            "1",
            f"{100 * alone:.2f}",
        ]
    for blocks, values in enumerate(zip(*rows[deep]["depths"], strict=True)):
        _, up, rounds, accuracy = cells("deepafl.md", f"DeepAFL, 512, after {blocks} block{'s' * (blocks != 1)}")
        sent = blocks * upload(1024) + upload(512)
        assert (up, rounds, accuracy) == (size(sent), str(blocks + 1), spread(list(values), digits=2))
    assert rows[deep]["bytes"] == 5 * upload(1024) + upload(512)


def test_deepafl_under_noise() -> None:
    names = ("AFL, epsilon 4", "DeepAFL, epsilon 4, no block", "DeepAFL, epsilon 4, one block of 64")
    rows = result("deepafl-fashion_mnist-eps4.json")
    for first, row in zip(names, rows, strict=True):
        _, up, _, accuracy = cells("deepafl.md", first)
        assert row["epsilon"] == 4 and len(row["accuracies"]) == 3
        assert (up, accuracy) == (size(row["bytes"]), spread(row["accuracies"], digits=2))


def upload(width: int, classes: int = 10) -> int:
    """Bytes of the sums of rows of this width and their constant."""
    return 4 * ((width + 1) * (width + 2) // 2 + classes * (width + 1))


def size(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"


def test_sim_pe_beside_afl() -> None:
    runs = runs_of("sim-pe-mnist.json")
    for method, words in (("pe", "Sim-PE"), ("afl", "AFL")):
        for way, said in (("", "masked sums"), ("-open", "open sums")):
            row = cells("sim-pe.md", f"{words}, {said}")
            assert way == "" or row[1] == "-"
            for at, epsilon in ((1, ""), (2, "-eps4"), (3, "-eps1"))[way != "" :]:
                own = [run["accuracy"] for run in runs if run["label"] == f"{method}{way}{epsilon}"]
                assert len(own) == 3 and row[at] == spread(own)
    textures = [run["accuracy"] for run in runs if run["label"] == "pe-textures"]
    assert len(textures) == 3 and f"{spread(textures)} " in (ROOT / "docs" / "methods" / "sim-pe.md").read_text()


def last_five(run: dict[str, Any]) -> float:
    return mean([one for one in run["accuracies"] if one is not None][-5:])


def test_fedkadp_with_more_noise() -> None:
    papers = (ROOT / "docs" / "papers.md").read_text()
    for sigma, published in (("10", "81.0"), ("15", "77.8")):
        runs = reproduced(f"fedkadp-mnist-{sigma}-shards-2-clip-5.json")
        assert [(run["label"], run["seed"]) for run in runs] == [("fedkadp", seed) for seed in (0, 1, 2)]
        after, means = [run["accuracy"] for run in runs], [last_five(run) for run in runs]
        _, accuracy, rounds, noise, epsilon, claimed, theirs = cells("fedkadp.md", sigma)
        shown = [" / ".join(f"{100 * value:.1f}" for value in values) for values in (after, means)]
        assert accuracy == f"{shown[0]} ({shown[1]})" and theirs == published
        assert rounds == " / ".join(str(run["last"]["round"]) for run in runs)
        assert noise == " / ".join(f"{run['last']['noise']:.2f}" for run in runs)
        assert {f"{run['last']['epsilon']:.2f}" for run in runs} == {epsilon}
        assert abs(mean([run["last"]["claimed"] for run in runs]) - float(claimed)) < 0.01
        assert spread(after) in papers and f"{spread(means)} at {sigma}" in papers


def row_of(label: str) -> str:
    """The first cell of a method's row, with its rounds."""
    names = {"fedgm": "FedGM", "real": "REAL", "fedavg": "FedAvg", "fednova": "FedNova", "scaffold": "SCAFFOLD"}
    method, _, rounds = label.partition("-")
    return {**names, "fedprox": "FedProx (mu 0.1)"}[method] + {"": "", "1": ", 1 round", "20": ", 20 rounds"}[rounds]


def by_label(*files: str) -> dict[str, dict[int, float]]:
    """The accuracies of each label in some files, by seed."""
    found: dict[str, dict[int, float]] = {}
    for run in (run for file in files for run in reproduced(file)):
        found.setdefault(run["label"], {})[run["seed"]] = run["accuracy"]
    return found


def test_fedgm_with_two_classes_a_client() -> None:
    page = (ROOT / "docs" / "methods" / "fedgm.md").read_text().split("### Two classes a client")[1].split("###")[0]
    found = {data: by_label(f"two-classes-{data}.json") for data in ("mnist", "fashion_mnist")}
    fashion = found["fashion_mnist"]
    for label in fashion:
        cells = []
        for some in found.values():
            assert sorted(some[label]) == [0, 1, 2, 3, 4]
            cells.append(spread([*some[label].values()], 2))
        assert f"| {row_of(label)} | {' | '.join(cells)} |" in page
    best = max(mean(fashion[f"{name}-20"].values()) for name in ("fedprox", "scaffold"))
    ours = mean(fashion["fedgm"].values())
    assert f"{100 * (ours - best):.0f} points above SCAFFOLD on" in (ROOT / "docs" / "papers.md").read_text()


def test_fedgm_with_shares_by_a_dirichlet_distribution() -> None:
    page = (ROOT / "docs" / "methods" / "fedgm.md").read_text().split("### Shares by a Dirichlet")[1].split("###")[0]
    found = by_label("dirichlet-fashion_mnist.json")
    assert len(found) == 10 and all(sorted(own) == [0, 1, 2] for own in found.values())
    for label, own in found.items():
        assert f"| {row_of(label)} | {spread([*own.values()], 2)} |" in page
    five = by_label("dirichlet-fashion_mnist.json", "dirichlet-fashion_mnist-more.json")
    assert all(sorted(own) == [0, 1, 2, 3, 4] for own in five.values())
    for label, own in five.items():  # the words on each of five seeds
        assert all((own[seed] > five["fedgm"][seed]) == (label == "real") or label == "fedgm" for seed in own)
    words = " ".join(page.split())
    sides = (spread([*five[label].values()], 2) for label in ("fedgm", "real"))
    assert "over all five FedGM {}, REAL {}, one round 44.5 to 44.7, 20 rounds 80.5 to 82.4.".format(*sides) in words
    means = {label: 100 * mean(own.values()) for label, own in five.items()}
    for rounds, low, high in (("-1", 44.5, 44.7), ("-20", 80.5, 82.4)):
        some = [value for label, value in means.items() if label.endswith(rounds)]
        assert (round(min(some), 1), round(max(some), 1)) == (low, high)
    assert f"{means['real'] - means['fedgm']:.1f} points below REAL" in words
    assert round(means["fedgm"] - max(means[f"{name}-1"] for name in ("fedavg", "scaffold"))) == 40


def test_five_seeds_of_one_class_a_client() -> None:
    page = " ".join((ROOT / "docs" / "methods" / "fedgm.md").read_text().split())
    cells: dict[str, list[str]] = {"fedgm": [], "real": []}
    for data in ("mnist", "fashion_mnist"):
        found = by_label(f"one-class-{data}.json", f"one-class-{data}-more.json")
        assert len(found) == 10 and all(sorted(own) == [0, 1, 2, 3, 4] for own in found.values())
        for label in cells:
            cells[label].append(spread([*found[label].values()], 2))
        assert all(own[seed] < found["fedgm"][seed] for name, own in found.items() if "-20" in name for seed in own)
    assert f"over all five FedGM {' and '.join(cells['fedgm'])}, REAL {' and '.join(cells['real'])}." in page


def test_attacks_on_one_schedule() -> None:
    page, papers = ((ROOT / "docs" / name).read_text() for name in ("attacks.md", "papers.md"))
    runs = reproduced("fedkadp-fedavg-same-schedule.json")
    auc: dict[str, list[float]] = {}
    for label, row in (("fedavg", "FedAvg"), ("fedkadp", "FedKADP, eps 9 per record")):
        own = [run for run in runs if run["label"] == label]
        assert sorted(run["seed"] for run in own) == [0, 1, 2, 3, 4]
        found = [run["membership"][0] for run in sorted(own, key=lambda run: run["seed"])]
        auc[label] = [one["online"]["auc"] for one in found]
        caught = [rate["tpr"] for one in found for rate in one["online"]["rates"] if rate["fpr"] == 0.01]
        guesses = [one["posteriors"]["whole"]["members"] for one in found]
        shares = [auc[label], *([guess[name] for guess in guesses] for name in ("precision", "recall", "f1"))]
        cells = [f"{mean(some):.3f} ± {stdev(some):.3f}".replace("0.", ".") for some in shares]
        line = [spread([run["accuracy"] for run in own], 1), cells[0], spread(caught, 1), *cells[1:]]
        assert f"| {row} | {' | '.join(line)} |" in page
        assert cells[0] in papers
    assert all(kadp < avg for kadp, avg in zip(auc["fedkadp"], auc["fedavg"], strict=True))


def test_fedrd_s_first_round_with_all_records() -> None:
    papers = (ROOT / "docs" / "papers.md").read_text()
    files = {"first-round": ("fedrd", "fedavg-ft", "fedrep"), "averaging": ("fedavg",)}
    names = {"fedrd": "FedRD", "fedavg-ft": "FedAvg with fine-tuning", "fedrep": "FedRep", "fedavg": "FedAvg"}
    of: dict[str, list[list[float]]] = {}
    for file, labels in files.items():
        runs = sorted(reproduced(f"fedrd-cifar10-50000-{file}.json"), key=lambda run: run["seed"])
        of |= {label: [run["accuracies"] for run in runs if run["label"] == label] for label in labels}
    for label, words, after in [*((label, "one round", 0) for label in names), ("fedavg", "five rounds", -1)]:
        values = [curve[after] for curve in of[label]]
        assert len(values) == 3
        row = cells("fedrd.md", f"{names[label]}, {words}")
        assert row[1:3] == [" / ".join(f"{100 * value:.1f}" for value in values), spread(values)]
        assert spread(values) in papers
    assert all(one[0] > two[0] for one, two in zip(of["fedrd"], of["fedavg-ft"], strict=True))


def test_dense_with_the_authors_clients_on_three_seeds() -> None:
    page = (ROOT / "docs" / "methods" / "dense.md").read_text()
    methods = ("feddf", "fed-dafl", "fed-adi", "dense")
    pairs: list[dict[str, Any]] = []
    for data, name in (("mnist", "MNIST"), ("fashion_mnist", "Fashion-MNIST"), ("cifar10", "CIFAR-10")):
        for alpha in (0.3, 0.5) if data == "mnist" else (0.1, 0.3, 0.5):
            runs = reproduced(f"dense-authors-{data}-{alpha}.json")
            own = {label: {r["seed"]: r["accuracy"] for r in runs if r["label"] == label} for label in methods}
            assert all(sorted(values) == [0, 1, 2] for values in own.values())
            last = [run["last"] for run in runs if run["label"] == "dense"]
            facts = [spread([one[key] for one in last]) for key in ("clients_alone", "average", "ensemble")]
            best = max(methods, key=lambda label: mean(own[label].values()))
            cells = [spread([*own[label].values()]) for label in methods]
            bold = [
                f"**{c.replace(' ', '** ', 1)}" if label == best else c for label, c in zip(methods, cells, strict=True)
            ]
            assert f"| {name} {str(alpha)[1:]} | {' | '.join([*facts, *bold])} |" in page
            alone = {run["seed"]: run["last"]["average"] for run in runs if run["label"] == "dense"}
            pairs += [
                {**{label: own[label][s] for label in methods}, "average": alone[s], "on": data} for s in range(3)
            ]
    above = {
        name: sum(one["dense"] > one[name] for one in pairs) for name in ("fed-adi", "feddf", "average", "fed-dafl")
    }
    assert above == {"fed-adi": 23, "feddf": 15, "average": 21, "fed-dafl": 11}
    assert sum(max(methods, key=one.__getitem__) == "dense" for one in pairs) == 7
    on = {
        data: sum(one["dense"] > one["feddf"] for one in pairs if one["on"] == data)
        for data in ("fashion_mnist", "cifar10")
    }
    assert on == {"fashion_mnist": 9, "cifar10": 3}
    more = [round(100 * (one["dense"] - one["average"]), 6) for one in pairs]
    rows = sorted(round(sum(more[i : i + 3]) / 3, 1) for i in range(0, len(more), 3))
    assert rows[0] == -1.0 and rows[1] == 2.4 and rows[-1] == 9.4


def test_a_thousand_masked_clients_have_what_one_client_has() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "sums.json").read_text())["runs"]
    pairs: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for run in runs:
        whole = run["sums"] == "one" or (run["sums"] == "masked" and run["clients"] == 1000)
        if whole and not run["all"] and run["partition"] == ("iid" if run["sums"] == "one" else "classes:1"):
            pair = pairs.setdefault((run["data"], run["method"], run["epsilon"]), {"one": [], "masked": []})
            pair[run["sums"]].append(100 * run["accuracy"])
    assert len(pairs) == 18
    for (data, method, _), pair in pairs.items():
        assert len(pair["masked"]) == len(pair["one"]) == (10 if (data, method) == ("cifar10", "afl") else 3)
        assert mean(pair["masked"]) > mean(pair["one"]) - 0.3
    assert "they have at most .3 points\nless in all 18 pairs" in (ROOT / "docs" / "sums.md").read_text()
