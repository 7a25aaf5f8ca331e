"""What another user of the machine gets."""

import os
from collections.abc import Callable

import pytest

OTHER = 65534
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_user(user: int, what: Callable[[], str]) -> str:
    """The words of a function, or its error, as another user runs it with what this process has imported; for root."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setuid(user)
            os.write(write, what().encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()
