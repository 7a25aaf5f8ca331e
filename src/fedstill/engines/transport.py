"""What the server's side needs from an engine: a way to the clients; and who may watch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from fedstill.journal import Refusal


class Arrival(NamedTuple):
    """What came back from one client: a message, or why there is none."""

    client: int
    reply: bytes
    failure: str | None = None


class Transport(Protocol):
    """Carries bytes to the clients and back: all that tells one engine from another."""

    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """Send ``request`` to ``clients`` and yield one `Arrival` each, in the order they come.

        ``sent(client)`` is called whenever the request leaves for a client: what crosses is counted then.
        """


class Watcher:
    """Sees a run's progress; this one looks away."""

    def asked(self, step: str, clients: int, answered: int) -> None:
        """A question goes out to ``clients``, of which ``answered`` had answered before the run was resumed."""

    def arrived(self, refusal: Refusal | None) -> None:
        """A reply came; ``refusal`` says why it is not used."""

    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        """A round logged its numbers."""

    def progressed(self, what: str, done: int, total: int) -> None:
        """The server is ``done`` of ``total`` through ``what``."""
