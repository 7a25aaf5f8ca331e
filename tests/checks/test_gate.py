"""The door of a server: what sites need passes, everything else is refused, by fedstill's own proxy and by nginx's."""

import http.client
import inspect
import shutil
import socket
import ssl
import string
import subprocess
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
import httpx  # noqa: E402
import psutil  # type: ignore[import-untyped]  # noqa: E402
import uvicorn  # noqa: E402
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flwr.superlink.routers.fleet import node_auth  # noqa: E402
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

from fedstill.sites.loopback import free_port  # noqa: E402
from fedstill.sites.server import gate, roster, service  # noqa: E402

pytestmark = pytest.mark.slow

REFUSED = [
    ("POST", "/v1/control/start-run"),
    ("POST", "/v1/control/register-node"),
    ("POST", "/v1/runtime/pull-app-inputs"),
    ("POST", "/"),
    ("GET", "/v1/fleet/get-run"),
    ("DELETE", "/v1/fleet/get-run"),
    ("POST", "/v1/fleet/"),
    ("POST", "/v1/fleet"),
    ("POST", "/v1/fleet/get-run/"),
    ("POST", "/v1/fleet/get-run?to=/v1/control/start-run"),
    ("POST", "/v1/fleet/../control/start-run"),
    ("POST", "/v1/fleet/..%2fcontrol/start-run"),
    ("POST", "/v1/fleet/%2e%2e/control/start-run"),
    ("POST", "/v1/control/../fleet/get-run"),
    ("POST", "/v1/control/start-run/../../fleet/get-run"),
    ("POST", "//v1/control/start-run"),
    ("POST", "/v1/fleet//control"),
    ("POST", "/V1/FLEET/get-run"),
    ("POST", "/v1/fleet/get-run%0a"),
    ("POST", "/v1/fleet/get-run%00"),
    ("POST", "/v1/fleet/get-run;x"),
    ("POST", "/docs"),
    ("POST", "/openapi.json"),
    ("OPTIONS", "*"),
]


class Inside:
    """A stand-in for the SuperLink, which notes what reaches it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes, str | None]] = []
        self.status = 200

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        path = request.scope["raw_path"].decode("latin-1")
        self.seen.append((request.method, path, body, request.headers.get("flwr-public-key")))
        return Response(body[::-1], self.status, {"x-flower": "yes"})


Doors = tuple[Inside, int, Path]


def in_thread(running: uvicorn.Server, port: int) -> threading.Thread:
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not service.listens(port):
        assert time.monotonic() < until
        time.sleep(0.02)
    return thread


def stopped(running: uvicorn.Server, thread: threading.Thread) -> None:
    running.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module", params=["fedstill", "nginx"])
def doors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Inside, int, Path]]:
    """What is inside, the port of a door to it, and the authority."""
    folder = tmp_path_factory.mktemp("gate")
    ports = {"port": free_port(), "inner_port": free_port()}
    made = service.init(folder / "server", {"host": "localhost", "bind": "127.0.0.1", "proxy": request.param, **ports})
    places = made.certificates
    inside = Inside()
    every = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]
    link = gate.server(
        Starlette(routes=[Route("/{path:path}", inside.answer, methods=every)]),
        bind="127.0.0.1", port=ports["inner_port"], certificate=places.certificate, key=places.key,
    )  # fmt: skip
    inner = in_thread(link, ports["inner_port"])
    url, program = f"https://127.0.0.1:{ports['inner_port']}", None
    door = gate.server(
        gate.app(url, places.authority, lambda _: True),
        bind="127.0.0.1", port=ports["port"], certificate=places.certificate, key=places.key,
    )  # fmt: skip
    outer = None
    if request.param == "fedstill":
        outer = in_thread(door, ports["port"])
    else:
        if (nginx := shutil.which("nginx")) is None:
            stopped(link, inner)
            pytest.skip("nginx is not installed")
        program = start_nginx(nginx, made, folder)
    yield inside, ports["port"], places.authority
    if outer is not None:
        stopped(door, outer)
    stopped(link, inner)
    if program is not None:
        program.terminate()
        program.wait()


def start_nginx(nginx: str, made: service.Server, folder: Path) -> subprocess.Popen[bytes]:
    own = "".join(f"{name}_temp_path {folder}/{name};\n" for name in
                  ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))  # fmt: skip
    (folder / "nginx.conf").write_text(
        f"pid {folder}/nginx.pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{own}include {made.folder}/nginx.conf;\n}}\n"
    )
    words = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off; master_process off;"]
    subprocess.run([*words[:-1], "daemon off;", "-t"], check=True, capture_output=True)
    program = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not service.listens(made.settings.port):
        assert program.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    return program


def ask(port: int, authority: Path, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=str(authority))
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
    connection.request(method, path, body, {"flwr-public-key": "me", **headers})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_what_sites_need_passes_with_its_bytes_and_signature(doors: Doors) -> None:
    inside, port, authority = doors
    for body in (b"", b"abc", bytes(range(256)) * 2**14):
        inside.seen.clear()
        assert ask(port, authority, "POST", "/v1/fleet/pull-messages", body) == (200, body[::-1])
        assert inside.seen == [("POST", "/v1/fleet/pull-messages", body, "me")]
    inside.status = 401
    assert ask(port, authority, "POST", "/v1/fleet/activate-node")[0] == 401
    inside.status = 200


@pytest.mark.parametrize(("method", "path"), REFUSED)
def test_everything_else_is_refused(method: str, path: str, doors: Doors) -> None:
    inside, port, authority = doors
    inside.seen.clear()
    status, _ = ask(port, authority, method, path)
    assert 400 <= status < 500
    assert inside.seen == []


def test_a_request_above_the_limit_is_refused_before_it_is_read(doors: Doors) -> None:
    inside, port, authority = doors
    inside.seen.clear()
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection(("localhost", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as door,
    ):
        door.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n")
        assert b" 413 " in door.recv(100)
    assert inside.seen == []


def test_a_client_without_tls_gets_nothing(doors: Doors) -> None:
    inside, port, _ = doors
    inside.seen.clear()
    with socket.create_connection(("localhost", port), timeout=60) as plain:
        plain.sendall(b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        try:
            assert b" 200 " not in plain.recv(1000)
        except ConnectionError:
            pass
    assert inside.seen == []


def test_a_superlink_that_is_away_is_a_bad_gateway(tmp_path: Path) -> None:
    ports = {"port": free_port(), "inner_port": free_port()}
    places = service.init(tmp_path / "server", {"host": "localhost", **ports}).certificates
    door = gate.server(
        gate.app(f"https://127.0.0.1:{ports['inner_port']}", places.authority, lambda _: True),
        bind="127.0.0.1", port=ports["port"], certificate=places.certificate, key=places.key,
    )  # fmt: skip
    outer = in_thread(door, ports["port"])
    assert ask(ports["port"], places.authority, "POST", "/v1/fleet/get-run")[0] == 502
    stopped(door, outer)


def signed(key: ec.EllipticCurvePrivateKey, **changes: str) -> dict[str, str]:
    """The headers that Flower's SuperNode sends with this key."""
    request = httpx.Request("POST", "https://localhost/v1/fleet/pull-messages")
    context = SimpleNamespace(request=request, rpc_method="", message=None)
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(context, lambda _: None)  # type: ignore[arg-type]
    names = ("flwr-public-key", "flwr-timestamp", "flwr-signature")
    return {**{name: request.headers[name] for name in names}, **changes}


@pytest.fixture
def members(tmp_path: Path) -> tuple[Path, list[ec.EllipticCurvePrivateKey]]:
    """A roster of one site, and the keys of two."""
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    write_roster(tmp_path / "roster.toml", keys[:1])
    return tmp_path / "roster.toml", keys


def write_roster(place: Path, keys: list[ec.EllipticCurvePrivateKey]) -> None:
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    sites = [
        roster.Member(client=i, key=key.public_key().public_bytes(*form).decode(), node=i + 1)
        for i, key in enumerate(keys)
    ]
    roster.write(place, roster.Roster(site=tuple(sites)))


def test_the_door_knows_sites_by_their_signature(members: tuple[Path, list[ec.EllipticCurvePrivateKey]]) -> None:
    place, (site, stranger) = members
    door = gate.Members(place)
    mine = signed(site)
    assert door.admits(mine)
    theirs = signed(stranger)
    old = datetime.now(UTC) - timedelta(seconds=400)
    for name, headers in {
        "no headers": {},
        "a stranger": theirs,
        "a stranger with a site's key": {**theirs, "flwr-public-key": mine["flwr-public-key"]},
        "another time": {**mine, "flwr-timestamp": datetime.now(UTC).isoformat()},
        "no time zone": {**mine, "flwr-timestamp": datetime.now(UTC).replace(tzinfo=None).isoformat()},
        "an old time": {**mine, "flwr-timestamp": old.isoformat()},
        "no base64": {**mine, "flwr-signature": "?"},
        "letters": {**mine, "flwr-public-key": "ä"},
        "an endless time": {**mine, "flwr-timestamp": "9" * 10**6},
    }.items():
        assert not door.admits(headers), name
    write_roster(place, [site, stranger])
    assert door.admits(signed(stranger))  # it was accepted meanwhile
    write_roster(place, [stranger])
    assert not door.admits(signed(site))  # it was removed
    signature = inspect.getsource(node_auth.authenticate_node)
    assert "TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE" in signature and gate._OLD == 305


@contextmanager
def a_door(folder: Path, roster_file: Path, quotas: gate.Quotas | None = None) -> Iterator[Doors]:
    """What is inside, the port of fedstill's door to it, which knows a roster, and the authority."""
    ports = {"port": free_port(), "inner_port": free_port()}
    places = service.init(folder / "server", {"host": "localhost", "bind": "127.0.0.1", **ports}).certificates
    inside = Inside()
    link = gate.server(
        Starlette(routes=[Route("/{path:path}", inside.answer, methods=["POST"])]),
        bind="127.0.0.1", port=ports["inner_port"], certificate=places.certificate, key=places.key,
    )  # fmt: skip
    url = f"https://127.0.0.1:{ports['inner_port']}"
    door = gate.server(
        gate.app(url, places.authority, gate.Members(roster_file).admits, quotas),
        bind="127.0.0.1", port=ports["port"], certificate=places.certificate, key=places.key,
    )  # fmt: skip
    inner, outer = in_thread(link, ports["inner_port"]), in_thread(door, ports["port"])
    yield inside, ports["port"], places.authority
    stopped(door, outer)
    stopped(link, inner)


def test_a_site_sends_no_more_than_its_bytes_of_a_day(
    members: tuple[Path, list[ec.EllipticCurvePrivateKey]], tmp_path: Path
) -> None:
    place, (site, other) = members
    write_roster(place, [site, other])
    hours = [0.0]
    quotas = gate.Quotas(1000, lambda: hours[0] * 3600)
    assert [quotas.takes(signed(site), size) for size in (600, 401, 400, 1, 0)] == [True, False, True, False, True]
    assert quotas.takes(signed(other), 1000)
    hours[0] = 23.9
    assert not quotas.takes(signed(site), 1)
    hours[0] = 24.0
    assert quotas.takes(signed(site), 1000)
    said = signed(site)["flwr-public-key"]
    respelt = [said.rstrip("=")[:-1] + last + "=" * said.count("=") for last in string.ascii_letters + string.digits]
    same = [text for text in respelt if b64decode(text) == b64decode(said)]
    assert len(same) > 1, "spare bits of the last letter"
    assert not any(quotas.takes(signed(site) | {"flwr-public-key": text}, 1) for text in same)
    sizes, path = (900, 200, 100), "/v1/fleet/push-object"
    with a_door(tmp_path, place, gate.Quotas(1000)) as (inside, port, authority):
        found = [ask(port, authority, "POST", path, bytes(n), **signed(site))[0] for n in sizes]
    assert found == [200, 429, 200]
    assert [len(seen[2]) for seen in inside.seen] == [900, 100]


def test_nothing_of_a_strangers_body_is_read(
    members: tuple[Path, list[ec.EllipticCurvePrivateKey]], tmp_path: Path
) -> None:
    """Sixteen posts of 60 MiB without a signature: the door answers before they are sent, and passes none on."""
    place, (site, _) = members
    with a_door(tmp_path, place) as (inside, port, authority):
        context, size, before = ssl.create_default_context(cafile=str(authority)), 60 << 20, psutil.Process()
        resident, most, answers = before.memory_info().rss, [0], list[bytes]()

        def post() -> None:
            with (
                socket.create_connection(("localhost", port), timeout=60) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as stranger,
            ):
                head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n"
                stranger.sendall(head.encode())
                answers.append(stranger.recv(100))  # before a byte of the body was sent
                try:
                    for _ in range(size >> 16):
                        stranger.send(bytes(1 << 16))
                        most[0] = max(most[0], before.memory_info().rss)
                except OSError:  # the door has closed the connection
                    pass

        posts = [threading.Thread(target=post) for _ in range(16)]
        for one in posts:
            one.start()
        for one in posts:
            one.join()
        assert len(answers) == 16 and all(b" 401 " in answer for answer in answers) and inside.seen == []
        assert most[0] - resident < 100 << 20  # of 960 MiB that were sent
        first = "/v1/fleet/activate-node"  # the SuperLink itself refuses it, so that the node can say why
        assert ask(port, authority, "POST", first, bytes(gate._SMALL))[0] == 200
        assert ask(port, authority, "POST", first, bytes(gate._SMALL + 1))[0] == 401
        assert [seen[1] for seen in inside.seen] == [first]
        assert ask(port, authority, "POST", "/v1/fleet/pull-messages", b"abc", **signed(site))[0] == 200
