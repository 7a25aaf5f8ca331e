"""Apps for Flower's deployment runtime: the client of each site, and the server."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from fedstill import __version__, schema
from fedstill.engines.client import NO_REPLY
from fedstill.engines.flower.messages import ASK, GridTransport, Pulls
from fedstill.engines.flower.payload import MOST, content, take_bytes
from fedstill.engines.transport import Arrival, Transport

HELLO = "hello"
"""Name of the query for a node's client number."""
SPEC = "terms"
"""Name of the config value with the text of the run's spec."""
_POLL = 0.1
"""Seconds between two polls for replies over a network."""

log = logging.getLogger("fedstill")


Config = Mapping[str, Any]
Number = Callable[[Config, Config], int]
"""Returns a node's client number, given the configurations of the node and of the run."""
AnswerRequest = Callable[[Config, Config, int, str, bytes], bytes]
"""Returns a reply, given both configurations, the client number, the text of the run's spec and the request."""


class Seal(Protocol):
    """A real site's check of requests, and its signature of replies."""

    def refusal(self, spec: str, request: bytes, facts: Mapping[str, object]) -> bytes | None:
        """The reply to a request that is not the server's, or asks an older copy of the site; None for others."""

    def of(self, spec: str, request: bytes, reply: bytes) -> dict[str, str]:
        """The config values of a reply."""


def client_app(
    number: Number,
    answer: AnswerRequest,
    failed: Callable[[Exception], None] | None = None,
    max_bytes: int = MOST,
    seal: Seal | None = None,
    older: Callable[[str], None] | None = None,
) -> ClientApp:
    """The app of a node.

    Args:
        number: is called for each query for the client's number.
        answer: is called for each request.
        failed: is called with the reason if there was no answer.
        max_bytes: size of the largest request.
        seal: checks each request and signs each reply; None where nobody does.
        older: is called with the version of a server that is newer, which does not ask this node until it is upgraded.
    """
    app = ClientApp()

    @app.query(HELLO)
    def hello(message: Message, context: Context) -> Message:
        try:
            client = number(context.node_config, context.run_config)
        except Exception as error:  # the error text stays at the site
            log.error("this site is not set up: %s", error)
            return Message(content(b"", error="the site is not set up; see its log"), reply_to=message)
        theirs = schema.clean(str(message.content.config_records["facts"].get("version", __version__)), 40)
        if older is not None and is_older(__version__, theirs):
            older(theirs)
        return Message(content(b"", client=client, version=__version__), reply_to=message)

    @app.query(ASK)
    def ask(message: Message, context: Context) -> Message:
        spec, request = "", b""
        try:
            facts = message.content.config_records["facts"]
            (client,) = map(int, facts["clients"])  # type: ignore[arg-type]
            spec, request = str(facts[SPEC]), take_bytes(message, max_bytes)
            refusal = None if seal is None else seal.refusal(spec, request, facts)
            reply = refusal or answer(context.node_config, context.run_config, client, spec, request)
        except Exception as error:
            log.error("this site can't answer: %s", error)
            if failed is not None:
                failed(error)
            reply = NO_REPLY
        return Message(content(reply, **({} if seal is None else seal.of(spec, request, reply))), reply_to=message)

    return app


def is_older(one: str, other: str) -> bool:
    """Whether a version is of an earlier minor version than another; not if one of them is no version."""
    try:
        numbers = [tuple(map(int, version.split(".")[:2])) for version in (one, other)]
    except ValueError:
        return False
    return numbers[0] < numbers[1]


def server_app(serve: Callable[[Callable[..., "SiteTransport"], Config], None]) -> ServerApp:
    """The app of the server.

    Args:
        serve: runs the server, given a function that makes a `SiteTransport` (from all arguments except the grid) and
            the run's configuration.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(partial(SiteTransport, grid), context.run_config)

    return app


class SiteTransport(Transport):
    """Connection to real sites; asks every node for its client number.

    Args:
        grid: Flower's connection to its nodes.
        spec: text of the run's spec, sent with every request.
        clients: number of sites, which are numbered from 0.
        wait: seconds to wait for missing sites before each request.
        timeout: as for `GridTransport`.
        at_a_time: number of sites that have a request at a time; 0 for all.
        nodes: Flower's node id of every client, which the SuperLink derives from a key; other nodes are ignored. None
            accepts the first node that claims a number.
        max_bytes: size of the largest reply.
        facts_of: as for `GridTransport`.
    """

    def __init__(
        self,
        grid: Grid,
        spec: str,
        clients: int,
        *,
        wait: float,
        timeout: float | None = None,
        at_a_time: int = 0,
        nodes: Mapping[int, int] | None = None,
        max_bytes: int = MOST,
        facts_of: Callable[[int, bytes], Mapping[str, str]] | None = None,
    ) -> None:
        self._grid = grid
        self._spec = spec
        self._facts_of = facts_of
        self._clients = clients
        self._wait = wait
        self._timeout = timeout
        self._at_a_time = at_a_time
        self._max_bytes = max_bytes
        self._owners = None if nodes is None else {node: client for client, node in nodes.items()}
        self._nodes: dict[int, int] = {}
        self._met: set[int] = set()
        self._older: dict[int, str] = {}  # nodes of an earlier version, which are not asked
        self._asked: dict[str, int] = {}  # also for a later request: the reply may come after all who were missing
        self._pulls = Pulls(grid)

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        self._met -= self._older.keys()  # they may have been upgraded meanwhile
        self._older.clear()
        self._find(clients)
        inner = GridTransport(
            self._grid,
            self._nodes,
            window=self._at_a_time or len(clients),
            timeout=self._timeout,
            facts={SPEC: self._spec},
            facts_of=self._facts_of,
            poll=_POLL,
            at_once=1,
            max_bytes=self._max_bytes,
        )
        yield from inner.exchange(request, clients, sent)

    def _find(self, clients: Sequence[int]) -> None:
        """Ask new nodes for their numbers until all ``clients`` are connected or the waiting time is over."""
        until = time.monotonic() + self._wait
        while missing := [client for client in clients if client not in self._nodes]:
            new = [node for node in self._grid.get_node_ids() if node not in self._met and self._accepts(node)]
            self._met.update(new)
            kind = f"query.{HELLO}"
            hello = partial(content, b"", run=0, version=__version__)
            messages = [Message(hello(), dst_node_id=node, message_type=kind) for node in new]
            pushed = list(self._grid.push_messages(messages)) if messages else []
            self._asked |= dict(zip(pushed, new, strict=True))
            for reply in self._pulls.pull(list(self._asked)):
                if (node := self._asked.pop(reply.metadata.reply_to_message_id, None)) is not None:  # no second reply
                    self._meet(node, reply)
            if time.monotonic() >= until:
                if missing := [client for client in clients if client not in self._nodes]:  # after this pass
                    log.warning("no site replies for client %s", ", ".join(map(str, missing)))
                return
            time.sleep(_POLL)

    def _accepts(self, node: int) -> bool:
        return self._owners is None or node in self._owners

    def _meet(self, node: int, reply: Message) -> None:
        facts: RecordDict | Any = {} if reply.has_error() else reply.content.config_records.get("facts", {})
        number = facts.get("client")
        if type(number) is not int or not 0 <= number < self._clients:
            reason = reply.error.reason if reply.has_error() else facts.get("error", f"it claims number {number!r}")
            log.warning("a node is ignored: %s", schema.clean(str(reason), 300))
            if reply.has_error():
                self._met.discard(node)  # it may still be starting
        elif self._owners is not None and self._owners[node] != number:
            log.warning(
                "node %d is ignored: it claims to be client %d, but belongs to client %d (nodes)",
                *(node, number, self._owners[node]),
            )
        elif number in self._nodes:
            log.warning("a second node that claims to be client %d is ignored", number)
        elif is_older(version := schema.clean(str(facts.get("version", __version__)), 40), __version__):
            self._older[node] = version
            log.warning(
                "client %d runs fedstill %s, older than this server's %s: it waits for its upgrade; the run goes on "
                "without it",
                *(number, version, __version__),
            )
        else:
            self._nodes[number] = node
            if version != __version__:
                log.warning(
                    "client %d runs fedstill %s, and this server %s; upgrade the older one",
                    *(number, version, __version__),
                )
