"""What an accuracy hides is said in tables, pages and cards; every setting that defines a task is in its words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.experiment.config import FREE, Experiment
from fedstill.report import caveats, export, tables
from fedstill.report.groups import group, setting_words
from fedstill.report.record import RunRecord, read_run
from fedstill.runs.folder import RunFolder

NAMES = ("well", "sick", "rare")


def name(label: int) -> str:
    return NAMES[label]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[list[int]], str], RunRecord]:
    """A real run's folder with another confusion matrix."""
    place = tmp_path_factory.mktemp("runs")
    settings: dict[str, Any] = {
        "data": "digits",
        "model": "linear",
        "clients": 2,
        "rounds": 1,
        "workers": 0,
        "limit": 200,
    }

    def made(confusion: list[list[int]], folder: str, method: str = "fedavg", **more: Any) -> RunRecord:
        run = fedstill.run(method, out=place / folder, **{**settings, **more, "workers": 0})
        matrix = np.array(confusion)
        (place / folder / "evaluation.json").write_text(json.dumps({"confusion": matrix.tolist()}))
        summary = json.loads((place / folder / "summary.json").read_text())
        summary["accuracy"] = float(np.trace(matrix) / matrix.sum())
        summary["files"] = RunFolder(place / folder).digests()
        (place / folder / "summary.json").write_text(json.dumps(summary))
        partition = json.loads((place / folder / "partition.json").read_text())
        partition |= {
            "class_names": NAMES[: len(matrix)],
            "counts": [row[: len(matrix)] for row in partition["counts"]],
        }
        (place / folder / "partition.json").write_text(json.dumps(partition))
        return read_run(run.folder)

    return made


@pytest.mark.parametrize(
    ("right", "number", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (85, 100, 0.7672, 0.9069), (0, 0, 0, 1)],
)
def test_wilsons_interval_is_that_of_the_textbook(right: int, number: int, low: float, high: float) -> None:
    """Numbers of statsmodels' proportion_confint(method="wilson")."""
    assert caveats.interval(right, number) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("confusion", "sentences"),
    [
        (
            [[166, 0], [14, 0]],
            ["never predicts the class sick, of which there are 14 test", "always saying well (92.2 %"],
        ),
        ([[90, 10], [10, 90]], []),
        ([[97, 1], [1, 1]], ["always saying well (98.0 %", "fewer than 5 test records are of the class sick"]),
        ([[50, 50], [50, 50]], ["always saying well (50.0 %"]),
        (
            [[50, 0, 1], [0, 50, 0], [0, 0, 0]],
            ["no test record is of the class rare, so nothing is known of its recall"],
        ),
        ([[50, 1], [0, 0]], ["all test records are of one class, well, so accuracy is its recall"]),
        ([[10, 0], [0, 10]], []),
        (
            [[0, 40, 0], [0, 30, 0], [0, 30, 0]],
            ["predicts one class, sick, for all 100 test records, which is no result", "always saying well (40.0 %"],
        ),
    ],
)
def test_what_an_accuracy_hides_is_said(confusion: list[list[int]], sentences: list[str]) -> None:
    matrix = np.array(confusion)
    found = caveats.of_model(matrix, name) + caveats.of_test(matrix, name)
    assert len(found) == len(sentences)
    for sentence, wanted in zip(found, sentences, strict=True):
        assert wanted in sentence


def test_it_is_said_in_every_place_once(finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [finished([[166, 0], [14, 0]], "a"), finished([[166, 0], [14, 0]], "b", method="fedprox")]
    sentence = "fedavg, fedprox: never predicts the class sick, of which there are 14 test records."
    (task,) = group(records)
    assert tables.remarks(task)[0] == sentence
    assert "balanced, %" in tables.headings(task) and "Balanced: mean recall" in tables.caption(task)
    for text in (export.markdown_text(records), export.latex_text(records)):
        assert text.count(sentence) == 1 and "50.00" in text
    fedstill.write_report(records, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count(sentence) == 1


def test_seeds_that_differ_are_counted(finished: Any) -> None:
    records = [finished([[166, 0], [14, 0]], "s0"), finished([[160, 6], [4, 10]], "s1", seed=1)]
    assert (
        "fedavg (1 of 2 seeds): never predicts the class sick, of which there are 14 test records."
        in tables.remarks(group(records)[0])
    )


def test_rows_with_and_without_privacy_are_in_two_blocks(finished: Any) -> None:
    right = [[90, 10], [10, 90]]
    private = finished(right, "p", method="ldp-fedavg", epsilon=1.0, public="noise=50", delta=1e-4)
    (task,) = group([finished(right, "q", public="noise=50", delta=1e-4), private])
    assert [heading for heading, _ in tables.blocks(task)] == ["without privacy", "with differential privacy"]
    text = export.markdown_text(task.runs)
    assert (
        text.index("*without privacy*")
        < text.index("| fedavg")
        < text.index("*with differential privacy*")
        < text.index("| ldp-fedavg")
    )
    assert "\\emph{with differential privacy}" in export.latex_text(task.runs)
    assert [heading for heading, _ in tables.blocks(group([private])[0])] == [""]


def test_the_page_tells_what_each_split_took(finished: Any, tmp_path: Path) -> None:
    fedstill.write_report([finished([[90, 10], [10, 90]], "o")], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Test: 359 records, a fifth of each class, held out of the train records." in page


# Words of a task -----------------------------------------------------------------------------------------------------


def test_every_setting_has_words_or_defines_no_task() -> None:
    fields = set(Experiment.model_fields)
    assert caveats.said() | caveats.UNSAID == fields, fields ^ (caveats.said() | caveats.UNSAID)
    assert not caveats.said() & caveats.UNSAID and FREE <= caveats.UNSAID


OTHER: dict[str, Any] = {
    "size": 16, "label_column": "died", "schema_file": "t.toml", "group": "patient", "group_bound": 3,
    "features": "scattering", "mean": (0.5,), "std": (0.25,), "scale": "private:1",
    "num_classes": 12, "class_names": ("a", "b"), "models": ("linear", "mlp"), "limit": 3000, "validation": 0.1,
    "local_test": 0.25, "drop": 0.2, "slow": 0.1, "public": "noise=500", "delta": 1e-6, "budget": 2.0,
    "noise": "entropy", "sums": "masked:least=5", "measure": "auc",
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER)
def test_a_setting_that_defines_the_task_is_in_its_words(key: str, finished: Any) -> None:
    plain = finished([[90, 10], [10, 90]], "w")
    before = setting_words(plain)
    assert "200 training records" in before
    plain.config["experiment"][key] = json.loads(Experiment(**{key: OTHER[key]}).model_dump_json())[key]
    assert len(setting_words(plain)) > len(before) or key == "limit"


def test_all_settings_with_words_are_tried() -> None:
    assert OTHER.keys() == caveats.said()


def with_rounds(run: RunRecord, **series: list[float]) -> RunRecord:
    """The run with other numbers of its rounds."""
    lines = ({name: values[i] for name, values in series.items()} for i in range(len(next(iter(series.values())))))
    return replace(run, metrics=tuple({"round": i, **line} for i, line in enumerate(lines, 1)))


FLAT = [0.5] * 20


def test_a_model_that_still_learns_says_so(finished: Callable[..., RunRecord]) -> None:
    run = finished([[400, 100], [100, 400]], "learns")
    learned = lambda **series: caveats.of_training(with_rounds(run, **series))  # noqa: E731
    (text,) = learned(accuracy=[i / 25 for i in range(20)], log_loss=FLAT)
    assert text.startswith("accuracy still rises in the last rounds, so more rounds (--rounds)")
    (text,) = learned(accuracy=FLAT, log_loss=[2 * 0.96**i for i in range(20)])
    assert text.startswith("the loss still falls in the last rounds")
    assert learned(accuracy=FLAT, log_loss=FLAT) == []
    assert learned(accuracy=[0.5 + i / 2000 for i in range(20)], log_loss=[0.5 - i / 2000 for i in range(20)]) == []
    assert learned(accuracy=[0.8 - i / 50 for i in range(20)], log_loss=[1.1**i for i in range(20)]) == []
    assert learned(accuracy=[0.5]) == [] == learned(accuracy=[0.1, 0.105])
    assert len(learned(accuracy=[0.1, 0.6])) == 1  # of two rounds
    few = finished([[4, 1], [1, 4]], "few")
    assert not any("rises" in text for text in caveats.of_training(with_rounds(few, accuracy=[0.5, 0.6])))  # chance


def test_a_constant_after_few_steps_names_their_number_and_the_remedy(finished: Callable[..., RunRecord]) -> None:
    """Sixty-seven small clients with FedAvg's defaults print the share of the largest class without a word."""
    run = finished([[72, 0], [28, 0]], "constant", local={"epochs": 2, "batch_size": 30}, rounds=3)
    steps = caveats.client_steps(run)
    assert run.counts is not None and steps == 3 * 2 * -(-int(np.median(run.counts.sum(1))) // 30)
    free = finished([[72, 0], [28, 0]], "free", local={"epochs": None, "batch_size": 30}, rounds=3)
    assert steps == 6 and caveats.client_steps(free) == 3 * 10
    text = " ".join(caveats.of_run(run))
    assert "accuracy is not above that of always saying well (72.0 % of the test records)" in text
    assert f"a client took {steps} steps in all (rounds x epochs x batches of records), which train little" in text
    assert "--rounds" in text and "--local.batch-size" in text
    many = replace(run, config={"method": {**run.config["method"], "rounds": 400}})
    assert "--tune" in " ".join(caveats.of_training(many)) and "steps in all" not in " ".join(caveats.of_training(many))
    private = replace(run, guarantee=replace(run.guarantee, holds=True, epsilon=0.1))
    assert "the noise may be too large for so few records" in " ".join(caveats.of_training(private))
    assert "or, for a method that only adds up, masked sums" in " ".join(caveats.of_training(private))
    task = {**private.config["experiment"], "sums": "masked:least=3,helpers=4"}
    masked = replace(private, config={**private.config, "experiment": task})
    assert "a smaller noise multiplier) make it smaller" in " ".join(caveats.of_training(masked))
    assert "steps in all" not in " ".join(caveats.of_run(finished([[70, 2], [2, 26]], "good")))
    assert caveats.client_steps(replace(run, config={"method": {"epsilon": None}})) is None  # of one upload


def test_the_log_loss_of_a_round_is_that_of_its_model(tmp_path: Path) -> None:
    settings: Any = {"data": "digits", "model": "linear", "clients": 2, "rounds": 2, "workers": 0, "limit": 200}
    run = fedstill.run("fedavg", out=tmp_path / "run", **settings)
    *_, last = run.metrics
    task = Experiment(**{name: settings[name] for name in ("data", "model", "clients", "limit")})
    test = fedstill.load_data(task.data).test
    with torch.no_grad():
        logits = run.load_model().network(test.inputs(slice(None)))
    assert last["log_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, test.labels)), rel=1e-5)
