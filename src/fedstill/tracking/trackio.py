"""Trackio: one run of the project "fedstill" in the folder ``TRACKIO_DIR``, shown by ``trackio show``."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import Any

import numpy as np
import trackio
from numpy.typing import NDArray
from typing_extensions import override

from fedstill.tracking.tracker import PROJECT, Client, Start


class Trackio(Client):
    """Metrics by round; ``transferred`` among them can be chosen as the x axis. Settings are the run's config.

    Every start writes all rounds again, in place of what an earlier start of the same run wrote.
    """

    @override
    def open(self, start: Start) -> int:
        name = f"{start.name} {start.run[:6]}"
        with redirect_stdout(sys.stderr):  # trackio prints, and standard output may be a JSON document
            with suppress(ValueError):  # there is no project yet
                for earlier in [run for run in trackio.Api().runs(PROJECT) if run.name == name]:
                    earlier.delete()
            self._run = trackio.init(
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
        pictures = {f"images/{name}": trackio.Image(image) for name, image in images.items()}
        self._run.log({**facts, **pictures}, step=self._last)

    @override
    def close(self, *, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            trackio.finish()
