"""What `fedstill.run` takes as its data: the objects that people have, and one of them for each client."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import TensorDataset

import fedstill
from fedstill.data import own
from fedstill.data.places import Reading

RNG = np.random.default_rng(0)
Y = np.arange(80) % 2
X = RNG.normal(size=(80, 3)) + 2.0 * Y[:, None]
NAMES = np.array(["well", "sick"])[Y]
QUICK: dict[str, Any] = {"model": "linear", "clients": 2, "rounds": 1, "workers": 0}


def frame(rows: slice = slice(None), **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"age": X[rows, 0], "bmi": X[rows, 1], "dose": X[rows, 2], "label": NAMES[rows], **columns})


def polars(rows: slice = slice(None)) -> Any:
    pl = pytest.importorskip("polars")
    return pl.DataFrame({"age": X[rows, 0], "bmi": X[rows, 1], "dose": X[rows, 2], "label": NAMES[rows]})


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_pandas(frame(), preserve_index=False)


FORMS = {
    "a pair of arrays": lambda: (X, Y),
    "a pair with names": lambda: (X, NAMES),
    "a pair of tensors": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "a pair of lists": lambda: (X.tolist(), Y.tolist()),
    "a list of two": lambda: [X, Y],
    "a frame and a column": lambda: (frame().drop(columns="label"), frame()["label"]),
    "pandas": frame,
    "pandas after a shuffle": lambda: frame().sample(frac=1, random_state=0),
    "polars": polars,
    "Arrow": lambda: pa.Table.from_pandas(frame(), preserve_index=False),
    "Hugging Face": hugging_face,
    "torch": lambda: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_takes_what_people_have(form: str) -> None:
    run = fedstill.run("fedavg", data=FORMS[form](), **QUICK)
    assert run.counts is not None and run.counts.sum() == 64
    assert run.class_names in (("0", "1"), ("sick", "well"))
    columns = run.load_model().columns
    assert columns == (("age", "bmi", "dose") if "label" in getattr(FORMS[form](), "columns", ()) or form in
                       ("a frame and a column", "Arrow", "Hugging Face", "polars") else ())  # fmt: skip


def test_a_column_of_classes_and_of_groups_may_be_named() -> None:
    data = frame(died=Y == 1, patient=[f"p{i // 4}" for i in range(80)])
    run = fedstill.run("fedavg", data=data, label_column="died", group="patient", **QUICK)
    assert run.class_names == ("False", "True")
    assert own.given(data, Reading(group="patient"))[0].group == "patient"


HALVES = slice(0, 30), slice(30, 80)


@pytest.mark.parametrize("form", ["pairs", "frames", "columns in another order", "torch", "paths", "with tests"])
def test_a_list_is_one_data_set_for_each_client(form: str, tmp_path: Path) -> None:
    data: Any = [(X[half], NAMES[half]) for half in HALVES]
    if form == "frames":
        data = [frame(half) for half in HALVES]
    elif form == "columns in another order":
        data = [frame(HALVES[0]), frame(HALVES[1])[["label", "dose", "bmi", "age"]]]
    elif form == "torch":
        data = [TensorDataset(torch.from_numpy(X[half]), torch.from_numpy(Y[half])) for half in HALVES]
    elif form == "paths":
        data = [str(tmp_path / f"{i}.parquet") for i in range(2)]
        for half, place in zip(HALVES, data, strict=True):
            frame(half).to_parquet(place)
    elif form == "with tests":
        datasets = pytest.importorskip("datasets")
        both = [datasets.Dataset.from_pandas(frame(half), preserve_index=False) for half in HALVES]
        data = [datasets.DatasetDict(train=one, test=one.select(range(5))) for one in both]
    settings = {key: value for key, value in QUICK.items() if key != "clients"}
    run = fedstill.run("fedavg", data=data, **settings)
    assert run.counts is not None and run.summary["partition"] == "by:client"
    sizes = run.counts.sum(1)
    if form == "with tests":
        assert sizes.tolist() == [30, 50] and run.confusion is not None and run.confusion.sum() == 10
    else:
        assert sizes.sum() == 64 and sizes[0] < sizes[1]
    found, clients = own.given(data)
    assert clients == 2
    if form != "torch":
        assert np.allclose(np.sort(found.train.images.numpy(), 0)[:, 0].min(), X[:, 0].min(), atol=1.0)


def test_a_client_may_have_one_class() -> None:
    data = [(X[Y == label], np.array(["well", "sick"])[Y[Y == label]]) for label in (0, 1)]
    run = fedstill.run("fedavg", data=data, model="linear", rounds=1, workers=0)
    assert run.counts is not None and (run.counts > 0).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": ["Jane Roe, born 1950"]}, "the data are a builtins.dict; give a name or a path, a pair"),
        (3.5, "the data are a builtins.float; give a name or a path"),
        ([], "the data are an empty list; give one data set for each client"),
        ([(X, Y), (X[:, :2], Y)], r"client 1's records have shape \(2,\)"),
        ([(X, Y), (X, NAMES)], "the labels of some clients' data are names, those of others numbers"),
        (
            [frame(), frame().drop(columns="bmi")],
            "client 0's records have the column 'bmi' of numbers, and those of client 1",
        ),
        (
            pd.DataFrame({"name": ["Jane Roe"], "label": [1]}),
            "texts|one class in all|class",
        ),
    ],
)
def test_what_is_no_data_set_is_named_by_its_type_only(data: Any, words: str) -> None:
    with pytest.raises(fedstill.InputError, match=words) as refusal:
        fedstill.run("fedavg", data=data, model="linear", rounds=1, workers=0)
    assert "Jane" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_a_list_decides_the_partition() -> None:
    with pytest.raises(fedstill.InputError, match="partition is 'iid', but the data are a list of 2 clients' records"):
        fedstill.run("fedavg", data=[(X, Y), (X, Y)], partition="iid", model="linear", workers=0)


# Several runs, and a model's predictions -----------------------------------------------------------------------------


def test_methods_are_compared_from_python(tmp_path: Path) -> None:
    methods = {"once": fedstill.FedAvg(rounds=1), "twice": fedstill.FedAvg(rounds=2), "real": "real"}
    task: dict[str, Any] = {"data": (X, NAMES), "model": "linear", "clients": 2, "workers": 0}
    runs = fedstill.compare(methods, out=tmp_path / "c", seeds=(0, 1), **task)
    assert [(run.label, run["seed"]) for run in runs] == [(label, seed) for seed in (0, 1) for label in methods]
    table = fedstill.to_pandas(runs)
    assert set(table["label"]) == set(methods) and (table["seeds"] == 2).all() and table["accuracy"].notna().all()
    again = fedstill.compare(methods, out=tmp_path / "c", seeds=(0, 1), **task)
    assert [run.summary for run in again] == [run.summary for run in runs]
    with pytest.raises(fedstill.InputError, match="rounds is no setting of the task that all runs share"):
        fedstill.compare(methods, out=tmp_path / "d", rounds=1, **task)
    with pytest.raises(fedstill.InputError, match="methods are none, or two have one label"):
        fedstill.compare([fedstill.FedAvg(rounds=1), fedstill.FedAvg(rounds=2)], out=tmp_path / "d", **task)
    facts = fedstill.publish(runs[0], tmp_path / "handed")
    assert (tmp_path / "handed" / "README.md").exists() and facts["class_names"] == ["sick", "well"]


def test_a_model_predicts_arrays_and_frames_by_name() -> None:
    model = fedstill.run("fedavg", data=frame(), **{**QUICK, "rounds": 5}).load_model()
    shares = model.predict_proba(X.astype(np.float32))
    assert shares.shape == (80, 2) and np.allclose(shares.sum(1), 1, atol=1e-6)
    assert (model.predict(X) == np.array(["sick", "well"])[shares.argmax(1)]).all()
    for table in (frame(), frame()[["label", "dose", "bmi", "age"]], polars(), pa.Table.from_pandas(frame())):
        assert np.allclose(model.predict_proba(table), shares, atol=1e-6)
    with pytest.raises(fedstill.InputError, match="lacks the column 'bmi'; the model takes age, bmi, dose"):
        model.predict(frame().drop(columns="bmi"))
    with pytest.raises(
        fedstill.InputError, match="record 3 has a value that is not finite; fill it or drop the record"
    ):
        model.predict(np.where(np.arange(80)[:, None] == 3, np.nan, X))
