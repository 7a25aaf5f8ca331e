"""docs/papers.md says of its claims what the stored runs carry, by the rule of the board."""

import importlib
import math
import re
import sys
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    for name in ("verdicts", "decided"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("verdicts")


def test_the_table_of_the_page_is_what_the_files_give(verdicts: ModuleType, tmp_path: Path) -> None:
    written = PAGE.read_text()
    verdicts.PAGE = tmp_path / "papers.md"
    verdicts.PAGE.write_text(written.replace(verdicts.table(), "an old table"))
    assert "an old table" in verdicts.PAGE.read_text(), "run: python reproduce/verdicts.py"
    verdicts.main()
    assert verdicts.PAGE.read_text() == written


def test_numbers_that_only_a_page_has_stand_there(verdicts: ModuleType) -> None:
    for claim in verdicts.claims():
        assert (ROOT / claim.source).is_file()
        if claim.source.endswith(".md"):
            text = (ROOT / claim.source).read_text()
            for values in (claim.first, *claim.others):
                assert ", ".join(f"{100 * value:.1f}" for value in values.values()) in text, claim.words


def test_claims_are_those_of_the_pages_tables(verdicts: ModuleType) -> None:
    """The labels of a file are not unique: the runs meant are those whose numbers the methods' pages print."""
    by_words = {claim.words: claim for claim in verdicts.claims()}
    sound = by_words["CIFAR-10, alpha .01, sound heads: FedAUXfdp above FedAVG+P and FedD+P"]
    page = (ROOT / "docs" / "methods" / "fedauxfdp.md").read_text()
    for values in (sound.first, *sound.others):
        assert " / ".join(f"{100 * values[seed]:.1f}" for seed in range(5)) in page
    dense = (ROOT / "docs" / "methods" / "dense.md").read_text()
    (epochs,) = [claim for words, claim in by_words.items() if "ensemble better with 100" in words]
    for values, row in ((epochs.first, "| 100 |"), (epochs.others[0], "| 5 |")):
        (line,) = [line for line in dense.splitlines() if line.startswith(row) and line.count("|") == 5]
        assert line.split("|")[-2].strip().startswith(f"{100 * sum(values.values()) / 3:.1f} ")


def test_summaries_are_compared_as_if_their_seeds_were_independent(verdicts: ModuleType) -> None:
    one, two = verdicts.Summary(0.8, 0.01, 3), verdicts.Summary(0.7, 0.02, 3)
    found = verdicts.compare(one, two, verdicts.INFINITE)
    assert found.spread == pytest.approx(math.hypot(0.01, 0.02)) and found.seeds == 3
    assert found.p == pytest.approx(verdicts.decided.p_value(0.1, 5e-4 / 3, 2, 0.0), rel=1e-6)
    assert verdicts.compare(one, two, 100).p > found.p


def test_a_verdict_that_rests_on_seeds_says_no_more_than_the_table(verdicts: ModuleType) -> None:
    """Each row of the page that says "order reproduced" has a claim that is apart, and the words of the board's rows
    are those of the rows' names."""
    text = PAGE.read_text()
    before = text.split(verdicts.BEGIN)[0]
    assert "reproduced" in before and "(4,000 records in all, logits" not in text
    apart = {line.split("|")[1].strip() for line in verdicts.table().splitlines() if line.endswith("**apart** |")}
    papers = [part.split("\n")[0] for part in re.split(r"\n## ", before)]
    for paper in (name.split(" (")[0] for name in papers if " (" in name):
        section = before.split(f"## {paper}")[1].split("\n## ")[0]
        if re.search(r"order \*\*reproduced|\*\*order reproduced", section):
            assert paper in apart, paper


BACKED = {
    "Table 1, #C=1: FedGM above averaging": [
        "MNIST, #C=1: FedGM above all averaging after one round",
        "Fashion-MNIST, #C=1: FedGM above all averaging after one round",
        "CIFAR-10, #C=1: FedGM with 50 images above FedAvg after 20 rounds",
    ],
    "Table 1, #C=2: FedGM above averaging": [
        f"{data}, #C=2: FedGM above all averaging after one round" for data in ("MNIST", "Fashion-MNIST")
    ],
    "Figures 6, 7 (accuracy by bytes)": [
        f"{data}, #C=1: FedGM with one image (four in one) above FedAvg after one round"
        for data in ("MNIST", "Fashion-MNIST", "CIFAR-10")
    ],
    "Section 4.6 (REAL)": ["Fashion-MNIST, #C=1: FedGM above REAL"],
    "Figure 7, MNIST, order": [
        f"MNIST, two blocks a client, clipping length 5: FedKADP above DP-FL{length}, mean of the last five evaluations"
        for length in ("", " at its best length (2)")
    ],
    "Figure 6 (sigma 5, 10, 15)": [
        f"MNIST, two blocks a client, clipping length 5: FedKADP better at sigma {less} than at {more}, {when}"
        for less, more, when in ((5, 10, "last round"), (10, 15, "mean of the last five evaluations"))
    ],
    "Figure 5 (share of clients: .01, .05, .1)": [
        "MNIST, one block: FedKADP better with .1 of the clients than with .01, mean of the last five"
    ],
    "Table 2, order at small alpha": ["CIFAR-10, alpha .01, sound heads: FedAUXfdp above FedAVG+P and FedD+P"],
    "Table 1, Fashion-MNIST": ["Fashion-MNIST: FedRD above FedDM"],
    "Table 1, CIFAR-10": ["CIFAR-10: FedRD above FedDM"],
    "Section 4: 65 % after the first round on CIFAR-10, averaging below 30": [
        f"CIFAR-10, 50,000 records, one round: FedRD above {other}"
        for other in ("FedAvg after five", "fine-tuned FedAvg")
    ],
}
"""Rows of the page that call something reproduced, and the claims of the last table that carry it."""
WITHOUT_SEEDS = {"Bytes", "Table 1 (class shares of the split)", "the same, rounds within the budget"}
"""Rows that compare no methods."""


def test_each_row_that_says_reproduced_has_claims_that_are_apart(verdicts: ModuleType) -> None:
    lines = PAGE.read_text().split(verdicts.BEGIN)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    said = {row[0] for row in rows if re.search(r"\*\*(order )?reproduced", row[-1])}
    assert said == set(BACKED) | WITHOUT_SEEDS
    apart = [line.split("|")[2] for line in verdicts.table().splitlines() if line.endswith("**apart** |")]
    for claims in BACKED.values():
        for claim in claims:
            assert any(words.strip().startswith(f"{claim} (") for words in apart), claim


def test_numbers_of_missing_claims_are_those_of_the_files(verdicts: ModuleType) -> None:
    text = PAGE.read_text()
    same, one = (verdicts.of_board("fashion_mnist", "fedgm", split).values() for split in ("iid", "classes:1"))
    many = verdicts.stored("fedgm-iid-fashion_mnist.json", "fedavg").values()
    assert f"FedGM {100 * mean(same):.1f} to {100 * mean(one):.1f} (10 clients)" in text
    assert f"(1.6 MB) {100 * mean(many):.1f} ± {100 * stdev(many):.1f}, still rising" in text
    assert f"one upload, {100 * mean(same):.1f} ± {100 * stdev(same):.1f}" in text
    withdrawn = (ROOT / "docs" / "methods" / "fedauxfdp.md").read_text() + text
    assert "42.8 against" not in withdrawn and "| 47.8 |" not in withdrawn, "numbers that did not repeat"


def test_seeds_that_came_after_a_look_count_twice(verdicts: ModuleType) -> None:
    """A claim over five seeds of which two were added, as it was near, is apart by half the level."""
    lines = [[cell.strip() for cell in line.split("|")] for line in verdicts.table().splitlines() if "[from]" in line]
    for line in lines:
        source = Path(line[2].rpartition("(")[2].rstrip(")")).name
        assert line[5].endswith(" x 2") == (source in verdicts.EXTENDED and int(line[3]) > verdicts.LOOKED), line
    assert sum(line[5].endswith(" x 2") for line in lines) > 10


def test_the_runs_of_four_in_one_are_those_of_the_table_and_two_more(verdicts: ModuleType) -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    for label, words in (("fedgm-1", "93.3 ± 0.5"), ("fedavg-1", "33.5 ± 5.2")):
        found, row = verdicts.stored("four-in-one-mnist.json", label), verdicts.from_pareto("mnist", label)
        assert sorted(found) == [0, 1, 2, 3, 4] and row.seeds == 3
        assert mean([found[seed] for seed in range(3)]) == pytest.approx(row.mean, abs=1e-9)
        assert f"{100 * mean(found.values()):.1f} ± {100 * stdev(found.values()):.1f}" == words and words in page
