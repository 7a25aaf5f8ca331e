"""Worker processes: copies of one process that has imported PyTorch, as an import takes seconds of CPU time."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOADED = "fedstill.experiment.run"
"""The module that the copied process imports; that starts no thread and touches no GPU (tests/test_processes.py)."""


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a daemonic process that calls a function with arguments, which must be picklable."""
    process = _context().Process(target=_work, args=(dict(os.environ), target, args), daemon=True)
    process.start()
    return process


def pool(number: int, begin: Callable[[], None]) -> ProcessPoolExecutor:
    """A pool of processes, each of which calls ``begin`` first."""
    return ProcessPoolExecutor(number, mp_context=_context(), initializer=_work, initargs=(dict(os.environ), begin, ()))


def _context() -> ForkServerContext | SpawnContext:
    """Python's way to start processes: copies of one without threads on Linux; elsewhere each imports anew."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([_PRELOADED])
    resource_tracker.ensure_running()  # which would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # while it imports, Ctrl-C would end it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return server


def _work(environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call a function with this process's own parent and its environment, which the copied process need not have."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for programs that the target starts
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(*args)


def _end_with_parent() -> None:
    """End this process with its parent, so that a parent killed by `kill -9` leaves no process computing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
