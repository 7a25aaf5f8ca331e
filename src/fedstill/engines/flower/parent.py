"""Programs of Flower that end with the process that started them, even if that is killed."""

import os
import signal
import threading
import time

_GRACE = 10.0
"""Seconds to end in order; a SuperNode whose server is away would try to tell it for ever."""


def end_with_parent(parent: int) -> None:
    """End this process when its parent, with the id ``parent``, has ended, perhaps before this call."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)
