"""Masked sums over TLS: three sites and a trustee, each in processes of its own, one helper killed on the way."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")

from fedstill.data.sources import DataSet  # noqa: E402
from fedstill.sites.loopback import loopback  # noqa: E402
from fedstill.sites.site.charges import read_charges  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("FEDSTILL_SLOW"), reason="takes minutes; set FEDSTILL_SLOW=1"),
]
CLIENTS = 3
AFL: dict[str, Any] = {"epsilon": 1.0, "extractor": {"pretrain": "none"}, "space": {"dims": 16}}
TASK: dict[str, Any] = {
    "method": "afl",
    "data": "digits",
    "clients": CLIENTS,
    "model": "scattering",
    "public": "noise=64",
    "noise": "entropy",
    "sums": "masked:helpers=4,records=10000",
    "afl": AFL,
}


def test_three_sites_and_a_trustee_open_a_total_and_go_on_without_a_helper(tmp_path: Path, digits: DataSet) -> None:
    parts = np.array_split(np.arange(len(digits.train)), CLIENTS)
    with loopback(tmp_path / "here") as here:
        for client, part in enumerate(parts):
            records = digits.train[torch.from_numpy(part)]
            here.add_site(client, records, methods=["afl"], budget=8.0, helper=True)
        here.add_site(CLIENTS, None, helper=True)
        here.trust_helpers(*range(CLIENTS + 1))
        for client in range(CLIENTS + 1):
            here.start_site(client)
        first = here.run("first", TASK, 600.0)
        assert here.finish(first, 600.0) == "finished:completed", here.output(first)
        summary = json.loads((here.folder / "runs/first/summary.json").read_text())
        assert summary["sums"][0]["clients"] == CLIENTS
        assert summary["guarantee"]["adders"] == 2

        here.stop(f"site-{CLIENTS}", signal.SIGKILL)
        second = here.run("second", {**TASK, "seed": 1}, 45.0)
        assert here.finish(second, 900.0) == "finished:completed", here.output(second)
        summary = json.loads((here.folder / "runs/second/summary.json").read_text())
        assert summary["sums"][0]["clients"] == CLIENTS, "three helpers of four are a quorum"
        states = [here.folder / f"site-{client}" / "state" for client in range(CLIENTS)]
        assert [len(read_charges(state)) for state in states] == [2] * CLIENTS
