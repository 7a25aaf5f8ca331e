"""TensorBoard: event files in ``RUN/tensorboard``, so that ``tensorboard --logdir runs`` shows all runs."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from typing_extensions import override

from fedstill.tracking.tracker import Client, Start

FOLDER = "tensorboard"


class TensorBoard(Client):
    """Scalars by round, and under ``by_bytes`` with the bytes so far as steps; settings and results as text."""

    @override
    def open(self, start: Start) -> int:
        # every start writes all rounds again: step 0 makes TensorBoard drop what earlier files have
        self._writer = SummaryWriter(str(start.folder / FOLDER), purge_step=0)
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
