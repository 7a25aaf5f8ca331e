"""Contenders that take turns, each in a process of its own: what the benchmarks of single steps share."""

import json
import statistics
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import record


def seconds_of(
    contender: Callable[..., None], arguments: Mapping[str, tuple[Any, ...]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of ``repeats`` steps of each contender, after one that warms up.

    Args:
        contender: makes a step for every true message of the pipe that is its last argument, and answers with its
            seconds; ends at a false one. Must be picklable.
        arguments: what else it gets, by the contender's name.
        repeats: how many steps count.
    """
    context = get_context("spawn")
    pipes: dict[str, Connection] = {}
    seconds: dict[str, list[float]] = {name: [] for name in arguments}
    for name, given in arguments.items():
        pipes[name], other = context.Pipe()
        context.Process(target=contender, args=(*given, other), daemon=True).start()
    for repeat in range(repeats + 1):  # the first warms up
        for name, pipe in pipes.items():
            pipe.send(True)
            taken = pipe.recv()
            seconds[name] += [taken] if repeat else []
    for pipe in pipes.values():
        pipe.send(False)
    return seconds


def compared(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """The medians of contenders called "plain", "plain, memory kept" and "fedstill", and the last one's ratios."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "ratio to plain": round(medians["fedstill"] / medians["plain"], 3),
        "ratio to plain, memory kept": round(medians["fedstill"] / medians["plain, memory kept"], 3),
    }


def show(row: dict[str, Any], table: list[dict[str, Any]], place: str | None) -> None:
    """Print a row, and write all so far to ``place``, if there is one."""
    table.append(row)
    print(json.dumps(row, indent=1), flush=True)
    if place:
        record.keep(place, table)
