"""Functions of a deployment's server and of Flower's simulation, called by the Flower app (`fedstill.sites.app`)."""

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from fedstill import schema
from fedstill.engines.client import Site
from fedstill.engines.helper_calls import RemoteHelper
from fedstill.engines.masked_sums import Parties
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.server import TooFewReplies
from fedstill.engines.transport import RECEIPT, SIGNATURE, Arrival, Transport
from fedstill.experiment import config, reuse
from fedstill.experiment.job import Job
from fedstill.experiment.progress import Lines
from fedstill.experiment.reuse import read_job
from fedstill.experiment.run import run
from fedstill.experiment.task import client_data, share_out
from fedstill.protocol import wire
from fedstill.runs.folder import RunFolder
from fedstill.runs.journal import JournalFiles
from fedstill.sites import seals
from fedstill.sites.server import roster
from fedstill.sites.server.service import FAILED
from fedstill.sums.keys import read_public

Config = Mapping[str, Any]
Members = Mapping[int, roster.Member]
log = logging.getLogger("fedstill")


def serve(connect: Callable[..., Transport], settings: Config) -> None:
    """Run the server's part.

    Args:
        connect: connects to the sites, given the text of the run's spec, the number of clients and options.
        settings: ``file``, an experiment file on the server; ``out``, the run's folder; ``wait``, seconds to wait for
            sites; ``at-a-time``, the number of sites that have a request at a time, 0 for all; ``roster``, a file of
            `fedstill.sites.server.roster`, or ``nodes``, the node of each client, as ``0:ID,1:ID``, or "any" to believe
            every node; ``max-records``, the largest number of records that a reply may claim, 0 for no limit. In place
            of ``file``: ``extend``, a finished run, and ``clients``, its new number of sites.

    Raises:
        ValueError, TooFewReplies, OSError: a setting is missing or invalid, or the run failed; the reason has been
            printed in one sentence, after `FAILED`.
    """
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stdout))
    try:
        _serve(connect, settings)
    except (ValueError, OSError, TooFewReplies) as error:
        print(f"{FAILED}{' '.join(str(error).split())}", flush=True)  # for `fedstill server run`; Flower prints a trace
        raise


def _serve(connect: Callable[..., Transport], settings: Config) -> None:
    job = _job(settings)
    experiment = job.experiment
    wait = float(settings.get("wait", 600.0))
    file = str(settings.get("roster") or "")
    members = roster.read(Path(file)) if file else {}  # once: it may change while the run begins
    absent = _absent(file, members, experiment)
    nodes, limits = _members(settings, members, experiment.clients)
    keys = {client: member.key for client, member in members.items()}
    at_a_time = int(settings.get("at-a-time", 0))
    if at_a_time < 0:
        raise ValueError(f"at-a-time is {at_a_time}; it must be 0 (all sites at once) or more")

    options = {"wait": wait, "timeout": experiment.timeout, "at_a_time": at_a_time}

    def sites(spec: RunSpec) -> Transport:
        reach = partial(connect, spec.text(), experiment.clients, nodes=nodes, max_bytes=spec.max_bytes, **options)
        transport = Sealed(reach, spec.text(), keys, Path(file).parent) if keys else reach()
        transport = LimitedRecords(transport, limits) if limits else transport
        return Present(transport, absent) if absent else transport

    reach = partial(connect, **options)
    parties = None if experiment.masked is None else _parties(file, members, experiment.clients, reach)
    with Lines(partial(print, flush=True), job.title) as lines:
        run(job, watcher=lines, sites=sites, parties=parties)
    print(f"results in {job.out}", flush=True)


def _parties(file: str, members: Members, clients: int, connect: Callable[..., Transport]) -> Parties:
    """The helpers and the clients of masked sums that a roster names; ``connect`` connects to nodes.

    Raises:
        ValueError: there is no roster, or the line of a client's key was from before it had keys for masked sums.
    """
    if not file:
        raise ValueError("--sums masked needs a roster, which names helpers and keys (fedstill server run)")
    helpers = [member for _, member in sorted(members.items()) if member.helper]
    parties = [*(members[client] for client in range(clients)), *helpers]
    if old := [member.client for member in parties if member.sums is None]:
        raise ValueError(
            f"the roster {file!r} has no key for masked sums of client {old[0]}; accept the line in its site.key.pub "
            f"again (fedstill server accept FOLDER {old[0]} KEY), which 'fedstill site rekey' writes if it has none"
        )
    keys = [read_public(str(member.sums)) for member in parties]
    numbers = [member.client for member in helpers]  # as sites: a helper may be a client of the run, or none

    def reach(spec: str) -> list[RemoteHelper]:
        nodes = {number: members[number].node for number in numbers}
        connection = partial(connect, spec, max(numbers) + 1, nodes=nodes)
        keys = {number: members[number].key for number in numbers}
        transport = Sealed(connection, spec, keys, Path(file).parent)
        return [RemoteHelper(place, number, transport) for place, number in enumerate(numbers)]

    return Parties(keys[clients:], [signer for signer, _ in keys[:clients]], reach)


def _absent(file: str, members: Members, experiment: config.Experiment) -> frozenset[int]:
    """The clients of the run that a roster lacks, as those that were removed: the run goes on without them.

    Raises:
        ValueError: too few are left for ``min_clients``, or sums are masked, whose clients agree on their keys first.
    """
    absent = frozenset(range(experiment.clients) if file else ()) - members.keys()
    fewest = experiment.clients if experiment.masked is not None else experiment.min_clients or experiment.clients
    if experiment.clients - len(absent) < fewest:
        fewer = "run with fewer clients" if experiment.masked is not None else "go on without it (min_clients)"
        raise ValueError(
            f"the roster {file!r} lacks client {min(absent)} of the run's {experiment.clients}; accept its key "
            f"(fedstill server accept FOLDER {min(absent)} KEY), or {fewer}"
        )
    for client in sorted(absent):
        log.warning("the run goes on without client %d, of which the roster has no key", client)
    return absent


def _members(settings: Config, members: Members, clients: int) -> tuple[dict[int, int] | None, dict[int, int]]:
    """Flower's node id of each client (None believes every node), and the clients' largest numbers of records."""
    most = int(settings.get("max-records") or 0)
    limits = dict.fromkeys(range(clients), most) if most else {}
    text, file = str(settings.get("nodes") or ""), str(settings.get("roster") or "")
    if file:
        present = [client for client in range(clients) if client in members]
        own = {client: members[client].max_records for client in present}
        limits |= {client: min(number, most or number) for client, number in own.items() if number is not None}
        return {client: members[client].node for client in present}, limits
    if not text:
        raise ValueError(
            "--run-config has neither roster nor nodes, so any registered key could answer for any client; give "
            'roster="/path/roster.toml" (as fedstill server run does), or nodes="any" to believe every node'
        )
    return (None if text == "any" else _nodes(text, clients)), limits


def _nodes(text: str, clients: int) -> dict[int, int]:
    """Flower's node id of each client, from a list that may have more entries."""
    pairs = [re.fullmatch(r"\s*(\d{1,9}):(\d{1,20})\s*", part, re.ASCII) for part in text.split(",")]
    nodes = {int(pair[1]): int(pair[2]) for pair in pairs if pair}
    if len(nodes) < len(pairs) or len(set(nodes.values())) < len(nodes) or not nodes.keys() >= set(range(clients)):
        raise ValueError(
            f"nodes is {schema.clean(text, 200)!r}; it must give each of the clients 0 to {clients - 1} one node of "
            "its own, as 0:1234,1:5678 (flwr supernode list)"
        )
    return {client: nodes[client] for client in range(clients)}


def _job(settings: Config) -> Job:
    for name in ("extend" if settings.get("extend") else "file", "out"):
        if not settings.get(name):
            raise ValueError(f"--run-config must give '{name}', as in --run-config 'file=\"/path/run.yaml\" out=...'")
    out = Path(str(settings["out"]))
    if not settings.get("extend"):
        experiment, method_name, method = config.read_yaml(Path(str(settings["file"])))
        return Job(experiment, method, out, name=method_name, command=f"flwr run, {settings['file']}")
    finished = Path(str(settings["extend"]))
    job = read_job(finished, out, f"flwr run, extending {finished}")
    if clients := int(settings.get("clients") or 0):
        job = job.replace(experiment=job.experiment.model_copy(update={"clients": clients}))
    reuse.begin(finished, job)
    return job


def number(node: Config, settings: Config) -> int:
    """The client number of a node of Flower's simulation, given the configurations of the node and of the run.

    Raises:
        ValueError: the node is none of Flower's simulation.
    """
    if "partition-id" in node:
        return int(node["partition-id"])
    raise ValueError("the node is not of a simulation; start a real site's node with 'fedstill site serve'")


def answer(node: Config, settings: Config, client: int, spec: str, request: bytes) -> bytes:
    """A reply of a node of Flower's simulation, which replies for any client of the run's experiment file."""
    number(node, settings)
    return _simulated_site(str(settings["file"]), str(settings["out"]), spec).answer(client, request)


@lru_cache(maxsize=1)
def _simulated_site(file: str, out: str, spec: str) -> Site:
    """A site with all clients of an experiment file, set up once in each process."""
    experiment = config.read_yaml(Path(file))[0]
    data = client_data(experiment, share_out(experiment, None))
    folder, device, threads = RunFolder(Path(out)), experiment.device, experiment.threads
    newest = JournalFiles(folder.journal).newest
    return Site(RunSpec.read(spec), data, folder.clients, newest, device=device, threads=threads)


class Sealed(Transport):
    """A transport that signs requests, and refuses replies which their client has not signed, whoever sent them.

    Args:
        connect: makes the connection to the clients, given ``facts_of`` as for `SiteTransport`.
        spec: text of the run's spec.
        keys: the public key of each client, as in the roster.
        server: the server's folder, which has the key to sign by and the clients' receipts.
    """

    def __init__(self, connect: Callable[..., Transport], spec: str, keys: Mapping[int, str], server: Path) -> None:
        self._spec, self._keys, self._key = spec, keys, seals.server_key(server)
        self._receipts = seals.Receipts(server / seals.RECEIPTS)
        self._sent: dict[int, str] = {}  # the receipt in the last request to each client
        self._inner = connect(facts_of=self._facts)

    def _facts(self, client: int, request: bytes) -> dict[str, str]:
        receipt = self._sent[client] = self._receipts.of(self._keys[client])
        signature = seals.sign_request(self._key, client, self._spec, request, receipt)
        return {SIGNATURE: signature, RECEIPT: receipt}

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for arrival in self._inner.exchange(request, clients, sent):
            key, seal = self._keys[arrival.client], (arrival.reply, arrival.receipt)
            if arrival.failure is None and not seals.has_signed(key, arrival.signature, self._spec, request, *seal):
                yield arrival._replace(reply=b"", failure="its reply is not signed with its key, which the roster has")
                continue
            if arrival.failure is None:
                self._receipts.note(key, arrival.receipt, self._sent.get(arrival.client, ""))
            yield arrival

    @override
    def close(self) -> None:
        self._inner.close()


class Present(Transport):
    """A transport that asks no client which the roster lacks.

    Args:
        inner: the connection to the others.
        absent: the clients that the roster lacks.
    """

    def __init__(self, inner: Transport, absent: Collection[int]) -> None:
        self._inner, self._absent = inner, absent

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for client in (client for client in clients if client in self._absent):
            yield Arrival(client, b"", "the roster has no key of it")
        if present := [client for client in clients if client not in self._absent]:
            yield from self._inner.exchange(request, present, sent)

    @override
    def close(self) -> None:
        self._inner.close()


class LimitedRecords(Transport):
    """A transport that refuses replies which claim more records than their client may have.

    Args:
        inner: the connection to the clients.
        limits: the largest number of each client that has a limit.
    """

    def __init__(self, inner: Transport, limits: Mapping[int, int]) -> None:
        self._inner = inner
        self._limits = limits

    @override
    def exchange(self, request: bytes, clients: Sequence[int], sent: Callable[[int], None]) -> Iterator[Arrival]:
        for arrival in self._inner.exchange(request, clients, sent):
            limit = self._limits.get(arrival.client)
            claimed = 0 if limit is None else _records(arrival)
            if limit is not None and claimed > limit:
                reason = f"it claims {claimed:,} records; its limit is {limit:,} (max_records)"
                yield arrival._replace(failure=reason)
            else:
                yield arrival

    @override
    def close(self) -> None:
        self._inner.close()


def _records(arrival: Arrival) -> int:
    """The number of records that a reply claims, as one number or by class; 0 for a malformed reply."""
    try:
        tensors, header = wire.unpack(arrival.reply)
        by_class = tensors.get("counts")
        number = header.get("fields", {}).get("num_records", 0)
        return max(int(number), 0 if by_class is None else int(by_class.sum(dtype=torch.float64)))  # never overflows
    except (schema.Refused, AttributeError, TypeError, ValueError, OverflowError, RuntimeError):
        return 0  # the server's other checks refuse it
