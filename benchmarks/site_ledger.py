"""Measure a site's ledger and log after two years: seconds of CPU to check a budget and to charge, and megabytes.

python benchmarks/site_ledger.py --releases 10000 --out benchmarks/results/site-ledger.json

Each figure is the fastest of some repetitions, in CPU seconds of this process, without waiting for the disk; "question"
is what a question costs in all: open the ledger as a new process does, charge one release, log it.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fedstill.base import files
from fedstill.privacy.ledger import Charge, Ledger, Part
from fedstill.privacy.releases import Event, Gaussian, Pure
from fedstill.sites.site import log
from fedstill.sites.site.chain import Chain
from fedstill.sites.site.charges import (
    ChargeLine,
    Limits,
    SiteStore,
    create_ledger,
    open_site_ledger,
    read_charges,
    standing,
)

BUDGET, DELTA, RUNS = 8.0, 1e-5, 100
RECORDS = 5000
THEOREM = (
    "one record adds a loss of slope at most 1.414 to a 25-strongly convex objective and so moves its minimiser, the "
    "solver's residual included, by at most 0.05657, the sensitivity (Chaudhuri, Monteleoni, Sarwate 2011, lemma 7); "
    "Gaussian mechanism (Balle, Wang 2018, theorem 8)"
)
KINDS: dict[str, Callable[[int], Event]] = {
    "one noise": lambda i: Gaussian(noise_multiplier=1000.0),
    "noise of its own each time": lambda i: Gaussian(noise_multiplier=1000.0 + i / 100),
    "noise on samples": lambda i: Gaussian(noise_multiplier=40.0 + i % 50, sampling=0.01, count=10),
    "labels": lambda i: Pure(epsilon=1e-4),
    "labels of parts": lambda i: Pure(epsilon=1e-3),
}


def release(kind: str, i: int) -> Charge:
    unit: Any = "label" if kind.startswith("labels") else "record"
    facts = {"exchange": i % 100, "step": "train_head", "index": 0, "mechanism": "LogisticHead", "theorem": THEOREM}
    return Charge(event=KINDS[kind](i), unit=unit, part="part" if "parts" in kind else None, **facts)


def records(kind: str, i: int) -> bytes | None:
    """Ten parts of the records, split anew in each run."""
    if "parts" not in kind:
        return None
    order = torch.randperm(RECORDS, generator=torch.Generator().manual_seed(i // (10 * RUNS)))
    return Part("part", order[i % 10 :: 10]).records(RECORDS, bytes(32))


def opened(folder: Path, charged: Callable[[ChargeLine, SiteStore], None] | None = None) -> Ledger:
    return open_site_ledger(folder, "a new run", Limits(DELTA, BUDGET, public_images=True), charged=charged)


def build(state: Path, kind: str, number: int, *, logged: bool) -> None:
    """Write the releases of two years, and if ``logged`` the log's three lines for each."""
    create_ledger(state / "ledger")
    store = SiteStore(state / "ledger", "")
    store.read()
    lines = Chain(state, "log", "")
    log.check_format(state)
    lines.create()
    lines.synchronise()
    digest, n = "0" * 64, 0
    for i in range(number):
        store._run = f"{i * RUNS // number:032x}-0123456789abcdef"
        facts = {"run": store._run, "request": f"{i:064x}", "bytes": 10**6, "spec": digest, "process": 1}
        facts |= {"policy": digest[:16], "method": "fedavg-p", "model": "scattering", "settings": "x" * 300}
        facts |= {"simulated_noise": False, "step": "train_head", "exchange": i % 100}
        charge: list[ChargeLine] = []
        store._charged = lambda new, _: charge.append(new)  # noqa: B023
        with store.lock():
            store.append(release(kind, i).model_copy(update={"records": records(kind, i)}))
        if not logged:
            continue
        paid = {"ledger": charge[0].number, "ledger_mac": charge[0].mac, "unit": "record", "epsilon": 0.01}
        sent = {"reply": digest, "reply_bytes": 10**4, "charges": [i + 1], "fields": {"head": "released"}}
        with lines.lock:
            for what, more in (("asked", {}), ("charged", paid), ("answered", sent)):
                n += 1
                lines.append({"n": n, "time": "2026-01-01T00:00:00+0000", "what": what, **facts, **more, "detail": ""})


def seconds(function: Callable[[], object], times: int = 3) -> float:
    each = []
    for _ in range(times):
        begun = time.process_time()
        function()
        each.append(time.process_time() - begun)
    return round(min(each), 3)


def measure(kind: str, number: int, *, logged: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        state = Path(place) / "state"
        build(state, kind, number, logged=logged)
        ledger, new = opened(state / "ledger"), release(kind, number)
        store: Any = ledger._store
        entries = list(chain(*store.runs.values()))

        def question() -> None:
            def charged(charge: ChargeLine, store: SiteStore) -> None:
                every = list(chain(*store.runs.values()))
                standing(every, every[0].event, BUDGET, DELTA)
                log.append(state, {"what": "started", "ledger": charge.number, "detail": ""})

            opened(state / "ledger", charged).charge(new, records(kind, number))

        found = {
            "releases": number,
            "megabytes_ledger": round((state / "ledger" / "ledger.jsonl").stat().st_size / 1e6, 2),
            "open": seconds(lambda: opened(state / "ledger")),
            "check_budget": seconds(lambda: ledger._rule(ledger.entries, new)),
            "standing": seconds(lambda: standing(entries, entries[0].event, BUDGET, DELTA)),
            "charge": seconds(lambda: ledger.charge(new, records(kind, number))),
            "question": seconds(question),
            "log_a_line": seconds(lambda: log.append(state, {"what": "started", "detail": ""})),
            "read_all_charges": seconds(lambda: read_charges(state / "ledger")),
        }
        if logged:
            megabytes = round(sum(place.stat().st_size for place in state.glob("log*.jsonl")) / 1e6, 2)
            found |= {"megabytes_log": megabytes, "verify": seconds(lambda: log.verify(state), 1)}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.fsync = lambda _: None  # CPU seconds are measured, and the disk is not ours alone
    found = {}
    for kind in options.kinds:
        found[kind] = measure(kind, options.releases, logged=kind == "one noise")  # the log is the same for all
        print(kind, found[kind], flush=True)
        if options.out:
            facts = {"python": platform.python_version(), "processor": platform.machine(), "unit": "CPU seconds"}
            files.write_json(options.out, {**facts, "kinds": found})


if __name__ == "__main__":
    main()
