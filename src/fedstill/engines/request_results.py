"""Results that all clients of one request have in common."""

import hashlib
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

Result = TypeVar("Result")


class RequestResults:
    """Results that depend on a request and the public records alone.

    Args:
        cache: results of the last request that had any, by the request's digest and the result's name; changed in
            place. Its owner hands it on from client to client.
        request: the request's bytes.
    """

    def __init__(self, cache: MutableMapping[tuple[bytes, str], Any], request: bytes) -> None:
        self._cache = cache
        self._request = request

    def once(self, name: str, compute: Callable[[], Result]) -> Result:
        """The result of ``compute()``, or the one that ``name`` has already for this request."""
        key = hashlib.sha256(self._request).digest(), name
        if key not in self._cache:
            for old in [old for old in self._cache if old[0] != key[0]]:
                del self._cache[old]
            self._cache[key] = compute()
        result: Result = self._cache[key]
        return result
