"""What our engine costs on top of Flower's simulation, and how it grows with the number of clients.

``overhead``: a round in which clients do nothing, through our engine (bytes, checks, journal, client folders) and on
bare Flower (the same grid and ``send_and_receive`` with an empty message), one after the other. ``scale``: three rounds
of FedAvg with 10, 100 and 1,000 clients. ``work``: a round of FedAvg in worker processes and on Flower. ``large``:
replies of 256 MiB, and the memory of the server meanwhile; ``deployed``: the same over TLS, with two sites. ``change``:
idle rounds and a run of FedAvg here and in another checkout, which take turns; a time is that of the processor.

Usage: python benchmarks/flower.py overhead|scale|work|large|deployed
       git worktree add ../old e36de80; python benchmarks/flower.py change --old ../old
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import record
import torch
from jaxtyping import Float32, UInt8
from pydantic import PositiveInt
from small import federation, site, spec_of
from torch import Tensor, nn

from fedstill.data import sources
from fedstill.protocol import Client, Federation, Method, Reply, step
from fedstill.sites.loopback import loopback


class Nothing(Reply):
    """Eight numbers."""

    numbers: Float32[Tensor, " n"]


class Block(Reply):
    """Many bytes."""

    data: UInt8[Tensor, " n"]


class Idle(Method):
    """Asks; nobody does anything."""

    size: PositiveInt = 1 << 20
    """Bytes of a reply."""

    def server(self, fed: Federation) -> nn.Module:
        """One question."""
        replies = fed.ask(self.block, at_most={"n": self.size}, size=self.size)
        assert sum(len(reply.data) for reply in replies) == len(replies) * self.size
        return fed.new_model()

    @step
    def nothing(self, client: Client) -> Nothing:
        """Answers at once."""
        return Nothing(numbers=torch.zeros(8))

    @step
    def block(self, client: Client, size: int) -> Block:
        """So many bytes that nothing can make fewer of them."""
        return Block(data=torch.randint(256, (size,), dtype=torch.uint8, generator=client.rng("bytes")))


def ours(clients: int, rounds: int, workers: int) -> list[float]:
    from fedstill.engines.flower.simulation import Simulation  # Ray, which the server of `deployed` does not load

    data = sources.load("digits")
    method = Idle()
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        with Simulation(site(method, data.train, Path(folder), clients), clients, workers=workers) as transport:
            fed = federation(method, transport, data, Path(folder) / "run", num_clients=clients)
            for _ in range(rounds + 1):
                began = time.perf_counter()
                assert len(fed.ask(method.nothing, at_most={"n": 8})) == clients
                seconds.append(time.perf_counter() - began)
    return seconds[1:]


def bare(clients: int, rounds: int, workers: int) -> list[float]:
    import ray
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    client, server, seconds = ClientApp(), ServerApp(), []
    content = RecordDict({"numbers": ArrayRecord([np.zeros(8, np.float32)])})

    @client.query()
    def nothing(message: Message, context: Context) -> Message:
        return Message(content, reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        while len(nodes := list(grid.get_node_ids())) < clients:
            time.sleep(0.05)
        for _ in range(rounds + 1):
            began = time.perf_counter()
            messages = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
            assert len(list(grid.send_and_receive(messages))) == clients
            seconds.append(time.perf_counter() - began)

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    backend: Any = {"client_resources": {"num_cpus": 1}}
    run_simulation(server, client, clients, backend_config=backend)
    return seconds[1:]


def overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for clients in options.clients or (10, 100, 400):
        times = {name: statistics.mean(f(clients, options.rounds, 2)) for name, f in (("bare", bare), ("ours", ours))}
        found.append({"clients": clients, **times, "ratio": times["ours"] / times["bare"]})
        print(
            f"{clients} clients: ours {times['ours']:.3f} s, bare Flower {times['bare']:.3f} s a round, ratio "
            f"{found[-1]['ratio']:.2f}"
        )
    return found


def measured(words: str) -> tuple[float, float]:
    """Seconds that a run says it took, and the highest memory of all its processes in MB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedstill", *words.split(), "--out", f"{folder}/run"]
        process = psutil.Popen(command, stdout=subprocess.DEVNULL)
        highest, done = [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                highest.append(sum(filter(None, map(_shared_out, [process, *process.children(recursive=True)]))) / 1e6)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        code = process.wait()
        done.set()
        if code:
            raise SystemExit(f"fedstill {words} failed")
        return json.loads(Path(folder, "run", "summary.json").read_text())["seconds"], max(highest)


def _shared_out(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.Error:
        return 0.0


def scale(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for clients in options.clients or (10, 100, 1000):
        words = f"run fedavg --data {options.data} --model lenet --clients {clients} --rounds 3 --local.epochs 1"
        seconds, memory = measured(f"{words} --engine flower --workers 2")
        found.append({"clients": clients, "seconds": seconds, "peak_mb": memory})
        print(f"{clients} clients: {seconds:.1f} s, {memory:.0f} MB at most")
    (Path(__file__).parent / "results" / "flower-scale.svg").write_text(curve(found))
    return found


def curve(table: list[dict[str, Any]]) -> str:
    """Seconds and memory over the number of clients, as a picture."""
    xs = [60 + 340 * i / max(1, len(table) - 1) for i in range(len(table))]
    drawn = []
    for key, unit, colour, top in (("seconds", "s", "#1f77b4", 20), ("peak_mb", "MB", "#d62728", 150)):
        highest = max(row[key] for row in table)
        ys = [top + 100 - 90 * row[key] / highest for row in table]
        points = " ".join(f"{x:.0f},{y:.0f}" for x, y in zip(xs, ys, strict=True))
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(f'<line x1="50" y1="{top + 100}" x2="410" y2="{top + 100}" stroke="#999"/>')
        for x, y, row in zip(xs, ys, table, strict=True):
            drawn.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>')
            drawn.append(f'<text x="{x:.0f}" y="{y - 7:.0f}" text-anchor="middle">{row[key]:,.0f} {unit}</text>')
    for x, row in zip(xs, table, strict=True):
        drawn.append(f'<text x="{x:.0f}" y="268" text-anchor="middle">{row["clients"]:,} clients</text>')
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" width="460" height="280"'
    return f"<svg {style}>\n" + "\n".join(drawn) + "\n</svg>\n"


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    words = f"run fedavg --data {options.data} --model lenet --clients 10 --rounds 3 --local.epochs 1 --workers 2"
    times = {engine: measured(f"{words} --engine {engine}")[0] for engine in ("inprocess", "flower")}
    print(f"three rounds: in-process {times['inprocess']:.1f} s, Flower {times['flower']:.1f} s")
    return [{**times, "ratio": times["inprocess"] / times["flower"]}]


def large(options: argparse.Namespace) -> list[dict[str, Any]]:
    from fedstill.engines.flower.simulation import Simulation  # see above

    size, clients = options.mib << 20, (options.clients or [16])[0]
    data = sources.load("digits")
    method = Idle(size=size)
    with tempfile.TemporaryDirectory() as folder:
        make_site = site(method, data.train, Path(folder), clients, max_bytes=1 << 30)
        with Simulation(make_site, clients, workers=2) as transport:
            spec = spec_of(method, data.train, max_bytes=1 << 30)
            fed = federation(method, transport, data, Path(folder) / "run", spec=spec, num_clients=clients)
            began = time.perf_counter()
            with own_memory(psutil.Process, lambda: True) as seen:
                method.server(fed)
            seconds = time.perf_counter() - began
    return [told(options, clients, seconds, seen)]


@contextmanager
def own_memory(find: Callable[[], psutil.Process | None], asking: Callable[[], bool]) -> Iterator[list[float]]:
    """What a process has for itself alone, in bytes, ten times a second from when it asks."""
    seen, done = list[float](), threading.Event()

    def watch() -> None:
        process = None
        while not done.wait(0.1):
            try:
                process = process or find()
                if process is not None and (seen or asking()):
                    seen.append(process.memory_full_info().uss)
            except psutil.Error:
                process = None

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    time.sleep(0.3)
    yield seen
    done.set()
    watcher.join()


def told(options: argparse.Namespace, clients: int, seconds: float, seen: list[float]) -> dict[str, Any]:
    before, most, size = seen[0], max(seen), options.mib << 20
    print(
        f"{clients} replies of {options.mib} MiB: {seconds:.1f} s, server {most / 2**20:.0f} MiB at most, "
        f"{most / size:.2f} replies; {(most - before) / size:.2f} above what it had when it asked"
    )
    found = {"server_mb": most / 1e6, "before_mb": before / 1e6, "replies": most / size}
    return {"clients": clients, "mib": options.mib, "seconds": seconds, **found, "above": (most - before) / size}


def deployed(options: argparse.Namespace) -> list[dict[str, Any]]:
    clients = (options.clients or [2])[0]
    data = sources.load("digits").train

    def server() -> psutil.Process | None:
        known = psutil.Process().children(recursive=True)
        return next((p for p in known if any("flwr-serverapp" in word for word in p.cmdline()[:3])), None)

    with tempfile.TemporaryDirectory() as folder, loopback(Path(folder)) as here:
        for client in range(clients):
            here.add_site(
                client, data, methods=["flower:Idle"], own_code=["flower:Idle"], unprotected=True, simulated_noise=True
            )
            here.start_site(client)
        task = {"data": "digits", "clients": clients, "model": "convnet:width=8,depth=2"}
        method = {"size": options.mib << 20}
        asked = here.folder / "runs" / "large" / "journal" / "meter.jsonl"  # has a line when the first request has left
        with own_memory(server, asked.exists) as seen:
            content = {"method": "flower:Idle", **task, "flower:Idle": method}
            run = here.run("large", content, wait=300.0, at_a_time=options.at_a_time)
            status = here.finish(run, 3600.0)
        assert status == "finished:completed", here.output(run)
        seconds = json.loads((here.folder / "runs" / "large" / "summary.json").read_text())["seconds"]
    return [told(options, clients, seconds, seen)]


_IDLE = "import flower, json; print(json.dumps(flower.ours({clients}, {rounds}, 2)))"
"""Rounds in which clients do nothing, by a checkout's own copy of this file."""


def change(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Processor and wall seconds here and in another checkout, in turns, with the bytes and weights of the run."""
    checkouts = {"old": options.old.resolve(), "new": Path(__file__).parents[1]}
    rows = []
    for repeat in range(options.repeats):
        for name, root in checkouts.items():
            row: dict[str, Any] = {"checkout": name, "repeat": repeat}
            for clients in options.clients or (10, 100):
                words = ["-c", _IDLE.format(clients=clients, rounds=options.rounds)]
                out, cpu, _ = spent(words, root, root / "benchmarks")
                seconds = json.loads(out.splitlines()[-1])
                row |= {f"idle_{clients}_cpu": cpu, f"idle_{clients}_round": statistics.median(seconds)}
            with tempfile.TemporaryDirectory() as folder:
                words = f"-m fedstill run fedavg --data {options.data} --model lenet --clients 10 --rounds 3".split()
                words += f"--local.epochs 1 --engine flower --workers 2 --out {folder}/run".split()
                _, row["run_cpu"], row["run_wall"] = spent(words, root, Path(folder))
                summary = json.loads(Path(folder, "run", "summary.json").read_text())
                row |= {key: summary[key] for key in ("bytes_up", "bytes_down", "accuracy")}
                row["weights"] = hashlib.sha256(Path(folder, "run", "model.safetensors").read_bytes()).hexdigest()
            rows.append(row)
            print(row, flush=True)
    for key in [key for key in rows[0] if key.endswith(("cpu", "wall", "round"))]:
        old, new = ([row[key] for row in rows if row["checkout"] == name] for name in checkouts)
        print(f"{key}: before {min(old):.3g} to {max(old):.3g} s, now {min(new):.3g} to {max(new):.3g} s", end="; ")
        print(f"medians' ratio {statistics.median(new) / statistics.median(old):.3f}")
    assert len({(row["weights"], row["bytes_up"], row["bytes_down"]) for row in rows}) == 1, "weights or bytes differ"
    return rows


def spent(words: list[str], root: Path, folder: Path) -> tuple[str, float, float]:
    """Output, processor seconds and wall seconds of Python in a checkout, with all the processes that it starts."""
    began, seconds, done = time.perf_counter(), dict[tuple[int, float], float](), threading.Event()
    paths = {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(root / "benchmarks")))}
    process = psutil.Popen([sys.executable, *words], cwd=folder, env={**os.environ, **paths}, stdout=subprocess.PIPE)

    def watch() -> None:  # Ray does not wait for its workers, so nobody has their sum
        while not done.wait(0.1):
            with suppress(psutil.Error):
                for each in (process, *process.children(recursive=True)):
                    with suppress(psutil.Error):
                        times = each.cpu_times()
                        seconds[each.pid, each.create_time()] = times.user + times.system

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    out = process.communicate()[0].decode()
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"python {' '.join(words)} failed in {root}")
    return out, sum(seconds.values()), time.perf_counter() - began


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "overhead": overhead,
    "scale": scale,
    "work": work,
    "large": large,
    "deployed": deployed,
    "change": change,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, nargs="+")
    parser.add_argument("--data", default="fashion_mnist")
    parser.add_argument("--mib", type=int, default=256, help="size of a large reply")
    parser.add_argument("--at-a-time", type=int, help="sites of `deployed` that are asked at a time")
    parser.add_argument("--old", type=Path, default=Path("../old"), help="the other checkout of `change`")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    table = PARTS[options.part](options)
    record.keep(Path(__file__).parent / "results" / f"flower-{options.part}.json", table)


if __name__ == "__main__":
    main()
