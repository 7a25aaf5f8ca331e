import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill import Experiment, FedAvg, Job, read_run, run
from fedstill.engines.transport import Watcher
from fedstill.runs import environment


class Notes(Watcher):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def noted(self, sentence: str) -> None:
        self.sentences.append(sentence)


def once(out: Path) -> list[str]:
    task = Experiment(data="digits", clients=2, limit=100, model="convnet:width=8,depth=2", workers=0)
    notes = Notes()
    run(Job(task, FedAvg(rounds=1), out), watcher=notes)
    return notes.sentences


def test_every_start_leaves_its_environment_and_another_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert once(out) == []
    (entry,) = read_run(out).environment
    assert entry["torch"] == torch.__version__ and entry["fedstill"] == fedstill.__version__
    assert entry["threads"] == torch.get_num_threads() and entry["device"] == "cpu" and entry["cpu"]
    assert entry["python"].count(".") == 2 and entry["numpy"] and entry["blas"] and entry["os"] and entry["started"]
    model = (out / "model.safetensors").read_bytes()
    assert once(out) == []  # a finished run is only read
    assert len(read_run(out).environment) == 1
    (out / "summary.json").unlink()
    assert once(out) == []
    (out / "summary.json").unlink()
    found = environment.software()
    monkeypatch.setattr(environment, "software", lambda: {**found, "torch": "3.0", "cpu": "Z80"})
    (sentence,) = once(out)
    assert f"torch was {torch.__version__}, is 3.0" in sentence and "is Z80" in sentence and "\n" not in sentence
    assert [e["torch"] for e in read_run(out).environment] == [torch.__version__] * 2 + ["3.0"]
    assert (out / "model.safetensors").read_bytes() == model
    (out / "environment.jsonl").unlink()
    assert read_run(out).environment == ()


def test_what_does_not_touch_the_numbers_is_no_other_environment() -> None:
    here: dict[str, Any] = environment.environment("cpu")
    later = {**here, "started": "2030-01-01T00:00:00+00:00", "folder": "/", "folder_commit": "f" * 40, "os": "BeOS"}
    assert environment.changes(here, later) is None
    assert environment.changes(here, {**here, "commit": "a"}) == f"commit was {here['commit']}, is a"


def test_commits_are_those_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GIT_DIR", str(Path(fedstill.__file__).parent))  # as in a hook of another repository
    assert environment.environment("cpu")["folder_commit"] is None
    monkeypatch.delenv("GIT_DIR")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    (tmp_path / "method.py").write_text("1")
    for words in (["init", "-q"], ["add", "method.py"], ["commit", "-q", "-m", "x", "--no-verify"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert environment.environment("cpu")["folder_commit"] == head
    (tmp_path / "method.py").write_text("2")
    assert environment.environment("cpu")["folder_commit"] == head
    monkeypatch.setenv("PATH", "")  # without git
    assert environment.environment("cpu")["folder_commit"] is None
    assert json.dumps(environment.environment("cpu"))


def test_a_strangers_folder_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter, a monitor, a pager, hooks, aliases and a program called git, as an unpacked study may have them."""
    monkeypatch.chdir(tmp_path)
    ran = tmp_path.parent / f"{tmp_path.name}-ran"
    planted = tmp_path / "planted.sh"
    planted.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    planted.chmod(0o755)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    (tmp_path / "method.py").write_text("1")
    (tmp_path / ".gitattributes").write_text("* filter=evil diff=evil\n")
    for words in (["init", "-q"], ["add", "method.py", ".gitattributes"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    for key in ("filter.evil.clean", "filter.evil.process", "diff.evil.command", "diff.evil.textconv", "core.fsmonitor",
                "core.pager", "core.editor", "alias.rev-parse", "core.sshCommand", "credential.helper"):  # fmt: skip
        subprocess.run(["git", "config", key, f"!{planted}" if key.startswith("alias") else str(planted)], check=True)
    for hook in ("post-checkout", "pre-commit", "post-index-change", "reference-transaction", "fsmonitor-watchman"):
        (tmp_path / ".git" / "hooks" / hook).write_bytes(planted.read_bytes())
        (tmp_path / ".git" / "hooks" / hook).chmod(0o755)
    (tmp_path / "method.py").write_text("22")
    assert len(environment.environment("cpu")["folder_commit"]) == 40 and not ran.exists()
    (tmp_path / "git").write_bytes(planted.read_bytes())
    (tmp_path / "git").chmod(0o755)
    for entry in (str(tmp_path), "."):
        monkeypatch.setenv("PATH", entry)
        assert environment.environment("cpu")["folder_commit"] is None and not ran.exists()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        ("  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build\n", "mkl 2024.2-Product"),
        ("  - Build settings: BLAS_INFO=open, BUILD_TYPE=Release", "open"),
        ("", None),
    ],
)
def test_the_library_of_linear_algebra(build: str, name: str | None) -> None:
    assert environment.blas_of(build) == name
