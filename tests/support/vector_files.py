"""Write wire, noise and guarantees in ``tests/vectors``: ``PYTHONPATH=tests/support:src python FILE``.

The epsilons of guarantees come from `exact`, not from fedstill.
"""

import json
from pathlib import Path
from typing import Any

import exact
import mpmath
import noise_cases
import wire_cases

FOLDER = Path(__file__).parents[1] / "vectors"


def g(noise: float, **more: float) -> dict[str, Any]:
    return {"kind": "gaussian", "noise_multiplier": noise, **more}


def p(epsilon: float) -> dict[str, Any]:
    return {"kind": "pure", "epsilon": epsilon}


COMPOSED: list[tuple[str, list[dict[str, Any]], float, str]] = [
    ("one Gaussian", [g(1.0)], 1e-5, "record"),
    ("three kinds of Gaussians", [g(0.5), g(2.0, count=3), g(1.25)], 1e-6, "record"),
    ("a hundred Gaussians", [g(12.5, count=100)], 1e-5, "record"),
    ("a Gaussian that costs no epsilon", [g(50.0)], 0.1, "record"),
    ("a pure release", [p(0.7)], 1e-5, "record"),
    ("eight pure releases", [p(0.3)] * 8, 1e-5, "record"),
    ("ten pure releases, large delta", [p(0.1)] * 10, 1e-3, "record"),
    ("a Gaussian and a pure release", [g(2.0), p(0.5)], 1e-5, "record"),
    ("a sample", [g(1.0, sampling=0.1)], 1e-5, "record"),
    ("a sample and a pure release", [g(0.8, sampling=0.3), p(0.2)], 1e-6, "record"),
    ("a label under a Gaussian", [g(4.0)], 1e-5, "label"),
    ("a label under two Gaussians", [g(3.0), g(5.0)], 1e-5, "label"),
    ("a label under both kinds", [g(4.0), p(0.4)], 1e-5, "label"),
]
INVALID: list[tuple[str, list[Any], float]] = [
    ("no noise", [g(0.0)], 1e-5),
    ("negative noise", [g(-1.0)], 1e-5),
    ("no record in the sample", [g(1.0, sampling=0.0)], 1e-5),
    ("a sample above all", [g(1.0, sampling=1.5)], 1e-5),
    ("no release", [g(1.0, count=0)], 1e-5),
    ("half a release", [g(1.0, count=0.5)], 1e-5),
    ("a pure release of 0", [p(0.0)], 1e-5),
    ("a negative pure release", [p(-0.5)], 1e-5),
    ("a kind that does not exist", [{"kind": "laplace", "scale": 1.0}], 1e-5),
    ("no kind", [{"epsilon": 1.0}], 1e-5),
    ("one key too many", [{**p(1.0), "delta": 0.0}], 1e-5),
    ("delta 0", [g(1.0)], 0.0),
    ("delta 1", [g(1.0)], 1.0),
    ("a negative delta", [g(1.0)], -1e-5),
]
UNBOUNDED: list[tuple[str, list[dict[str, Any]]]] = [
    ("one release without a bound", [{"kind": "none", "reason": "no noise"}]),
    ("one of them among others", [g(1.0), {"kind": "none", "reason": "no noise"}, p(0.1)]),
]
FILTERED: list[tuple[str, list[dict[str, Any]], float, float, bool]] = [
    ("pure releases up to the bound", [p(0.5), p(0.5)], 1.0, 1e-5, True),
    ("pure releases above it", [p(0.5), p(0.501)], 1.0, 1e-5, False),
    ("a release without a bound", [p(0.1), {"kind": "none", "reason": "no noise"}], 1.0, 1e-5, False),
]


def guarantees() -> dict[str, Any]:
    """The content of ``guarantees.json``."""
    cases: list[dict[str, Any]] = []
    for name, events, delta, unit in COMPOSED:
        epsilon = float(mpmath.nstr(exact.epsilon(events, delta, unit), 17))
        found = {"name": name, "good": True, "events": events, "delta": delta, "unit": unit, "epsilon": epsilon}
        cases.append(found)
    for name, events, delta in INVALID:
        cases.append({"name": name, "good": False, "events": events, "delta": delta, "unit": "record"})
    for name, events in UNBOUNDED:
        cases.append({"name": name, "good": True, "events": events, "delta": 1e-5, "unit": "record", "epsilon": None})
    filtered = [
        {"name": name, "events": events, "epsilon": epsilon, "delta": delta, "admitted": admitted}
        for name, events, epsilon, delta, admitted in FILTERED
    ]
    for factor, admitted in ((1.001, True), (0.999, False)):
        noise = 4.377178095681225  # the epsilon of one release with noise 1 at delta 1e-5
        events = [g(factor * 2**0.5), g(factor * 2**0.5)]
        name = f"Gaussians with {factor:g} times the noise that the bound asks"
        filtered.append({"name": name, "events": events, "epsilon": noise, "delta": 1e-5, "admitted": admitted})
    return {"format": 1, "cases": cases, "filter": filtered}


def contents() -> dict[str, dict[str, Any]]:
    """Files and their contents."""
    made = {"wire": wire_cases.as_file(), "noise": noise_cases.as_file(), "guarantees": guarantees()}
    return {f"{name}.json": content for name, content in made.items()}


def main() -> None:
    for name, content in contents().items():
        (FOLDER / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
