"""docs/real_sites.md is what its results say, and its schema is one."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from fedstill.data.table_schema import TableSchema

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hospitals() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hospitals", ROOT / "benchmarks" / "hospitals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_texts_shares_are_those_of_the_table(hospitals: ModuleType) -> None:
    """Half, and a quarter, of what the facts explain is lost to noise, as the page says."""
    rows: dict[str, list[float]] = {}
    for one in json.loads(hospitals.RESULTS.read_text())["runs"]:
        rows.setdefault(one["row"], []).append(one["r2"])
    mean = {name: sum(values) / len(values) for name, values in rows.items()}
    full = mean["one upload of sums (AFL)"]
    assert 1 - mean["the same, epsilon 1"] / full == pytest.approx(0.5, abs=0.06)
    assert 1 - mean["the same, epsilon 1, masked"] / full == pytest.approx(0.25, abs=0.06)
