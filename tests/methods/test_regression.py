"""A target that is a number: pooled ridge in one upload, its noise, FedAvg, what is shown of it and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn

import fedstill
from fedstill import methods
from fedstill.base.seeds import Simulated, stream
from fedstill.cli import main
from fedstill.evaluation import Numbers
from fedstill.methods.afl import AFL
from fedstill.methods.parts.feature_sums import Total, add_up
from fedstill.methods.parts.moments import Sums
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.integer_sums import IntegerMoments
from fedstill.privacy.second_moments import SecondMoments, diagonal_places, upper
from fedstill.protocol import Released, Summation
from fedstill.report.rows import codes
from fedstill.runs import listing

SCHEMA = """
target = "days"
range = [0, 40]
outside = "clip"
site = "hospital"

[columns.age]
kind = "number"
range = [0, 100]

[columns.ward]
kind = "category"
values = ["a", "b"]
"""
DIMS, RADIUS, BIAS = 5, 2.0, 0.3
FACTS: dict[str, Any] = {"num_classes": 1, "dims": DIMS, "radius": RADIUS, "bias": BIAS, "share": 0.4}
TABLE: dict[str, Any] = {"public": "noise=500", "space": {"whiten": False, "quantile": 1.0}}


def noise(seed: int = 0) -> Simulated:
    return Simulated(stream(seed, "noise"))


def rows(n: int = 400) -> tuple[Tensor, Tensor]:
    """Features, of which some are clipped, and numbers in [-1, 1] that depend on them."""
    rng = stream(0, "rows")
    x = torch.randn(n, DIMS, generator=rng, dtype=torch.float64)
    line = x @ torch.linspace(-0.3, 0.4, DIMS, dtype=torch.float64)
    return x, (0.2 + line + 0.2 * torch.randn(n, generator=rng, dtype=torch.float64)).clamp(-1, 1)


def pooled(x: Tensor) -> np.ndarray[Any, Any]:
    """The rows r of all records, in plain code."""
    length = np.maximum(np.linalg.norm(x.numpy(), axis=1, keepdims=True), RADIUS)
    return np.hstack([x.numpy() * math.sqrt(1 - BIAS**2) / length, np.full((len(x), 1), BIAS)])


def splits(n: int) -> dict[str, list[Tensor]]:
    order = torch.randperm(n, generator=stream(0, "order"))
    return {"one": [order], "uneven": list(order.tensor_split([3, 4, 200])), "each alone": list(order.split(1))}


# --- the sums


@pytest.mark.parametrize("split", ["one", "uneven", "each alone"])
def test_the_head_is_that_of_ridge_regression_on_the_pooled_rows(split: str) -> None:
    x, t = rows()
    parts = [SecondMoments(**FACTS, noise_multiplier=0.0)([(x[p], t[p])], noise()) for p in splits(len(x))[split]]
    sums = Sums(second=Released(sum(p.second for p in parts)), first=Released(sum(p.first for p in parts)))
    method = AFL(ridge=0.7, epsilon=None, bias=BIAS)
    head = method.head(add_up(Summation(sums, range(len(parts))), method, 1e-5, torch.device("cpu")))

    def ridge(alpha: float) -> Any:  # of what the target differs from its mean, to which it is pulled
        coef = Ridge(alpha=alpha, fit_intercept=False, tol=1e-14).fit(pooled(x), (t - t.mean()).numpy()).coef_
        return coef + np.eye(DIMS + 1)[-1] * float(t.mean()) / BIAS

    expected, other = ridge(0.7), ridge(0.8)
    assert head.shape == (1, DIMS + 1)
    assert np.abs(head[0].numpy() - expected).max() <= 1e-9 * np.abs(expected).max()  # float64 sums in another order
    assert np.abs(head[0].numpy() - other).max() > 1e-6  # the ridge is not lost in the tolerance


def test_whole_numbers_add_up_to_the_same_bits_for_any_split() -> None:
    x, t = rows()
    mechanism = IntegerMoments(**FACTS, noise_multiplier=0.0, steps=256)
    totals = []
    for parts in splits(len(x)).values():
        each = [mechanism([(x[p], t[p])], noise()) for p in parts]
        totals.append((sum(p.second for p in each), sum(p.first for p in each)))
    assert all(torch.equal(a, totals[0][0]) and torch.equal(b, totals[0][1]) for a, b in totals)
    r, whole = torch.from_numpy(np.rint(pooled(x) * 256)), (t * 256).round()
    short = r.square().sum(1) <= 256**2  # the others are scaled down
    some = mechanism([(x[short], t[short])], noise())
    assert short.sum() > 200 and torch.equal(some.first[0], (whole[short, None] * r[short]).sum(0).long())
    assert torch.equal(some.second[0], (r[short].T @ r[short])[upper(r.shape[1])].long())


@pytest.mark.parametrize("epsilon", [None, 8.0])
@pytest.mark.parametrize("ridge", [1.0, 1e-6])
def test_rounding_costs_no_more_with_more_records_or_less_noise(epsilon: float | None, ridge: float) -> None:
    """Two codes of places make the products singular: an error of H that no row explains was unbounded (R2 -30)."""
    rng, n = stream(0, "table"), 40_000
    codes = [nn.functional.one_hot(torch.randint(0, k, (n,), generator=rng), k).double() for k in (4, 6)]
    numbers = torch.rand(n, 3, generator=rng, dtype=torch.float64) * 2 - 1
    x = torch.cat([*codes, numbers], 1)
    t = 0.1 * codes[0].argmax(1) - 0.05 * codes[1].argmax(1) + 0.3 * numbers[:, 0] - 0.4
    t = (t + 0.1 * torch.randn(n, generator=rng, dtype=torch.float64)).clamp(-1, 1)
    method = AFL(ridge=ridge, epsilon=epsilon, bias=0.5, share=0.5)
    facts = {"num_classes": 1, "dims": x.shape[1], "radius": 2.5, "bias": 0.5, "share": 0.5}
    scale, left = math.sqrt(0.75) / 2.5, []
    for kind in (SecondMoments, IntegerMoments):
        found = kind(**facts, noise_multiplier=release_noise(epsilon, 1e-5))([(x[:30_000], t[:30_000])], noise())  # type: ignore[arg-type]
        summed = Summation(Sums(second=Released(found.second), first=Released(found.first)), range(1))
        head = method.head(add_up(summed, method, 1e-5, torch.device("cpu")))[0]
        wrong = x[30_000:] @ head[:-1] * scale + 0.5 * head[-1] - t[30_000:]
        left.append(1 - float(wrong.square().mean() / t[30_000:].var(correction=0)))
    assert left[0] > 0.8
    assert left[1] == pytest.approx(left[0], abs=2e-3)


def vector(mechanism: SecondMoments, some: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The exact vector v = (D, sqrt(2) U, a H) of a mechanism, whose length the noise is for; H times L if whole."""
    found = mechanism([(x, t) for x, t in some], noise())
    second = found.second.double()[0] * math.sqrt(2)
    second[diagonal_places(DIMS + 1)] /= math.sqrt(2)
    weight = mechanism.weight_of_first if isinstance(mechanism, IntegerMoments) else mechanism.weight
    return torch.cat([second, found.first.double().flatten() * weight])


@pytest.mark.parametrize("whole", [False, True])
def test_no_record_moves_the_sums_by_more_than_the_sensitivity_and_one_by_nearly_as_much(whole: bool) -> None:
    kind = IntegerMoments if whole else SecondMoments
    mechanism = kind(**FACTS, noise_multiplier=0.0)
    x, t = rows(20)
    before, moved = vector(mechanism, [(x, t)]), []
    rng = stream(1, "records")
    for scale in (0.0, 0.1, 1.0, RADIUS, 1e6):
        for target in (-1e9, -1.0, -0.3, 0.0, 1.0, 7.0, math.inf, -math.inf, math.nan):
            record = torch.randn(1, DIMS, generator=rng, dtype=torch.float64)
            record *= scale / record.norm()
            after = vector(mechanism, [(x, t), (record, torch.tensor([target], dtype=torch.float64))])
            moved.append(float((after - before).norm()))
    assert max(moved) <= mechanism.sensitivity * (1 + 1e-9)
    assert max(moved) >= 0.98 * mechanism.sensitivity  # rounding toward zero takes less than two percent


def test_the_noise_of_the_numbers_sum_has_the_stated_deviation() -> None:
    x, t = rows(5)
    quiet, loud = (SecondMoments(**FACTS, noise_multiplier=m) for m in (0.0, 3.0))
    exact, draws = quiet([(x, t)], noise()).first, noise(3)
    found = torch.stack([loud([(x, t)], draws).first - exact for _ in range(600)]).flatten()
    stated = 3.0 * loud.sensitivity / loud.weight
    ratio = float(found.std() / stated)
    assert abs(float(found.mean())) < 4.5 * stated / math.sqrt(len(found))
    assert abs(ratio - 1) < 4.5 / math.sqrt(2 * len(found))  # 3,600 draws: 5 %
    assert not abs(1.5 * ratio - 1) < 4.5 / math.sqrt(2 * len(found))
    assert not abs(ratio / 1.5 - 1) < 4.5 / math.sqrt(2 * len(found))


def test_noise_counts_in_the_total() -> None:
    total = Total(torch.zeros(1, 21).double(), torch.ones(1, 6).double(), BIAS, 2.0, 1.0)
    assert AFL(noise_ridge=0.5).head(total).abs().max() < AFL(noise_ridge=0.0).head(total).abs().max()


# --- whole runs


def table(n: int = 240, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, ward = rng.uniform(0, 100, n).round(1), rng.choice(["a", "b"], n)
    days = 5 + 0.2 * age + 4 * (ward == "b") + rng.normal(0, 2, n)
    hospital = rng.choice(["north", "south", "west"], n, p=[0.7, 0.2, 0.1])
    return pd.DataFrame({"age": age, "ward": ward, "days": days, "hospital": hospital})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a schema, and a table with a test split of its own."""
    (tmp_path / "days.toml").write_text(SCHEMA)
    (tmp_path / "data").mkdir()
    table().to_csv(tmp_path / "data" / "train.csv", index=False)
    table(120, 1).to_csv(tmp_path / "data" / "test.csv", index=False)
    return tmp_path


def trained(folder: Path, name: str, out: str, **settings: Any) -> fedstill.RunRecord:
    facts = {"clients": 3, "partition": "by:hospital", "model": "linear", "workers": 0, "progress": False}
    given = {"data": str(folder / "data"), "schema_file": str(folder / "days.toml"), "out": folder / out}
    return fedstill.run(name, **{**facts, **given, **settings})  # type: ignore[arg-type]


def encoded(frame: pd.DataFrame) -> np.ndarray[Any, Any]:
    return np.stack([frame.age / 50 - 1, frame.ward == "a", frame.ward == "b"], 1).astype(float)


def test_one_upload_predicts_what_pooled_ridge_does_in_the_targets_unit(folder: Path) -> None:
    run = trained(folder, "afl", "run", epsilon=None, precision="double", ridge=1e-6, **TABLE)
    train, test = table(), table(120, 1)
    assert train.days.max() <= 40 and train.days.min() >= 0
    expected = Ridge(alpha=1e-9).fit(encoded(train), train.days).predict(encoded(test))
    found = run.load_model().predict(encoded(test).astype(np.float32))
    assert np.abs(found - expected).max() < 1e-3  # of days; the model computes in float32, and the ridge is tiny
    wrong = found - test.days.to_numpy()
    assert run["errors"]["rmse"] == pytest.approx(np.sqrt((wrong**2).mean()), rel=1e-5)
    assert run["errors"]["mae"] == pytest.approx(np.abs(wrong).mean(), rel=1e-5)
    assert run["errors"]["r2"] == pytest.approx(1 - (wrong**2).mean() / test.days.var(ddof=0), rel=1e-5)
    assert run.accuracy is None and run.confusion is None


def test_fedavg_comes_near_it_and_logs_the_error_of_each_round(folder: Path) -> None:
    ridge = trained(folder, "afl", "ridge", epsilon=None, **TABLE)
    run = trained(folder, "fedavg", "run", rounds=15, local={"lr": 0.1})
    errors = [line["rmse"] for line in run.metrics]
    assert len(errors) == 15 and errors[-1] < 0.7 * errors[0]
    assert errors[-1] < 1.15 * ridge["errors"]["rmse"]
    assert all(line["accuracy"] is None for line in run.metrics)


@pytest.mark.parametrize("steps", [None, 256])
def test_private_sums_have_their_guarantee_and_a_worse_fit(folder: Path, steps: int | None) -> None:
    run = trained(folder, "afl", "run", epsilon=2.0, noise="entropy", steps=steps, bias=0.5, **TABLE)
    assert run.guarantee.holds and run.guarantee.unit == "record"
    assert run.guarantee.epsilon is not None and 1.9 < run.guarantee.epsilon <= 2.0
    assert "times its number, of [-1, 1]" in run.guarantee.reason and "to one class" not in run.guarantee.reason
    silent = trained(folder, "afl", "silent", epsilon=None, bias=0.5, **TABLE)
    assert run["errors"]["rmse"] > silent["errors"]["rmse"]


class Mine(AFL):
    """A method of somebody's own, with a default of its own."""

    bias: float = 0.2


@pytest.mark.parametrize(
    ("method", "bias"),
    [("afl", 0.5), (AFL, 0.5), (AFL(), 0.5), (AFL(bias=0.1), 0.1), (Mine, 0.2), (Mine(bias=0.3), 0.3)],
)
def test_a_number_has_a_larger_constant_where_nobody_says_another(method: Any, bias: float, tmp_path: Path) -> None:
    (tmp_path / "days.toml").write_text(SCHEMA)
    job = fedstill.Job(fedstill.Experiment(schema_file=str(tmp_path / "days.toml")), method, "run")
    assert dict(job.method)["bias"] == bias
    assert dict(fedstill.Job(fedstill.Experiment(), "afl", "run").method)["bias"] == 0.1


def test_an_uncertain_count_pulls_to_the_middle() -> None:
    """Divided by a count that is noise, the sum would be an end of the range, which is added to every prediction."""

    def total(count: float, std: float) -> Total:
        second, first = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[0.0, 30.0]], dtype=torch.float64)
        second[0, -1] = count
        return Total(second, first, 0.5, std, std)

    assert total(60.0, 0.0).middle == pytest.approx(0.25)
    assert total(60.0, 14.9).middle == pytest.approx(0.25) and total(60.0, 15.1).middle == 0
    assert total(-60.0, 1.0).middle == 0 and total(0.0, 0.0).middle == 0
    assert total(5.0, 0.1).middle == 1  # the range is public


@pytest.mark.parametrize("method", ["afl", AFL, "deepafl"])
def test_a_mean_far_from_the_middle_of_the_range_needs_no_setting(folder: Path, method: Any) -> None:
    """Ridges pulled to the middle of the range, where small constants left them: near 5 of [0, 1000] became 200."""
    (folder / "days.toml").write_text(SCHEMA.replace("[0, 40]", "[0, 1000]"))
    for bias in ({}, {"bias": 0.1}):
        run = trained(folder, method, f"run{len(bias)}", epsilon=None, **bias, **TABLE)
        assert run.config["method"]["bias"] == bias.get("bias", 0.5)
        assert run["errors"]["r2"] > 0.3


def test_an_error_no_less_than_that_of_the_mean_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(folder, "afl", "run", epsilon=0.1, **TABLE)
    assert run["errors"]["r2"] < 0
    main(["report", str(run.folder), "--out", str(folder / "page")])
    printed, page = " ".join(capsys.readouterr().out.split()), (folder / "page" / "report.html").read_text()
    for words in ("afl: R2 is not above 0 by more than chance, so that one number", "the noise may be too large for"):
        assert words in printed and words in page
    good = trained(folder, "afl", "good", epsilon=None, **TABLE)
    main(["report", str(good.folder), "--out", str(folder / "other")])
    assert "R2 is not above" not in capsys.readouterr().out


def test_a_masked_sum_of_numbers_is_the_open_sum_of_whole_ones(folder: Path) -> None:
    both = [
        trained(folder, "afl", name, epsilon=None, steps=256, sums=sums, **TABLE)
        for name, sums in (("open", "open"), ("masked", "masked:least=3,records=1000"))
    ]
    assert both[0]["errors"] == both[1]["errors"]
    assert both[1]["sums"][0]["clients"] == 3 and not both[0]["sums"]


@pytest.mark.parametrize("name", [name for name in methods.TABLE if methods.find(name).numeric])
def test_every_method_for_numbers_trains_on_them(folder: Path, name: str) -> None:
    more: dict[str, Any] = TABLE if methods.find(name).needs_public else {}
    more = {**more, "rule": "median"} if name == "fedavg-robust" else more
    more = {**more, "epsilon": None} if methods.find(name).protects else more
    run = trained(folder, name, "run", **more)
    assert 0 < run["errors"]["rmse"] < 100


def test_each_site_and_the_intervals_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(folder, "fedavg", "run", rounds=2)
    assert run.numbers is not None
    by = run.numbers["by_value"]
    assert by["column"] == "hospital" and set(by["values"]) == {"north", "south", "west"}
    assert sum(entry["records"] for entry in by["values"].values()) == 120
    for entry in (run.numbers["all"], *by["values"].values()):
        value, low, high = entry["rmse"]
        assert low < value < high
    main(["report", str(run.folder), "--out", str(folder / "page")])
    page, printed = (folder / "page" / "report.html").read_text(), capsys.readouterr().out
    assert "RMSE" in printed and "accuracy, %" not in printed
    assert "RMSE on the test records of each hospital" in page and "root mean squared error of" in page
    assert "RMSE" in repr(run)


def test_evaluate_and_publish_know_the_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(folder, "fedavg", "run", rounds=2)
    found = fedstill.evaluate(run, table(120, 1))
    assert dict(zip(found.measures().measure, found.measures().value, strict=True)) == pytest.approx(run["errors"])
    out = folder / "predictions.csv"
    main(["evaluate", str(run.folder), str(folder / "data"), "--predictions", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["measures"]["rmse"]["value"] == pytest.approx(run["errors"]["rmse"])
    saved = pd.read_csv(out)
    assert saved.true.to_numpy() == pytest.approx(table(120, 1).days.to_numpy(), abs=1e-9)
    facts = fedstill.publish(run, folder / "published")
    card = (folder / "published" / "README.md").read_text()
    assert facts["target"] == "days" and facts["target_range"] == [0, 40]
    assert "tabular-regression" in card and "is days in its unit" in card and "RMSE on test records" in card
    program = torch.export.load(folder / "published" / "model.pt2").module()
    raw = codes(table(120, 1).to_dict("records"), facts["schema"])
    said = program(torch.from_numpy(raw))[:, 0].detach().numpy()
    assert said == pytest.approx(saved.predicted.to_numpy(), rel=1e-4)


def test_no_prediction_is_out_of_the_public_range(folder: Path) -> None:
    """Of a model that is mostly noise many would be, as days below 0."""
    undamped: dict[str, Any] = {"epsilon": 0.5, "ridge": 1e-3, "noise_ridge": 0.0}
    run, frame = trained(folder, "afl", "noisy", **undamped, **TABLE), table(120, 1)
    said = run.load_model().predict(frame)
    assert said.min() == 0 or said.max() == 40
    assert 0 <= said.min() and said.max() <= 40
    facts = fedstill.publish(run, folder / "published")
    program = torch.export.load(folder / "published" / "model.pt2").module()
    raw = torch.from_numpy(codes(frame.to_dict("records"), facts["schema"]))
    assert program(raw)[:, 0].detach().numpy() == pytest.approx(said, rel=1e-4, abs=1e-6)
    errors = said - frame.days.to_numpy()
    assert run["errors"]["rmse"] == pytest.approx(float(np.sqrt((errors**2).mean())))


# --- what is refused


@pytest.mark.parametrize("name", [name for name in methods.TABLE if not methods.find(name).numeric])
def test_methods_for_classes_refuse_a_number_before_any_record_is_read(folder: Path, name: str) -> None:
    (folder / "data" / "train.csv").write_text("no table")  # reading it would be another error
    kind = methods.find(name)
    more: dict[str, Any] = {"public": "noise=500"} if kind.needs_public else {}
    with pytest.raises(
        fedstill.InputError, match="is for classes, but the target of .* is a number; use one of fedavg"
    ):
        trained(folder, name, "run", **more)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"local_test": 0.2}, "--local-test is for classes"),
        ({"features": "scattering"}, "--features is for classes"),
        ({"num_classes": 2}, "--num-classes is for classes"),
        ({"class_names": ("a", "b")}, "--class-names is for classes"),
        ({"class_weights": "balanced"}, "--class-weights is for classes"),
        ({"measure": "auc"}, "measure is 'auc', but the target is a number; choose rmse, mae, r2"),
        ({"partition": "dirichlet:0.1"}, "--partition dirichlet:0.1 is for classes"),
    ],
)
def test_so_do_settings_for_classes(folder: Path, setting: dict[str, Any], flag: str) -> None:
    with pytest.raises(fedstill.InputError, match=flag):
        trained(folder, "fedavg", "run", **setting)


def test_so_do_attacks_and_thresholds(folder: Path) -> None:
    run = trained(folder, "fedavg", "run", rounds=1)
    with pytest.raises(fedstill.InputError, match="is a number, which an attack does not take"):
        fedstill.attack(run)
    with pytest.raises(fedstill.InputError, match="threshold are for two classes"):
        fedstill.evaluate(run, table(), threshold=0.5)
    with pytest.raises(fedstill.InputError, match="predicts a number, 'days', which has no classes; use predict"):
        run.load_model().predict_proba(encoded(table()).astype(np.float32))


def test_tries_of_a_number_choose_the_smallest_error(folder: Path) -> None:
    run = trained(folder, "afl", "tuned", epsilon=None, tune=True, ridge=1e4, **TABLE)
    assert run.tries is not None and run.tries["measure"] == "rmse"
    values = {one["settings"]["ridge"]: one["value"] for one in run.tries["tries"]}
    assert len(values) == 3 and values[run.tries["chosen"]["ridge"]] == min(values.values()) < values[1e4]
    assert run.config["method"]["ridge"] == run.tries["chosen"]["ridge"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"days": ["", *["3"] * 239]}, "column 'days' of .* has 1 gaps; drop the records without a target"),
        ({"days": ["soon", *["3"] * 239]}, "has 'soon', which is no number"),
        ({"days": ["3"] * 240}, "the target 'days' of .* has one value in all train records"),
    ],
)
def test_bad_targets_are_named(folder: Path, change: dict[str, Any], why: str) -> None:
    table().assign(**change).to_csv(folder / "data" / "train.csv", index=False)
    with pytest.raises(fedstill.InputError, match=why):
        trained(folder, "fedavg", "run")


def test_a_target_beyond_its_range_is_refused_unless_the_schema_clips_it(folder: Path) -> None:
    table().assign(days=np.r_[400.0, table().days[1:]]).to_csv(folder / "data" / "train.csv", index=False)
    run = trained(folder, "fedavg", "clips", rounds=1)
    assert any("1 of 240 values of column 'days'" in text for text in json_of(run.folder / "partition.json")["origin"])
    (folder / "days.toml").write_text(SCHEMA.replace('outside = "clip"\n', ""))
    with pytest.raises(fedstill.InputError, match="has 400, outside of \\[0.0, 40.0\\] \\(10 times the largest"):
        trained(folder, "fedavg", "refuses", rounds=1)


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def test_errors_are_resampled_by_person() -> None:
    rng = np.random.default_rng(0)
    shift, persons = rng.normal(0, 1, 30), np.repeat(np.arange(30), 20)
    true = rng.normal(0, 1, 600)
    alone = Numbers(true, true + shift[persons]).intervals(resamples=300)["rmse"]
    whole = Numbers(true, true + shift[persons], persons).intervals(resamples=300)["rmse"]
    assert alone is not None and whole is not None
    assert whole[1] - whole[0] > 2 * (alone[1] - alone[0])  # 30 independent errors, not 600


def test_tables_have_errors_and_tell_other_records_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of another range were equal in every column but the error, which some tables did not have."""
    (folder / "wider.toml").write_text(SCHEMA.replace("[0, 40]", "[0, 80]"))
    other = {"seed": 1, "schema_file": folder / "wider.toml"}
    runs = [trained(folder, "afl", str(len(more)), epsilon=None, **TABLE, **more) for more in ({}, other)]
    main(["report", *(str(run.folder) for run in runs), "--out", str(folder / "report")])
    rows = json.loads((folder / "report" / "table.json").read_text())["rows"]
    lines = pd.read_csv(folder / "report" / "runs.csv")
    assert len({row["data_set"] for row in rows}) == len({*lines["data_set"]}) == 2
    for name in ("rmse", "mae", "r2"):
        expected = [run["errors"][name] for run in runs]
        assert [row[name] for row in rows] == expected and lines[name].tolist() == pytest.approx(expected)
    assert listing.entry(runs[0].folder).errors == runs[0]["errors"]
    capsys.readouterr()
    main(["runs", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["errors"] == runs[0]["errors"]
    main(["runs", str(folder)])
    assert f"RMSE {runs[0]['errors']['rmse']:.4g}" in capsys.readouterr().out
