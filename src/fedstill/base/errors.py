"""Errors of fedstill's own, and the sentence on an extra that is not installed."""

import json
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, distribution
from typing import ParamSpec, TypeVar
from urllib.parse import unquote, urlparse

P = ParamSpec("P")
R = TypeVar("R")


class FedstillError(Exception):
    """Base of the errors that the public functions of fedstill raise."""


class InputError(FedstillError, ValueError):
    """A setting, a file or data that cannot be used; one sentence with the value, the limit and a remedy."""


class Changed(InputError):
    """The data, the public data, the schema or fedstill is another than a run was begun with.

    That says nothing about the run's settings, so that no choice among tries goes on after it.
    """


class Diverged(FedstillError, ValueError):
    """A training left weights, or a model gives outputs, that are not finite."""


def front_door(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` raise `InputError` in place of a plain ``ValueError`` that fedstill's own code raises.

    Errors of other code, such as that of a method of the user's own, pass as they are.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            if type(error) is not ValueError or not _is_own(error):
                raise
            raise InputError(*error.args).with_traceback(error.__traceback__) from error.__cause__

    return call


def _is_own(error: BaseException) -> bool:
    """Whether a module of fedstill raised the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return name.partition(".")[0] == "fedstill"


def install(extra: str) -> str:
    """The command for ``extra``, as ``pip install '/home/me/fedstill[flower]'`` after an installation from there.

    The source is what pip noted (PEP 610). Only an installation from an index leads to one from an index: nobody has to
    own a name there otherwise.
    """
    try:
        noted = distribution("fedstill").read_text("direct_url.json")
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in a checkout of fedstill"
    if noted is None:
        return f"pip install 'fedstill[{extra}]'"
    source = json.loads(noted)
    url = source["url"]
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlparse(url).path)}[{extra}]'"
    if "vcs_info" in source:
        url = f"{source['vcs_info']['vcs']}+{url}"
    return f"pip install 'fedstill[{extra}] @ {url}'"


def first_line(error: BaseException) -> str:
    """The first line of an error's message without its full stop, for a sentence of ours; its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
