"""Trackers of a run, by name."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedstill import extras
from fedstill.engines.transport import Watcher, Watchers
from fedstill.tracking.tracker import Client, Tracker

_CLIENTS = {
    "tensorboard": "fedstill.tracking.tensorboard:TensorBoard",
    "mlflow": "fedstill.tracking.mlflow:MLflow",
    "wandb": "fedstill.tracking.wandb:WandB",
    "trackio": "fedstill.tracking.trackio:Trackio",
}
"""``module:class`` of each tracker's `Client`; its package is the extra of the same name."""


@contextmanager
def followed(names: Sequence[str], folder: Path, watcher: Watcher) -> Iterator[Watcher]:
    """``watcher`` and the trackers ``names`` as one watcher; trackers are closed at the end of the block.

    Args:
        names: names of trackers; without any, the block gets ``watcher`` itself.
        folder: the run's folder.
        watcher: another observer, which is told what goes wrong with a tracker.

    Raises:
        ValueError: there is no such tracker, or its package is not installed; one sentence.
    """
    clients = [client(name) for name in dict.fromkeys(names)]
    with ExitStack() as stack:
        trackers = [stack.enter_context(Tracker(found, folder, watcher.noted)) for found in clients]
        yield Watchers(watcher, *trackers) if trackers else watcher


def client(name: str) -> Client:
    """The client of a tracker.

    Raises:
        ValueError: as for `followed`.
    """
    if name not in _CLIENTS:
        raise ValueError(f"there is no tracker '{name}'; choose {', '.join(_CLIENTS)}")
    module, _, kind = _CLIENTS[name].partition(":")
    try:
        made: Client = getattr(importlib.import_module(module), kind)()
    except ImportError as error:
        raise ValueError(
            f"the tracker '{name}' needs the package {error.name or name}, which is not installed; "
            f"{extras.install(name)}"
        ) from error
    return made
