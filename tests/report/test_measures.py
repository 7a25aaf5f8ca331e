"""Measures of a model on a labelled file: scikit-learn's, with intervals that cover the truth."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

import fedstill
from fedstill.cli import main
from fedstill.measures import Scores, best_threshold


def scores(n: int = 400, classes: int = 2, seed: int = 0, **more: Any) -> Scores:
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)) + 1.2 * np.eye(classes)[true]
    likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return Scores(tuple(f"class {c}" for c in range(classes)), true, likely, **more)


def test_measures_of_two_classes_are_scikit_learn_s() -> None:
    some = scores()
    found, y, p, predicted = some.measures(), some.true, some.probabilities[:, 1], some.predicted
    assert found == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(y, predicted),
            "balanced_accuracy": metrics.balanced_accuracy_score(y, predicted),
            "log_loss": metrics.log_loss(y, some.probabilities),
            "brier": 2 * metrics.brier_score_loss(y, p),  # over both classes, as Brier had it
            "auc": metrics.roc_auc_score(y, p),
            "average_precision": metrics.average_precision_score(y, p),
            "f1": metrics.f1_score(y, predicted),
            "sensitivity": metrics.recall_score(y, predicted),
            "specificity": metrics.recall_score(y, predicted, pos_label=0),
            "precision": metrics.precision_score(y, predicted),
        }
    )


def test_measures_of_more_classes_are_means_over_those_with_records() -> None:
    some = scores(classes=4)
    found = some.measures()
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(some.true, some.probabilities, multi_class="ovr"))
    assert found["f1"] == pytest.approx(metrics.f1_score(some.true, some.predicted, average="macro"))
    assert "sensitivity" not in found


@pytest.mark.parametrize("places", [0, 1, 16])
def test_equal_probabilities_share_a_threshold(places: int) -> None:
    some = scores(500, seed=places)
    y, p = some.true, some.probabilities.round(places)
    found = Scores(some.class_names, y, p).measures()
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(y, p[:, 1]), rel=1e-12)
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(y, p[:, 1]), rel=1e-12)


def test_probabilities_that_are_no_numbers_are_refused() -> None:
    some = scores(20)
    some.probabilities[3, 1] = np.nan
    with pytest.raises(ValueError, match="no numbers"):
        some.measures()


def test_the_positive_class_and_the_threshold_are_the_user_s() -> None:
    some = scores()
    other = scores(positive=0)
    assert other.measures()["sensitivity"] == some.measures()["specificity"]
    assert other.measures()["auc"] == pytest.approx(some.measures()["auc"])
    sharp = scores(threshold=0.9)
    assert sharp.measures()["specificity"] > some.measures()["specificity"]
    assert sharp.measures()["sensitivity"] < some.measures()["sensitivity"]
    assert (sharp.predicted == (sharp.probabilities[:, 1] >= 0.9)).all()


def test_what_the_records_do_not_define_is_none() -> None:
    alone = Scores(("no", "yes"), np.zeros(20, np.int64), np.tile([0.7, 0.3], (20, 1)))
    found = alone.measures()
    assert found["auc"] is None and found["sensitivity"] is None and found["precision"] is None
    assert found["specificity"] == 1.0 and alone.intervals(resamples=20)["auc"] is None


def test_intervals_cover_the_truth_in_about_19_of_20_samples() -> None:
    """The truth by a large sample; 95 % of 60 intervals are 57, and 50 have a probability below 1e-2 each."""
    truth, covered = scores(200_000, seed=1).measures(), {"accuracy": 0, "auc": 0, "sensitivity": 0}
    for seed in range(60):
        bounds = scores(300, seed=1000 + seed).intervals(resamples=100)
        for name in covered:
            low, high = bounds[name]
            covered[name] += low <= truth[name] <= high
    assert all(50 <= count <= 60 for count in covered.values()), covered


def test_records_of_a_person_are_resampled_together() -> None:
    """Ten equal records of each person tell as much as one: their intervals are wider than those of records alone."""
    one = scores(60)
    repeated = Scores(one.class_names, np.repeat(one.true, 10), np.repeat(one.probabilities, 10, axis=0))
    whole = Scores(one.class_names, repeated.true, repeated.probabilities, np.repeat(np.arange(60), 10))
    (low, high), (left, right) = repeated.intervals()["accuracy"], whole.intervals()["accuracy"]
    assert (right - left) / (high - low) == pytest.approx(10**0.5, rel=0.25)
    alone = one.intervals()["accuracy"]
    assert right - left == pytest.approx(alone[1] - alone[0], rel=0.15)


def test_calibration_counts_each_record_once() -> None:
    some = scores(1000)
    rows = some.calibration()
    assert sum(row["records"] for row in rows) == 1000
    assert all(0 <= row["right"] <= 1 and 0.5 <= row["probability"] <= 1 for row in rows)


def test_the_best_threshold_is_that_of_every_try() -> None:
    some = scores(200)
    chosen = best_threshold(some)

    def youden(threshold: float) -> float:
        found = Scores(some.class_names, some.true, some.probabilities, threshold=threshold).measures()
        return (found["sensitivity"] or 0.0) + (found["specificity"] or 0.0)

    assert youden(chosen) == pytest.approx(max(youden(t) for t in some.probabilities[:, 1]))
    with pytest.raises(ValueError, match="a threshold is for two classes"):
        best_threshold(scores(classes=3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and a labelled file of other patients."""
    folder = tmp_path_factory.mktemp("judged")
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(600, 3)), columns=list("abc"))
    table["died"] = np.where(table["a"] + 0.5 * rng.normal(size=600) > 0, "yes", "no")
    table["patient"] = [f"P{i // 2}" for i in range(600)]
    table[:400].to_parquet(folder / "train.parquet")
    table[400:][["c", "b", "a", "died", "patient"]].to_csv(folder / "new.csv", index=False)
    fedstill.run(
        "fedavg", data=folder / "train.parquet", label_column="died", clients=2, model="linear", rounds=10, workers=0,
        local={"lr": 0.5},
        out=folder / "run",
    )  # fmt: skip
    return folder / "run", folder / "new.csv"


def test_a_labelled_file_is_judged_from_python_and_the_command_line(
    trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, new = trained
    found = fedstill.evaluate(run, new, label_column="died", group="patient", positive="yes")
    table = found.measures().set_index("measure")
    assert table.loc["auc", "value"] > 0.9 and table.loc["auc", "low"] < table.loc["auc", "value"]
    out = tmp_path / "predictions.csv"
    words = ["--label-column", "died", "--group", "patient", "--positive", "yes"]
    main(["evaluate", str(run), str(new), *words, "--predictions", str(out), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["records"] == 200
    assert said["measures"]["auc"]["value"] == pytest.approx(table.loc["auc", "value"])
    saved = pd.read_csv(out)
    assert len(saved) == 200 and (saved["true"] == pd.read_csv(new)["died"]).all()
    assert ((saved["probability of yes"] > 0.5) == (saved["predicted"] == "yes")).all()
    main(["evaluate", str(run), str(new), *words])
    text = capsys.readouterr().out
    assert "200 records; intervals by resampling persons" in text and "No guarantee covers the scores" in text
    assert "sensitivity" in text and " to " in text


def test_other_records_are_judged_by_the_persons_whom_the_run_found(tmp_path: Path) -> None:
    """Intervals were of records, and too narrow, since nobody had named the column."""
    rng = np.random.default_rng(0)

    def table(patients: int) -> pd.DataFrame:
        patient = np.repeat(np.arange(patients), 10)
        return pd.DataFrame({"age": rng.normal(size=len(patient)), "patient": patient, "label": patient % 2})

    run = fedstill.run("fedavg", data=table(40), model="linear", clients=2, rounds=1, workers=0, out=tmp_path / "run")
    found, whole = fedstill.evaluate(run, new := table(20)), fedstill.evaluate(run, new, group="none")
    assert found.persons is not None and whole.persons is None
    fedstill.publish(run, tmp_path / "card")
    assert "intervals by resampling whole persons (patient)" in (tmp_path / "card" / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--positive", "maybe"], "positive is 'maybe'; it must be one of two classes"),
        (["--group", "person"], "the data have no column 'person'"),
        (["--label-column", "end"], "none of which is the label column"),
        (["--threshold", "2"], "threshold is 2"),
    ],
)
def test_wrong_questions_are_one_sentence(
    trained: tuple[Path, Path], words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new = trained
    label = [] if "--label-column" in words else ["--label-column", "died"]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(run), str(new), *label, *words])
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_predictions_never_overwrite_a_file(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, new = trained
    (tmp_path / "mine.csv").write_text("mine")
    with pytest.raises(ValueError, match="exists; name a new file"):
        fedstill.evaluate(run, new, label_column="died").save(tmp_path / "mine.csv")
    assert (tmp_path / "mine.csv").read_text() == "mine"
