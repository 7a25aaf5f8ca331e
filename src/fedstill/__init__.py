"""fedstill: federated learning by distillation.

``__init__.pyi`` lists the public names. Each is imported when it is first used, so ``import fedstill`` is fast.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

PLACES = {
    alias.asname or alias.name: f"{node.module}:{alias.name}"
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> ``module:name``."""

__all__ = sorted(PLACES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'fedstill' has no attribute '{name}'")
    module, _, attribute = PLACES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
