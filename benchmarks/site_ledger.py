"""Measure a site's journal after years: seconds of CPU of a question's charge, and megabytes.

    python benchmarks/site_ledger.py --releases 10 10000 100000 --out benchmarks/results/site-ledger.json
    python benchmarks/site_ledger.py --quick                 # 10 and 2,000 releases, half a minute

Each figure is the fastest of some repetitions, in CPU seconds of this process, without waiting for the disk. "question"
is what a question costs in all: open the journal as a new process does, write the lines asked and accepted, charge one
release, write its outcome. The releases before it are a hundred a run, one each five minutes: 100,000 in a year. With
``--gap 0`` all are of one moment, so that no run is old enough to be forgotten.
"""

import argparse
import base64
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedstill.base import files
from fedstill.privacy.ledger import Charge, Part
from fedstill.privacy.releases import Event, Gaussian, Pure
from fedstill.runs.environment import now
from fedstill.sites.site import log, site_journal, state_format
from fedstill.sites.site.chain import ChainEnd, signed
from fedstill.sites.site.charges import Limits, SiteStore, costs_of, open_site_ledger, read_charges
from fedstill.sites.site.checkpoint import Standing
from fedstill.sites.site.site_journal import SiteJournal

BUDGET, DELTA, RUN_LENGTH = 8.0, 1e-5, 100
RECORDS, YEAR = 5000, 365 * 86_400
THEOREM = (
    "one record adds a loss of slope at most 1.414 to a 25-strongly convex objective and so moves its minimiser, the "
    "solver's residual included, by at most 0.05657, the sensitivity (Chaudhuri, Monteleoni, Sarwate 2011, lemma 7); "
    "Gaussian mechanism (Balle, Wang 2018, theorem 8)"
)
KINDS: dict[str, Callable[[int], Event]] = {
    "one noise": lambda i: Gaussian(noise_multiplier=1e4),
    "noise of its own each time": lambda i: Gaussian(noise_multiplier=1e4 + i / 100),
    "noise on samples": lambda i: Gaussian(noise_multiplier=400.0 + i % 50, sampling=0.01, count=10),
    "another noise on samples each time": lambda i: Gaussian(noise_multiplier=400.0 + i / 100, sampling=0.01, count=10),
    "labels": lambda i: Pure(epsilon=1e-5),
    "labels of parts": lambda i: Pure(epsilon=1e-4),
}
LIMITS = Limits(DELTA, BUDGET, public_images=True)


def release(kind: str, i: int) -> Charge:
    unit: Any = "label" if kind.startswith("labels") else "record"
    facts = {"exchange": i % RUN_LENGTH, "step": "train_head", "index": 0, "mechanism": "LogisticHead"}
    part = "part" if "parts" in kind else None
    return Charge(event=KINDS[kind](i), unit=unit, part=part, theorem=THEOREM, **facts)


def records(kind: str, i: int) -> bytes | None:
    """Ten parts of the records, split anew in each run."""
    if "parts" not in kind:
        return None
    order = torch.randperm(RECORDS, generator=torch.Generator().manual_seed(i // 10))
    return Part("part", order[i % 10 :: 10]).records(RECORDS, bytes(32))


def facts_of(i: int) -> dict[str, Any]:
    """What each line of a question has."""
    digest, run = "0" * 64, f"{i // RUN_LENGTH:032x}-0123456789abcdef"
    facts = {"run": run, "request": f"{i:064x}", "bytes": 10**6, "spec": digest, "process": 1, "policy": digest[:16]}
    return facts | {"method": "fedavg-p", "model": "scattering", "step": "train_head", "exchange": i % RUN_LENGTH}


def ask(state: Path, kind: str, i: int) -> None:
    """One question, from its arrival to its reply."""
    line = {"time": now(), **facts_of(i), "simulated_noise": False, "detail": ""}
    line["question"] = site_journal.append(state, {"what": "asked", **line, "settings": "x" * 300})
    journal = SiteJournal(state)
    with journal.lock:
        journal.standing()
        journal.append({"what": "accepted", **line, "at": time.time()})

    def costs(charge: Charge, store: SiteStore) -> dict[str, Any]:
        return {**line, **costs_of(charge, store, LIMITS)}

    open_site_ledger(state, line["run"], LIMITS, costs).charge(release(kind, i), records(kind, i))
    sent = {"reply": "0" * 64, "reply_bytes": 10**4, "charges": [i + 1], "fields": {"head": "released"}}
    site_journal.append(state, {"what": "answered", **line, **sent})


class Writer:
    """A journal written at once, as its processes would line by line."""

    def __init__(self, state: Path) -> None:
        site_journal.create(state)
        self.state, self.key = state, (state / state_format.KEY).read_bytes()
        self.standing, self.end, self.lines = Standing(), ChainEnd(), list[bytes]()
        self.clock = time.time()

    def write(self, line: dict[str, Any]) -> int:
        """Add a line, and return its number."""
        if self.end.size >= site_journal._LARGEST:
            self._begin_file()
        number = self.end.count + 1
        facts = {"n": number, **line}
        raw, mac = signed(self.key, self.end.last, json.dumps(facts, separators=(",", ":")).encode())
        self.lines.append(raw + b"\n")
        self.end = self.end.after(raw, mac)
        self.standing.add(number, facts, mac)
        return number

    def _begin_file(self) -> None:
        at = self.standing.checkpoint(self.clock).model_dump(mode="json")
        self.close(f"journal-{self.end.count:09d}.jsonl")
        self.end = replace(self.end, size=0, begun=self.end.count)
        self.write({"time": now(), "what": "checkpoint", "at": at, "detail": ""})

    def close(self, name: str = state_format.LINES) -> None:
        """Write the lines of a file, and the head."""
        (self.state / name).write_bytes(b"".join(self.lines))
        (self.state / state_format.HEAD).write_bytes(self.end.encode(self.key))
        self.lines = []


def build(state: Path, kind: str, number: int, gap: float) -> None:
    """Write questions that came every ``gap`` seconds, the last one now, without a check of the budget before each."""
    writer, end = Writer(state), time.time()
    for i in range(number):
        writer.clock = end - (number - 1 - i) * gap
        line = {"time": now(), **facts_of(i), "simulated_noise": False, "detail": ""}
        own = records(kind, i)
        charge = {"charge": i + 1, "entry": release(kind, i).model_dump(mode="json"), "unit": "record", "epsilon": 0.01}
        more = {} if own is None else {"records": base64.b64encode(own).decode()}
        line["question"] = writer.write({"what": "asked", **line, "settings": "x" * 300})
        writer.write({"what": "accepted", **line, "at": writer.clock})
        writer.write({"what": "charged", **line, **charge, **more})
        sent = {"reply": f"{i:064x}", "reply_bytes": 10**4, "charges": [i + 1], "fields": {"head": "released"}}
        writer.write({"what": "answered", **line, **sent})
    writer.close()


def seconds(function: Callable[[], object], times: int = 3) -> float:
    each = []
    for _ in range(times):
        begun = time.process_time()
        function()
        each.append(time.process_time() - begun)
    return round(min(each), 3)


def measure(kind: str, number: int, gap: float, *, verified: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        state = Path(place) / "state"
        build(state, kind, number, gap)
        counter = iter(range(number, 10**9))
        found = {
            "releases": number,
            "megabytes": round(sum(part.stat().st_size for part in state.glob("journal*.jsonl")) / 1e6, 2),
            "question": seconds(lambda: ask(state, kind, next(counter)), 5),
            "refusal": seconds(lambda: log.is_full(_policy(state))),
        }
        if verified:
            found |= {
                "read_all_charges": seconds(lambda: read_charges(state), 1),
                "verify": seconds(lambda: log.verify(state), 1),
            }
            assert log.verify(state).is_whole
        return found


def _policy(state: Path) -> Any:
    from fedstill.sites.site.policy import SitePolicy

    return SitePolicy(client=0, data=state, state=state, methods=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", type=int, nargs="*", default=[10, 10_000])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="10 and 2,000 releases of each kind")
    parser.add_argument("--gap", type=float, default=YEAR / 100_000, help="seconds between two questions")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    numbers = [10, 2000] if options.quick else options.releases
    os.fsync = lambda _: None  # CPU seconds are measured, and the disk is not ours alone
    found: dict[str, Any] = {}
    for kind in options.kinds:
        for number in numbers:
            found.setdefault(kind, []).append(measure(kind, number, options.gap, verified=kind == options.kinds[0]))
            print(kind, found[kind][-1], flush=True)
            if options.out:
                facts = {"python": platform.python_version(), "processor": platform.machine(), "unit": "CPU seconds"}
                command = f"python benchmarks/site_ledger.py --releases {' '.join(map(str, numbers))}"
                files.write_json(options.out, {**facts, "command": command, "date": now()[:10], "kinds": found})


if __name__ == "__main__":
    main()
