"""A question that computes for ever, wants all the memory or ends its process: the server learns nothing but that."""

import io
import json
import os
import signal
import time
import zipfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from filelock import FileLock

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")

from flwr.app import Context, Message, RecordDict  # noqa: E402
from flwr.app.metadata import Metadata  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from fedstill.engines.client import NO_REPLY  # noqa: E402
from fedstill.engines.flower import node  # noqa: E402
from fedstill.engines.flower.apps import SPEC  # noqa: E402
from fedstill.engines.flower.payload import content  # noqa: E402
from fedstill.sites import certificates
from fedstill.sites.site import launcher, setup, site_journal  # noqa: E402
from fedstill.sites.site.policy import SitePolicy  # noqa: E402


@pytest.fixture
def policy(tmp_path: Path) -> SitePolicy:
    site_journal.create(tmp_path / "state")
    return SitePolicy(
        client=0, data=tmp_path, state=tmp_path / "state", methods=("fedavg",), max_seconds=2.0, max_memory_gb=30.0
    )


def too_long(*_: Any) -> bytes:
    while True:
        pass


def too_large(*_: Any) -> bytes:
    return bytes(40 * 10**9)


def gone(*_: Any) -> bytes:
    os._exit(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why"),
    [
        (too_long, "no reply within 2 s (max_seconds), so the process was ended"),
        (too_large, "the process ended with code"),
        (gone, "the process ended with code 3"),
    ],
)
def test_a_question_beyond_the_limits_gets_the_constant_reply(
    what: Callable[..., bytes], why: str, policy: SitePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "site_answer", what)
    began = time.monotonic()
    with launcher.Worker(policy) as worker:
        assert worker("spec", b"request") == NO_REPLY
        process = worker.child
    assert not process.is_alive()
    assert time.monotonic() - began < 120
    (line,) = [json.loads(line) for line in (policy.state / "journal.jsonl").read_text().splitlines()]
    assert line["what"] == "failed"
    assert why in line["detail"]


@pytest.mark.slow
def test_nothing_computes_on_after_the_program_was_killed(policy: SitePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "site_answer", too_long)
    read, write = os.pipe()
    if not (program := os.fork()):
        worker = launcher.Worker(policy.model_copy(update={"max_seconds": 600.0}))
        os.write(write, f"{worker.child.pid}".encode())
        worker("spec", b"request")
        os._exit(0)
    child = psutil.Process(int(os.read(read, 20)))
    os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)
    child.wait(30)


def test_a_question_within_the_limits_gets_its_reply(policy: SitePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "site_answer", lambda policy, spec, request: spec.encode() + request)
    with launcher.Worker(policy) as worker:
        assert worker("spec ", bytes(10**7)) == b"spec " + bytes(10**7)


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_a_reply_leaves_at_a_whole_multiple_of_seconds(
    pause: float, policy: SitePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(policy: SitePolicy, spec: str, request: bytes) -> bytes:
        time.sleep(pause)
        return request

    monkeypatch.setattr(launcher, "site_answer", answered)
    with launcher.Worker(policy.model_copy(update={"reply_seconds": 0.8})) as worker:
        began = time.monotonic()
        assert worker("spec", b"request") == b"request"
        assert 0.8 <= time.monotonic() - began < 8
    with launcher.Worker(policy.model_copy(update={"reply_seconds": 0.8, "max_request_mb": 1e-9})) as worker:
        began = time.monotonic()
        assert worker("spec", b"request") == NO_REPLY  # and so does a failure
        assert 0.8 <= time.monotonic() - began < 8


def test_a_request_above_the_limit_is_not_even_sent_to_the_process(
    policy: SitePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher.Worker(policy.model_copy(update={"max_request_mb": 1e-6})) as worker:
        monkeypatch.setattr(Connection, "send_bytes", lambda *_: pytest.fail("it was sent"))
        assert worker("spec", b"12") == NO_REPLY
        monkeypatch.undo()
    (line,) = [json.loads(line) for line in (policy.state / "journal.jsonl").read_text().splitlines()]
    assert (line["what"], line["detail"]) == ("failed", "the request has 2 bytes; the limit is 1 (max_request_mb)")


def test_a_message_that_is_no_question_is_logged(policy: SitePolicy) -> None:
    launcher.failed(policy, ValueError("no facts"))
    (line,) = [json.loads(line) for line in (policy.state / "journal.jsonl").read_text().splitlines()]
    assert (line["what"], line["detail"]) == ("failed", "ValueError: no facts")
    (policy.state / "journal.head").unlink()
    launcher.failed(policy, ValueError("no facts"))  # the server gets the constant reply all the same


@pytest.mark.parametrize("kind", ["query.hello", "query.ask"])
def test_a_message_to_a_site_whose_policy_is_unreadable_is_logged(
    kind: str, policy: SitePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = []

    def run_task(address: str, token: str, parent: int, app: ClientApp, refuse: object) -> None:
        asked = content(b"request", clients=[0], **{SPEC: "spec"})
        message = Message(asked, metadata=Metadata(7, "", 1, 5, "", "", time.time(), 60.0, kind))
        replies.append(app(message, Context(1, 1, {}, RecordDict(), {})))

    monkeypatch.setattr(launcher.node, "run_task", run_task)
    monkeypatch.setattr(launcher, "limit_memory", lambda _: None)  # of this process, which runs other tests too
    place = tmp_path / "policy.toml"
    place.write_text("max_seconds = \n")
    launcher.reply(place, policy.state, os.getpid(), "127.0.0.1:1", "token")
    (line,) = [json.loads(line) for line in (policy.state / "journal.jsonl").read_text().splitlines()]
    assert line["what"] == "failed" and "can't be read as TOML" in line["detail"]
    (reply,) = replies
    assert "TOML" not in str(reply.content.config_records)


def test_a_foreign_bundle_is_logged_with_its_hash(policy: SitePolicy) -> None:
    assert launcher.refuse_by(policy)(b"PK", 7) == "the site runs fedstill's own app only"
    (line,) = [json.loads(line) for line in (policy.state / "journal.jsonl").read_text().splitlines()]
    assert (line["what"], line["run"], len(line["bundle"])) == ("refused", "7", 64)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bundle_in_another_compression_is_refused_in_words(kind: int) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", kind) as bundle:
        for name in launcher._FILES:
            bundle.writestr(name, "x" * 1000)
    whole = content.getvalue()
    assert "compressed in another way" in str(launcher.foreign(whole))
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] ^= int(rng.integers(1, 256))
        assert launcher.foreign(bytes(damaged))


def test_a_site_whose_node_is_not_taken_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "connection", lambda folder: ("fl.example.org:9443", []))
    monkeypatch.setattr(node, "run_node", lambda *_: 1)
    monkeypatch.setattr(os, "umask", lambda _: 0)
    monkeypatch.setenv("FLWR_HOME", "")
    certificates.site_key(tmp_path / setup.KEY, 3)
    setup.site(tmp_path, {"client": 3, "data": "data.npz", "state": "state", "methods": ["fedavg-p"]})
    told: list[str] = []
    assert launcher.serve(tmp_path, say=told.append) == 1
    assert "the server at fl.example.org:9443 did not take this site's node" in told[-1]
    assert "fedstill server accept FOLDER 3 KEY" in told[-1] and "less than a minute ago" in told[-1]
    with (
        FileLock(tmp_path / "state" / "serve.lock"),
        pytest.raises(ValueError, match="another 'fedstill site serve' of"),
    ):
        launcher.serve(tmp_path)
    monkeypatch.setattr(node, "run_node", lambda *_: 0)
    before = len(told)
    assert launcher.serve(tmp_path, say=told.append) == 0
    assert not any("did not take" in sentence for sentence in told[before:])


def test_a_line_that_slipped_below_the_public_data_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt setting there is the name of a data set, as the path that its value would be says."""
    monkeypatch.setattr(setup, "connection", lambda folder: ("fl.example.org:9443", []))
    monkeypatch.setattr(node, "run_node", lambda *_: 0)
    monkeypatch.setattr(os, "umask", lambda _: 0)
    monkeypatch.setenv("FLWR_HOME", "")
    certificates.site_key(tmp_path / setup.KEY, 3)
    setup.site(tmp_path, {"client": 3, "data": "data.npz", "state": "state", "public": {"aproval": "ask"}})
    told: list[str] = []
    assert launcher.serve(tmp_path, say=told.append) == 0
    assert any("the public data 'aproval' are in" in sentence for sentence in told)
