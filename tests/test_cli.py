"""What a user types, and what they are told when it is wrong."""

import csv
import errno
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np
import pytest
import torch

import fedstill
from fedstill import attacks, load_data, methods
from fedstill.base.settings import Settings
from fedstill.cli import COMMANDS, main
from fedstill.cli.command import Command, read, sections_of
from fedstill.cli.declared import declared, facts
from fedstill.cli.flags import parse_compare, parse_run
from fedstill.cli.parser import Section, flags_text, parse
from fedstill.engines.transport import Watcher
from fedstill.experiment.config import Experiment
from fedstill.train.augment import _OPERATIONS

QUICK = ["--data", "digits", "--model", "convnet:width=8,depth=2", "--workers", "0", "--limit", "300"]


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return " ".join(text.split())


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        main([*words, "--help"])
    except SystemExit as stop:
        assert not stop.code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["fly"],
            "there is no command 'fly'; choose run, compare, report, methods, data, server, site, deploy",
        ),
        (["run", "fedsum"], "there is no method 'fedsum'; did you mean fedmd? (all: fedstill methods)"),
        (["run", "xyz"], "there is no method 'xyz'; choose fedavg, fedprox"),
        (["compare", "fedagv"], "there is no method 'fedagv'; did you mean fedavg?"),
        (["comapre"], "there is no command 'comapre'; did you mean compare? (fedstill --help)"),
        (["fedgm"], "there is no command 'fedgm'; did you mean run fedgm? (fedstill --help)"),
        (
            ["run", "fedavg", "--roundz", "3"],
            "there is no flag --roundz; did you mean --rounds? (fedstill run fedavg --help)",
        ),
        (["run", "fedavg", "--seeds", "3"], "there is no flag --seeds; did you mean --seed?"),
        (
            ["run", "fedavg", "--lr", "0.1"],
            "there is no flag --lr; did you mean --local.lr?",
        ),
        (["run", "fedgm", "--lr=0.1"], "there is no flag --lr; did you mean --matching.lr or --training.lr or"),
        (["run", "fedavg", "--num-clients", "3"], "there is no flag --num-clients; did you mean --clients?"),
        (["run", "fedavg", "--alpha", "0.1"], "there is no flag --alpha; did you mean --partition dirichlet:A?"),
        (["run", "--method", "fedavg", "--rounds", "2"], "the method comes first: fedstill run fedavg --rounds 2"),
        (["run", "fedavg", "--clients", "ten"], "--clients is 'ten'; it must be a whole number"),
        (["run", "fedavg", "--clients", "2.5"], "--clients is 2.5; it must be a whole number"),
        (["run", "fedavg", "--local.lr", "fast"], "--local.lr is 'fast'; it must be a number"),
        (["run", "fedavg", "--clients"], "--clients needs a value (fedstill run fedavg --help)"),
        (["run", "fedkadp", "--feedback.weights", "1", "2"], "--feedback.weights needs 4 values"),
        (["run", "fedavg", "--noise", "loud"], "--noise is 'loud'; it must be 'simulated' or 'entropy'"),
        (["run", "fedgm", "--matching.anneal", "perhaps"], "--matching.anneal is 'perhaps'; it must be True or False"),
        (["run", "fedgm", "--matching.no-anneal", "True"], "--matching.no-anneal is 'True'; give it no value"),
        (["run", "fedavg", "3"], "'3' is an unexpected argument (fedstill run fedavg --help)"),
        (["run", "nowhere:Thing"], "method 'nowhere:Thing' cannot be loaded (No module named 'nowhere')"),
        (["run", "json:JSONDecoder"], "'json:JSONDecoder' is not a method"),
        (["run", "--data", "digits"], "the method comes first: fedstill run METHOD --data digits"),
        (["run", "fedavg", "--rounds", "0"], "--rounds is 0; it must be greater than 0"),
        (["run", "fedavg", "--local.lr", "-1"], "--local.lr is -1; it must be greater than 0"),
        (["run", "fedavg", "--local.momentum", "1"], "--local.momentum is 1; it must be less than 1"),
        (
            ["run", "fedkadp", "--feedback.coldest", "4"],
            "--feedback: coldest is 4.0, hottest 3.0; coldest must not be above hottest",
        ),
        (
            ["run", "feddm", "--within", "True", "--matching.rho", "0"],
            "within needs a radius, but matching.rho is 0",
        ),
        (["run", "fedavg", "--clients", "0"], "--clients is 0; it must be greater than 0"),
        (["run", "fedavg", "--local.batch-size", "0"], "--local.batch-size is 0; it must be greater than 0"),
        (["run", "fedavg", *QUICK, "--min-clients", "99"], "--min-clients is 99, but there are"),
        (["run", "fedavg", *QUICK, "--local.lr", "1e300"], "--local.lr is 1e300; it must be less than or equal to"),
        (["run", "fedavg", *QUICK, "--rounds", "9" * 20], "it must be below 1,000,000"),
        (["run", "fedavg", *QUICK, "--timeout", "5"], "--timeout is 5, but the clients run in the server's process"),
        (["run", "dense", "--temperature", "1e300"], "--temperature is 1e300; it must be less than or equal to 1000"),
        (["run", "dense", "--temperature", "1e-9"], "--temperature is 1e-9; it must be greater than or equal to 0.01"),
        (["run", "fedavg", "--participation", "2"], "--participation is 2; it must be less than or equal to 1"),
        (["run", "fedavg", "--data", "no/such/folder/"], "no/such/folder/"),
        (
            ["run", "fedavg", "--data", "digits", "--partition", "dirichlet:-1"],
            "'dirichlet:-1' is not a partition rule",
        ),
        (["run", "fedavg", "--data", "digits", "--partition", "classes:11"], "classes:11"),
        (["run", "fedavg", "--data", "digits", "--partition", "by:colour"], "no column 'colour'"),
        (["run", "fedavg", "--data", "digits", "--clients", "100000"], "100000"),
        (["run", "fedavg", "--data", "digits", "--model", "resnet"], "there is no model 'resnet'"),
        (["run", "fedavg", "--data", "digits", "--model", "convnet:width=0"], "width=0"),
        (["run", "fedgm", "--data", "digits", "--training.augment", "blur"], "blur"),
        (["run", "fedgm", "--data", "digits", "--matching.augment", "blur"], "blur"),
        (["run", "missing.yaml"], "there is no file missing.yaml"),
        (["compare"], "there is no method to compare"),
        (["run", "real", "--out", ""], "--out is ''; give a path, or . for the working folder"),
        (["runs", ""], "word 1 is empty, as of a variable that is not set; usage: fedstill runs [FOLDER]"),
        (["publish", "", "--out", "x"], "word 1 is empty, as of a variable that is not set; usage: fedstill publish"),
        (["compare", "fedavg", "fedavg"], "'fedavg' is given twice"),
        (["compare", "fedavg", "--seeds", "0", "0"], "--seeds is 0 0; seeds must be different numbers"),
        (["compare", "a/b=fedavg"], "'a/b' is not a label"),
        (["compare", "fedavg", "--fedavg.rounds", "0"], "--fedavg.rounds is 0; it must be greater than 0"),
        (["report", "nowhere"], "nowhere"),
        (["data", "show", "nothing-like-that"], "nothing-like-that"),
        (["data", "show", "digts"], "did you mean digits?"),
        (["compare", "fedavg", "real", "--each.roundz", "3"], "--each.roundz: none of fedavg, real has this setting"),
        (
            ["compare", "fedavg", "real", "--each.local.batch-sizes", "3"],
            "none of fedavg, real has this setting; did you mean --each.local.batch-size?",
        ),
        (["compare", "fedavg", "--each.rounds", "0"], "--fedavg.rounds is 0; it must be greater than 0"),
        (["compare", "each=fedavg"], "the label 'each' is reserved for all methods (--each.); use another for fedavg"),
        (["compare", "a-b=fedavg", "a_b=real"], "the labels 'a-b' and 'a_b' would share flags"),
        (["run", "fedavg", "--data", "digits", "--out", "file"], "file"),
        (
            ["run", "fedavg", "--data", "digits", "--device", "toaster"],
            "--device is 'toaster'; there is no such device; choose cpu or cuda",
        ),
        (["run", "fedavg", "--data", "digits", "--device", "meta"], "--device is 'meta'; this device cannot be used"),
        (["run", "fedavg", "--data", "digits", "--threads", "100000"], "--threads is 100000; it must be less than"),
        (["run", "fedavg", "--data", "digits", "--model", "os.path:join"], "os.path:join"),
        (["run", "fedavg", "--data", "digits", "--model", "convnet:width=99999999999"], "convnet:width=99999999999"),
        (["run", "fednova", "--local.milestones", "2"], "milestones (2,) change the learning rate"),
        (["methods", "all"], "'all' is an unexpected argument"),
        (["run", "deep.yaml"], "deep.yaml cannot be read as YAML"),
        (["run", "laughs.yaml"], "laughs.yaml cannot be read as YAML: line 3 has the alias *a; write its value out"),
        (["run", "twice.yaml"], "twice.yaml cannot be read as YAML: 'method' stands again in line 3; write it once"),
        (["run", "empty.yaml"], "empty.yaml is empty; write settings into it, one on a line"),
        (["run", "list.yaml"], "list.yaml must be a mapping of settings, one on a line"),
        (
            ["run", "broken.yaml"],
            "broken.yaml cannot be read as YAML: line 2, column 9: expected ',' or ']', but got '}'",
        ),
        (["run", "sweep.yaml"], "sweep.yaml has 'methods', as a sweep's file does; try fedstill sweep sweep.yaml"),
        (["sweep", "twice.yaml"], "'method' stands again"),
        (["sweep", "run.yaml"], "run.yaml: it has 'method', as a run's file does; try fedstill run, or name it under"),
        (["run", "feddf", *QUICK, "--public", "nois"], "or held=N; did you mean noise?"),
        (["attack", "file", "membership"], "there is no folder file; give a folder written by `fedstill run`"),
        (["attack", ".", "membership"], ". is not the folder of a run; give a folder written by `fedstill run`"),
        (["data", "sell"], "there is no command 'data sell'; choose list, forget, schema, show (fedstill data --help)"),
        (
            ["run", "fedavg-p", "--data", "digits", "--public", "noise", "--mean", "2"],
            "--mean is 2.0, but the pixels of images lie in [0, 1]",
        ),
    ],
)
def test_bad_words_end_in_one_sentence_and_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    laughs = [f"{after}: &{after} [{', '.join([f'*{name}'] * 9)}]" for name, after in pairwise("abcdefghij")]
    (tmp_path / "laughs.yaml").write_text("\n".join(["method: fedavg", "a: &a [ha, ha]", *laughs, "data: *j"]))
    (tmp_path / "twice.yaml").write_text("method: fedavg\nseed: 1\nmethod: fedgm\n")
    for name, text in {
        "empty": "# nothing\n",
        "list": "- method: fedavg\n",
        "broken": "method: fedavg\ndata: [a}\n",
        "sweep": "methods: {fedavg: {}}\n",
        "run": "method: fedavg\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    assert sentence in fails(capsys, *words)


def test_a_device_that_is_not_there_is_not_recommended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fails(capsys, "run", "fedavg", "--data", "digits", "--device", "meta").endswith("; choose cpu")


@pytest.mark.parametrize(("flag", "value", "named"), [("--roundz", "3", "--roundz"), ("--rounds", "many", "many")])
def test_unknown_flags_and_unreadable_values_are_named(
    flag: str, value: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in fails(capsys, "run", "fedavg", flag, value)


def test_a_run_leaves_its_folder_and_the_same_command_again_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["run", "fedavg", *QUICK, "--rounds", "2", "--out", str(out)]
    main(words)
    kept = {f.name for f in out.iterdir()}
    assert kept >= {"config.json", "journal", "metrics.jsonl", "model.safetensors", "report.html", "summary.json"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary.keys() >= {
        "method", "data", "partition", "clients", "rounds", "seed", "accuracy", "bytes_up", "bytes_down",
        "bytes_up_per_client", "seconds", "guarantee",
    }  # fmt: skip
    assert summary["guarantee"].keys() == {
        "holds", "unit", "adjacency", "epsilon", "delta", "adversary", "accountant", "reason", "simulated",
        "exposed", "unchecked", "group", "group_size", "group_epsilon", "group_delta", "adders",
        "alone_epsilon",
        "pairs",
    }  # fmt: skip
    assert summary["bytes_up_per_client"] * 10 == summary["bytes_up"]
    before = (out / "summary.json").stat().st_mtime_ns
    main(words)
    assert (out / "summary.json").stat().st_mtime_ns == before
    capsys.readouterr()
    assert "has a run with rounds = 2, not 3; choose another --out" in fails(
        capsys, "run", "fedavg", *QUICK, "--rounds", "3", "--out", str(out)
    )


@pytest.mark.slow
def test_a_method_without_rounds_logs_a_line_too(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["run", "real", *QUICK, "--ipc", "1", "--out", str(out)]
    main(words)
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").unlink()  # as if it was killed just before
    main(words)
    assert json.loads((out / "summary.json").read_text())["accuracy"] == summary["accuracy"]
    (line,) = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    kept = ("accuracy", "bytes_up", "bytes_down")
    assert line["round"] == summary["rounds"] == 1
    assert [line[name] for name in kept] == [summary[name] for name in kept]


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert "has thesis.tex and no run" in fails(capsys, "run", "fedavg", *QUICK, "--out", str(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.slow
def test_a_comparison_makes_one_table_and_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c"
    main(
        ["compare", "fedavg", "once=fedavg", *QUICK, "--seeds", "0", "1", "--fedavg.rounds", "2", "--once.rounds", "1"]
        + ["--out", str(out)]
    )
    rows: list[dict[str, Any]] = json.loads((out / "table.json").read_text())["rows"]
    assert {row["rounds"] for row in rows} == {1, 2}
    assert {(row["label"], row["method"]) for row in rows} == {("fedavg", "fedavg"), ("once", "fedavg")}
    assert all(row["guarantee"]["holds"] is False for row in rows)
    words = {line["guarantee"] for line in csv.DictReader((out / "table.csv").open())}
    assert words == {"none"}
    assert (out / "report.html").read_text().count("<svg") >= 4
    assert {f.name for f in out.iterdir()} >= {"fedavg", "once", "runs.csv", "table.csv"}
    main(["report", str(out), "--out", str(tmp_path / "again")])
    again = json.loads((tmp_path / "again" / "table.json").read_text())
    assert again == json.loads((out / "table.json").read_text()) and again["rows"] == rows


def test_a_yaml_file_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "e.yaml"
    place.write_text(
        "method: fedavg\ndata: digits\nmodel: convnet:width=8,depth=2\nworkers: 0\nlimit: 300\nfedavg:\n  rounds: 2\n"
    )
    main(["run", str(place), "--out", str(tmp_path / "out"), "--seed", "3"])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["rounds"], summary["seed"]) == (2, 3)
    for text, sentence in [
        ("method: fedavg\nfedavg: {rounds: 0}", "rounds is 0; it must be greater than 0"),
        ("method: fedavg\nfedavg: [1]", "'fedavg' must be a mapping of hyperparameters"),
        ("method: fedavg\ncolour: red", "colour is not a setting here"),
        ("method: fedavg\nrounds: 2", "rounds is not a setting here; put it under fedavg:"),
        ("method: fedavg\nfedavg: {local: {lrr: 2}}", "local.lrr is not a setting here; did you mean local.lr?"),
        ("method: fedavg\nfedavg: {lr: 2}", "lr is not a setting here; did you mean local.lr?"),
        ("method: fedavg\nfedavg: {colour: red}", "colour is not a setting here; leave it out"),
        ("data: digits", "must be a mapping of settings with 'method: NAME'"),
        ("method: [", "cannot be read as YAML"),
        ("method: fedsum", "there is no method 'fedsum'"),
    ]:
        place.write_text(text)
        assert sentence in fails(capsys, "run", str(place))


def test_a_file_without_its_class_is_told_its_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "median.py"
    file.write_text(
        "raise SystemExit(9)\nclass Other: ...\nclass FedMedian(fedstill.FedAvg): ...\nclass B(FedMedian): ..."
    )
    assert f"name its class: {file}:FedMedian or {file}:B" in fails(capsys, "run", str(file))
    file.write_text("class Other: ...")
    assert f"name its class: {file}:Class" in fails(capsys, "run", str(file))
    file.write_text("class (")
    assert "it cannot be read (invalid syntax); give a file with a class" in fails(capsys, "run", str(file))
    assert "No such file or directory" in fails(capsys, "run", str(tmp_path / "none.py"))


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "afile").write_text("")
    for out in (tmp_path / "afile", tmp_path / "afile" / "below"):
        said = fails(capsys, "run", "fedavg", *QUICK, "--out", str(out))
        assert f"{out} is a file or lies below one, but a folder is needed; choose another folder" in said


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free space, then repeat the command: it goes on"), (errno.EFBIG, "raise the limit on a file's")],
)
def test_a_full_disk_has_a_remedy(
    number: int, remedy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: list[str]) -> None:
        raise OSError(number, os.strerror(number), "runs/one/model.safetensors")

    monkeypatch.setitem(COMMANDS, "runs", Command(full, raw=True))
    said = fails(capsys, "runs")
    assert f"runs/one/model.safetensors cannot be written: {os.strerror(number)}; {remedy}" in said


def test_words_that_do_not_belong_there_are_told_where_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert "its settings: fedstill run fedgm --help" in fails(capsys, "methods", "fedgm")
    said = fails(capsys, "compare", "fedavg", "fedgm", "--seeds")
    assert "--seeds has no value; seeds must be different numbers of 0 or more, as --seeds 0 1 2" in said


@pytest.mark.parametrize("words", [["run", "fedavg"], ["compare", "fedavg"]])
def test_a_run_of_the_command_line_is_one_of_the_library(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def told(job: fedstill.Job, watcher: Watcher, **arguments: Any) -> None:
        raise ValueError(f"{job.out.relative_to(tmp_path)} by {sorted(arguments)}")

    monkeypatch.setattr("fedstill.library.finish", told)
    monkeypatch.chdir(tmp_path)
    out = {"run": "out", "compare": "out/fedavg/seed-0"}[words[0]]
    said = fails(capsys, *words, *QUICK, "--out", str(tmp_path / "out"))
    assert f"{out} by ['nobody', 'track']" in said


def test_a_method_of_ones_own(tmp_path: Path) -> None:
    main(["run", "small:Probe", *QUICK, "--partition", "classes:10", "--out", str(tmp_path / "own")])
    assert json.loads((tmp_path / "own" / "summary.json").read_text())["method"] == "small:Probe"


def test_validation_records_are_not_trained_on(tmp_path: Path) -> None:
    main(["run", "fedavg", *QUICK, "--rounds", "1", "--validation", "0.2", "--out", str(tmp_path / "v")])
    summary = json.loads((tmp_path / "v" / "summary.json").read_text())
    counts = json.loads((tmp_path / "v" / "partition.json").read_text())["counts"]
    confusion = json.loads((tmp_path / "v" / "evaluation.json").read_text())["confusion"]
    assert summary["judged_on"] == "validation records"
    assert sum(map(sum, counts)) + sum(map(sum, confusion)) == 300


def test_clients_may_keep_records_for_their_own_test(tmp_path: Path) -> None:
    main(["run", "fedavg", *QUICK, "--rounds", "1", "--local-test", "0.2", "--out", str(tmp_path / "t")])
    counts = json.loads((tmp_path / "t" / "partition.json").read_text())["counts"]
    assert 230 <= sum(map(sum, counts)) <= 250


def test_a_part_that_a_crash_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / ".config.json.999.part").write_text("half")
    main(["run", "fedavg", *QUICK, "--rounds", "1", "--out", str(tmp_path / "p")])


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", ["", "{}", "[1]", "{"])
def test_a_damaged_run_is_named(name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", *QUICK, "--rounds", "1", "--out", str(tmp_path / "d")]
    main(words)
    (tmp_path / "d" / name).write_text(content)
    capsys.readouterr()
    assert f"{name} is damaged" in fails(capsys, *words)


def test_lists(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["methods"])
    main(["data", "list"])
    main(["data", "show", "digits", "--partition", "classes:2", "--out", str(tmp_path / "who.html")])
    main(["run", "--help"])
    main(["--version"])
    text = capsys.readouterr().out
    for word in (
        "fedgm",
        "scaffold",
        "tiny_imagenet",
        "digits, classes:2: 10 clients, 1438 records",
        f"fedstill {fedstill.__version__}\n",
    ):
        assert word in text
    assert "<svg" in (tmp_path / "who.html").read_text()


@pytest.mark.parametrize("command", ["run", "report", "data", "privacy", "attack", "deploy"])
def test_a_command_without_words_says_how_it_is_used_and_fails(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert f"usage: fedstill {command}" in said.err
    assert said.out == ""
    assert f"usage: fedstill {command}" in help_of(capsys, command)


def modules_after(words: list[str]) -> set[str]:
    """The names of all modules that a command has imported when it ends."""
    code = (
        "import sys\nfrom fedstill.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert not stop.code\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True)
    return set(done.stderr.split())


def test_help_imports_little() -> None:
    """So it starts at once, on any machine: Python alone has about 50 modules, torch 1,500 and 2 s."""
    assert len(modules_after(["--help"])) < 300


def test_a_class_of_your_own_labels_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_median.py").write_text("from fedstill import FedAvg\nclass FedMedian(FedAvg):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = str(tmp_path / "own_median.py")
    entries = ["fedavg", f"{file}:FedMedian", "own_median:FedAvg", f"mine={file}:FedMedian"]
    found = parse_compare("fedstill compare", ["--FedMedian.rounds", "7", "--mine.rounds=3"], entries)
    assert [*found.methods] == ["fedavg", "FedMedian", "FedAvg", "mine"]
    rounds = [method.model_dump()["rounds"] for _, method in found.methods.values()]
    assert rounds[1] == 7 and rounds[3] == 3 and found.methods["FedMedian"][0] == f"{file}:FedMedian"
    with pytest.raises(ValueError, match="'FedMedian' is given twice; use another label for one, as FedMedian-2="):
        parse_compare("fedstill compare", [], [f"{file}:FedMedian", "own_median:FedMedian"])


def test_each_sets_what_methods_share_but_for_what_they_have_of_their_own() -> None:
    words = (
        "--each.rounds=7 --fedprox.rounds 3 --each.local.batch_size 16 --clients 4 --each.local.milestones 2 4".split()
    )
    found = parse_compare("fedstill compare", words, ["fedavg", "a-b=fedprox", "fedprox", "real"])
    settings = {label: method.model_dump() for label, (_, method) in found.methods.items()}
    assert {label: each.get("rounds") for label, each in settings.items()} == {
        "fedavg": 7, "a-b": 7, "fedprox": 3, "real": None,
    }  # fmt: skip
    for label in ("fedavg", "a-b", "fedprox"):
        assert settings[label]["local"]["batch_size"] == 16
        assert settings[label]["local"]["milestones"] == (2, 4)
    assert found.experiment.clients == 4


HELPED = [
    "", "run fedgm", "run fedkadp", "run fedauxfdp", "run --extend", "compare fedavg fedgm", "privacy RUN",
    "attack RUN", "attack RUN uploads", *COMMANDS,
    *(f"{name} {inner}" for name, command in COMMANDS.items() if name != "run" for inner in command.below),
]  # fmt: skip


@pytest.mark.parametrize("command", HELPED)
def test_every_command_has_a_help_text_of_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, *command.split())
    assert "%%" not in text
    assert "usage: fedstill" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


PARSED = [
    pytest.param(f"{name} {inner}".split(), one, id=f"{name} {inner}")
    for name, command in COMMANDS.items()
    for inner, one in [("", command), *command.below.items()]
    if one.run is not None and not one.raw
]


@pytest.mark.parametrize(("names", "command"), PARSED)
def test_a_command_takes_its_words_and_the_settings_of_its_flags(names: list[str], command: Command) -> None:
    assert command.run is not None
    assert len(inspect.signature(command.run).parameters) == 1 + len(command.flags)
    for shown in (True, False):
        kinds = [section.settings for section in sections_of(command, shown=shown)]
        taken = [field for kind in kinds for field in type(kind).model_fields]
        assert len(taken) == len({*taken}), "each flag belongs to one class"


@pytest.mark.parametrize(("names", "command"), PARSED)
def test_a_wrong_flag_or_word_of_any_command_is_one_sentence(
    names: list[str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"fedstill {' '.join(names)} --help"
    told = fails(capsys, *names, "--nonsense=3")
    assert "there is no flag --nonsense" in told and line in told
    assert "there is no flag --" in fails(capsys, *names, "--", "word")
    if command.least:
        told = fails(capsys, *names, *(["--json"] if "--json" in help_of(capsys, *names) else []))
        assert "comes first" in told or f"usage: fedstill {names[0]}" in told or command.needs in told
    if command.most is not None:
        words = ["0"] * command.most
        assert "'more' is an unexpected argument" in fails(capsys, *names, *words, "more")
        assert "'fedgm' is an unexpected argument; its settings:" in fails(capsys, *names, *words, "fedgm")


@pytest.mark.parametrize(
    ("words", "others", "flags"),
    [
        ("show site --json 1", ["site", "1"], {"json_": True}),  # no value of the switch
        ("show --json --out=a=b site 1", ["site", "1"], {"json_": True, "out": Path("a=b")}),
        ("show site 1 --json --json --no-json", ["site", "1"], {}),
        ("approve site --no 0", ["site", "0"], {"no": True}),
        ("approve site 0 --yes=false", ["site", "0"], {}),
        ("approve --yes site 0", ["site", "0"], {"yes": True}),
        ("log --all site --verify", ["site"], {"all": True, "verify": True}),
        ("log --export one.json --export two.json site", ["site"], {"export": Path("two.json")}),
    ],
)
def test_words_stand_before_between_and_after_flags(words: str, others: list[str], flags: dict[str, Any]) -> None:
    name, *rest = words.split()
    found, settings = read(COMMANDS["site"].below[name], rest, f"fedstill site {name}")
    assert found == others
    assert settings.model_dump(exclude_defaults=True) == flags


def test_the_help_of_a_method_is_in_groups(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, "run", "fedgm")
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "task:", "privacy:", "engine:", "output:", "settings of fedgm:", "matching:", "training:", "teacher:",
        "more:",
    ]  # fmt: skip
    groups = dict(zip(titles, re.split(r"^[a-z ]+:$", text, flags=re.MULTILINE)[1:], strict=True))
    assert "--partition" in groups["task:"]
    assert "--epsilon" not in groups["privacy:"] and "--budget" in groups["privacy:"]
    assert "--workers" in groups["engine:"] and "--ipc" in groups["settings of fedgm:"]
    assert "--keep-replies/--no-keep-replies" in text
    assert "{simulated,entropy}" in text
    assert "None" not in groups["task:"] + groups["engine:"]
    assert "(default: )" not in text


@pytest.mark.parametrize("name", ["real", "fedgm", "feddm", "fedgm-records"])
def test_the_help_of_an_augmentation_lists_its_operations(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = re.findall(r"\S+\.augment TEXT\n(.*?)\n\s*(?:--|$)", help_of(capsys, "run", name), re.DOTALL)
    assert texts
    for text in texts:
        assert set(_OPERATIONS) <= {*re.findall(r"\w+", text)}


@pytest.mark.parametrize("words", [["run", "fedgm"], ["compare", "fedavg", "fedgm"]])
def test_every_flag_has_a_help_text(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys, *words).splitlines()
    for line, following in zip(lines, lines[1:], strict=False):
        if line.startswith("  --"):
            assert re.search(r"\s{2,}\S", line[4:]) or following.startswith(" " * 8), line


@pytest.mark.parametrize("name", methods.TABLE)
def test_help_shows_the_settings_that_a_method_has(name: str) -> None:
    """Settings read from the source, which needs no torch, are those of the imported class."""

    shown, real = declared(methods.TABLE[name]), methods.find(name)
    assert shown.__doc__ == real.__doc__
    assert "--" in flags_text(name, [Section(shown())]) == flags_text(name, [Section(real())])


def test_help_reads_every_other_settings_class_too() -> None:
    for place in (*attacks.ATTACKS.values(), "fedstill.report.plan:Plan", "fedstill.sites.site.policy:SitePolicy"):
        shown, real = declared(place), resolve_name(place)
        assert {n: f.description for n, f in shown.model_fields.items()} == {
            n: f.description for n, f in real.model_fields.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["run fedgm --help", "compare fedavg fedgm --help", "methods", "methods --json", "data list",
              "attack --help", "privacy plan --help", "site init --help", "server init --help", "server run --help"]
)  # fmt: skip
def test_static_text_needs_no_torch(words: str) -> None:
    found = modules_after(words.split())
    assert not {"torch", "numpy", "datasets"} & found
    assert len(found) < 450


def test_the_list_of_methods_says_what_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    main(["methods", "--json"])
    listed = {row["method"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert list(listed) == list(methods.TABLE)
    for name, row in listed.items():
        kind = methods.find(name)
        rounds = kind.model_fields["rounds"].default if "rounds" in kind.model_fields else 1
        assert (row["rounds"], row["one_shot"]) == (rounds, rounds == 1)
        assert (row["needs_public"] or "", row["protects"] or "") == (kind.needs_public, kind.protects)
        assert row["description"] == (kind.__doc__ or "").splitlines()[0]
        assert re.fullmatch(r"[A-Z][A-Za-z]+ (19|20)\d\d|Chen", row["paper"]), row  # FedRD's paper has no date
        assert row["paper"].split()[0] in (sys.modules[kind.__module__].__doc__ or "")
    papers = {name: row["paper"] for name, row in listed.items()}
    assert papers["fedavg"] == "McMahan 2017" and papers["dense"] == "Zhang 2022" and papers["fedkd"] == "Wu 2022"


def test_the_readme_counts_the_methods() -> None:
    once = [name for name in methods.TABLE if facts(name)["one_shot"]]
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    assert f"has {len(methods.TABLE)} methods, {len(once)} of them one-shot" in readme


def test_the_list_of_methods_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["methods"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^fedavg-p +once +images +record +Hoech 2022$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "value"),
    [("--matching.no-anneal", False), ("--matching.anneal", True), ("--matching.anneal False", False), ("", True)],
)
def test_switches(words: str, value: bool) -> None:
    found = parse_run("fedstill run fedgm", words.split(), Experiment(), methods.find("fedgm")())
    assert found.method.model_dump()["matching"]["anneal"] is value


class Odd(Settings):
    """Types that no method of fedstill has."""

    names: list[str] = ["a"]
    """Names."""
    sizes: dict[int, float] = {}
    """Sizes."""
    power: Literal[1, 2] | None = 1
    """Power."""


def test_words_become_values_of_other_types() -> None:
    words = "--names x y --sizes 3 0.5 4 1 --power 2"
    (found,) = parse("fedstill", "", words.split(), [Section(Odd())])
    assert found == Odd(names=["x", "y"], sizes={3: 0.5, 4: 1.0}, power=2)
    for wrong, sentence in (("--power 3", "--power is 3; it must be 1 or 2"), ("--sizes 3", "'3' has no value")):
        with pytest.raises(ValueError, match=sentence):
            parse("fedstill", "", wrong.split(), [Section(Odd())])


def test_words_become_the_settings_types() -> None:
    words = "--clients 7 --delta 1e-6 --models lenet convnet --limit None --local.milestones 2 4 --no-keep-replies"
    found = parse_run("fedstill run fedavg", words.split(), Experiment(limit=3), methods.find("fedavg")())
    assert (found.experiment.clients, found.experiment.delta, found.experiment.limit) == (7, 1e-6, None)
    assert found.experiment.models == ("lenet", "convnet")
    assert found.method.model_dump()["local"]["milestones"] == (2, 4)
    assert found.experiment.keep_replies is False


def test_public_data_that_is_not_there_blocks_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", *QUICK, "--rounds", "1", "--out", str(tmp_path / "run")]
    assert "neither a known data set" in fails(capsys, *words, "--public", "nosie")
    main(words)
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_comparison_says_that_noise_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--data digits --limit 100 --clients 2 --workers 0 --model convnet:width=4,depth=1 --quiet".split()
    main(["compare", "ldp-fedavg", *words, "--out", str(tmp_path / "out")])
    assert "The privacy noise is simulated, drawn from the seed" in capsys.readouterr().out
    main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page")])
    assert "The privacy noise is simulated, drawn from the seed" in capsys.readouterr().out


def test_a_private_method_without_a_guarantee_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digits = load_data("digits")
    x, y = digits.train.images[:100, 0].numpy(), digits.train.labels[:100].numpy()
    np.savez("mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    words = "--data ./mine.npz --clients 2 --workers 0 --model convnet:width=4,depth=1 --quiet".split()
    main(["run", "ldp-fedavg", *words, "--out", "out"])
    sentence = "\nldp-fedavg has no guarantee: the normalisation and the number of classes of the task came from"
    assert sentence in capsys.readouterr().out
    main(["report", "out", "--out", "page"])
    assert sentence in capsys.readouterr().out
    main(["run", "fedavg", *words, "--rounds", "1", "--out", "bare"])
    assert "no guarantee:" not in capsys.readouterr().out


def test_a_comparison_says_which_runs_of_its_folder_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["compare", "fedavg", *QUICK, "--fedavg.rounds", "1", "--quiet", "--out", str(out)]
    main([*words, "--seeds", "0", "1"])
    assert "earlier command" not in capsys.readouterr().out
    main([*words, "--seeds", "1", "2"])
    said = " ".join(capsys.readouterr().out.split())
    assert "earlier command too, which this table lacks (fedavg/seed-0)" in said
    main([*words, "--seeds", "2", "--json"])
    assert "(fedavg/seed-0, fedavg/seed-1)" in json.loads(capsys.readouterr().out)["remarks"][-1]


def test_removing_a_comparison_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    main(["compare", "fedavg", *QUICK, "--fedavg.rounds", "1", "--quiet", "--out", str(out)])
    main(["report", str(out), "--latex", "--markdown", "--out", str(out)])
    main(["runs", "remove", str(out), "--yes"])
    assert not out.exists()


def test_removing_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: fedstill runs remove FOLDER ... [flags]" in help_of(capsys, "runs", "remove")


def test_a_comparison_is_refused_before_its_first_run_if_one_is_impossible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "compare fedavg fedrep --data digits --local-test 0.2 --workers 0 --models mlp:hidden=4 mlp:hidden=8"
    with pytest.raises(SystemExit) as stop:
        main([*words.split(), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2 and not (tmp_path / "out").exists()
    assert "fedavg needs one model for all clients" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "fedavg", "fedmd", "--data", "digits", "--workers", "0", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and "fedmd gives every client its own model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "fedavg", "afl", "--data", "digits", "--workers", "0", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and "afl needs public images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("method: fedavg\ndata: {{ data }}\n", "line 2 has a list or mapping where a name must stand; write the name"),
        ("method: fedavg\n? [a]\n: 1\n", "line 2 has a list or mapping where a name must stand"),
        ("method: fedavg\ndata: 2020-99-99\n", "file.yaml cannot be read as YAML: month must be in 1..12"),
        ('method: fedavg\nseed: !!int ""\n', "file.yaml cannot be read as YAML"),
        ("method: fedavg\n1: 2\n", "file.yaml has 1 where the name of a setting must stand; correct it"),
        ("method: fedavg\nfedavg: {local.lr: 0.1}\n", "local.lr is not a setting here; write local: {lr: 0.1}"),
    ],
)
def test_a_file_of_settings_with_a_mistake_is_one_sentence(
    content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.yaml").write_text(content)
    assert sentence in fails(capsys, "run", str(tmp_path / "file.yaml"))


def test_a_name_that_is_not_utf8_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report could not be written after the run, nor that of any comparison with it."""
    out = f"{tmp_path}/bad\udcff"
    assert "is not UTF-8; rename it, or choose another name" in fails(capsys, "run", "fedavg", *QUICK, "--out", out)
    assert not any(tmp_path.iterdir())


def test_a_name_that_the_locale_cannot_read_is_not_called_wrong(tmp_path: Path) -> None:
    """A folder with an umlaut is UTF-8; in an ASCII locale Python does not read it so."""
    done = in_a_process(["data", "show", f"{tmp_path}/für"], LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 2 and "cannot be read in this locale (ascii); set LC_ALL=C.UTF-8 before" in done.stderr
    assert "rename" not in done.stderr


def test_too_few_files_that_may_be_open_and_a_deleted_working_folder_have_their_remedies(tmp_path: Path) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (18, 18))"
    words = ["run", "fedavg", *QUICK, "--clients", "20", "--workers", "2", "--out", str(tmp_path / "run")]
    done = in_a_process(words, before=few)
    sentence = (
        "fedstill: too many files are open at once; raise the limit (ulimit -n 1024), then repeat the command: it goes "
        "on"
    )
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()  # a worker that ends may have the last word
    gone = (
        f"import os; os.mkdir({str(tmp_path / 'gone')!r}); os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())"
    )
    done = in_a_process(["run", "fedavg", *QUICK, "--out", str(tmp_path / "other")], before=gone)
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1] == (
        "fedstill: the working folder was deleted; change to another (cd) and repeat the command"
    )


def in_a_process(words: Sequence[str], before: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command line in a process of its own, after the line ``before``."""
    code = f"{before}\nimport sys; from fedstill.cli import main; main(sys.argv[1:])"
    given = {**os.environ, **environment}
    call = [sys.executable, "-c", code, *words]
    return subprocess.run(call, env=given, capture_output=True, text=True, encoding="utf-8", timeout=300)


def test_a_reply_is_reused_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "feddf", *QUICK, "--limit", "60", "--public", "noise=20", "--local.epochs", "1"]
    main([*words, "--out", str(tmp_path / "run")])
    monkeypatch.chdir(tmp_path / "run")
    main(["run", "--replies", ".", "feddf", "--out", "../one"])
    main(["run", "--without", "1", "."])
    assert (tmp_path / "one" / "summary.json").exists() and (tmp_path / "run-without-1" / "summary.json").exists()
    assert "the run is ''; give the folder of a finished run" in fails(capsys, "run", "--extend", "")


def test_a_switch_with_a_value_is_named_without_a_dash_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json is 'maybe'; it must be True or False" in fails(capsys, "data", "show", "digits", "--json=maybe")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of Unix")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_deployment_check_that_is_ended_cleans_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server and sites ran on."""
    from fedstill.sites import trial

    ended = []

    def endless(folder: object) -> Iterator[str]:
        try:
            yield "begun"
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(20)
        finally:
            ended.append(name)

    monkeypatch.setattr(trial, "check", endless)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        with pytest.raises(SystemExit) as stop:
            main(["deploy", "check"])
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert ended == [name] and stop.value.code == 128 + getattr(signal, name)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("it failed; see logs")])
def test_a_deployment_check_leaves_no_keys_unless_its_logs_are_needed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interruption left eleven private keys and the sites' records in a temporary folder that nobody named."""
    loopback = pytest.importorskip("fedstill.sites.loopback", reason="flwr is not installed")

    @contextmanager
    def fails(folder: Path) -> Iterator[None]:
        (folder / "site.key").write_text("secret")
        raise error
        yield

    monkeypatch.setattr(loopback, "loopback", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["deploy", "check"])
    assert len([*tmp_path.rglob("site.key")]) == isinstance(error, RuntimeError)
    assert "resume" not in capsys.readouterr().err


def test_the_end_of_the_reader_is_told_where_work_goes_on() -> None:
    words = ["run", "fedavg", *QUICK, "--rounds", "2", "--dry-run"]
    program = "import sys; from fedstill.cli import main; sys.stdout.close = lambda: None; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 1 and "the reader of the output has ended; repeat the command to resume" in error


def test_a_runs_folder_in_place_of_a_method_tells_how_to_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "fedavg", *QUICK, "--limit", "60", "--rounds", "1", "--out", str(tmp_path / "run")]
    main(words)
    told = fails(capsys, "run", str(tmp_path / "run"))
    assert f"run is the folder of a run; repeat fedstill {' '.join(words)} to resume it" in told


def test_an_interruption_waits_for_imports_which_would_end_in_an_abort(tmp_path: Path) -> None:
    """Of torch and NumPy: an import that is interrupted aborts the process, or calls itself without end."""
    hurt = (
        "import os, signal, time\nfrom fedstill import FedAvg\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\n"
    )
    (tmp_path / "hurt.py").write_text(hurt + "class Mine(FedAvg):\n    pass\nopen('whole', 'w').close()\n")
    code = "import signal\nfrom fedstill.cli import main\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "main(['run', 'hurt.py:Mine', '--data', 'digits', '--model', 'linear', '--quiet'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted; repeat the command to resume")
    assert (tmp_path / "whole").exists()
