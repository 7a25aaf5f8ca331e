"""MLflow: one run of an experiment at ``MLFLOW_TRACKING_URI``, or in MLflow's default place."""

import os
import time
from collections.abc import Mapping
from typing import Any

import mlflow
import numpy as np
from mlflow.entities import Metric, Param, RunTag
from numpy.typing import NDArray
from typing_extensions import override

from fedstill.tracking.tracker import PROJECT, Client, Start

_TAG = "fedstill.run"
_LONGEST = 500
"""Maximum length of a value, which all versions of MLflow take."""
_MOST = 100
"""Maximum number of parameters or tags in a request."""


class MLflow(Client):
    """Settings as parameters, metrics by round, and under ``by_bytes/`` with the bytes so far as steps.

    A resumed run continues its own, which it finds by a tag. No run of the caller's is active, used or ended.
    """

    @override
    def open(self, start: Start) -> int:
        self._client = mlflow.MlflowClient()
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
        metrics = [Metric(key, value, now, transferred) for key, value in by_bytes.items()]
        metrics += [Metric(key, value, now, round) for key, value in values.items()]  # with seconds, which `open` reads
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
        texts = [Param(key, str(value)[:_LONGEST]) for key, value in params.items()]
        for first in range(0, len(texts), _MOST):
            self._client.log_batch(self._run, params=texts[first : first + _MOST])
        labels = [RunTag(key, str(value)[:_LONGEST]) for key, value in tags.items()]
        for first in range(0, len(labels), _MOST):
            self._client.log_batch(self._run, tags=labels[first : first + _MOST])
