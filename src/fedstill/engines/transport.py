"""Interfaces of an engine: the transport of messages, and the observer of a run's progress."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, Self

from typing_extensions import override

from fedstill.journal import Refusal


class Arrival(NamedTuple):
    """A client's reply, or the reason why there is none."""

    client: int
    reply: bytes
    failure: str | None = None


class Transport(ABC):
    """Connection to the clients: the only difference between engines. A context manager, which closes it.

    Attributes:
        tell: observes the work inside a client's step, for clients on this machine: called with the client, the name of
            the work, and how many of how many parts are done.
    """

    tell: Callable[[int, str, int, int], None] | None = None

    @abstractmethod
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        """Send ``request`` to ``clients`` and yield one `Arrival` each, in the order of arrival.

        Call ``sent(client)`` each time the request leaves for a client, so that its bytes are counted.
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
    """Observer of a run's progress; it does nothing by default. Its methods are called in the thread of the run."""

    def asked(self, step: str, clients: int, answered: int) -> None:
        """A request goes to ``clients`` clients; ``answered`` of them replied before the run was resumed."""

    def reused(self, run: str) -> None:
        """The run begins with replies that clients gave to the run in the folder ``run``."""

    def resumed(self, done: int, total: int) -> None:
        """An earlier start finished ``done`` of ``total`` rounds."""

    def working(self, client: int, label: str, done: int, total: int) -> None:
        """A client on this machine has finished ``done`` of ``total`` parts of the work ``label`` inside its step."""

    def arrived(self, refusal: Refusal | None) -> None:
        """A reply has arrived; ``refusal`` is the reason if it is not used."""

    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        """Round ``round`` of ``rounds`` has logged its numbers."""

    def progressed(self, label: str, done: int, total: int) -> None:
        """The server has finished ``done`` of ``total`` parts of the work ``label``."""

    def noted(self, sentence: str) -> None:
        """The user should know ``sentence``."""

    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        """The run has the results ``summary``; ``before`` is the time if an earlier start finished it."""


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    @override
    def asked(self, step: str, clients: int, answered: int) -> None:
        for watcher in self._watchers:
            watcher.asked(step, clients, answered)

    @override
    def reused(self, run: str) -> None:
        for watcher in self._watchers:
            watcher.reused(run)

    @override
    def resumed(self, done: int, total: int) -> None:
        for watcher in self._watchers:
            watcher.resumed(done, total)

    @override
    def working(self, client: int, label: str, done: int, total: int) -> None:
        for watcher in self._watchers:
            watcher.working(client, label, done, total)

    @override
    def arrived(self, refusal: Refusal | None) -> None:
        for watcher in self._watchers:
            watcher.arrived(refusal)

    @override
    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        for watcher in self._watchers:
            watcher.logged(round, rounds, values)

    @override
    def progressed(self, label: str, done: int, total: int) -> None:
        for watcher in self._watchers:
            watcher.progressed(label, done, total)

    @override
    def noted(self, sentence: str) -> None:
        for watcher in self._watchers:
            watcher.noted(sentence)

    @override
    def finished(self, summary: Mapping[str, Any], before: datetime | None) -> None:
        for watcher in self._watchers:
            watcher.finished(summary, before)
