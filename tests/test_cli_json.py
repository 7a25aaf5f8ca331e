"""``--json`` and ``--quiet``: what commands print for programs, and for nobody."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from report_pages import write_run

from fedstill import read_run
from fedstill.cli import main
from fedstill.privacy.guarantee import Guarantee
from fedstill.report import export
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import Refusal
from fedstill.runs.pieces import Summary
from fedstill.sites.server import submit

QUICK = ["--data", "digits", "--model", "convnet:width=8,depth=2", "--workers", "0", "--limit", "300"]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON on standard output, all of it."""

    def call(*words: str) -> Any:
        capsys.readouterr()
        main([*words, "--json"])
        return json.loads(capsys.readouterr().out)

    return call


@pytest.mark.slow
def test_json_of_runs_their_comparison_and_report(said: Any, tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "c")
    summary = said("run", "fedavg", *QUICK, "--rounds", "1", "--out", run)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written.pop("format") == 1  # of the file
    assert summary == written | {"folder": run, "report": f"{run}/report.html", "remarks": summary["remarks"]}
    assert all(isinstance(sentence, str) for sentence in summary["remarks"])
    both = said(
        "compare", "fedavg", "real", *QUICK, "--fedavg.rounds", "1", "--real.training.epochs", "1", "--out", out
    )
    assert {"rows": both["rows"], "remarks": both["remarks"]} == json.loads((tmp_path / "c" / "table.json").read_text())
    assert {row["method"] for row in both["rows"]} == {"fedavg", "real"}
    again = said("report", out, "--out", str(tmp_path / "again"))
    assert again["rows"] == both["rows"]
    assert Path(again["report"]).exists()
    releases = said("privacy", run)
    assert releases["releases"] == releases["clients"] == [] and releases["guarantee"]["holds"] is False


@pytest.mark.slow
def test_json_of_tables(said: Any, tmp_path: Path) -> None:
    assert {"name": "digits", "source": "scikit-learn"} in said("data", "list")["data_sets"]
    shown = said("data", "show", "digits", "--partition", "classes:2", "--out", str(tmp_path / "page.html"))
    assert [len(row) for row in shown["counts"]] == [10] * shown["clients"]
    assert sum(map(sum, shown["counts"])) == shown["records"] == 1438
    assert (tmp_path / "page.html").exists()
    assert (shown["shape"], shown["test_records"], shown["columns"]) == ([1, 8, 8], 359, {})


def test_json_of_releases_has_numbers(said: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    words = ["--data", "digits", "--clients", "2", "--limit", "200", "--model", "convnet:width=8,depth=2"]
    words += ["--workers", "0", "--public", "noise=40", "--extractor.pretrain", "none", "--space.dims", "8", "--quiet"]
    main(["run", "fedavg-p", *words, "--out", run])
    found = said("privacy", run)
    assert found["guarantee"]["epsilon"] == pytest.approx(1.0, abs=1e-3) and found["guarantee"]["unit"] == "record"
    assert [(c["client"], c["unit"], c["delta"]) for c in found["clients"]] == [
        (0, "record", 1e-5),
        (1, "record", 1e-5),
    ]
    assert max(c["epsilon"] for c in found["clients"]) == found["guarantee"]["epsilon"]
    assert {type(r["client"]) for r in found["releases"]} == {int} and len(found["releases"]) >= 2
    assert all(isinstance(r["event"], dict) and r["seconds"] >= 0 for r in found["releases"])


@pytest.mark.slow
def test_json_of_an_attack(said: Any, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    main(["run", "fedavg", *QUICK, "--rounds", "1", "--clients", "2", "--quiet", "--out", run])
    found = said("attack", run, "uploads", "--inversion.steps", "1", "--judge.epochs", "1")
    assert found == json.loads((tmp_path / "run" / "attack" / "uploads.json").read_text()) | {
        "numbers": f"{run}/attack/uploads.json"
    }
    assert [line["client"] for line in found["labels"]] == [0, 1]


def test_quiet_prints_the_result_and_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", *QUICK, "--rounds", "1", "--out", str(tmp_path / "run")]
    main(words)
    assert "fedavg, seed 0: accuracy" in capsys.readouterr().out
    (tmp_path / "run" / "summary.json").unlink()
    main([*words, "--quiet"])
    quiet = capsys.readouterr()
    assert "seed 0: accuracy" not in quiet.out
    assert "report: " in quiet.out and "fedavg" in quiet.out
    assert quiet.err == ""


def keys(document: Any) -> set[str]:
    """The keys of all objects in a document."""
    if isinstance(document, list):
        return {key for item in document for key in keys(item)}
    inner = document.values() if isinstance(document, dict) else ()
    return {*(document if isinstance(document, dict) else ())} | {key for item in inner for key in keys(item)}


def test_every_document_is_an_object_with_words_for_keys(said: Any, tmp_path: Path) -> None:
    """An object has room for more keys in later versions, which an array has not."""
    out = str(tmp_path / "c")
    words = [*QUICK, "--clients", "2", "--each.rounds", "1", "--out", out]
    (estimate, other) = said("compare", "once=fedavg", "fedprox", *words, "--dry-run", "--quiet")["estimates"]
    assert (estimate["label"], estimate["method"], estimate["seeds"]) == ("once", "fedavg", 1)
    assert other["method"] == "fedprox" and other["guarantee"]["holds"] is False
    both = said("compare", "once=fedavg", "fedprox", *words, "--quiet")
    documents = {
        "compare": both,
        "table.json": json.loads((tmp_path / "c" / "table.json").read_text()),
        "report": said("report", out, "--out", str(tmp_path / "again"), "--pareto"),
        "runs": said("runs", out),
        "runs compare": said("runs", "compare", out),
        "watch": said("watch", out),
        "privacy": said("privacy", f"{out}/once/seed-0"),
    }
    for name, key in (("compare", "rows"), ("table.json", "rows"), ("runs", "runs"), ("runs compare", "runs"),
                      ("watch", "runs"), ("report", "pareto")):  # fmt: skip
        found = {line["label"]: line["method"] for line in documents[name][key]}
        assert found == {"once": "fedavg", "fedprox": "fedprox"}, name
        if key != "pareto":
            assert all(
                line["guarantee"]["holds"] is False and "reason" in line["guarantee"] for line in documents[name][key]
            )
    assert documents["privacy"]["method"] == "fedavg"
    documents |= {"methods": said("methods"), "data list": said("data", "list")}
    assert documents["methods"]["methods"] and documents["data list"]["data_sets"]
    for name, document in documents.items():
        wrong = {key for key in keys(document) if not re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*", key)}
        assert isinstance(document, dict) and not wrong, (name, wrong)


def test_whole_numbers_stay_whole_in_every_output(said: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said("run", "fedavg", *QUICK, "--clients", "2", "--rounds", "2", "--quiet", "--out", str(run))
    for found in (json.loads((run / "summary.json").read_text()), said("run", "fedavg", *QUICK, "--clients", "2",
                  "--rounds", "2", "--quiet", "--out", str(run)), read_run(run).metrics[-1]):  # fmt: skip
        assert {type(found[name]) for name in ("bytes_up", "bytes_down")} == {int}
    assert type(export.runs([read_run(run)])[0]["bytes_up"]) is int


def test_every_key_of_a_summary_is_on_the_page_of_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    main(
        [
            "run",
            "fedavg",
            *QUICK,
            "--clients",
            "2",
            "--rounds",
            "1",
            "--local-test",
            "0.2",
            "--quiet",
            "--out",
            str(run),
        ]
    )
    summary, line = json.loads((run / "summary.json").read_text()), read_run(run).metrics[0]
    every = {*summary, *Summary.model_fields, *line} - {"round"}
    every |= {f.name for kind in (Guarantee, Refusal) for f in fields(kind)}
    page = (Path(__file__).parents[1] / "docs" / "runs.md").read_text()
    named = set(re.findall(r"`(\w+)`", page.partition("## Keys of JSON")[2].partition("\n## ")[0]))
    assert {"num_parameters", "accuracy_of_clients"} <= every and every - named == set()
    files = set(re.findall(r"`([\w.]+/?)", page.partition("| file | content |")[2].partition("**Units**")[0]))
    assert {vars(RunFolder(run))[name].name for name in vars(RunFolder(run)) if name != "path"} <= {
        name.rstrip("/") for name in files
    }


@pytest.mark.parametrize("words", [["audit", "--help"], ["audit"], ["report", "--help"], ["server", "run", "--help"]])
def test_help_texts_name_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(words)
    assert "--json" in "".join(capsys.readouterr())


def test_a_server_s_run_prints_its_summary(
    said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")

    def submitted(server: object, file: Path, flags: submit.SubmitFlags, say: Callable[[str], None]) -> Path:
        say("asking 2 clients")
        return run

    monkeypatch.setattr(submit, "run", submitted)
    monkeypatch.setattr(sys.modules["fedstill.cli.server_commands"], "_open", lambda words, command: None)
    found = said("server", "run", str(tmp_path), "run.yaml", "--out", str(run))
    assert (found["accuracy"], found["folder"]) == (0.9, str(run))


def test_a_report_takes_quiet(said: Any, tmp_path: Path) -> None:
    assert said("report", str(write_run(tmp_path / "run")), "--quiet", "--out", str(tmp_path / "out"))["rows"]
