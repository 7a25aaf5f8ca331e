"""Weights & Biases: one run of the project ``WANDB_PROJECT``; ``WANDB_MODE=offline`` needs no account."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import wandb
from numpy.typing import NDArray
from typing_extensions import override

from fedstill.tracking.tracker import PROJECT, Client, Start


class WandB(Client):
    """Metrics by round, and under ``by_bytes/`` over the bytes so far; settings as the run's config.

    A resumed run has the identifier of the first start. Offline, each start has a folder of its own with all rounds.
    """

    @override
    def open(self, start: Start) -> int:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=start.run or None,
            name=start.name,
            config={**start.settings, "environment": dict(start.facts)},
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
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
        self._run.log({f"images/{name}": wandb.Image(image) for name, image in images.items()})

    @override
    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
