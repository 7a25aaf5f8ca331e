"""The only door to a server: a reverse proxy over TLS that lets Flower's interface for sites through, nothing else.

The SuperLink has one port for everything: sites, runs, keys, programs. Whoever reaches all of it owns the server, so it
listens on 127.0.0.1 only, and this proxy stands on the port that sites reach.
"""

import asyncio
import math
import re
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import uvicorn
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from fedstill.sites import units
from fedstill.sites.server import roster

_PATH = re.compile(units.PATHS)
_LARGEST = units.LARGEST_MB << 20
_SECONDS = 300.0
"""Seconds that a request may take."""
_AT_A_TIME = 256
"""Largest number of connections at a time."""
_OF_A_CONNECTION = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
"""Headers that concern one connection only (RFC 9110, 7.6.1)."""


_GREETINGS = {"/v1/fleet/activate-node", "/v1/fleet/register-node"}
"""Paths of a node's first requests: to a key that was not accepted, the SuperLink says so in words the node knows."""
_SMALL = 1 << 14
"""Largest body in bytes of such a request of a stranger."""
Admits = Callable[[Mapping[str, str]], bool]
"""Whether the headers of a request are those of a site."""
_KEY, _TIME, _SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"
"""Headers of Flower's SuperNode: its key, a time, the time's signature; tests/checks/test_gate.py pins them."""
_DAY = 86_400.0
_OLD = 305.0
"""Seconds by which that time may be off, as in Flower."""


class Members:
    """The keys of a roster, by which the door tells a site from a stranger before it reads a byte of a body.

    Args:
        roster: the roster's file; it is read again when it has changed.
    """

    def __init__(self, roster: Path) -> None:
        self._roster, self._read = roster, (-1, -1)
        self._keys: dict[bytes, ec.EllipticCurvePublicKey] = {}

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a member of the roster has signed the request's time, which is about now."""
        self._refresh()
        try:
            key = self._keys.get(b64decode(headers[_KEY], validate=True))
            said, signature = headers[_TIME], b64decode(headers[_SIGNATURE], validate=True)
            age = (datetime.now(UTC) - datetime.fromisoformat(said)).total_seconds()
            if key is None or abs(age) > _OLD:
                return False
            key.verify(signature, said.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        except (KeyError, ValueError, TypeError, InvalidSignature):
            return False
        return True

    def _refresh(self) -> None:
        state = self._roster.stat()
        if (now := (state.st_mtime_ns, state.st_size)) == self._read:
            return
        found = {}
        for member in roster.read(self._roster).values():
            key = serialization.load_ssh_public_key(member.key.encode())
            assert isinstance(key, ec.EllipticCurvePublicKey), "the roster has keys of this kind only"
            found[key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)] = key
        self._keys, self._read = found, now


class Quotas:
    """The bytes that each site may send in a day: what the SuperLink stores of a reply that nobody asked for stays.

    Args:
        most: largest number of bytes of one key in a day, which begins with its first byte after the last one.
        clock: seconds that never go back.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._sent: dict[bytes, tuple[float, int]] = {}  # begin of the day and bytes since, by key, however it is spelt
        self._lock = threading.Lock()

    def takes(self, headers: Mapping[str, str], size: int) -> bool:
        """Whether a request of a site, whose headers were admitted, fits its day; then it counts."""
        key = b64decode(headers[_KEY])
        with self._lock:
            begun, sent = self._sent.get(key, (-math.inf, 0))
            if (now := self._clock()) - begun >= _DAY:
                begun, sent = now, 0
            if sent + size > self._most:
                return False
            self._sent[key] = begun, sent + size
            return True


def app(inner: str, authority: Path, admits: Admits, quotas: Quotas | None = None) -> Starlette:
    """The proxy as an ASGI app.

    Args:
        inner: URL of the SuperLink.
        authority: certificates of the authority of the SuperLink's certificate.
        admits: whether a request is a site's; of another's nothing is read but a small first one.
        quotas: what each site may send; anything by default.
    """
    client = httpx.AsyncClient(
        base_url=inner,
        verify=ssl.create_default_context(cafile=str(authority)),
        timeout=httpx.Timeout(_SECONDS, connect=10.0),
        limits=httpx.Limits(max_connections=_AT_A_TIME),
        trust_env=False,
    )

    async def forward(request: Request) -> Response:
        path = request.scope["raw_path"].decode("latin-1")  # as it was sent, before anything is decoded
        if request.method != "POST" or request.scope["query_string"] or not _PATH.fullmatch(path):
            return PlainTextResponse("only Flower's interface for sites is served here\n", 403)
        size = request.headers.get("content-length", "")
        greets = path in _GREETINGS and size.isascii() and size.isdecimal() and int(size[:20]) <= _SMALL
        if not greets and not await asyncio.to_thread(admits, request.headers):
            return PlainTextResponse("no site of this server has signed the request\n", 401, {"connection": "close"})
        if not (size.isascii() and size.isdecimal()) or int(size[:20]) > _LARGEST:
            return PlainTextResponse(f"a request has a length of at most {_LARGEST} bytes\n", 413)
        if not greets and quotas is not None and not quotas.takes(request.headers, int(size)):
            return PlainTextResponse("the site has sent its bytes of the day (day_gb)\n", 429, {"connection": "close"})
        headers = [(name, value) for name, value in request.headers.raw if _passes(name)]
        try:
            async with asyncio.timeout(_SECONDS):
                content = request.stream()
                asked = client.build_request("POST", path, headers=headers, content=content)
                answer = await client.send(asked, stream=True)
        except (httpx.HTTPError, TimeoutError):
            return PlainTextResponse("the SuperLink does not answer\n", 502)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_A_CONNECTION}
        return StreamingResponse(_raw(answer), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    @asynccontextmanager
    async def closing(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=every)], lifespan=closing)


async def _raw(answer: httpx.Response) -> AsyncIterator[bytes]:
    async for chunk in answer.aiter_raw():
        yield chunk


def _passes(name: bytes) -> bool:
    return name.decode("latin-1").lower() not in _OF_A_CONNECTION | {"host"}


def server(of: Starlette, *, bind: str, port: int, certificate: Path, key: Path) -> uvicorn.Server:
    """The proxy's server, for `uvicorn.Server.run`."""
    config = uvicorn.Config(
        of,
        host=bind,
        port=port,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        limit_concurrency=_AT_A_TIME,
        timeout_graceful_shutdown=5,
        server_header=False,
        proxy_headers=False,
    )
    return uvicorn.Server(config)
