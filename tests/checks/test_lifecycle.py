"""Years of a deployment in minutes: new keys, a new authority, sites that leave and return, kills, an upgrade."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")

import fedstill  # noqa: E402
from fedstill.data.sources import DataSet  # noqa: E402
from fedstill.sites.loopback import Loopback, loopback  # noqa: E402
from fedstill.sites.server import roster, service  # noqa: E402
from fedstill.sites.site.charges import read_charges  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("FEDSTILL_SLOW"), reason="takes minutes; set FEDSTILL_SLOW=1"),
]

CONNECTED = "SuperNode ID"
PATIENCE = 400.0
RUN: dict[str, Any] = {
    "method": "fedavg-p", "data": "digits", "clients": 1, "model": "scattering", "public": "noise=64",
    "noise": "entropy", "fedavg-p": {"epsilon": 1.0, "extractor": {"pretrain": "none"}, "space": {"dims": 8}},
}  # fmt: skip
OTHER_VERSION = """
import importlib.abc, importlib.machinery, importlib.util, sys
class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        module.__version__ = "9.9.9"
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "fedstill":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        spec.loader = Loader(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder())
"""
"""A ``sitecustomize`` with which every process has another version of fedstill."""


AS_NOBODY = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
]
"""Runs a program as ``nobody``, who can read Python wherever it is installed, and write nothing."""


@pytest.fixture(scope="module")
def here(digits: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """A server and one site with a budget for all runs."""
    with loopback(tmp_path_factory.mktemp("lifecycle")) as deployed:
        deployed.add_site(0, digits.train[torch.arange(300)], methods=["fedavg-p"], budget=20.0)
        deployed.start_site(0)
        yield deployed


def command(here: Loopback, *words: object) -> subprocess.CompletedProcess[str]:
    every = [sys.executable, "-m", "fedstill", *map(str, words)]
    return subprocess.run(every, env=here.environment, cwd=here.folder, capture_output=True, text=True, timeout=900)


def run(here: Loopback, name: str, *flags: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    (here.folder / f"{name}.yaml").write_text(yaml.safe_dump({**RUN, **changes}))
    out = here.folder / "runs" / name
    return command(here, "server", "run", here.server.folder, f"{name}.yaml", "--out", out, *flags)


def charges(here: Loopback) -> int:
    return len(read_charges(here.folder / "site-0" / "state"))


def wait_for_end(here: Loopback, name: str) -> int:
    process = here.processes[name]
    here.wait_for(lambda: process.poll() is not None, f"{name} to end", PATIENCE)
    del here.processes[name]
    return int(process.returncode)


def come_back(here: Loopback) -> None:
    """Start the site until it is let in, as its unit of systemd does."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        before = here.log("site-0").count(CONNECTED)
        here.start_site(0)
        process = here.processes["site-0"]
        here.wait_for(lambda: process.poll() is not None or here.log("site-0").count(CONNECTED) > before, "the site")  # noqa: B023
        if process.poll() is None:
            return
        del here.processes["site-0"]
        time.sleep(5)
    raise RuntimeError(here.log("site-0")[-2000:])


def test_a_run_ends_with_0_or_with_1_and_one_sentence(here: Loopback) -> None:
    done = run(here, "first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"accuracy \d", done.stdout) and "INFO" not in done.stdout
    assert (here.folder / "runs" / "first" / "summary.json").exists()
    assert charges(here) == 1
    failed = run(here, "missing", "--wait", "1", clients=2)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("fedstill: the roster") and "Traceback" not in failed.stdout
    wrong = run(here, "wrong", data="nowhere")
    assert wrong.returncode == 1
    assert "nowhere" in wrong.stderr and wrong.stderr.count("\n") == 1 and "Traceback" not in wrong.stdout


def test_a_new_key_is_the_same_client(here: Loopback) -> None:
    place, before = here.folder / "site-0", charges(here)
    old = roster.read(here.server.roster)[0]
    key = command(here, "site", "rekey", place).stdout.splitlines()[-1]
    between = run(here, "between")  # the node has the key that the server knows
    assert between.returncode == 0 and charges(here) == before + 1, between.stdout + between.stderr
    refused = command(here, "server", "accept", here.server.folder, 0, key)
    assert refused.returncode == 2 and "--replace" in refused.stderr
    done = command(here, "server", "accept", here.server.folder, 0, key, "--replace")
    assert done.returncode == 0, done.stderr
    assert roster.read(here.server.roster)[0].node != old.node
    wait_for_end(here, "site-0")  # the node with the old key
    come_back(here)
    done = run(here, "rekeyed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert charges(here) == before + 2
    again = command(here, "server", "accept", here.server.folder, 0, old.key, "--replace")
    assert again.returncode == 2 and "Flower never takes it again" in again.stderr


def test_a_site_that_left_comes_back_with_its_budget(here: Loopback) -> None:
    place, before = here.folder / "site-0", charges(here)
    assert command(here, "server", "remove", here.server.folder, 0).returncode == 0
    wait_for_end(here, "site-0")
    gone = run(here, "gone", "--wait", "1")
    assert gone.returncode == 1 and "lacks client 0" in gone.stderr
    assert command(here, "server", "invite", here.server.folder, 0).returncode == 0
    old = command(here, "server", "accept", here.server.folder, 0, place / "site.key.pub")
    assert old.returncode == 2 and "'fedstill site rekey' makes a new one" in old.stderr
    command(here, "site", "rekey", place)
    assert command(here, "server", "accept", here.server.folder, 0, place / "site.key.pub").returncode == 0
    come_back(here)
    assert run(here, "returned").returncode == 0
    assert charges(here) == before + 1
    partly = run(here, "partly", clients=2, min_clients=1)  # client 1 has left for good
    assert partly.returncode == 0, partly.stdout + partly.stderr
    summary = json.loads((here.folder / "runs" / "partly" / "summary.json").read_text())
    assert [(r["client"], r["reason"]) for r in summary["refused"]] == [(1, "the roster has no key of it")]


def test_a_new_authority_and_a_new_certificate(here: Loopback) -> None:
    place = here.folder / "site-0"
    assert command(here, "server", "renew", here.server.folder, "--authority").returncode == 0
    invitation = here.server.folder / "invitations" / "site-0.toml"
    assert command(here, "site", "join", place, "--invite", invitation).returncode == 0
    assert command(here, "server", "renew", here.server.folder).returncode == 0
    assert command(here, "server", "stop", here.server.folder).returncode == 0
    assert wait_for_end(here, "server") == 0
    here.stop("site-0")
    here.start_server()
    come_back(here)
    state = json.loads(command(here, "server", "status", here.server.folder, "--json").stdout)
    assert state["running"] is True
    assert [(site["client"], site["state"]) for site in state["sites"]] == [(0, "online")]
    assert {entry["status"] for entry in state["runs"]} == {"finished:completed", "finished:failed"}


def test_a_server_and_a_site_that_are_killed_leave_no_process(here: Loopback) -> None:
    for name in ("server", "site-0"):
        children = psutil.Process(here.processes[name].pid).children(recursive=True)
        assert children
        here.processes[name].kill()  # this process alone, not its group
        here.processes[name].wait()
        gone, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
        del here.processes[name]
    here.start_server()  # its ports are free
    come_back(here)
    with pytest.raises(ValueError, match="runs already"):
        service.start(here.server, print)


def test_an_upgrade_leaves_keys_budget_and_finished_runs(here: Loopback, tmp_path: Path) -> None:
    if not (here.folder / "runs" / "first" / "summary.json").exists():
        assert run(here, "first").returncode == 0
    before, members = charges(here), roster.read(here.server.roster)
    finished = (here.folder / "runs" / "first" / "summary.json").read_bytes()
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    older = here.environment["PYTHONPATH"]
    for name in ("site-0", "server"):
        here.stop(name)
    here.environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{older}"
    try:
        assert "9.9.9" in command(here, "--version").stdout
        here.start_server()
        come_back(here)
        assert roster.read(here.server.roster) == members
        old = run(here, "first")  # was begun, and finished, by the version of before
        assert (old.returncode, charges(here)) in ((0, before), (1, before))
        assert (here.folder / "runs" / "first" / "summary.json").read_bytes() == finished
        new = run(here, "upgraded")
        assert new.returncode == 0, new.stdout + new.stderr
        assert "9.9.9" in (here.folder / "runs" / "upgraded" / "config.json").read_text()
        assert charges(here) == before + 1
    finally:
        here.environment["PYTHONPATH"] = older


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user, by setpriv"
)
def test_a_plain_user_with_records_that_can_only_be_read() -> None:
    """The entry point of a container or a unit, as ``nobody``, who can write one folder."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        own = root / "own"
        own.mkdir(mode=0o700)
        os.chown(own, nobody, nobody)
        records = root / "data.npz"
        np.savez(records, x_train=np.zeros((60, 8, 8, 1), np.uint8), y_train=np.arange(60) % 2)
        records.chmod(0o444)
        invite = service.init(root / "server", {"host": "localhost"}).invite(0, None)
        shown = root / "site-0.toml"
        shown.write_bytes(invite.read_bytes())
        environment = {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(fedstill.__file__).parents[1]),
            "FEDSTILL_CACHE": str(own / "cache"), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent",
        }  # fmt: skip

        def plain(*words: object) -> subprocess.CompletedProcess[str]:
            every = [*AS_NOBODY, sys.executable, "-m", "fedstill", *map(str, words)]
            return subprocess.run(every, env=environment, cwd=own, capture_output=True, text=True)

        made = plain("site", "init", own / "site", "--invite", shown, "--data", records, "--methods", "fedavg-p",
                     "--budget", 4)  # fmt: skip
        assert made.returncode == 0, made.stderr
        assert (own / "site" / "state").stat().st_uid == nobody
        assert "User=nobody" in (own / "site" / "fedstill-site.service").read_text()
        elsewhere = plain("server", "init", root / "elsewhere", "--host", "localhost")
        assert elsewhere.returncode == 2 and elsewhere.stderr.startswith("fedstill: ")
        assert plain("server", "init", own / "server", "--host", "localhost").returncode == 0
