"""A run among real sites: what the server and the sites do when Flower starts them (`fedstill.sites.app`)."""

import logging
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedstill import schema
from fedstill.engines.site import Site
from fedstill.engines.terms import Terms
from fedstill.engines.transport import Transport, Watcher
from fedstill.experiment import config, extend
from fedstill.experiment.run import Job, run
from fedstill.experiment.task import held, share_out
from fedstill.journal import Refusal
from fedstill.runs.folder import RunFolder
from fedstill.sites.policy import Policy, PolicySite

Config = Mapping[str, Any]
log = logging.getLogger("fedstill")


class Lines(Watcher):
    """Progress as lines, for a log."""

    def asked(self, step: str, clients: int, answered: int) -> None:
        """See `Watcher`."""
        print(f"asking {clients} clients: {step}" + (f" ({answered} have answered)" if answered else ""), flush=True)

    def arrived(self, refusal: Refusal | None) -> None:
        """See `Watcher`."""
        if refusal is not None:
            print(f"client {refusal.client} is left out: {refusal.reason}", flush=True)

    def logged(self, round: int, rounds: int, values: Mapping[str, float]) -> None:
        """See `Watcher`."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        print(f"round {round} of {rounds}: {numbers}", flush=True)


def serve(connect: Callable[..., Transport], settings: Config) -> None:
    """The server's part of a run.

    Args:
        connect: from the run's terms (JSON), the number of clients and seconds to wait to the way to the sites.
        settings: ``file``, an experiment file on the server; ``out``, the run's folder; ``wait``, seconds to wait for
            sites; ``at-a-time``, how many sites have a question at a time, 0 for all; ``nodes``, whose node each
            client's is, as ``0:ID,1:ID``. In place of ``file``: ``extend``, a finished run, with ``clients``, how many
            sites there are now.

    Raises:
        ValueError: a setting is missing or wrong.
    """
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stdout))
    job = _job(settings)
    experiment = job.experiment
    wait = float(settings.get("wait", 600.0))
    nodes = _nodes(str(settings.get("nodes") or ""), experiment.clients)
    at_a_time = int(settings.get("at-a-time", 0))
    if at_a_time < 0:
        raise ValueError(f"at-a-time is {at_a_time}; it must be 0 (all sites at once) or more")

    def sites(terms: Terms) -> Transport:
        return connect(
            terms.model_dump_json(),
            experiment.clients,
            wait=wait,
            timeout=experiment.timeout,
            at_a_time=at_a_time,
            nodes=nodes,
        )

    summary = run(job, watcher=Lines(), sites=sites)
    print(f"accuracy {100 * summary['accuracy']:.2f} %, results in {job.out}", flush=True)


def _nodes(text: str, clients: int) -> dict[int, int] | None:
    """Flower's id of the node of each client of the run, of which the list may know more; None without a list."""
    if not text:
        return None
    pairs = [re.fullmatch(r"\s*(\d{1,9}):(\d{1,20})\s*", part, re.ASCII) for part in text.split(",")]
    found = {int(pair[1]): int(pair[2]) for pair in pairs if pair}
    if len(found) < len(pairs) or len(set(found.values())) < len(found) or not found.keys() >= set(range(clients)):
        raise ValueError(
            f"nodes is {schema.clean(text, 200)!r}; it must give each of the clients 0 to {clients - 1} one node of "
            "its own, as in 0:1234,1:5678 (flwr supernode list)"
        )
    return {client: found[client] for client in range(clients)}


def _job(settings: Config) -> Job:
    for name in ("extend" if settings.get("extend") else "file", "out"):
        if not settings.get(name):
            raise ValueError(f"--run-config must give '{name}', as in --run-config 'file=\"/path/run.yaml\" out=...'")
    out = Path(str(settings["out"]))
    if not settings.get("extend"):
        experiment, method_name, method = config.read_yaml(Path(str(settings["file"])))
        return Job(experiment, method_name, method, out, command=f"flwr run, {settings['file']}")
    finished = Path(str(settings["extend"]))
    job = extend.read_job(finished, out, f"flwr run, extending {finished}")
    if clients := int(settings.get("clients") or 0):
        job = job._replace(experiment=job.experiment.model_copy(update={"clients": clients}))
    extend.begin(finished, job)
    return job


class Deployed:
    """A real site: its node is told where its policy file is, and nothing else."""

    def __init__(self, policy: Policy) -> None:
        self.number = policy.client
        self._site = PolicySite(policy)

    def answer(self, client: int, terms: str, request: bytes) -> bytes:
        """See `Player.answer`; the site knows its own number."""
        return self._site.answer(terms, request)


@lru_cache(maxsize=1)
def _simulated_site(file: str, out: str, terms: str) -> Site:
    """Plays every client of an experiment file; set up once in a process that answers for many."""
    experiment = config.read_yaml(Path(file))[0]
    everything = held(experiment, share_out(experiment, None))
    agreed = Terms.read(terms).agreement()
    return Site(agreed, everything, RunFolder(Path(out)).clients, device=experiment.device, threads=experiment.threads)


class Simulated:
    """A node of Flower's simulation: it holds what the experiment file gives to its number."""

    def __init__(self, number: int, settings: Config) -> None:
        self.number = number
        self._settings = settings

    def answer(self, client: int, terms: str, request: bytes) -> bytes:
        """See `Player.answer`."""
        return _simulated_site(str(self._settings["file"]), str(self._settings["out"]), terms).answer(client, request)


def player(node: Config, settings: Config) -> Deployed | Simulated:
    """What answers at a node.

    Raises:
        ValueError: the node has neither a policy file nor a number.
    """
    if "policy" in node:
        return Deployed(Policy.read(Path(str(node["policy"]))))
    if "partition-id" in node:
        return Simulated(int(node["partition-id"]), settings)
    raise ValueError("the node has no policy; start it with --node-config 'policy=\"/path/policy.toml\"'")
