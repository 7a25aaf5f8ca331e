import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from users import OTHER, ROOT, as_user

from fedstill import Experiment, FedAvg, Job, run
from fedstill.cli import main
from fedstill.runs import listing
from fedstill.runs.folder import RunFolder, runs_below

CONFIG = {"experiment": {"data": "mnist", "seed": 3}, "method": {"name": "fedgm"}, "label": "mine"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``runs`` with a finished run and an interrupted one in a comparison, and somebody's file."""
    monkeypatch.chdir(tmp_path)
    task = Experiment(data="digits", clients=2, limit=100, model="convnet:width=8,depth=2", workers=0)
    for name in ("a", "c/fedavg/seed-0"):
        run(Job(task, FedAvg(rounds=1), Path("runs") / name))
    begun = RunFolder(Path("runs/c/mine/seed-3"))
    begun.path.mkdir(parents=True)
    begun.write_config(CONFIG)
    begun.append_metrics({"round": 1, "accuracy": 0.25})
    world = RunFolder(Path("runs/a/attack/client-00000/world-000"))
    world.path.mkdir(parents=True)
    world.write_config(CONFIG)
    for name in listing.COMPARISON:
        Path("runs/c", name).touch()
    return Path("runs")


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    main(["runs", *words, "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return found


def test_runs_are_listed_with_their_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = listed(capsys)
    assert [entry["folder"] for entry in (first, second, third)] == [
        "runs/a",
        "runs/c/fedavg/seed-0",
        "runs/c/mine/seed-3",
    ]
    summary = json.loads((folder / "a" / "summary.json").read_text())
    assert (first["method"], first["data"], first["seed"], first["state"]) == ("fedavg", "digits", 0, "finished")
    assert first["accuracy"] == summary["accuracy"] and first["finished"] == summary["finished"]
    assert first["guarantee"] == summary["guarantee"] and not first["guarantee"]["holds"]
    assert third["finished"] is None and third["last_change"]
    assert (third["label"], third["method"], third["data"], third["seed"]) == ("mine", "fedgm", "mnist", 3)
    assert (third["accuracy"], third["guarantee"], third["state"]) == (0.25, None, "interrupted")
    with RunFolder(folder / "c/mine/seed-3").locked():
        assert [entry["state"] for entry in listed(capsys, "runs/c")] == ["finished", "running"]
    (folder / "a" / "config.json").write_text("{")
    assert listed(capsys)[0]["state"] == "damaged"
    main(["runs"])
    text = capsys.readouterr().out
    for words in ("c/mine/seed-3", "interrupted", "damaged", "25.0", "mnist"):
        assert words in text
    (folder / "empty").mkdir()
    main(["runs", "runs/empty"])
    assert "runs/empty has no run" in capsys.readouterr().out


def test_a_look_at_a_run_does_not_keep_it_from_starting(folder: Path) -> None:
    with RunFolder(folder / "c/mine/seed-3").locked():
        pass
    assert not listing.is_locked(folder / "c/mine/seed-3") and not listing.is_locked(folder / "nowhere")


def test_runs_are_removed_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["runs", *words])
        assert stop.value.code == 2
        return capsys.readouterr().err

    (folder / "notes").mkdir()
    assert "runs/notes has no run" in refused("remove", "runs/notes", "--yes")
    assert "there is no folder runs/nowhere" in refused("remove", "runs/a", "runs/nowhere", "--yes")
    assert "add --yes" in refused("remove", "runs/a")  # nobody can be asked
    assert "remove needs the folder" in refused("remove", "--yes")
    assert "there is no flag --force" in refused("remove", "runs/a", "--force")
    assert "there is no flag --all" in refused("--all")
    assert "'runs' is an unexpected argument" in refused("runs", "runs")
    with RunFolder(folder / "c/mine/seed-3").locked():
        assert "another process is writing runs/c/mine/seed-3" in refused("remove", "runs/a", "runs/c", "--yes")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, left in (("n", 3), ("", 3), ("y", 2)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        main(["runs", "remove", "runs/a"])
        assert len(runs_below(folder)) == left
    assert not (folder / "a").exists()
    (folder / "c" / "thesis.tex").touch()
    main(["runs", "remove", "runs/c", "--yes"])
    assert [f.name for f in (folder / "c").iterdir()] == ["thesis.tex"]
    assert "2 runs removed" in capsys.readouterr().out


def test_a_run_inside_a_run_is_listed_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "a", folder / "a" / "again")
    assert [entry["folder"] for entry in listed(capsys)][:2] == ["runs/a", "runs/a/again"]
    main(["runs", "remove", "runs/a", "--yes"])
    assert "2 runs removed" in capsys.readouterr().out and not (folder / "a").exists()


def test_a_comparison_goes_with_its_tables(folder: Path) -> None:
    main(["runs", "remove", "runs/c", "runs/c/mine/seed-3", "--yes"])
    assert not (folder / "c").exists() and (folder / "a" / "summary.json").exists()


def test_a_folder_of_runs_is_no_run_and_the_sentence_names_some(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"runs/c holds 2 runs; name one of them, as runs/c/fedavg/seed-0"):
        RunFolder(folder / "c").check_finished()


def test_runs_are_tagged_and_found_by_their_tag(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["runs", "tag", "base", "runs/a", "runs/c"])
    main(["runs", "tag", "paper-1.0", "runs/a"])
    main(["runs", "untag", "base", "runs/c/mine/seed-3"])
    assert capsys.readouterr().out.splitlines()[-1] == "runs/c/mine/seed-3: no tag"
    assert not (folder / "c/mine/seed-3/tags.json").exists()
    assert [entry["tags"] for entry in listed(capsys)] == [["base", "paper-1.0"], ["base"], []]
    assert [entry["folder"] for entry in listed(capsys, "--tag", "paper-1.0")] == ["runs/a"]
    main(["runs", "--tag", "nobody"])
    assert "runs has no run with the tag nobody" in capsys.readouterr().out
    task = Experiment(data="digits", clients=2, limit=100, model="convnet:width=8,depth=2", workers=0)
    run(Job(task, FedAvg(rounds=1), folder / "a"))
    assert listed(capsys)[0]["tags"] == ["base", "paper-1.0"]  # a finished run stays as it is
    for words, sentence in (
        (["tag", "base"], "tag needs a tag and a run"),
        (["tag", "a/b", "runs/a"], "the tag is 'a/b'; use 1 to 40 letters"),
        (["tag", "x", "runs/a/images"], "runs/a/images has no run"),
        (["tag", "x", "runs/a", "--force"], "there is no flag --force; this command takes none"),
        (["--tag"], "--tag needs a value (fedstill runs --help)"),
        (["compare", "runs/a"], "compare needs two runs or more"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["runs", *words])
        assert stop.value.code == 2 and sentence in capsys.readouterr().err
    (folder / "a" / "tags.json").write_text('{"a": 1}')
    assert (listed(capsys, "--tag", "base")[0]["state"], listed(capsys)[0]["tags"]) == (
        "finished",
        ["?"],
    )  # as it may be
    with pytest.raises(SystemExit) as stop:
        main(["runs", "untag", "base", "runs/a"])
    assert stop.value.code and "delete it, and tag the run again" in capsys.readouterr().err


def test_runs_are_compared_by_what_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Experiment(data="digits", clients=2, limit=120, model="convnet:width=8,depth=2", workers=0)
    run(Job(task, FedAvg(rounds=2), folder / "b"))
    capsys.readouterr()
    main(["runs", "compare", "runs/a", "runs/b", "--json"])
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first["guarantee"]["holds"] is False and (first["label"], first["method"]) == ("fedavg", "fedavg")
    assert first["settings"] == {"limit": 100, "method.rounds": 1}
    assert second["settings"] == {"limit": 120, "method.rounds": 2}
    assert second["bytes_up_per_client"] == pytest.approx(2 * first["bytes_up_per_client"], rel=0.01)
    main(["runs", "compare", "runs/a", "runs/b"])
    text = capsys.readouterr().out
    assert "method.rounds" in text and "accuracy" in text and "runs/b" in text and "seed " not in text


def test_facts_that_are_no_settings_are_compared_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuned settings and another version may be all that explains a difference."""
    second = shutil.copytree(folder / "a", folder / "b")
    place = RunFolder(second)
    tries = {"settings": {"local.lr": 0.1}, "value": 0.5, "failure": None}
    content = {"given": {}, "measure": "accuracy", "records": "10 %", "chosen": {"local.lr": 0.1}}
    place.tries.parent.mkdir()
    place.tries.write_text(json.dumps({**content, "tries": [tries, tries]}))
    summary = json.loads(place.summary.read_text())
    errors = {"rmse": 2.5, "mae": 2.0, "r2": 0.5}
    place.summary.write_text(json.dumps({**summary, "version": "0.9", "errors": errors, "accuracy": None}))
    capsys.readouterr()
    main(["runs", "compare", "runs/a", "runs/b", "--json"])
    first, other = json.loads(capsys.readouterr().out)["runs"]
    assert first["settings"]["tuned"] is None and other["settings"]["tuned"].startswith("2 tries (")
    assert other["settings"]["version"] == "0.9" and other["errors"]["rmse"] == 2.5 and first["errors"] is None
    main(["runs", "compare", "runs/a", "runs/b"])
    text = capsys.readouterr().out
    assert "2 tries" in text and "RMSE" in text and "2.5" in text and "accuracy" in text


def test_links_to_runs_are_followed_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "linked"
    place.mkdir()
    (place / "of-others").symlink_to(folder.resolve() / "c")
    (place / "again").symlink_to(folder.resolve() / "c" / "fedavg")
    (place / "above").symlink_to(tmp_path)
    (folder / "c" / "back").symlink_to(place)
    shutil.copytree(folder / "a", place / "own")
    (place / "same").symlink_to("own")
    names = [str(run.relative_to(place)) for run in runs_below(place)]
    assert names[-1] == "own" and len(names) == 3  # two of the comparison, by either link
    capsys.readouterr()
    main(["runs", "remove", "linked", "--yes"])
    assert "1 run removed" in capsys.readouterr().out and not (place / "own").exists()
    assert len(runs_below(folder)) == 3


@ROOT
def test_a_folder_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    for place in (folder, *folder.rglob("*")):
        place.chmod(0o755)
    tmp_path.chmod(0o755)
    (folder / "c").chmod(0o700)

    def listing_of_another() -> str:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fedstill").addHandler(handler)
        return f"{len(runs_below(Path('runs')))} run. {' '.join(said)}"

    shown = as_user(OTHER, listing_of_another)
    assert "1 run. the folder runs/c can't be read (Permission denied); runs in it are not listed" in shown


def test_the_list_needs_no_torch(folder: Path) -> None:
    code = "import sys; from fedstill.cli import main; main(['runs', '--json']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_folders_of_other_programs_are_no_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of transformers and published ones have a ``config.json`` too."""
    (folder / "others" / "project" / "journal").mkdir(parents=True)
    for name, text in (("models/bert", '{"model_type": "bert"}'), ("project", '{"a": 1}'), ("text", "no JSON")):
        place = folder / "others" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(text)
        (place / "thesis.tex").touch()
    assert [entry["state"] for entry in listed(capsys)][3:] == ["damaged"]  # the text may have been a run's
    with pytest.raises(SystemExit) as ended:
        main(["runs", "remove", "runs/others", "--yes"])
    assert ended.value.code == 2 and "runs/others has no run" in capsys.readouterr().err
    main(["runs", "remove", "runs", "--yes"])
    assert "3 runs removed" in capsys.readouterr().out
    assert len(list(Path("runs/others").rglob("thesis.tex"))) == 3


def test_a_run_that_is_damaged_can_be_removed(folder: Path) -> None:
    Path("runs/a/config.json").write_text("{")
    main(["runs", "remove", "runs/a", "--yes"])
    assert not Path("runs/a").exists()


def test_a_run_that_somebody_begins_to_write_stays(folder: Path) -> None:
    """Between the question and the answer, another process may have begun."""
    assert listing.removable(Path("runs/a")) == [Path("runs/a")]
    with RunFolder(Path("runs/a")).locked():
        program = (
            "from pathlib import Path; from fedstill.runs import listing; listing.remove(Path('runs/a'), Path('runs'))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "another process is writing runs/a" in done.stderr and Path("runs/a/summary.json").exists()
    listing.remove(Path("runs/a"), Path("runs"))
    assert not Path("runs/a").exists()


def test_a_link_is_not_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to(Path("runs/a").absolute())
    with pytest.raises(SystemExit):
        main(["runs", "remove", "link", "--yes"])
    assert "link is a link to" in capsys.readouterr().err
    assert Path("runs/a/summary.json").exists() and Path("link").is_symlink()


@pytest.mark.parametrize(("inside", "named"), [("runs/a", "."), ("runs/a/attack", ".."), ("runs", ".")])
def test_the_working_folder_is_not_removed(
    inside: str, named: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {*Path.cwd().rglob("*")}
    root = Path.cwd()
    monkeypatch.chdir(inside)
    with pytest.raises(SystemExit) as ended:
        main(["runs", "remove", named, "--yes"])
    assert ended.value.code == 2 and f"{named} is the folder that you are in, or above it" in capsys.readouterr().err
    assert {*root.rglob("*")} == there


def test_all_files_of_a_sweep_and_a_report_go_with_the_last_run(folder: Path) -> None:
    for name in ("sweep.csv", "final.json", "pareto-bytes.svg", "pareto-epsilon2.svg", "rounds.pdf", "classes-2.svg"):
        (folder / "c" / name).touch()
    (folder / "c" / "notes.svg").touch()
    main(["runs", "remove", "runs/c", "--yes"])
    assert (folder / "c" / "notes.svg").exists()
    (folder / "c" / "notes.svg").unlink()
    run(Job(Experiment(data="digits", clients=2, limit=60, workers=0, model="linear"), "real", "runs/c/real"))
    main(["runs", "remove", "runs/c", "--yes"])
    assert not (folder / "c").exists()


def test_names_are_no_markup_of_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/a").rename("runs/lr[a]")
    hostile = RunFolder(Path("runs/b[/c]"))
    hostile.path.mkdir(parents=True)
    hostile.write_config({**CONFIG, "label": "x\x1b[2Jy [/bold]"})
    for words in (["runs"], ["runs", "compare", "runs/lr[a]", "runs/c/fedavg/seed-0"]):
        main(words)
        shown = capsys.readouterr().out
        assert "lr[a]" in shown and "\x1b[2J" not in shown
    words = ["--data", "digits", "--clients", "2", "--limit", "60", "--workers", "0", "--ipc", "1"]
    words += ["--model", "convnet:width=4,depth=1", "--training.epochs", "1", "--quiet", "--out", "runs/[/d]"]
    main(["run", "real", *words])
    assert "report: runs/[/d]/report.html" in capsys.readouterr().out


def test_no_tag_at_all_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unset variable gave the run a tag that made it damaged."""
    with pytest.raises(SystemExit):
        main(["runs", "tag", "", str(folder / "a")])
    assert "word 1 is empty, as of a variable that is not set" in capsys.readouterr().err
    assert listed(capsys)[0]["state"] == "finished"


def test_a_configuration_nested_without_end_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a" / "config.json").write_text("[" * 100_000)
    assert listed(capsys)[0]["state"] == "damaged"
