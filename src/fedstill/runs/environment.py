"""The environment of a run: versions, processor, threads, device and commits, for the record only."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import fedstill

NUMERIC = ("fedstill", "commit", "python", "torch", "numpy", "blas", "cpu", "threads", "device")
"""Facts that may change the last bits of a result."""


def environment(device: str) -> dict[str, Any]:
    """The environment of this process now.

    Keys: ``started`` (ISO 8601), ``fedstill``, ``commit`` (of fedstill, if it is a checkout), ``python``, ``torch``,
    ``numpy``, ``blas``, ``cpu``, ``threads`` (of the server), ``device``, ``os``, ``folder`` (the working folder) and
    ``folder_commit`` (of its repository); ``commit`` ends in ``+changes`` if files differ. A value is None if it
    is unknown.
    """
    import torch  # imported here because it takes a second

    folder = Path.cwd()
    return {
        "started": now(),
        **software(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "folder": str(folder),
        "folder_commit": _head(folder),
    }


def now() -> str:
    """The local time with its offset, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The facts in which two environments differ and that may change the last bits of a result, in words, or None."""
    pairs = [(name, before.get(name), after.get(name)) for name in NUMERIC]
    return ", ".join(f"{name} was {old}, is {new}" for name, old, new in pairs if old != new) or None


@lru_cache(maxsize=1)
def software() -> dict[str, Any]:
    """Versions of fedstill and what it computes with, its source's commit, the processor and the system."""
    import numpy
    import torch

    package = Path(fedstill.__file__).parent
    return {
        "fedstill": fedstill.__version__,
        "commit": _of_source(package) if _git(package, "ls-files", "--error-unmatch", "__init__.py") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "blas": blas_of(torch.__config__.show()),
        "cpu": _cpu(),
        "os": platform.platform(),
    }


def blas_of(build: str) -> str | None:
    """The linear algebra library of torch, from the text about its build."""
    version = re.search(r"Math Kernel Library Version (\S+)", build)
    name = re.search(r"\bBLAS_INFO=(\w+)", build)
    return f"mkl {version[1]}" if version else name and name[1]


def _cpu() -> str | None:
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        model = None
    return model[1].strip() if model else platform.processor() or platform.machine() or None


def _of_source(package: Path) -> str | None:
    """The commit of fedstill's own source, with ``+changes`` if files differ from it."""
    return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")


def _head(folder: Path) -> str | None:
    """The commit of the repository around ``folder``; None without one.

    No file of the work tree is compared with it: the settings of a stranger's repository name programs for that
    (``filter.X.clean``), which git would run.
    """
    return _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")


def _git(folder: Path, *words: str) -> str | None:
    """The output of a git command that changes nothing; None if it fails, or if git itself is in ``folder``."""
    program = shutil.which("git")
    if program is None or not os.path.isabs(program) or Path(program).resolve().is_relative_to(folder.resolve()):
        return None
    command = [program, "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook names another
    try:
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
