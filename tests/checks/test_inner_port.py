"""Whose a connection to the SuperLink's inner port is; test_deployment.py asks that of a real one as another user."""

import asyncio
import inspect
import os
import socket
import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
import httpx  # noqa: E402
import uvicorn  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import PlainTextResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402
from users import OTHER, ROOT, as_user  # noqa: E402

from fedstill.engines.flower import superlink  # noqa: E402
from fedstill.sites import units  # noqa: E402

LINUX = pytest.mark.skipif(not superlink.KNOWS_USERS, reason="only Linux tells whose a connection is")


def answer(_: Request) -> Response:
    return PlainTextResponse("done")


def test_what_comes_from_no_known_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    app = superlink.OwnProcesses(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])]), units.PATHS)

    async def asked(path: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9444") as client:
            return (await client.post(path)).status_code

    assert asyncio.run(asked("/v1/control/start-run")) == 403
    assert asyncio.run(asked("/v1/fleet/get-run")) == 200
    for path in ("/v1/fleet/", "/v1/fleet/get-run/x", "/v1/fleet/get-run%0a", "/x/v1/fleet/get-run"):
        assert asyncio.run(asked(path)) == 403, path
    for user, status in ((os.geteuid(), 200), (0, 200), (OTHER + 1, 403), (None, 403)):
        monkeypatch.setattr(superlink, "user_of", lambda *_, user=user: user)
        assert asyncio.run(asked("/v1/control/start-run")) == status


@LINUX
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_whose_a_connection_is(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = listening.getsockname()
        with socket.socket(family) as client:
            try:
                client.connect(place if family == socket.AF_INET else (f"::ffff:{place[0]}", place[1]))
            except OSError as error:
                pytest.skip(f"this machine has no IPv6: {error}")
            connection, peer = listening.accept()
            assert superlink.user_of(peer, place) == os.geteuid()
            assert superlink.user_of(("127.0.0.1", 1), place) is None
        assert superlink.user_of(peer, place) is None  # closed: Linux names root for what no process has
        connection.close()


@ROOT
@LINUX
def test_a_closed_end_of_another_user_is_not_root_s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = listening.getsockname()

        def send_and_close() -> str:
            with socket.create_connection(place) as client:
                client.sendall(b"POST / HTTP/1.1\r\n")
                return str(client.getsockname()[1])

        port = int(as_user(OTHER, send_and_close))
        connection, peer = listening.accept()
        assert peer[1] == port and superlink.user_of(peer, place) is None
        connection.close()
        with socket.socket() as client:
            read, write = os.pipe()
            if not (child := os.fork()):
                os.setuid(OTHER)
                with socket.create_connection(place):
                    os.read(read, 1)
                os._exit(0)
            connection, peer = listening.accept()
            assert superlink.user_of(peer, place) == OTHER
            os.write(write, b"x")
            os.waitpid(child, 0)
            connection.close()
            client.close()


def test_flower_serves_by_the_function_that_is_replaced() -> None:
    import flwr.superlink.cli.flower_superlink  # noqa: F401

    program = sys.modules["flwr.superlink.cli.flower_superlink"]
    assert program.uvicorn is uvicorn
    words = inspect.getsource(program._run_superlink_http_api)
    assert "uvicorn.run(" in words and "app=fastapi_app" in words and "workers=1" in words
    assert "proxy_headers" in inspect.signature(uvicorn.run).parameters
