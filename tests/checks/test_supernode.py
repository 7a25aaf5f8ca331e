"""A server whose messages are too large, endless, redirected or broken: a site's SuperNode takes none and goes on."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
import httpx  # noqa: E402
from flwr.app import Array, ArrayRecord, Message, RecordDict  # noqa: E402
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.app.metadata import Metadata  # noqa: E402
from flwr.common.constant import ErrorCode, SubStatus  # noqa: E402
from flwr.proto.fleet_pb2 import PullMessagesRequest  # noqa: E402
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest  # noqa: E402
from flwr.supercore.constant import TaskType  # noqa: E402
from flwr.supercore.date import now  # noqa: E402
from flwr.supercore.fab import Fab  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents  # noqa: E402
from flwr.supercore.object_store import ObjectStoreFactory  # noqa: E402
from flwr.supercore.run import Run, RunNotRunningException  # noqa: E402
from flwr.supernode import fleet_http_connection, start_client_internal  # noqa: E402
from flwr.supernode.nodestate import NodeStateFactory  # noqa: E402

from fedstill.engines.flower import supernode  # noqa: E402
from fedstill.engines.flower.payload import PIECE, content, take_bytes  # noqa: E402
from fedstill.engines.flower.supernode import Budget, Connection, MessageLimits  # noqa: E402

LIMIT, RUN = 3 * PIECE, 7


@pytest.mark.parametrize("program", ["supernode", "superlink", "node"])
def test_programs_that_run_all_the_time_import_no_pytorch(program: str) -> None:
    """It would keep 200 MB of a site's memory, and of the server's."""
    code = f"import sys; import fedstill.engines.flower.{program}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Server:
    """The server's side of a connection: it has one message, and keeps what it is sent."""

    def __init__(self, record: RecordDict, bundle: bytes = b"PK") -> None:
        message = Message(record, metadata=Metadata(RUN, "", 1, 5, "", "", now().timestamp(), 60.0, "query.ask"))
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        self.tree = get_object_tree(message)
        self.message = remove_content_from_message(message)
        self.bundle, self.fails = bundle, ()
        self.replies: list[Message] = []
        self.parts: dict[str, bytes] = {}
        self.confirmed: list[str] = []

    def receive(self) -> tuple[Message, ObjectTree]:
        return self.message, self.tree

    def send(self, message: Message, tree: ObjectTree, seconds: float) -> tuple[set[str], str]:
        self.replies.append(message)
        return {node.object_id for node in supernode.iterate_object_tree(tree)}, "session"

    def get_run(self, number: int) -> Run:
        run = Run.create_empty(number)
        run.fab_id, run.primary_task_type, run.override_config = "x" * 1000, TaskType.AGENT_APP, {"x": "x" * 1000}
        return run

    def pull(self, run: int, name: str) -> bytes:
        return self.objects[name]

    def connect(self, budget: Budget, notes: list[Any]) -> Connection:
        def push(run: int, session: str, name: str, data: bytes) -> None:
            self.parts[name] = data

        def pull(run: int, name: str) -> bytes:
            data = self.pull(run, name)
            budget.take(len(data))  # as the client does while it reads
            return data

        inner = (
            *(5, self.receive, self.send, self.get_run, lambda name, run: Fab("f" * 64, self.bundle, {"a": "b"})),
            *(pull, push, lambda run, name: self.confirmed.append(name)),
        )
        return Connection(inner, MessageLimits(LIMIT, b"too large", lambda *words: notes.append(words)), budget)


def exchanged(server: Server) -> tuple[Any, Connection, list[Any]]:
    notes: list[Any] = []
    connection = server.connect(Budget(), notes)
    return connection.functions[1](), connection, notes


def array(data: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype="fedstill", data=data)


def test_a_request_within_the_limit_is_taken_and_its_run_has_no_configuration() -> None:
    server = Server(content(bytes(LIMIT), spec="x"))
    found, connection, notes = exchanged(server)
    assert found == (server.message, server.tree)
    assert notes == server.replies == []
    _, _, _, get_run, get_fab, pull, _, confirm = connection.functions
    assert {name: pull(RUN, name) for name in server.objects} == server.objects
    run = get_run(RUN)
    assert (run.fab_id, run.override_config, run.primary_task_type) == ("", {}, TaskType.SERVER_APP)
    assert get_fab(run.fab_hash, RUN).content == b"PK"
    confirm(RUN, server.message.metadata.message_id)
    with pytest.raises(KeyError):  # its parts are kept no longer
        pull(RUN, next(iter(server.objects)))


def random(size: int) -> bytes:
    import random as rng

    return rng.Random(0).randbytes(size)  # pieces that differ, so that each crosses


def many() -> Server:
    return Server(RecordDict({"message": ArrayRecord({str(n): array(n.to_bytes(4, "big")) for n in range(100)})}))


def without_end() -> Server:
    """A tree of 40 nodes, from which Flower would make one of 2^13."""
    server = Server(content(b"x"))
    node = ObjectTree(object_id="0" * 64)
    for level in range(1, 14):
        names = [f"{level - 1:x}" * 64] * 2
        last = ObjectTree(object_id=names[1])
        node = ObjectTree(object_id=f"{level:x}" * 64, children=[node, last])
    server.tree = node
    return server


def repeated() -> Server:
    """A piece that stands a thousand times in an array."""
    server = Server(content(bytes(PIECE)))
    name = next(name for name, data in server.objects.items() if data.startswith(b"Array "))
    head, body = server.objects[name].split(b"\x00", 1)
    server.objects[name] = head + b"\x00" + body.replace(b"[0]", b"[" + b"0, " * 999 + b"0]")
    return server


def missing() -> Server:
    server = Server(content(b"x"))
    server.objects.popitem()
    return server


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: Server(content(random(2 * LIMIT))), "more than"),
        (lambda: Server(content(b"", spec="x" * 5 * 2**20)), "an object of kind 'ConfigRecord' has"),
        (lambda: Server(content(b""), bundle=bytes(10**6)), "the bundle has 1,000,000 bytes"),
        (many, "the message has more than 76 objects"),
        (without_end, "two lists of children"),
        (repeated, "several pieces"),
        (missing, "KeyError"),
    ],
)
def test_another_message_gets_the_constant_reply_at_once(made: Callable[[], Server], why: str) -> None:
    server = made()
    found, _, notes = exchanged(server)
    assert found is None
    ((run, detail, _),) = notes
    assert run == RUN
    assert why in detail
    (sent,) = server.replies
    reply = inflate_object_from_contents(sent.object_id, dict(server.parts))
    assert isinstance(reply, Message)
    assert reply.metadata.reply_to_message_id == server.message.metadata.message_id
    assert take_bytes(reply) == b"too large"
    assert server.confirmed == [server.message.metadata.message_id]


def test_a_node_outlives_a_failing_connection_but_hears_that_a_run_has_stopped() -> None:
    server = Server(content(b"x"))
    server.receive = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert exchanged(server)[0] is None
    server = Server(content(b"x"))

    def stopped(number: int) -> Run:
        raise RunNotRunningException

    server.get_run = stopped  # type: ignore[method-assign]
    with pytest.raises(RunNotRunningException):
        exchanged(server)


@contextmanager
def superlink(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[supernode.BoundedClient]:
    """A client of a server that sends what ``answer`` writes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            try:
                answer(self)
            except OSError:  # the client has heard enough
                pass

        def log_message(self, *_: object) -> None:
            pass

    class Client(supernode.BoundedClient):
        of = Budget()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Client.from_server_address(f"127.0.0.1:{server.server_port}", True, None, []) as client:
            yield client
        server.shutdown()


def test_an_endless_response_is_read_up_to_the_limit_only() -> None:
    sent: list[int] = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(1 << 16))
            sent.append(1 << 16)

    with superlink(endless) as client:
        client.of.start(LIMIT)
        with pytest.raises(supernode.TooLarge, match="more than 6,291,456 bytes"):
            client.PullObject(PullObjectRequest())
        with pytest.raises(supernode.TooLarge, match="more than 6,291,456 bytes"):
            client.PullObject(PullObjectRequest())  # nothing is left for another object of the message
        with pytest.raises(supernode.TooLarge, match="more than 4,194,304 bytes"):
            client.PullMessages(PullMessagesRequest())
    assert sum(sent) < 10 * LIMIT  # what the machine's buffers take


def test_a_response_that_announces_too_much_is_not_read() -> None:
    def announced(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(10**12))
        handler.end_headers()  # and nothing follows

    with superlink(announced) as client:
        client.of.start(LIMIT)
        with pytest.raises(supernode.TooLarge, match="more than 6,291,456 bytes"):
            client.PullObject(PullObjectRequest())


def test_a_compressed_response_is_not_unpacked() -> None:
    def packed(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-encoding", "gzip")
        handler.end_headers()

    with superlink(packed) as client, pytest.raises(supernode.TooLarge, match="compressed"):
        client.PullMessages(PullMessagesRequest())


@pytest.mark.slow
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_node_is_not_sent_to_another_address_of_the_site_s_network(status: int) -> None:
    reached: list[str] = []

    def elsewhere(handler: BaseHTTPRequestHandler) -> None:
        reached.append(handler.path)
        handler.send_response(status)
        handler.send_header("location", "/inner")
        handler.end_headers()

    with superlink(elsewhere) as client, pytest.raises(httpx.HTTPStatusError):
        client.PullMessages(PullMessagesRequest())
    assert reached == ["/v1/fleet/pull-messages"]


@pytest.mark.parametrize("taken", [False, True])
def test_a_message_whose_program_failed_gets_an_error_and_not_a_wait_for_ever(taken: bool) -> None:
    """Flower's SuperNode takes no other message until there is a reply."""
    state = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    state.set_node_id(5)
    state.store_run(Run.create_empty(RUN))
    task = state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN, fab_hash="f" * 64)
    assert task is not None
    state.store_message(Server(content(b"x")).message)
    if taken:
        state.get_messages_legacy(is_reply=False)
    assert state.finish_task(task, sub_status=SubStatus.FAILED, details="")
    supernode.wait_for_tasks(state, state.object_store)
    (reply,) = state.get_messages_legacy(is_reply=True)
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED


@pytest.mark.parametrize("sent", [0, 1, None])
def test_a_reply_whose_program_was_killed_while_it_sent_it_is_not_waited_for(sent: int | None) -> None:
    """Flower's SuperNode would wait for the rest for ever, and the server for minutes; a whole one goes out."""
    state = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    state.set_node_id(5)
    state.store_run(Run.create_empty(RUN))
    asked = Server(content(b"x")).message
    state.store_message(asked)
    state.get_messages_legacy(is_reply=False)
    reply = Message(content(b"y"), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = name = reply.object_id
    parts = get_all_nested_objects(reply)
    session = state.start_session(RUN)
    state.store_message_and_object_tree(remove_content_from_message(reply), get_object_tree(reply), session)
    for part in list(parts)[:sent]:
        state.object_store.put(part, parts[part].deflate())
    supernode.wait_for_tasks(state, state.object_store)
    (found,) = state.get_messages_legacy(is_reply=True)
    if sent is None:
        assert found.metadata.message_id == name and not found.has_error()
    else:
        assert found.error.code == ErrorCode.CLIENT_APP_CRASHED
        assert all(state.object_store.get(part) is None for part in parts)


def test_what_is_replaced_in_flower_is_what_it_uses() -> None:
    used = start_client_internal.start_client_internal.__code__.co_names
    assert {"_pull_and_store_message", "_push_messages"} <= set(used)
    assert "http_request_response" in start_client_internal._init_connection.__wrapped__.__code__.co_names
    assert "get_fused_config_from_fab" in start_client_internal._pull_and_store_message.__code__.co_names
    assert "FleetHttpClient" in fleet_http_connection.http_request_response.__wrapped__.__code__.co_names
