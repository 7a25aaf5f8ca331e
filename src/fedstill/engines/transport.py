"""The engine that carries messages between server and clients, and the observer of a run's progress."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from fedstill.journal import Refusal


class Arrival(NamedTuple):
    """A client's message, or the reason why there is none."""

    client: int
    reply: bytes
    failure: str | None = None


class Transport(ABC):
    """Carries bytes to the clients and back: the only difference between engines. A context manager that closes it."""

    @abstractmethod
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """Send ``request`` to ``clients`` and yield one `Arrival` each, in the order of arrival.

        ``sent(client)`` is called each time the request leaves for a client; the bytes are counted then.
        """

    def close(self) -> None:  # noqa: B027 - most transports have nothing to release
        """Release processes and connections; nothing by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watcher:
    """Observer of a run's progress; this one does nothing."""

    def asked(self, step: str, clients: int, answered: int) -> None:
        """A request goes out to ``clients`` clients, of which ``answered`` replied before the run was resumed."""

    def arrived(self, refusal: Refusal | None) -> None:
        """A reply arrived; ``refusal`` says why it is not used."""

    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        """A round logged its numbers."""

    def progressed(self, what: str, done: int, total: int) -> None:
        """The server has finished ``done`` of ``total`` parts of ``what``."""
