"""Programs for messages, forked from one process that has imported what they need.

An import of PyTorch takes seconds of CPU time, a fork takes none. The process that forks has one thread and reads no
data, so each program starts as if it were the first.
"""

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

_POLL = 0.05
"""Seconds between two looks at the programs that run."""
_READY = "ready"
_LOST = -1
"""Exit code of a program whose parent was killed: it ends too."""


class Forks:
    """Programs of a process that calls `fork_for_each`; that process is started again if it is killed.

    Args:
        words: words that start that process; a pipe's descriptor follows them.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._number = 0
        self._codes: dict[int, int | None] = {}
        self._start()

    def _start(self) -> None:
        read, write = os.pipe()
        words = [*self._words, str(write)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[write], bufsize=0)
        os.close(write)
        self._told = PipeLines(read)
        self._ready = False

    def look(self) -> bool:
        """Note which programs have ended; returns whether a program can be started at once.

        Raises:
            ValueError: the process ended before it could start one; its output says why.
        """
        ended = self.process.poll()  # before the lines, so that none of them is missed
        for line in self._told.read():
            if line.decode() == _READY:
                self._ready = True
            else:
                number, code = map(int, line.split())
                self._codes[number] = code
        if ended is not None:
            if not self._ready:
                raise ValueError(f"the program for messages did not start (code {ended}); its output above says why")
            self.close()
            self._codes.update((number, _LOST) for number, code in self._codes.items() if code is None)
            self._start()
        return self._ready

    def start(self, *words: str) -> int:
        """Start a program with words for it, and return its number."""
        self._number += 1
        self._codes[self._number] = None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed, which `look` will note
            self.process.stdin.write(json.dumps([self._number, *words]).encode() + b"\n")
        return self._number

    def code(self, number: int) -> int | None:
        """The exit code of a program that had ended at the last `look`, as Python gives it, once; None before."""
        code = self._codes[number]
        if code is not None:
            del self._codes[number]
        return code

    def close(self) -> None:
        """End the process, with which its programs end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        self._told.close()


def fork_for_each(work: Callable[..., None], pipe: int) -> None:
    """Fork for each line of the standard input, until it ends; the child calls ``work`` with the words of the line.

    Args:
        work: what a child does; it ends with this process, for which it must look itself.
        pipe: a pipe's descriptor, to which the numbers and exit codes of children that have ended are written.
    """
    os.write(pipe, f"{_READY}\n".encode())
    lines, children = PipeLines(sys.stdin.fileno()), dict[int, int]()
    while not lines.at_end:
        select.select([sys.stdin], [], [], _POLL if children else None)
        for line in lines.read():
            number, *words = json.loads(line)
            if not (child := os.fork()):
                os.close(pipe)
                _run(work, words)
            children[child] = number
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            os.write(pipe, f"{children.pop(ended[0])} {os.waitstatus_to_exitcode(ended[1])}\n".encode())


def _run(work: Callable[..., None], words: Sequence[str]) -> None:
    """Do the work of a child, and end it: nothing behind the fork runs in it."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the next lines are not for this process
        work(*words)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class PipeLines:
    """The lines that have come through a pipe so far.

    Attributes:
        at_end: whether the pipe has ended.
    """

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._rest = b""
        self.at_end = False

    def read(self) -> list[bytes]:
        """Whole lines since the last call."""
        with suppress(BlockingIOError):
            part = os.read(self._pipe, 1 << 20)
            self.at_end = not part
            self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._pipe)
