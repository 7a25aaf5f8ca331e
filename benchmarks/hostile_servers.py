"""What a hostile server learns from a site, and what it costs the site: time, memory and charges, asked and held.

Each question goes through a site's launcher (`fedstill.sites.site.launcher.Worker`: a process with the policy's limits)
to two sites whose records differ. ``learned``: "nothing" if both give the same bytes, without a tensor; "the release"
if they differ and were charged. Only Flower's network is not there. In the rows "node: ..." a server sends one object
of 1 GB to Flower's client of a SuperNode ("before", whose message then costs the launcher what the row "size: ..."
says) and to the site's (`fedstill.engines.flower.supernode`), over HTTP on this machine.

Usage: python benchmarks/hostile_servers.py [WORD IN THE NAME OF A ROW]
"""

import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import record
import torch
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.supernode.fleet_http_client import FleetHttpClient
from small import federation, noise_images, spec_of

from fedstill.data import sources
from fedstill.engines.client import NO_REPLY
from fedstill.engines.flower.messages import TooLarge
from fedstill.engines.flower.supernode import BoundedClient, Budget
from fedstill.engines.run_spec import RunSpec
from fedstill.methods import find
from fedstill.protocol import wire
from fedstill.sites.site import launcher, log, setup
from fedstill.sites.site.charges import read_charges
from fedstill.sites.site.policy import SitePolicy

SECONDS, GIGABYTES, QUESTIONS = 20.0, 6.0, 3
POLICY: dict[str, Any] = {
    "methods": ["fedavg", "fedgm", "fedavg-p"],
    "budget": 2.5,
    "max_seconds": SECONDS,
    "max_memory_gb": GIGABYTES,
    "max_questions": QUESTIONS,
}
UNPROTECTED = {"unprotected": True, "budget": None, "simulated_noise": True}
Question = tuple[str, bytes]
"""The text of a run's spec, and a request."""


class Attack(NamedTuple):
    """Questions of a hostile server, and changes of the policy that they meet."""

    questions: list[Question]
    policy: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Told(NamedTuple):
    """Replies of a site, its seconds and bytes of memory at most, its charges and the last line of its log."""

    replies: list[bytes]
    seconds: list[float]
    memory: int
    charges: int
    logged: str


def attacks(train: Any) -> dict[str, Attack]:
    data: Any = sources.load("digits")
    run = "0123456789abcdef" * 2

    def spec(name: str, settings: dict[str, Any], **facts: Any) -> RunSpec:
        return spec_of(find(name)(**settings), train, **{"name": name, "run": run, **facts})

    def asked(of: RunSpec, exchange: int = 0) -> Question:
        return of.text(), numbered(first_request(of, data), exchange)

    def changed(question: Question, **facts: Any) -> Question:
        return json.dumps(json.loads(question[0]) | facts), question[1]

    plain = spec("fedavg", {"local": {"lr": 0.05}})
    update = asked(plain)
    for_ever = spec("fedavg", {"local": {"epochs": 10**9}})
    nets = spec("fedgm", {"ipc": 1, "matching": {"nets": 10**9}})
    more = spec("fedgm", {"ipc": 10**9, "matching": {"nets": 1}})
    pixels = spec("fedgm", {"ipc": 10**7, "matching": {"nets": 1}})
    heads = spec("fedavg-p", {"extractor": {"pretrain": "none"}, "space": {"dims": 8}, "epsilon": 1.0})
    heads = heads.replace(public="noise=64", simulated_noise=False)
    released = [asked(heads, exchange) for exchange in range(2)]
    huge = (10**12).to_bytes(8, "little") + b"{}"
    claimed = json.dumps({"w": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    bomb = len(claimed).to_bytes(8, "little") + claimed
    nested = b'{"__metadata__":' + b"[" * 10**6
    return {
        "never ends: 10^9 epochs": Attack([asked(for_ever)], UNPROTECTED),
        "never ends: 10^9 networks": Attack([asked(nets)], UNPROTECTED),
        "memory: 10^7 images of a class": Attack([asked(pixels)], UNPROTECTED),
        "memory: 10^9 images of a class": Attack([asked(more)], UNPROTECTED),
        "bomb: a header of 10^12 bytes": Attack([(plain.text(), huge)], UNPROTECTED),
        "bomb: a tensor of 4 TB in 100 bytes": Attack([(plain.text(), bomb)], UNPROTECTED),
        "bomb: a header nested 10^6 deep": Attack(
            [(plain.text(), len(nested).to_bytes(8, "little") + nested)], UNPROTECTED
        ),
        "bomb: a spec nested 10^6 deep": Attack([("[" * 10**6, update[1])], UNPROTECTED),
        "bomb: a model of width 10^9": Attack([changed(update, model="convnet:width=1000000000,depth=2")], UNPROTECTED),
        "bomb: 10^6 classes": Attack([changed(update, class_names=[str(i) for i in range(10**6)])], UNPROTECTED),
        "size: a request of 1 GB": Attack([changed((plain.text(), bytes(10**9)), max_bytes=2 * 10**9)], UNPROTECTED),
        "order: question 7 first, then 3": Attack([asked(plain, n) for n in (7, 3)], UNPROTECTED),
        "order: question -1": Attack([asked(plain, -1)], UNPROTECTED),
        "order: a step of another method": Attack([(plain.text(), asked(nets)[1])], UNPROTECTED),
        "policy: an unprotected field": Attack([asked(plain.replace(simulated_noise=False))]),
        "policy: noise of a seed": Attack([changed(released[0], simulated_noise=True)]),
        "policy: code of a package": Attack([changed(update, model="os:getcwd")], UNPROTECTED),
        "policy: a path as public data": Attack([changed(released[0], public="/etc/passwd")]),
        "middle: one request twice": Attack([released[0], released[0]]),
        "middle: another request of the same number": Attack([released[0], other(released[0])]),
        "middle: other settings of the same run": Attack([released[0], changed(released[0], delta=1e-6)]),
        "middle: a second release above the budget": Attack(released, {"budget": 1.3}),
    }


def first_request(spec: RunSpec, data: Any) -> bytes:
    """The first request of the method's server."""
    sent = list[bytes]()

    class Taken:
        def exchange(self, request: bytes, clients: Any, note: Any) -> Any:
            sent.append(request)
            raise KeyboardInterrupt

    public = None if spec.public is None else noise_images(data)()
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        spec.method.server(
            federation(spec.method, Taken(), data, Path(folder), spec=spec, num_clients=1, public=public)
        )
    return sent[0]


def numbered(request: bytes, exchange: int) -> bytes:
    """The request with another number."""
    tensors, header = wire.unpack(request)
    return wire.pack(tensors, {**header, "exchange": exchange})


def other(question: Question) -> Question:
    """The question with another number in its first tensor."""
    tensors, header = wire.unpack(question[1])
    first = next(value for value in tensors.values() if value.is_floating_point())
    first.view(-1)[0] *= 1.001
    return question[0], wire.pack(tensors, header)


def make_site(folder: Path, records: Any, policy: dict[str, Any]) -> SitePolicy:
    folder.mkdir(parents=True)
    images = records.images.permute(0, 2, 3, 1).numpy()
    np.savez(folder / "data.npz", x_train=images, y_train=records.labels.numpy())
    own = {"client": 0, "data": "data.npz", "state": "state", **POLICY, **policy}
    return setup.site(folder, own)


def ask(policy: SitePolicy, questions: list[Question]) -> Told:
    """Ask a site in a process of its own, as a node does for each message."""
    replies, seconds, most = [], [], 0
    for spec, request in questions:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=serve, args=(policy, there))
        process.start()
        there.close()
        assert here.recv_bytes() == b"ready"
        with watched(process.pid or 0) as memory:
            began = time.monotonic()
            here.send_bytes(spec.encode())
            here.send_bytes(request)
            replies.append(here.recv_bytes())
            seconds.append(time.monotonic() - began)
        most = max(most, *memory.seen)
        process.join()
    lines = log.read(policy.state)
    line = lines[-1] if lines else {"what": "no line", "detail": ""}
    return Told(replies, seconds, most, len(read_charges(policy.state)), f"{line['what']}: {line['detail']}"[:200])


def serve(policy: SitePolicy, pipe: Connection) -> None:
    launcher.limit_memory(policy)
    with launcher.Worker(policy) as worker:
        pipe.send_bytes(b"ready")
        spec = pipe.recv_bytes().decode()
        pipe.send_bytes(worker(spec, pipe.recv_bytes()))


class watched:
    """The memory of a process and its children while a block runs, in bytes, twenty times a second."""

    def __init__(self, pid: int) -> None:
        self.seen = [0]
        self._process = psutil.Process(pid)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()  # processes are forked from this one, which must have one thread

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            try:
                family = [self._process, *self._process.children(recursive=True)]
                self.seen.append(max(process.memory_info().rss for process in family))
            except psutil.Error:
                pass


def at_the_node(kind: Any) -> dict[str, Any]:
    """Seconds, seconds of the processor, bytes and memory of a SuperNode's client that is sent an object of 1 GB."""
    context, (port, there), (here, told) = (
        multiprocessing.get_context("fork"),
        multiprocessing.Pipe(),
        multiprocessing.Pipe(),
    )
    server = context.Process(target=superlink, args=(there,), daemon=True)
    server.start()
    client = context.Process(target=pull, args=(kind, port.recv(), told), daemon=True)
    client.start()
    before = here.recv()
    with watched(client.pid or 0) as memory:
        here.send("go")
        row: dict[str, Any] = here.recv()
    for process in (client, server):
        process.terminate()
        process.join()
    return {**row, "memory_gb": round((max(memory.seen) - before) / 1e9, 2)}


def superlink(pipe: Connection) -> None:
    """A server whose objects all have 1 GB."""
    tag = PullObjectResponse.DESCRIPTOR.fields_by_name["object_content"].number << 3 | 2
    start = PullObjectResponse(object_found=True, object_available=True).SerializeToString() + bytes([tag])
    start += b"".join(
        bytes([10**9 >> 7 * i & 127 | (128 if i < 4 else 0)]) for i in range(5)
    )  # the length, 7 bits each

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # the client has heard enough
                for part in (start, *[bytes(10**6)] * 1000):
                    self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


def pull(kind: Any, port: int, pipe: Connection) -> None:
    """Pull an object as a SuperNode does."""
    client = kind.from_server_address(f"127.0.0.1:{port}", True, None, [])
    pipe.send(psutil.Process().memory_info().rss)
    pipe.recv()
    began, used, error = time.monotonic(), time.process_time(), ""
    try:
        size = len(client.PullObject(PullObjectRequest()).object_content)
    except TooLarge as why:
        size, error = 0, str(why)
    seconds = {"seconds": round(time.monotonic() - began, 2), "cpu_seconds": round(time.process_time() - used, 2)}
    pipe.send({**seconds, "bytes": size, "log": error})


class Bounded(BoundedClient):
    """The client of a site with a budget of its own."""

    of = Budget()


def node_rows() -> list[dict[str, Any]]:
    """What an object of 1 GB costs Flower's client, and the site's with the default limit and a quarter of it."""
    rows = [{"attack": "node: an object of 1 GB, before", **at_the_node(FleetHttpClient)}]
    limit = int(SitePolicy.model_fields["max_request_mb"].default * 10**6)
    for size in (limit, limit // 4):
        Bounded.of.start(size)
        rows.append({"attack": f"node: an object of 1 GB, at most {size // 10**6} MB", **at_the_node(Bounded)})
    return rows


def learned(first: Told, second: Told, *, unprotected: bool) -> str:
    """What the replies of two sites with different records tell apart."""
    if first.replies == second.replies and not any(wire.unpack(reply)[0] for reply in first.replies):
        return (
            "nothing: the constant reply" if set(first.replies) == {NO_REPLY} else "nothing: a refusal of the request"
        )
    apart = [a != b for a, b in zip(first.replies, second.replies, strict=True)]
    distinct = len({reply for reply, differs in zip(first.replies, apart, strict=True) if differs})
    if 0 < distinct <= min(first.charges, second.charges):
        return f"{distinct} release(s), charged"
    assert unprotected, f"{distinct} replies and {first.charges} charges"
    return f"{distinct} replies, which the policy allows unprotected"


def main() -> None:
    torch.set_num_threads(1)
    word, place = "".join(sys.argv[1:]), Path(__file__).parent / "results" / "hostile-servers.json"
    earlier = {row["attack"]: row for row in json.loads(place.read_text())["table"]} if word else {}
    table = {row["attack"]: row for row in [*earlier.values(), *rows(word)]}
    limits = {"max_seconds": SECONDS, "max_memory_gb": GIGABYTES, "max_questions": QUESTIONS}
    record.keep(place, list(table.values()), limits=limits)


def rows(word: str) -> Iterator[dict[str, Any]]:
    """A row for each attack whose name has a word in it."""
    if word in "node":
        for row in node_rows():
            print(row, flush=True)
            yield row
    train = sources.load("digits").train
    halves = [train[torch.arange(start, len(train), 2)] for start in (0, 1)]
    with tempfile.TemporaryDirectory() as place:
        for number, (name, attack) in enumerate(attacks(train).items()):
            if word not in name:
                continue
            sites = [make_site(Path(place) / f"{number}-{i}", half, attack.policy) for i, half in enumerate(halves)]
            first, second = (ask(site, attack.questions) for site in sites)
            row = {
                "attack": name,
                "learned": learned(first, second, unprotected=attack.policy.get("unprotected", False)),
                "questions": len(attack.questions),
                "charges": first.charges,
                "seconds": round(max(first.seconds + second.seconds), 2),
                "memory_gb": round(max(first.memory, second.memory) / 1e9, 2),
                "log": first.logged,
            }
            print(
                f"{name:45} {row['learned']:35} {row['charges']} charges {row['seconds']:6.1f} s "
                f"{row['memory_gb']:5.2f} GB  {row['log'][:110]}",
                flush=True,
            )
            yield row


if __name__ == "__main__":
    main()
