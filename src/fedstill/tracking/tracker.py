"""The watcher that tells an experiment tracker about a run, and the interface of a tracker's client.

Every number comes from the run's folder, so a tracker gets the same from a run in one go, from a resumed run, and from
a finished run whose command is repeated.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedstill.engines.transport import Watcher
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


class Client(ABC):
    """A tracker's own client; the methods are called in the order in which they stand here."""

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

    def __init__(self, client: Client, folder: Path, say: Callable[[str], None]) -> None:
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
    def asked(self, step: str, clients: int, answered: int) -> None:
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
            ValueError: it cannot be opened; one sentence.
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
