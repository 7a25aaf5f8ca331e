"""The list of methods, from their source files: it needs no torch."""

import re
import textwrap
from typing import Any

from fedstill import methods
from fedstill.cli.declared import constants, docstring

_CITED = re.compile(r"\b([A-Z][A-Za-z]*[a-z])(?: et al\.|, ).*?\b((?:19|20[0-2])\d+)\b", re.DOTALL)
_HEADINGS = ("method", "clients asked", "public data", "protects", "paper")


def facts(name: str) -> dict[str, Any]:
    """What `fedstill methods` says of a method.

    Returns:
        ``method``, ``description``, ``rounds`` (the default number), ``one_shot``, ``needs_public`` ("images",
        "labelled" or None), ``protects`` ("record", "label", "client" or None) and ``paper`` (first author and year).
    """
    place = methods.TABLE[name]
    values = constants(place)
    rounds = values.get("rounds", 1)
    return {
        "method": name,
        "description": values["__doc__"].strip().split("\n")[0],
        "rounds": rounds,
        "one_shot": rounds == 1,
        "needs_public": values["needs_public"] or None,
        "protects": values["protects"] or None,
        "paper": citation(docstring(place.partition(":")[0])),
    }


def citation(text: str) -> str:
    """First author and year of the first paper that a method's docstring cites; the author alone if it has no year."""
    if found := _CITED.search(text):
        return f"{found[1]} {found[2]}"
    return next(iter(re.findall(r"\n\n([A-Z][A-Za-z]*[a-z]), ", text)), "")


def listing() -> str:
    """The methods as a table of 80 columns."""
    rows = [_HEADINGS]
    lines = [""]
    for name in methods.TABLE:
        fact = facts(name)
        asked = "once" if fact["one_shot"] else f"{fact['rounds']} rounds"
        rows.append((name, asked, fact["needs_public"] or "-", fact["protects"] or "-", fact["paper"]))
        lines.append(textwrap.fill(fact["description"], 80, initial_indent="    ", subsequent_indent="    "))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(part for pair in zip(table, lines, strict=True) for part in pair if part)
