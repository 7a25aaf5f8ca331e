"""Real processes over TLS with keys on this machine's loopback: the same results as a simulation, whatever breaks."""

import http.client
import json
import math
import os
import signal
import socket
import ssl
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import garbage
import psutil  # type: ignore[import-untyped]
import pytest
import tomli_w
import torch
from small import Probe
from users import OTHER, ROOT, as_user

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
import httpx  # noqa: E402
from flwr.proto.runtime_pb2 import AcquireTaskRequest  # noqa: E402
from flwr.supercore.constant import TaskType  # noqa: E402
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor  # noqa: E402

from fedstill import methods  # noqa: E402
from fedstill.data.sources import DataSet  # noqa: E402
from fedstill.engines.flower import node, superlink  # noqa: E402
from fedstill.experiment.config import Experiment  # noqa: E402
from fedstill.experiment.job import Job
from fedstill.experiment.run import run  # noqa: E402
from fedstill.experiment.task import share_out  # noqa: E402
from fedstill.sites.loopback import Loopback, loopback  # noqa: E402
from fedstill.sites.site import (
    setup,  # noqa: E402
    site_journal,  # noqa: E402
)
from fedstill.sites.site.charges import read_charges  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

thorough = pytest.mark.skipif(
    not os.environ.get("FEDSTILL_SLOW"), reason="takes minutes: each exchange of a deployment does; set FEDSTILL_SLOW=1"
)
SITES = 4 if os.environ.get("FEDSTILL_SLOW") else 2
HOOKS = Path(__file__).parents[1] / "support" / "hooks"
CONNECTED = "SuperNode ID"
NO_POLICY = 'client = 7\ndata = "data.npz"\nstate = "state"\nmethods = []\n'
PATIENCE = 900.0
"""Seconds to wait for what takes some where nothing else runs."""
LATE = 150.0
"""Seconds after which a site is missing, in runs that wait for it in vain; the others need them on a busy machine."""
TASK: dict[str, Any] = {"data": "digits", "clients": SITES, "model": "convnet:width=8,depth=2", "public": "noise=64"}
OWN = [
    "/v1/control/start-run",
    "/v1/control/list-runs",
    "/v1/control/stream-logs",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/runtime/pull-app-inputs",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/get-run/",
    "//v1/control/start-run",
    "/docs",
    "/openapi.json",
]
FORGED = [
    {"X-Forwarded-For": "127.0.0.1"},
    {"X-Forwarded-For": "127.0.0.1:{port}"},
    {"Forwarded": "for=127.0.0.1", "X-Real-IP": "127.0.0.1"},
]
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
            allowed = {"methods": [*METHODS, "small:Probe"], "own_code": ["small:Probe"]}
            deployed.add_site(
                client, task.train[torch.from_numpy(own)], unprotected=True, simulated_noise=True, **allowed
            )
            start(deployed, client)
        yield deployed


@pytest.fixture
def everyone(here: Loopback) -> Loopback:
    """The four sites, all of them there."""
    for client in range(SITES):
        if f"site-{client}" not in here.processes:
            come_back(here, client)
    return here


def start(here: Loopback, client: int) -> None:
    """Start a site that looks for a hook at each message (tests/support/hooks)."""
    paths = f"{HOOKS}{os.pathsep}{here.environment['PYTHONPATH']}"
    here.start_site(client, PYTHONPATH=paths, FEDSTILL_TEST_HOOK=str(here.folder / f"site-{client}" / "hook"))


def come_back(here: Loopback, client: int) -> None:
    """Start a killed site until it is let in, which takes the SuperLink a minute (code 2004)."""
    name = f"site-{client}"
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        before = here.log(name).count(CONNECTED)
        start(here, client)
        process = here.processes[name]
        here.wait_for(
            lambda: process.poll() is not None or here.log(name).count(CONNECTED) > before,  # noqa: B023
            f"site {client} to be let in or not",
            PATIENCE,
        )
        if process.poll() is None:
            return
        del here.processes[name]
        time.sleep(5)
    raise RuntimeError(f"site {client} is not let in: {here.log(name)[-1000:]}")


@contextmanager
def hooked(here: Loopback, hooks: Mapping[int, str]) -> Iterator[None]:
    """For a while, changes in the processes that sites start for a message."""
    places = {client: here.folder / f"site-{client}" / "hook" for client in hooks}
    for client, place in places.items():
        place.write_text(hooks[client])
    try:
        yield
    finally:
        for place in places.values():
            place.unlink()


@contextmanager
def governed(here: Loopback, name: str, **policy: Any) -> Iterator[list[Path]]:
    """For a while, another policy at all sites, with a state of its own; gives the folders of that."""
    places = [here.folder / f"site-{client}" / "policy.toml" for client in range(SITES)]
    before = [place.read_text() for place in places]
    states = [place.parent / name for place in places]
    try:
        for place, text, state in zip(places, before, states, strict=True):
            site_journal.create(state)
            place.write_text(tomli_w.dumps({**tomllib.loads(text), "state": name, **policy}))
        yield states
    finally:
        for place, text in zip(places, before, strict=True):
            place.write_text(text)


def completed(here: Loopback, run_id: str, name: str, seconds: float = PATIENCE) -> Path:
    status = here.finish(run_id, seconds)
    assert status == "finished:completed", here.output(run_id)[-3000:]
    return here.folder / "runs" / name


def summary_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def times_asked(out: Path) -> list[int]:
    """How often each client got a question."""
    asked = [line["client"] for line in lines_of(out / "journal" / "meter.jsonl") if "down" in line]
    return [asked.count(client) for client in range(SITES)]


@pytest.mark.parametrize("name", ["fedavg-p", *(pytest.param(name, marks=thorough) for name in ("scaffold", "fedgm"))])
def test_a_deployment_gives_the_weights_and_bytes_of_a_simulation(name: str, here: Loopback, tmp_path: Path) -> None:
    found = completed(here, here.run(name, {"method": name, **TASK, name: METHODS[name]}), name)
    summary = run(
        Job(Experiment(**TASK, workers=0), methods.find(name)(**METHODS[name]), tmp_path / "simulated", name=name)
    )
    assert (found / "model.safetensors").read_bytes() == (tmp_path / "simulated" / "model.safetensors").read_bytes()
    theirs = summary_of(found)
    same = ("bytes_up", "bytes_down", "accuracy", "guarantee", "refused", "rounds")
    if summary["guarantee"]["holds"]:  # of real sites nobody counts the records that are public
        assert summary["guarantee"].pop("exposed") == 0 and theirs["guarantee"].pop("exposed") is None
    assert {key: theirs[key] for key in same} == {key: summary[key] for key in same}
    meter = [sorted_lines(folder / "journal" / "meter.jsonl") for folder in (found, tmp_path / "simulated")]
    assert meter[0] == meter[1]


def sorted_lines(path: Path) -> list[str]:
    kept = [{k: v for k, v in line.items() if k not in ("seconds", "link")} for line in lines_of(path)]
    return sorted(json.dumps(line, sort_keys=True) for line in kept)


def probe(**changes: Any) -> dict[str, Any]:
    settings = {"rounds": changes.pop("rounds", 1), "misbehave": changes.pop("misbehave", {})}
    return {"method": "small:Probe", **TASK, "public": None, **changes, "small:Probe": settings}


def supernodes() -> list[list[str]]:
    """The command lines of the SuperNodes on this machine, which every user can read."""
    lines = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "from fedstill.engines.flower import supernode; supernode.main()" in words:
            lines.append(words)
    return lines


@contextmanager
def thieves() -> Iterator[list[int]]:
    """For a while, two others poll the SuperNodes faster than the sites; gives their codes, 200 for a message."""
    stop, answers = threading.Event(), list[int]()

    def steal() -> None:
        """Poll without a site's secret and with another's."""
        while not stop.wait(0.1):
            for words in supernodes():
                address = f"127.0.0.1:{words[words.index('--port') + 1]}"
                signed = node.SuperExecAuthHttpInterceptor(master_secret=b"guess" * 6, protected_methods=[node.ACQUIRE])
                for more in ([], [signed]):
                    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
                    client = node.client_of(address, version, *more)
                    try:
                        got = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
                        answers.append(200 if got.token else 204)
                    except httpx.HTTPStatusError as error:
                        answers.append(error.response.status_code)
                    except Exception:
                        pass  # it starts or ends
                    finally:
                        client.close()

    threads = [threading.Thread(target=steal) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_no_local_user_gets_a_message_of_a_site(here: Loopback) -> None:
    with thieves() as answers:
        out = completed(here, here.run("watched", probe()), "watched")
    assert summary_of(out)["refused"] == []
    assert len(answers) > 100 and 200 not in answers and 204 not in answers, sorted(set(answers))


def post(port: int, path: str, headers: Mapping[str, str] | None = None) -> str:
    """Status of an empty request to the SuperLink, whatever its certificate is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    to = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    to.request("POST", path, b"", {"Content-Type": "application/protobuf", **(headers or {})})
    status = to.getresponse().status
    to.close()
    return str(status)


@ROOT
@pytest.mark.skipif(not superlink.KNOWS_USERS, reason="only Linux tells whose a connection is")
def test_another_user_of_the_machine_gets_nothing_of_the_inner_port(here: Loopback) -> None:
    port = here.server.settings.inner_port
    assert post(port, "/v1/control/list-runs") == "200"
    for path in OWN:
        assert as_user(OTHER, partial(post, port, path)) == "403", path
    with socket.create_connection(("127.0.0.1", port)) as known:  # a connection of root, which its header names
        its = known.getsockname()[1]
        for headers in FORGED:
            said = {name: value.format(port=its) for name, value in headers.items()}
            assert as_user(OTHER, partial(post, port, "/v1/control/list-runs", said)) == "403", said
    signed = as_user(OTHER, partial(post, port, "/v1/fleet/get-run"))
    assert signed.isdigit() and signed not in ("200", "403")  # the signature of a node decides
    assert post(port, "/v1/control/list-runs") == "200"


@thorough
def test_a_superlink_that_is_killed_costs_no_answer(here: Loopback) -> None:
    name = "restarted"
    first = here.run(name, probe(misbehave={3: "nap"}))  # the others answer at once, the last a little later
    folder = here.folder / "runs" / name / "journal" / "000000-update"
    here.wait_for(lambda: len(list(folder.glob("*.reply"))) == SITES - 1, "three replies", PATIENCE)
    kept = {f.name: f.read_bytes() for f in folder.glob("*.reply")}
    here.stop("server", signal.SIGKILL)
    here.start_server()
    assert here.finish(first, PATIENCE) == "finished:failed"
    out = completed(here, here.run(name, probe(misbehave={3: "nap"})), name)
    again = {f.name: f.read_bytes() for f in folder.glob("*.reply")}
    assert {name: again[name] for name in kept} == kept
    assert times_asked(out)[0] == 1
    assert summary_of(out)["refused"] == []


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
    (refused,) = summary_of(out)["refused"]
    assert refused["client"] == 2
    assert "policy allows scaffold, fedgm, fedavg-p, not 'small:Probe.update'" in refused["reason"]
    log = (here.folder / "site-2" / "state" / "journal.jsonl").read_text()
    assert '"what":"refused"' in log.splitlines()[-1]


@thorough
def test_wrong_keys_and_plaintext_are_not_let_in(here: Loopback) -> None:
    stranger = here.folder / "site-7"
    stranger.mkdir()
    (stranger / "policy.toml").write_text(NO_POLICY)
    site_journal.create(stranger / "state")
    setup.join(stranger, here.server.invite(7, None))
    here.start_site(7)
    here.wait_for(lambda: here.processes["site-7"].poll() is not None, "the stranger to give up", PATIENCE)
    assert here.processes.pop("site-7").returncode != 0
    assert "Failed to activate SuperNode" in here.log("site-7")
    words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{here.port}", "--max-retries", "1"]
    here.start("plaintext", [*words, "--host", "127.0.0.1", "--port", "0"])
    here.wait_for(lambda: here.processes["plaintext"].poll() is not None, "the plaintext client to give up", PATIENCE)
    assert here.processes.pop("plaintext").returncode != 0
    nodes = json.loads(here.server.flwr("supernode", "list", "server", "--format", "json").stdout)["nodes"]
    assert sum(node["status"] == "online" for node in nodes) <= SITES


@thorough
def test_a_registered_site_that_says_it_is_another_is_not_believed(everyone: Loopback) -> None:
    """Its key is known; a run that lists whose node each client's is does not even ask it."""
    here, name = everyone, "impostor"
    place = here.add_site(8, None, methods=["small:Probe"], own_code=["small:Probe"], unprotected=True)
    settings = tomllib.loads((place / "policy.toml").read_text())
    (place / "policy.toml").write_text(tomli_w.dumps({**settings, "client": 1, "data": "../site-2/data.npz"}))
    here.stop("site-1", signal.SIGKILL)
    start(here, 8)
    here.wait_for(lambda: CONNECTED in here.log("site-8"), "the impostor to be let in", PATIENCE)
    try:
        out = completed(here, here.run(name, probe(min_clients=3, timeout=PATIENCE), wait=LATE), name)
    finally:
        here.stop("site-8")
    (refused,) = summary_of(out)["refused"]
    assert (refused["client"], refused["reason"]) == (1, "no site replies for it")


@thorough
def test_a_site_that_is_killed_while_it_works_is_left_out(everyone: Loopback) -> None:
    here, name = everyone, "killed"
    running = here.run(name, probe(misbehave={1: "sleep"}, min_clients=3, timeout=PATIENCE))
    folder = here.folder / "runs" / name / "journal" / "000000-update"
    here.wait_for(lambda: len(list(folder.glob("*.reply"))) == SITES - 1, "three replies", PATIENCE)
    here.stop("site-1", signal.SIGKILL)
    out = completed(here, running, name)
    (refused,) = summary_of(out)["refused"]
    assert refused["client"] == 1
    assert "Node Unavailable" in refused["reason"]  # Flower notices after about a minute


@thorough
def test_garbage_of_three_sites_leaves_the_run_of_the_fourth(everyone: Loopback, tmp_path: Path) -> None:
    here, name = everyone, "garbage"
    with hooked(here, dict.fromkeys(garbage.VANDALS, "garbage:spoil")):
        running = here.run(name, probe(rounds=garbage.rounds(), min_clients=1))
        out = completed(here, running, name, 100.0 * garbage.rounds())
    found = {(line["round"] - 1, line["client"]): line["reason"] for line in summary_of(out)["refused"]}
    expected = {(number, client): kind for kind, client, number in garbage.turns()}
    assert found.keys() == expected.keys()
    garbage.check_told([expected[turn] for turn in sorted(expected)], [found[turn] for turn in sorted(found)])
    alone = Probe(rounds=garbage.rounds(), misbehave=dict.fromkeys(garbage.VANDALS, "raise"))
    run(
        Job(
            Experiment(**TASK | {"public": None, "min_clients": 1}, workers=0),
            alone,
            tmp_path / "x",
            name="small:Probe",
        )
    )
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "x" / "model.safetensors").read_bytes()


@thorough
def test_a_site_that_is_killed_before_it_is_asked_is_left_out_and_may_come_later(
    everyone: Loopback, tmp_path: Path
) -> None:
    here, name = everyone, "killed-before"
    here.stop("site-1", signal.SIGKILL)
    running = here.run(name, probe(min_clients=3, timeout=PATIENCE), wait=LATE)
    out = completed(here, running, name)
    (refused,) = summary_of(out)["refused"]
    assert (refused["client"], refused["reason"]) == (1, "no site replies for it")
    assert "client 1 is left out: no site replies for it" in here.output(running)
    come_back(here, 1)
    late = completed(here, here.extend(name, "late"), "late")
    assert summary_of(late)["refused"] == []
    assert times_asked(late) == [1, 1, 1, 1]
    probe_alone = methods.find("small:Probe")(rounds=1)
    run(Job(Experiment(**{**TASK, "public": None}, workers=0), probe_alone, tmp_path / "whole", name="small:Probe"))
    models = [(folder / "model.safetensors").read_bytes() for folder in (out, late, tmp_path / "whole")]
    assert models[0] != models[1] == models[2]


@thorough
def test_a_site_that_is_killed_after_it_answered_is_not_missed(everyone: Loopback) -> None:
    here, name = everyone, "killed-after"
    running = here.run(name, probe(misbehave={3: "nap"}))
    reply = here.folder / "runs" / name / "journal" / "000000-update" / "00001.reply"
    here.wait_for(reply.exists, "the reply of site 1", PATIENCE)
    here.stop("site-1", signal.SIGKILL)
    out = completed(here, running, name)
    assert summary_of(out)["refused"] == []
    assert times_asked(out) == [1, 1, 1, 1]
    assert len(list(reply.parent.glob("*.reply"))) == SITES


ONCE: dict[str, Any] = {"budget": 1.3, "unprotected": False, "simulated_noise": False, "own_code": []}
"""A policy that allows one release at epsilon 1."""


def private(epsilon: float, **changes: Any) -> dict[str, Any]:
    settings = {**METHODS["fedavg-p"], "epsilon": epsilon}
    return {"method": "fedavg-p", **TASK, "noise": "entropy", **changes, "fedavg-p": settings}


def charges(state: Path) -> int:
    """How many releases a ledger holds."""
    return len(read_charges(state))


@thorough
def test_a_server_that_asks_above_the_sites_budget_gets_nothing(everyone: Loopback) -> None:
    here, name = everyone, "above"
    with governed(here, name, methods=["fedavg-p"], **ONCE) as states:
        running = here.run(name, private(5.0))
        assert here.finish(running, PATIENCE) == "finished:failed"
    assert "budget of 1.3" in here.output(running)
    assert not list((here.folder / "runs" / name / "journal").glob("*/*.reply"))
    for state in states:
        assert charges(state) == 0
        asked, accepted, refused = lines_of(state / "journal.jsonl")
        assert [line["what"] for line in (asked, accepted, refused)] == ["asked", "accepted", "refused"]
        assert "budget of 1.3" in refused["detail"]
        assert not list(state.glob("runs/**/*.given"))


@thorough
def test_a_budget_for_one_release_pays_for_one_whenever_the_site_is_killed(everyone: Loopback) -> None:
    here, name = everyone, "killed-within"
    experiment = private(1.0, min_clients=3, timeout=LATE)
    journal = here.folder / "runs" / name / "journal"
    with governed(here, name, methods=["fedavg-p"], **ONCE) as states:
        with hooked(here, {1: "naps:in_release", 2: "naps:before_sending"}):
            first = here.run(name, experiment)
            here.wait_for(lambda: charges(states[1]) == 1, "the release of site 1", PATIENCE)
            here.wait_for(lambda: any(states[2].glob("runs/*/*/*.given")), "the reply of site 2", PATIENCE)
            for client in (1, 2):
                here.stop(f"site-{client}", signal.SIGKILL)
        assert here.finish(first, PATIENCE) == "finished:failed"
        assert "2 of 4 clients gave a usable reply" in here.output(first)
        kept = {place.name: place.read_bytes() for place in journal.glob("*/*.reply")}
        assert kept.keys() == {"00000.reply", "00003.reply"}
        for client in (1, 2):
            come_back(here, client)
        out = completed(here, here.run(name, experiment), name)
    (refused,) = summary_of(out)["refused"]
    assert refused["client"] == 1
    assert "budget of 1.3" in refused["reason"]
    replies = {place.name: place.read_bytes() for place in journal.glob("*/*.reply")}
    assert {name: replies[name] for name in kept} == kept
    (given,) = states[2].glob("runs/*/*/*.given")
    assert replies["00002.reply"][32:] == given.read_bytes()[32:]  # but for the checksum, which covers the place
    assert [charges(state) for state in states] == [1, 1, 1, 1]
    assert times_asked(out) == [1, 2, 2, 1]
    told = {line["client"]: len(line["spent"]) for line in lines_of(journal / "spent.jsonl")}
    assert told == {0: 1, 1: 1, 2: 1, 3: 1}  # also of the site that answers no more
    assert math.isclose(summary_of(out)["guarantee"]["epsilon"], 1.0, rel_tol=1e-2)


@thorough
def test_an_expired_certificate_is_noticed_by_the_site(tmp_path: Path) -> None:
    with loopback(tmp_path, days=-1) as here:
        place = here.folder / "site-0"
        place.mkdir()
        (place / "policy.toml").write_text(NO_POLICY.replace("7", "0"))
        site_journal.create(place / "state")
        setup.join(place, here.server.invite(0, None))
        here.start_site(0)
        here.wait_for(lambda: here.processes["site-0"].poll() is not None, "the site to give up", PATIENCE)
        assert here.processes.pop("site-0").returncode != 0
        assert "certificate has expired" in here.log("site-0")
