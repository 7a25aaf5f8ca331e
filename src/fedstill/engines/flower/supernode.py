"""The program of a site's SuperNode: it takes messages within the site's limit, and outlives whatever else is sent.

Flower's SuperNode has no limit. It would read a message of any size into its memory, follow a redirection to any
address that the site can reach, end its work at a malformed response, and wait for ever for a reply that no program
will send. `main` gives it a client and a connection with limits. The functions of Flower that it replaces are not
documented; tests/checks/test_supernode.py pins them. PyTorch is not imported here, as this program runs all the time.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

import httpx
from flwr.app import Array, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import Status
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_head_values_from_object_content,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import Run
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR
from typing_extensions import override

from fedstill.engines.flower.payload import PIECE, TooLarge, content

_GRACE = 10.0
"""Seconds to end in order; a SuperNode whose server is away would try to tell it for ever."""


def end_with_parent(parent: int) -> None:
    """End this process when its parent, with the id ``parent``, has ended, perhaps before this call."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)


_FEW = 64
"""Largest number of objects of a message beside those of its pieces, of which each has two."""
_OTHER = 4 << 20
"""Largest size in bytes of an object that is no piece of a request, and of every other response."""
_BUNDLE = 1 << 17
"""Largest size in bytes of a bundle, which the SuperNode keeps in memory; fedstill's has about 1 kB."""
_PULL = "/v1/fleet/pull-object"
_POLL = 0.5
"""Seconds between two looks for a reply, as in Flower."""


class MessageLimits(NamedTuple):
    """Limits of a message to the SuperNode, and the reply to one that it does not take.

    Attributes:
        request: largest number of bytes of a request.
        refusal: the reply to a larger one.
        note: called with a run's id, a sentence, and the SHA-256 of a bundle that was too large.
    """

    request: int
    refusal: bytes
    note: Callable[[int, str, str | None], None]


def main() -> None:
    """Run the SuperNode.

    The words are the parent's process id, a limit and a reply (`MessageLimits`), a pipe's descriptor, and Flower's
    options.
    """
    parent, request, refusal, pipe, *options = sys.argv[1:]
    end_with_parent(int(parent))
    notes = os.fdopen(int(pipe), "w", buffering=1)

    def note(run: int, detail: str, bundle: str | None) -> None:
        print(json.dumps({"run": run, "detail": detail[:500], "bundle": bundle}), file=notes)

    sys.argv = ["flower-supernode", *options]
    guard(MessageLimits(int(request), b64decode(refusal), note))
    flower_supernode()
    os._exit(1)  # its other thread would keep the process, without a connection


def guard(limits: MessageLimits) -> None:
    """Let this process's SuperNode keep to limits."""
    node: Any = start_client_internal
    connections: Any = fleet_http_connection
    budget, connect, push = Budget(), node.http_request_response, node._push_messages

    class Client(BoundedClient):
        of = budget

    @contextmanager
    def guarded(*words: Any) -> Iterator[tuple[Any, ...]]:
        with connect(*words) as connection:
            yield Connection(connection, limits, budget).functions

    def reply(state: Any, object_store: Any, **more: Any) -> None:
        wait_for_tasks(state, object_store)
        push(state=state, object_store=object_store, **more)

    connections.FleetHttpClient = Client
    node.http_request_response = guarded
    node.get_fused_config_from_fab = lambda *_: {}  # it would unpack a file of the bundle
    node._push_messages = reply


def wait_for_tasks(state: Any, objects: Any) -> None:
    """Wait until programs have ended their tasks; a message without a whole reply then gets an error."""
    while state.get_tasks(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING]):
        time.sleep(_POLL)
    for name, entry in list(state.msg_store.items()):
        tree = iterate_object_tree(objects.get_object_tree(name)) if entry.message.metadata.reply_to_message_id else ()
        if any(objects.get(part.object_id) == b"" for part in tree):  # its program was killed while it sent the reply
            state.delete_messages(message_ids=[name])
            objects.delete(name)
    state.get_messages_legacy(is_reply=False)  # so that a message that no program took counts as taken
    state._store_error_replies(set(state.run_store), CLIENT_APP_CRASHED_ERROR)


class Budget:
    """Number of bytes that the objects of the present message may still have, in all threads."""

    def __init__(self) -> None:
        self._left = self._all = 0
        self._lock = Lock()

    def start(self, size: int) -> None:
        """Begin a message of at most ``size`` bytes."""
        self._left = self._all = size

    def take(self, size: int) -> None:
        """Count bytes.

        Raises:
            TooLarge: they are too many.
        """
        with self._lock:
            self._left -= size
        self.check(0)

    def check(self, size: int) -> None:
        """Refuse bytes that are announced, as `take` would."""
        if self._left < size:
            raise TooLarge(f"the message has more than {self._all:,} bytes")


class BoundedClient(FleetHttpClient):
    """Flower's client of a SuperLink, whose responses are bounded while they are read, and which is never redirected.

    Attributes:
        of: what is left for objects of a message.
    """

    of: Budget

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self._client.follow_redirects = False  # into the site's own network
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [self._bound]}

    def _bound(self, response: httpx.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise TooLarge("a response is compressed")
        budget = self.of
        if response.request.url.path != _PULL:
            budget = Budget()
            budget.start(_OTHER)
        length = response.headers.get("content-length", "")
        budget.check(int(length[:20]) if length.isascii() and length.isdecimal() else 0)  # before it is read
        response.stream = _Bounded(response.stream, budget)


class _Bounded(httpx.SyncByteStream):
    def __init__(self, inner: Any, budget: Budget) -> None:
        self._inner, self._budget = inner, budget

    @override
    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._inner:
            self._budget.take(len(chunk))
            yield chunk

    @override
    def close(self) -> None:
        self._inner.close()


class Connection:
    """A SuperNode's connection whose messages are within limits; others get their reply here.

    Args:
        inner: Flower's connection: the node's id and seven functions.
        limits: what is taken.
        budget: what is left for the objects of a message.

    Attributes:
        functions: the connection for Flower.
    """

    def __init__(self, inner: tuple[Any, ...], limits: MessageLimits, budget: Budget) -> None:
        node, self._receive, self._send, self._get_run, self._get_fab, self._pull, self._push, self._confirm = inner
        self._limits, self._budget = limits, budget
        self._runs: dict[int, tuple[Run, Fab]] = {}
        self._contents: dict[str, bytes] = {}
        self.functions = (
            *(node, self.receive, self._send, lambda run: self._runs[run][0]),
            *(lambda _, run: self._runs[run][1], lambda _, name: self._contents[name], self._push, self.confirm),
        )

    def receive(self) -> tuple[Message, ObjectTree] | None:
        """The next message within the limits, whose objects and run are here already, or None."""
        try:
            found: tuple[Message, ObjectTree] | None = self._receive()
        except Exception as error:  # the node asks again
            print(f"a message can't be received: {type(error).__name__}: {error}", file=sys.stderr)
            return None
        if found is None:
            return None
        message, tree = found
        run = message.metadata.run_id
        try:
            self._check_run(run)
            self._contents = self._fetch(run, tree)
        except Exception as error:
            digest = error.args[1] if len(error.args) > 1 and isinstance(error, TooLarge) else None
            self._limits.note(run, f"{type(error).__name__}: {error.args[0] if error.args else ''}", digest)
            self._refuse(message)
            return None
        return found

    def confirm(self, run: int, name: str) -> None:
        """Tell the SuperLink that a message has arrived."""
        self._contents = {}
        self._confirm(run, name)

    def _check_run(self, number: int) -> None:
        """Read a new run and its bundle; of the run, only what Flower needs is kept."""
        if number in self._runs:
            return
        sent: Run = self._get_run(number)
        fab: Fab = self._get_fab(sent.fab_hash, number)
        if len(fab.content) > _BUNDLE:
            digest = hashlib.sha256(fab.content).hexdigest()
            raise TooLarge(f"the bundle has {len(fab.content):,} bytes; the limit is {_BUNDLE:,}", digest)
        run = replace(Run.create_empty(number), fab_hash=fab.hash_str, series_id=sent.series_id)
        self._runs[number] = run, replace(fab, verifications={})

    def _fetch(self, run: int, tree: ObjectTree) -> dict[str, bytes]:
        """The contents of a message's objects, by their names."""
        self._budget.start(self._limits.request + self._limits.request // 64 + _OTHER)
        names = _names(tree, _FEW + 4 * (self._limits.request // PIECE))
        contents = pull_objects(names, lambda name: self._pull(run, name))
        for name, data in contents.items():
            _check_object(name, data)
        return contents

    def _refuse(self, message: Message) -> None:
        """Send the reply to a message that is not taken."""
        try:
            self._confirm(message.metadata.run_id, message.metadata.message_id)
            reply = Message(content(self._limits.refusal), reply_to=message)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            with no_object_id_recompute():
                wanted, session = self._send(reply, get_object_tree(reply), 0.0)
                for name, part in get_all_nested_objects(reply).items():
                    if name in wanted:
                        self._push(message.metadata.run_id, session, name, part.deflate())
        except Exception as error:  # the server gets no reply
            print(f"a refusal can't be sent: {type(error).__name__}: {error}", file=sys.stderr)


def _names(tree: ObjectTree, most: int) -> list[str]:
    """The different names in a tree of at most so many, if each has the same children wherever it stands.

    Flower makes the tree anew from each name's children, which else could be without end.
    """
    children = dict[str, list[str]]()
    for number, node in enumerate(iterate_object_tree(tree)):
        if number == most:
            raise TooLarge(f"the message has more than {most:,} objects")
        if children.setdefault(node.object_id, own := [child.object_id for child in node.children]) != own:
            raise ValueError("an object of the message has two lists of children")
    return list(children)


def _check_object(name: str, data: bytes) -> None:
    """Refuse an object that is large and no piece, or that repeats a piece: it would become larger here."""
    kind, _, _ = get_object_head_values_from_object_content(data)
    if kind == ArrayChunk.__qualname__:
        return
    if len(data) > _OTHER:
        raise TooLarge(f"an object of kind {kind[:30]!r} has {len(data):,} bytes; the limit is {_OTHER:,}")
    if kind == Array.__qualname__ and len(json.loads(get_object_body(data, Array))["arraychunk_ids"]) > 1:
        raise TooLarge("an array has several pieces, which fedstill does not send")
