"""The front door to what is made of runs and methods: sweeps, attacks, audits, plans, tables and files."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from rich.console import Console

from fedstill import attacks
from fedstill.attacks import results as findings
from fedstill.attacks.release_policy import pass_gate
from fedstill.audits import whole_runs
from fedstill.audits.lower_bounds import Finding
from fedstill.base.errors import front_door
from fedstill.base.files import in_words, path_of
from fedstill.base.settings import Settings, sentence
from fedstill.data import own
from fedstill.data.sources import DataSet
from fedstill.engines.transport import Watcher, Watchers
from fedstill.experiment import sweep as sweeps
from fedstill.experiment.progress import watch
from fedstill.methods import find
from fedstill.protocol import Method
from fedstill.report import plan as planning
from fedstill.report import publish as publishing
from fedstill.report import tables, tuning
from fedstill.report.record import RunRecord, Runs, records_of
from fedstill.runs.folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Unpack

    from fedstill.typed import AttackSettings, AuditSettings, PlanSettings

S = TypeVar("S", bound=Settings)


@front_door
def sweep(
    plan: Mapping[str, Any] | str | Path,
    *,
    out: str | Path,
    final: bool = False,
    parallel: int | None = None,
    watcher: Watcher | None = None,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Tune several methods on validation records, as ``fedstill sweep``; the same call resumes it.

    Args:
        plan: the content of a sweep's file, or its path: settings of the task, of the search, and ``methods``, as
            ``{"data": "digits", "methods": {"fedavg": {"try": {"local.lr": [0.03, 0.1]}}}}``.
        out: its folder, which gets ``sweep.csv`` and ``report.html`` too.
        final: whether to run the best settings of each method on the test set, once.
        parallel: number of runs at a time; one per core by default.
        watcher: observes the progress.
        progress: whether to print the progress to stderr: by default, on a terminal and in a notebook.

    Returns:
        A dictionary for each method, the best first: ``label``, ``best`` (the settings), ``validation`` and ``test``
        accuracy in [0, 1] or None, ``tries``, ``failed``, ``folder`` ...; a list for `pandas.DataFrame`.

    Raises:
        InputError: the plan is invalid, no run worked, or the test set was opened after other tries.
    """
    folder = path_of(out, "out")
    if isinstance(plan, Mapping):
        read = sweeps.checked("the plan", dict(plan))
    else:
        read = sweeps.read_sweep(path_of(plan, "the plan"))
    with _watched("sweep", progress) as bars:
        outcome = sweeps.run_sweep(
            read, folder, final=final, parallel=parallel, watcher=bars if watcher is None else Watchers(watcher)
        )
    tuning.write(outcome, folder, "fedstill.sweep(...)")
    return tuning.rows(outcome)


@front_door
def attack(
    run: RunRecord | str | Path,
    name: str = "membership",
    *,
    data: Any = None,
    progress: bool | None = None,
    **settings: "Unpack[AttackSettings]",
) -> dict[str, Any]:
    """Infer training records from a finished run, as ``fedstill attack``; the same call resumes it.

    Args:
        run: the run, or its folder, which gets the results.
        name: "membership" or "uploads" (`fedstill.attacks.ATTACKS`).
        data: the records, if the run was given them as an object; as for `run`.
        progress: whether to print the progress to stderr: by default, on a terminal and in a notebook.
        settings: those of the attack, as ``shadows=16``.

    Returns:
        The results, as in the run's folder ``attack``.

    Raises:
        InputError: the run is not finished or cannot be attacked, or a setting is invalid.
    """
    folder = path_of(run, "the run")
    chosen = _made(attacks.find(name), settings)
    console = Console(file=sys.stderr, quiet=not _shows(progress))
    return chosen.attack(folder, console, "", _read_again(data, folder))[0]


def _read_again(data: Any, run: Path) -> DataSet | None:
    """The data set of an object, read as the run read its own."""
    if data is None or isinstance(data, DataSet):
        return data
    folder = RunFolder(run)
    folder.check_finished()
    return own.given(data, own.reading_of(folder.read_config().experiment))[0]


@front_door
def audit(
    methods: str | type[Method] | Sequence[str | type[Method]],
    *,
    progress: bool | None = None,
    **settings: "Unpack[AuditSettings]",
) -> list[Finding]:
    """Prove lower bounds on the epsilon of private methods, as ``fedstill audit``.

    Args:
        methods: names of private methods, or classes derived from one (``"mine.py:Class"``).
        progress: whether to print the progress to stderr: by default, on a terminal and in a notebook.
        settings: as ``epsilon=(1.0,)``, ``clients=2000`` (`fedstill.audits.whole_runs.AuditSettings`).

    Returns:
        For each method and epsilon the claim, the bounds and whether they refute it (`Finding.refuted`).

    Raises:
        InputError: a method has no audit, or a setting is invalid.
    """
    given = [methods] if isinstance(methods, str | type) else [*methods]
    names = [one if isinstance(one, str) else _place(one) for one in given]
    with _watched("audit", progress) as bars:
        return list(whole_runs.audit(names, _made(whole_runs.AuditSettings, settings), bars.progressed))


@front_door
def plan(**settings: "Unpack[PlanSettings]") -> dict[str, Any]:
    """The noise of each epsilon, and the accuracy to expect, as ``fedstill privacy plan``.

    Args:
        settings: as ``epsilon=(1.0, 4.0)``, ``records=2500`` (`fedstill.report.plan.Plan`).

    Returns:
        ``budgets``, a dictionary for each epsilon, and with one epsilon alone ``releases``, one for each kind of
        release (`fedstill.report.plan.plan`).

    Raises:
        InputError: a setting is invalid, or the data cannot be used.
    """
    return planning.plan(_made(planning.Plan, settings))[0]


@front_door
def to_pandas(records: Runs) -> "DataFrame":
    """A `pandas.DataFrame` of runs: a row for each method and its settings, numbers are means over seeds.

    Args:
        records: a run or several, as of `compare` or `read_run`, or their folders.

    Raises:
        InputError: they are no runs, or pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ValueError("a frame needs pandas, which is not installed; pip install pandas") from error
    return pd.DataFrame(tables.rows(records_of(records)))


@front_door
def publish(
    run: RunRecord | str | Path,
    out: str | Path,
    *,
    onnx: bool = False,
    gate: str | Path | None = None,
    positive: str | int | None = None,
    threshold: float | None = None,
    shape: Sequence[int] = (),
) -> dict[str, Any]:
    """Write a run's model as files for plain PyTorch, with a model card, as ``fedstill publish``.

    Args:
        run: a finished run or its folder.
        out: the folder to write.
        onnx: whether to write a program for ONNX Runtime too.
        gate: TOML file of a policy that the run must meet (`fedstill.attacks.release_policy`).
        positive: the class of two that ``threshold`` is for; by default the last.
        threshold: probability from which it is predicted, on the card and in ``rows.py``; the likelier class otherwise.
        shape: channels, height and width of the images of a run on features; by default those of the run.

    Returns:
        The model's facts and the names of its files.

    Raises:
        InputError: the run is not finished, misses what the policy asks, or its model cannot be written.
    """
    folder = path_of(run, "the run")
    asked = () if gate is None else pass_gate(folder, path_of(gate, "gate"))
    chosen: dict[str, Any] = {"onnx": onnx, "positive": positive, "threshold": threshold, "shape": _shape(shape)}
    return publishing.publish(folder, path_of(out, "out"), attacks=findings.stored(folder), gate=asked, **chosen)


def _shape(shape: object) -> tuple[int, ...]:
    """The shape of a record, of whole numbers.

    Raises:
        ValueError: it is another value.
    """
    shape = shape.tolist() if hasattr(shape, "tolist") else shape
    sizes = shape if isinstance(shape, list | tuple) else [None]
    if any(isinstance(size, bool) or not isinstance(size, Integral) for size in sizes):
        raise ValueError(f"shape is {in_words(shape)}; give channels, height and width, as (3, 224, 224)")
    return tuple(map(int, sizes))


def _made(kind: type[S], settings: Mapping[str, Any]) -> S:
    """Settings, whose first error is one sentence."""
    try:
        return kind(**settings)
    except ValidationError as error:
        raise ValueError(sentence(error, kind=kind)) from error


def _place(kind: type[Method]) -> str:
    """The name of a class, ``module:Class``, by which an audit imports it: its processes know no object of this one."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if find(name) is not kind:
        raise ValueError(f"{kind.__qualname__} cannot be imported as {name}; write it into a file: 'mine.py:Class'")
    return name


def _shows(progress: bool | None) -> bool:
    console = Console(file=sys.stderr)
    return console.is_interactive or console.is_jupyter if progress is None else progress


def _watched(label: str, progress: bool | None) -> AbstractContextManager[Watcher]:
    return watch(Console(file=sys.stderr), label, quiet=not _shows(progress))
