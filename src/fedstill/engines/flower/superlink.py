"""The program that runs a SuperLink, and ends with the process that started it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from flwr.superlink.cli import flower_superlink

from fedstill.engines.flower.supernode import end_with_parent

_PROGRAM = "from fedstill.engines.flower import superlink; superlink.main()"


def start(options: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a SuperLink with options of ``flower-superlink``."""
    return subprocess.Popen([sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *options], env=dict(environment))


def main() -> None:
    """Run the SuperLink; the words are the parent's process id and Flower's options."""
    parent, *sys.argv[1:] = sys.argv[1:]
    end_with_parent(int(parent))
    flower_superlink()
