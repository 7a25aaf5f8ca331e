"""Tags of runs: short words in ``tags.json``, which no result depends on."""

import json
import re
from collections.abc import Collection
from pathlib import Path

from fedstill import files
from fedstill.errors import InputError

_FILE = "tags.json"
_WORD = re.compile(r"[\w.+-]{1,40}")


def read_tags(run: Path) -> tuple[str, ...]:
    """The tags of the run in the folder ``run``, in order of the alphabet."""
    place = run / _FILE
    if not place.exists():
        return ()
    try:
        tags = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise files.Damaged(f"{place} is damaged ({error}); delete it, and tag the run again") from error
    if not isinstance(tags, list) or not all(isinstance(tag, str) and _WORD.fullmatch(tag) for tag in tags):
        raise files.Damaged(f"{place} is damaged (it is no list of tags); delete it, and tag the run again")
    return tuple(sorted(set(tags)))


def change_tags(run: Path, add: Collection[str] = (), remove: Collection[str] = ()) -> tuple[str, ...]:
    """Add tags to a run and remove others; returns those that it has then.

    Raises:
        ValueError: a tag has other characters than letters, digits, ``_``, ``.``, ``+`` and ``-``, or more than 40.
    """
    if (wrong := next((tag for tag in add if not _WORD.fullmatch(tag)), None)) is not None:
        raise InputError(f"the tag is {wrong!r}; use 1 to 40 letters, digits, _ . + and -")
    now = tuple(sorted({*read_tags(run), *add} - {*remove}))
    if now:
        files.write_json(run / _FILE, list(now))
    else:
        (run / _FILE).unlink(missing_ok=True)
    return now
