"""The epsilon of a person with several records: by the lemma, never below the truth, and said beside the run's."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedstill
from fedstill.privacy import accounting
from fedstill.privacy.guarantee import of_group
from fedstill.report import spending


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
