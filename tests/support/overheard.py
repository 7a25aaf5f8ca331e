"""Runs of a method on clients with some records each, for the comparison of neighbouring data sets."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import small
from small import world

from fedstill.audits.neighbours import Heard, difference, listening
from fedstill.engines.transport import Arrival, Inline


class Spying(Inline):
    """Keeps all requests and replies."""

    heard: Heard

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        for arrival in super().exchange(request, clients, sent):
            self.heard.messages.append((request, bytes(arrival.reply)))
            yield arrival


def hear(method: Any, data: Any, parts: small.Parts, folder: Path, **facts: Any) -> Heard:
    """Run ``method`` on clients with ``parts`` of the data, with fake releases."""
    heard = Heard()

    def transport(site: Any) -> Spying:
        spying = Spying(site)
        spying.heard = heard
        return spying

    with listening(heard):
        federation = world(method, data, folder, parts, transport=transport, **facts).federation
        try:
            method.server(federation)
        except Exception as error:
            heard.error = f"{type(error).__name__}: {error}"
    return heard


def compare(one: Heard, other: Heard, removed: int | None = None) -> None:
    """Raise AssertionError if something that must not depends on the record that differs (see `difference`)."""
    found = difference(one, other, removed)
    assert not found, found
