"""docs/real_sites.md, docs/small_sites.md and the table of docs/measures.md are what their results say."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from benchmark import load as benchmark

from fedstill.data.table_schema import TableSchema

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hospitals() -> ModuleType:
    return benchmark("hospitals")


def test_the_page_is_what_its_results_say(hospitals: ModuleType) -> None:
    assert (ROOT / "docs" / "real_sites.md").read_text() == hospitals.page(json.loads(hospitals.RESULTS.read_text()))


def test_its_schema_is_one(hospitals: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(hospitals.SCHEMA)
    found = TableSchema.read(tmp_path / "schema.toml")
    assert found.range == (1, 30) and list(found.columns) == list(hospitals.COLUMNS)


def test_a_fifth_of_each_hospital_is_set_aside(hospitals: ModuleType) -> None:
    frame = pd.DataFrame({"hospital": ["a"] * 50 + ["b"] * 10, "los": range(60)})
    train, test = hospitals.divide(frame, 0)
    assert test.hospital.value_counts().to_dict() == {"a": 10, "b": 2}
    assert sorted([*train.los, *test.los]) == list(range(60))
    assert not test.index.equals(hospitals.divide(frame, 1)[1].index)


def test_the_text_says_what_noise_and_ridge_take(hospitals: ModuleType) -> None:
    runs = json.loads(hospitals.RESULTS.read_text())["runs"]
    rows = pd.DataFrame(runs).groupby("row")
    r2, rmse = rows.r2.mean(), rows.rmse.apply(list)
    text = (ROOT / "docs" / "real_sites.md").read_text()
    for row, words in (
        ("the same, epsilon 1", "at epsilon 1 takes {}%"),
        ("the same, epsilon 1, masked", "once and takes {}%"),
    ):
        assert words.format(round(100 * (1 - r2[row] / r2["one upload of sums (AFL)"]))) in text
    names = ("the same, `--ridge 1e-6`", "one upload of sums (AFL)", "all records in one place (ridge)")
    exact, usual, pooled = (np.array(rmse[name]) for name in names)
    assert np.abs(exact - pooled).max() < 0.001
    assert np.abs(usual - pooled).max() < 0.02  # of days, by the default ridge


def test_settings_are_the_best_on_validation_records_of_the_training_part(hospitals: ModuleType) -> None:
    found = json.loads(hospitals.RESULTS.read_text())
    private = [one for one in found["runs"] if "epsilon" in one["row"]]
    assert len(private) == 4 * len(hospitals.SEEDS)
    for one in private:
        tries = found["tries"][str(one["seed"])][one["row"]]
        assert len(tries) == len(hospitals.BIASES) and tries[str(one["bias"])] == min(tries.values())


def test_gains_are_paired_by_patient_and_their_sign_is_that_of_the_better_model(hospitals: ModuleType) -> None:
    rng = np.random.default_rng(0)
    sites = pd.Series(["a"] * 60 + ["b"] * 60)
    alone = [pd.Series(rng.exponential(size=120), index=range(120)) for _ in range(2)]
    other = [errors * np.where(sites == "a", 0.25, 4.0) for errors in alone]
    found = hospitals.gains(alone, other, sites)
    assert found["a"][0] == pytest.approx(0.5 * np.sqrt(pd.concat(alone)[lambda e: e.index < 60].mean()))
    assert 0 < found["a"][1] < found["a"][0] < found["a"][2] and found["b"][2] < 0
    same = hospitals.gains(alone, alone, sites)
    assert same["a"] == [0, 0, 0]  # paired: what is equal has no interval


def test_the_verdicts_count_every_hospital(hospitals: ModuleType) -> None:
    found = json.loads(hospitals.RESULTS.read_text())
    assert set(found["gains"]) == set(hospitals.GAINED)
    for each in found["gains"].values():
        assert set(each) == set(found["sizes"]) and all(low <= value <= high for value, low, high in each.values())
    assert hospitals.verdict({"a": [1, 0.5, 2], "b": [0, -1, 1], "c": [-1, -2, -0.5]}) == (
        "1 of 3 gain, 1 lose, and of 1 the interval has 0"
    )


def test_the_table_of_dialysis_centres_is_what_its_results_say(tmp_path: Path) -> None:
    dialysis = benchmark("dialysis")
    text, found = dialysis.PAGE.read_text(), json.loads(dialysis.RESULTS.read_text())
    assert text == dialysis.page(text, found) and dialysis.lines(found) in text
    for one in found["runs"]:
        if tries := one.get("tries"):
            values = {json.dumps(each["settings"]): each["value"] for each in tries["tries"]}
            assert values[json.dumps(tries["chosen"])] == max(values.values())
    (tmp_path / "schema.toml").write_text(dialysis.SCHEMA)
    assert TableSchema.read(tmp_path / "schema.toml").classes == ("no", "yes")


@pytest.fixture(scope="module")
def small() -> ModuleType:
    return benchmark("small_sites")


def test_the_page_of_small_sites_is_what_its_results_say(small: ModuleType) -> None:
    text, found = small.PAGE.read_text(), json.loads(small.RESULTS.read_text())
    assert text == small.page(text, found)
    first = benchmark("first_model")
    commands = json.loads(first.RESULTS.read_text())
    assert text == first.page(text, commands)
    assert commands["deployed"]["epsilon"] <= first.RUN["afl"]["epsilon"]  # type: ignore[index]
    for table in found["tables"].values():
        tries = pd.Series({seed: one["the same, epsilon 1"] for seed, one in table["tries"].items()})
        for run in (one for one in table["runs"] if one["row"] == "the same, epsilon 1"):
            own = tries[str(run["seed"])]
            assert run["settings"] == min(own, key=lambda one: one["rmse"])["settings"]


def test_the_words_on_who_gains_are_true(small: ModuleType) -> None:
    tables = json.loads(small.RESULTS.read_text())["tables"]
    alone = np.mean([one["rmse"] for one in tables["providers"]["runs"] if one["row"] == small.OWN])
    private = small.MASKED.format(1)
    for row, percent, small_ones in ((small.NONE, 4, 0.08), (private, 3, 0.08)):
        gain, low, _ = tables["providers"]["gains"][row]["groups"]["all"]
        assert round(100 * gain / alone) == percent and low > 0
        value, low, high = tables["providers"]["gains"][row]["groups"]["2 to 9"]
        assert round(value, 2) == small_ones and low < 0 < high
    gains = tables["centres"]["gains"]
    for row in (small.NONE, small.MASKED.format(4), private):
        assert gains[row]["groups"]["all"][2] < 0
        low, high = gains[f"{row}, own mean"]["groups"]["all"][1:]
        assert low < 0 < high
    gains = tables["schools"]["gains"]
    corrected = {row: gains[f"{row}, own mean"]["groups"]["all"] for row in small.GAINED}
    assert gains[small.NONE]["groups"]["all"][2] < 0 < corrected[small.NONE][1]
    low, high = corrected[small.MASKED.format(4)][1:]
    assert low < 0 < high and corrected[private][2] < 0


def test_a_site_s_own_mean_error_is_shrunk_and_no_other_site_s(small: ModuleType) -> None:
    train = pd.DataFrame({"site": ["a"] * 3 + ["b"], "target": [1.0, 2.0, 3.0, -1.0]})
    test = pd.DataFrame({"site": ["b", "a"], "target": [0.0, 0.0]})
    table = small.Table(lambda: train, "", -3, 3)
    found = small.shifted([np.zeros(4), np.array([0.5, 0.25])], (train, test), table, 1)
    assert np.allclose(found, [0.5 - 1 / 2, 0.25 + 6 / 4])


def test_each_site_keeps_a_record_for_training(small: ModuleType) -> None:
    frame = pd.DataFrame({"site": ["a"] * 2 + ["b"] * 3 + ["c"] * 10, "target": range(15)})
    train, test = small.divide(frame, 0)
    assert test.site.value_counts().to_dict() == {"c": 2, "a": 1, "b": 1} and len(train) == 11


@pytest.mark.parametrize("name", ["providers", "centres", "schools"])
def test_the_schemas_of_small_sites_are_such(name: str, small: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "schema.toml"
    place.write_text(small.TABLES[name].schema)
    found = TableSchema.read(place)
    assert (found.site, found.range) == ("site", (small.TABLES[name].low, small.TABLES[name].high))
