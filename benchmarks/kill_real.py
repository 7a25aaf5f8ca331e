"""Kill node, launcher, step and server of a real deployment (`kill -9`) at random moments; nothing may be lost.

A SuperLink with its gate, and four sites with SuperNodes, over TLS on the loopback, as `fedstill server start` and
`fedstill site serve` start them. Two studies take turns: ``plain`` is FedAvg of two rounds, whose weights must be those
of the undisturbed run to the bit; ``private`` is FedAVG+P, one shot, with real noise and a budget. The operator is this
program: it repeats `fedstill server run` until the run has its results, and starts again what was killed 15 seconds
later and until it is let in, as the units of systemd do. It ends nothing that a killed process leaves.

Roles: ``node`` is `site serve`, its SuperNode or the process that forks for each message; ``launcher`` and ``step``
are the processes of a message; ``server`` is `server start`, its SuperLink or the ServerApp of the run. An attempt at a
run has up to nine kills, at moments drawn over the time that it takes undisturbed; after three such attempts the run is
left alone.

After each run: `verify` finds nothing wrong at any site; a witness in the launcher (tests/support/witness.py), which
notes each reply before it is sent, saw no two releases for one question, and nothing that the log lacks; at each kill
the sites' journals were copied, and each copy is the beginning of the journal now; each charge of the run is in the
server's list of releases; ``private``: the server's part, repeated from its journal, gives the same weights. At the end
no process of the deployment is left.

Usage: python benchmarks/kill_real.py [--kills 20]; a second start continues (benchmarks/results/kill-real.json).
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kill_deployment as stand_in
import record
import torch
import yaml
from kill_deployment import ROLES, alive

from fedstill import Experiment
from fedstill.experiment.run import run
from fedstill.experiment.task import share_out
from fedstill.runs.journal import Journal
from fedstill.sites.loopback import Loopback, loopback
from fedstill.sites.site import log
from fedstill.sites.site.charges import read_charges

SITES = 4
RESULTS = Path(__file__).parent / "results" / "kill-real.json"
HOOKS = Path(__file__).parents[1] / "tests" / "support" / "hooks"
RESTART = 15.0
"""Seconds until a program is started again, as in the units of `fedstill.sites.units`."""
DISTURBED = 3
"""Number of attempts at a run in which there are kills, before it is left alone."""
PATIENCE = 900.0
"""Seconds after which an attempt, or a process of a message, that has not ended is an error."""
TASK = {**stand_in.TASK, "clients": SITES}
TIMEOUT = 90.0
"""Seconds that a site may take for a reply."""


@dataclass
class Seen:
    """A process of the deployment: its role, a name for the reader, and when it was first and last seen."""

    role: str
    name: str
    first: float
    last: float


@dataclass
class Aim:
    """A kill that is planned: at ``moment`` seconds of the attempt, or of the life of the ``number``-th process."""

    role: str
    name: str
    number: int | None
    moment: float


@dataclass
class Lives:
    """What undisturbed attempts took: their seconds, and the number and the seconds of each role's processes."""

    attempt: list[float] = field(default_factory=list)
    number: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)


class Study:
    """A deployment, its processes, and what was seen of them."""

    def __init__(self, here: Loopback) -> None:
        self.here = here
        self.seen: dict[int, Seen] = {}
        self.copies: list[tuple[Path, bytes]] = []
        self._due: dict[str, float] = {}
        task = share_out(Experiment(**TASK), None)
        hook = here.folder / "hook"
        hook.write_text("witness:watch")
        here.environment["PYTHONPATH"] = f"{HOOKS}{os.pathsep}{here.environment['PYTHONPATH']}"
        self._hook = {"FEDSTILL_TEST_HOOK": str(hook)}
        often = {"max_failures": 10**6, "max_questions": 10**6, "runs_per_day": 10**6}
        for client, (own, _) in enumerate(task.parts):
            rules = {"methods": ["fedavg", "fedavg-p"], "unprotected": True, "budget": 1000.0}
            here.add_site(client, task.train[torch.from_numpy(own)], **rules, **often)
            here.start_site(client, **self._hook)

    @property
    def states(self) -> list[Path]:
        """The folders ``state`` of the sites."""
        return [self.here.folder / f"site-{client}" / "state" for client in range(SITES)]

    def look(self) -> None:
        """Note the processes of the deployment, and start again the programs that have ended."""
        now = time.monotonic()
        for name, process in list(self.here.processes.items()):
            if name.startswith("run-"):
                continue
            if process.poll() is not None:
                due = self._due.setdefault(name, now + RESTART)
                if now >= due:
                    del self._due[name], self.here.processes[name]
                    self._start(name)
            else:
                self._walk(process.pid, "server" if name == "server" else "node", name, now)

    def _start(self, name: str) -> None:
        if name == "server":
            self.here.start("server", [sys.executable, "-m", "fedstill", "server", "start", self.here.server.folder])
        else:
            self.here.start_site(int(name.removeprefix("site-")), **self._hook)

    def _walk(self, pid: int, role: str, name: str, now: float) -> None:
        self.seen.setdefault(pid, Seen(role, name, now, now)).last = now
        for child in _children(pid):
            if child not in self.seen and not (known := _kind(child, self.seen[pid], name)):
                continue
            own = self.seen[child] if child in self.seen else Seen(*known, now, now)
            self._walk(child, own.role, own.name, now)

    def kill(self, pid: int) -> None:
        """Kill a process, and copy the sites' journals."""
        os.kill(pid, signal.SIGKILL)
        self.copies += [(state, _journal(state)) for state in self.states]

    def attempt(self, name: str, aims: list[Aim]) -> tuple[int, list[str], float]:
        """One `server run`: its exit code, the kills that happened, and its seconds."""
        here, began, known = self.here, time.monotonic(), set(self.seen)
        out = here.folder / "runs" / name
        words = [sys.executable, "-m", "fedstill", "server", "run", here.server.folder, here.folder / f"{name}.yaml"]
        here.start(f"run-{name}", [*words, "--out", out, "--wait", 120])
        told = []
        while (code := here.processes[f"run-{name}"].poll()) is None:
            time.sleep(0.05)
            self.look()
            now = time.monotonic()
            for aim in list(aims):
                if (pid := self._aimed(aim, known, now - began, now)) is not None:
                    aims.remove(aim)
                    if pid and alive(pid):
                        age = now - self.seen[pid].first
                        self.kill(pid)
                        told.append(f"{aim.role}: {self.seen[pid].name}, {age:.2f} s after its start")
            assert now - began < PATIENCE, f"{name}: the attempt does not end; {here.log(f'run-{name}')[-2000:]}"
        del here.processes[f"run-{name}"]
        return int(code), told, time.monotonic() - began

    def _aimed(self, aim: Aim, known: set[int], elapsed: float, now: float) -> int | None:
        """The process that an aim hits now; 0 if there is none, None before its moment."""
        if aim.number is None:  # one that always runs, unless it was killed before
            if elapsed < aim.moment:
                return None
            return max((pid for pid, seen in self.seen.items() if seen.name == aim.name and alive(pid)), default=0)
        new = [pid for pid, seen in self.seen.items() if pid not in known and seen.role == aim.role]
        new = [pid for pid in new if aim.role != "server" or self.seen[pid].name == "ServerApp"]
        if len(new) <= aim.number or now - self.seen[new[aim.number]].first < aim.moment:
            return None
        return new[aim.number]

    def settle(self) -> None:
        """Wait until the server runs again and no message is worked on; for sites, `server run` waits."""
        until, quiet = time.monotonic() + PATIENCE, 0.0
        while quiet < 3.0:
            time.sleep(0.1)
            assert time.monotonic() < until, "a message's process does not end"
            self.look()
            at_work = [pid for pid, seen in self.seen.items() if seen.role in ("launcher", "step") and alive(pid)]
            quiet = 0.0 if at_work or "server" in self._due else quiet + 0.1


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):  # it has ended
        for place in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError, ValueError):
                found += [int(word) for word in place.read_text().split()]
    return found


def _kind(pid: int, parent: Seen, program: str) -> tuple[str, str] | None:
    """Role and name of a new child; None while it is not yet what it will be."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    if "launcher.main()" in words:
        if parent.role == "launcher":
            return "step", f"step of {program}"
        if parent.name.startswith("forks of "):
            return "launcher", f"launcher of {program.removeprefix('forks of ')}"
        return "node", f"forks of {program}"
    if ("flower_supernode()" in words or "supernode.main()" in words) and parent.name == program:
        return "node", f"SuperNode of {program}"
    if "superlink.main()" in words and parent.name == program:
        return "server", "SuperLink"
    if "flwr-serverapp" in words:
        return "server", "ServerApp"
    if "superexec" in words:
        return "server", "SuperExec"
    return None


def _journal(state: Path) -> bytes:
    """The whole lines of a site's journal."""
    return b"".join(map(_lines, [*sorted(state.glob("journal-*.jsonl")), state / "journal.jsonl"]))


def _lines(file: Path) -> bytes:
    """The whole lines of a file."""
    content = file.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def plan(rng: random.Random, left: dict[str, int], lives: Lives) -> list[Aim]:
    """Whom to kill in an attempt, and when."""
    aims = []
    for role in (*ROLES, *ROLES, "launcher", "step"):
        draws = [rng.random() for _ in range(4)]
        if left[role] <= [aim.role for aim in aims].count(role) or draws[0] < 0.2:
            continue
        site = f"site-{int(draws[1] * SITES)}"
        always = {
            "node": [site, f"SuperNode of {site}", f"forks of {site}"],
            "server": ["server", "SuperLink", "ServerApp"],
        }.get(role)
        name = always[int(draws[2] * len(always))] if always else role
        if always and name != "ServerApp":
            aims.append(Aim(role, name, None, draws[3] * statistics.median(lives.attempt)))
        else:
            number = 0 if always else int(draws[2] * lives.number.get(role, 1))
            aims.append(Aim(role, name, number, draws[3] * max(lives.seconds.get(name, [5.0])[-50:])))
    return aims


def learn(study: Study, lives: Lives, before: set[int], seconds: float) -> None:
    """Note what an undisturbed attempt took."""
    lives.attempt.append(seconds)
    for role in ("launcher", "step", "ServerApp"):
        new = [s for pid, s in study.seen.items() if pid not in before and role in (s.role, s.name)]
        lives.number[role] = max(lives.number.get(role, 0), len(new))
        lives.seconds.setdefault(role, []).extend(seen.last - seen.first for seen in new)


def write(here: Loopback, name: str, study: str) -> None:
    """Write the experiment file of a run."""
    method, settings, task = stand_in.STUDIES[study]
    content = {"method": method, **TASK, **task, "noise": "entropy", "timeout": TIMEOUT, method: settings}
    content.pop("workers")
    (here.folder / f"{name}.yaml").write_text(yaml.safe_dump(content))


def check(study: Study, name: str, kind: str) -> dict[str, Any]:
    """Compare what left the sites with their journals, and with the server's journal."""
    out = study.here.folder / "runs" / name
    told = Journal(out / "journal").releases()
    own = json.loads((out / "config.json").read_text())["run"]
    charges, releases = [], []
    for client, state in enumerate(study.states):
        verdict = log.verify(state)
        assert verdict.is_whole, f"site {client}: {verdict.problems}"
        every = read_charges(state)
        lines = log.read(state)
        run_of = {line["reply"]: line["run"] for line in lines if line["what"] == "answered"}
        seen: dict[str, set[str]] = {}
        for line in map(json.loads, _lines(state.with_name("witness.jsonl")).splitlines()):
            if not line["is_error"]:
                assert line["reply"] in run_of, f"site {client}: a reply left that the log lacks: {line}"
                if run_of[line["reply"]].startswith(own):  # another run of the study asks the same
                    seen.setdefault(line["request"], set()).add(line["reply"])
        charges.append(sum(charge.run.startswith(own) for charge in every))
        releases.append(sum(map(len, seen.values())))
        if kind == "private":
            twice = {request for request, replies in seen.items() if len(replies) > 1}
            assert not twice, f"site {client}: two releases for {twice}"
            assert 1 <= releases[-1] <= charges[-1], f"site {client}: {releases[-1]} releases, {charges[-1]} charges"
            assert len(told.get(client, [])) == charges[-1], f"client {client}: the server knows {told}"
        else:
            assert charges[-1] == 0
    for state, before in study.copies:
        assert _journal(state).startswith(before), f"{state} lost a line that it had"
    weights = stand_in.weights_of(out)
    if kind == "private":
        assert weights == stand_in.again(out, study.here.folder / "again" / name)
    return {"charges": charges, "releases_that_left": releases, "weights": weights}


def simulated(place: Path) -> str:
    """Digest of the weights of the plain study in this process."""
    job = stand_in.job_of("plain", place)
    run(job.replace(experiment=job.experiment.model_copy(update={"clients": SITES})))
    return stand_in.weights_of(place)


def complete(study: Study, name: str, lives: Lives, rng: random.Random, left: dict[str, int]) -> tuple[list[str], int]:
    """Repeat `server run` until the run has its results; the kills, at most ``left`` of each role, and the attempts."""
    kills: list[str] = []
    for turn in itertools.count(1):
        study.settle()
        before = set(study.seen)
        now = Counter(map(role_of, kills))
        aims = plan(rng, {role: left[role] - now[role] for role in ROLES}, lives) if turn <= DISTURBED else []
        code, told, seconds = study.attempt(name, aims)
        kills += told
        finished = (study.here.folder / "runs" / name / "summary.json").exists()
        last = study.here.log(f"run-{name}")[-1500:]
        print(f"{name}, attempt {turn}: code {code} after {seconds:.0f} s, killed {told}", flush=True)
        assert "Traceback" not in last and (code in (0, 1, 2)), last
        assert told or finished or turn > 1, last  # an undisturbed attempt has its results, but for what came before
        if finished:
            if not told and turn == 1:
                learn(study, lives, before, seconds)
            return kills, turn


def left_over(study: Study) -> list[str]:
    """The processes of the deployment that have not ended, after a while."""
    until = time.monotonic() + 60
    while (pids := [pid for pid in study.seen if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.5)
    return [f"{study.seen[pid].name} ({pid})" for pid in pids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each role")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other run after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="start anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * options.minutes
    table = json.loads(RESULTS.read_text())["table"] if RESULTS.exists() and not options.fresh else []
    done = Counter(role_of(row["killed"]) for row in table)
    with tempfile.TemporaryDirectory() as place, loopback(Path(place).resolve()) as here:
        whole = simulated(here.folder / "simulated")
        study = Study(here)
        lives = Lives()
        for number in itertools.count():
            kind = list(stand_in.STUDIES)[number % 2]
            name = f"{kind}-{number}"
            left = {role: options.kills - done[role] if number else 0 for role in ROLES}
            if number and (not any(left.values()) or time.monotonic() > until):
                break
            rng = random.Random(f"{options.seed} {len(table)}")
            write(here, name, kind)
            kills, attempts = complete(study, name, lives, rng, left)
            study.settle()
            found = check(study, name, kind)
            assert kind == "private" or found["weights"] == whole, f"{name}: other weights than undisturbed"
            table += [{"run": name, "killed": told, "attempts": attempts, **found} for told in kills]
            done += Counter(map(role_of, kills))
            if kills:
                record.keep(RESULTS, table, kills=dict(done))
            print(f"{name}: whole after {len(kills)} kills in {attempts} attempts; {found}", flush=True)
        for name in list(here.processes):
            here.stop(name)
        assert not (orphans := left_over(study)), orphans
    print(f"killed: {dict(done)}; no release without its charge, none twice, no charge lost, all weights alike")


def role_of(told: str) -> str:
    return told.partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())
