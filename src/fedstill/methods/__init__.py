"""The methods, one file each."""

from importlib import import_module

import fedstill
from fedstill.protocol import Method

TABLE = {
    module.replace("_", "-"): place
    for place in fedstill.PLACES.values()
    for package, _, module in (place.partition(":")[0].rpartition("."),)
    if package == __name__
}
"""Name on the command line -> ``module:class``, read from ``fedstill/__init__.pyi``. A new method is one file, one line
there and one page in docs/methods/."""


def find(name: str) -> type[Method]:
    """The class of a method.

    Args:
        name: one of `TABLE`, or ``package.module:Class`` for a method of your own.

    Raises:
        ValueError: there is no such method.
    """
    target = TABLE.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ValueError(f"there is no method '{name}'; choose {', '.join(TABLE)}, or package.module:Class of your own")
    try:
        kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"method '{name}' cannot be loaded ({error}); check the name, and that Python finds the module (PYTHONPATH)"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ValueError(f"'{name}' is not a method; name a class derived from fedstill.protocol.Method")
    return kind
