"""A run to do: the task, the method and the folder.

A new process looks for its folder in the same way, so the same command resumes its own run and another setting gets
another folder.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from fedstill import methods
from fedstill.base import files
from fedstill.base.errors import front_door
from fedstill.base.files import expanded
from fedstill.base.lookup import source_digests, suggestion
from fedstill.base.settings import sentence
from fedstill.experiment import config
from fedstill.experiment.config import Experiment, describe
from fedstill.models.build import own_builder
from fedstill.protocol import Method
from fedstill.runs.folder import RunFolder


@dataclass(frozen=True, init=False)
class Job:
    """One run: ``Job(experiment, FedGM(ipc=1), "runs/first")``, or ``Job(experiment, "fedgm", "runs/first")``.

    Attributes:
        experiment: the task.
        method: the method with its hyperparameters.
        out: the run's folder.
        name: the method's name, as `fedstill.methods.find` takes it.
        label: the run's name in tables; the method's name by default.
        command: the command line that repeats the run, for the record.
    """

    experiment: Experiment
    method: Method
    out: Path
    name: str
    label: str
    command: str

    @front_door
    def __init__(
        self,
        experiment: Experiment,
        method: str | Method | type[Method],
        out: str | Path,
        *,
        name: str = "",
        label: str = "",
        command: str = "",
    ) -> None:
        """A job.

        Args:
            experiment: the task.
            method: the method: its name, an object or a class.
            out: the run's folder.
            name: the method's name, if it is not that of the object's class: ``path/to/file.py:Class``.
            label: the run's name in tables; the method's name by default.
            command: the command line that repeats the run, for the record.

        Raises:
            InputError: there is no such method, the object is another method than the name says, or an argument is of
                another type.
        """
        if not isinstance(experiment, Experiment):
            raise ValueError(f"the experiment is {experiment!r}; give an Experiment, as Experiment(data='digits')")
        if not isinstance(out, str | Path):
            raise ValueError(f"the run's folder is {out!r}; give a path, as Job(experiment, method, 'runs/first')")
        made = _made(method)
        with suppress(ValueError):  # of a schema's file that is missing, which the check of the run names
            made = made if experiment.target_range is None else made.for_number()
        given = name or (method if isinstance(method, str) else name_of(type(made)))
        _check_name(given, made)
        values = {"experiment": experiment, "method": made, "out": expanded(out), "name": given}
        for field, value in {**values, "label": label, "command": command}.items():
            object.__setattr__(self, field, value)

    @front_door
    def replace(self, **changes: Any) -> Self:
        """A copy with other values of some attributes; a method of another class brings its own name."""
        if "method" in changes and type(_made(changes["method"])) is not type(self.method):
            changes = {"name": "", **changes}
        return dataclasses.replace(self, **changes)

    @property
    def title(self) -> str:
        """Name of the run in lines about its progress."""
        return f"{self.label or self.name}, seed {self.experiment.seed}"

    def description(self) -> dict[str, Any]:
        """The first content of ``config.json``."""
        described = describe(self.experiment, self.name, self.method, self.label or self.name, self.command)
        return described | ({"code": code} if (code := self.own_code()) else {})

    def own_code(self) -> dict[str, str]:
        """SHA-256 of the source file of each method and model of the user's own, by its name.

        Files of the user's own that these import are there too, by their paths (`fedstill.base.lookup.source_digests`).
        """
        own: dict[str, Callable[..., Any]] = {self.name: type(self.method)}
        for model in (self.experiment.model, *self.experiment.models):
            with suppress(ValueError):  # a model that is missing is named when it is built
                if (builder := own_builder(model)) is not None:
                    own[model] = builder
        return {path or place: digest for place, code in own.items() for path, digest in source_digests(code).items()}


def kind_of(method: object) -> type[Method]:
    """The class of a method that is given by its name, its class or an object.

    Raises:
        ValueError: there is no such method, or it is something else.
    """
    found = methods.find(method) if isinstance(method, str) else method
    kind = found if isinstance(found, type) else type(found)
    if not issubclass(kind, Method) or kind is Method:
        raise ValueError(
            f"the method is {files.in_words(method)}; give a method's name, class or object, as FedGM(ipc=1)"
        )
    return kind


def _made(method: object) -> Method:
    """The method of a name or a class, with its defaults, or the object itself."""
    return method if isinstance(method, Method) else _defaults(kind_of(method))


def _check_name(name: object, method: Method) -> None:
    """Refuse a name that is not the method's."""
    if not isinstance(name, str):
        raise ValueError(f"the method's name is {name!r}; leave it out, or give a text")
    own = name_of(type(method))
    if name == own or name.rpartition(":")[2] == type(method).__qualname__:
        return
    if name in methods.TABLE:
        raise ValueError(f"the job is named '{name}', but its method is {own}; leave the name out")
    near = suggestion(name, methods.TABLE)
    raise ValueError(f"there is no method '{name}'{near or ''} (the object is {own}; label='{name}' names a run)")


def name_of(kind: type[Method]) -> str:
    """The name of a method's class, as `fedstill.methods.find` takes it; a script's class is named by its file."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" and (script := _script()) is not None:
        place = f"{os.path.relpath(script)}:{kind.__qualname__}"
    return next((name for name, known in methods.TABLE.items() if known == place), place)


def _defaults(kind: type[Method]) -> Method:
    try:
        return kind()
    except ValidationError as error:
        raise ValueError(f"{kind.__name__}: {sentence(error)}; give an object with all settings") from error


def is_importable(job: Job) -> bool:
    """Whether another process can import the code of a job's method and models.

    It cannot if the code is in a notebook, in an interactive session or inside a function.
    """
    kind = type(job.method)
    models = (job.experiment.model, *job.experiment.models)
    in_main = kind.__module__ == "__main__" or any(model.startswith("__main__:") for model in models)
    return "<locals>" not in kind.__qualname__ and not (in_main and _script() is None)


def _script() -> Path | None:
    """The file that Python runs as ``__main__``; None in a notebook or an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file) if file and file.endswith(".py") and Path(file).exists() else None


_RUNS = ("config.json", "*/seed-*/config.json")
"""Places of runs in the folder of a run or a comparison."""


def default_folder(plain: Path, jobs: Mapping[Path, Job]) -> Path:
    """The folder for ``jobs``: ``plain``, or ``plain-DIGEST`` if that exists or ``plain`` has other runs or files.

    Args:
        plain: the usual folder.
        jobs: runs of one task, by their path in the folder; ``Path()`` if the folder is the run itself.
    """
    experiment = next(iter(jobs.values())).experiment
    if Path() not in jobs:  # a comparison can be continued with other seeds
        experiment = experiment.model_copy(update={"seed": 0})
    own_code = {place: digest for job in jobs.values() for place, digest in job.own_code().items()}
    digest = config.digest(experiment, {job.label: (job.name, job.method) for job in jobs.values()}, own_code)
    own = plain.with_name(f"{plain.name}-{digest}")
    return own if own.exists() or not _fits(plain, jobs) else plain


def _fits(folder: Path, jobs: Mapping[Path, Job]) -> bool:
    """Whether the folder is free, or all its runs have the task of ``jobs`` and those at their paths their methods."""
    begun = [place.parent for pattern in _RUNS for place in folder.glob(pattern)]
    if not begun:
        return not folder.exists() or not any(folder.iterdir())
    some = next(iter(jobs.values())).description()
    for run in begun:
        job = jobs.get(run.relative_to(folder))
        if (run == folder) != (Path() in jobs):  # a run is no comparison
            return False
        try:
            content = RunFolder(run).read_config().content
        except files.Damaged:
            return False
        if job is not None:
            other = config.difference(content, job.description())
        else:
            other = config.difference(content, {**some, "method": content["method"]}, without=("seed",))
        if other is not None:
            return False
    return True
