"""A site's counts of questions and runs: they hold over restarts, wrong clocks and crashes."""

import time
from pathlib import Path

import pytest

from fedstill import schema
from fedstill.sites.policy import SitePolicy
from fedstill.sites.questions import DAY, Questions


@pytest.fixture
def policy(tmp_path: Path) -> SitePolicy:
    return SitePolicy(client=0, data=tmp_path, state=tmp_path / "state", methods=(), runs_per_day=2)


def ask(policy: SitePolicy, run: str) -> None:
    questions = Questions(policy, run, "spec")
    questions.ask()
    questions.end()


def test_a_clock_that_was_once_ahead_blocks_no_run(policy: SitePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3650 * DAY)
    ask(policy, "a")
    ask(policy, "b")
    with pytest.raises(schema.Refused, match="begun 2 runs in the last day"):
        ask(policy, "c")
    monkeypatch.setattr(time, "time", lambda: now)
    ask(policy, "c")
    ask(policy, "d")
    with pytest.raises(schema.Refused, match="begun 2 runs in the last day"):
        ask(policy, "e")
    monkeypatch.setattr(time, "time", lambda: now + 1.001 * DAY)
    ask(policy, "e")
