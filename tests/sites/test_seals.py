"""A reply is a client's and a request is the server's because a key says so; an older copy of a site is noticed."""

import json
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fedstill.base import files
from fedstill.cli import main
from fedstill.engines.transport import Arrival, Transport
from fedstill.protocol import wire
from fedstill.sites import certificates, seals
from fedstill.sites.certificates import site_key
from fedstill.sites.seals import Receipts, has_signed, sign_reply
from fedstill.sites.server import roster
from fedstill.sites.server.service import Server, init
from fedstill.sites.site import answer, chain, evidence, log, setup, site_journal
from fedstill.sites.site.policy import SitePolicy

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from flwr.app import Context, Message, RecordDict  # noqa: E402
from flwr.app.metadata import Metadata  # noqa: E402

from fedstill.engines.flower import apps  # noqa: E402
from fedstill.engines.flower.messages import arrivals_of  # noqa: E402
from fedstill.engines.flower.payload import content  # noqa: E402
from fedstill.sites.server.serve import Sealed  # noqa: E402
from fedstill.sites.site import launcher  # noqa: E402
from fedstill.sites.site.launcher import SiteSeal  # noqa: E402

REFUSED = "its reply is not signed with its key, which the roster has"


class Canned(Transport):
    """Replies of a network."""

    def __init__(self, arrivals: Sequence[Arrival], facts_of: Any = None) -> None:
        self.arrivals, self.facts_of, self.is_closed = arrivals, facts_of, False

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        yield from self.arrivals

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    return [site_key(tmp_path / f"site-{client}.key", client).with_suffix("") for client in range(2)]


def public(key: Path) -> str:
    return certificates.read_public(key.with_name(f"{key.name}.pub").read_text())


def sealed(arrivals: Sequence[Arrival], keys: dict[int, str], folder: Path) -> Sealed:
    return Sealed(lambda **options: Canned(arrivals, **options), "spec", keys, folder)


def test_a_forged_reply_is_refused(keys: list[Path], tmp_path: Path) -> None:
    mine, theirs = keys
    receipt = f"7.{'a' * 64}.{'b' * 64}"
    good = sign_reply(mine, "spec", b"request", b"reply", receipt)
    known = {0: public(mine), 1: public(theirs)}
    other = sign_reply(theirs, "spec", b"request", b"reply", receipt)
    for name, arrival, passes in (
        ("its own", Arrival(0, b"reply", signature=good, receipt=receipt), True),
        ("without a signature", Arrival(0, b"reply", receipt=receipt), False),
        ("of another client", Arrival(0, b"reply", signature=other, receipt=receipt), False),
        ("for another client", Arrival(1, b"reply", signature=good, receipt=receipt), False),
        ("another reply", Arrival(0, b"Reply", signature=good, receipt=receipt), False),
        ("another receipt", Arrival(0, b"reply", signature=good, receipt=f"8{receipt[1:]}"), False),
        ("no receipt", Arrival(0, b"reply", signature=good), False),
        ("no hexadecimal", Arrival(0, b"reply", signature="x" * 96, receipt=receipt), False),
    ):
        (found,) = sealed([arrival], known, tmp_path).exchange(b"request", [0, 1], lambda _: None)
        assert found == (arrival if passes else arrival._replace(reply=b"", failure=REFUSED)), name
    for spec, request in (("spec", b"earlier"), ("other", b"request")):
        arrival = Arrival(0, b"reply", signature=sign_reply(mine, spec, request, b"reply", ""))
        (found,) = sealed([arrival], known, tmp_path).exchange(b"request", [0, 1], lambda _: None)
        assert found.failure == REFUSED
    late = Arrival(0, b"", "no reply within 1 s (--timeout)")
    transport = sealed([late], known, tmp_path)
    assert list(transport.exchange(b"request", [0], lambda _: None)) == [late]
    transport.close()
    assert not has_signed(public(mine), good, "spec", b"requestreply", b"", receipt)
    assert Receipts(tmp_path / "receipts.json").of(public(mine)) == receipt
    assert Receipts(tmp_path / "receipts.json").of(public(theirs)) == ""


def test_the_newest_receipt_of_a_key_is_kept(tmp_path: Path) -> None:
    kept = Receipts(tmp_path / "receipts.json")
    for number in (3, 12, 9):
        kept.note("a key", f"{number}.{'a' * 64}.{'b' * 64}")
    kept.note("a key", "rubbish")
    kept.note("a key", f"10.{'c' * 64}.{'b' * 64}", f"11.{'a' * 64}.{'b' * 64}")  # a later one has come meanwhile
    assert kept.of("a key").startswith("12.")
    (tmp_path / "receipts.json").write_text("[]")
    with pytest.raises(files.Damaged, match="bring its newest copy back, or delete it"):
        kept.of("a key")


class Seal:
    """Signs with a key and refuses one request."""

    def __init__(self, key: Path) -> None:
        self.key = key

    def refusal(self, spec: str, request: bytes, facts: Any) -> bytes | None:
        return b"refused" if request == b"a stranger's" else None

    def of(self, spec: str, request: bytes, reply: bytes) -> dict[str, str]:
        return {"signature": sign_reply(self.key, spec, request, reply, "here"), "receipt": "here"}


@pytest.mark.parametrize("request_", [b"a request", b"a stranger's", b"one that fails"])
def test_a_site_signs_what_it_sends_also_that_it_sends_nothing(request_: bytes, keys: list[Path]) -> None:
    def answer(*arguments: object) -> bytes:
        assert arguments[-1] != b"a stranger's", "no program of the site sees it"
        if arguments[-1] == b"one that fails":
            raise ValueError("a reason")
        return b"the reply"

    app = apps.client_app(lambda *_: 0, answer, seal=Seal(keys[0]))
    asked = content(request_, clients=[0], **{apps.SPEC: "the spec"})
    facts = Metadata(1, "m", 0, 7, "", "", 0.0, 60.0, "query.ask")
    message = Message(content=asked, metadata=facts)
    reply = app(message, Context(1, 7, {}, RecordDict(), {}))
    reply.metadata.__dict__["_src_node_id"] = 7
    (arrival,) = arrivals_of([0], reply, 10**6)
    wanted = {b"a request": b"the reply", b"a stranger's": b"refused", b"one that fails": apps.NO_REPLY}
    assert arrival.reply == wanted[request_]
    assert has_signed(public(keys[0]), arrival.signature, "the spec", request_, arrival.reply, "here")


class Pair:
    """A server and a site that has its invitation."""

    def __init__(self, folder: Path) -> None:
        self.server: Server = init(folder / "server", {"host": "127.0.0.1"})
        self.place = folder / "site"
        self.place.mkdir()
        setup.site(self.place, {"client": 0, "data": "data", "state": "state", "methods": ["fedavg"]})
        setup.join(self.place, self.server.invite(0, None))
        self.policy = SitePolicy.read(self.place / setup.POLICY)
        self.key = public(self.place / "site.key")
        log.write(self.policy, {}, "started", "the site's node starts")

    def facts(self, request: bytes = b"request", spec: str = "spec") -> dict[str, Any]:
        """What the server adds to a request."""
        found: list[Any] = []
        Sealed(lambda **options: found.append(options) or Canned([]), spec, {0: self.key}, self.server.folder)
        facts: dict[str, Any] = found[0]["facts_of"](0, request)
        return facts

    def ask(self, request: bytes = b"request", spec: str = "spec", facts: Any = None) -> str | None:
        """The refusal of a request; if there is none, the site answers, and the server keeps its receipt."""
        seal = SiteSeal(self.place, self.policy)
        refused = seal.refusal(spec, request, self.facts() if facts is None else facts)
        if refused is not None:
            return str(wire.envelope(refused)["error"])
        log.write(self.policy, {}, "resumed", "in place of an answer")
        self.send(seal, spec, request)
        return None

    def send(self, seal: SiteSeal, spec: str = "spec", request: bytes = b"request") -> None:
        """Send a reply, whose receipt the server keeps; it had sent the receipt that it has."""
        arrival = Arrival(0, b"reply", **seal.of(spec, request, b"reply"))
        found: list[Any] = []

        def connect(**options: Any) -> Canned:
            found.append(options)
            return Canned([arrival])

        transport = Sealed(connect, spec, {0: self.key}, self.server.folder)
        found[0]["facts_of"](0, request)
        assert [one.failure for one in transport.exchange(request, [0], lambda _: None)] == [None]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_request_is_answered_only_if_the_server_signed_it_to_this_client(pair: Pair) -> None:
    assert pair.ask() is None
    good = pair.facts()
    stranger = seals.sign_request(seals.server_key(pair.place), 0, "spec", b"request", good["receipt"])
    to_another = seals.sign_request(seals.server_key(pair.server.folder), 1, "spec", b"request", good["receipt"])
    for name, request, spec, facts in (
        ("no signature", b"request", "spec", {"receipt": good["receipt"]}),
        ("another request", b"Request", "spec", good),
        ("another run", b"request", "spec2", good),
        ("another's key", b"request", "spec", {**good, "signature": stranger}),
        ("to another client", b"request", "spec", {**good, "signature": to_another}),
        ("without the receipt", b"request", "spec", {**good, "receipt": ""}),
        ("no hexadecimal", b"request", "spec", {**good, "signature": 7}),
    ):
        refused = pair.ask(request, spec, facts)
        assert refused is not None and "not signed with the key of the server whose invitation" in refused, name
        assert log.read(pair.policy.state)[-1]["what"] == "refused"
    assert pair.ask() is None


def test_an_older_copy_of_the_state_replies_to_nothing_even_after_it_has_gone_on(pair: Pair) -> None:
    state, copy = pair.policy.state, pair.place / "copy"
    assert pair.ask() is None
    shutil.copytree(state, copy)
    assert pair.ask() is None and pair.ask() is None
    newest = pair.place / "newest"
    state.rename(newest)
    shutil.copytree(copy, state)
    log.write(pair.policy, {}, "started", "the site's node starts")  # lines of a stranger to the server's receipt
    for _ in range(5):
        refused = pair.ask()
        assert refused is not None and "is an older copy: its journal lacks line 4" in refused
    verdict = log.verify(state)
    assert not verdict.is_whole and "older copy" in verdict.problems[0]
    assert not evidence.status(pair.policy)["health"]["is_well"]
    shutil.rmtree(state)
    newest.rename(state)
    assert pair.ask() is None and log.verify(state).is_whole


def test_what_was_found_to_be_an_older_copy_stays_one_until_its_newest_line_is_back(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever receipt a server has: an older one from its own backup, or none at all."""
    state, copy, newest = (pair.place / name for name in ("state", "copy", "newest"))
    assert pair.ask() is None
    older = pair.facts()
    shutil.copytree(state, copy)
    assert pair.ask() is None
    shutil.copytree(state, newest)
    shutil.rmtree(state)
    shutil.copytree(copy, state)
    assert "is an older copy: its journal lacks line 3" in str(pair.ask())
    signature = seals.sign_request(seals.server_key(pair.server.folder), 0, "spec", b"request", "")
    for facts in (older, {"signature": signature, "receipt": ""}):
        assert "is an older copy: its journal lacks line 3" in str(pair.ask(facts=facts))
    with pytest.raises(files.Damaged, match="is an older copy"):
        answer.accept(pair.policy, "run", "spec", 1)
    with pytest.raises(SystemExit):
        main(["site", "ledger", str(pair.place)])
    assert "is an older copy" in capsys.readouterr().err
    main(["site", "log", str(pair.place)])
    assert "is an older copy" in capsys.readouterr().err
    shutil.copytree(newest, state, dirs_exist_ok=True)  # as a backup is unpacked: no other file goes
    assert log.verify(state).is_whole and evidence.status(pair.policy)["health"]["journal"] == "whole"
    assert pair.ask() is None and not (state / "newest.receipt").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"7", b"99." + b"a" * 64 + b"." + b"b" * 64])
def test_a_receipt_of_nothing_is_said_with_a_remedy_that_helps(content: bytes, pair: Pair) -> None:
    place = pair.policy.state / "newest.receipt"
    place.write_bytes(content)
    assert "is no receipt of this journal; bring the newest copy back, or delete that file" in str(pair.ask())
    assert "is no receipt" in log.verify(pair.policy.state).problems[0]
    assert "is no receipt" in str(evidence.status(pair.policy)["health"]["journal"])
    place.unlink()
    assert pair.ask() is None


@pytest.mark.parametrize("leaves", [False, True], ids=["another key", "removed and back"])
def test_an_older_copy_is_noticed_under_another_key_too(leaves: bool, pair: Pair) -> None:
    """The server forgot the receipt with the key, so that the copy was believed, and then the newest state refused."""
    place, numbers = pair.server.roster, count(100)

    def flwr(*words: str) -> str:
        return json.dumps({"success": True, "node-id": str(next(numbers))})

    roster.accept(place, 0, pair.key, flwr)
    state, copy, newest = pair.policy.state, pair.place / "copy", pair.place / "newest"
    assert pair.ask() is None
    shutil.copytree(state, copy)
    assert pair.ask() is None
    setup.rekey(pair.place)
    pair.key = public(pair.place / "site.key")
    if leaves:
        roster.remove(place, 0, flwr)
        roster.invite(place, 0, None)
    roster.accept(place, 0, pair.key, flwr, replace=not leaves)
    state.rename(newest)
    shutil.copytree(copy, state)
    refused = pair.ask()
    assert refused is not None and "an older copy" in refused
    shutil.rmtree(state)
    newest.rename(state)
    assert pair.ask() is None and pair.ask() is None


def test_another_site_under_a_number_ignores_the_receipt_of_the_one_before(pair: Pair, tmp_path: Path) -> None:
    assert pair.ask() is None
    other = Pair(tmp_path / "other")
    other.server = pair.server
    setup.join(other.place, pair.server.invite(0, None))
    Receipts(pair.server.folder / seals.RECEIPTS).hand_on([pair.key], other.key)
    assert other.facts()["receipt"] == pair.facts()["receipt"] != ""
    assert other.ask() is None and other.facts()["receipt"] != pair.facts()["receipt"]


def test_a_running_node_signs_with_the_key_of_its_start(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a newer one, that the server had not accepted, each reply was charged and then refused."""
    before = pair.key

    def run_node(options: Sequence[str], *_: object) -> int:
        assert options[-1] == str(pair.place / "node.key") and stat.S_IMODE(Path(options[-1]).stat().st_mode) == 0o600
        setup.rekey(pair.place)
        setup.rekey(pair.place)
        assert pair.ask() is None  # the server has the first key
        return 0

    monkeypatch.setattr("fedstill.engines.flower.node.run_node", run_node)
    assert launcher.serve(pair.place) == 0
    pair.key = public(pair.place / "site.key")
    assert pair.key != before
    monkeypatch.setattr("fedstill.engines.flower.node.run_node", lambda *_: int(pair.ask() is not None))
    assert launcher.serve(pair.place) == 0  # with the new one from its next start


def test_receipts_that_a_server_made_up_are_ignored(pair: Pair) -> None:
    assert pair.ask() is None
    forged = f"99.{'a' * 64}.{'b' * 64}"
    signature = seals.sign_request(seals.server_key(pair.server.folder), 0, "spec", b"request", forged)
    assert pair.ask(facts={"signature": signature, "receipt": forged}) is None
    assert log.verify(pair.policy.state).is_whole


def test_a_long_log_finds_the_line_of_a_receipt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an earlier file, of which no other is read: a server may send the oldest receipt with each request."""
    monkeypatch.setattr(site_journal, "LARGEST", 1000)
    assert pair.ask() is None
    given = pair.facts()
    for _ in range(40):
        log.write(pair.policy, {}, "paused", "")
    number = seals.number_of(given["receipt"])
    later = [p for p in sorted(pair.policy.state.glob("journal-*.jsonl")) if int(p.stem[-9:]) > number]
    assert len(later) > 2
    for place in later[1:-1]:
        place.write_bytes(b"not read")
    assert pair.ask(facts=given) is None


def test_a_crash_between_two_files_hides_no_receipt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.ask() is None
    given = pair.facts()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(site_journal, "LARGEST", 1)
        patch.setattr(chain.Chain, "_begin_file", interrupted)
        log.write(pair.policy, {}, "paused", "")
    assert not (pair.policy.state / "journal.jsonl").exists()
    assert pair.ask(facts=given) is None
    assert log.verify(pair.policy.state).is_whole


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_site_of_an_earlier_invitation_says_what_to_do(pair: Pair) -> None:
    (pair.place / "connection.toml").unlink()
    refused = pair.ask()
    assert refused is not None and "the site has no server ('fedstill site join')" in refused
