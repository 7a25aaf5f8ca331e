"""Real processes over TLS with keys on this machine's loopback: the same results as a simulation, whatever breaks."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")

from fedstill import methods  # noqa: E402
from fedstill.data.sources import DataSet  # noqa: E402
from fedstill.experiment.config import Experiment  # noqa: E402
from fedstill.experiment.loopback import Loopback, certificates, loopback, site_key  # noqa: E402
from fedstill.experiment.run import Job, run, share_out  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

thorough = pytest.mark.skipif(
    not os.environ.get("FEDSTILL_SLOW"), reason="takes minutes: each exchange of a deployment does; set FEDSTILL_SLOW=1"
)
SITES = 4
TASK: dict[str, Any] = {"data": "digits", "clients": SITES, "model": "convnet:width=8,depth=2", "public": "noise=64"}
METHODS: dict[str, dict[str, Any]] = {
    "scaffold": {"rounds": 2, "local": {"lr": 0.05, "batch_size": 32, "epochs": 1}},  # keeps state at the sites
    "fedgm": {"ipc": 1, "training": {"epochs": 2}, "matching": {"nets": 1, "batch_size": 8}},
    "fedavg-p": {"extractor": {"pretrain": "none"}, "space": {"dims": 8}},
}


@pytest.fixture(scope="module")
def here(digits: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """Four sites that answer everything."""
    task = share_out(Experiment(**TASK), None)
    with loopback(tmp_path_factory.mktemp("deployment")) as deployed:
        for client, (own, _) in enumerate(task.parts):
            allowed = {"methods": [*METHODS, "small:Probe"], "own_code": True}
            deployed.add_site(
                client, task.train[torch.from_numpy(own)], unprotected=True, simulated_noise=True, **allowed
            )
            deployed.start_site(client)
        yield deployed


def completed(here: Loopback, run_id: str, name: str) -> Path:
    status = here.finish(run_id)
    assert status == "finished:completed", here.said(run_id)[-3000:]
    return here.folder / "runs" / name


@pytest.mark.parametrize("name", ["fedavg-p", *(pytest.param(name, marks=thorough) for name in ("scaffold", "fedgm"))])
def test_a_deployment_gives_the_weights_and_bytes_of_a_simulation(name: str, here: Loopback, tmp_path: Path) -> None:
    found = completed(here, here.run(name, {"method": name, **TASK, name: METHODS[name]}), name)
    summary = run(Job(Experiment(**TASK, workers=0), name, methods.get(name)(**METHODS[name]), tmp_path / "simulated"))
    assert (found / "model.safetensors").read_bytes() == (tmp_path / "simulated" / "model.safetensors").read_bytes()
    theirs = json.loads((found / "summary.json").read_text())
    same = ("bytes_up", "bytes_down", "accuracy", "guarantee", "refused", "rounds")
    assert {key: theirs[key] for key in same} == {key: summary[key] for key in same}
    meter = [sorted_lines(folder / "journal" / "meter.jsonl") for folder in (found, tmp_path / "simulated")]
    assert meter[0] == meter[1]


def sorted_lines(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(json.dumps({k: v for k, v in line.items() if k != "seconds"}, sort_keys=True) for line in lines)


def probe(**changes: Any) -> dict[str, Any]:
    settings = {"rounds": 1, "misbehave": changes.pop("misbehave", {})}
    return {"method": "small:Probe", **TASK, "public": None, **changes, "small:Probe": settings}


@thorough
def test_a_superlink_that_is_killed_costs_no_answer(here: Loopback) -> None:
    name = "restarted"
    first = here.run(name, probe(misbehave={3: "nap"}))  # the others answer at once, the last a little later
    folder = here.folder / "runs" / name / "journal" / "000000-update"
    here.wait_for(lambda: len(list(folder.glob("*.reply"))) == SITES - 1, "three replies", 120)
    kept = {f.name: f.read_bytes() for f in folder.glob("*.reply")}
    here.stop("superlink", signal.SIGKILL)
    here.superlink()
    assert here.finish(first) == "finished:failed"
    out = completed(here, here.run(name, probe(misbehave={3: "nap"})), name)
    again = {f.name: f.read_bytes() for f in folder.glob("*.reply")}
    assert {name: again[name] for name in kept} == kept
    lines = [json.loads(line) for line in (out / "journal" / "meter.jsonl").read_text().splitlines()]
    assert [line["client"] for line in lines if "down" in line].count(0) == 1  # was not asked again
    assert json.loads((out / "summary.json").read_text())["refused"] == []


@thorough
def test_a_site_s_refusal_reaches_the_server_and_nothing_else_does(here: Loopback) -> None:
    place = here.folder / "site-2" / "policy.toml"
    before = place.read_text()
    place.write_text(before.replace('"small:Probe",', ""))  # the site changes its mind; nobody has to be asked
    assert place.read_text() != before
    try:
        out = completed(here, here.run("refused", probe(min_clients=3)), "refused")
    finally:
        place.write_text(before)
    (refused,) = json.loads((out / "summary.json").read_text())["refused"]
    assert refused["client"] == 2
    assert "its policy answers scaffold, fedgm, fedavg-p, not 'small:Probe.update'" in refused["reason"]
    log = (here.folder / "site-2" / "state" / "log.jsonl").read_text()
    assert '"what": "refused"' in log.splitlines()[-1]


@thorough
def test_wrong_keys_and_plaintext_are_not_let_in(here: Loopback) -> None:
    stranger = here.folder / "site-7"
    stranger.mkdir()
    site_key(stranger / "site.key")
    (stranger / "policy.toml").write_text("")
    here.start_site(7)
    here.wait_for(lambda: here.processes["site-7"].poll() is not None, "the stranger to give up", 60)
    assert here.processes.pop("site-7").returncode != 0
    assert "Failed to activate SuperNode" in here.log("site-7")
    words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{here.port}", "--max-retries", "1"]
    here.start("plaintext", [*words, "--host", "127.0.0.1", "--port", "0"])
    here.wait_for(lambda: here.processes["plaintext"].poll() is not None, "the plaintext client to give up", 90)
    assert here.processes.pop("plaintext").returncode != 0
    nodes = json.loads(here.flwr("supernode", "list", "here", "--format", "json").stdout)["nodes"]
    assert sum(node["status"] == "online" for node in nodes) <= SITES


@thorough
def test_a_site_that_is_killed_while_it_works_is_left_out(here: Loopback) -> None:
    name = "killed"
    running = here.run(name, probe(misbehave={1: "sleep"}, min_clients=3, timeout=40), wait=60)
    folder = here.folder / "runs" / name / "journal" / "000000-update"
    here.wait_for(lambda: len(list(folder.glob("*.reply"))) == SITES - 1, "three replies", 120)
    here.stop("site-1", signal.SIGKILL)
    out = completed(here, running, name)
    (refused,) = json.loads((out / "summary.json").read_text())["refused"]
    assert refused["client"] == 1
    assert "no reply within 40 s" in refused["reason"]


@thorough
def test_an_expired_certificate_is_noticed_by_the_site(tmp_path: Path) -> None:
    with loopback(tmp_path, certificates(tmp_path / "old", days=-1)) as here:
        place = here.folder / "site-0"
        place.mkdir()
        site_key(place / "site.key")
        here.start_site(0)
        here.wait_for(lambda: here.processes["site-0"].poll() is not None, "the site to give up", 60)
        assert here.processes.pop("site-0").returncode != 0
        assert "certificate has expired" in here.log("site-0")
