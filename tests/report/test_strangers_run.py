"""A run folder of a stranger, whose model is code: what only reads the folder imports none of it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstill
from fedstill.cli import main

HONEST = """
from torch import nn
def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
"""
TRAP = "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n" + HONEST


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = tmp_path / "strange_net.py"
    place.write_text(HONEST)
    words = "run fedavg --data digits --limit 200 --rounds 1 --clients 2 --workers 0 --model strange_net:net".split()
    main([*words, "--out", "run"])
    del sys.modules["strange_net"]
    place.write_text(TRAP)
    yield tmp_path / "run"
    sys.modules.pop("strange_net", None)


@pytest.mark.slow
def test_reading_runs_no_code_of_it(run: Path) -> None:
    fedstill.read_run(run)
    for words in ("report run --out page", "runs .", "privacy run", "watch run --json"):
        main(words.split())
    assert not run.with_name("sprung").exists()
    fedstill.load_model(run)  # which must; docs/runs.md says so
    assert run.with_name("sprung").exists()
