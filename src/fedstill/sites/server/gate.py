"""The only door to a server: a reverse proxy over TLS that lets Flower's interface for sites through, nothing else.

The SuperLink has one port for everything: sites, runs, keys, programs. Whoever reaches all of it owns the server, so it
listens on 127.0.0.1 only, and this proxy stands on the port that sites reach.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from fedstill.sites import units

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


def app(inner: str, authority: Path) -> Starlette:
    """The proxy as an ASGI app.

    Args:
        inner: URL of the SuperLink.
        authority: certificates of the authority of the SuperLink's certificate.
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
        if not (size.isascii() and size.isdecimal()) or int(size[:20]) > _LARGEST:
            return PlainTextResponse(f"a request has a length of at most {_LARGEST} bytes\n", 413)
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
