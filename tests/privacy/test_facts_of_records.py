"""What one record more or less changes beside releases: columns, classes and other records end a guarantee."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedstill
from fedstill import InputError, RunRecord
from fedstill.data.published import numbers_are_names

FRAME = pd.DataFrame(np.random.default_rng(0).uniform(-1, 1, (60, 3)).round(3), columns=["x0", "x1", "x2"])
FRAME = FRAME.assign(site=np.repeat(["a", "b", "c"], 20), label=np.arange(60) % 3 // 2)
SCHEMA = 'target = "label"\nclasses = ["0", "1"]\nsite = "site"\n\n' + "\n".join(
    f'[columns.x{i}]\nkind = "number"\nrange = [-1, 1]\noutside = "clip"\nmissing = 0.0\n' for i in range(3)
)
TASK: dict[str, Any] = {"clients": 3, "partition": "by:site", "model": "linear", "workers": 0, "public": "noise=50"}
TASK |= {"noise": "entropy", "epsilon": 1.0, "progress": False}
FACTS: dict[str, Any] = {"mean": 0.0, "std": 1.0, "class_names": ["0", "1"]}


def run_on(frame: pd.DataFrame, place: Path, *, form: str = "csv", **more: Any) -> RunRecord:
    """A run of AFL on records with a test split of their own, so that no draw looks at them."""
    both = pd.concat([frame.assign(split="train"), frame[:4].assign(split="test")])
    file = place.with_suffix(f".{form}")
    both.to_csv(file, index=False) if form == "csv" else both.to_parquet(file, index=False)
    return fedstill.run("afl", data=str(file), out=place, **{**TASK, **more})


def test_columns_that_cells_decide_end_a_guarantee(tmp_path: Path) -> None:
    """One cell of a CSV file that is no number takes its column from every client's vectors and from the upload."""
    one = FRAME.astype({"x1": object}).iloc[[0]].assign(x1="unknown")
    without, more = (
        run_on(frame, tmp_path / name, **FACTS)
        for name, frame in (("without", FRAME), ("more", pd.concat([one, FRAME.astype({"x1": object})])))
    )
    assert without["bytes_up"] > more["bytes_up"]
    for record in (without, more):
        assert not record.guarantee.holds
        assert "the list of columns of the task came from the records" in record.guarantee.reason
        assert "describe the table by a schema (--schema-file" in record.guarantee.reason


def test_columns_that_a_schema_or_a_file_with_types_states_do_not(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    described = run_on(FRAME, tmp_path / "a", schema_file=str(tmp_path / "s.toml"))
    typed = run_on(FRAME, tmp_path / "b", form="parquet", **FACTS)
    assert described.guarantee.holds and typed.guarantee.holds


def test_paths_of_clients_are_files_too(tmp_path: Path) -> None:
    places = []
    for name, part in FRAME.groupby("site"):
        places.append(tmp_path / f"{name}.csv")
        part.drop(columns="site").to_csv(places[-1], index=False)
    task = {name: value for name, value in TASK.items() if name not in ("partition", "clients")}
    record = fedstill.run("afl", data=places, **task, **FACTS, out=tmp_path / "run")
    assert "the list of columns of the task came from the records" in record.guarantee.reason


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_another_record_s_class_relabels_nobody(form: str, tmp_path: Path) -> None:
    """Integers were places in the list of classes; beside one record of a class with a name they became names."""
    named = {**FACTS, "class_names": ["1", "0", "other"]}
    one = FRAME.iloc[[0]].assign(label="other")
    more = pd.concat([FRAME.astype({"label": str}), one])
    first, second = (run_on(f, tmp_path / name, form=form, **named) for name, f in (("a", FRAME), ("b", more)))
    assert first.counts is not None and second.counts is not None
    assert (second.counts - first.counts).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert first.counts[:, 0].sum() == (FRAME.label == 1).sum()


def test_a_number_that_is_no_class_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--class-names lacks the class '0', which has records"):
        run_on(FRAME, tmp_path / "a", **{**FACTS, "class_names": ["1", "2"]})


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (["0", "1", "2"], False),
        (["no", "yes"], False),
        (["0", "1", "other"], False),
        (["1", "2"], True),
        (["1", "0", "other"], True),
        (["other", "0"], True),
        (["01", "02"], True),
    ],
)
def test_numbers_are_names_where_a_class_is_called_by_another_number_than_its_place(
    classes: list[str], names: bool
) -> None:
    assert numbers_are_names(classes) is names


def test_a_card_has_no_number_of_private_records(tmp_path: Path) -> None:
    """It said whether a test record was trained on, and how many records the largest group has."""
    frame = FRAME.assign(patient=[f"P{i}" for i in range(60)])
    copy = frame.iloc[[0]].assign(patient="P30", site="b")
    cards = []
    for name, rows in (("without", frame[4:]), ("more", pd.concat([frame[4:], copy]))):
        both = pd.concat([rows.assign(split="train"), frame[:4].assign(split="test")])
        both.to_parquet(tmp_path / f"{name}.parquet", index=False)
        given = {"data": str(tmp_path / f"{name}.parquet"), "group": "patient", **FACTS}
        record = fedstill.run("afl", out=tmp_path / name, **{**TASK, **given})
        assert record.guarantee.holds
        fedstill.publish(record, tmp_path / f"{name}-out")
        cards.append((tmp_path / f"{name}-out" / "README.md").read_text("utf-8"))
    assert record["copied_test_records"] == 1 and record["largest_group"]["records"] == 2
    for card in cards:
        assert "Test records that equal a training record count too; their number is not published." in card
        assert "One 'patient' may have several records" in card
        assert "1 test record" not in card and "2 records" not in card
