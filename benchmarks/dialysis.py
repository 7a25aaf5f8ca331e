"""One-year outcome at 67 dialysis centres: what ``--tune``, ``--measure`` and ``--class-weights`` give over defaults.

    pip install --no-deps survset               # GPL; none of its files is in this repository
    python benchmarks/dialysis.py run OUT       # some minutes of one core
    python benchmarks/dialysis.py page          # the table of docs/measures.md from the results

The table is Dialysis of SurvSet: patients of 67 Brazilian centres, their age, disease, and month of entry. The outcome
is death within 12 months; whoever was last seen alive within 12 months is left out. A fifth of each centre's records is
set aside for the test, for each of three splits; no try sees a record of it.
"""

import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/dialysis.json", ROOT / "docs/measures.md"
SEEDS = (0, 1, 2)
DISEASES = ("congen", "diabetes", "hypert", "other", "renal")
COLUMNS = f"""
[columns.age]
kind = "number"
range = [0, 100]

[columns.begin]
kind = "number"
range = [1, 44]

[columns.disease]
kind = "category"
values = {json.dumps(DISEASES)}
"""
SCHEMA = 'target = "died"\nclasses = ["no", "yes"]\nsite = "centre"\n' + COLUMNS
TASK: dict[str, Any] = {"clients": 67, "partition": "by:centre", "model": "linear", "workers": 0, "progress": False}
AFL: dict[str, Any] = {"public": "noise=500", "epsilon": None, "space": {"whiten": False, "quantile": 1.0}}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg, defaults": ("fedavg", {}),
    "`--class-weights balanced`": ("fedavg", {"class_weights": "balanced"}),
    "`--tune`": ("fedavg", {"tune": True}),
    "`--tune --measure auc`": ("fedavg", {"tune": True, "measure": "auc"}),
    "`--tune --measure balanced-accuracy --class-weights balanced`": (
        "fedavg",
        {"tune": True, "measure": "balanced-accuracy", "class_weights": "balanced"},
    ),
    "AFL, one upload, `--epsilon None`": ("afl", AFL),
    "the same, `--tune --measure auc`": ("afl", {**AFL, "tune": True, "measure": "auc"}),
}
POOLED = {"all records in one place (logistic regression)": None, "the same, balanced": "balanced"}
SHOWN = {
    "auc": "AUC",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "brier": "Brier score",
}


def table() -> pd.DataFrame:
    """The records with a known outcome."""
    from SurvSet.data import SurvLoader  # type: ignore[import-not-found]

    found = SurvLoader().load_dataset("Dialysis")["df"]
    died = (found.event == 1) & (found.time <= 12)
    known = found.assign(died=died.map({True: "yes", False: "no"}))[died | (found.time > 12)]
    names = {"num_age": "age", "num_begin": "begin", "fac_disease": "disease", "fac_center": "centre"}
    return known.rename(columns=names)[[*names.values(), "died"]].reset_index(drop=True)


def divide(frame: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Four fifths and one fifth of each centre's records, at random; a centre of two has one of each."""
    order = frame.sample(frac=1, random_state=seed)
    by_centre = order.groupby("centre", observed=True)
    place = by_centre.cumcount() / by_centre.died.transform("size")
    return order[place >= 0.2], order[place < 0.2]


def pooled(train: pd.DataFrame, test: pd.DataFrame, weights: str | None) -> dict[str, float | None]:
    """Logistic regression on all records in one place, with the schema's columns."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    from fedstill.measures import Scores

    def columns(frame: pd.DataFrame) -> Any:
        diseases = [(frame.disease == one).to_numpy(float) for one in DISEASES]
        return np.stack([frame.age / 50 - 1, (frame.begin - 22.5) / 21.5, *diseases], 1)

    model = LogisticRegression(class_weight=weights).fit(columns(train), train.died == "yes")
    true = (test.died == "yes").to_numpy().astype(np.int64)
    return Scores(("no", "yes"), true, model.predict_proba(columns(test))).measures()


def run(out: Path, quick: bool) -> dict[str, Any]:
    """Run all rows, or for a short form those of two splits that are not tuned; what was found."""
    import fedstill

    frame, runs = table(), list[dict[str, Any]]()
    for seed in SEEDS[:2] if quick else SEEDS:
        train, test = divide(frame, seed)
        folder = out / f"data-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", train), ("test", test)):
            part.to_csv(folder / f"{name}.csv", index=False)
        (folder.parent / "schema.toml").write_text(SCHEMA)
        for row, weights in POOLED.items():
            runs.append({"seed": seed, "row": row, **pooled(train, test, weights)})
        for number, (row, (method, settings)) in enumerate(ROWS.items()):
            if quick and "tune" in settings:
                continue
            task = {**TASK, "data": str(folder), "schema_file": str(out / "schema.toml"), "seed": seed}
            made: Any = fedstill.run(method, out=out / f"{number}-{seed}", **task, **settings)
            values = fedstill.evaluate(made, str(folder)).scores.measures()
            facts = {"up": made["bytes_up_per_client"], "tries": made.tries and {**made.tries, "given": None}}
            runs.append({"seed": seed, "row": row, **values, **facts, "predicted": made["predicted_classes"]})
            print(seed, row, {key: round(values[key] or 0, 3) for key in SHOWN}, flush=True)
    facts = {"command": "python benchmarks/dialysis.py run OUT", "commit": record.commit(), "date": str(date.today())}
    sizes = {"records": len(frame), "train": len(train), "no": float((frame.died == "no").mean())}
    return {**facts, **sizes, "runs": runs}


def cell(values: list[float | None]) -> str:
    """Mean and sample standard deviation over splits; a dash where a split has none."""
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.3f} ± {statistics.stdev(known):.3f}" if len(known) == len(values) else "–"


def lines(found: dict[str, Any]) -> str:
    """The table of the page, from the results alone."""
    rows = dict.fromkeys(one["row"] for one in found["runs"])
    text = f"| row | {' | '.join(SHOWN.values())} | sent by a centre |\n|---|{'---|' * (len(SHOWN) + 1)}\n"
    for row in rows:
        own = [one for one in found["runs"] if one["row"] == row]
        up = "-" if "up" not in own[0] else f"{statistics.mean(one['up'] for one in own):,.0f} B"
        text += f"| {row} | {' | '.join(cell([one[key] for one in own]) for key in SHOWN)} | {up} |\n"
    return text


BEGIN, END = "<!-- results -->\n", "<!-- end -->"


def page(text: str, found: dict[str, Any]) -> str:
    """The page with the table of these results."""
    return record.between(text, BEGIN, END, lines(found))


def main() -> None:
    short = "two splits, and no row that is tuned"
    record.study(__doc__, "runs/dialysis", short, RESULTS, PAGE, lambda chosen: run(chosen.out, chosen.quick), page)


if __name__ == "__main__":
    main()
