"""The allocator settings: they take effect where the C library is glibc, and nothing happens elsewhere."""

import platform
import subprocess
import sys

import pytest

from fedstill.base.processes import keep_memory, returning_memory

# By default glibc maps each block of 64 MiB anew and unmaps it when it is freed.
FAULTS = """
import ctypes, resource, sys
from contextlib import ExitStack
from fedstill.base.processes import returning_memory, keep_memory
stack = ExitStack()
if sys.argv[1] != "default":
    assert keep_memory()
if sys.argv[1] == "hand back":
    stack.enter_context(returning_memory())
if sys.argv[1] == "keep again":
    with returning_memory():
        pass
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
for turn in range(4):
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**26)
    ctypes.memset(block, 0, 2**26)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    result = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_used_again() -> None:
    # Pages have 4 KiB to 2 MiB: at least 32 faults for each of the three blocks without the setting, about none with.
    assert page_faults("default") >= 96
    assert page_faults("keep") < 48
    assert page_faults("hand back") >= 96
    assert page_faults("keep again") < 48


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_memory() is False
    with returning_memory():
        pass


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert keep_memory() is False
    with returning_memory():
        pass
