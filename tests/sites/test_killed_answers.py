"""A site killed at any moment, or with a disk that fails, and the same question again: no release leaves twice."""

import errno
import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from real_sites import federation, make_site

from fedstill.data.sources import DataSet
from fedstill.engines.client import NO_REPLY
from fedstill.engines.server import TooFewReplies
from fedstill.protocol import wire
from fedstill.sites.site import log
from fedstill.sites.site.answer import answer
from fedstill.sites.site.charges import read_charges
from fedstill.sites.site.policy import SitePolicy

pytestmark = pytest.mark.slow
KILLS = 20
PRIVATE: dict[str, Any] = {"methods": ["fedavg-p"], "unprotected": False, "simulated_noise": False, "budget": 200.0}


class Asked(Exception):
    """Carries a question, in place of an exchange."""


class Catch:
    """A way to sites that keeps the request."""

    def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
        raise Asked(request)


@pytest.fixture
def site(digits: DataSet, tmp_path: Path) -> SitePolicy:
    return make_site(
        tmp_path,
        digits,
        **PRIVATE,
        max_failures=10**6,
        max_failures_ever=10**6,
        max_questions=10**6,
        runs_per_day=10**6,
    )


def question(digits: DataSet, site: SitePolicy, folder: Path, number: int) -> tuple[str, bytes]:
    """The spec and the request of a run."""
    fed = federation("fedavg-p", digits, [site], folder / f"run-{number}", simulated_noise=False, run=f"{number:032x}")
    fed.transport = Catch()
    with pytest.raises((Asked, TooFewReplies)) as stopped:
        fed.spec.method.server(fed)
    assert isinstance(stopped.value, Asked)
    return fed.spec.text(), stopped.value.args[0]


def start(site: SitePolicy, text: str, request: bytes, out: Path) -> int:
    """The id of a process that writes the digest of its reply to ``out``."""
    if process := os.fork():
        return process
    try:
        digest = hashlib.sha256(answer(site, text, request)).hexdigest()
        whole = out.with_suffix(".part")  # a kill between opening and writing would leave an empty file
        whole.write_text(digest)
        whole.replace(out)
    finally:
        os._exit(0)


def test_killed_at_twenty_moments_and_asked_again(site: SitePolicy, digits: DataSet, tmp_path: Path) -> None:
    rng = random.Random(0)
    seconds, finished, out = 1.0, 0, tmp_path / "reply"
    for number in range(KILLS):
        text, request = question(digits, site, tmp_path, number)
        replies = set()
        for attempt in range(3):  # killed, perhaps killed again, not killed
            out.unlink(missing_ok=True)
            begun = time.monotonic()
            process = start(site, text, request, out)
            if attempt < 2:
                time.sleep(rng.uniform(0, seconds))
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            if attempt == 2:
                seconds = time.monotonic() - begun  # moments spread over what an answer takes here
            if out.exists():
                replies.add(out.read_text())
            assert log.verify(site.state).problems == []
        assert len(replies) == 1
        finished += 1
    charges = read_charges(site.state)
    assert {int(charge.run[:32], 16) for charge in charges} == set(range(KILLS))
    lines = log.read(site.state)
    answers: dict[str, set[str]] = {}
    for line in lines:
        if line["what"] == "answered":
            answers.setdefault(line["run"], set()).add(line["reply"])
    assert len(answers) == finished == KILLS and all(len(each) == 1 for each in answers.values())


def test_two_hundred_questions_on_a_disk_that_fails(
    site: SitePolicy, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twenty-fifth of all flushes and renames; an alarm that rings falsely is switched off."""
    rng, whole = random.Random(0), {"replace": os.replace, "fsync": os.fsync}
    asked = [question(digits, site, tmp_path, number) for number in range(20)]  # the same bytes, but for the run
    replies, failed = dict[int, set[bytes]](), 0

    def failing(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if rng.random() < 0.04:
                raise OSError(errno.EIO, "Input/output error")
            return whole[name](*arguments)

        return call

    for _ in range(200):
        number = rng.randrange(len(asked))
        with monkeypatch.context() as patch:
            for name in whole:
                patch.setattr(os, name, failing(name))
            try:
                reply = answer(site, *asked[number])
            except OSError:
                reply = NO_REPLY
        tensors = {} if reply == NO_REPLY else wire.unpack(reply)[0]
        failed += not tensors
        if tensors:
            replies.setdefault(number, set()).add(reply)
        assert log.verify(site.state).problems == []
    assert 20 < failed < 180 and all(len(each) == 1 for each in replies.values())
    charged = {int(charge.run[:32], 16) for charge in read_charges(site.state)}
    assert charged >= replies.keys()


def test_the_same_question_twice_at_once_is_one_release(site: SitePolicy, digits: DataSet, tmp_path: Path) -> None:
    for number in range(3):
        text, request = question(digits, site, tmp_path, number)
        outs = [tmp_path / f"reply-{i}" for i in range(3)]
        for process in [start(site, text, request, out) for out in outs]:
            os.waitpid(process, 0)
        assert len({out.read_text() for out in outs}) == 1
        assert len(read_charges(site.state)) == number + 1
    assert log.verify(site.state).problems == []
