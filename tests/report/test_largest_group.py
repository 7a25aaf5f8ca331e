"""The epsilon of a person with several records: by the lemma, never below the truth, and said beside the run's."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedstill
from fedstill.cli import main
from fedstill.privacy import accounting
from fedstill.privacy.accounting import gaussian_epsilon
from fedstill.privacy.guarantee import beside, derive, for_group, of_group
from fedstill.privacy.ledger import Charge
from fedstill.privacy.releases import Gaussian
from fedstill.report import guarantees, spending
from fedstill.runs.live import live


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_group_has_no_less_than_the_truth(epsilon: float, size: int) -> None:
    """For one Gaussian release the truth is known: ``size`` records move it by that many sensitivities."""
    delta = 1e-7
    noise = accounting.gaussian_noise(epsilon, delta)
    found = of_group(epsilon, delta, size)
    if size * epsilon > 16:
        assert found is None  # its delta would exceed 1
        return
    assert found is not None and found[0] == pytest.approx(size * epsilon)
    assert accounting.gaussian_delta(noise / size, found[0]) <= found[1] * (1 + 1e-9)
    assert found[1] == pytest.approx(sum(math.exp(i * epsilon) for i in range(size)) * delta)


def test_a_group_that_nothing_protects_is_said_to_have_nothing() -> None:
    assert of_group(4.0, 1e-5, 5) is None  # delta would exceed 1
    assert of_group(200.0, 0.0, 5) is None
    assert of_group(0.0, 1e-6, 5) == (0.0, pytest.approx(5e-6))


def test_the_largest_patient_is_named_beside_the_runs_epsilon(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(60), [5, *[2] * 59])
    frame = pd.DataFrame(rng.normal(size=(len(patients), 3)), columns=list("abc"))
    frame["label"], frame["patient"] = patients % 2, [f"P{number}" for number in patients]
    record = fedstill.run(
        "ldp-fedavg",
        data=(frame, "label"),
        clients=2,
        model="linear",
        workers=0,
        mean=0.0,
        std=1.0,
        num_classes=2,
        epsilon=0.5,
        out=tmp_path / "run",
    )
    group = record["largest_group"]
    assert group["column"] == "patient" and group["records"] in (2, 5) and group["clients"] in (1, 2)
    label = replace(record, guarantee=replace(record.guarantee, unit="record", epsilon=0.5, delta=1e-6))
    label.summary["largest_group"] = {"column": "patient", "records": 5, "clients": 2}
    (sentence,) = [one for one in spending.remarks([label]) if "patient" in one]
    assert sentence.startswith(
        "One 'patient' has up to 5 records: for all of them together epsilon is up to 2.5 at delta"
    )
    client = replace(label, guarantee=replace(label.guarantee, unit="client"))
    assert any(
        "up to 2 clients: for all of them together epsilon is up to 1.0" in s for s in spending.remarks([client])
    )
    broken = replace(label, guarantee=replace(label.guarantee, epsilon=5.0, delta=1e-3))
    assert any("this epsilon promises nothing" in sentence for sentence in spending.remarks([broken]))


def _bounded(tmp_path: Path, bound: int | None, **more: object) -> fedstill.RunRecord:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(120), [9, *[2] * 119])
    frame = pd.DataFrame(rng.normal(size=(len(patients), 3)), columns=list("abc"))
    frame["label"], frame["patient"] = patients % 2, [f"P{number:03d}" for number in patients]
    settings = (
        dict(clients=2, model="linear", workers=0, mean=0.0, std=1.0, num_classes=2, group="patient", public="noise")
        | more
    )
    return fedstill.run("afl", data=(frame, "label"), group_bound=bound, out=tmp_path / f"run{bound}", **settings)


def test_a_public_bound_makes_the_patient_a_unit(tmp_path: Path) -> None:
    """The truth of a Gaussian release, at the run's delta; no record beyond the bound is trained on."""
    record = _bounded(tmp_path, 2, epsilon=0.5)
    promised = record.guarantee
    assert promised.holds and (promised.group, promised.group_size) == ("patient", 2)
    noise = accounting.gaussian_noise(0.5, promised.delta)
    assert promised.group_epsilon == pytest.approx(accounting.gaussian_epsilon(noise / 2, promised.delta), rel=1e-3)
    assert promised.group_delta == promised.delta
    assert promised.epsilon == promised.group_epsilon  # of two records, of which one may take the other's place
    assert "of two records, as one record more may take the place of another of its group" in promised.reason
    words = guarantees.words(promised)
    assert "per record; eps 1." in words and "per patient (up to 2 records)" in words
    assert record["largest_group"]["records"] == 2
    origin = json.loads((record.folder / "partition.json").read_text())["origin"]
    left = [line for line in origin if "--group-bound" in line]
    assert left and left[0].startswith("left out ")
    assert not [sentence for sentence in spending.remarks([record]) if "patient" in sentence]


def test_each_exit_says_the_epsilon_of_two_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dry run, ledger and ``watch`` said less than half of it."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"patient": np.repeat(np.arange(150), 2), "a": rng.normal(size=300)})
    frame = frame.assign(label=np.arange(300) % 2, hospital=np.arange(300) // 150)
    frame["split"] = np.where(np.arange(300) % 10 < 8, "train", "test")
    frame.to_parquet(tmp_path / "table.parquet")
    flags = "--clients 2 --partition by:hospital --group patient --public noise --model linear --workers 0 --quiet"
    flags += " --mean 0 --std 1 --num-classes 2 --noise entropy"
    words = ["afl", "--data", str(tmp_path / "table.parquet"), *flags.split(), "--group-bound", "2", "--epsilon", "2"]
    words += ["--out", str(tmp_path / "run")]
    main(["run", *words, "--dry-run", "--json"])
    before = json.loads(capsys.readouterr().out)["estimates"][0]["guarantee"]
    main(["run", *words])
    record = fedstill.read_run(tmp_path / "run")
    promised = record.guarantee.epsilon
    assert promised is not None and promised > 4.3
    assert before["epsilon"] == pytest.approx(promised) and before["group_epsilon"] == pytest.approx(promised)
    assert [one["epsilon"] for one in spending.numbers(record.folder)["clients"]] == [pytest.approx(promised)] * 2
    said = " ".join(map(str, spending.show(record.folder)))
    assert f"epsilon {guarantees.round_up(promised)} at delta 1e-05, that of two records (--group-bound)" in said
    assert [one.epsilon for one in live(record.folder).spent] == [pytest.approx(promised)]


def test_a_record_that_takes_another_s_place_costs_two(tmp_path: Path) -> None:
    """With the first record of each patient, one more at one client removed another one's at the other client."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.uniform(-1, 1, (40, 2)), columns=list("ab"))
    frame["label"], frame["patient"] = np.arange(40) % 2, [f"P{number:02d}" for number in range(40)]
    frame["hospital"] = ["north"] * 20 + ["south"] * 20
    first = frame.iloc[[30]].assign(hospital="north")  # another record of P30, before that of south
    settings: dict[str, Any] = {"model": "linear", "workers": 0, "mean": 0.0, "std": 1.0, "class_names": ["0", "1"]}
    settings |= {"group": "patient", "group_bound": 1, "public": "noise", "clients": 2, "partition": "by:hospital"}
    counts, promised = [], []
    for name, rows in (("without", frame), ("with", pd.concat([first, frame]))):
        (tmp_path / name).mkdir()
        rows.to_parquet(tmp_path / name / "train.parquet", index=False)
        frame[:4].assign(patient="other").to_parquet(tmp_path / name / "test.parquet", index=False)
        given = {"data": str(tmp_path / name), "noise": "entropy", "epsilon": 1.0, "out": tmp_path / f"run-{name}"}
        record = fedstill.run("afl", **given, **settings)
        assert record.counts is not None
        counts.append(record.counts)
        promised.append(record.guarantee)
    assert np.abs(counts[1] - counts[0]).sum() == 2  # one record came, and one went at the other client
    noise = accounting.gaussian_noise(1.0, promised[0].delta)
    for found in promised:
        assert found.epsilon == pytest.approx(accounting.gaussian_epsilon(noise / 2, found.delta), rel=1e-3)
        assert found.group_epsilon == pytest.approx(1.0, rel=1e-3)


def test_a_bound_needs_a_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"group_bound is 2, but no column .* name it with --group COLUMN"):
        _bounded(tmp_path, 2, group="none")


def test_releases_on_samples_have_the_lemma() -> None:
    charge = Charge(
        exchange=0, step="s", index=0, mechanism="DPSGD", unit="record", theorem="",
        event=Gaussian(noise_multiplier=2.0, sampling=0.1, count=10),
    )  # fmt: skip
    found = derive([], {0: [charge]}, 1e-5, simulated=False)
    stated = for_group(found, {0: [charge]}, "patient", 3)
    assert stated.group_epsilon == pytest.approx(3 * found.epsilon)
    assert stated.group_delta > 3 * found.delta
    assert for_group(found, {0: [charge]}, "patient", 10_000).group_epsilon is None
    assert "none per patient" in guarantees.words(for_group(found, {0: [charge]}, "patient", 10_000))


def test_noise_that_delta_alone_covers_is_noise_all_the_same() -> None:
    charge = Charge(
        exchange=0, step="s", index=0, mechanism="NoisySum", unit="record", theorem="",
        event=Gaussian(noise_multiplier=1e6),
    )  # fmt: skip
    found = derive([], {0: [charge]}, 1e-5, simulated=False)
    assert found.holds and found.epsilon == 0 and found.delta == 1e-5
    stated = for_group(found, {0: [charge]}, "patient", 1000)
    assert stated.group_epsilon == pytest.approx(gaussian_epsilon(1e3, 1e-5)) != 0
    assert not beside(found, [], drawn=["--partition iid"]).holds
    nothing = derive([], {0: []}, 1e-5, simulated=False)
    assert beside(nothing, [], drawn=["--partition iid"]).holds
    assert for_group(nothing, {0: []}, "patient", 1000).group_epsilon == 0


def test_a_client_that_the_bound_leaves_without_records_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(80, 2)), columns=list("ab"))
    frame["label"], frame["patient"] = np.arange(80) % 2, [f"P{number % 40:02d}" for number in range(80)]
    frame["hospital"] = ["north"] * 40 + ["south"] * 40
    with pytest.raises(ValueError, match=r"client 1 .*group_bound|group_bound.*client 1"):
        fedstill.run(
            "fedavg", data=(frame, "label"), clients=2, partition="by:hospital", group="patient", group_bound=1,
            model="linear", workers=0, out=tmp_path / "run",
        )  # fmt: skip
