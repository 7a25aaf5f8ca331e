"""The command ``fedstill``; its commands import heavy modules only when they run."""

import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from fedstill.base import files
from fedstill.cli.command import Command, start, unknown
from fedstill.cli.folder_commands import EVALUATE, PREDICT, PUBLISH, RUNS, WATCH
from fedstill.cli.inspect_commands import ATTACK, AUDIT, CHECK, DATA, DOCTOR, METHODS, PRIVACY
from fedstill.cli.output import Bad, print_json
from fedstill.cli.run_commands import COMPARE, REPORT, RUN, SWEEP
from fedstill.cli.server_commands import DEPLOY, SERVER
from fedstill.cli.site_commands import SITE

HELP = """usage: fedstill COMMAND ...

Federated learning by distillation: clients reply once with something small,
and every byte is counted.

commands:
  run METHOD [flags]          run one method on one task
  run FILE.yaml [flags]       run an experiment file
  run --extend RUN [flags]    ask the clients whose reply a one-shot run lacks
  run --replies RUN METHOD    another method on the replies of a finished run
  compare METHOD ... [flags]  run several methods on the same clients
  sweep FILE.yaml [flags]     tune several methods, each with as many tries
  report RUN ...              write a table and a page of finished runs
  methods                     list the methods
  data list | show            list the data sets, or plot a partition
  privacy RUN | plan          show the releases of a run, or plan their noise
  runs [FOLDER] | compare | tag | remove
                              list, compare, tag or remove runs
  watch RUN                   follow a run on a page of this machine
  attack RUN [ATTACK]         infer training records from a run
  audit METHOD ...            prove lower bounds on a method's epsilon
  check METHOD                compare a method of your own on neighbours
  evaluate RUN DATA           judge the model of a run on other records
  predict RUN DATA            predict the classes of new records
  publish RUN                 write the model for plain PyTorch, with a card
  server COMMAND              set up and run the server of real sites
  site COMMAND FOLDER         set up, run, show and govern a real site
  deploy check                try a server and two sites on this machine
  doctor                      examine this machine; for reports of bugs

Each command has a help text: fedstill run --help, fedstill run fedgm --help.
fedstill --version prints the version, fedstill --schema [COMMAND] commands and
settings as JSON Schema, fedstill --install-completion [SHELL] lets bash, zsh or
fish complete commands, methods and flags.

exit codes: 0 done; 1 the work failed (too few replies, a refuted claim, a
damaged log); 2 the command or its input cannot be used; 130 interrupted.

example:
  fedstill run fedgm --data digits --partition classes:1 --ipc 1 \\
    --model convnet:width=32,depth=2 --out runs/first
"""


_IMPORTS = 10.0
"""Seconds that an interruption waits for imports."""
_LONG = ("run", "compare", "sweep", "attack", "audit", "check")
"""Commands that work on after they have printed a line, and go on where they ended."""
_RESUMED = "; repeat the command to resume"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 2 for an error of the user, with 130 after an interruption."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of another encoding gets "?"
    try:
        if odd := next((word for word in words if not files.is_utf8(word)), None):
            raise Bad(files.not_utf8(odd))
        with _whole_imports():
            _dispatch(words)
    except Bad as error:
        _fail(str(error))
    except ValueError as error:
        if os.environ.get("FEDSTILL_TRACEBACK"):
            raise
        _fail(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted" + (_RESUMED if words[:1] and words[0] in _LONG else ""), file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if words[0] in _LONG:
            print("fedstill: the reader of the output has ended" + _RESUMED, file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        if os.environ.get("FEDSTILL_TRACEBACK"):
            raise
        _fail(_of_the_disk(error))
    except Exception as error:
        from fedstill.engines.server import TooFewReplies

        if not isinstance(error, TooFewReplies):
            raise
        print(f"fedstill: {error}", file=sys.stderr)
        raise SystemExit(1) from None


@contextmanager
def _whole_imports() -> Iterator[None]:
    """Let an interruption wait until no module is being imported, 10 seconds at most.

    NumPy and torch end in an abort, or call themselves without end, where an interruption reaches their imports.
    """
    first: list[float] = []
    waiting: list[threading.Timer] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        while frame is not None and first[-1] - first[0] < _IMPORTS:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                waiting.append(threading.Timer(0.05, signal.raise_signal, (number,)))
                waiting[-1].daemon = True
                waiting[-1].start()
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not in_main:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for timer in waiting:
            timer.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _of_the_disk(error: OSError) -> str:
    """An error of the operating system as one sentence, with the remedy if there is one."""
    place = error.filename or "a file"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{place} is a file or lies below one, but a folder is needed; choose another folder"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open at once; raise the limit (ulimit -n 1024), then repeat the command: it goes on"
    if error.errno == errno.ENOENT and not _has_working_folder():
        return "the working folder was deleted; change to another (cd) and repeat the command"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place} cannot be written: {error.strerror}; free space, then repeat the command: it goes on"
    if error.errno == errno.EFBIG:
        return (
            f"{place} cannot be written: {error.strerror}; raise the limit on a file's size (ulimit -f) or take "
            "another disk, then repeat the command: it goes on"
        )
    return (
        f"{place} cannot be read or written: {error.strerror or error}; check its permissions or choose another place"
    )


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _fail(sentence: str) -> None:
    print(f"fedstill: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return
    if words[0] in ("-V", "--version"):
        from fedstill import __version__

        print(f"fedstill {__version__}")
        return
    if words[0] == "--schema":
        from fedstill.cli import settings_schema

        print_json(settings_schema.document(COMMANDS, words[1:]))
        return
    if words[0] in ("--install-completion", "--show-completion"):
        from fedstill.cli import completion

        (completion.install if words[0] == "--install-completion" else completion.show)(words[1:], COMMANDS)
        return
    command = COMMANDS.get(words[0])
    if command is None:
        from fedstill import methods

        near = f"; did you mean run {words[0]}?" if words[0] in methods.TABLE else ""
        raise unknown(words[0], COMMANDS, "fedstill", near)
    if sys.platform == "win32" and words[0] in ("server", "site", "deploy") and "--help" not in words:
        raise Bad(f"fedstill {words[0]} needs Linux, as in WSL; simulations and reports work on Windows too")
    start(command, words[1:], f"fedstill {words[0]}")


COMMANDS: dict[str, Command] = {
    "run": RUN,
    "compare": COMPARE,
    "report": REPORT,
    "methods": METHODS,
    "data": DATA,
    "server": SERVER,
    "site": SITE,
    "deploy": DEPLOY,
    "privacy": PRIVACY,
    "attack": ATTACK,
    "audit": AUDIT,
    "check": CHECK,
    "runs": RUNS,
    "evaluate": EVALUATE,
    "predict": PREDICT,
    "publish": PUBLISH,
    "sweep": SWEEP,
    "watch": WATCH,
    "doctor": DOCTOR,
}
"""The tree of commands, by the first word."""
