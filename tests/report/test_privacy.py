"""``fedstill privacy``: the ledger of a run as it was written, and plans whose numbers are those of the mechanisms."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.cli import main
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import Job, run
from fedstill.experiment.task import share_out
from fedstill.methods.fedavg_p import FedAvgP
from fedstill.privacy import accounting
from fedstill.privacy.ledger import Charge
from fedstill.privacy.releases import Event, Gaussian, Pure, Unbounded
from fedstill.report import plan
from fedstill.report.plan import Plan, reference
from fedstill.report.spending import cost_words
from fedstill.train.extractor import Extractor

QUICK = ["--data", "digits", "--clients", "3", "--model", "convnet:width=8,depth=2", "--workers", "0", "--limit", "300"]
HEADS = ["--public", "noise=80", "--extractor.pretrain", "none", "--space.dims", "8"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(words)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_ledger_of_a_private_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    told(capsys, "run", "fedauxfdp", *QUICK, *HEADS, "--distillation.epochs", "1", "--epsilon", "2", "--out", out)
    text = told(capsys, "privacy", out)
    assert "fedauxfdp, seed 0: eps 2.0" in text.replace("eps 2.01", "eps 2.0")
    assert "each of 3" in text
    assert "composed by: Gaussian releases as one with the noise of all, exactly (Balle, Wang 2018)" in text
    assert "sqrt" in text or "sensitivity" in text
    assert "in total, per record of one client: epsilon 2.0" in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["guarantee"]
    assert summary["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert summary["simulated"] is True
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal" / "spent.jsonl").read_text().splitlines()]
    assert [len(line["spent"]) for line in lines] == [2, 2, 2]
    assert not (tmp_path / "run" / "clients").exists()


def test_a_run_without_releases_says_why_there_is_no_guarantee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    told(capsys, "run", "fedavg", *QUICK, "--rounds", "1", "--out", out)
    text = told(capsys, "privacy", out)
    assert "fedavg, seed 0: none" in text
    assert "field 'weights' of step 'update'" in text
    assert "No client released anything" in text


def test_published_heads_print_why_they_guarantee_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    told(capsys, "run", "fedavg-p", *QUICK, *HEADS, "--privacy", "published", "--out", out)
    text = told(capsys, "privacy", out)
    assert "none" in text
    assert "maximum norm" in text
    assert "in total, per record of one client: epsilon unbounded" in text


@pytest.mark.slow
def test_an_epsilon_beside_unprotected_fields_is_said_to_be_of_the_releases_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    told(capsys, "run", "fedavg-p", *QUICK, *HEADS, "--epsilon", "2", "--out", out)
    assert told(capsys, "privacy", out).endswith("epsilon 2.0 at delta 1e-05")
    place = tmp_path / "run" / "summary.json"
    summary = json.loads(place.read_text())
    none = {name: None for name in summary["guarantee"]} | {"holds": False, "simulated": True, "reason": "in clear"}
    del none["exposed"]  # as in versions before 1.1
    place.write_text(json.dumps({**summary, "guarantee": none}))
    assert told(capsys, "privacy", out).endswith("epsilon 2.0 at delta 1e-05, of these releases alone")


def test_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["privacy", str(tmp_path / "nothing")])
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_a_plan_shows_the_noise_that_a_run_would_add(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "260")
    text = told(capsys, "privacy", "plan", "--epsilon", "1", "--delta", "1e-5", "--records", "2500", "--classes", "10")
    assert "1 3.731 73.2 23.2" in text and "none 0 100 100" in text
    for names in (
        "dp-fl, adap-dp-fl, fedkd, fedkadp",
        "fedgm-records, fedrd-records",
        "fedauxfdp",
        "fedgm-labels",
        "afl, fedcgs",
    ):
        assert names in text  # asked of the methods themselves
    assert "label-DP only, features public fedgm-labels" in text
    assert "1.58, off the diagonal /sqrt(2) 4.17 sums of 2500" in text  # a share of 0.6 for the sums of rows
    assert "9,675 numbers, 38.7 kB" in " ".join(text.split())  # 129 * 130 / 2 products and 10 * 129 sums


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["privacy", "plan", "--json", *words])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_plan_as_json_has_numbers_and_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--epsilon", "1", "--clients", "2", "--records", "300", "--dims", "16")
    assert (found["clients"], found["records"], found["classes"], found["delta"]) == (2, 300, 10, 1e-5)
    private, free = found["budgets"]
    assert (private["epsilon"], free["epsilon"]) == (1.0, None)
    assert private["noise_multiplier"] == accounting.gaussian_noise(1.0, 1e-5)
    assert private["attacker_right"] == pytest.approx(1 / (1 + math.exp(-1)), abs=0.002)
    assert private["labels_kept"] == pytest.approx(math.e / (math.e + 9))
    assert (free["noise_multiplier"], free["attacker_right"], free["labels_kept"]) == (0, 1, 1)
    assert all(0 <= row["accuracy"] <= 1 for row in found["budgets"])
    releases = {release["release"]: release for release in found["releases"]}
    assert releases["dp_sgd_step"]["methods"] == ["dp-fl", "adap-dp-fl", "fedkd", "fedkadp"]
    assert releases["sums_of_products"]["bytes"] == 4 * releases["sums_of_products"]["numbers"]
    assert releases["labels"]["noise"] is None
    assert all(release["noise"] > 0 for name, release in releases.items() if name != "labels")
    assert "releases" not in planned(capsys, "--clients", "1", "--records", "100", "--dims", "8")


@pytest.mark.slow
def test_a_plan_is_a_row_for_each_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--records", "2500", "--classes", "10", "--clients", "4")
    rows, text = planned(capsys, *words)["budgets"], told(capsys, "privacy", "plan", *words)
    assert [row["epsilon"] for row in rows] == [0.5, 1, 2, 4, 8, None]
    accuracy = [row["accuracy"] for row in rows]
    assert accuracy == sorted(accuracy) and accuracy[0] < accuracy[-1] - 0.05
    right = [row["attacker_right"] for row in rows]
    assert right == sorted(right) and 0.5 < right[0] < 0.65
    assert "4 clients with 2500 records of 10 classes each" in text and "synthetic mixture" in text


EXTRACTOR = Extractor(pretrain="none")
TASK = {"data": "digits", "clients": 3, "model": "convnet:width=8,depth=2", "public": "noise=80"}


def test_a_plan_on_own_records_is_a_simulation_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for name, value in TASK.items() for word in (f"--{name}", str(value))]
    flags = ["--epsilon", "0.1", "2", "1000", *flags, "--partition", "dirichlet:1"]
    found, text = planned(capsys, *flags), told(capsys, "privacy", "plan", *flags)
    assert (found["data"], found["clients"], found["records"]) == ("digits", 3, 383)
    accuracy = [row["accuracy"] for row in found["budgets"]]
    assert accuracy[0] < accuracy[1] - 0.05 and accuracy[1] < accuracy[3] - 0.05
    assert abs(accuracy[2] - accuracy[3]) < 0.05  # at epsilon 1000 there is hardly any noise
    for words in (
        "3 clients with 383 records of 10 classes each on average",
        "simulation on these records with noise from a seed: it charges no ledger, and its numbers have no privacy",
        "the test set is not used",
    ):
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "tolerance"), [(None, 1 / 288), (8.0, 0.05)])
def test_the_simulation_is_the_run_s_accuracy_on_the_same_validation_records(
    epsilon: float | None, tolerance: float, tmp_path: Path
) -> None:
    experiment = Experiment(**TASK, validation=0.2, workers=0)  # type: ignore[arg-type]
    (simulated,) = plan.accuracies(experiment, share_out(experiment, None), [epsilon], EXTRACTOR)
    method = FedAvgP(epsilon=epsilon, extractor=EXTRACTOR)
    ran = run(Job(experiment, method, tmp_path / "run"))["accuracy"]
    # without noise one of 288 records at most, by the last bits; draws of this noise scatter by 0.015
    assert simulated == pytest.approx(ran, abs=tolerance)
    assert epsilon is None or abs(simulated - ran) < abs(0.847 - ran)  # the accuracy without noise is further off


def test_the_test_records_change_no_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.integers(0, 256, (90, 8, 8), np.uint8), "y_train": np.arange(90) % 2}
    found = []
    for name in ("a", "b"):
        test = rng.integers(0, 256, (40, 8, 8), np.uint8)
        np.savez(tmp_path / f"{name}.npz", **arrays, x_test=test, y_test=rng.integers(0, 2, 40))
        flags = ["--clients", "2", "--model", TASK["model"], "--public", TASK["public"], "--epsilon", "1", "2"]
        found.append(planned(capsys, "--data", str(tmp_path / f"{name}.npz"), *map(str, flags))["budgets"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("epsilon", "sampling", "steps"),
    [(1.0, 0.05, 200), pytest.param(8.0, 1.0, 1, marks=pytest.mark.slow), (0.3, 0.01, 1000)],
)
def test_planned_noise_of_dp_sgd_fits_and_hardly_less_does(epsilon: float, sampling: float, steps: int) -> None:
    noise = accounting.dp_sgd_noise(epsilon, 1e-5, sampling, steps)

    def cost(multiplier: float) -> float:
        event = Gaussian(noise_multiplier=multiplier, sampling=sampling, count=steps)
        return accounting.epsilon([event], 1e-5, "record")

    assert cost(noise) <= epsilon < cost(noise / 1.02)


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("--epsilon", "0", "greater than 0"),
        ("--delta", "1", "less than 1"),
        ("--classes", "1", "greater than or equal to 2"),
    ],
)
def test_impossible_plans(flag: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["privacy", "plan", flag, value])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert flag in error
    assert limit in error


def test_more_noise_costs_more_accuracy_and_more_clients_win_it_back() -> None:
    few = Plan(records=500, clients=2, dims=16)
    clean, noisy, noisier = (reference(few, epsilon) for epsilon in (None, 1.0, 0.05))
    assert clean > noisy > noisier
    assert reference(few.model_copy(update={"clients": 200}), 1.0) > noisy


def test_costs_in_words() -> None:
    def words(event: Event, adaptive: bool = False) -> str:
        entry = Charge(
            exchange=0, step="s", index=0, mechanism="M", unit="record", event=event, theorem="", adaptive=adaptive
        )
        return cost_words(entry)

    assert words(Pure(epsilon=0.5)) == "epsilon 0.5"
    assert words(Unbounded(reason="x")) == "no bound"
    sampled = Gaussian(noise_multiplier=math.pi, sampling=0.01, count=100)
    assert words(sampled, True) == "noise 3.142 sensitivities, 100 samples of 0.01, adaptive"


@pytest.mark.slow
def test_like_releases_are_one_line_of_a_table_that_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = str(tmp_path / "run")
    steps = "--rounds 4 --participation 1 --local.steps 2 --local.supposed-records 90".split()
    main(["run", "dp-fl", *QUICK, *steps, "--model", "kadp-mnist", "--out", out])
    capsys.readouterr()
    main(["privacy", out])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if "DPSGD  " in line]
    assert line.split()[:5] == ["each", "of", "3", "update", "DPSGD"]
    assert " 4 " in line


def test_runs_with_real_noise_on_the_same_records_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "fedavg-p", "--seeds", "0", "1", *QUICK, "--fedavg-p.extractor.pretrain", "none"]
    words += ["--public", "noise=80", "--fedavg-p.space.dims", "8"]
    text = told(capsys, *words, "--noise", "entropy", "--out", str(tmp_path / "real"))
    assert "Whoever sees all 2 runs of these records has an epsilon of up to 2.0 at delta 2e-5." in text
    assert "do not hand on this page" not in text  # the data set is public
    assert "Whoever sees all" not in told(capsys, *words, "--out", str(tmp_path / "simulated"))


def test_exact_numbers_of_ones_own_records_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 200, (129, 8, 8), dtype=np.uint8), np.arange(129) % 3
    np.savez(tmp_path / "own.npz", x_train=images[9:], y_train=labels[9:], x_test=images[:9], y_test=labels[:9])
    words = ["run", "fedavg-p", "--data", str(tmp_path / "own.npz"), "--clients", "1", "--model", "scattering", *HEADS]
    words += ["--mean", "0.5", "--std", "0.25", "--num-classes", "3", "--workers", "0"]
    text = told(capsys, *words, "--noise", "entropy", "--out", str(tmp_path / "real"))
    assert "eps 1.0" in text and "do not hand on this page or the run's folder" in text
    assert "do not hand on" not in told(capsys, *words, "--out", str(tmp_path / "simulated"))
