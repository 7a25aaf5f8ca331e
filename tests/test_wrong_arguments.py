"""Arguments of the wrong kind from Python: each is one sentence of an `InputError`, and nothing is written."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NewType

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import BeforeValidator

import fedstill
from fedstill import FedAvg, InputError
from fedstill.base.settings import Settings
from fedstill.cli import main

X = np.random.default_rng(0).normal(size=(120, 4))
Y = (X[:, 0] > 0).astype(int)
TABLE = pd.DataFrame(X, columns=[*"abcd"])
TASK: dict[str, Any] = {"data": (X, Y), "model": "linear", "clients": 2, "workers": 0}
ONE = FedAvg(rounds=1)


@pytest.fixture(scope="module")
def run() -> fedstill.RunRecord:
    return fedstill.run("fedavg", rounds=1, **TASK)


@pytest.mark.parametrize("label", ["..", ".", "", "a/b", "/tmp/elsewhere", "a b", 300 * "a", 3])
def test_a_label_is_the_name_of_a_folder_below(label: Any, tmp_path: Path) -> None:
    """Of ``..`` the runs were beside the folder, where those of another comparison may be."""
    with pytest.raises(InputError, match="is not a label; use letters, digits, - and _"):
        fedstill.compare({label: ONE}, out=tmp_path / "inner" / "runs", **TASK)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("seeds", [2, [], "01", b"\x00\x01", [0, 0], [-1], [True], [0.5], None, np.array(3), TABLE])
def test_seeds_are_different_whole_numbers(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^seeds are .{1,60}; they must be different whole numbers of 0 or more"):
        fedstill.compare([ONE], out=tmp_path / "runs", seeds=seeds, **TASK)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "seeds", [np.arange(2), torch.arange(2), {0, 1}, pd.Series([0, 1])], ids=lambda s: type(s).__name__
)
def test_seeds_are_those_of_any_array_or_set(seeds: Any, tmp_path: Path) -> None:
    runs = fedstill.compare([ONE], out=tmp_path, seeds=seeds, **TASK)
    assert [record.summary["seed"] for record in runs] == [0, 1]


def test_seeds_that_are_read_once_are_all_run(tmp_path: Path) -> None:
    runs = fedstill.compare([ONE], out=tmp_path, seeds=iter((0, 1)), **TASK)  # type: ignore[arg-type]
    assert [record.summary["seed"] for record in runs] == [0, 1]


@pytest.mark.parametrize("methods", [ONE, "fedavg", None, 3])
def test_several_methods_are_a_list(methods: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give several in a list"):
        fedstill.compare(methods, out=tmp_path / "runs", **TASK)


@pytest.mark.parametrize("methods", [{"a": ONE}.values(), {ONE}, iter([ONE])], ids=lambda m: type(m).__name__)
def test_methods_are_those_of_any_iterable(methods: Any, tmp_path: Path) -> None:
    assert len(fedstill.compare(methods, out=tmp_path, **TASK)) == 1


@pytest.mark.parametrize("method", [3, ["fedavg"], Path("mine.py"), print, fedstill.Method])
def test_a_method_is_a_name_a_class_or_an_object(method: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^the method is .*; give a method's name, class or object"):
        fedstill.compare({"a": method}, out=tmp_path / "x", **TASK)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("front", [fedstill.run, fedstill.compare])
def test_data_that_are_none_are_no_mnist(front: Callable[..., Any], tmp_path: Path) -> None:
    first = "fedavg" if front is fedstill.run else ["fedavg"]
    with pytest.raises(InputError, match="data is None; give a name, a path or records, or leave the argument out"):
        front(first, out=tmp_path / "runs", **{**TASK, "data": None})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", [3, None, ["runs"], "runs/\0", TABLE], ids=lambda value: type(value).__name__)
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
        lambda value: fedstill.find_runs(value),
        lambda value: fedstill.attack(value),
    ],
)
def test_a_path_is_a_text_or_a_path(call: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(InputError, match="^[a-z ]+ is .{1,60}; give the path of a folder or a file, as 'runs/first'$"):
        call(value)


def test_a_run_s_folder_is_a_path_too() -> None:
    with pytest.raises(InputError, match="out is 3; give the path"):
        fedstill.run("fedavg", out=3, **TASK)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="out is ''; give the path of a folder or a file"):
        fedstill.run("fedavg", out="", **TASK)


@pytest.mark.parametrize("threshold", [2, -3.0, float("nan"), "0.4", ".4", True, np.bool_(True)])
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
    for threshold in (torch.tensor(0.3), np.array(0.3), Decimal("0.3")):
        same = fedstill.evaluate(run, (X, Y), positive=1, threshold=threshold)  # type: ignore[arg-type]
        assert same.measures().equals(named.measures())
    with pytest.raises(InputError, match="positive is 2; it must be one of two classes: 0, 1"):
        fedstill.evaluate(run, (X, Y), positive=2)


@pytest.mark.parametrize("setting", ["clients", "rounds", "drop"])
@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)], ids=lambda value: type(value).__name__)
def test_a_truth_value_is_no_number(setting: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{setting} is .*; it must be a number, and no truth value"):
        fedstill.run("fedavg", **{**TASK, setting: value})


def test_parts_of_a_list_are_no_truth_values_either() -> None:
    with pytest.raises(ValueError, match="no truth value"):
        FedAvg(local={"milestones": (True,)})  # type: ignore[arg-type]
    for optional in ({"milestones": (1, True)}, {"milestones": [True]}):
        with pytest.raises(ValueError, match="no truth value"):
            Own(**optional)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="^measure is True; .*accuracy"):  # a text has a limit of its own
        fedstill.run("fedavg", **{**TASK, "measure": True})


Flag = NewType("Flag", bool)


class Own(Settings):
    """Settings of somebody's own, each of which may be a truth value."""

    flag: Flag = Flag(True)
    either: int | bool = True
    anything: Any = True
    some: dict[str, bool] | None = None
    milestones: tuple[int, ...] | None = None
    converted: Annotated[int, BeforeValidator(lambda value: 7 if value is True else value)] = 1


def test_a_truth_value_stands_where_it_may() -> None:
    made = Own(flag=Flag(False), either=True, some={"a": True}, converted=True)
    assert (made.flag, made.either, made.anything, made.some, made.converted) == (False, True, True, {"a": True}, 7)


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
    for folder in (tmp_path, tmp_path / "nowhere"):  # nothing there is damaged, and nothing should be deleted
        with pytest.raises(InputError, match="there is no folder|name one of them|is not the folder of a run"):
            fedstill.attack(folder, data=(X, Y))


def test_the_plan_s_penalty_has_the_limit_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="penalty is 0.005; it must be greater than or equal to 0.01"):
        fedstill.plan(epsilon=1.0, penalty=0.005)
    with pytest.raises(SystemExit) as ended:
        main(["privacy", "plan", "--epsilon", "1", "--penalty", "0.005"])
    assert ended.value.code == 2
    assert "--penalty is 0.005; it must be greater than or equal to 0.01" in capsys.readouterr().err


def test_none_in_place_of_a_number_is_understood_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run", "afl", "--data", "digits", "--public", "held=100", "--extractor.pretrain", "none", "--dry-run"]
    for word in ("None", "none"):
        main([*line, "--epsilon", word])
        assert "privacy: none" in capsys.readouterr().out
    file = tmp_path / "own.yaml"
    file.write_text("method: afl\ndata: digits\nafl: {epsilon: None}\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file)])
    assert ended.value.code == 2
    assert "epsilon is 'None'; it must be a number, or None (null in YAML) where it may be" in capsys.readouterr().err


def test_data_show_takes_the_column_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{a:.3f},{b}\n" for a, b in zip(X[:, 0], Y, strict=True))
    (tmp_path / "table.csv").write_text(f"age,y\n{rows}")
    main(["data", "show", str(tmp_path / "table.csv"), "--clients", "2", "--label", "y"])
    assert "2 clients, 96 records" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": 3}, "gate is 3; give the path"),
        ({"shape": 3}, r"shape is 3; give channels, height and width, as \(3, 224, 224\)"),
        ({"shape": "3x4"}, "shape is '3x4'; give"),
        ({"shape": ""}, "shape is ''; give"),
        ({"shape": (True, 8, 8)}, r"shape is \(True, 8, 8\); give"),
        ({"shape": (1.5, 2, 2)}, r"shape is \(1.5, 2, 2\); give"),
    ],
)
def test_what_publish_takes(settings: dict[str, Any], message: str, run: fedstill.RunRecord, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        fedstill.publish(run, tmp_path / "out", **settings)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("watcher", [3, print, fedstill.Watcher])
def test_a_watcher_is_an_object_of_its_class(watcher: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^the watcher is .*; give an object of a class from fedstill.Watcher"):
        fedstill.run(ONE, out=tmp_path / "run", watcher=watcher, **TASK)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "words",
    [
        "run fedavg --data digits --model linear --out ~nobody-of-this-name/r",
        "run fedavg --data ~nobody-of-this-name/d --out r",
        "run fedavg --data digits --features hf:~nobody-of-this-name/m --out r",
        "data show ~nobody-of-this-name/d",
        "data schema ~nobody-of-this-name/d.csv",
    ],
)
def test_the_home_of_nobody_is_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    said = "can't be found, as no home directory is known for '~nobody-of-this-name'; write it in full"
    assert ended.value.code == 2 and said in capsys.readouterr().err
