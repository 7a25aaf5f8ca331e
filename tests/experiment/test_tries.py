"""A named measure, class weights, and tries on validation records: what they give, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.functional import cross_entropy

import fedstill
from fedstill.cli import main
from fedstill.methods.parts.class_weights import balanced, weighted
from fedstill.report.record import RunRecord
from fedstill.runs.folder import RunFolder

TASK = ["--model", "linear", "--clients", "3", "--workers", "0", "--quiet"]


def ill(folder: Path, flipped: bool = False) -> Path:
    """Records of two classes that overlap, one in ten sick; ``flipped`` has the test labels the other way round."""
    rng = np.random.default_rng(0)
    y = (rng.uniform(size=900) < 0.1).astype(int)
    x = (rng.normal(size=(900, 3)) + 1.2 * y[:, None]).astype(np.float32)
    place = folder / f"ill{flipped}.npz"
    test = y[600:] != flipped
    np.savez(place, x_train=x[:600], y_train=y[:600], x_test=x[600:], y_test=test.astype(int))
    return place


def given(folder: Path, *flags: str, method: str = "fedavg") -> list[str]:
    data = ["--data", str(ill(folder)), "--mean", "0", "--std", "1", "--class-names", "well", "sick"]
    return ["run", method, *data, *TASK, *flags]


def ran(folder: Path, name: str, method: str = "fedavg", flipped: bool = False, **settings: Any) -> RunRecord:
    """The same from Python, which writes no page."""
    task = {"mean": (0.0,), "std": (1.0,), "class_names": ("well", "sick"), "model": "linear", "clients": 3}
    more: dict[str, Any] = {**task, "workers": 0, **settings}
    return fedstill.run(method, data=str(ill(folder, flipped)), out=folder / name, **more)


def test_the_measure_is_reported_first_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(tmp_path, "once", rounds=1, local={"lr": 1e-4}, measure="log-loss")
    run = ran(tmp_path, "often", rounds=20, local={"lr": 0.1}, measure="log-loss")
    with np.load(tmp_path / "illFalse.npz") as data:
        sick = run.load_model().predict_proba(data["x_test"])[:, 1]
        true = data["y_test"]
    loss = -np.log(np.where(true == 1, sick, 1 - sick)).mean()
    assert run["measure"] == {"name": "log-loss", "value": pytest.approx(loss, abs=1e-5)}
    capsys.readouterr()
    main(["report", str(tmp_path), "--out", str(tmp_path / "both")])
    shown = capsys.readouterr().out
    heading = next(line.split() for line in shown.splitlines() if "method" in line)
    assert heading[heading.index("log-loss") + 1] == "accuracy,"
    rows = json.loads((tmp_path / "both" / "table.json").read_text())["rows"]
    assert [row["measured"] for row in rows] == sorted(row["measured"] for row in rows)  # less is better
    assert "Ranked by log-loss." in shown and "has log-loss" in (tmp_path / "both" / "report.html").read_text()


def test_clients_that_judge_give_the_measures_of_counts(tmp_path: Path) -> None:
    run = ran(tmp_path, "run", "fedavg-ft", local_test=0.3, measure="sensitivity", local={"lr": 0.3})
    assert run.confusion is not None
    assert run["measure"]["value"] == pytest.approx(run.confusion[1, 1] / run.confusion[1].sum())


def test_tries_see_no_test_record_and_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once: dict[str, Any] = {"rounds": 2, "local": {"epochs": 1}}
    ran(tmp_path, "True", flipped=True, tune=True, measure="auc", **once)
    words = "--rounds 2 --local.epochs 1 --tune --measure auc --out"
    main(given(tmp_path, *words.split(), str(tmp_path / "False")))
    found = [RunFolder(tmp_path / name).read_tries() for name in ("False", "True")]
    assert found[0]["tries"] == found[1]["tries"] and found[0]["chosen"] == found[1]["chosen"]
    values = [one["value"] for one in found[0]["tries"]]
    assert len(values) == 6 and found[0]["tries"][int(np.argmax(values))]["settings"] == found[0]["chosen"]
    run = fedstill.read_run(tmp_path / "False")
    chosen = found[0]["chosen"]  # a round of 180 records has three steps, so more passes are tried, not more rounds
    assert {tuple(one["settings"]) for one in found[0]["tries"]} == {("local.lr", "local.epochs")}
    assert {one["settings"]["local.epochs"] for one in found[0]["tries"]} == {1, None}
    assert run.config["method"]["local"]["epochs"] == chosen["local.epochs"]
    assert run["judged_on"] == "test records" and run.counts is not None and run.counts.sum() == 600
    with np.load(tmp_path / "illFalse.npz") as data:
        sick = run.load_model().predict_proba(data["x_test"])[:, 1]
        assert run["measure"]["value"] == pytest.approx(roc_auc_score(data["y_test"], sick), abs=1e-6)
    said = "settings were chosen by auc on validation records (10 % of the training records) in 6 tries: local.lr"
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "False" / "report.html").read_text()
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "False" / "tries").glob("*/summary.json")}
    ran(tmp_path, "False", tune=True, measure="auc", **once)  # only read
    assert before == {file: file.stat().st_mtime_ns for file in before} and len(before) == 6
    with pytest.raises(SystemExit):
        main([*given(tmp_path, "--rounds", "3", "--local.epochs", "1", "--tune"), "--out", str(tmp_path / "False")])
    assert "has tries of a run with measure = auc, not None" in capsys.readouterr().err
    assert [*fedstill.find_runs(tmp_path / "False")] == [tmp_path / "False"]


def test_tries_that_stopped_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstill.experiment import tries

    run, done = tries.engine.run, list[str]()

    def stopping(job: Any, **more: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job.out.name)
        return run(job, **more)

    settings: dict[str, Any] = {"model": "linear", "clients": 2, "limit": 100, "rounds": 1, "workers": 0, "tune": True}
    settings["local"] = {"epochs": 1}
    monkeypatch.setattr(tries.engine, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedavg", data="digits", out=tmp_path / "run", **settings)
    monkeypatch.setattr(tries.engine, "run", run)
    first = (tmp_path / "run/tries/0/summary.json").stat().st_mtime_ns
    found = fedstill.run("fedavg", data="digits", out=tmp_path / "run", **settings)
    assert found.tries is not None and len(found.tries["tries"]) == 6 and found.finished
    assert (tmp_path / "run/tries/0/summary.json").stat().st_mtime_ns == first


@pytest.mark.parametrize(
    ("method", "flags", "sentence"),
    [
        ("fedavg", "--measure rmse", "measure is 'rmse', which is for a target that is a number"),
        ("fedavg", "--measure auc --local-test 0.2", "measure is 'auc', which needs probabilities, but clients that"),
        ("fedavg", "--measure sensitivity --data digits", "which is of one class of two, but there are 10"),
        ("afl", "--tune --public noise=100", "afl releases with noise, and --tune would do so once for each"),
        ("ldp-fedavg", "--tune", "ldp-fedavg releases with noise"),
        ("fedavg", "--tune --scale private:1", "--scale private:1 releases with noise"),
        ("gh-ofl", "--tune --epsilon None", "GHOFL has no rate, rounds or ridge for --tune to try"),
        ("fedavg", "--tune --dry-run", "--dry-run estimates one run, and --tune makes several"),
        ("dp-fl", "--class-weights balanced", "there is no flag --class-weights here; FedAvg and its family have it"),
        ("fedavg", "--class-weights ill:2", "class_weights has 'ill', which is no class of the task; the classes are"),
        ("fedavg", "--class-weights sick:-1", "it must be balanced, or positive numbers by name of a class"),
        ("fedavg", "--class-weights sick:1,sick:2", "it must be balanced, or positive numbers by name of a class"),
    ],
)
def test_the_impossible_is_one_sentence(
    method: str, flags: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = given(tmp_path, "--out", str(tmp_path / "out"), method=method)
    if "digits" in flags:
        words = [word for word in words if word not in ("--class-names", "well", "sick")]
    with pytest.raises(SystemExit) as stop:
        main([*words, *flags.split()])
    assert stop.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    y = np.repeat([0, 1, 3], [50, 5, 20])
    weights = balanced(torch.bincount(torch.from_numpy(y), minlength=4))
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=y)
    assert np.allclose(weights[[0, 1, 3]], expected) and torch.isfinite(balanced(torch.zeros(3))).all()
    logits, true = torch.randn(75, 4), torch.from_numpy(y)
    found = weighted(weights)(logits, torch.empty(0), true)
    assert float(found) == pytest.approx(
        float(cross_entropy(logits, true, weight=weights)), rel=1e-5
    )  # weights sum to n


def test_weights_find_the_rare_class(tmp_path: Path) -> None:
    steps: dict[str, Any] = {"rounds": 20, "local": {"lr": 0.1}, "measure": "balanced-accuracy"}
    weights = {"plain": None, "own": "balanced", "named": "sick:9"}
    runs = {name: ran(tmp_path, name, class_weights=given, **steps) for name, given in weights.items()}
    plain, own, named = (run["measure"]["value"] for run in runs.values())
    assert min(own, named) > plain + 0.1
    assert "class_weights" not in json.loads((tmp_path / "plain/config.json").read_text())["method"]
    assert json.loads((tmp_path / "named/config.json").read_text())["method"]["class_weights"] == "sick:9"
    assert fedstill.FedAvg(class_weights={"sick": 9}) == fedstill.FedAvg(class_weights="sick:9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the class 'a,b' has a comma"):
        fedstill.FedAvg(class_weights={"a,b": 9})  # type: ignore[arg-type]


def test_a_clipped_update_with_weights_costs_what_it_does_without(tmp_path: Path) -> None:
    """The guarantee is that of the clipped update, and a client without records, or of one class, stops nothing."""
    settings: dict[str, Any] = {"model": "linear", "clients": 10, "limit": 90, "workers": 0}
    settings["partition"] = "classes:1"
    plain, weighed = (
        fedstill.run("ldp-fedavg", data="digits", out=tmp_path / str(weights), class_weights=weights, **settings)
        for weights in (None, "balanced")
    )
    assert plain.guarantee.holds and plain.guarantee == weighed.guarantee
