"""A site's count of the messages that it refuses in a day, each of which costs lines of its log."""

import json
import time

from fedstill import files
from fedstill.sites.policy import SitePolicy

COUNT = "refusals.json"
"""Name of the file with the day, in UTC, and the number of messages refused in it."""


def count(policy: SitePolicy) -> int:
    """Count a message that is refused, fails or waits; returns the number of today."""
    number = _today(policy) + 1
    files.write_json(policy.state / COUNT, {"day": _day(), "count": number})
    return number


def is_full(policy: SitePolicy) -> bool:
    """Whether the site has refused so many messages today that it logs and answers no other."""
    return _today(policy) >= policy.refusals_per_day


def _today(policy: SitePolicy) -> int:
    """The number of today; 0 if the file is damaged, as it limits the size of the log only."""
    try:
        found = json.loads((policy.state / COUNT).read_bytes())
        return int(found["count"]) if found["day"] == _day() else 0
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def _day() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
