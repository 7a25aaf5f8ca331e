"""The time that the rest of a work takes at the pace of its parts so far."""

Mark = tuple[float, int]
"""A time in seconds, and the number of parts that were done then."""


def seconds_left(began: Mark, first: Mark, last: Mark, total: int, idle: float) -> float:
    """Seconds until ``total`` parts are done.

    The first part starts processes and fills caches, so from the third on it does not count.

    Args:
        began: the start.
        first: the end of the first part, or of the first several if they ended at once.
        last: the end of the last part that is done.
        total: number of parts.
        idle: seconds since then.
    """
    time, done = first if last[1] - began[1] > 2 and last[1] > first[1] else began
    pace = (last[0] - time) / (last[1] - done)
    return pace * (total - last[1]) - min(idle, pace) if last[1] < total else 0.0
