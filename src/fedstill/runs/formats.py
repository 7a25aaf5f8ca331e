"""The format of a run's folder, and the versions of fedstill that wrote one.

``config.json`` and ``summary.json`` have the number ``format``; without it, it is 1. The number covers the journal too,
whose replies ``--without`` and ``--replies`` take from finished runs of the same format by any version. It rises where
an older version could not read a folder or would read it wrongly, not where a file gains a key.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedstill
from fedstill.base import files

FORMAT = 1
"""The format that this version writes, and the last one that it reads."""
_VERSIONS = {"config.json": "version", "summary.json": "version", "environment.jsonl": "fedstill"}
"""Files that name the version of fedstill, and the key."""


def checked(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A JSON file's content without the key ``format``, after a check of that version.

    Raises:
        NewerFormat: a newer version of fedstill wrote the file in another format.
        Damaged: the format is no number from 1.
    """
    writer = content.get("version")
    return files.without_format(content, file, FORMAT, writer if isinstance(writer, str) else None)


def of_newer(run: Path, file: Path, problem: object) -> files.NewerFormat | None:
    """The error for a problem with a file of a run, if a newer version of fedstill wrote the run; else None."""
    if (writer := newer_writer(run)) is None:
        return None
    return files.NewerFormat(
        f"{file} was written by fedstill {writer}, and this is {fedstill.__version__}, which can't use it "
        f"({problem}); install fedstill {writer} or a newer one"
    )


def newer_writer(run: Path) -> str | None:
    """The version of fedstill that wrote a file of the run, if it is newer than this one; else None."""
    for name, key in _VERSIONS.items():
        try:
            content = (run / name).read_bytes()
        except OSError:
            continue
        for text in content.splitlines() if name.endswith(".jsonl") else [content]:
            try:
                version = json.loads(text)[key]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(version, str) and _numbers(version) > _numbers(fedstill.__version__):
                return version
    return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
