"""HTML by templates, which escape every text that is put into them."""

from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup


def asset(name: str) -> str:
    """The content of a file in ``assets/``."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def _source(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text("utf-8")


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.globals["asset"] = lambda name: Markup(asset(name))
    return found


@cache
def _parts() -> Any:
    return _environment().get_template("parts.html").module


def page(**facts: Any) -> str:
    """A whole page: ``title``, ``policy`` and ``body``, which is markup."""
    return _environment().get_template("page.html").render(**facts)


def part(name: str, *facts: Any, **named: Any) -> Markup:
    """The macro ``name`` of ``templates/parts.html`` with these facts; markup among them stays markup."""
    found: Markup = getattr(_parts(), name)(*facts, **named)
    return found


def joined(*parts: str) -> Markup:
    """Parts of a page in this order; those that are text and no markup are escaped."""
    return Markup().join(parts)
