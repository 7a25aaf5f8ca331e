"""Worker processes: what they have of their parent, and what they have not."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from looks import look

from fedstill.base import processes
from fedstill.experiment.config import Experiment

pytestmark = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process imports anew")


def seen() -> tuple[dict[str, str | None], str, bool, int]:
    ours, theirs = multiprocessing.Pipe()
    process = processes.start(look, theirs)
    theirs.close()  # so that a process that ends without a word is noticed
    found = ours.recv()
    process.join()
    assert process.exitcode == 0
    return found  # type: ignore[no-any-return]


@linux
def test_each_has_the_environment_and_folder_of_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though the process that is copied is older."""
    parents = set()
    for word in ("once", "again", None):
        monkeypatch.delenv("FEDSTILL_TOLD", raising=False)
        if word:
            monkeypatch.setenv("FEDSTILL_TOLD", word)
        folder = tmp_path / str(word)
        folder.mkdir()
        monkeypatch.chdir(folder)
        told, here, has_torch, parent = seen()
        assert told == {"FEDSTILL_TOLD": word, "PYTEST_VERSION": os.environ.get("PYTEST_VERSION")}
        assert (here, has_torch) == (str(folder), True)
        parents.add(parent)
    assert len(parents) == 1 and os.getpid() not in parents


@linux
def test_what_is_copied_has_one_thread_and_has_touched_no_gpu() -> None:
    """A copy of a process with threads may wait for ever for what they held, and CUDA works in no copy."""
    code = f"""
import importlib, threading
importlib.import_module({processes._PRELOADED!r})
import torch
assert threading.active_count() == 1, threading.enumerate()
assert not torch.cuda.is_initialized() and not torch.cuda._initialized
assert not any(name.partition(".")[0] in ("ray", "grpc", "pyarrow") for name in __import__("sys").modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@linux
def test_a_killed_template_is_replaced() -> None:
    before = seen()[3]
    template = psutil.Process(before)
    template.kill()
    while template.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert seen()[3] not in (before, os.getpid())


INTERRUPTED = """
import sys, time
from fedstill.base import processes
from fedstill.experiment.config import Experiment
if __name__ == "__main__":
    print("begins", flush=True)
    processes.start(time.sleep, 100)
"""


@linux
def test_an_interruption_while_it_starts_leaves_one_traceback_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    words = [sys.executable, str(tmp_path / "script.py")]
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True, start_new_session=True) as p:
        assert p.stdout is not None and p.stderr is not None
        p.stdout.readline()
        while len(children := psutil.Process(p.pid).children()) < 2:  # Python's resource tracker comes first
            time.sleep(0.01)
        time.sleep(0.2)
        os.killpg(p.pid, signal.SIGINT)
        told = p.stderr.read()  # until all who could write there have ended
    assert told.count("Traceback") == 1 and told.rstrip().endswith("KeyboardInterrupt")
    assert p.returncode and psutil.wait_procs(children, timeout=30)[1] == []


# Where workers cannot start -------------------------------------------------------------------------------------------

RUN = """
import fedstill
def one(seed=0):
    return fedstill.run("fedavg", data="digits", model="linear", clients=2, limit=100, rounds=1, seed=seed).accuracy
"""
PLACES = {
    "a pool of spawned processes": RUN
    + """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(*pool.map(one, [0, 0]))
""",
    "a pool of copies": RUN
    + """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(*pool.map(one, [0, 0]))
""",
    "a copy after a run": RUN
    + """
import os
if __name__ == "__main__":
    first = one()
    if os.fork() == 0:
        print(first, one(), flush=True)
        os._exit(0)
    os.wait()
""",
    "a copied process after a run": RUN
    + """
import multiprocessing
if __name__ == "__main__":
    first = one()
    process = multiprocessing.get_context("fork").Process(target=lambda: print(first, one(), flush=True))
    process.start()
    process.join()
""",
}


@pytest.mark.parametrize("place", [*PLACES, "standard input", "a long folder"])
def test_where_workers_cannot_start_the_run_needs_none(place: str, tmp_path: Path) -> None:
    script = PLACES.get(place, RUN + 'if __name__ == "__main__":\n    print(one(), one())\n')
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    if place == "a long folder":
        (long := tmp_path / ("long" * 40)).mkdir()
        environment["TMPDIR"] = str(long)
    words = [sys.executable, *([] if place == "standard input" else ["script.py"])]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        input=script if place == "standard input" else "",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    first, second = done.stdout.split()
    assert first == second, done.stderr


def test_workers_that_cannot_start_are_refused_where_somebody_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "why_no_workers", lambda: "this is a daemonic process")
    assert Experiment(workers=0).num_workers == 0 == Experiment().num_workers
    with pytest.raises(ValueError, match="workers is 2, but this is a daemonic process; leave it out or set workers=0"):
        _ = Experiment(workers=2).num_workers


@pytest.mark.parametrize(
    ("own", "files", "number"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/docker/1", {"docker/1/cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("4:cpu,cpuacct:/a", {f"cpu,cpuacct/a/cpu.cfs_{k}_us": v for k, v in (("quota", "5"), ("period", "9"))}, 1),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("9:memory:/", {"memory/cpu.max": "100000 100000"}, 64),
        ("", {}, 64),
    ],
)
def test_a_containers_quota_limits_the_cores(
    own: str, files: dict[str, str], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    (tmp_path / "own").write_text(own and f"{own}\n")
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content)
    assert processes.cores(tmp_path / "own", tmp_path / "groups") == number
