"""fedstill: federated learning by distillation.

``__init__.pyi`` lists the public names. Each is imported when it is first used, so ``import fedstill`` is fast.
"""

import ast as _ast
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "1.0.0"

_PLACES = {
    alias.asname or alias.name: f"{node.module}:{alias.name}"
    for node in _ast.parse(_Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, _ast.ImportFrom)
    for alias in node.names
}
"""Public name -> ``module:name``."""

__all__ = sorted(_PLACES)  # noqa: PLE0605


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fedstill' has no attribute '{name}'")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(_import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
