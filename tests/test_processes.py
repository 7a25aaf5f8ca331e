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
