"""Runs, read from their folders (`fedstill.runs`)."""

import base64
import io
import os
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.text import Text
from typing_extensions import override

from fedstill.base.errors import front_door
from fedstill.base.files import in_words, path_of
from fedstill.data.table_schema import TableSchema
from fedstill.privacy.guarantee import Guarantee, no_guarantee
from fedstill.report import guarantees
from fedstill.report.drawing import PAGE_WIDTH, Axis, Line, Plot, page_svg
from fedstill.runs.folder import SITES, Images, RunFolder, runs_below
from fedstill.runs.journal import JournalFiles, Refusal

if TYPE_CHECKING:  # both take a second to import
    from pandas import DataFrame

    from fedstill.experiment.trained import Trained


def accuracy_words(mean: float | None, spread: float | None) -> str:
    """``"92.31 ± 0.18"`` in percent, or only one number, or a dash."""
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}" + (f" ± {100 * spread:.2f}" if spread is not None else "")


def measure_words(values: Sequence[float | None]) -> str:
    """Values of a measure over seeds as ``"0.711 ± 0.012"``, mean and sample standard deviation.

    A dash where a seed has none: the mean of the others would be that of the seeds that went well.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "–"
    return f"{np.mean(known):.4g}" + (f" ± {np.std(known, ddof=1):.2g}" if len(known) > 1 else "")


def human_bytes(count: float) -> str:
    """Three significant digits in decimal units: ``"78.5 kB"``, ``"1.27 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plain(text: str) -> Text:
    """A text for the terminal without markup or control characters, which words of a stranger's run may have."""
    return Text("".join(c if c.isprintable() else "?" for c in text))


_NONE = no_guarantee("", simulated=False)


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, as read from its folder (K clients, C classes).

    Attributes:
        folder: the run's folder.
        label: the run's name in tables and figures, the same for all seeds.
        config: the content of ``config.json``.
        summary: the content of ``summary.json``; ``accuracy`` in [0, 1] or None.
        guarantee: the privacy guarantee.
        refused: the replies that were not used.
        environment: versions, processor, commits and time of each start, in order (`fedstill.runs.environment`).
        metrics: one entry per logged round, in order; bytes are sums over all clients and rounds so far.
        class_names: C names; empty before a run with real sites is judged.
        counts: records of each class at each client, int64 ``(K, C)``, or None.
        confusion: test records by true (rows) and predicted class, int64 ``(C, C)``, or None.
        clients: each client's ``accuracy`` and ``confusion`` on its own test records or None (triples: true class,
            predicted class, count), ``records``, ``test_records``, ``bytes_up``, ``bytes_down`` and number of
            ``refused`` replies.
        numbers: the content of ``numbers.json``, errors with intervals of a task whose target is a number; or None.
        by_value: after a partition by:COLUMN, such triples of the test records of each value of the column, as of
            each hospital; None otherwise.
        measures: of each of two classes, its measures on the test records as value, lower and upper end of the 95 %
            interval; None otherwise.
        tries: the content of ``tries/tries.json``, tries of ``--tune``, each with its value; None without.
        images: sample images by name, uint8 ``(n, c, h, w)`` with labels int64 ``(n,)``; ``"real"`` are test images.
        finished: whether the run has finished; if not, ``summary`` has the numbers of the last logged round, and the
            guarantee is unknown.
        date: the day of the last result, ``YYYY-MM-DD`` in UTC.
    """

    folder: Path
    label: str
    config: dict[str, Any]
    summary: dict[str, Any]
    guarantee: Guarantee = _NONE
    refused: tuple[Refusal, ...] = ()
    environment: tuple[dict[str, Any], ...] = ()
    metrics: tuple[dict[str, Any], ...] = ()
    class_names: tuple[str, ...] = ()
    counts: NDArray[np.int64] | None = None
    confusion: NDArray[np.int64] | None = None
    clients: tuple[dict[str, Any], ...] = ()
    by_value: Mapping[str, Sequence[Sequence[int]]] | None = None
    measures: Mapping[str, Mapping[str, Sequence[float | None]]] | None = None
    numbers: Mapping[str, Any] | None = None
    images: dict[str, Images] | None = None
    tries: Mapping[str, Any] | None = None
    finished: bool = True
    date: str = ""

    @property
    def accuracy(self) -> float | None:
        """Share of the test records that are classified correctly; None where none was, or the target is a number."""
        accuracy: float | None = self.summary["accuracy"]
        return accuracy

    @property
    def table_schema(self) -> TableSchema | None:
        """The schema of the run's table, as it was for the run; None without one.

        Raises:
            ValueError: an earlier version kept the path alone, and the file there can't be read.
        """
        if (kept := self.config.get("table_schema")) is not None:
            return TableSchema.kept(kept, str(self.folder))
        named = self.config["experiment"].get("schema_file")
        return None if named is None else TableSchema.read(named)

    @property
    def persons(self) -> str:
        """The column of the values that stay together, as patients; empty without one."""
        return str((self.summary.get("largest_group") or {}).get("column", ""))

    def __getitem__(self, key: str) -> Any:
        """The value of ``key`` in ``summary``; KeyError if there is none."""
        return self.summary[key]

    def __contains__(self, key: object) -> bool:
        """Whether ``summary`` has ``key``."""
        return key in self.summary

    def __iter__(self) -> Iterator[str]:
        """The keys of ``summary``."""
        return iter(self.summary)

    def keys(self) -> KeysView[str]:
        """The keys of ``summary``, by which ``dict(record)`` copies it."""
        return self.summary.keys()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key`` in ``summary``, or ``default``."""
        return self.summary.get(key, default)

    def __fspath__(self) -> str:
        """The folder, so that whatever takes a run's path takes its record."""
        return str(self.folder)

    def load_model(self) -> "Trained":
        """The run's final model (`fedstill.load_model`)."""
        from fedstill.experiment.trained import load_model  # imported here because torch takes a second

        return load_model(self.folder)

    def to_pandas(self) -> "DataFrame":
        """A `pandas.DataFrame` of ``metrics``: a row for each logged round."""
        import pandas as pd

        return pd.DataFrame(list(self.metrics))

    @override
    def __repr__(self) -> str:
        """The run on one line; its arrays are attributes."""
        return (
            f"<RunRecord {self.label} on {self.summary.get('data')}: {self.state}, {' '.join(self.score)}, "
            f"guarantee {guarantees.words(self.guarantee)}, "
            f"{str(self.folder)!r}>"
        )

    def error(self, name: str) -> float | None:
        """``rmse``, ``mae`` or ``r2`` of a run whose target is a number; None without a result, and of classes."""
        value: float | None = (self.summary.get("errors") or {}).get(name)
        return value

    def measured(self, name: str) -> float | None:
        """The measure that the run was asked to report first (``--measure``), if that is this one."""
        found = self.summary.get("measure") or {}
        value: float | None = found.get("value") if found.get("name") == name else None
        return value

    @property
    def score(self) -> tuple[str, str]:
        """The name of the main measure and its value, in words; of a run without a result, its accuracy as a dash."""
        if measure := self.summary.get("measure"):
            return measure["name"], measure_words([measure["value"]])
        if errors := self.summary.get("errors"):
            return "RMSE", f"{errors['rmse']:.4g}"
        return "accuracy", f"{accuracy_words(self.summary.get('accuracy'), None)} %"

    def _repr_html_(self) -> str:
        """The results as a table and a picture, for a notebook's cell."""
        from fedstill.report.markup import part  # imported here because its library is for pages only

        summary, rows = self.summary, {"state": self.state} if not self.finished else {}
        rows |= {
            **dict([self.score]),
            "up, per client": human_bytes(summary["bytes_up_per_client"]),
            "down, per client": human_bytes(summary["bytes_down_per_client"]),
            "rounds": str(summary["rounds"]),
            "guarantee": guarantees.words(self.guarantee),
            "time": f"{summary['seconds']:.1f} s",
        }
        title = f"{self.label} on {summary['data']}, {summary['partition']}, {summary['clients']} clients"
        rounds = {line["round"]: line["accuracy"] for line in self.metrics if line.get("accuracy") is not None}
        drawn = sent(self.images) or curve(rounds)
        return str(part("run", title, rows, drawn))

    @property
    def state(self) -> str:
        """``"finished"``, or how far the run is, as ``"unfinished: round 7 of 20"``."""
        if self.finished:
            return "finished"
        total = self.config["method"].get("rounds")
        done = self.summary["rounds"]
        if not done:
            return "unfinished: no round yet"
        return f"unfinished: round {done}" + (f" of {total}" if isinstance(total, int) else "")

    def class_name(self, label: int) -> str:
        """The name of class ``label``, or its number."""
        return self.class_names[label] if label < len(self.class_names) else str(label)


@front_door
def find_runs(folder: str | Path, *, unfinished: bool = False) -> list[Path]:
    """The runs in ``folder`` or in its subfolders, in natural order (seed-2 before seed-10).

    Args:
        folder: a run's folder, or one above.
        unfinished: whether to return runs that have not finished, too.

    Raises:
        InputError: there is no such folder, or it has no such run.
    """
    runs = [run for run in runs_below(path_of(folder, "the folder")) if unfinished or RunFolder(run).is_finished]
    if not runs:
        kind = "run" if unfinished else "finished run"
        raise ValueError(f"{folder} has no {kind}; give a run's folder, or repeat its command to resume it")
    return runs


Runs = RunRecord | str | Path | Iterable[RunRecord | str | Path]
"""One run or several, each by its record or by its folder."""


def records_of(runs: Runs) -> list[RunRecord]:
    """The records of runs.

    Raises:
        ValueError: they are none.
    """
    several = [runs] if isinstance(runs, str | os.PathLike) else runs
    if not isinstance(several, Iterable):
        raise ValueError(f"the runs are {in_words(several)}; give a RunRecord or a run's folder, or several in a list")
    return [run if isinstance(run, RunRecord) else read_run(run) for run in several]


@front_door
def read_run(folder: str | Path, *, unfinished: bool = False) -> RunRecord:
    """Read one run.

    Args:
        folder: the run's folder.
        unfinished: whether to accept a run that has not finished.

    Raises:
        InputError: ``folder`` is not a finished run, or a file is damaged; one sentence.
    """
    run = RunFolder(path_of(folder, "the run"))
    if unfinished and run.config.is_file() and not run.is_finished:
        return _read_unfinished(run)
    run.check_finished()
    config, summary = run.read_config(), run.read_summary()
    run.check_results(run.evaluation, run.numbers, run.metrics, JournalFiles(run.journal).spent)
    class_names, counts = run.read_partition(summary.clients)
    return RunRecord(
        folder=run.path,
        label=summary.label,
        config=config.content,
        summary=summary.model_dump(),
        guarantee=summary.guarantee,
        refused=summary.refused,
        environment=run.read_environments(),
        metrics=run.read_metrics(),
        class_names=class_names,
        counts=counts,
        confusion=run.read_evaluation(None if counts is None else len(class_names)),
        clients=run.read_clients(),
        numbers=None if (errors := run.read_numbers()) is None else errors.model_dump(exclude_none=True),
        measures=run.read_measures(),
        by_value=None if (found := run.read_by_value()) is None else found.cells,
        images=run.read_images(),
        tries=run.read_tries() if run.tries.exists() else None,
        date=_day(run.summary),
    )


def _read_unfinished(run: RunFolder) -> RunRecord:
    """The numbers that a run has logged so far; nothing is written, as its process may still be at work."""
    config, metrics = run.read_config(), run.read_metrics()
    try:
        task = {key: config.experiment[key] for key in ("data", "partition", "clients", "model", "seed")}
        name = config.method["name"]
    except KeyError as error:
        raise run.damaged(run.config, f"it has no setting {error}") from error
    if run.asked_sites:
        task["partition"] = SITES
    if not (isinstance(task["clients"], int) and task["clients"] > 0 and isinstance(task["seed"], int)):
        raise run.damaged(run.config, "clients and seed must be integers")
    last = metrics[-1] if metrics else {}
    accuracies = [line["accuracy"] for line in metrics if line["accuracy"] is not None]
    up, down = (last.get(key) or 0 for key in ("bytes_up", "bytes_down"))
    summary = {
        **task,
        "method": name,
        "label": config.label,
        "rounds": last.get("round", 0),
        "accuracy": accuracies[-1] if accuracies else None,
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_per_client": up / task["clients"],
        "bytes_down_per_client": down / task["clients"],
        "seconds": last.get("seconds") or 0.0,
        "judged_on": "test records",
        "version": config.version,
    }
    class_names, counts = run.read_partition(task["clients"])
    return RunRecord(
        folder=run.path,
        label=config.label,
        config=config.content,
        summary=summary,
        environment=run.read_environments(),
        metrics=metrics,
        class_names=class_names,
        counts=counts,
        finished=False,
        date=_day(run.metrics if run.metrics.exists() else run.config),
    )


def close_if_private(records: Iterable[RunRecord], made: Iterable[Path]) -> None:
    """Let their owner alone read the files ``made`` of runs, if one of these is so too: they show its exact counts."""
    if any(RunFolder(record.folder).is_private for record in records):
        for file in made:
            file.chmod(0o600)


def _day(file: Path) -> str:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()


TEST = "real"
"""The name of the test images in a run's folder."""
_BLUE = "#0072B2"
_MOST_CLASSES, _PER_CLASS, _PIXELS = 10, 5, 32


def curve(accuracies: dict[int, float]) -> str:
    """Accuracy in percent by round as an SVG; empty for fewer than two rounds."""
    if len(accuracies) < 2:
        return ""
    xs, ys = [*map(float, accuracies)], [100 * value for value in accuracies.values()]
    tips = [f"round {at:g}: {value:.2f} %" for at, value in zip(xs, ys, strict=True)]
    plot = Plot(Axis("round", integer=True), [Axis("accuracy, %")], [Line("", xs, ys, _BLUE, tips=tips)], height=0.45)
    svg = page_svg(plot, "curve", "accuracy in percent by round")
    return f'<div style="max-width: {PAGE_WIDTH:g}px">{svg}</div>'


def sent(images: dict[str, Images] | None) -> str:
    """Images that clients sent, a row for each class, as one PNG; empty without such images."""
    pair = next((pair for name, pair in (images or {}).items() if name != TEST), None)
    if pair is None:
        return ""
    pixels, labels = pair
    _, channels, height, width = pixels.shape
    shown = np.unique(labels)[:_MOST_CLASSES]
    found = [np.flatnonzero(labels == label)[:_PER_CLASS] for label in shown]
    page = np.zeros((len(shown) * (height + 1), max(map(len, found)) * (width + 1), channels + 1), np.uint8)
    for row, places in enumerate(found):
        for column, image in enumerate(pixels[places]):
            top, left = row * (height + 1), column * (width + 1)
            page[top : top + height, left : left + width, :channels] = image.transpose(1, 2, 0)
            page[top : top + height, left : left + width, channels] = 255
    scale = max(1, _PIXELS // height)
    about = f"images that clients sent, of {len(shown)} classes"
    high, wide = scale * page.shape[0], scale * page.shape[1]
    style = f'alt="{about}" title="{about}" style="image-rendering:pixelated"'
    return f'<img src="data:image/png;base64,{png(page)}" width="{wide}" height="{high}" {style}>'


def png(pixels: NDArray[np.uint8]) -> str:
    """Pixels with transparency, uint8 ``(height, width, channels + 1)``, as a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")  # two channels: grey and alpha; four: colours and alpha
    return base64.b64encode(file.getvalue()).decode("ascii")
