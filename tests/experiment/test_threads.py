"""Runs in several threads of one process."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from benchmark import load

from fedstill import Experiment, FedAvg, Job, run
from fedstill.base import seeds
from fedstill.engines.client import torch_threads


@pytest.mark.slow
def test_concurrent_runs_give_what_each_gives_alone(tmp_path: Path) -> None:
    """One repeat of benchmarks/threads.py; threads switch every 50 microseconds, which provokes differences."""
    threads, numbers = load("threads"), [0, 1, 3]
    alone = [threads.digest(number, tmp_path / f"alone-{number}") for number in numbers]
    before = torch.get_rng_state()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        assert threads.concurrent(numbers, tmp_path) == alone
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_new_thread_does_not_take_over_the_number_of_threads_of_a_step(tmp_path: Path) -> None:
    """A thread's number of threads is the process's when it is first used, which a step of another run has changed."""
    in_step, started = threading.Event(), threading.Event()

    def step() -> None:
        with seeds.isolated(0), torch_threads(1):
            in_step.set()
            assert started.wait(10)
            started.clear()
            started.wait(0.2)  # as long as the other thread could read the number

    def other() -> int:
        assert in_step.wait(10)
        started.set()
        with pytest.raises(ValueError, match="digts"):
            run(Job(Experiment(data="digts", workers=0), FedAvg(), tmp_path / "run"))
        return torch.get_num_threads()

    torch.set_num_threads(3)
    with ThreadPoolExecutor() as threads:
        first, second = threads.submit(step), threads.submit(other)
        first.result()
        assert second.result() == 3
