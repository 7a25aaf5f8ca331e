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


SCHEMA = """
target = "died"
classes = ["no", "yes"]
[columns.age]
kind = "number"
range = [0, 110]
[columns.crp]
kind = "number"
range = [0, 400]
"""


@pytest.mark.parametrize("sums", ["masked:helpers=4,records=3000", "open"])
def test_three_tables_get_one_private_scale_before_the_sums(tmp_path: Path, sums: str) -> None:
    """Real sites with tables: both releases are charged, and the model knows what ranges alone do not tell."""
    rng, n = np.random.default_rng(0), 900
    (tmp_path / "schema.toml").write_text(SCHEMA)
    with loopback(tmp_path / "here") as here:
        for client in range(CLIENTS):
            died = rng.integers(0, 2, n)
            ages, crp = 70 + 3 * died + 3 * rng.normal(size=n), 30 - 8 * died + 8 * rng.normal(size=n)
            lines = [f"{a:.1f},{c:.1f},{'yes' if d else 'no'}" for a, c, d in zip(ages, crp.clip(0), died, strict=True)]
            place = tmp_path / f"{client}.csv"
            place.write_text("age,crp,died\n" + "\n".join(lines) + "\n")
            schema = {"data": str(place), "schema_file": str(tmp_path / "schema.toml"), "measured_scale": True}
            here.add_site(client, None, methods=["afl"], budget=8.0, helper=True, **schema)
        here.add_site(CLIENTS, None, helper=True)
        here.trust_helpers(*range(CLIENTS + 1))
        for client in range(CLIENTS + 1):
            here.start_site(client)
        task = {**TASK, "data": str(tmp_path / "0.csv"), "schema_file": str(tmp_path / "schema.toml"), "sums": sums}
        task |= {"model": "linear", "scale": "private:2", "afl": {"epsilon": 1.0, "space": {"whiten": False}}}
        run = here.run("first", task, 600.0)
        assert here.finish(run, 600.0) == "finished:completed", here.output(run)
        folder = here.folder / "runs/first"
        summary, scale = (json.loads((folder / name).read_text()) for name in ("summary.json", "scale.json"))
        states = [here.folder / f"site-{client}" / "state" for client in range(CLIENTS)]
        assert [[charge.entry.step for charge in read_charges(state)] for state in states] == [
            ["measure_scale", "sum_up"]
        ] * CLIENTS
    assert summary["guarantee"]["holds"] and 2 < summary["guarantee"]["epsilon"] < 3
    assert sum(scale["records"]) == pytest.approx(CLIENTS * n, abs=400) and scale["clear"]
    assert summary["accuracy"] > 0.65
