"""What several tests share: a small task with real handwriting, and where the cache goes."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedstill.data import sources

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # some tests interrupt programs that they start

_OF_SITES = ("deploy", "gate", "lifecycle", "rogue_bundles")
collect_ignore_glob = ["sites/*", *(f"checks/test_{name}*" for name in _OF_SITES)] if sys.platform == "win32" else []
"""Real sites need Linux or macOS."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: some tests wait for other programs."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Leave the thousands of tests out of Python's search for garbage, which took a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A data cache for this session and all its processes, so that a test never trusts what another run left."""
    before = os.environ.get("FEDSTILL_CACHE")
    folder = tmp_path_factory.getbasetemp()  # of each process of pytest-xdist, within that of the session
    os.environ["FEDSTILL_CACHE"] = str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache")
    yield
    if before is None:
        del os.environ["FEDSTILL_CACHE"]
    else:
        os.environ["FEDSTILL_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Flush no file to the disk: no test cuts the power, and each flush takes milliseconds or more on a busy disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def digits(_own_cache: None) -> sources.DataSet:
    """The digits that come with scikit-learn."""
    return sources.load("digits")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets, or a skip."""
    place = Path(os.environ.get("FEDSTILL_DATA") or Path(__file__).parents[2] / "shared" / "data").resolve()
    if not place.is_dir():
        pytest.skip(f"no real data in {place}; set FEDSTILL_DATA")
    return place


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    """Nothing may move torch's global generator or leave another number of threads."""
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    torch.set_rng_state(before)
    torch.set_num_threads(threads)
