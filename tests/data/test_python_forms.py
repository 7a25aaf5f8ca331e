"""What a script gives from memory is read as it is meant, or refused: other forms of the same records are the same."""

from collections.abc import Callable
from typing import Any

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch

import fedstill
from fedstill import InputError, from_torch
from fedstill.data import own
from fedstill.data.decode import plain_types

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4))
Y = (X[:, 0] - X[:, 3] > 0).astype(int)
FRAME = pd.DataFrame(X, columns=list("abcd"))
TASK: dict[str, Any] = {"model": "linear", "clients": 2, "rounds": 3, "workers": 0, "progress": False}
NAMES = np.array(["well", "sick"], object)[Y]


def test_integers_are_names_of_a_list_wherever_it_is_stated() -> None:
    """``from_torch`` took them for places, so that a model of classes "1", "0" said the other one."""
    for data, more in ((from_torch((X, Y), class_names=["1", "0"]), {}), ((X, Y), {"class_names": ["1", "0"]})):
        run = fedstill.run("fedavg", data=data, **TASK, **more)  # type: ignore[arg-type]
        model = run.load_model()
        assert model.class_names == ("1", "0") and (model.predict(X) == Y.astype(str)).mean() > 0.7
        assert fedstill.evaluate(run, (X, Y)).accuracy > 0.7  # type: ignore[union-attr]
    with pytest.raises(InputError, match="has the class 1, an integer, but the classes are 3, 0"):
        from_torch((X, Y), class_names=["3", "0"])


@pytest.mark.parametrize("wrong", [["a", "a"], ["é", "e\u0301"], {"a", "b"}, "ab", [np.nan, "a"], [None, "a"]])
def test_names_of_classes_are_a_list_of_different_names(wrong: Any) -> None:
    with pytest.raises(InputError, match="class_names"):
        from_torch((X, Y), class_names=wrong)
    if isinstance(wrong, set):
        with pytest.raises(InputError, match="class_names is .*; a set has no order; give a list"):
            fedstill.run("fedavg", data=(X, Y), class_names=wrong, **TASK)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a gap among names": (lambda: (X, [np.nan, *NAMES[1:]]), "are texts, but item 0 is none"),
    "a gap among a frame's names": (lambda: (FRAME, [np.nan, *NAMES[1:]]), "are texts, but item 0 is none"),
    "a number among names": (lambda: (X, [1.0, *map(str, Y[1:])]), "are texts, but item 0 is none"),
    "masked rows": (lambda: (list(np.ma.array(X, mask=X > 1)), Y), "have masked values"),
    "an index in another order": (lambda: (FRAME, pd.Series(Y).sort_values()), "index of the rows in another order"),
    "two columns of a name": (lambda: pa.table([Y, Y, Y], ["a", "a", "label"]), "two columns 'a'"),
    "a transform": (
        lambda: hf.Dataset.from_pandas(FRAME.assign(label=Y)).with_transform(lambda rows: rows),
        "has a transform|have a transform",
    ),
    "one number in two ways": (
        lambda: [(X[:100], Y[:100].astype(str)), (X[100:], Y[100:].astype(float).astype(str))],
        "clients have the classes '0' and '0.0', which are one number",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_would_be_read_otherwise_is_refused(what: str) -> None:
    data, words = WRONG[what]
    task = {key: value for key, value in TASK.items() if key != "clients" or what != "one number in two ways"}
    with pytest.raises(InputError, match=words):
        fedstill.run("fedavg", data=data(), **task)


def test_a_data_set_does_not_change_with_the_caller_s_array() -> None:
    for records in (X.astype(np.float32), (X * 40).clip(0, 255).astype(np.uint8).reshape(200, 1, 2, 2)):
        mine = records.copy()
        data = from_torch((mine, Y), (records.copy(), Y))
        before = data.train.images.clone()
        mine[:] = 0
        assert torch.equal(data.train.images, before)


def test_columns_that_a_format_leaves_out_are_no_features() -> None:
    data = hf.Dataset.from_pandas(FRAME.assign(label=Y, leak=Y + X[:, 1] / 100))
    run = fedstill.run("fedavg", data=data.with_format("torch", columns=["a", "b", "label"]), **TASK)
    assert run.load_model().columns == ("a", "b")


def test_a_year_of_a_period_is_that_year() -> None:
    years = pd.PeriodIndex(["1975", "1989", pd.NaT], freq="Y")
    table = plain_types(own.table(pd.DataFrame({"birth": years}), "it"))
    assert table["birth"].to_pylist() == ["1975", "1989", None]  # the count of years since 1970 was read as a number


def test_rounding_is_checked_by_the_columns_own_names() -> None:
    seconds = RNG.integers(0, 3600, 200)
    wide = FRAME.assign(a=(RNG.normal(size=200) * 1e9).astype("f4").astype(float), t=1.7e9 + seconds, label=Y)
    wide.loc[:99, "t"] = 1.7e9 // 128 * 128 + 128 * (seconds[:100] // 128)
    first, second = wide.iloc[:100][[*"abcd", "t", "label"]], wide.iloc[100:]
    for order in ([*"abcd", "t", "label"], ["t", "b", "c", "d", "a", "label"]):
        with pytest.raises(ValueError, match="column 't'"):
            own.given([first, second[order]])


@pytest.mark.parametrize("form", ["levels", "sparse", "sparse tensor", "other bytes", "long"])
def test_other_forms_of_the_same_records_are_predicted_alike(form: str) -> None:
    levels = pd.MultiIndex.from_tuples([("lab", 1), ("lab", 2), ("vital", 1), ("vital", 2)])
    forms: dict[str, Any] = {
        "levels": pd.DataFrame(X, columns=levels),
        "sparse": scipy.sparse.csr_matrix(X),
        "sparse tensor": torch.tensor(X).to_sparse(),
        "other bytes": X.astype(">f8"),
        "long": X.astype(np.longdouble),
    }
    given = forms[form]
    plain = fedstill.run("fedavg", data=(X, Y), **TASK)
    run = fedstill.run("fedavg", data=(given, Y), **TASK)
    assert run.accuracy == plain.accuracy
    expected = plain.load_model().predict_proba(X)
    np.testing.assert_allclose(run.load_model().predict_proba(given), expected, rtol=1e-5)


def test_a_column_that_is_called_client_is_said_to_have_other_values() -> None:
    frame = FRAME.assign(client=[f"p{i}" for i in range(200)], label=Y)
    data, _ = own.given([frame.iloc[:100], frame.iloc[100:]])
    said = "the column 'client' has the numbers of clients, not your own values; rename yours"
    assert said in data.remarks and {*data.columns["client"].tolist()} == {0, 1}
    assert said not in own.given([frame.iloc[:100, 1:4].assign(label=Y[:100])] * 2)[0].remarks


@pytest.mark.parametrize("index", [pd.RangeIndex(200), pd.Index(range(200))])
def test_an_index_with_a_name_is_a_column_of_whatever_kind(index: Any) -> None:
    frame = FRAME.set_index(index.rename("patient"))
    assert "patient" in own.table(frame, "it").column_names
    assert own.table(frame, "it", ["patient", "a"]).column_names == ["a", "patient"]


def test_no_row_of_a_table_is_in_a_sentence() -> None:
    with pytest.raises(InputError) as refused:
        fedstill.sweep({"data": FRAME, "methods": {"fedavg": {}}}, out="none")
    assert "DataFrame" in str(refused.value) and f"{X[0, 0]:.4f}" not in str(refused.value)


@pytest.mark.parametrize("form", [np.array, pd.Series, pd.Index, tuple])
def test_settings_that_are_lists_take_arrays_and_columns(form: Callable[[Any], Any]) -> None:
    task = {**TASK, "class_names": form(["no", "yes"])}
    run = fedstill.run("fedavg", data=(X, Y), mean=form([0.0] * 4), std=form([1.0] * 4), **task)
    assert run.config["experiment"]["class_names"] == ["no", "yes"] and run.config["experiment"]["std"] == [1.0] * 4
    with pytest.raises(InputError, match="mean"):
        fedstill.run("fedavg", data=(X, Y), mean=form([True] * 4), std=1.0, **TASK)


def test_a_frame_whose_columns_have_numbers_for_names_gives_its_classes_by_number() -> None:
    """The pair was read as two clients' data: the frame without classes, and a 4."""
    frame = FRAME.assign(y=Y).set_axis([0, 1, 2, 3, 4], axis=1)
    accuracy = fedstill.run("fedavg", data=(frame, 4), **TASK).accuracy  # type: ignore[arg-type]
    assert accuracy is not None and accuracy > 0.7


@pytest.mark.parametrize("column", ["image", "img"])
def test_a_column_of_numbers_that_is_called_image_is_a_feature(column: str) -> None:
    """Each number was opened as a picture: ``'float' object has no attribute 'read'``."""
    data = own.given(FRAME.rename(columns={"c": column}).assign(label=Y))[0]
    assert data.features == ("a", "b", column, "d")


def test_a_label_beyond_the_integers_is_named() -> None:
    with pytest.raises(InputError, match="has the class 9223372036854775809; classes are names, or"):
        from_torch((X, np.full(len(X), 2**63 + 1, np.uint64)))


def test_a_data_set_without_a_length_is_refused() -> None:
    class Shapeless(torch.utils.data.Dataset[Any]):
        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(4), i % 2

    with pytest.raises(InputError, match="a Shapeless without a length; give it __len__ or __iter__"):
        from_torch(Shapeless())
