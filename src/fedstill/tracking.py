"""Trackers of a run: TensorBoard, MLflow, Weights & Biases, Trackio.

Every number comes from the run's folder, so a tracker gets the same from a run in one go, from a resumed run, and from
a finished run whose command is repeated.
"""

import importlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedstill.base import errors
from fedstill.engines.transport import Watcher, Watchers
from fedstill.experiment.config import flat
from fedstill.runs.folder import Images, RunFolder

PROJECT = "fedstill"
"""Name of the project or experiment, unless an environment variable of the tracker names another."""
_IMAGES_PER_CLASS = 10


class Start(NamedTuple):
    """A run that a tracker begins to follow, or goes on with.

    Attributes:
        folder: the run's folder.
        run: the run's random number, the same after a resumption.
        name: the run's name.
        settings: all settings of the task and of the method by dotted name; the method's begin with ``method.``.
        facts: the versions, commits and the computer of the last start.
    """

    folder: Path
    run: str
    name: str
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]


class TrackerClient(ABC):
    """A tracker's own client; the methods are called in the order in which they stand here.

    Attributes:
        packages: the modules that it needs, which are imported when a client is made; the first is ``package``.

    Raises:
        ImportError: a package is not installed.
    """

    packages: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.package, *_ = [importlib.import_module(name) for name in self.packages]

    @abstractmethod
    def open(self, start: Start) -> int:
        """Begin or continue a run; returns the last round that the tracker already has, or 0."""

    @abstractmethod
    def log(self, round: int, transferred: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a round, by the round and by the bytes ``transferred`` so far, both ways."""

    @abstractmethod
    def conclude(self, results: Mapping[str, Any], images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Log the results by dotted name, the guarantee's among them, and pictures, uint8 ``(height, width, 3)``."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End the connection; ``failed`` if the run has stopped before its end."""


class Tracker(Watcher):
    """A watcher that tells a tracker the settings, each round's numbers, the results, the guarantee and images.

    A tracker that cannot be opened ends the run before its first request. One that fails later is left out, and the run
    goes on: the same command sends the rest.

    Args:
        client: the tracker's client.
        folder: the run's folder.
        say: is called with a sentence if the tracker fails.
    """

    def __init__(self, client: TrackerClient, folder: Path, say: Callable[[str], None]) -> None:
        self._client = client
        self._folder = RunFolder(folder)
        self._say = say
        self._name = type(client).__name__
        self._last: int | None = None  # the last round that the tracker has; None before it is open
        self._lost = self._concluded = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._last is not None and not self._lost:
            self._attempt(lambda: self._client.close(failed=not self._concluded))

    @override
    def asked(self, step: str, clients: int, answered: int, lost: int) -> None:
        self._open()

    @override
    def resumed(self, done: int, total: int) -> None:
        self._open()
        self._attempt(self._log)

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        self._open()
        self._attempt(self._log)

    @override
    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        self._open()
        self._attempt(self._conclude)

    def _open(self) -> None:
        """Open the tracker, once there is a configuration.

        Raises:
            ValueError: it cannot be opened.
        """
        if self._last is not None or self._lost:
            return
        config = self._folder.read_config()
        task, method = config.experiment, flat(config.method, "method.")
        starts = self._folder.read_environments()
        facts = starts[-1] if starts else {}
        start = Start(self._folder.path, config.run or "", str(self._folder), flat(task) | method, facts)
        try:
            self._last = self._client.open(start)
        except Exception as error:
            self._lost = True
            raise ValueError(
                f"{self._name} cannot be opened: {_words(error)}; leave --track out, or mend it"
            ) from error

    def _log(self) -> None:
        """Log the rounds of ``metrics.jsonl`` that the tracker lacks."""
        assert self._last is not None
        for line in self._folder.read_metrics():
            round = line["round"]
            if round > self._last:
                values = {name: float(value) for name, value in line.items() if _is_number(value) and name != "round"}
                transferred = int(values.get("bytes_up", 0) + values.get("bytes_down", 0))
                self._client.log(round, transferred, values)
                self._last = round

    def _conclude(self) -> None:
        self._log()
        results = flat(self._folder.read_summary().model_dump())
        self._client.conclude(
            {name: value for name, value in results.items() if value is not None and not isinstance(value, tuple)},
            {name: picture(images) for name, images in self._folder.read_images().items()},
        )
        self._concluded = True

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do ``action`` unless the tracker is lost; if it fails, the tracker is."""
        if self._lost:
            return
        try:
            action()
        except Exception as error:
            self._lost = True
            self._say(f"{self._name} failed and gets nothing more ({_words(error)}); the run continues")


def picture(images: Images) -> NDArray[np.uint8]:
    """A row of up to ten images for each class, with a gap of a pixel, uint8 ``(height, width, 3)``."""
    pixels, labels = images
    rows = [np.flatnonzero(labels == label)[:_IMAGES_PER_CLASS] for label in np.unique(labels)]
    _, channels, height, width = pixels.shape
    sheet = np.zeros((len(rows), max(map(len, rows), default=0), height + 1, width + 1, 3), dtype=np.uint8)
    for row, places in enumerate(rows):
        sheet[row, : len(places), :height, :width] = np.moveaxis(pixels[places], 1, -1)  # grey fills three channels
    return np.ascontiguousarray(sheet.transpose(0, 2, 1, 3, 4).reshape(sheet.shape[0] * (height + 1), -1, 3))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


_TAG = "fedstill.run"
_LONGEST = 500
"""Maximum length of a value, which all versions of MLflow take."""
_MOST = 100
"""Maximum number of parameters or tags in a request."""


class MLflow(TrackerClient):
    """One run of an experiment at ``MLFLOW_TRACKING_URI``, or in MLflow's default place.

    Settings as parameters, metrics by round, and under ``by_bytes/`` with the bytes so far as steps.

    A resumed run continues its own, which it finds by a tag. No run of the caller's is active, used or ended.
    """

    packages = ("mlflow", "mlflow.entities")

    @override
    def open(self, start: Start) -> int:
        self._client = self.package.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([place], f"tags.`{_TAG}` = '{start.run}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            tracked = self._client.get_metric_history(self._run, "seconds")
            return max((metric.step for metric in tracked), default=0)
        self._run = self._client.create_run(place, run_name=start.name, tags={_TAG: start.run}).info.run_id
        self._write(params=start.settings, tags={f"environment.{key}": value for key, value in start.facts.items()})
        return 0

    @override
    def log(self, round: int, transferred: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        by_bytes = {f"by_bytes/{key}": value for key, value in values.items() if not key.startswith("bytes_")}
        metrics = [self.package.entities.Metric(key, value, now, transferred) for key, value in by_bytes.items()]
        metrics += [
            self.package.entities.Metric(key, value, now, round) for key, value in values.items()
        ]  # with seconds, which `open` reads
        self._client.log_batch(self._run, metrics=metrics)

    @override
    def conclude(self, results: Mapping[str, Any], images: Mapping[str, NDArray[np.uint8]]) -> None:
        self._write(params={}, tags={f"results.{key}": value for key, value in results.items()})
        for name, image in images.items():
            self._client.log_image(self._run, image, artifact_file=f"images/{name}.png")

    @override
    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "KILLED" if failed else "FINISHED")

    def _write(self, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        texts = [self.package.entities.Param(key, str(value)[:_LONGEST]) for key, value in params.items()]
        for first in range(0, len(texts), _MOST):
            self._client.log_batch(self._run, params=texts[first : first + _MOST])
        labels = [self.package.entities.RunTag(key, str(value)[:_LONGEST]) for key, value in tags.items()]
        for first in range(0, len(labels), _MOST):
            self._client.log_batch(self._run, tags=labels[first : first + _MOST])


FOLDER = "tensorboard"


class TensorBoard(TrackerClient):
    """Event files in ``RUN/tensorboard``, so that ``tensorboard --logdir runs`` shows all runs.

    Scalars by round, and under ``by_bytes`` with the bytes so far as steps; settings and results as text.
    """

    packages = ("torch.utils.tensorboard",)

    @override
    def open(self, start: Start) -> int:
        # every start writes all rounds again: step 0 makes TensorBoard drop what earlier files have
        self._writer = self.package.SummaryWriter(str(start.folder / FOLDER), purge_step=0)
        self._text("settings", start.settings)
        self._text("environment", start.facts)
        return 0

    @override
    def log(self, round: int, transferred: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
            if not name.startswith("bytes_"):
                self._writer.add_scalar(f"by_bytes/{name}", value, transferred)
        self._writer.flush()

    @override
    def conclude(self, results: Mapping[str, Any], images: Mapping[str, NDArray[np.uint8]]) -> None:
        self._text("results", results)
        for name, image in images.items():
            self._writer.add_image(f"images/{name}", image, dataformats="HWC")

    @override
    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _text(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write facts as a table, which TensorBoard renders from Markdown."""
        texts = {key: json.dumps(value, default=str).replace("|", "\\|") for key, value in facts.items()}
        rows = "\n".join(f"| {key} | `{text}` |" for key, text in texts.items())
        self._writer.add_text(name, f"| name | value |\n|---|---|\n{rows}")


class WandB(TrackerClient):
    """One run of the project ``WANDB_PROJECT``; ``WANDB_MODE=offline`` needs no account.

    Metrics by round, and under ``by_bytes/`` over the bytes so far; settings as the run's config.

    A resumed run has the identifier of the first start. Offline, each start has a folder of its own with all rounds.
    """

    packages = ("wandb",)

    @override
    def open(self, start: Start) -> int:
        self._run = self.package.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=start.run or None,
            name=start.name,
            config={**start.settings, "environment": dict(start.facts)},
            resume="allow",
            reinit="create_new",
            settings=self.package.Settings(silent=True, console="off"),
        )
        self._run.define_metric("transferred", hidden=True)
        self._run.define_metric("by_bytes/*", step_metric="transferred")
        return max(int(self._run.starting_step) - 1, 0)

    @override
    def log(self, round: int, transferred: int, values: Mapping[str, float]) -> None:
        by_bytes = {f"by_bytes/{name}": value for name, value in values.items() if not name.startswith("bytes_")}
        self._run.log({**values, **by_bytes, "transferred": transferred}, step=round)

    @override
    def conclude(self, results: Mapping[str, Any], images: Mapping[str, NDArray[np.uint8]]) -> None:
        self._run.summary.update({f"results.{name}": value for name, value in results.items()})
        self._run.log({f"images/{name}": self.package.Image(image) for name, image in images.items()})

    @override
    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(TrackerClient):
    """One run of the project "fedstill" in the folder ``TRACKIO_DIR``, shown by ``trackio show``.

    Metrics by round; ``transferred`` among them can be chosen as the x axis. Settings are the run's config.

    Every start writes all rounds again, in place of what an earlier start of the same run wrote.
    """

    packages = ("trackio",)

    @override
    def open(self, start: Start) -> int:
        name = f"{start.name} {start.run[:6]}"
        with redirect_stdout(sys.stderr):  # trackio prints, and standard output may be a JSON document
            with suppress(ValueError):  # there is no project yet
                for earlier in [run for run in self.package.Api().runs(PROJECT) if run.name == name]:
                    earlier.delete()
            self._run = self.package.init(
                project=PROJECT,
                name=name,
                config={**start.settings, "environment": dict(start.facts)},
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return 0

    @override
    def log(self, round: int, transferred: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "transferred": transferred}, step=round)
        self._last = round

    @override
    def conclude(self, results: Mapping[str, Any], images: Mapping[str, NDArray[np.uint8]]) -> None:
        facts = {f"results/{name}": value for name, value in results.items()}
        pictures = {f"images/{name}": self.package.Image(image) for name, image in images.items()}
        self._run.log({**facts, **pictures}, step=self._last)

    @override
    def close(self, *, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self.package.finish()


_CLIENTS: Mapping[str, type[TrackerClient]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
    "trackio": Trackio,
}
"""The class of each tracker; its package is the extra of the same name."""


@contextmanager
def followed(names: Sequence[str], folder: Path, watcher: Watcher) -> Iterator[Watcher]:
    """``watcher`` and the trackers ``names`` as one watcher; trackers are closed at the end of the block.

    Args:
        names: names of trackers; without any, the block gets ``watcher`` itself.
        folder: the run's folder.
        watcher: another observer, which is told what goes wrong with a tracker.

    Raises:
        ValueError: there is no such tracker, or its package is not installed.
    """
    clients = [client(name) for name in dict.fromkeys(names)]
    with ExitStack() as stack:
        trackers = [stack.enter_context(Tracker(found, folder, watcher.noted)) for found in clients]
        yield Watchers(watcher, *trackers) if trackers else watcher


def client(name: str) -> TrackerClient:
    """The client of a tracker.

    Raises:
        ValueError: as for `followed`.
    """
    if name not in _CLIENTS:
        raise ValueError(f"there is no tracker '{name}'; choose {', '.join(_CLIENTS)}")
    try:
        return _CLIENTS[name]()
    except ImportError as error:
        raise ValueError(
            f"the tracker '{name}' needs the package {error.name or name}, which is not installed; "
            f"{errors.install(name)}"
        ) from error
