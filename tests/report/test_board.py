"""The board: its page is what its rows give, and a row is a run that its command repeats to the bit."""

import importlib
import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedstill.cli import flags, main
from fedstill.cli.output import line_of
from fedstill.experiment.config import Experiment

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "benchmarks" / "board"


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The modules of the board, as ``python benchmarks/board`` imports them."""
    monkeypatch.syspath_prepend(str(BOARD))
    for name in ("plan", "page", "work", "decided"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("board", BOARD / "__main__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job_of(board: ModuleType, row: dict[str, Any]) -> Any:
    if "number" in row:
        return board.Job("try", row["label"], board.plan.tuning(row["data"]), row["number"])
    return board.Job("run", row["label"], board.plan.Cell(row["data"], row["split"], row["clients"], row["seed"]))


def test_the_page_is_what_the_rows_give(board: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = importlib.import_module("page")
    monkeypatch.setattr(page, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    board.write_page()
    again = "run: python benchmarks/board page"
    docs, written = ROOT / "docs", tmp_path / "docs"
    assert (written / "board.md").read_text() == (docs / "board.md").read_text(), again
    pictures = {file.name: file.read_text() for file in (written / "images").iterdir()}
    assert pictures == {file.name: file.read_text() for file in (docs / "images").glob("board-*.svg")}, again


def lead_of(page: ModuleType, rows: list[dict[str, Any]], place: tuple[str, str, int]) -> str:
    """The words of a place for the first group."""
    questions = page.asked(rows)
    settled, *_ = page.decisions(questions)
    (own,) = [one for one in questions if (one.place, one.group) == (place, "no guarantee")]
    return str(page.lead(own, (own.place, own.group) in settled))


def test_two_processes_never_do_one_job(
    board: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job is begun anew in an empty folder, which must not be that of a process at work."""
    work = importlib.import_module("work")
    jobs, did = [job for job in board.plan.jobs() if job.label == "real" and job.kind == "run"][:7], list[Any]()
    monkeypatch.setattr(board, "missing", lambda: jobs)
    monkeypatch.setattr(work, "begin", lambda: None)
    monkeypatch.setattr(work, "do", lambda job, *_: did.append(job) or {})
    for part in (1, 0):
        board.run(tmp_path, part, 2, math.inf, ["real"])
    assert did == jobs[1::2] + jobs[::2]
    with work.alone(jobs[0], tmp_path):
        board.do_job(jobs[0], [], tmp_path)
    assert len(did) == 7 and capsys.readouterr().out.endswith("another process is at it\n")
    place = tmp_path / jobs[0].name
    place.mkdir(parents=True)
    (place / work.ROW).write_text("{}")
    board.do_job(jobs[0], [], tmp_path)
    assert len(did) == 7
    damaged = tmp_path / board.Job("try", "real", board.plan.tuning(jobs[1].cell.data), 0).name / work.ROW
    damaged.parent.mkdir(parents=True)
    for content in ("null", "{}", "{"):
        damaged.write_text(content)
        board.do_job(jobs[1], [], tmp_path)  # and the next job of the next row is begun after it
        assert len(did) == 7 and "left out: " in capsys.readouterr().out


def test_a_lead_is_decided_when_every_method_has_run_with_every_seed(board: ModuleType) -> None:
    page, labels, place = importlib.import_module("page"), list(board.plan.methods()), ("mnist", "iid", 10)
    task = dict(zip(("data", "split", "clients"), place, strict=True))
    rows = [
        {"label": label, "accuracy": 0.5 + 0.1 * (label == "fedgm") + 0.01 * seed, "seed": seed, **task}
        for label in labels
        for seed in board.plan.SEEDS
    ]
    assert lead_of(page, rows, place).startswith("**fedgm 61.0, 10.0 before ")
    failed = [{**row, **({"failed": "why", "accuracy": None} if row["label"] == "dense" else {})} for row in rows]
    assert lead_of(page, failed, place).startswith("**fedgm")
    one_short = [row for row in rows if (row["label"], row["seed"]) != ("dense", 2)]
    assert lead_of(page, one_short, place).endswith(" (seeds 0, 1)")
    few = [row for row in rows if row["label"] in ("fedgm", "real")]
    assert lead_of(page, few, place) == f"fedgm 61.0, 10.0 before real (2 of {len(labels)} methods)"
    near = [row if row["label"] != "real" else {**row, "accuracy": 0.64 - 0.02 * row["seed"]} for row in rows]
    assert lead_of(page, near, place) == "real 62.0, 1.0 before fedgm; 1 not apart", "all have run, but it is no lead"


def test_a_model_that_predicts_one_class_is_no_result(board: ModuleType) -> None:
    page, place = importlib.import_module("page"), ("mnist", "iid", 10)
    task = dict(zip(("data", "split", "clients"), place, strict=True))
    rows = [
        {"label": label, "accuracy": value, "seed": seed, **task}
        for label, values in {"fens": (0.1135, 0.95, 0.96), "real": (0.8, 0.81, 0.82), "dense": (0.7, 0.7, 0.7)}.items()
        for seed, value in enumerate(values)
    ]
    assert page.is_constant(rows[0]) and not page.is_constant(rows[1])
    assert not page.is_constant(rows[0] | {"predicted_classes": 2}), "a run that says it is believed"
    assert page.is_constant(rows[1] | {"predicted_classes": 1})
    assert page.accuracy(rows, place, "fens") == "95.5 ± 0.7 (one class in 1 of 3)"
    assert page.accuracy(rows[:1], place, "fens") == "one class"
    assert lead_of(page, rows, place).startswith("real 81.0, 11.0 before dense")
    every = page.with_names(board.rows(), board.read(board.TRIES))
    found = {row["label"] for row in every if page.is_constant(row)}
    assert found == {"fens", "ldp-fedavg-eps1"}, "24 rows; of others, an accuracy that is a class's share by chance"


def test_a_variant_has_a_name_of_its_own(board: ModuleType) -> None:
    """So that no row bears the name of a paper whose method it is not."""
    page, plan = importlib.import_module("page"), board.plan
    marks = {"--matching.formation 2": "-4", "--choice representatives": "-representatives", "probabilities": "-p"}
    for row in page.with_names(board.rows(), board.read(board.TRIES)):
        for flag, suffix in marks.items():
            if flag in row["command"]:
                assert row["name"].startswith(row["label"] + suffix), row["command"]
        if not any(flag in row["command"] for flag in marks):
            assert row["name"] == row["label"]
    assert all(len(row.get("names", [0, 0, 0])) == plan.TRIES for row in plan.methods().values())


def test_shares_of_steps_are_those_of_the_commands(board: ModuleType) -> None:
    plan = board.plan
    for row in board.rows():
        steps = plan.methods()[row["label"]].get("steps")
        settings = dict(zip(words := shlex.split(row["command"]), words[1:], strict=False))
        if row["label"] in ("dense", "fed-dafl", "co-boosting"):
            taken = int(settings["--epochs"]) * int(settings["--generation.steps"])
        elif row["label"] == "fed-adi":
            taken = int(settings["--inversion.steps"])
        elif steps:
            taken = int(settings["--matching.nets"])
        else:
            continue
        assert steps[str(row["clients"])] == taken, row["command"]
    assert plan.share_of_steps("dense", 10) == "1.7" and plan.share_of_steps("real", 10) == "–"


def test_methods_are_compared_on_the_seeds_that_all_of_them_have(board: ModuleType) -> None:
    """A method that has run with the easy seed alone does not lead, and no figure names a seed that few have."""
    page, place = importlib.import_module("page"), ("mnist", "classes:1", 10)
    task = dict(zip(("data", "split", "clients"), place, strict=True)) | {"client_seconds": 1.0}
    found = {("fedgm", 0): 0.9, ("fedgm", 1): 0.5, ("real", 0): 0.8, ("dense", 0): 0.1, ("dense", 1): 0.2}
    rows = [
        {"label": label, "seed": seed, "accuracy": value, "up": 10.0, **task} for (label, seed), value in found.items()
    ]
    assert lead_of(page, rows, place).startswith("fedgm 90.0, 10.0 before real; 2 not apart (seed 0; 3 of ")
    drawn = page.picture(rows, place)
    assert drawn.words.endswith("records, seed 0") and [(p.name, p.seeds) for p in drawn.points][0] == ("fedgm", 1)


def test_bytes_that_depend_on_the_split_are_given_as_least_and_most(board: ModuleType) -> None:
    page = importlib.import_module("page")
    rows = [{"split": split, "up": up} for split, up in (("classes:1", 8070), ("iid", 78000), ("iid", 82000))]
    assert page.span(rows, "up") == "8.07 kB to 80.0 kB"
    assert page.span(rows[:1], "up") == "8.07 kB"


def test_every_row_has_a_digest_or_a_reason_and_a_commit(board: ModuleType) -> None:
    every = [*board.rows(), *board.read(board.TRIES)]
    assert every
    for row in every:
        assert ("digest" in row) != ("failed" in row), row
        assert (row["accuracy"] is None) == ("failed" in row), row
        assert re.fullmatch("[0-9a-f]{40}", row["commit"]), "the source had changes"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert "digest" not in row or re.fullmatch("[0-9a-f]{16}", row["digest"])


def test_every_row_has_the_command_of_the_plan_with_its_best_try(board: ModuleType) -> None:
    """So rows of other settings, or of a try that is not the best, are noticed."""
    tries = board.read(board.TRIES)
    commands = {}
    for row in [*board.rows(), *tries]:
        job = job_of(board, row)
        chosen = 0 if job.kind == "try" else board.plan.best(row["label"], row["data"], tries)
        assert row["command"] == line_of(board.plan.words(job, chosen, "runs/board")), row
        commands.setdefault(row["label"], row["command"])
    for command in commands.values():  # one of each row: parsing takes a moment
        words = shlex.split(command)
        parsed = flags.parse_run(words[2], words[3:], Experiment(), flags.method_of(words[2], []))
        assert parsed.experiment.limit in (board.plan.RECORDS, board.plan.RECORDS * 5 // 4)


def test_every_row_has_all_its_tries_before_its_first_run(board: ModuleType) -> None:
    tries = {(row["label"], row["data"], row["number"]) for row in board.read(board.TRIES)}
    for row in board.rows():
        assert {number for label, data, number in tries if (label, data) == (row["label"], row["data"])} == {0, 1, 2}


def test_the_plan_has_every_cell_once_and_tries_before_runs(board: ModuleType) -> None:
    plan = board.plan
    jobs = plan.jobs()
    assert len(jobs) == len(set(jobs))
    labels = list(plan.methods())
    runs = [job for job in jobs if job.kind == "run"]
    sizes = {label: len(row.get("clients", plan.CLIENTS)) for label, row in plan.methods().items()}
    more = sum(sizes[label] for label in plan.content()["more seeds"]["rows"]) * 3 * len(plan.MORE)
    assert len(runs) == sum(sizes.values()) * 3 * 4 * 3 + more and len({job.name for job in runs}) == len(runs)
    assert sum(job.kind == "try" for job in jobs) == plan.TRIES * len(labels) * 3
    place = {job: i for i, job in enumerate(jobs)}
    for job in runs:
        assert all(place[plan.Job("try", job.label, plan.tuning(job.cell.data), i)] < place[job] for i in range(3))
    first = [job for job in jobs if job.kind == "run"][: 3 * len(labels)]
    assert {(job.cell.split, job.cell.clients, job.cell.seed) for job in first} == {("classes:1", 10, 0)}


def test_a_row_with_more_or_fewer_tries_is_refused(
    board: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = json.loads(board.plan.METHODS.read_text())
    content["rows"]["fedavg"]["tries"].append("--local.lr 1")
    (tmp_path / "methods.json").write_text(json.dumps(content))
    monkeypatch.setattr(board.plan, "METHODS", tmp_path / "methods.json")
    with pytest.raises(ValueError, match="fedavg has 4 tries"):
        board.plan.jobs()


def refused(board: ModuleType, capsys: pytest.CaptureFixture[str], sentence: str) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        board.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and sentence in said and said.count("\n") == 1


NO_ROWS = [
    (["typo", "nofile.py:Nobody", "", "", "", ""], "cannot be loaded"),
    (["typo", "fedavg", "{net} --ronds 2", "", "", ""], "did you mean --rounds"),
    (["typo", "fedavg", "{net}", "--local.lr 0.1", "--local.lr x", ""], "local.lr is"),
    (["typo", "fedavg", "{net} 'open", "", "", ""], "No closing quotation"),
    (["typo", "fedrep", "{net}", "", "", ""], "give clients test records with --local-test 0.2"),
    (["a/b", "fedavg", "{net}", "", "", ""], "'a/b' is not a label"),
]


@pytest.mark.parametrize(("words", "sentence"), NO_ROWS)
def test_a_row_that_cannot_run_is_refused_before_it_is_written(
    words: list[str], sentence: str, board: ModuleType, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    content = json.dumps({"shared": {"net": "--model convnet:width=4,depth=2"}, "rows": {}})
    (tmp_path / "methods.json").write_text(content)
    monkeypatch.setattr(board.plan, "METHODS", tmp_path / "methods.json")
    monkeypatch.setattr(sys, "argv", ["board", "add", *words])
    refused(board, capsys, sentence)
    assert (tmp_path / "methods.json").read_text() == content


def test_a_row_is_removed_with_its_results(
    board: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (BOARD / "methods.json", BOARD / "results"):
        (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / place.name)
    monkeypatch.setattr(board.plan, "METHODS", tmp_path / "methods.json")
    monkeypatch.setattr(board, "RESULTS", tmp_path / "results")
    others = [row for row in board.rows() if row["label"] != "dense"]
    monkeypatch.setattr(sys, "argv", ["board", "remove", "dense"])
    board.main()
    assert "dense" not in board.plan.methods() and board.rows() == others
    assert "results of dense removed; write the page again" in capsys.readouterr().out
    refused(board, capsys, "has no row dense; its rows are")


@pytest.mark.slow
def test_a_row_is_made_resumed_and_repeated_to_the_bit(
    board: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`add` makes tries, runs and an attack; a second start does only what is missing; the command gives the digest."""
    plan, work = board.plan, importlib.import_module("work")
    content = {"shared": {"net": "--model convnet:width=4,depth=2"}, "rows": {}}
    (tmp_path / "methods.json").write_text(json.dumps(content))
    monkeypatch.setattr(plan, "METHODS", tmp_path / "methods.json")
    monkeypatch.setattr(board, "RESULTS", tmp_path / "results")
    for name, value in {
        "DATA": ("digits",),
        "CLIENTS": (10,),
        "SEEDS": (0,),
        "SPLITS": ("iid",),
        "RECORDS": 400,
    }.items():
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(plan, "cells", lambda: iter([[plan.Cell("digits", "iid", 10, 0)], [], []]))
    monkeypatch.setattr(work, "begin", lambda: None)
    monkeypatch.chdir(tmp_path)
    tries = [f"--local.lr {lr}" for lr in (0.05, 1e-6, 1e30)]  # the last cannot work
    elsewhere = tmp_path / "elsewhere"
    begin = ["board", "--runs", str(elsewhere)]
    words = [*begin, "add", "once", "fedavg", "{net} --rounds 1 --local.epochs 2 --local.batch-size 8", *tries]
    monkeypatch.setattr(sys, "argv", words)
    board.main()
    refused(board, capsys, "has a row once already; choose another label")
    assert board.take(elsewhere) == 4
    (row,) = [json.loads(line) for line in (tmp_path / "results" / "digits.jsonl").read_text().splitlines()]
    assert row["digest"] and row["attack"]["members"] > 10 and not board.missing()
    kept = {entry["number"]: entry for entry in board.read(board.TRIES)}
    assert row["command"].count("--local.lr 0.05") and kept[2]["failed"] and kept[2]["accuracy"] is None

    place = elsewhere / job_of(board, row).name
    capsys.readouterr()
    board.take(elsewhere)
    assert not capsys.readouterr().out
    board.write("digits.jsonl", [row | {"digest": "another processor's", "accuracy": 12.5}])
    board.take(elsewhere)
    assert f"another model than before: {job_of(board, row).name}" in capsys.readouterr().out
    assert row in board.read("digits.jsonl")
    assert row["command"].endswith(f" --out runs/board/{job_of(board, row).name}")
    assert str(tmp_path) not in json.dumps([row, *kept.values()])  # nobody else has this folder
    (place / work.ROW).unlink()  # as a run that was killed before its end
    (place / work.ATTACKED).unlink()
    monkeypatch.setattr(board, "RESULTS", tmp_path / "none")
    before = {file: file.stat().st_mtime_ns for file in (elsewhere / "tries").rglob("*.json")}
    monkeypatch.setattr(sys, "argv", [*begin, "run"])
    board.main()
    assert json.loads((place / work.ROW).read_text())["digest"] == row["digest"]
    assert {file: file.stat().st_mtime_ns for file in before} == before

    monkeypatch.setattr(board, "RESULTS", tmp_path / "results")  # the run is taken, its attack is not
    file = tmp_path / "results" / "digits.jsonl"
    file.write_text(json.dumps({name: value for name, value in row.items() if not name.startswith("attack")}) + "\n")
    shutil.rmtree(place)  # and the folder is on another machine
    board.main()
    assert json.loads((place / work.ROW).read_text())["digest"] == row["digest"]
    assert json.loads((place / work.ATTACKED).read_text())["attack"] == row["attack"]

    summary = (place / "summary.json").read_bytes()
    (place / "summary.json").write_bytes(summary[:100])
    monkeypatch.setattr(sys, "argv", [*begin, "take"])
    shutil.rmtree(tmp_path / "results")
    refused(board, capsys, f"3 rows were taken; left out, because they are damaged: {place.relative_to(elsewhere)} (")
    assert len(board.read(board.TRIES)) == 3  # one damaged run of thousands costs no other its row
    (place / "summary.json").write_bytes(summary)
    monkeypatch.setattr(sys, "argv", ["board", "--runs", str(tmp_path / "nowhere"), "take"])
    refused(board, capsys, "there is no folder")

    command = shlex.split(row["command"])
    main([*command[1:-1], "again", "--quiet"])
    assert work.weights_digest(Path("again"))[:16] == row["digest"]
