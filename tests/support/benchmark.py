"""Loads a benchmark, whose parts tests use."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(name: str) -> ModuleType:
    """benchmarks/NAME.py, or the folder benchmarks/NAME."""
    place = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    place = place if place.exists() else place.with_suffix("") / "__main__.py"
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", place)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    before = [*sys.path]
    sys.path.append(str(place.parent))  # for what benchmarks share
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before  # without what it added itself
    return module
