"""The program that runs a SuperLink, and ends with the process that started it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.superlink.cli import flower_superlink

_PROGRAM = "from fedstill.engines.flower import superlink; superlink.main()"


def start(options: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a SuperLink with options of ``flower-superlink``."""
    words = [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *options]
    return subprocess.Popen(words, env=dict(environment))


def main() -> None:
    """Run the SuperLink; the words are the id of the parent process and the options."""
    start_parent_process_monitor(int(sys.argv.pop(1)))
    flower_superlink()
