"""A site's records in a run's task: columns and classes are those of one name, or the site refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedstill import methods, schema
from fedstill.base.records import Normalisation, Records
from fedstill.data import sources
from fedstill.data.places import Reading
from fedstill.data.table_schema import TableSchema
from fedstill.engines.run_spec import RunSpec
from fedstill.sites.site import site_data
from fedstill.sites.site.policy import SitePolicy, check, class_names
from fedstill.sites.site.site_data import SiteData

COLUMNS = ("age", "systolic", "bmi")
X = np.random.default_rng(0).normal([50, 130, 25], [10, 15, 4], (60, 3))


def table(place: Path, columns: tuple[str, ...] = COLUMNS, **more: Any) -> Path:
    order = [COLUMNS.index(name) if name in COLUMNS else i for i, name in enumerate(columns)]
    rows = {name: X[:, i] for name, i in zip(columns, order, strict=True)}
    pq.write_table(pa.table({**rows, "label": np.arange(60) % 2, **more}), place)
    return place


def spec(records: Records, **facts: Any) -> RunSpec:
    facts = {"name": "fedavg", "model": "linear", **facts}
    return RunSpec.read(RunSpec.of(methods.find("fedavg")(), records, **facts).text())


def own(data: Path, run: RunSpec, tmp_path: Path, **rules: Any) -> Records:
    policy = SitePolicy(client=0, data=data, state=tmp_path / "state", methods=("fedavg",), unprotected=True, **rules)
    site = SiteData(policy, run, tmp_path / "run")
    site.check()
    return site.own[0]


@pytest.mark.parametrize(
    "columns",
    [COLUMNS, COLUMNS[::-1], ("systolic", "age", "bmi")],
)
def test_a_site_orders_its_columns_by_the_runs_names(columns: tuple[str, ...], tmp_path: Path) -> None:
    server = sources.load(str(table(tmp_path / "server.parquet")))
    run = spec(server.train, columns=server.features)
    found = own(table(tmp_path / "site.parquet", columns), run, tmp_path)
    assert np.allclose(found.images.numpy(), X) and run.task["columns"] == list(COLUMNS)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("alter", "systolic", "bmi"), "the site's table lacks the run's column 'age' .columns."),
        ((*COLUMNS, "dose"), "the site's table has a column 'dose', the run has not .columns."),
        (("age", "bmi"), "the site's table lacks the run's column 'systolic'"),
    ],
)
def test_a_site_with_other_columns_refuses(columns: tuple[str, ...], message: str, tmp_path: Path) -> None:
    server = sources.load(str(table(tmp_path / "server.parquet")))
    more = {"dose": X[:, 0]} if "dose" in columns else {}
    place = table(tmp_path / "site.parquet", tuple(name for name in columns if name != "dose"), **more)
    with pytest.raises(schema.Refused, match=message):
        own(place, spec(server.train, columns=server.features), tmp_path)


@pytest.mark.parametrize("named", ["run", "site"])
def test_names_on_one_side_only_are_refused(named: str, tmp_path: Path) -> None:
    server = sources.load(str(table(tmp_path / "server.parquet")))
    np.savez(tmp_path / "site.npz", x_train=X, y_train=np.arange(60) % 2)
    place = tmp_path / ("site.npz" if named == "run" else "server.parquet")
    with pytest.raises(schema.Refused, match=f"the {named}'s columns have names and the .* have none"):
        own(place, spec(server.train, columns=server.features if named == "run" else ()), tmp_path)
    if named == "run":
        assert len(own(place, spec(server.train), tmp_path)) == 60


def labelled(tmp_path: Path, labels: np.ndarray) -> Path:
    np.savez(tmp_path / "site.npz", x_train=np.arange(len(labels) * 4.0).reshape(-1, 4), y_train=labels)
    return tmp_path / "site.npz"


def like(classes: int) -> Records:
    return Records(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), classes, Normalisation((0.0,) * 4, (1.0,) * 4))


@pytest.mark.parametrize("names", [tuple(map(str, range(12))), ("0", "1", "10", "11", *map(str, range(2, 10)))])
def test_a_sites_integers_are_the_classes_of_that_name(names: tuple[str, ...], tmp_path: Path) -> None:
    labels = np.repeat(np.arange(12), 5)
    found = own(labelled(tmp_path, labels), spec(like(12), class_names=names), tmp_path)
    assert [int(names[label]) for label in found.labels] == labels.tolist()


def test_a_sites_integers_need_names_for_a_run_with_names(tmp_path: Path) -> None:
    place, run = labelled(tmp_path, np.repeat([0, 1], 30)), spec(like(2), class_names=("sick", "well"))
    with pytest.raises(schema.Refused, match="labels are integers, but the run's classes are called 'sick', ...; name"):
        own(place, run, tmp_path)
    assert own(place, run, tmp_path, class_names=("well", "sick")).labels.tolist() == [1] * 30 + [0] * 30
    with pytest.raises(schema.Refused, match="the site's class 'ill' is not a class of the run"):
        own(place, run, tmp_path, class_names=("well", "ill"))


def test_an_integer_beyond_the_runs_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(schema.Refused, match="the site's class '2' is not a class of the run"):
        own(labelled(tmp_path, np.repeat([0, 2], 30)), spec(like(2)), tmp_path)


def test_a_sites_column_of_classes_may_be_named_and_its_remarks_are_warnings(tmp_path: Path) -> None:
    place = table(tmp_path / "site.parquet", died=[i % 3 == 0 for i in range(60)], ward=["a", "b"] * 30)
    rules: dict[str, Any] = {"client": 0, "state": tmp_path / "state", "methods": ("fedavg",), "unprotected": True}
    policy = SitePolicy(data=place, label_column="died", **rules)
    assert "not in the vectors, as they are texts: ward" in list(check(policy))
    assert sources.load_part(str(place), policy.reading, cache_dir=tmp_path).class_names == ("False", "True")


def test_a_site_never_downloads_a_backbone_for_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def load(name: str, shape: object, *, download: bool = True) -> Any:
        asked.append(download)
        raise ValueError("not here")

    monkeypatch.setattr(site_data.backbones, "load", load)
    spec: Any = SimpleNamespace(features="hf:somebody/net", backbone="0" * 64)
    data = SiteData(SitePolicy(client=0, data=tmp_path, state=tmp_path), spec, tmp_path)
    with pytest.raises(schema.Refused, match="can't load the backbone 'hf:somebody/net'"):
        data.check_backbone()
    assert asked == [False]


BY = """
target = "label"
classes = ["0", "1"]
[columns.age]
kind = "number"
range = [0, 200]
[columns.systolic]
kind = "number"
range = [0, 300]
"""


def by_schema(tmp_path: Path, text: str | None = BY) -> SitePolicy:
    """A site with its records in a CSV file, whose columns stand in another order."""
    rows = "\n".join(f"{y:.3f},{x:.3f},note {i},{i % 2}" for i, (x, y, _) in enumerate(X))
    (tmp_path / "site.csv").write_text(f"systolic,age,remark,label\n{rows}\n")
    rules: dict[str, Any] = {"client": 0, "methods": ("fedavg",), "unprotected": True, "state": tmp_path / "state"}
    if text is not None:
        (tmp_path / "site.toml").write_text(text)
        rules["schema_file"] = tmp_path / "site.toml"
    return SitePolicy(data=tmp_path / "site.csv", **rules)


def of_run(tmp_path: Path, text: str = BY) -> RunSpec:
    (tmp_path / "run.toml").write_text(text)
    by = TableSchema.read(tmp_path / "run.toml")
    server = sources.load(str(table(tmp_path / "server.parquet")), Reading(schema=by))
    return spec(server.train, columns=server.features, table_schema=by.digest)


def test_a_site_reads_a_csv_file_by_the_run_s_schema(tmp_path: Path) -> None:
    site = SiteData(by_schema(tmp_path), of_run(tmp_path), tmp_path / "run")
    site.check_schema()
    site.check()
    expected = np.stack([X[:, 0] / 100 - 1, X[:, 1] / 150 - 1], 1)
    assert np.allclose(site.own[0].images.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "run", "message"),
    [
        (BY.replace("200", "400"), BY, "the site's schema has the SHA-256 .*; take the server's file"),
        (None, BY, "the run reads its table by a schema and the site does not"),
        (BY, None, "the site reads its table by a schema and the run does not"),
    ],
)
def test_a_site_with_another_schema_refuses_before_its_records_are_read(
    text: str | None, run: str | None, message: str, tmp_path: Path
) -> None:
    policy = by_schema(tmp_path, text)
    asked = of_run(tmp_path) if run else spec(sources.load(str(table(tmp_path / "server.parquet"))).train)
    (tmp_path / "site.csv").unlink()
    with pytest.raises(schema.Refused, match=message):
        SiteData(policy, asked, tmp_path / "run").check_schema()


def answering(tmp_path: Path, columns: str, test_label: str = "1", **rules: Any) -> SiteData:
    """A new process of a site, whose file has these columns and some test records."""
    lines = [
        f"{a:.2f},{b:.2f},{i % 2 if i % 4 else test_label},{'train' if i % 4 else 'test'}"
        for i, (a, b, _) in enumerate(X)
    ]
    (tmp_path / "site.csv").write_text("\n".join([f"{columns},label,split", *lines]) + "\n")
    by = Records(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 2, Normalisation((0.0,) * 2, (1.0,) * 2))
    given = {"client": 0, "data": tmp_path / "site.csv", "state": tmp_path / "state", "methods": ("fedavg",), **rules}
    run = spec(by, columns=("age", "systolic"), class_names=rules.get("class_names", ("0", "1")))
    (tmp_path / "run").mkdir(exist_ok=True)
    return SiteData(SitePolicy(unprotected=True, **given), run, tmp_path / "run")


def test_columns_and_classes_that_change_places_are_other_records(tmp_path: Path) -> None:
    """Numbers alone were compared: a second round was trained with a header whose names had changed places."""
    answering(tmp_path, "age,systolic").records(0)
    answering(tmp_path, "age,systolic").records(0)
    with pytest.raises(ValueError, match="the records have changed since the run's first question"):
        answering(tmp_path, "systolic,age").records(0)
    other = tmp_path / "other"
    other.mkdir()
    answering(other, "age,systolic", class_names=("no", "yes")).records(0)
    with pytest.raises(ValueError, match="the records have changed since the run's first question"):
        answering(other, "age,systolic", class_names=("yes", "no")).records(0)


@pytest.mark.parametrize("more", [[], ["0.5,0.5,other"]])
def test_another_record_s_class_relabels_nobody(more: list[str], tmp_path: Path) -> None:
    """Integers 1 and 2 were places among 1, 2 and other, until one record of the class other made them names."""
    names = ("1", "2", "other")
    (tmp_path / "site.csv").write_text("\n".join(["a,b,label", *(f"0.1,0.{i},{1 + i % 2}" for i in range(9)), *more]))
    by = Records(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 3, Normalisation((0.0,) * 2, (1.0,) * 2))
    policy = SitePolicy(client=0, data=tmp_path / "site.csv", state=tmp_path / "state", class_names=names)
    assert class_names(policy) == (names if more else names[:2])
    (tmp_path / "run").mkdir()
    train, _ = SiteData(policy, spec(by, columns=("a", "b"), class_names=names), tmp_path / "run").own
    assert train.labels.bincount(minlength=3).tolist() == [5, 4, len(more)]


@pytest.mark.parametrize("label", ["-1", "-2"])
def test_a_negative_class_of_a_test_record_is_refused(label: str, tmp_path: Path) -> None:
    """It counted from the end: -1 was judged as the last class."""
    site = answering(tmp_path, "age,systolic", label)
    with pytest.raises(ValueError, match=f"has the class {label}; classes are counted from 0"):
        site.records(0)


def test_classes_called_1_and_2_need_no_class_0(tmp_path: Path) -> None:
    labels = np.repeat([1, 2], 30)
    found = own(labelled(tmp_path, labels), spec(like(2), class_names=("1", "2")), tmp_path)
    assert found.labels.tolist() == [0] * 30 + [1] * 30
    rules: dict[str, Any] = {"client": 0, "state": tmp_path / "state", "methods": ("fedavg",), "unprotected": True}
    policy = SitePolicy(data=tmp_path / "site.npz", **rules)
    assert any('classes = ["1", "2"]' in words for words in check(policy))
    assert not any("classes" in words for words in check(SitePolicy(data=policy.data, classes=("1", "2"), **rules)))
    with pytest.raises(ValueError, match="the site has the class 2, but the policy names 2 classes, which are 0..1"):
        list(check(SitePolicy(data=policy.data, class_names=("a", "b"), **rules)))


def test_a_site_is_told_of_its_own_test_records(tmp_path: Path) -> None:
    answering(tmp_path, "age,systolic")
    rules: dict[str, Any] = {"client": 0, "state": tmp_path / "state", "methods": ("fedavg",), "unprotected": True}
    told = list(check(SitePolicy(data=tmp_path / "site.csv", min_records=40, **rules)))
    assert "of 60 records 15 are a test split of their own, and train nothing" in told


def test_a_site_takes_no_number_as_the_target(tmp_path: Path) -> None:
    """It would have trained on zeros."""
    run = spec(like(1), class_names=("days",), target=(0.0, 40.0))
    policy = SitePolicy(client=0, data=tmp_path, state=tmp_path, methods=("fedavg",), unprotected=True)
    with pytest.raises(schema.Refused, match="the run predicts a number, which no site takes"):
        SiteData(policy, run, tmp_path).check_schema()
