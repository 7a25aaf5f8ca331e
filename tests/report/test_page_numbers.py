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


def spread(values: list[float]) -> str:
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}"


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
