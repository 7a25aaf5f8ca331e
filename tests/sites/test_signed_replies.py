"""A reply is a client's because its key says so, whatever Flower believes of the sender."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fedstill.engines.transport import Arrival, Transport
from fedstill.sites import certificates
from fedstill.sites.certificates import has_signed, sign_reply, site_key

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from flwr.app import Context, Message, RecordDict  # noqa: E402
from flwr.app.metadata import Metadata  # noqa: E402

from fedstill.engines.flower import apps  # noqa: E402
from fedstill.engines.flower.messages import _arrivals, content  # noqa: E402
from fedstill.sites.server.serve import Signed  # noqa: E402

REFUSED = "its reply is not signed with its key, which the roster has"


class Canned(Transport):
    """Replies of a network."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.arrivals, self.is_closed = arrivals, False

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        yield from self.arrivals

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    return [site_key(tmp_path / f"site-{client}.key", client).with_suffix("") for client in range(2)]


def public(key: Path) -> str:
    return certificates.read_public(key.with_name(f"{key.name}.pub").read_text())


def test_a_forged_reply_is_refused(keys: list[Path]) -> None:
    mine, theirs = keys
    good = sign_reply(mine, "spec", b"request", b"reply")
    known = {0: public(mine), 1: public(theirs)}
    for name, arrival, passes in (
        ("its own", Arrival(0, b"reply", signature=good), True),
        ("without a signature", Arrival(0, b"reply"), False),
        ("of another client", Arrival(0, b"reply", signature=sign_reply(theirs, "spec", b"request", b"reply")), False),
        ("for another client", Arrival(1, b"reply", signature=good), False),
        ("another reply", Arrival(0, b"Reply", signature=good), False),
        ("of another request", Arrival(0, b"reply", signature=sign_reply(mine, "spec", b"earlier", b"reply")), False),
        ("of another run", Arrival(0, b"reply", signature=sign_reply(mine, "other", b"request", b"reply")), False),
        ("no hexadecimal", Arrival(0, b"reply", signature="x" * 96), False),
    ):
        (found,) = Signed(Canned([arrival]), "spec", known).exchange(b"request", [0, 1], lambda _: None)
        assert found == (arrival if passes else Arrival(arrival.client, b"", REFUSED, arrival.signature)), name
    late = Arrival(0, b"", "no reply within 1 s (--timeout)")
    inner = Canned([late])
    transport = Signed(inner, "spec", known)
    assert list(transport.exchange(b"request", [0], lambda _: None)) == [late]
    transport.close()
    assert inner.is_closed
    assert not has_signed(public(mine), good, "spec", b"requestreply", b"")


@pytest.mark.parametrize("fails", [False, True])
def test_a_site_signs_what_it_sends_also_that_it_sends_nothing(fails: bool, keys: list[Path]) -> None:
    def answer(*_: object) -> bytes:
        if fails:
            raise ValueError("a reason")
        return b"the reply"

    def sign(spec: str, request: bytes, reply: bytes) -> str:
        return sign_reply(keys[0], spec, request, reply)

    app = apps.client_app(lambda *_: 0, answer, sign=sign)
    asked = content(b"a request", clients=[0], **{apps.SPEC: "the spec"})
    facts = Metadata(1, "m", 0, 7, "", "", 0.0, 60.0, "query.ask")
    message = Message(content=asked, metadata=facts)
    reply = app(message, Context(1, 7, {}, RecordDict(), {}))
    reply.metadata.__dict__["_src_node_id"] = 7
    (arrival,) = _arrivals([0], reply, 10**6)
    assert arrival.reply == (apps.NO_REPLY if fails else b"the reply")
    assert has_signed(public(keys[0]), arrival.signature, "the spec", b"a request", arrival.reply)
