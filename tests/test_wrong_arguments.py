"""Arguments of the wrong kind from Python: each is one sentence of an `InputError`, and nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstill
from fedstill import FedAvg, InputError
from fedstill.cli import main

X = np.random.default_rng(0).normal(size=(120, 4))
Y = (X[:, 0] > 0).astype(int)
TASK: dict[str, Any] = {"data": (X, Y), "model": "linear", "clients": 2, "workers": 0}
ONE = FedAvg(rounds=1)


@pytest.fixture(scope="module")
def run() -> fedstill.RunRecord:
    return fedstill.run("fedavg", rounds=1, **TASK)


@pytest.mark.parametrize("label", ["..", ".", "", "a/b", "/tmp/elsewhere", "a b", 3])
def test_a_label_is_the_name_of_a_folder_below(label: Any, tmp_path: Path) -> None:
    """Of ``..`` the runs were beside the folder, where those of another comparison may be."""
    with pytest.raises(InputError, match="is not a label; use letters, digits, - and _"):
        fedstill.compare({label: ONE}, out=tmp_path / "inner" / "runs", **TASK)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("seeds", [2, [], "01", [0, 0], [-1], [True], [0.5], None])
def test_seeds_are_different_whole_numbers(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="seeds are .*; they must be different whole numbers of 0 or more"):
        fedstill.compare([ONE], out=tmp_path / "runs", seeds=seeds, **TASK)
    assert not [*tmp_path.iterdir()]


def test_seeds_of_numpy_are_whole_numbers(tmp_path: Path) -> None:
    runs = fedstill.compare([ONE], out=tmp_path, seeds=np.arange(2), **TASK)  # type: ignore[arg-type]
    assert [record.summary["seed"] for record in runs] == [0, 1]


def test_seeds_that_are_read_once_are_all_run(tmp_path: Path) -> None:
    runs = fedstill.compare([ONE], out=tmp_path, seeds=iter((0, 1)), **TASK)  # type: ignore[arg-type]
    assert [record.summary["seed"] for record in runs] == [0, 1]


@pytest.mark.parametrize("methods", [ONE, "fedavg", None, 3])
def test_several_methods_are_a_list(methods: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give several in a list"):
        fedstill.compare(methods, out=tmp_path / "runs", **TASK)


@pytest.mark.parametrize("front", [fedstill.run, fedstill.compare])
def test_data_that_are_none_are_no_mnist(front: Callable[..., Any], tmp_path: Path) -> None:
    first = "fedavg" if front is fedstill.run else ["fedavg"]
    with pytest.raises(InputError, match="data is None; give a name, a path or records, or leave the argument out"):
        front(first, out=tmp_path / "runs", **{**TASK, "data": None})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", [3, None, ["runs"]])
@pytest.mark.parametrize(
    "call",
    [
        lambda value: fedstill.compare([ONE], out=value, **TASK),
        lambda value: fedstill.sweep({"methods": {"fedavg": None}}, out=value),
        lambda value: fedstill.sweep(value, out="never"),
        lambda value: fedstill.evaluate(value, (X, Y)),
        lambda value: fedstill.publish(value, "never"),
        lambda value: fedstill.load_model(value),
        lambda value: fedstill.read_run(value),
        lambda value: fedstill.attack(value),
    ],
)
def test_a_path_is_a_text_or_a_path(call: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(InputError, match=" is .*; give the path of a folder or a file, as 'runs/first'"):
        call(value)


def test_a_run_s_folder_is_a_path_too() -> None:
    with pytest.raises(InputError, match="out is 3; give the path"):
        fedstill.run("fedavg", out=3, **TASK)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [2, -3.0, float("nan"), "0.4", ".4"])
@pytest.mark.parametrize("what", ["evaluate", "publish"])
def test_a_threshold_is_a_probability(what: str, threshold: Any, run: fedstill.RunRecord, tmp_path: Path) -> None:
    target: Any = (X, Y) if what == "evaluate" else tmp_path / "handed"
    with pytest.raises(InputError, match="threshold is .*; it must be a probability, a number in"):
        getattr(fedstill, what)(run, target, threshold=threshold)
    assert not [*tmp_path.iterdir()]


def test_a_class_of_a_whole_number_may_be_given_as_one(run: fedstill.RunRecord, tmp_path: Path) -> None:
    named, numbered = (fedstill.evaluate(run, (X, Y), positive=one, threshold=0.3) for one in ("1", 1))
    assert named.measures().equals(numbered.measures())
    published = fedstill.publish(run, tmp_path / "handed", positive=np.int64(0), threshold=0.25)  # type: ignore[arg-type]
    assert published["decision"] == {"positive": "0", "threshold": 0.25}
    with pytest.raises(InputError, match="positive is 2; it must be one of two classes: 0, 1"):
        fedstill.evaluate(run, (X, Y), positive=2)


@pytest.mark.parametrize("setting", ["clients", "rounds", "drop"])
def test_a_truth_value_is_no_number(setting: str) -> None:
    with pytest.raises(InputError, match=f"{setting} is True; it must be no truth value"):
        fedstill.run("fedavg", **{**TASK, setting: True})


def test_a_number_is_no_truth_value_s_enemy() -> None:
    assert fedstill.run("fedavg", rounds=np.int64(1), evaluate_uploads=False, **TASK).summary["accuracy"] > 0.5


def test_vectors_are_named_so(run: fedstill.RunRecord) -> None:
    with pytest.raises(InputError, match="vectors are list; they must be a tensor or an array of numbers"):
        run.load_model().predict(X[:2].tolist())


def test_records_of_an_object_are_asked_for_again(tmp_path: Path) -> None:
    kept = fedstill.run("fedavg", out=tmp_path / "run", rounds=1, **TASK)
    with pytest.raises(InputError, match="records that a program gave as an object.* give them again as data="):
        fedstill.attack(kept, shadows=4)
    assert fedstill.attack(kept, shadows=4, data=(X, Y), progress=False)["shadows"] == 4


def test_the_plan_s_penalty_has_the_limit_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="penalty is 0.005; it must be greater than or equal to 0.01"):
        fedstill.plan(epsilon=1.0, penalty=0.005)
    with pytest.raises(SystemExit) as ended:
        main(["privacy", "plan", "--epsilon", "1", "--penalty", "0.005"])
    assert ended.value.code == 2
    assert "--penalty is 0.005; it must be greater than or equal to 0.01" in capsys.readouterr().err


def test_data_show_takes_the_column_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{a:.3f},{b}\n" for a, b in zip(X[:, 0], Y, strict=True))
    (tmp_path / "table.csv").write_text(f"age,y\n{rows}")
    main(["data", "show", str(tmp_path / "table.csv"), "--clients", "2", "--label", "y"])
    assert "2 clients, 96 records" in " ".join(capsys.readouterr().out.split())
