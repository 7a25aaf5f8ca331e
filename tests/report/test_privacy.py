"""``fedstill privacy``: the ledger of a run as it was written, and plans whose numbers are those of the mechanisms."""

import json
import math
from pathlib import Path

import pytest

from fedstill.cli import main
from fedstill.privacy import accounting
from fedstill.privacy.events import Event, Gaussian, Pure, Unbounded
from fedstill.privacy.ledger import Entry
from fedstill.report.plan import Plan, reference
from fedstill.report.privacy import cost_words

QUICK = ["--data", "digits", "--clients", "3", "--model", "convnet:width=8,depth=2", "--workers", "0", "--limit", "300"]
HEADS = ["--public", "noise=80", "--extractor.pretrain", "none", "--space.dims", "8"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(words)
    return " ".join(capsys.readouterr().out.split())


def test_the_ledger_of_a_private_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    told(capsys, "run", "fedauxfdp", *QUICK, *HEADS, "--distillation.epochs", "1", "--epsilon", "2", "--out", out)
    text = told(capsys, "privacy", out)
    assert "fedauxfdp, seed 0: eps 2.0" in text.replace("eps 2.01", "eps 2.0")
    assert "each of 3" in text
    assert "privacy loss distributions" in text
    assert "sqrt" in text or "sensitivity" in text
    assert "in total, per record of one client: epsilon 2.0" in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["guarantee"]
    assert summary["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert summary["simulated"] is True
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal" / "spent.jsonl").read_text().splitlines()]
    assert [len(line["spent"]) for line in lines] == [2, 2, 2]
    assert not (tmp_path / "run" / "clients").exists()


def test_a_run_without_releases_says_why_there_is_no_guarantee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    told(capsys, "run", "fedavg", *QUICK, "--rounds", "1", "--out", out)
    text = told(capsys, "privacy", out)
    assert "fedavg, seed 0: none" in text
    assert "field 'weights' of step 'update'" in text
    assert "No client released anything" in text


def test_published_heads_print_why_they_guarantee_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    told(capsys, "run", "fedavg-p", *QUICK, *HEADS, "--privacy", "published", "--out", out)
    text = told(capsys, "privacy", out)
    assert "none" in text
    assert "maximum norm" in text
    assert "in total, per record of one client: epsilon unbounded" in text


def test_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["privacy", str(tmp_path / "nothing")])
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()


def test_a_plan_shows_the_noise_that_a_run_would_add(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = told(capsys, "privacy", "plan", "--epsilon", "1", "--delta", "1e-5", "--records", "2500", "--classes", "10")
    assert "3.731 x the sensitivity" in text
    assert "23.2 % stay" in text
    for names in ("dp-fl, adap-dp-fl, fedkd, fedkadp", "fedgm-records, fedrd-records", "fedauxfdp", "fedgm-labels"):
        assert names in text  # asked of the methods themselves
    assert "without noise" in text


@pytest.mark.parametrize(
    ("epsilon", "sampling", "steps"),
    [(1.0, 0.05, 200), pytest.param(8.0, 1.0, 1, marks=pytest.mark.slow), (0.3, 0.01, 1000)],
)
def test_planned_noise_of_dp_sgd_fits_and_hardly_less_does(epsilon: float, sampling: float, steps: int) -> None:
    noise = accounting.dp_sgd_noise(epsilon, 1e-5, sampling, steps)

    def cost(multiplier: float) -> float:
        event = Gaussian(noise_multiplier=multiplier, sampling=sampling, count=steps)
        return accounting.epsilon([event], 1e-5, "record")

    assert cost(noise) <= epsilon < cost(noise / 1.02)


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("--epsilon", "0", "greater than 0"),
        ("--delta", "1", "less than 1"),
        ("--classes", "1", "greater than or equal to 2"),
    ],
)
def test_impossible_plans(flag: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["privacy", "plan", flag, value])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert flag in error
    assert limit in error


def test_more_noise_costs_more_accuracy_and_more_clients_win_it_back() -> None:
    few = Plan(records=500, clients=2, dims=16)
    clean, noisy = reference(few, 3.7)
    _, noisier = reference(few, 37.0)
    assert clean > noisy > noisier
    many, quiet = reference(few.model_copy(update={"clients": 200}), 3.7)
    assert many - quiet < clean - noisy


def test_costs_in_words() -> None:
    def words(event: Event, adaptive: bool = False) -> str:
        entry = Entry(
            exchange=0, step="s", index=0, mechanism="M", unit="record", event=event, theorem="", adaptive=adaptive
        )
        return cost_words(entry)

    assert words(Pure(epsilon=0.5)) == "epsilon 0.5"
    assert words(Unbounded(reason="x")) == "no bound"
    sampled = Gaussian(noise_multiplier=math.pi, sampling=0.01, count=100)
    assert words(sampled, True) == "noise 3.142 sensitivities, 100 samples of 0.01, adaptive"


def test_like_releases_are_one_line_of_a_table_that_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = str(tmp_path / "run")
    steps = "--rounds 4 --participation 1 --local.steps 2 --local.supposed-records 90".split()
    main(["run", "dp-fl", *QUICK, *steps, "--model", "kadp-mnist", "--out", out])
    capsys.readouterr()
    main(["privacy", out])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if "DPSGD  " in line]
    assert line.split()[:5] == ["each", "of", "3", "update", "DPSGD"]
    assert " 4 " in line
