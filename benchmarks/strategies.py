"""Adaptive strategies against the ledger's filters: the largest true epsilon over the budget, by exact computation.

Each strategy sees some releases, and then takes for every outcome the best of seven continuations that the filters
admit. Its true epsilon at the budget's delta is found by bisection.

Usage: python benchmarks/strategies.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import record
from adaptive import BUDGETS, STARTS, continuations, true_epsilon

from fedstill.privacy.accounting import admits
from fedstill.privacy.releases import Event, Gaussian, Pure

MORE: list[list[Event]] = [
    *([Pure(epsilon=e)] * n for e in (0.01, 0.02, 0.05, 0.1) for n in (2, 8)),
    *([Gaussian(noise_multiplier=25.0)] * n for n in (1, 4)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "strategies.json")
    args = parser.parse_args()
    table = []
    for epsilon, delta in BUDGETS:
        for start in [*STARTS, *MORE]:

            def allowed(events: Sequence[Event], epsilon: float = epsilon, delta: float = delta) -> bool:
                return admits(events, events[0], epsilon, delta)

            if allowed(start):
                found = true_epsilon(start, continuations(start, allowed), delta, 2 * epsilon)
                first = start[0].model_dump(include={"kind", "epsilon", "noise_multiplier"})
                row = {"epsilon": epsilon, "delta": delta, "first": first, "count": len(start)}
                table.append({**row, "true_epsilon": found, "ratio": found / epsilon})
    worst = max(row["ratio"] for row in table)
    print(f"{len(table)} strategies, largest true epsilon over the budget {worst:.4f}")
    record.keep(args.out, table, strategies=len(table), largest=worst)
    if worst > 1 + 1e-4:
        raise SystemExit("a strategy exceeds its budget")


if __name__ == "__main__":
    main()
