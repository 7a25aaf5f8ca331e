"""What a table of several runs must not hide: choices, versions, draws, copies, and the records of each number."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_pages import write_run

import fedstill
from fedstill.cli import main
from fedstill.report import export, spending, tables
from fedstill.report.groups import Row, group
from fedstill.report.record import read_run
from fedstill.runs.folder import RunFolder

SMALL: dict[str, Any] = {"data": "digits", "limit": 300, "model": "linear", "clients": 2, "workers": 0, "rounds": 1}
FLAGS = "--data digits --limit 300 --model linear --clients 2 --workers 0 --quiet --rounds 1".split()
COLLECT = Path(__file__).parents[2] / "reproduce" / "collect.py"


def rows(*places: Path) -> list[Row]:
    (task,) = group(read_run(place) for place in places)
    return task.rows


def changed(place: Path, file: str, **content: Any) -> Path:
    """A run with other content in one of its files, one level deep."""
    whole = json.loads((place / file).read_text())
    for key, value in content.items():
        whole[key] = {**whole.get(key, {}), **value} if isinstance(value, dict) else value
    (place / file).write_text(json.dumps(whole))
    return place


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sweep of two rates, whose best is run on the test set."""
    task = {key: value for key, value in SMALL.items() if key not in ("workers", "rounds")}
    plan = {**task, "methods": {"fedavg": {"rounds": 1, "try": {"local.lr": [0.01, 0.3]}}}}
    out = tmp_path_factory.mktemp("sweep")
    fedstill.sweep(plan, out=out / "sw", final=True, parallel=1, progress=False)
    yield out / "sw"


def test_a_run_whose_settings_were_chosen_is_no_seed_of_one_with_given_ones(swept: Path, tmp_path: Path) -> None:
    final = swept / "final" / "fedavg" / "seed-0"
    given = fedstill.run("fedavg", **SMALL, seed=1, local={"lr": 0.3}, out=tmp_path / "given", progress=False)
    chosen, plain = sorted(rows(final, given.folder), key=lambda row: "tuned" not in row.settings)
    assert chosen.settings["tuned"].startswith("2 tries (") and "local.lr" not in chosen.settings
    assert plain.settings["local.lr"] == 0.3 and len(chosen.runs) == len(plain.runs) == 1
    (said,) = [text for text in export.told([read_run(final)]) if "chosen" in text]
    assert "chosen by accuracy on validation records (10 % of the training records) in 2 tries: local.lr 0.3" in said
    fedstill.publish(final, tmp_path / "published")
    assert "in 2 tries" in (tmp_path / "published" / "README.md").read_text()


def test_tuned_seeds_are_one_row_whatever_each_has_chosen(tmp_path: Path) -> None:
    places = []
    for seed, rate in enumerate((0.03, 0.1)):
        place = write_run(tmp_path / f"{seed}", label="fedavg", method="fedavg", seed=seed)
        changed(place, "config.json", method={"local": {"lr": rate}})
        (place / "tries").mkdir()
        tries = [{"settings": {"local.lr": lr}, "value": 0.5} for lr in (0.03, 0.1)]
        content = {"given": {}, "measure": "accuracy", "records": "10 %", "tries": tries, "chosen": {"local.lr": rate}}
        (place / "tries" / "tries.json").write_text(json.dumps(content))
        places.append(place)
    (row,) = rows(*places)
    assert [run.summary["seed"] for run in row.runs] == [0, 1]


def test_tries_are_on_validation_records_wherever_they_are_shown(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["runs", str(swept)])
    listed = capsys.readouterr().out.splitlines()
    assert sum("(validation)" in line for line in listed) == 2
    assert not any("(validation)" in line for line in listed if "final/" in line)
    main(["report", str(swept / "fedavg"), "--out", str(tmp_path / "r")])
    words = capsys.readouterr().out
    assert "validation records are of the classes" in words and "test record" not in words
    words = [sys.executable, str(COLLECT), "x", str(swept), "--to", str(tmp_path / "c.json")]
    subprocess.run(words, check=True, capture_output=True)
    found = json.loads((tmp_path / "c.json").read_text())["runs"]
    assert sorted(run.get("judged_on", "") for run in found) == ["", "validation records", "validation records"]


def test_the_tries_of_a_run_are_no_runs_of_a_collection(tmp_path: Path) -> None:
    run = fedstill.run("fedavg", **SMALL, tune=True, out=tmp_path / "tuned", progress=False)
    assert len(list(run.folder.rglob("config.json"))) == 4
    subprocess.run([sys.executable, COLLECT, "x", tmp_path, "--to", tmp_path / "c.json"], check=True)
    assert [one["accuracy"] for one in json.loads((tmp_path / "c.json").read_text())["runs"]] == [run["accuracy"]]


def test_draws_of_real_noise_with_one_seed_all_count_and_a_copy_once(tmp_path: Path) -> None:
    places = []
    for i in range(2):
        place = write_run(tmp_path / f"{i}", label="afl", method="afl", seed=0, accuracy=0.5 + i / 10)
        changed(place, "config.json", experiment={"noise": "entropy"})
        files = {**RunFolder(place).digests(), "model.safetensors": f"{i}" * 64}
        places.append(changed(place, "summary.json", files=files))
    places.append(shutil.copytree(places[0], tmp_path / "copy"))
    (task,) = group(map(read_run, places))
    assert [len(row.runs) for row in task.rows] == [2] and task.rows[0].accuracy == pytest.approx(0.55)
    assert [run.folder.name for run in task.left_out] == ["copy"]


def test_a_run_that_is_left_out_is_named_and_one_named_twice_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = write_run(tmp_path / "first", label="fedavg", method="fedavg", accuracy=0.5)
    shutil.copytree(first, tmp_path / "copy")
    main(["report", "first", str(first), "copy", "--out", "r"])
    assert "1 run is not in the table, as another of the same label, settings and seed is: copy." in (
        " ".join(capsys.readouterr().out.split())
    )
    assert "and seed is: copy." in (tmp_path / "r" / "report.html").read_text()
    assert len(list(csv.DictReader((tmp_path / "r" / "runs.csv").open()))) == 2
    main(["report", "copy", "--out", "copy"])
    page = Path("copy", "report.html").read_bytes()
    for given in (["first"], ["first", "copy"]):
        with pytest.raises(SystemExit):
            main(["report", *given, "--out", "copy"])
    assert Path("copy", "report.html").read_bytes() == page
    main(["report", "first", str(first), "--out", "once"])
    assert len(list(csv.DictReader((tmp_path / "once" / "runs.csv").open()))) == 1


def test_two_methods_of_one_label_and_two_versions_are_told_apart(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name, label="x", method=name) for name in ("fedavg", "fednova"))
    names = {row.name for row in rows(one, other)}
    assert names == {"x (method name fedavg)", "x (method name fednova)"}
    places = [write_run(tmp_path / f"{seed}", label="x", method="fedavg", seed=seed) for seed in range(2)]
    later = [changed(place, "summary.json", version=f"1.0.{i}") for i, place in enumerate(places)]
    assert {row.name for row in rows(*later)} == {"x (version 1.0.0)", "x (version 1.0.1)"}


def test_tables_of_tasks_with_and_without_a_measure_are_written(tmp_path: Path) -> None:
    plain = fedstill.run("fedavg", **SMALL, out=tmp_path / "plain", progress=False)
    other = fedstill.run("fedavg", **{**SMALL, "clients": 3}, measure="f1", out=tmp_path / "f1", progress=False)
    for records in ([plain, other], [other, plain]):
        export.write_tables(records, tmp_path)
        read = list(csv.DictReader((tmp_path / "table.csv").open()))
        assert sorted(line["measure"] for line in read) == ["", "f1"]
    assert len(tables.rows([plain])) == 1 and "measure" not in tables.rows([plain])[0]


def test_an_old_table_beside_a_new_page_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write_run(tmp_path / "run", label="fedavg", method="fedavg")
    main(["report", str(place), "--out", str(tmp_path / "r"), "--markdown"])
    assert "stayed as before" not in capsys.readouterr().out
    main(["report", str(place), "--out", str(tmp_path / "r")])
    assert "table.md in" in (words := " ".join(capsys.readouterr().out.split())) and "stayed as before" in words


def test_a_run_without_its_configuration_is_damaged_and_not_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "half"):
        fedstill.run("fedavg", **SMALL, out=tmp_path / name, progress=False)
    (tmp_path / "half" / "config.json").unlink()
    main(["runs", str(tmp_path)])
    assert "half" in (listed := capsys.readouterr().out) and "damaged" in listed
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--out", str(tmp_path / "r")])
    assert "half is not a finished run (config.json is missing)" in " ".join(capsys.readouterr().err.split())


def test_frames_and_pages_take_one_run_or_folders(tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", label="fedavg", method="fedavg")
    record = read_run(place)
    for given in (record, place, str(place), [record], [place], (one for one in [place])):
        assert len(fedstill.to_pandas(given)) == 1
        assert fedstill.write_report(record, tmp_path / "page.html") is None
    run = fedstill.run("fedavg", **SMALL, out=tmp_path / "real", progress=False)
    assert fedstill.load_model(run).class_names == fedstill.load_model(run.folder).class_names
    for wrong in (None, [None], 3, [tmp_path / "none"]):
        with pytest.raises(fedstill.InputError, match=r"RunRecord|give the path|no folder|is not the folder"):
            fedstill.to_pandas(wrong)  # type: ignore[arg-type]
    with pytest.raises(fedstill.InputError, match=r"path is the folder .*; give a file in it"):
        fedstill.write_report(record, tmp_path)


def test_settings_that_differ_late_have_names_of_their_own(tmp_path: Path) -> None:
    """A rate of 0.1234567 and one of 0.1234568 were two lines of one name in figures."""
    places = [write_run(tmp_path / f"{i}", label="fedavg", method="fedavg") for i in range(3)]
    for place, rate in zip(places, (0.1234567, 0.1234568, 0.3), strict=True):
        changed(place, "config.json", method={"local": {"lr": rate}})
    (task,) = group(map(read_run, places))
    assert task.columns == ["local.lr"]
    assert {row.name for row in task.rows} == {
        f"fedavg (local.lr {rate})" for rate in ("0.1234567", "0.1234568", "0.3")
    }


def test_runs_that_were_tuned_otherwise_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    """Other tries, another measure or other validation records are another row, and none is left out as a copy."""
    task: dict[str, Any] = {**SMALL, "tune": True, "progress": False}
    runs = [
        fedstill.run("fedavg", **task, local={"lr": 0.0001}, seed=0, out=tmp_path / "a"),
        fedstill.run("fedavg", **task, local={"lr": 0.1}, seed=1, validation=0.5, measure="auc", out=tmp_path / "b"),
        fedstill.run("fedavg", **task, local={"lr": 0.1}, seed=0, out=tmp_path / "c"),
        fedstill.run("fedavg", **task, local={"lr": 0.1}, seed=1, out=tmp_path / "d"),
    ]
    (found,) = group(runs)
    assert sorted([run.folder.name for run in row.runs] for row in found.rows) == [["a"], ["b"], ["c", "d"]]
    assert not found.left_out
    words = {row.settings["tuned"].partition(" by ")[2] for row in found.rows}
    assert words == {"accuracy on 10 % of the training records", "auc on 50 % of the training records"}


def test_a_measure_that_a_seed_lacks_has_no_mean_and_ranks_no_row_first(tmp_path: Path) -> None:
    places = []
    for label, values in {"a": (None, 0.9, None), "b": (0.2, 0.3, 0.4)}.items():
        for seed, value in enumerate(values):
            place = write_run(tmp_path / f"{label}{seed}", label=label, method="fedavg", seed=seed)
            places.append(changed(place, "summary.json", measure={"name": "precision", "value": value}))
    records = [read_run(place) for place in places]
    (task,) = group(records)
    assert [row.label for row in task.rows] == ["b", "a"]
    assert [line["measured"] for line in tables.rows(records)] == [pytest.approx(0.3), None]
    place = tables.headings(task).index("precision")
    assert [line[place] for line in tables.cells(task)] == ["0.3 ± 0.1", "–"]
    words = "a: precision has no value with 2 of 3 seeds, so that no mean over seeds is shown, as the records or"
    assert any(one.startswith(words) for one in tables.remarks(task))
    assert not any("has no value" in one for one in export.told(records[3:]))


ONCE: dict[str, Any] = {**{k: v for k, v in SMALL.items() if k != "rounds"}, "noise": "entropy", "progress": False}


def test_one_draw_of_noise_is_one_seed_also_by_its_replies(tmp_path: Path) -> None:
    private: dict[str, Any] = {**ONCE, "public": "noise=100", "epsilon": 1.0}
    first = fedstill.run("afl", **private, extractor={"pretrain": "none"}, out=tmp_path / "first")
    again = fedstill.run("afl", replies=first, workers=0, out=tmp_path / "again", progress=False)
    other = fedstill.run("afl", **private, extractor={"pretrain": "none"}, out=tmp_path / "other")
    (task,) = group([first, again, other])
    assert [len(row.runs) for row in task.rows] == [2] and [one.folder for one in task.left_out] == [again.folder]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with real noise, and one that was ended in its third round."""

    class Ends(fedstill.Watcher):
        def logged(self, *_: Any, **__: Any) -> None:
            if (released := place / "c" / "journal" / "spent.jsonl").exists():
                if len(released.read_text().splitlines()) >= 4:
                    raise KeyboardInterrupt

    place = tmp_path_factory.mktemp("begun")
    for seed, name in enumerate("ab"):
        fedstill.run("dp-fedavg", **ONCE, rounds=1, seed=seed, out=place / name)
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("dp-fedavg", **ONCE, watcher=Ends(), rounds=10, seed=2, out=place / "c")
    return place


def test_what_an_interrupted_run_has_released_is_in_the_sum(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = [read_run(begun / name) for name in "ab"]
    of_two = sum(run.guarantee.epsilon or 0.0 for run in finished)
    for words in (["runs", str(begun)], ["runs", "compare", *(str(begun / name) for name in "abc")]):
        main(words)
        said = " ".join(capsys.readouterr().out.split())
        assert "Whoever sees all 3 runs of these records (1 unfinished, by the releases so far) has" in said
        total = float(said.partition("an epsilon of up to ")[2].split()[0])
        one = finished[0].guarantee.epsilon or 0.0
        assert of_two < total < of_two + one  # that of its ten rounds
    assert any("all 2 runs of these records has an epsilon" in one for one in spending.sums(finished))


def test_a_choice_among_private_tries_is_said_wherever_epsilon_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {key: value for key, value in ONCE.items() if key not in ("workers", "progress")}
    plan = {**task, "methods": {"dp-fedavg": {"rounds": 1, "try": {"local.lr": [0.01, 0.1]}}}}
    fedstill.sweep(plan, out=tmp_path / "sw", final=True, parallel=1, progress=False)
    final = tmp_path / "sw" / "final" / "dp-fedavg" / "seed-0"
    words = "The epsilon of dp-fedavg does not count that its settings are the best of 2 tries."
    main(["privacy", str(final)])
    assert words in " ".join(capsys.readouterr().out.split())
    assert words in spending.numbers(final)["remarks"]
    main(["report", str(final), "--out", str(tmp_path / "r"), "--json"])
    assert words in capsys.readouterr().out and words in (tmp_path / "r" / "report.html").read_text()
    fedstill.publish(final, tmp_path / "published")
    assert words in " ".join((tmp_path / "published" / "README.md").read_text().split())
