"""A witness of what a site's program is about to send, beside the site's own log; see hooks/sitecustomize.py."""

import hashlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedstill.protocol import wire


def watch(launcher: ModuleType) -> None:
    """Append a line for each reply to ``witness.jsonl`` beside the policy, before the reply leaves."""
    honest = launcher.Worker.__call__

    def call(self: Any, spec: str, request: bytes) -> bytes:
        reply = bytes(honest(self, spec, request))
        header = wire.envelope(reply)
        digests = [hashlib.sha256(content).hexdigest() for content in (request, reply)]
        line = {"request": digests[0], "reply": digests[1], "is_error": "error" in header}
        with Path(sys.argv[1]).with_name("witness.jsonl").open("a") as file:  # one write, so lines stay whole
            file.write(json.dumps({**line, "process": os.getpid()}) + "\n")
        return reply

    launcher.Worker.__call__ = call  # type: ignore[attr-defined]
