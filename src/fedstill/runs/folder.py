"""The folder of a run: the names of its files, and functions that read, check and write each.

::

    RUN/
      config.json           the experiment, the method, the command line and the version
      summary.json          the results; marks the run as finished
      partition.json        records of each class at each client; absent where real sites hold the records
      evaluation.json       the confusion matrix of the final model; or numbers.json, errors of predicted numbers
      clients.json          accuracy, records and bytes of each client
      metrics.jsonl         one line per logged round
      model.safetensors     the final model
      images/NAME.npz       sample images for the report
      report.html           the report of this run alone
      environment.jsonl     versions, processor, commits and time of each start
      journal/              requests, replies and checkpoints (`fedstill.runs.journal`)
      clients/              states of simulated clients
      helpers/              keys and journals of simulated helpers of masked sums
      sums/                 the clients in each masked sum, and what its opening cost
      tries/                the tries of ``--tune``, and in ``tries.json`` what they came to
      scale.json            the private scale of the columns, with --scale private:EPSILON
      attack/               results of ``fedstill attack``

Every file is checked when it is read, as a folder may have been edited, truncated or copied.
"""

import json
import logging
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import ValidationError

from fedstill.base import files, processes
from fedstill.base.errors import InputError
from fedstill.runs import formats
from fedstill.runs.journal import EVALUATIONS, Journal, JournalFiles
from fedstill.runs.pieces import (
    Bounded,
    ByValue,
    ClientResults,
    ColumnScale,
    Config,
    Environment,
    Evaluation,
    Metric,
    Partition,
    Piece,
    PredictedNumbers,
    Summary,
    Tries,
)

if TYPE_CHECKING:  # `fedstill runs` does not need torch, which takes a second
    from torch import Tensor

    from fedstill.base.records import Records

log = logging.getLogger("fedstill")

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images, uint8 ``(n, c, h, w)``, and labels, int64 ``(n,)``."""


def read(file: Path, damaged: Callable[[Path, object], files.Damaged]) -> Images:
    """The images and labels of a file; raises the error that ``damaged`` makes of the file and the problem."""
    try:
        # a pickle in a copied folder would run its author's code
        with processes.LITERALS, file.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            if sum(part.file_size for part in arrays.zip.infolist()) > 1 << 28:  # a few kilobytes can be gigabytes
                raise ValueError("it unpacks to more than 256 MiB")
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged(file, error) from error
    if images.dtype != np.uint8 or images.ndim != 4:
        raise damaged(file, "images must be uint8 of shape (n, c, h, w)")
    if images.shape[1] not in (1, 3) or not min(images.shape[2:]):
        raise damaged(file, "images must have 1 or 3 channels")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or (labels.astype(np.int64) >> 31).any():
        raise damaged(file, "every image needs one label, a whole number of 0 or more")
    return images, labels.astype(np.int64)


LOCK = ".lock"
_PATIENCE = 0.2
"""Seconds to wait for the lock: `is_locked` holds it for a moment."""


class Taken(InputError):
    """A folder has another run, or another process is writing it."""


def first_other(path: Path) -> str | None:
    """The name of a file that a new run's folder must not have, or None."""
    names = sorted(f.name for f in path.iterdir())
    return next((name for name in names if name not in (LOCK, HELPERS, TRIES) and not name.endswith(files.PART)), None)


SITES = "sites"
"""The partition, in results, of a run whose records real sites had."""
SITES_WORDS = "the sites' own records"
"""What it is, in words."""
HELPERS = "helpers"
"""Folder of the keys of simulated helpers, which a run needs before it has any other file."""
TRIES = "tries"
"""Folder of the tries by which a run's settings were chosen, before it has any other file."""


@contextmanager
def locked(path: Path, has_run: Callable[[], bool]) -> Iterator[None]:
    """Make the folder ``path`` and lock it against other processes; the lock ends with the process.

    If the folder was new or empty and the block raises while ``has_run()`` is false, the block's files and all folders
    made here are deleted.

    Raises:
        Taken: another process holds the lock.
    """
    made = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with _held(path):
        new = first_other(path) is None and not (path / TRIES).exists()
        try:
            yield
        except BaseException:
            if new and not has_run():
                _clear(path, made)
            raise


def empty(path: Path) -> None:
    """Delete all files of the folder except its lock, which no other process can take meanwhile.

    Raises:
        Taken: another process holds the lock.
    """
    with _held(path):
        for place in path.iterdir():
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            elif place.name != LOCK:
                place.unlink()


@contextmanager
def _held(path: Path) -> Iterator[None]:
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=_PATIENCE, poll_interval=0.05)
    except Timeout as error:
        raise Taken(f"another process is writing {path}; wait for it, or choose another --out") from error
    try:
        yield
    finally:
        lock.release()


def _clear(path: Path, made: list[Path]) -> None:
    """Delete the content of ``path`` and then the empty folders of ``made``."""
    for place in path.iterdir():
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
    with suppress(OSError):  # another run has begun beside this one
        for place in made:
            place.rmdir()


def is_locked(path: Path) -> bool:
    """Whether a process is writing the folder."""
    if not (path / LOCK).exists():
        return False
    try:
        with FileLock(path / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder of somebody else, which this process cannot lock
        return False


Counts = NDArray[np.int64]

P = TypeVar("P", bound=Piece)
R = TypeVar("R")


def existing(place: Path) -> Path:
    """``place``, if it is a folder.

    Raises:
        ValueError: there is none.
    """
    if not place.is_dir():
        raise ValueError(f"there is no folder {place}; give a folder written by `fedstill run` or `compare`")
    return place


def in_natural_order(folders: Iterable[Path]) -> list[Path]:
    """The folders sorted by their paths, numbers by their size (seed-2 before seed-10)."""
    return sorted(folders, key=lambda path: [(t.isdigit() and len(t), t) for t in re.split(r"(\d+)", str(path))])


def is_run(path: Path, *, certainly: bool = False) -> bool:
    """Whether a folder with a ``config.json`` is a run's: models of other programs have such a file too.

    A file that is no JSON may be a damaged run's, but not ``certainly``.
    """
    folder = RunFolder(path)
    if JournalFiles(folder.journal).meter.is_file() or folder.environment.is_file():
        return True  # whatever became of its configuration
    try:
        content = json.loads(folder.config.read_bytes())
    except (ValueError, RecursionError):
        return not certainly
    except FileNotFoundError:
        return False
    keys = content.keys() if isinstance(content, dict) else ()
    return {"experiment", "method"} <= {*keys} if certainly else "experiment" in keys


_OWN = {"journal", "clients", "sums", "attack", HELPERS, TRIES}
"""Folders of a run, in which other runs are parts of it."""


def runs_below(folder: Path, *, links: bool = True) -> list[Path]:
    """The folders of all runs in ``folder`` or below it, in natural order; the tries and attacks of runs do not count.

    A run is named once, by the folder that is not reached through a link, if there is one. A warning says which folders
    can't be read.

    Args:
        folder: a run's folder, or one above.
        links: whether to follow links to folders.

    Raises:
        ValueError: there is no such folder.
    """
    runs, top = [], Path(os.path.realpath(existing(folder)))
    met: set[Path] = set()
    for parent, children, names in os.walk(folder, followlinks=links, onerror=_unread):
        if {"config.json", "summary.json"} & {*names} and is_run(Path(parent)):
            runs.append(Path(parent))
            children[:] = [name for name in children if name not in _OWN]
        children[:] = [name for name in children if not name.startswith(".")]
        for name in [name for name in children if links and os.path.islink(os.path.join(parent, name))]:
            target = Path(os.path.realpath(os.path.join(parent, name)))
            if target.is_relative_to(top) or top.is_relative_to(target) or any(map(target.is_relative_to, met)):
                children.remove(name)
            else:
                met.add(target)
    return in_natural_order({os.path.realpath(run): run for run in runs}.values() if met else runs)


def _unread(error: OSError) -> None:
    _say_unread(str(error.filename), str(error.strerror))


@lru_cache(maxsize=1000)
def _say_unread(place: str, why: str) -> None:
    """Warn once of a folder that can't be read."""
    log.warning("the folder %s can't be read (%s); runs in it are not listed", place, why)


class RunFolder:
    """A run's folder, which need not exist yet.

    Every ``read_...`` raises `fedstill.base.files.Damaged`, with one sentence, if its file is damaged, and its subclass
    `fedstill.base.files.NewerFormat` if a newer version of fedstill wrote it and this one can't read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.summary = path / "summary.json"
        self.partition = path / "partition.json"
        self.evaluation = path / "evaluation.json"
        self.numbers = path / "numbers.json"
        self.results_of_clients = path / "clients.json"
        self.metrics = path / "metrics.jsonl"
        self.model = path / "model.safetensors"
        self.report = path / "report.html"
        self.environment = path / "environment.jsonl"
        self.journal = path / "journal"
        self.clients = path / "clients"
        self.helpers = path / HELPERS
        self.sums = path / "sums"
        self.tries = path / TRIES / "tries.json"
        self.scale = path / "scale.json"
        self.attack = path / "attack"

    def __str__(self) -> str:
        return str(self.path)

    # ------------------------------------------------------------------------------------------------------- the state

    @property
    def is_finished(self) -> bool:
        """Whether the run has its results."""
        return self.config.is_file() and self.summary.is_file()

    def check_finished(self) -> None:
        """Refuse a folder without a finished run.

        Raises:
            ValueError: there is no such folder, or it has no finished run.
        """
        existing(self.path)
        if not self.config.is_file():
            if (runs := runs_below(self.path)) and self.path not in runs:
                number = f"{len(runs)} run" + "s" * (len(runs) != 1)
                raise ValueError(f"{self.path} holds {number}; name one of them, as {runs[0]}")
            if not (self.journal.is_dir() or self.environment.is_file()):
                raise ValueError(
                    f"{self.path} is not the folder of a run; give a folder written by `fedstill run` or `compare`"
                )
        for file in (self.config, self.summary):
            if not file.is_file():
                raise ValueError(
                    f"{self.path} is not a finished run ({file.name} is missing); repeat its command to resume it"
                )

    @property
    def finished(self) -> datetime:
        """The time at which the finished run wrote its results."""
        stated = self.read_summary().finished
        if stated is not None:
            return datetime.fromisoformat(stated)
        return datetime.fromtimestamp(self.summary.stat().st_mtime).astimezone()

    @property
    def asked_sites(self) -> bool:
        """Whether real sites had the records, so that the partition is unknown."""
        return not self.partition.exists()

    @property
    def exchanges(self) -> set[int]:
        """Numbers of the requests so far, except evaluations."""
        return {exchange for exchange, _ in Journal(self.journal).last_message_times() if exchange < EVALUATIONS}

    def stranger(self) -> str | None:
        """The name of a file that a new run's folder must not have, or None."""
        return first_other(self.path)

    def locked(self) -> AbstractContextManager[None]:
        """Make and lock the folder (`fedstill.runs.folder.locked`); it is deleted again if a start asks no client."""
        return locked(self.path, lambda: any(f.is_file() for f in self.journal.glob("**/*")))

    # ------------------------------------------------------------------------------------------------------- the files

    def damaged(self, file: Path, problem: object) -> files.Damaged:
        """The error for a damaged file of this run, or for one of a newer version that this one can't read."""
        return formats.of_newer(self.path, file, problem) or files.Damaged(
            f"{file} is damaged ({problem}); delete {self.path} and run again"
        )

    def read_json(self, file: Path) -> dict[str, Any]:
        """The JSON object in a file of the run."""
        content = self._content(file)
        if not isinstance(content, dict):
            raise self.damaged(file, "it is not a JSON object")
        return content

    def _content(self, file: Path) -> Any:
        try:
            return json.loads(file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.damaged(file, error) from error

    def read_config(self) -> Config:
        """``config.json``."""
        return self._checked(formats.checked(self.read_json(self.config), self.config), Config, self.config)

    def read_summary(self) -> Summary:
        """``summary.json``."""
        return self._checked(formats.checked(self.read_json(self.summary), self.summary), Summary, self.summary)

    def digests(self) -> dict[str, str]:
        """SHA-256 of the files that the numbers of ``summary.json`` are of, by their names; of those that are there."""
        places = (self.model, self.evaluation, self.numbers, self.metrics, JournalFiles(self.journal).spent)
        return {self._name(place): files.digest(place) for place in places if place.exists()}

    def check_results(self, *places: Path) -> None:
        """Refuse a finished run in which one of these files, or any, is not the one that its summary is of.

        The runs of early versions have no digests, or none of ``metrics.jsonl``, and are taken as they are.

        Raises:
            Damaged: a file is missing, was changed, or is another run's.
        """
        known = self.read_summary().files
        for name in {self._name(place) for place in places} or known:
            place = self.path / name
            early = not known or (place == self.metrics and name not in known)
            if not early and known.get(name) != (files.digest(place) if place.exists() else None):
                raise files.Damaged(
                    f"{place} is missing, or not the file that {self.summary} is of (changed, or another run's); "
                    f"bring it back, or delete {self.path} and run again"
                )

    def _name(self, place: Path) -> str:
        return place.relative_to(self.path).as_posix()

    def read_tries(self) -> dict[str, Any]:
        """``tries/tries.json``."""
        content: dict[str, Any] = self._checked(self.read_json(self.tries), Tries, self.tries).model_dump()
        return content

    @property
    def is_private(self) -> bool:
        """Whether nobody but its owner can read the folder."""
        return self.path.exists() and not self.path.stat().st_mode & 0o077

    def write_config(self, content: Mapping[str, Any], *, private: bool = False) -> None:
        """Write ``config.json``; a new folder of somebody's ``private`` records is closed to others of the machine."""
        if private and not self.config.exists():
            self.path.chmod(0o700)
        files.write_json(self.config, {"format": formats.FORMAT, **content})

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Write ``summary.json``, which marks the run as finished."""
        files.write_json(self.summary, {"format": formats.FORMAT, **content})

    def write_partition(
        self, class_names: Sequence[str], counts: Counts, values: Mapping[str, Any], origin: Sequence[str] = ()
    ) -> None:
        """Write ``partition.json``.

        Args:
            class_names: names of the C classes.
            counts: records by client and class, ``(K, C)``.
            values: a column's values at each client.
            origin: sentences on where the records are from, and on what looks wrong with them.
        """
        more: dict[str, Any] = {"values": dict(values)} if values else {}
        more |= {"origin": list(origin)} if origin else {}
        files.write_json(self.partition, {"class_names": list(class_names), "counts": counts.tolist(), **more})

    def sum_costs(self) -> list[dict[str, Any]]:
        """What the opening of each masked sum cost: bytes to and from a helper, seconds, and the number of clients."""
        return [self.read_json(file) for file in sorted(self.sums.glob("*.cost.json"))]

    def read_clients_of(self, reading: Path) -> list[int]:
        """The clients in a masked sum, in the file of the set that helpers were shown."""
        found = self._content(reading)
        if not (isinstance(found, list) and found and all(isinstance(one, int) for one in found)):
            raise self.damaged(reading, "it is no list of clients")
        return found

    def write_scale(self, content: Mapping[str, Any]) -> None:
        """Write ``scale.json``, which a resumed run reads."""
        files.write_json(self.scale, dict(content))

    def read_scale(self, columns: int) -> ColumnScale:
        """``scale.json`` of this many columns."""
        found = self._read(self.scale, ColumnScale)
        if not len(found.mean) == len(found.std) == columns:
            raise self.damaged(self.scale, f"it has not the scale of {columns} columns")
        return found

    def read_partition(self, clients: int) -> tuple[tuple[str, ...], Counts | None]:
        """Class names and counts; None for the counts of real sites, and no names before such a run is judged."""
        if self.asked_sites:
            return self._judged_names(), None
        part = self._read(self.partition, Partition)
        if len(part.counts) != clients:
            raise self.damaged(self.partition, f"it has counts of {len(part.counts)} clients and the run has {clients}")
        return part.class_names, self._matrix(part.counts, (clients, len(part.class_names)), self.partition)

    def _judged_names(self) -> tuple[str, ...]:
        """The class names of ``evaluation.json``; none if it is absent, or an early version's."""
        if not self.evaluation.exists():
            return ()
        found = self._read(self.evaluation, Evaluation)
        if found.class_names and len(found.class_names) != len(found.confusion):
            numbers = f"{len(found.class_names)} names of {len(found.confusion)} classes"
            raise self.damaged(self.evaluation, f"it has {numbers}")
        return found.class_names

    def read_column_values(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """The column of the partition by:COLUMN with its values at each client; empty for others and without file."""
        return {} if self.asked_sites else self._read(self.partition, Partition).values

    def read_origin(self) -> tuple[str, ...]:
        """Sentences on where the records are from; none for real sites."""
        return () if self.asked_sites or not self.partition.exists() else self._read(self.partition, Partition).origin

    def write_evaluation(
        self,
        confusion: "Tensor",
        by_value: Mapping[str, Any] | None,
        of_two: Mapping[str, Any] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        """Write ``evaluation.json``.

        Args:
            confusion: test records by true and predicted class, ``(C, C)``.
            by_value: those of each value of a column, as `Evaluation.by_value`.
            of_two: measures of each of two classes, as `Evaluation.of_two`.
            class_names: names of the C classes.
        """
        names = {"class_names": list(class_names)}
        content = {"confusion": confusion.tolist(), "by_value": by_value, "of_two": of_two, **names}
        files.write_json(self.evaluation, content)

    def write_numbers(self, content: Mapping[str, Any]) -> None:
        """Write ``numbers.json``, in place of ``evaluation.json`` where the target is a number."""
        files.write_json(self.numbers, content)

    def read_numbers(self) -> PredictedNumbers | None:
        """``numbers.json``; None for a task with classes."""
        return self._read(self.numbers, PredictedNumbers) if self.numbers.exists() else None

    def read_evaluation(self, classes: int | None) -> Counts | None:
        """The confusion matrix; None if the file is absent."""
        if not self.evaluation.exists():
            return None
        rows = self._read(self.evaluation, Evaluation).confusion
        size = len(rows) if classes is None else classes
        return self._matrix(rows, (size, size), self.evaluation)

    def read_measures(self) -> dict[str, dict[str, Bounded]] | None:
        """The measures of each of two classes with their intervals; None where the run has none."""
        return self._read(self.evaluation, Evaluation).of_two if self.evaluation.exists() else None

    def read_by_value(self) -> ByValue | None:
        """The test records of each value of the partition's column; None without a column, or an evaluation."""
        return self._read(self.evaluation, Evaluation).by_value if self.evaluation.exists() else None

    def write_clients(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Write ``clients.json``, an entry for each client."""
        files.write_json(self.results_of_clients, {"clients": list(results)})

    def read_clients(self) -> tuple[dict[str, Any], ...]:
        """The entries of ``clients.json``; none if an early version made the run."""
        if not self.results_of_clients.exists():
            return ()
        return tuple(entry.model_dump() for entry in self._read(self.results_of_clients, ClientResults).clients)

    def append_metrics(self, values: Mapping[str, float]) -> None:
        """Append the numbers of a round, including ``round``, to ``metrics.jsonl``."""
        files.append_json(self.metrics, values)

    def drop_metrics_after(self, round: int) -> None:
        """Remove the lines of rounds after ``round``, since a resumed run logs them again."""
        lines = files.read_json_lines(self.metrics)
        if not all(isinstance(line.get("round"), int) for line in lines):
            raise self.damaged(self.metrics, "a line has no round")
        before = [line for line in lines if line["round"] <= round]
        if before != lines:
            files.write_bytes(self.metrics, *(json.dumps(line).encode() + b"\n" for line in before))

    def read_metrics(self) -> tuple[dict[str, Any], ...]:
        """The numbers of each round, in order of rounds; two lines of one round are merged."""
        rounds: dict[int, dict[str, Any]] = {}
        for values in files.read_json_lines(self.metrics):
            metric = self._checked(values, Metric, self.metrics).model_dump(exclude_unset=True)
            rounds[metric["round"]] = rounds.get(metric["round"], {}) | metric
        return tuple(Metric(round=number).model_dump() | rounds[number] for number in sorted(rounds))

    def append_environment(self, facts: Mapping[str, Any]) -> None:
        """Append the environment of a start to ``environment.jsonl``."""
        files.append_json(self.environment, facts)

    def read_environments(self) -> tuple[dict[str, Any], ...]:
        """The environment of each start, in order; empty for runs of early versions."""
        lines = files.read_json_lines(self.environment)
        return tuple(self._checked(line, Environment, self.environment).model_dump() for line in lines)

    def write_model(self, weights: "Mapping[str, Tensor]", header: Mapping[str, Any]) -> None:
        """Write ``model.safetensors``."""
        from fedstill.protocol import wire

        files.write_bytes(self.model, wire.pack(weights, header))

    def read_model(self, build: "Callable[[dict[str, Tensor], dict[str, Any]], R]") -> R:
        """The result of ``build(weights, header)`` for ``model.safetensors``."""
        from fedstill.protocol import wire
        from fedstill.schema import Refused

        if self.is_finished:
            self.check_results(self.model)
        try:
            return build(*wire.unpack(self.model.read_bytes()))
        except (OSError, Refused, KeyError, TypeError, RuntimeError) as error:
            raise self.damaged(self.model, error) from error

    def write_images(self, name: str, images: "Records") -> None:
        """Write ``images/NAME.npz`` for the report."""
        file = self.path / "images" / f"{name}.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, images=images.images.cpu().numpy(), labels=images.labels.cpu().numpy())

    def read_images(self) -> dict[str, Images]:
        """Images, uint8 ``(n, c, h, w)``, with labels, int64 ``(n,)``, by name."""
        return {file.stem: read(file, self.damaged) for file in sorted(self.path.glob("images/*.npz"))}

    def _read(self, file: Path, kind: type[P]) -> P:
        return self._checked(self.read_json(file), kind, file)

    def _checked(self, content: dict[str, Any], kind: type[P], file: Path) -> P:
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            raise self.damaged(file, f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error

    def _matrix(self, rows: tuple[tuple[int, ...], ...], shape: tuple[int, int], file: Path) -> Counts:
        if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
            raise self.damaged(file, f"its numbers do not form a {shape[0]} x {shape[1]} table")
        return np.array(rows, dtype=np.int64).reshape(shape)
