"""What the simulation takes from Flower, of which Flower promises nothing."""

import ast
import inspect
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from flwr.simulation import app  # noqa: E402
from flwr.simulation.run_simulation import _run_simulation  # noqa: E402

from fedstill.engines.flower import simulation  # noqa: E402


def keywords(tree: ast.AST) -> list[set[str]]:
    """The keywords of each call of Flower's function."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(call.func.id, call) for call in calls if isinstance(call.func, ast.Name)]
    return [{str(k.arg) for k in call.keywords} for name, call in names if name == "_run_simulation"]


def test_the_program_of_flwr_run_calls_the_function_that_the_simulation_calls() -> None:
    (theirs,) = keywords(ast.parse(textwrap.dedent(inspect.getsource(app.run_simulation_process))))
    (ours,) = keywords(ast.parse(inspect.getsource(simulation)))
    assert app._run_simulation is _run_simulation
    parameters = inspect.signature(_run_simulation).parameters
    assert ours <= parameters.keys()
    assert {name for name, p in parameters.items() if p.default is p.empty} <= ours
    assert {"num_supernodes", "backend_config", "exit_event"} <= ours & theirs


@pytest.mark.slow
def test_nothing_in_fedstill_uses_the_function_that_flower_will_remove() -> None:
    root = Path(simulation.__file__).parents[2]
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [n.name for n in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not (isinstance(node, ast.ImportFrom) and node.module == "flwr.simulation" and names), file


def test_the_version_of_flower_is_one_that_the_pin_admits() -> None:
    pins = [pin for pin in map(Requirement, metadata.requires("fedstill") or []) if pin.name == "flwr"]
    assert pins
    for pin in pins:
        assert pin.specifier.contains(metadata.version("flwr")), pin
        assert not pin.specifier.contains("1.43"), "the parts of Flower that it does not promise were not tried there"
