"""Runs with a private scale: both releases in the guarantee, one scale everywhere, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedstill
from fedstill.cli import main
from fedstill.engines import column_scale
from fedstill.engines.client import Site
from fedstill.engines.column_scale import Measured, PrivateScale, read_header
from fedstill.engines.server import ServerFederation
from fedstill.experiment import reuse
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import share_out
from fedstill.privacy.accounting import gaussian_epsilon, release_noise
from fedstill.privacy.integer_sums import IntegerSum
from fedstill.privacy.ledger import total_epsilon
from fedstill.privacy.sum_ranges import check_columns
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import Journal
from fedstill.schema import Refused

SCHEMA = """
target = "died"
classes = ["no", "yes"]
[columns.age]
kind = "number"
range = [0, 110]
[columns.smoker]
kind = "boolean"
[columns.crp]
kind = "number"
range = [0, 400]
missing = 5
[columns.seen]
kind = "date"
range = ["2020-01-01", "2029-12-31"]
"""
TASK: dict[str, Any] = {"clients": 10, "model": "linear", "public": "noise=300", "workers": 0}
NUMBERS = (0, 2, 4)
"""Places of age, crp and seen in a vector, beside smoker and the gaps of crp."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 records whose numbers lie in a small part of their ranges, and tell the class."""
    place, rng, n = tmp_path_factory.mktemp("table"), np.random.default_rng(0), 2000
    y = rng.integers(0, 2, n)
    frame = pd.DataFrame(
        {
            "age": (70 + 3 * y + 3 * rng.normal(size=n)).clip(0, 110).round(1),
            "smoker": rng.integers(0, 2, n),
            "crp": (30 - 8 * y + 8 * rng.normal(size=n)).clip(0, 400).round(1),
            "seen": [f"2024-{1 + m:02d}-15" for m in rng.integers(0, 12, n)],
            "died": np.where(y, "yes", "no"),
        }
    )
    frame.to_csv(place / "t.csv", index=False)
    frame.drop(columns="seen").to_parquet(place / "numbers.parquet", index=False)
    (place / "schema.toml").write_text(SCHEMA)
    return place


def facts(table: Path, **more: Any) -> dict[str, Any]:
    return {"data": str(table / "t.csv"), "schema_file": str(table / "schema.toml"), "scale": "private:2"} | TASK | more


def go(table: Path, out: Path, method: str = "afl", **more: Any) -> fedstill.RunRecord:
    return fedstill.run(method, out=out, **facts(table, **more))


@pytest.mark.slow
def test_flower_gives_the_same_scale_and_model(table: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    facts: dict[str, Any] = {"epsilon": 2.0, "sums": "masked", "clients": 4}
    here = go(table, tmp_path / "here", **facts)
    there = go(table, tmp_path / "there", **facts, engine="flower", workers=None)
    assert (here.folder / "scale.json").read_text() == (there.folder / "scale.json").read_text()
    one, other = (fedstill.load_model(run.folder).network.state_dict() for run in (here, there))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert here["bytes_up"] == there["bytes_up"] and here.guarantee == there.guarantee


@pytest.mark.parametrize("sums", ["open", "masked"])
def test_the_guarantee_is_that_of_both_releases_and_new_rows_get_the_same_scale(
    table: Path, tmp_path: Path, sums: str
) -> None:
    out = tmp_path / "run"
    flags = ["--data", f"{table}/t.csv", "--schema-file", f"{table}/schema.toml", "--clients", "10"]
    flags += ["--model", "linear", "--public", "noise=300", "--workers", "0", "--sums", sums, "--epsilon", "1"]
    main(["run", "afl", *flags, "--scale", "private:2", "--out", str(out)])
    summary, scale = (json.loads((out / name).read_text()) for name in ("summary.json", "scale.json"))
    found = summary["guarantee"]
    multiplier = (release_noise(1.0, 1e-5) ** -2 + release_noise(2.0, 1e-5) ** -2) ** -0.5
    assert found["holds"] and found["epsilon"] == pytest.approx(gaussian_epsilon(multiplier, 1e-5), rel=1e-6)
    assert 2 < found["epsilon"] < 3 and "ColumnSums: " in found["reason"]
    spent = Journal(RunFolder(out).journal).releases()
    assert {client: [entry.step for entry in each] for client, each in spent.items()} == dict.fromkeys(
        range(10), ["measure_scale", "sum_up"]
    )
    assert (found["adders"], len(summary["sums"])) == ((9, 2) if sums == "masked" else (None, 0))
    assert scale["clear"] and sum(scale["records"]) == pytest.approx(1600, abs=200)
    assert summary["bytes_down_per_client"] > 300  # both requests, the second with the scale
    # the mean and deviation of the training records, as far as noise tells, in the model's own file
    model = fedstill.load_model(out)
    raw = pd.read_csv(table / "t.csv")
    age = raw["age"].to_numpy() / 55 - 1
    near = 0.03 if sums == "masked" else 0.1
    assert model.normalisation.mean[0] == pytest.approx(age.mean(), abs=near)
    assert [model.normalisation.mean[i] for i in (1, 3)] == [0, 0] and model.normalisation.std[1] == 1
    assert all(0 < model.normalisation.std[i] < 0.6 for i in NUMBERS)
    if sums == "masked":
        assert model.normalisation.std[0] == pytest.approx(age.std(), rel=0.4)
        assert summary["accuracy"] > 0.7
    test = share_out(Experiment(**facts(table)), None).test
    right = np.array(model.class_names)[test.labels.numpy()] == model.predict(test.images)
    assert right.mean() == pytest.approx(summary["accuracy"], abs=1e-9)


def test_clients_the_server_and_a_reader_of_the_model_scale_alike(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of a client's records, of public noise and of test records, at every request after the first."""
    seen: dict[str, Any] = {}
    honest = Site._client

    def noted(self: Any, client: int, exchange: int, step: str, *others: Any) -> Any:
        actor = honest(self, client, exchange, step, *others)
        if client == 3:
            seen[step] = actor.train.normalisation, actor.public.normalisation, actor.public.inputs()[:3]
        return actor

    monkeypatch.setattr(Site, "_client", noted)
    record = go(table, tmp_path / "run", "fedavg", rounds=2, local={"epochs": 1}, local_test=0.2)
    first, later = seen["measure_scale"], seen["update"]
    model = fedstill.load_model(record.folder)
    assert seen["judge"][:2] == later[:2] == (model.normalisation, model.normalisation) != first[:2]
    assert set(first[0].std) == {1.0}
    assert torch.allclose(later[2], first[2], atol=1e-4)  # noise is drawn at the scale's size
    assert not record.guarantee.holds and "unprotected" in record.guarantee.reason


@pytest.mark.parametrize("sums", ["open", "masked:least=7"])
@pytest.mark.parametrize("place", [(RunFolder, "write_scale"), (ServerFederation, "last")])
def test_a_killed_run_releases_nothing_twice_and_keeps_its_scale(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sums: str, place: tuple[Any, str]
) -> None:
    """Real noise, of which a second reply would tell more, and replies that are lost."""
    more = {"sums": sums, "epsilon": 1.0, "noise": "entropy", "min_clients": 7, "drop": 0.1, "seed": 2}

    def killed(*asked: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as ending:
        ending.setattr(*place, killed)
        with pytest.raises(KeyboardInterrupt):
            go(table, tmp_path / "run", **more)
    folder, totals = RunFolder(tmp_path / "run"), []
    honest = check_columns
    monkeypatch.setattr(column_scale, "check_columns", lambda *facts: (totals.append(facts[1]), honest(*facts))[1])
    before = folder.scale.read_bytes() if folder.scale.exists() else None
    record = go(table, tmp_path / "run", **more)
    assert len(totals) == (before is None) and before in (None, folder.scale.read_bytes())
    spent = Journal(folder.journal).releases()
    assert {len(each) for each in spent.values()} == {2} or record["refused"]
    ledgers = [file.read_text().count("measure_scale") for file in folder.clients.rglob("ledger.jsonl")]
    assert all(count <= 1 for count in ledgers)
    multiplier = (release_noise(1.0, 1e-5) ** -2 + release_noise(2.0, 1e-5) ** -2) ** -0.5
    each = [total_epsilon(entries, 1e-5, None) for entries in spent.values()]
    assert max(each) == pytest.approx(gaussian_epsilon(multiplier, 1e-5), rel=1e-6)


def test_a_hostile_client_s_columns_stop_the_run_before_a_scale_is_used(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = IntegerSum.integers

    def hostile(self: Any, exact: Any, scale: float, source: Any) -> Any:
        found = honest(self, exact, scale, source)
        found.view(-1)[0] += 2**34
        return found

    monkeypatch.setattr(IntegerSum, "integers", hostile)
    with pytest.raises(ValueError, match="no records give"):
        go(table, tmp_path / "run", sums="masked", epsilon=1.0)
    assert not RunFolder(tmp_path / "run").scale.exists()


def test_noise_that_hides_the_number_of_records_leaves_the_range(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = go(table, tmp_path / "run", epsilon=1.0, scale="private:0.01", limit=200)
    assert "hides how many records there are" in caplog.text
    assert set(fedstill.load_model(record.folder).normalisation.std) == {1.0}
    assert not json.loads((record.folder / "scale.json").read_text())["clear"]


def test_a_budget_covers_the_scale_too(table: Path, tmp_path: Path) -> None:
    with pytest.raises(fedstill.TooFewReplies, match="budget"):
        go(table, tmp_path / "run", epsilon=1.0, budget=2.2)


def test_a_stated_range_does_in_place_of_a_schema(table: Path, tmp_path: Path) -> None:
    """Columns within --mean plus and minus --std; a scale within it is the composition of both."""
    stated = {"mean": (55.0, 0.5, 200.0), "std": (55.0, 0.5, 200.0), "class_names": ("no", "yes"), "epsilon": 4.0}
    more = {"data": f"{table}/numbers.parquet", "schema_file": None, "label_column": "died"}
    record = go(table, tmp_path / "run", scale="private:200", **more, **stated)
    found, raw = fedstill.load_model(record.folder).normalisation, pd.read_parquet(table / "numbers.parquet")
    assert found.mean == pytest.approx(raw[["age", "smoker", "crp"]].mean().to_list(), rel=0.05)
    assert found.std[:2] == pytest.approx(raw[["age", "smoker"]].std().to_list(), rel=0.2)
    assert record.guarantee.holds and len(json.loads((record.folder / "scale.json").read_text())["mean"]) == 3
    for again in (reuse.read_simulated, lambda run, out: reuse.check_open(run, reuse.read_job(run, run, ""))):
        with pytest.raises(ValueError, match="measured (its|a) scale"):
            again(record.folder, "")


def test_what_has_no_private_scale_is_refused_in_a_sentence(table: Path, tmp_path: Path) -> None:
    out, unscaled = tmp_path / "run", {"data": f"{table}/numbers.parquet", "schema_file": None, "label_column": "died"}
    for method, more, words in (
        ("afl", {"scale": "public:1"}, "it must be private:EPSILON"),
        ("afl", {"scale": "private:0"}, "it must be private:EPSILON"),
        ("afl", {"data": "digits", "schema_file": None, "model": "convnet"}, "pixels have a public range"),
        ("afl", unscaled, "no public range"),
        ("dp-fedavg", {"epsilon": 1.0}, "protects whole clients"),
        ("fedavg", {"sums": "masked"}, "the server sees the field"),
    ):
        with pytest.raises(ValueError, match=words):
            go(table, out, method, **more)
    scale = PrivateScale(epsilon=1.0, columns=(0, 2))
    assert read_header({"scale": [[0.5, -1], [1, 0.1]]}, scale) == Measured((0.5, -1.0), (1.0, 0.1))
    assert read_header({"step": "sum_up"}, scale) is None
    for wrong in ([[0.5], [1]], [[0.5, 2], [1, 1]], [[0.5, 0], [1, 0]], [[0, 0], [1, math.nan]], "x", [[0, 0]]):
        with pytest.raises(Refused, match="scale"):
            read_header({"scale": wrong}, scale)
    with pytest.raises(Refused, match="measures none"):
        read_header({"scale": [[0], [1]]}, None)
