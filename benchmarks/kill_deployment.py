"""Kill a deployment's node, launcher, step's process and server (`kill -9`) at random moments; nothing may be lost.

Two studies with two sites on digits: ``plain`` is FedAvg of two rounds, whose weights must be those of the undisturbed
run to the bit; ``private`` is FedAVG+P, one shot, with real noise. All of fedstill is real: the server with journal and
resumption, the launcher with its worker, policy, ledger and log. Flower is not there: messages are files, a node is a
loop that starts a program for each, and processes are forked from one that has imported torch, so that a trial takes
seconds. What a message loses with its process, the server asks again at its next start, as under Flower.

After each trial: the ledger is verified; every reply with a release that left a site has a charge, and two different
replies to one request have two; the server's list of releases is the site's; ``private``: the server's part, repeated
from the journal in a new folder, gives the same weights.

Usage: python benchmarks/kill_deployment.py [--kills 10]; a second start continues (benchmarks/results/).
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from fedstill import Experiment, Job
from fedstill.base import files
from fedstill.data import sources
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.transport import Arrival, Transport
from fedstill.experiment.reuse import Nobody, lay_out, read_job
from fedstill.experiment.run import run
from fedstill.methods import find
from fedstill.protocol import wire
from fedstill.runs.journal import Journal
from fedstill.sites.site import launcher, setup
from fedstill.sites.site.charges import read_charges
from fedstill.sites.site.policy import SitePolicy

SITES = 2
ROLES = ("node", "launcher", "step", "server")
TASK: dict[str, Any] = {"data": "digits", "clients": SITES, "model": "convnet:width=8,depth=2", "workers": 0}
STUDIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("fedavg", {"rounds": 2, "local": {"lr": 0.05}}, {}),
    "private": (
        "fedavg-p",
        {"extractor": {"pretrain": "none"}, "space": {"dims": 8}, "epsilon": 1.0},
        {"public": "noise=64", "noise": "entropy"},
    ),
}
RESULTS = Path(__file__).parent / "results" / "kill-deployment.json"
PATIENCE = 300.0


class Mail(Transport):
    """Messages as files in a folder for each site."""

    def __init__(self, folder: Path, spec: str) -> None:
        self._folder = folder
        self._spec = spec

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """Put the request into each site's folder, and wait for the reply, or for the loss of the message."""
        waiting = {}
        for client in clients:
            place = self._folder / f"mail-{client}" / f"{time.time_ns()}"
            files.write_json(place.with_suffix(".spec"), self._spec)
            files.write_bytes(place.with_suffix(".request"), request)
            sent(client)
            waiting[client] = place
        while waiting:
            for client, place in list(waiting.items()):
                if place.with_suffix(".reply").exists():
                    del waiting[client]
                    yield Arrival(client, place.with_suffix(".reply").read_bytes())
                elif place.with_suffix(".lost").exists():
                    del waiting[client]
                    yield Arrival(client, b"", "its process ended")
            time.sleep(0.005)


def forked(pids: Path, role: str, work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own, and note its id under its role."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        (pids / f"{role}.{os.getpid()}").touch()
        work()
        code = 0
    except BaseException:
        (pids.parent / "errors").open("a").write(f"{role}: {traceback.format_exc()}\n")
    finally:
        os._exit(code)


def node(folder: Path, client: int) -> None:
    """Start a program for each message; a program or node that ends without a reply loses it."""
    mail, policy = folder / f"mail-{client}", SitePolicy.read(folder / f"site-{client}" / "policy.toml")
    for taken in mail.glob("*.taken"):  # by a node that was killed
        lost(taken)
    programs: dict[int, Path] = {}
    while True:
        for request in sorted(mail.glob("*.request")):
            taken = request.with_suffix(".taken")
            if not taken.exists():
                taken.touch()
                programs[forked(folder / "pids", "launcher", lambda r=request: program(folder, policy, r))] = taken
        for pid in list(programs):
            if os.waitpid(pid, os.WNOHANG)[0]:
                lost(programs.pop(pid))
        time.sleep(0.005)


def lost(taken: Path) -> None:
    if not taken.with_suffix(".reply").exists():
        taken.with_suffix(".lost").touch()


def program(folder: Path, policy: SitePolicy, request: Path) -> None:
    """As `fedstill.sites.site.launcher.main`, with files in the place of Flower; it ends with its node."""
    parent = os.getppid()
    with launcher.Worker(policy) as worker:
        (folder / "pids" / f"step.{worker._process.pid}").touch()
        threading.Thread(target=launcher._end_after, args=(parent,), daemon=True).start()
        reply = worker(json.loads(request.with_suffix(".spec").read_text()), request.read_bytes())
        files.write_bytes(request.with_suffix(".reply"), reply)


def job_of(study: str, out: Path) -> Job:
    name, settings, task = STUDIES[study]
    return Job(Experiment(**TASK, **task), find(name)(**settings), out, name=name)


def server(folder: Path, study: str) -> None:
    def sites(spec: RunSpec) -> Transport:
        return Mail(folder, spec.text())

    run(job_of(study, folder / "run"), sites=sites)


def prepare(folder: Path, study: str) -> None:
    """The sites' folders."""
    train = sources.load("digits").train
    for client, part in enumerate(np.array_split(np.arange(len(train)), SITES)):
        place = folder / f"site-{client}"
        place.mkdir(parents=True)
        images = train.images[part].permute(0, 2, 3, 1).numpy()
        np.savez(place / "data.npz", x_train=images, y_train=train.labels[part].numpy())
        rules = {"budget": 5.0} if study == "private" else {"unprotected": True, "simulated_noise": True}
        own = {"client": client, "data": "data.npz", "state": "state", "methods": [STUDIES[study][0]], **rules}
        setup.site(place, {**own, "max_memory_gb": 0.0})  # the forked process has much mapped already


def trial(folder: Path, study: str, role: str | None, rng: random.Random, life: dict[str, list[float]]) -> str:
    """One run with one kill; returns what was killed when, or "" if the process had ended by then."""
    pids = folder / "pids"
    pids.mkdir(parents=True)
    nodes = {client: forked(pids, "node", lambda c=client: node(folder, c)) for client in range(SITES)}
    serving, starts, began = forked(pids, "server", lambda: server(folder, study)), 1, time.monotonic()
    number, at = rng.randrange(len(life.get(role or "", [0.0]))), rng.random()
    delay = at * life[role][number] if role in life else 0.0
    told, seen, last = None if role else "", dict[str, float](), dict[str, float]()
    until = began + PATIENCE
    try:
        while True:
            now = time.monotonic()
            for place in pids.iterdir():
                seen.setdefault(place.name, now)
                if role is None and alive(int(place.name.partition(".")[2])):
                    last[place.name] = now
            if told is None:
                known = [name for name in seen if name.startswith(f"{role}.")]
                if len(known) > number and now - seen[known[number]] >= delay:
                    told = kill(int(known[number].partition(".")[2]), f"{role} {number} after {delay:.3f} s")
            for client, pid in list(nodes.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    nodes[client] = forked(pids, "node", lambda c=client: node(folder, c))
            ended, code = os.waitpid(serving, os.WNOHANG)
            if ended and not code:
                break
            if ended:  # TooFewReplies, or killed: the operator starts the run again
                starts += 1
                assert starts < 8, (folder / "errors").read_text()
                serving = forked(pids, "server", lambda: server(folder, study))
            assert now < until, "the run does not end"
            time.sleep(0.005)
        if role is None:
            for name in ROLES:
                ids = [key for key in seen if key.startswith(f"{name}.")]
                life[name] = [last.get(key, seen[key]) - seen[key] for key in ids]
        return told or ""
    finally:
        for pid in (*nodes.values(), serving):
            end(pid)


def alive(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int, what: str) -> str:
    if not alive(pid):
        return ""
    os.kill(pid, signal.SIGKILL)
    return what


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def check(folder: Path, study: str) -> dict[str, Any]:
    """Compare what left the sites with the ledgers and the server's journal."""
    charges, different = [], []
    journal = Journal(folder / "run" / "journal")
    told = journal.releases()
    for client in range(SITES):
        charges.append(len(read_charges(folder / f"site-{client}" / "state")))  # verifies the chain
        replies: dict[str, set[str]] = {}
        for place in (folder / f"mail-{client}").glob("*.reply"):
            content = place.read_bytes()
            if wire.envelope(content).get("spent") and "error" not in wire.envelope(content):
                asked = hashlib.sha256(place.with_suffix(".request").read_bytes()).hexdigest()
                replies.setdefault(asked, set()).add(hashlib.sha256(content).hexdigest())
        different.append(sum(map(len, replies.values())))
        if study == "private":
            assert 1 <= different[-1] <= charges[-1], f"site {client}: {different[-1]} releases, {charges[-1]} charges"
            assert len(told.get(client, [])) == charges[-1], f"client {client}: the server knows {told}, not {charges}"
        else:
            assert different[-1] == charges[-1] == 0
    weights = weights_of(folder / "run")
    if study == "private":
        same = weights == again(folder / "run", folder / "again")
        assert same, "the server's part gives other weights from the same replies"
    return {"charges": charges, "releases_that_left": different, "weights": weights}


def weights_of(out: Path) -> str:
    """Digest of a run's final weights."""
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def again(out: Path, copy: Path) -> str:
    """Digest of the weights that the server computes from the replies of the run ``out`` in a new folder."""
    job = read_job(out, copy, "")
    lay_out(out, copy, json.loads((out / "config.json").read_text()))
    run(job, sites=lambda spec: Nobody())
    return weights_of(copy)


def done_before(fresh: bool) -> list[dict[str, Any]]:
    return [] if fresh or not RESULTS.exists() else list(json.loads(RESULTS.read_text())["table"])


def copied(place: str, study: str, name: str) -> Path:
    """A new copy of a study's sites."""
    return Path(shutil.copytree(Path(place) / study / "sites", Path(place) / study / name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each role in each study")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=STUDIES)
    parser.add_argument("--fresh", action="store_true", help="start anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = done_before(options.fresh)
    with tempfile.TemporaryDirectory() as place:
        lives, wholes = {}, {}
        for study in options.studies:
            prepare(Path(place) / study / "sites", study)
            lives[study] = {}
            trial(copied(place, study, "whole"), study, None, random.Random(0), lives[study])
            wholes[study] = check(Path(place) / study / "whole", study)
            print(f"{study}: undisturbed, {lives[study]['server'][0]:.1f} s, {wholes[study]}", flush=True)
        for number, study, role in itertools.product(range(options.kills), options.studies, ROLES):
            if any((row["study"], row["role"], row["number"]) == (study, role, number) for row in table):
                continue
            for attempt in range(40):  # until the moment falls into the life of the process
                rng = random.Random(f"{options.seed} {study} {role} {number} {attempt}")
                folder = copied(place, study, f"{role}-{number}-{attempt}")
                told = trial(folder, study, role, rng, lives[study])
                found = check(folder, study)
                shutil.rmtree(folder)
                if told:
                    break
            same = found["weights"] == wholes[study]["weights"]
            assert study == "private" or same, f"{role} {number}: other weights"
            table.append({"study": study, "role": role, "number": number, "killed": told, **found})
            record.keep(RESULTS, table, kills=len([row for row in table if row["killed"]]))
            print(f"{study}: killed {told or 'nobody'}; {found['charges']} charges", flush=True)
    hits = {role: sum(bool(row["killed"]) and row["role"] == role for row in table) for role in ROLES}
    print(f"{len(table)} trials, killed: {hits}; no release without its charge, none twice, all weights alike")


if __name__ == "__main__":
    sys.exit(main())
