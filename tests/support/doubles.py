"""Stand-ins for parts of an engine: a process that is killed, a server that is watched."""

from collections.abc import Iterator, Sequence
from typing import Any

from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Arrival


class Killed(BaseException):
    """The end of a process: nothing may catch it."""


class Mortal:
    """A transport whose server is killed after so many replies."""

    def __init__(self, inner: Any, lives: int) -> None:
        self.inner, self.lives = inner, lives

    def exchange(self, request: bytes, clients: Sequence[int], sent: Any) -> Iterator[Arrival]:
        for arrival in self.inner.exchange(request, clients, sent):
            if self.lives == 0:
                raise Killed
            self.lives -= 1
            yield arrival


class Watched(ServerFederation):
    """A server that keeps the payloads it sends (``down``) and the replies to each request (``up``)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.down: list[dict[str, Any]] = []
        self.up: list[list[Any]] = []

    def ask(
        self, step: Any, to: Any = None, *, at_most: Any = None, exactly: Any = None, at_least: int = 0, **payload: Any
    ) -> Any:
        replies = super().ask(step, to, at_most=at_most, exactly=exactly, **payload)
        self.down.append(payload)
        self.up.append(list(replies))
        return replies
