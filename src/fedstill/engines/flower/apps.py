"""The apps that Flower's runtime runs in a deployment: a client that asks its site, a server that asks its sites."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from fedstill import schema
from fedstill.engines.flower.grid import ASK, GridTransport, content, take_bytes
from fedstill.engines.transport import Arrival, Transport

HELLO = "hello"
"""The name of the query by which the server learns which client a node is."""
SPEC = "terms"
"""The name of the config value that carries the text of the run's spec."""
_POLL = 0.1
"""Seconds between two looks for replies over a network."""

log = logging.getLogger("fedstill")


Config = Mapping[str, Any]
Number = Callable[[Config, Config], int]
"""Returns the client number of a node, given the configurations of the node and of the run."""
AnswerRequest = Callable[[Config, Config, int, str, bytes], bytes]
"""Returns a reply, given both configurations, the client, the text of the run's spec and the request."""


def client_app(number: Number, answer: AnswerRequest) -> ClientApp:
    """The app of a node; both functions are called anew for each message."""
    app = ClientApp()

    @app.query(HELLO)
    def hello(message: Message, context: Context) -> Message:
        try:
            client = number(context.node_config, context.run_config)
        except Exception as error:  # the server must not see its text
            log.error("this site is not set up: %s", error)
            return Message(content(b"", error="it is not set up; its log says why"), reply_to=message)
        return Message(content(b"", client=client), reply_to=message)

    @app.query(ASK)
    def ask(message: Message, context: Context) -> Message:
        facts = message.content.config_records["facts"]
        try:
            (client,) = map(int, facts["clients"])  # type: ignore[arg-type]
            spec = str(facts[SPEC])
            reply = answer(context.node_config, context.run_config, client, spec, take_bytes(message))
        except Exception as error:
            log.error("this site can't answer: %s", error)
            reply = b""
        return Message(content(reply), reply_to=message)

    return app


def server_app(serve: Callable[[Callable[..., "SiteTransport"], Config], None]) -> ServerApp:
    """The app of the server.

    Args:
        serve: receives a function that makes a `SiteTransport` (from all its arguments but the grid), and the run's
            configuration.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(partial(SiteTransport, grid), context.run_config)

    return app


class SiteTransport(Transport):
    """The way to real sites, found by asking every node for its client number.

    Args:
        grid: Flower's way to its nodes.
        spec: text of the run's spec, which goes with every request.
        clients: number of sites, which are numbered from 0.
        wait: seconds to wait for missing sites, each time some are needed.
        timeout: see `GridTransport`.
        at_a_time: number of sites that have a request at a time; 0 for all.
        nodes: Flower's node id of every client, which the SuperLink gives to a key; no other node is asked or believed
            to be that client. None believes the first node that claims a number.
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
    ) -> None:
        self._grid = grid
        self._spec = spec
        self._clients = clients
        self._wait = wait
        self._timeout = timeout
        self._at_a_time = at_a_time
        self._owners = None if nodes is None else {node: client for client, node in nodes.items()}
        self._nodes: dict[int, int] = {}
        self._met: set[int] = set()

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        self._find(clients)
        inner = GridTransport(
            self._grid,
            self._nodes,
            window=self._at_a_time or len(clients),
            timeout=self._timeout,
            facts={SPEC: self._spec},
            poll=_POLL,
            at_once=1,
        )
        yield from inner.exchange(request, clients, sent)

    def _find(self, clients: Sequence[int]) -> None:
        """Ask new nodes for their numbers until these clients are there or waiting is over."""
        until = time.monotonic() + self._wait
        asked: dict[str, int] = {}
        while missing := [client for client in clients if client not in self._nodes]:
            new = [node for node in self._grid.get_node_ids() if node not in self._met and self._may_speak(node)]
            self._met.update(new)
            messages = [Message(content(b"", run=0), dst_node_id=node, message_type=f"query.{HELLO}") for node in new]
            pushed = list(self._grid.push_messages(messages)) if messages else []
            asked |= dict(zip(pushed, new, strict=True))
            for reply in self._grid.pull_messages(list(asked)) if asked else []:
                self._meet(asked.pop(reply.metadata.reply_to_message_id), reply)
            if time.monotonic() >= until:
                log.warning("no site answers for client %s", ", ".join(map(str, missing)))
                return
            time.sleep(_POLL)

    def _may_speak(self, node: int) -> bool:
        return self._owners is None or node in self._owners

    def _meet(self, node: int, reply: Message) -> None:
        facts: RecordDict | Any = {} if reply.has_error() else reply.content.config_records.get("facts", {})
        number = facts.get("client")
        if type(number) is not int or not 0 <= number < self._clients:
            why = reply.error.reason if reply.has_error() else facts.get("error", f"it says it is client {number!r}")
            log.warning("a node is left out: %s", schema.clean(str(why), 300))
            if reply.has_error():
                self._met.discard(node)  # it may have been on its way up
        elif self._owners is not None and self._owners[node] != number:
            log.warning(
                "node %d says that it is client %d, but is that of client %d (nodes); it is left out",
                *(node, number, self._owners[node]),
            )
        elif number in self._nodes:
            log.warning("a second node says that it is client %d; it is left out", number)
        else:
            self._nodes[number] = node
