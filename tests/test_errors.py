"""Errors have one base, and the library neither prints nor exits."""

import ast
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstill
from fedstill import FedAvg, FedstillError, InputError, TooFewReplies
from fedstill.base.errors import front_door
from fedstill.protocol import Federation

ROOT = Path(fedstill.__file__).parent
TASK: dict[str, Any] = {"data": "digits", "clients": 2, "limit": 60, "model": "convnet:width=8,depth=2", "workers": 0}


@cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.slow
def test_every_error_of_fedstill_has_the_base() -> None:
    kinds: dict[str, set[str]] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                kinds[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    builtin = {"Exception", "ValueError", "RuntimeError", "OSError", "KeyError", "TypeError"}
    errors = {name for name, bases in kinds.items() if bases & (builtin | {"FedstillError", "InputError"})}
    without = {name for name in errors if not kinds[name] & {"FedstillError", "InputError"}} - {"FedstillError"}
    assert without == set()
    assert {"Damaged", "Taken", "TooFewReplies", "BudgetExceeded"} <= errors


def test_the_library_neither_prints_nor_exits() -> None:
    """Only the command line does, and the programs that run a server's part and a site's node."""
    found = {
        f"{place}: {ast.unparse(node.func)}"
        for place, tree in trees().items()
        if not place.startswith("cli/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "exit", "quit", "SystemExit")
    }
    assert found == {"sites/server/serve.py: print", "engines/flower/supernode.py: print"}


def test_all_loggers_are_below_fedstill() -> None:
    for place, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
                name = ast.unparse(node.args[0]) if node.args else ""
                silencing = place in ("engines/flower/simulation.py", "report/programs.py")  # another library's
                assert name in ("__name__", "'fedstill'") or silencing, (place, name)


def test_bad_arguments_raise_the_base_class_and_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    trained = fedstill.Trained(nn.Flatten(), (1, 8, 8), ("no", "yes"), fedstill.Normalisation((0.0,), (1.0,)))
    calls = (
        lambda: fedstill.run("fedavg", **TASK, rounds=-1),
        lambda: fedstill.run("fedagv", **TASK),
        lambda: fedstill.run("fedavg", data="nosuch/../x", out=tmp_path / "run"),
        lambda: fedstill.run(FedAvg(), **{**TASK, "model": "nosuch"}, out=tmp_path / "run"),
        lambda: fedstill.Job(fedstill.Experiment(), "nosuch", tmp_path),
        lambda: fedstill.read_run(tmp_path / "nowhere"),
        lambda: fedstill.find_runs(tmp_path),
        lambda: fedstill.load_model(tmp_path / "file"),
        lambda: fedstill.write_report([], tmp_path / "x.html"),
        lambda: fedstill.load_data("nosuch"),
        lambda: fedstill.from_torch((torch.zeros(0, 8, 8), torch.zeros(0))),
        lambda: trained(torch.zeros(3, 5)),
        lambda: fedstill.Job(fedstill.Experiment(), "fedavg", tmp_path).replace(method="nosuch"),
    )
    for call in calls:
        with pytest.raises(InputError) as error:
            call()
        assert isinstance(error.value, FedstillError) and isinstance(error.value, ValueError)
        assert str(error.value) and "\n" not in str(error.value)


class Own(FedAvg):
    def server(self, fed: Federation) -> nn.Module:
        raise ValueError("a fault of my own")


def test_errors_of_code_of_ones_own_pass_as_they_are() -> None:
    with pytest.raises(ValueError, match="a fault of my own") as error:
        fedstill.run(Own(), **TASK)
    assert type(error.value) is ValueError


def test_other_errors_pass_the_front_door_and_its_name_and_trace_stay() -> None:
    @front_door
    def through(value: str) -> None:
        """Fail."""
        fedstill.Experiment(clients=value)  # type: ignore[arg-type]

    with pytest.raises(ValueError) as error:
        through("ten")
    assert not isinstance(error.value, FedstillError)  # pydantic's own
    assert (through.__name__, through.__doc__) == ("through", "Fail.")
    with pytest.raises(InputError) as refused:
        fedstill.read_run("nowhere")
    assert refused.traceback[-1].path.name == "folder.py"  # where it was raised
    assert issubclass(TooFewReplies, FedstillError) and issubclass(TooFewReplies, RuntimeError)


def test_the_logger_says_what_a_run_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedstill"):
        fedstill.run("fedavg", **TASK, rounds=1)
    assert any(re.search(r"fedavg, seed 0: round 1 of 1", line) for line in caplog.messages)
