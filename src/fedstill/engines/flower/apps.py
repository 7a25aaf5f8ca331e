"""What Flower's own runtime runs, simulated or deployed: a client that asks its site, a server that asks its sites."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstill import schema
from fedstill.engines.flower.grid import ASK, OnGrid, content, taken
from fedstill.engines.transport import Arrival

HELLO = "hello"
"""The name of the query by which the server learns which client a node is."""
_POLL = 0.1
"""Seconds between two looks at what came over a network."""

Config = Mapping[str, Any]
log = logging.getLogger("fedstill")


class Player(Protocol):
    """A client's side, as its node sets it up."""

    number: int

    def answer(self, client: int, terms: str, request: bytes) -> bytes:
        """The reply to a request, from the run's terms; never raises."""


def client_app(set_up: Callable[[Config, Config], Player]) -> ClientApp:
    """The app of a node.

    Args:
        set_up: from the node's own configuration and the run's to what answers; called for each message.
    """
    app = ClientApp()

    @app.query(HELLO)
    def hello(message: Message, context: Context) -> Message:
        try:
            number = set_up(context.node_config, context.run_config).number
        except Exception as error:  # whose text would go to the server
            log.error("this site is not set up: %s", error)
            return Message(content(b"", error="it is not set up; its log says why"), reply_to=message)
        return Message(content(b"", client=number), reply_to=message)

    @app.query(ASK)
    def ask(message: Message, context: Context) -> Message:
        facts = message.content.config_records["facts"]
        try:
            player = set_up(context.node_config, context.run_config)
            (client,) = map(int, facts["clients"])  # type: ignore[arg-type]
            reply = player.answer(client, str(facts["terms"]), taken(message))
        except Exception as error:
            log.error("this site can't answer: %s", error)
            reply = b""
        return Message(content(reply), reply_to=message)

    return app


def server_app(serve: Callable[[Callable[..., "Sites"], Config], None]) -> ServerApp:
    """The app of the server.

    Args:
        serve: gets what makes `Sites` (all its arguments but the grid), and the run's configuration.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(lambda *args, **options: Sites(grid, *args, **options), context.run_config)

    return app


class Sites:
    """The way to real sites, found by asking every node which client it is.

    Args:
        grid: Flower's way to its nodes.
        terms: the run's terms, which go with every request.
        clients: how many sites there should be, numbered from 0.
        wait: seconds to wait for sites that are not there yet, each time some are needed.
        timeout: see `OnGrid`.
        at_a_time: how many sites have a question at a time; 0 for all.
        nodes: of every client, Flower's id of its node, which the SuperLink gives to a key; no other node is asked
            or believed to be that client. None believes who comes first.
    """

    def __init__(
        self,
        grid: Grid,
        terms: str,
        clients: int,
        *,
        wait: float,
        timeout: float | None = None,
        at_a_time: int = 0,
        nodes: Mapping[int, int] | None = None,
    ) -> None:
        self._grid = grid
        self._terms = terms
        self._clients = clients
        self._wait = wait
        self._timeout = timeout
        self._at_a_time = at_a_time
        self._owners = None if nodes is None else {node: client for client, node in nodes.items()}
        self._nodes: dict[int, int] = {}
        self._met: set[int] = set()

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """See `Transport.exchange`."""
        self._find(clients)
        inner = OnGrid(
            self._grid,
            self._nodes,
            window=self._at_a_time or len(clients),
            timeout=self._timeout,
            facts={"terms": self._terms},
            poll=_POLL,
            at_once=1,
        )
        yield from inner.exchange(request, clients, sent)

    def _find(self, clients: Sequence[int]) -> None:
        """Ask new nodes who they are until these clients are there or waiting is over."""
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
