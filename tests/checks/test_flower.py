"""Flower's simulation: what goes wrong at clients, and what a run says when Flower can't serve it."""

import gc
import logging
import threading
import tracemalloc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from census import Census  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.app.metadata import Metadata  # noqa: E402
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents  # noqa: E402
from garbage import CLIENT, KINDS, Vandal, check_told, is_sentence, releases  # noqa: E402
from small import Addressed, Probe, SeveralSites, federation, run, site, weights  # noqa: E402

import fedstill
from fedstill.base import errors  # noqa: E402
from fedstill.cli import main  # noqa: E402
from fedstill.engines.flower import apps  # noqa: E402
from fedstill.engines.flower.messages import (  # noqa: E402
    GridTransport,  # noqa: E402
    Pulls,  # noqa: E402
)
from fedstill.engines.flower.payload import content, take_bytes  # noqa: E402
from fedstill.engines.flower.simulation import Simulation  # noqa: E402
from fedstill.engines.server import ServerFederation, TooFewReplies  # noqa: E402
from fedstill.engines.transport import (
    Arrival,  # noqa: E402
    Inline,  # noqa: E402
)
from fedstill.sites.server import serve  # noqa: E402

# ---------------------------------------------------------------------------------------- with a grid of our own making


class Grid:
    """Answers with what it was asked or with what ``behaviour`` says for the node; None is never."""

    def __init__(self, behaviour: Mapping[int, RecordDict | Error | None]) -> None:
        self.behaviour = behaviour
        self.pushed: list[Message] = []
        self.most = 0

    def get_node_ids(self) -> list[int]:
        return list(self.behaviour)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        some = list(messages)
        for number, message in enumerate(some):
            message.metadata.__dict__["_message_id"] = f"{len(self.pushed) + number}"
        self.pushed += some
        return [message.metadata.message_id for message in some]

    def pull_messages(self, ids: Iterable[str]) -> Iterator[Message]:
        asked = list(ids)
        self.most = max(self.most, len(asked))
        for message in [m for m in self.pushed if m.metadata.message_id in asked]:
            what = self.behaviour.get(message.metadata.dst_node_id, message.content)
            if what is None:
                continue
            reply = Message(what, reply_to=message)
            reply.metadata.__dict__["_message_id"] = "r"
            yield reply


@pytest.fixture(autouse=True)
def _a_run() -> None:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def exchange(grid: Any, clients: int, **options: Any) -> list[Any]:
    sent: list[int] = []
    nodes = {client: 100 + client for client in range(clients)}
    transport = GridTransport(grid, nodes, **{"window": 4, **options})
    arrivals = list(transport.exchange(b"what?", range(clients), sent.append))
    assert sorted(sent) == list(range(clients))
    assert sorted(a.client for a in arrivals) == list(range(clients))
    return sorted(arrivals)


def test_every_client_gets_the_bytes_and_no_more_than_a_window_are_on_their_way() -> None:
    grid = Grid({})
    assert all(a.reply == b"what?" and a.failure is None for a in exchange(grid, 11))
    assert grid.most == 4
    assert [m.content["facts"]["clients"] for m in grid.pushed] == [[client] for client in range(11)]


def test_errors_silence_and_replies_without_our_bytes_are_failures_with_a_reason() -> None:
    behaviour = {101: Error(code=2, reason="out of paper"), 102: None, 103: RecordDict()}
    found = exchange(Grid(behaviour), 5, timeout=0.3)
    assert [a.failure for a in found] == [
        None,
        "Flower reports: out of paper",
        "no reply within 0.3 s (--timeout)",
        "the reply was not made by fedstill",
        None,
    ]


class Stuck(Grid):
    """Node 100 has announced its reply, whose parts do not come: the call that fetches it waits."""

    def __init__(self, clients: int) -> None:
        super().__init__({100 + client: content(b"reply") for client in range(clients)})
        self.freed = threading.Event()

    def pull_messages(self, ids: Iterable[str]) -> Iterator[Message]:
        for reply in super().pull_messages(ids):
            if reply.metadata.src_node_id == 100:
                self.freed.wait(60)
            yield reply


@pytest.mark.slow
def test_a_reply_that_comes_slowly_delays_no_other_and_has_its_time_limit() -> None:
    grid = Stuck(4)
    transport = GridTransport(grid, {i: 100 + i for i in range(4)}, window=4, at_once=1, timeout=2.5)  # type: ignore[arg-type]
    found = [(a.client, a.failure) for a in transport.exchange(b"what?", range(4), lambda _: None)]
    grid.freed.set()
    assert found == [(1, None), (2, None), (3, None), (0, "no reply within 2.5 s (--timeout)")]


@pytest.mark.slow
def test_a_slow_reply_that_is_whole_in_time_is_used() -> None:
    grid = Stuck(2)
    threading.Timer(2.0, grid.freed.set).start()
    found = exchange(grid, 2, at_once=1, timeout=30.0)
    assert [(a.client, a.failure, a.reply) for a in found] == [(0, None, b"reply"), (1, None, b"reply")]


def test_a_reply_that_is_dropped_is_nowhere_else() -> None:
    """A large model would be in memory twice, once for the server and once for who fetched it."""
    grid: Any = Grid({100: content(b"first"), 101: content(b"second")})
    names = grid.push_messages(
        [Message(content(b""), dst_node_id=node, message_type="query.ask") for node in (100, 101)]
    )
    replies = Pulls(grid).pull(names)
    first = weakref.ref(next(replies))
    gc.collect()
    assert first() is None
    assert take_bytes(next(replies)) == b"second"


def test_an_error_while_a_reply_is_fetched_ends_the_run() -> None:
    class Broken(Grid):
        def pull_messages(self, ids: Iterable[str]) -> Iterator[Message]:
            raise ConnectionError("the SuperLink is gone")

    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        exchange(Broken({}), 2, at_once=1)


class Players(Grid):
    """Nodes that play whichever clients a message names, each in ``seconds`` and with a reply of ``size`` bytes."""

    def __init__(self, seconds: float = 0.001, size: int = 5, deadly: int = -1, odd: Any = None) -> None:
        super().__init__({})
        self.seconds = seconds
        self.size = size
        self.deadly = deadly
        self.odd = odd

    @property
    def groups(self) -> list[list[int]]:
        return [list(m.content["facts"]["clients"]) for m in self.pushed]

    def pull_messages(self, ids: Iterable[str]) -> Iterator[Message]:
        for message in [m for m in self.pushed if m.metadata.message_id in list(ids)]:
            clients = list(message.content["facts"]["clients"])
            replies = [f"{client:0{self.size}d}".encode() for client in clients]
            said: Any = {"sizes": [self.size] * len(clients), "seconds": self.seconds * len(clients)}
            if len(clients) > 1 and self.odd is not None:
                said = {**said, "sizes": self.odd}
            what: Any = content(b"".join(replies), **said)
            if self.deadly in clients:
                what = Error(code=1, reason="ActorDiedError")
            reply = Message(what, reply_to=message)
            reply.metadata.__dict__["_message_id"] = "r"
            yield reply


def test_quick_clients_share_messages_and_each_gets_its_own_reply() -> None:
    grid = Players()
    found = exchange(grid, 300, ahead=1000, shared=True)
    assert [a.reply for a in found] == [f"{client:05d}".encode() for client in range(300)]
    assert [len(group) for group in grid.groups[:6]] == [1, 1, 1, 1, 2, 2]  # the first may be quicker than the rest
    assert max(map(len, grid.groups)) <= 300 // (2 * 4)  # nobody who plays clients is left without
    assert len(grid.groups) < 70
    again = Players()
    transport = GridTransport(again, dict.fromkeys(range(300), 1), window=4, ahead=1000, shared=True)  # type: ignore[arg-type]
    for _ in range(5):
        list(transport.exchange(b"what?", range(300), lambda _: None))
    assert len(again.groups[-8:]) == 8 and sum(map(len, again.groups[-8:])) == 300  # it remembers


@pytest.mark.parametrize(
    "slow", [{"seconds": 0.06}, {"size": 3 << 20}, {"options": {"timeout": 5.0}}, {"options": {"shared": False}}]
)
def test_clients_with_work_to_do_much_to_say_or_a_deadline_get_a_message_each(slow: dict[str, Any]) -> None:
    options = {"shared": True, "ahead": 1000, **slow.pop("options", {})}
    grid = Players(**slow)
    exchange(grid, 24, **options)
    assert grid.groups == [[client] for client in range(24)]


def test_one_that_ends_the_process_of_those_it_shares_with_is_the_only_one_left_out() -> None:
    grid = Players(deadly=77)
    found = exchange(grid, 200, ahead=1000, shared=True)  # which also sees that no request is counted twice
    assert [a.client for a in found if a.failure] == [77]
    assert found[77].failure == "its process ended; out of memory?"
    assert sorted(a.reply for a in found if not a.failure) == [f"{n:05d}".encode() for n in range(200) if n != 77]
    assert [77] in grid.groups


@pytest.mark.parametrize("odd", [[5], [], [5] * 99, ["five"]])
def test_a_shared_reply_that_cannot_be_told_apart_is_refused(odd: Any) -> None:
    found = exchange(Players(odd=odd), 60, ahead=1000, shared=True)
    assert {a.failure for a in found} == {None, "the reply was not made by fedstill"}


ARRAY = Array(dtype="uint8", shape=(5,), stype="fedstill", data=b"what?")
LOUD = "\x1b[31m\r\n\x07" * 150_000
ODD: dict[str, RecordDict | Error] = {
    "nothing": RecordDict(),
    "another record": RecordDict({"reply": ArrayRecord({"0": ARRAY})}),
    "an array of another name": RecordDict({"message": ArrayRecord({"weights": ARRAY})}),
    "a piece missing": RecordDict({"message": ArrayRecord({"0": ARRAY, "2": ARRAY})}),
    "an empty record": RecordDict({"message": ArrayRecord({})}),
    "settings": RecordDict({"message": ConfigRecord({"0": b"what?"})}),
    "numbers": RecordDict({"message": MetricRecord({"0": 1})}),
    "an error": Error(code=7, reason=LOUD),
    "an error without a reason": Error(code=7),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_message_of_ours_is_refused_in_a_sentence(what: str) -> None:
    found = exchange(Grid({101: ODD[what]}), 3)
    assert [a.failure is None for a in found] == [True, False, True]
    assert is_sentence(found[1].failure), found[1].failure[:200]
    assert found[1].reply == b""


def facts(**values: Any) -> RecordDict:
    return RecordDict({"facts": ConfigRecord(values)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [
        *ODD.values(),
        facts(client=7),
        facts(client=-1),
        facts(client=True),
        facts(client=1.0),
        facts(client=LOUD),
        facts(client=[1]),
        facts(error=LOUD),
        facts(error=1),
        facts(client=0),
    ],
)
def test_a_node_that_says_something_odd_of_itself_is_left_out_in_a_sentence(
    odd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Grid({1: content(b"mine", client=0), 2: odd})
    sites = apps.SiteTransport(grid, "terms", 2, wait=0.3)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fedstill"):
        found = sorted(sites.exchange(b"what?", [0, 1], lambda _: None))
    assert found == [Arrival(0, b"mine", None), Arrival(1, b"", "no site replies for it")]
    assert len(caplog.messages) >= 2
    assert all(map(is_sentence, caplog.messages))


def test_a_client_that_is_met_in_the_last_moment_is_not_called_missing(caplog: pytest.LogCaptureFixture) -> None:
    grid = Grid({1: content(b"mine", client=0)})
    sites = apps.SiteTransport(grid, "terms", 1, wait=0.0)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fedstill"):
        assert list(sites.exchange(b"what?", [0], lambda _: None)) == [Arrival(0, b"mine", None)]
    assert caplog.messages == []


def test_a_site_of_a_newer_or_odd_version_is_named(caplog: pytest.LogCaptureFixture) -> None:
    versions = {1: "99.9.9", 2: fedstill.__version__, 3: LOUD}
    grid = Grid({node: content(b"mine", client=node - 1, version=said) for node, said in versions.items()})
    sites = apps.SiteTransport(grid, "terms", 4, wait=0.3)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fedstill"):
        assert len(list(sites.exchange(b"what?", [0, 1, 2], lambda _: None))) == 3
    said = [message for message in caplog.messages if "runs fedstill" in message]
    assert len(said) == 2 and all(map(is_sentence, said))
    assert f"client 0 runs fedstill 99.9.9, and this server {fedstill.__version__}; upgrade" in "".join(said)


def test_a_site_of_an_older_version_waits_until_it_is_upgraded(caplog: pytest.LogCaptureFixture) -> None:
    grid = Grid({1: content(b"mine", client=0, version="0.9.7"), 2: content(b"mine", client=1)})
    sites = apps.SiteTransport(grid, "terms", 2, wait=0.3)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fedstill"):
        found = sorted(sites.exchange(b"what?", [0, 1], lambda _: None))
    assert found == [Arrival(0, b"", "no site replies for it"), Arrival(1, b"mine", None)]
    assert f"client 0 runs fedstill 0.9.7, older than this server's {fedstill.__version__}: it waits" in caplog.text
    grid.behaviour = {1: content(b"mine", client=0, version=fedstill.__version__), 2: content(b"mine", client=1)}
    assert sorted(sites.exchange(b"what?", [0, 1], lambda _: None)) == [Arrival(0, b"mine", None), found[1]]


@pytest.mark.parametrize(
    ("one", "other", "older"),
    [
        ("1.0.0", "1.1.0", True),
        ("1.9.0", "1.10.0", True),
        ("1.9.0", "2.0.0", True),
        ("1.0.0", "1.0.9", False),
        ("1.1.0", "1.0.0", False),
        ("1.0.0", "x.y", False),
        ("1.0.0", "", False),
    ],
)
def test_an_older_version_has_a_smaller_minor_number(one: str, other: str, older: bool) -> None:
    assert apps.is_older(one, other) is older


def test_a_node_tells_its_operator_of_a_newer_server() -> None:
    told, kind = list[str](), f"query.{apps.HELLO}"
    app = apps.client_app(lambda *_: 3, lambda *_: b"", older=told.append)
    for version in ("99.0.0", fedstill.__version__):
        hello = Message(content(b"", run=0, version=version), metadata=Metadata(7, "", 1, 5, "", "", 0.0, 60.0, kind))
        reply = app(hello, Context(1, 1, {}, RecordDict(), {}))
        assert reply.content.config_records["facts"]["client"] == 3
    assert told == ["99.0.0"]


def test_a_client_is_only_heard_from_the_node_that_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Node 1 was there first and claims to be client 0, node 3 is in no list; node 2 is client 0."""
    grid = Grid({node: content(f"{node}".encode(), client=0) for node in (1, 3, 2)})
    before = apps.SiteTransport(grid, "terms", 2, wait=0.3)  # type: ignore[arg-type]
    assert sorted(before.exchange(b"what?", [0], lambda _: None)) == [Arrival(0, b"1", None)]
    grid.pushed.clear()
    bound = apps.SiteTransport(grid, "terms", 2, wait=0.3, nodes={0: 2, 1: 1})  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fedstill"):
        found = sorted(bound.exchange(b"what?", [0, 1], lambda _: None))
    assert found == [Arrival(0, b"2", None), Arrival(1, b"", "no site replies for it")]
    assert "node 1 is ignored: it claims to be client 0, but belongs to client 1 (nodes)" in caplog.messages
    assert {message.metadata.dst_node_id for message in grid.pushed} == {1, 2}


@pytest.mark.slow
def test_a_site_whose_greeting_comes_after_all_who_were_missing_is_there_for_the_next_request() -> None:
    """As when a run is resumed for one client's reply, and goes on with all."""
    grid = Grid({100: None, 101: content(b"mine", client=1)})
    sites = apps.SiteTransport(grid, "terms", 2, wait=2.0)  # type: ignore[arg-type]
    assert list(sites.exchange(b"what?", [1], lambda _: None)) == [Arrival(1, b"mine", None)]
    grid.behaviour = {100: content(b"mine", client=0), 101: content(b"mine", client=1)}
    both = [Arrival(0, b"mine", None), Arrival(1, b"mine", None)]
    assert sorted(sites.exchange(b"what?", [0, 1], lambda _: None)) == both


def test_a_site_that_greets_twice_ends_no_run() -> None:
    class Twice(Grid):
        def pull_messages(self, ids: Iterable[str]) -> Iterator[Message]:
            for reply in list(super().pull_messages(ids)):
                yield from (reply, reply)

    sites = apps.SiteTransport(Twice({1: content(b"mine", client=0)}), "terms", 1, wait=2.0)  # type: ignore[arg-type]
    assert list(sites.exchange(b"what?", [0], lambda _: None)) == [Arrival(0, b"mine", None)]


@pytest.mark.slow
def test_a_site_that_never_ends_its_greeting_holds_up_nobody() -> None:
    grid = Stuck(3)
    grid.behaviour = {100 + client: content(b"mine", client=client) for client in range(3)}
    sites = apps.SiteTransport(grid, "terms", 3, wait=2.0)  # type: ignore[arg-type]
    found = list(sites.exchange(b"what?", [0, 1, 2], lambda _: None))
    grid.freed.set()
    assert found == [Arrival(0, b"", "no site replies for it"), Arrival(1, b"mine", None), Arrival(2, b"mine", None)]


@pytest.mark.parametrize("text", ["0:1", "0:1,1:1", "0:1,1", "0:1,1:x", "0:1;1:2", "0:1,1:-2", "a\nb", "0:1,1:2,"])
def test_a_list_of_nodes_that_fits_no_clients_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("method: fedavg\ndata: digits\nclients: 2\n")
    settings = {"file": str(file), "out": str(tmp_path / "out"), "nodes": text}
    with pytest.raises(ValueError, match="it must give each of the clients 0 to 1 one node of its own") as error:
        serve.serve(lambda *_, **__: pytest.fail("connected"), settings)
    assert is_sentence(str(error.value))
    assert not (tmp_path / "out").exists()


def test_a_run_says_whose_node_each_client_is(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("method: fedavg\ndata: digits\nclients: 2\n")
    with pytest.raises(ValueError, match="neither roster nor nodes, so any registered key could answer"):
        serve.serve(lambda *_, **__: pytest.fail("connected"), {"file": str(file), "out": str(tmp_path / "out")})


def test_a_reply_of_another_node_or_a_second_one_is_not_used() -> None:
    class Echoing(Grid):
        """Gives each reply twice, node 101's in the name of node 100."""

        def pull_messages(self, ids: Any) -> Any:
            for reply in list(super().pull_messages(ids)):
                if reply.metadata.src_node_id == 101:
                    reply.metadata.__dict__["_src_node_id"] = 100
                yield from (reply, reply)

    found = exchange(Echoing({}), 2)
    assert found[0].failure is None
    assert (found[1].reply, found[1].failure) == (b"", "another node replied for it")


def test_the_word_of_flower_s_server_that_a_node_is_gone_is_passed_on() -> None:
    class Gone(Grid):
        """Replies for node 101 as Flower's server does: in its own name, with an error."""

        def pull_messages(self, ids: Any) -> Any:
            for reply in super().pull_messages(ids):
                if reply.metadata.src_node_id == 101:
                    (asked,) = [m for m in self.pushed if m.metadata.message_id == reply.metadata.reply_to_message_id]
                    reply = create_message_error_unavailable_res_message(asked.metadata, "node_unavail")
                yield reply

    found = exchange(Gone({}), 2)
    assert found[0].failure is None
    assert found[1].failure is not None and "Node Unavailable" in found[1].failure


def test_a_list_of_nodes_may_know_more_than_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("method: fedavg\ndata: digits\nclients: 2\nmodel: convnet:width=4,depth=1\nfedavg:\n  rounds: 1\n")
    found: list[Any] = []

    def connect(*_: Any, **options: Any) -> Any:
        found.append(options["nodes"])
        raise KeyboardInterrupt

    for text in ("0:11, 1:12 ,5:13", "any"):
        with pytest.raises(KeyboardInterrupt):
            serve.serve(connect, {"file": str(file), "out": str(tmp_path / "out"), "nodes": text})
    assert found == [{0: 11, 1: 12}, None]


@pytest.mark.slow
def test_a_large_message_costs_its_receiver_twice_its_bytes() -> None:
    """Through Flower's own taking apart and putting together; in one array it holds them three times."""
    data = torch.randint(256, (64 << 20,), dtype=torch.uint8).numpy().tobytes() + b"its end"
    message = Message(content(data, client=1), dst_node_id=1, message_type="query.ask")
    pulled = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
    size = sum(map(len, pulled.values()))
    assert len(data) <= size < 1.001 * len(data) + 10_000
    assert len(pulled) > 16
    name = message.object_id
    del message
    gc.collect()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()  # what was pulled is not traced: that is one time
        built = inflate_object_from_contents(name, pulled)
        assert isinstance(built, Message)
        assert take_bytes(built) == data
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.1 * len(data)  # while one time was freed bit by bit
    assert take_bytes(built) == b""  # and Flower's objects hold nothing more


def test_equal_arrays_do_not_make_a_small_message_a_giant() -> None:
    """Flower sends equal arrays once, so a few bytes on the wire can be gigabytes when they are joined."""
    piece = Array(dtype="uint8", shape=(1 << 20,), stype="fedstill", data=bytes(1 << 20))
    bomb = RecordDict({"message": ArrayRecord({str(number): piece for number in range(4000)})})
    tracemalloc.start()
    try:
        grid: Any = Grid({100: bomb})
        (arrival,) = exchange(grid, 1, max_bytes=10 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "the message has 4,194,304,000 bytes; the limit is 10,485,760" in arrival.failure
    assert peak < 100 << 20


def test_a_simulation_that_ends_ends_the_run() -> None:
    grid: Any = Grid({0: None})
    transport = GridTransport(grid, {0: 0}, window=1, failed=lambda: "the power is out")
    with pytest.raises(RuntimeError, match="ended early: the power is out"):
        list(transport.exchange(b"", [0], lambda _: None))


# -------------------------------------------------------------------------------------------------- with the real one


@pytest.mark.slow
def test_clients_that_raise_sleep_or_die_are_left_out(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedstill.engines.flower.messages._SHARED", 60.0
    )  # seconds, so that clients are quick however busy the machine is
    wrong = {"well": {}, "raise": {1: "raise"}, "die": {2: "die"}}
    sites = {name: site(Probe(misbehave=how), digits.train, tmp_path / name / "clients") for name, how in wrong.items()}
    sites["many"] = site(Probe(rounds=3), digits.train, tmp_path / "many" / "clients", 40)
    expected, _ = run(Probe(), digits, tmp_path / "inline")
    of_many, alone = run(Probe(rounds=3), digits, tmp_path / "inline-many", clients=40)
    with Simulation(partial(SeveralSites, sites), 40, workers=2) as transport:  # type: ignore[arg-type]

        def server(name: str, **options: Any) -> ServerFederation:
            method, way = Probe(misbehave=wrong.get(name, {})), Addressed(transport, name)
            fed: ServerFederation = federation(method, way, digits, tmp_path / name, **options)
            return fed

        fed = server("raise", min_clients=3)
        Probe(misbehave=wrong["raise"]).server(fed)
        assert {(r.client, "abacus" in r.reason) for r in fed.journal.refusals()} == {(1, True)}
        with pytest.raises(TooFewReplies, match="client 2: its process ended"):
            Probe(misbehave=wrong["die"]).server(server("die"))
        assert weights(Probe().server(server("well"))) == weights(expected)  # the actors are still there
        fed = server("many", num_clients=40)
        assert weights(Probe(rounds=3).server(fed)) == weights(of_many)
        assert max(pace.sharing for pace in transport.grid.paces.values()) > 2  # in one message, as they are quick
        assert (fed.journal.bytes_up, fed.journal.bytes_down) == (alone.journal.bytes_up, alone.journal.bytes_down)
    assert not any(thread.name.startswith("fedstill") for thread in threading.enumerate())


@pytest.mark.slow
def test_the_command_runs_it_and_says_what_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run real --data digits --clients 2 --model convnet:width=8,depth=2 --ipc 1 --training.epochs 1".split()
    main([*words, "--engine", "flower", "--workers", "1", "--out", str(tmp_path / "a")])
    assert not any(thread.name.startswith("fedstill") for thread in threading.enumerate())  # it ended when it was told
    main([*words, "--workers", "0", "--out", str(tmp_path / "b")])
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--engine", "flower", "--gpus-per-client", "7", "--out", str(tmp_path / "c")])
    assert stopped.value.code == 2
    assert "a client needs 1 CPUs and 7 GPUs; there are only" in capsys.readouterr().err


def test_without_flower_there_is_a_sentence(
    digits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'flwr'", name="flwr")

    monkeypatch.setattr("fedstill.experiment.run.importlib.import_module", missing)
    words = "run real --data digits --clients 2 --model convnet:width=8,depth=2 --engine flower --out".split()
    with pytest.raises(SystemExit) as stopped:
        main([*words, str(tmp_path / "a")])
    assert stopped.value.code == 2
    assert not (tmp_path / "a").exists()
    assert errors.install("flower") in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- garbage


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_garbage_is_refused_in_a_sentence(kind: str, digits: Any, tmp_path: Path) -> None:
    method = Probe(rounds=1)
    vandal: Any = Vandal(site(method, digits.train, tmp_path), [KINDS[kind]])
    fed = federation(method, Inline(vandal), digits, tmp_path, min_clients=3)
    method.server(fed)
    (refusal,) = fed.journal.refusals()
    assert refusal.client == CLIENT
    assert is_sentence(refusal.reason), refusal.reason[:200]


@pytest.mark.parametrize(
    "made_up",
    [
        {"event": {"kind": "gaussian", "noise_multiplier": 1e-300}},
        {"event": {"kind": "gaussian", "noise_multiplier": 1e-6}},
        {"event": {"kind": "gaussian", "noise_multiplier": 1e300}},
        {"event": {"kind": "gaussian", "noise_multiplier": 1.0, "count": 10**18}},
        {"event": {"kind": "gaussian", "noise_multiplier": 1.0, "count": 10**400}},
        {"theorem": "\x1b[31m\r\n" * 100},
    ],
)
def test_releases_that_a_client_makes_up_neither_end_the_run_nor_reach_the_screen(
    made_up: Any, digits: Any, tmp_path: Path
) -> None:
    vandal: Any = Vandal(site(Census(), digits.train, tmp_path), [partial(releases, **made_up)])
    fed = federation(Census(), Inline(vandal), digits, tmp_path, min_clients=3)
    Census().server(fed)
    assert fed.guarantee().reason.isprintable()


@pytest.mark.slow
def test_a_run_in_which_one_client_sends_garbage_is_the_run_without_that_client(digits: Any, tmp_path: Path) -> None:
    method = Probe(rounds=len(KINDS))
    silent = Probe(rounds=len(KINDS), misbehave={CLIENT: "raise"})
    expected, _ = run(silent, digits, tmp_path / "without", min_clients=3)
    with Simulation(partial(Vandal, site(method, digits.train, tmp_path)), 4, workers=2) as transport:  # type: ignore[arg-type]
        fed = federation(method, transport, digits, tmp_path / "garbage", min_clients=3)
        model = method.server(fed)
    found = fed.journal.refusals()
    assert [(r.client, r.round) for r in found] == [(CLIENT, i) for i in range(1, len(KINDS) + 1)]
    check_told(KINDS, [r.reason for r in found])
    assert weights(model) == weights(expected)
