"""Runs below a folder: their list, tags and removal."""

import json
import re
import shutil
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from fedstill.base import files
from fedstill.base.errors import InputError
from fedstill.privacy.guarantee import Guarantee
from fedstill.runs.folder import RunFolder, empty, is_locked, is_run, runs_below
from fedstill.runs.journal import JournalFiles

_FILE = "tags.json"
UNKNOWN = "?"
"""In place of the tags whose file is damaged; no tag has this character."""
_WORD = re.compile(r"[\w.+-]{1,40}")


def read_tags(run: Path) -> tuple[str, ...]:
    """The tags of the run in the folder ``run``, in order of the alphabet."""
    place = run / _FILE
    if not place.exists():
        return ()
    try:
        tags = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise files.Damaged(f"{place} is damaged ({error}); delete it, and tag the run again") from error
    if not isinstance(tags, list) or not all(isinstance(tag, str) and _WORD.fullmatch(tag) for tag in tags):
        raise files.Damaged(f"{place} is damaged (it is no list of tags); delete it, and tag the run again")
    return tuple(sorted(set(tags)))


def change_tags(run: Path, add: Collection[str] = (), remove: Collection[str] = ()) -> tuple[str, ...]:
    """Add tags to a run and remove others; returns those that it has then.

    Raises:
        ValueError: a tag has other characters than letters, digits, ``_``, ``.``, ``+`` and ``-``, or more than 40.
    """
    if (wrong := next((tag for tag in add if not _WORD.fullmatch(tag)), None)) is not None:
        raise InputError(f"the tag is {wrong!r}; use 1 to 40 letters, digits, _ . + and -")
    now = tuple(sorted({*read_tags(run), *add} - {*remove}))
    if now:
        files.write_json(run / _FILE, list(now))
    else:
        (run / _FILE).unlink(missing_ok=True)
    return now


COMPARISON = (
    *("report.html", "runs.csv", "table.json", "table.csv", "table.tex", "table.md", "figures.tex"),
    *("pareto.csv", "pareto.md", "sweep.json", "sweep.csv", "final.json", ".lock"),
)
"""Files of a comparison or a sweep beside its runs; its figures are `_FIGURES`."""
_FIGURES = re.compile(r"(pareto-\w+|(sweep|bytes|rounds|course|partition|bubbles|classes|confusion)(-\d+)?)\.(svg|pdf)")


class Listed(NamedTuple):
    """One run of a list.

    Attributes:
        folder: the run's folder.
        label: its name in tables.
        method: the method's name.
        data: the data set.
        seed: the seed, or None if the configuration is damaged.
        accuracy: accuracy in [0, 1] of the last evaluation so far, or None.
        guarantee: the guarantee; None before the end.
        state: ``running`` if a process writes the folder; ``newer`` if a newer fedstill wrote what this can't read.
        last_change: time of the end, or of the last sign of work.
        tags: the tags that somebody gave it (`read_tags`), or `UNKNOWN`.
        judged_on: the kind of records that a finished run's accuracy is on, as ``validation records``.
        errors: ``rmse``, ``mae`` and ``r2`` of a finished run whose target is a number, or None.
    """

    folder: Path
    label: str
    method: str
    data: str
    seed: int | None
    accuracy: float | None
    guarantee: Guarantee | None
    state: Literal["finished", "running", "interrupted", "damaged", "newer"]
    last_change: datetime
    tags: tuple[str, ...] = ()
    judged_on: str = ""
    errors: dict[str, float | None] | None = None


def entry(path: Path) -> Listed:
    """The state of the run in ``path``; a damaged file makes it ``damaged``, one of a newer version ``newer``."""
    folder = RunFolder(path)
    when = _last_change(folder)
    try:
        config = folder.read_config()
        data, seed = str(config.experiment.get("data")), config.experiment.get("seed")
        name = str(config.method.get("name", config.label))
        facts = (path, config.label, name, data, seed if isinstance(seed, int) else None)
        if folder.is_finished:
            summary = folder.read_summary()
            found = summary.accuracy, summary.guarantee
            return Listed(*facts, *found, "finished", folder.finished, _tags(path), summary.judged_on, summary.errors)
        evaluated = [line["accuracy"] for line in folder.read_metrics() if line["accuracy"] is not None]
        state: Literal["running", "interrupted"] = "running" if is_locked(path) else "interrupted"
        return Listed(*facts, evaluated[-1] if evaluated else None, None, state, when, _tags(path))
    except files.Damaged as error:
        is_newer = isinstance(error, files.NewerFormat)
        return Listed(path, "?", "?", "?", None, None, None, "newer" if is_newer else "damaged", when)


def _tags(run: Path) -> tuple[str, ...]:
    """The run's tags, or `UNKNOWN` where their file is damaged, which says nothing about the run."""
    try:
        return read_tags(run)
    except files.Damaged:
        return (UNKNOWN,)


def _last_change(folder: RunFolder) -> datetime:
    places = (folder.config, folder.metrics, JournalFiles(folder.journal).meter, folder.summary)
    return datetime.fromtimestamp(max(p.stat().st_mtime for p in places if p.exists())).astimezone()


def removable(place: Path) -> list[Path]:
    """The runs in ``place``, for `remove`.

    Raises:
        ValueError: ``place`` is not the folder of a run or of runs, or a link, or the working folder is in it, or a
            process is writing one of them.
    """
    if place.is_symlink():
        raise ValueError(f"{place} is a link to {place.resolve()}; name that folder to remove it")
    if Path.cwd().is_relative_to(place.resolve()):
        raise ValueError(f"{place} is the folder that you are in, or above it; go to another folder and name it there")
    if not (runs := [run for run in runs_below(place, links=False) if is_run(run, certainly=True)]):
        raise ValueError(f"{place} has no run; give the folder of a run or of a comparison (fedstill runs)")
    if busy := next((run for run in runs if is_locked(run)), None):
        raise ValueError(f"another process is writing {busy}; stop it before you remove the run")
    return runs


def remove(run: Path, place: Path) -> None:
    """Remove a run below ``place``; and from each folder up to ``place`` that has none left, the tables of these runs.

    Such a folder itself goes if it has nothing else.

    Raises:
        Taken: a process is writing it.
    """
    if not run.exists():  # it is in two of the places to remove
        return
    empty(run)
    shutil.rmtree(run)
    for parent in run.parents:
        if not parent.is_relative_to(place):
            return
        if not all(map(_is_of_comparison, parent.iterdir())):
            has_tables = any((parent / name).is_file() for name in ("runs.csv", "sweep.json"))
            if has_tables and not runs_below(parent):
                _remove_tables(parent)
            return
        shutil.rmtree(parent)


def _remove_tables(folder: Path) -> None:
    """Remove what a comparison or a sweep has written beside its runs, and nothing else."""
    for place in filter(_is_of_comparison, folder.iterdir()):
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()


def _is_of_comparison(place: Path) -> bool:
    return place.name in COMPARISON or bool(_FIGURES.fullmatch(place.name))
