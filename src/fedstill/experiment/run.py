"""Run one method on one task, from the data to the finished run folder; resume what a crash left."""

import importlib
import json
import multiprocessing
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import nn

import fedstill
from fedstill import files, wire
from fedstill.data import shards, sources
from fedstill.engines import inprocess
from fedstill.engines.agreement import Agreement
from fedstill.engines.checkpoint import save_images
from fedstill.engines.server import ServerFederation
from fedstill.engines.site import Site, forget_state
from fedstill.engines.terms import Terms
from fedstill.engines.transport import Transport, Watcher
from fedstill.experiment import config
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import Task, held, share_out
from fedstill.protocol import Method, returns_run_model
from fedstill.train.allocator import keep_memory
from fedstill.weights import state

MODEL = "model.safetensors"
_SHOWN = 10
"""Real images of each class beside the synthetic ones in the report."""


class Job(NamedTuple):
    """One run to make.

    Attributes:
        experiment: the task.
        name: the method's name, as `fedstill.methods.get` takes it.
        method: the method with its hyperparameters.
        out: the run's folder.
        label: what tables call the run; the method's name by default.
        command: the command line that makes it again, for the record.
    """

    experiment: Experiment
    name: str
    method: Method
    out: Path
    label: str = ""
    command: str = ""


Sites = Callable[[Terms], Transport]
"""Gives the way to real sites, which are told the run's terms."""


Made = Callable[[nn.Module], None]
"""Sees the finished model."""


def run(
    job: Job,
    *,
    data: sources.DataSet | None = None,
    watcher: Watcher | None = None,
    sites: Sites | None = None,
    task: Task | None = None,
    made: Made | None = None,
) -> dict[str, Any]:
    """Make the run, or finish it if it was begun before, and return its ``summary.json``.

    Args:
        job: what to run and where.
        data: the data set, if it is not one that `fedstill.data.sources.load` can find by ``job.experiment.data``.
        watcher: sees the progress.
        sites: the way to real clients, who have records of their own: the server's data set then only gives the task
            (shape, classes, normalisation) and the test records. By default clients are simulated on this machine.
        task: what simulated clients hold, if it is not what ``job.experiment`` says; it must be the same when a run is
            resumed.
        made: is called with the model before there is a ``summary.json``, so once at least over all starts of a run.

    Raises:
        ValueError: when the folder holds another run, or the task cannot be set up; one sentence.
        TooFewReplies: when too few clients gave a usable reply.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself tells
        raise ValueError(
            "run(...) stands where a worker process that imports the script calls it again; put it under "
            "if __name__ == '__main__':, or take workers=0"
        )
    _suits(job)
    description = config.describe(job.experiment, job.name, job.method, job.label or job.name, job.command)
    job.out.mkdir(parents=True, exist_ok=True)
    with _locked(job.out):
        place = job.out / "config.json"
        if place.exists():
            _same_or_refuse(place, description)
            if (job.out / "summary.json").exists():
                return read_json(job.out / "summary.json", {"accuracy", "seconds"})
        elif leftover := [f.name for f in job.out.iterdir() if f.name != _LOCK and not f.name.endswith(files.PART)]:
            raise ValueError(f"{job.out} holds {leftover[0]} and no run; choose an empty folder with --out")
        task = task or share_out(job.experiment, data, share=sites is None)
        agreement = agreement_of(job, task)
        assert agreement.facts  # the model can be built, or this is the place to say why not
        everything = held(job.experiment, task)
        everything.public()  # likewise
        kept = read_json(place, set()) if place.exists() else {}
        number = kept.get("run") or secrets.token_hex(16)  # earlier versions gave none
        facts = {"version": fedstill.__version__, "fingerprint": task.fingerprint, "run": number}
        facts |= {key: kept[key] for key in ("extends", "answers") if key in kept}
        files.write_json(place, {**description, **facts})
        if sites is None:
            return _simulated(job, task, agreement, watcher or Watcher(), everything, made)
        terms = Terms.of(
            agreement, run=number, method=job.name, class_names=task.class_names, public=job.experiment.public
        )
        return _run(job, task, agreement, watcher or Watcher(), everything, sites(terms), made)


def _suits(job: Job) -> None:
    """Refuse a task that the method is not made for."""
    kind, experiment = type(job.method), job.experiment
    if experiment.models and not kind.mixed:
        raise ValueError(f"{job.name} wants one model for all clients; leave --models out and choose it with --model")
    if experiment.min_clients is not None and experiment.min_clients > experiment.clients:
        raise ValueError(
            f"--min-clients is {experiment.min_clients}, but there are {experiment.clients} clients; it can be no more "
            "than that"
        )
    if kind.personal and not experiment.local_test:
        raise ValueError(
            f"{job.name} gives every client a model of its own, which only clients can judge; let them keep records "
            "for that with --local-test 0.2"
        )
    if experiment.local_test and not returns_run_model(kind):
        raise ValueError(
            f"{job.name} ends with a network that is put together at the server, which clients can't judge; leave "
            "--local-test out"
        )


def agreement_of(job: Job, task: Task) -> Agreement:
    """What server and clients of a run agree on."""
    return Agreement(
        method=job.method,
        model=job.experiment.model,
        shape=task.train.shape,
        num_classes=task.train.num_classes,
        normalisation=task.train.normalisation,
        seed=job.experiment.seed,
        max_bytes=job.experiment.max_message_mb * 10**6,
        delta=job.experiment.delta,
        budget=job.experiment.budget,
        simulated_noise=job.experiment.noise == "simulated",
        models=job.experiment.models,
    )


def _simulated(
    job: Job, task: Task, agreement: Agreement, watcher: Watcher, held: shards.Shards, made: Made | None
) -> dict[str, Any]:
    experiment, out = job.experiment, job.out
    holdings = {"class_names": list(task.class_names), "counts": task.counts().tolist()}
    files.write_json(out / "partition.json", holdings)
    make_site = partial(
        Site,
        agreement,
        held,
        out / "clients",
        device=experiment.device,
        threads=experiment.threads,
    )
    keep_memory()
    with _transport(experiment, make_site) as transport:
        return _run(job, task, agreement, watcher, held, transport, made)


def _run(
    job: Job,
    task: Task,
    agreement: Agreement,
    watcher: Watcher,
    held: shards.Shards,
    transport: Transport,
    made: Made | None,
) -> dict[str, Any]:
    experiment = job.experiment
    federation = ServerFederation(
        agreement,
        transport,
        num_clients=experiment.clients,
        folder=job.out,
        test=task.test,
        public=held.public(),
        min_clients=experiment.min_clients,
        keep_replies=experiment.keep_replies,
        evaluate_every=experiment.evaluate_every,
        device=experiment.device,
        watcher=watcher,
        local_test=experiment.local_test > 0,
    )
    model = job.method.server(federation)
    if made is not None:
        made(model)
    return _finish(job, task, federation, model)


@contextmanager
def _transport(experiment: Experiment, make_site: Callable[[], Site]) -> Iterator[Transport]:
    number = experiment.num_workers
    if experiment.engine == "flower":
        with _flower().simulation(
            make_site,
            experiment.clients,
            cpus=experiment.cpus_per_client,
            gpus=experiment.gpus_per_client,
            workers=experiment.workers,
            timeout=experiment.timeout,
        ) as simulated:
            yield simulated
        return
    local = (
        inprocess.Workers(make_site, number, timeout=experiment.timeout) if number else inprocess.Inline(make_site())
    )
    try:
        yield local
    finally:
        local.close()


def _flower() -> ModuleType:
    try:
        return importlib.import_module("fedstill.engines.flower.simulation")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the engine 'flower' needs the package {error.name}, which is not installed; pip install "
            "'fedstill[flower]', or take --engine inprocess"
        ) from error


def _finish(job: Job, task: Task, federation: ServerFederation, model: nn.Module) -> dict[str, Any]:
    out, journal = job.out, federation.journal
    seconds = journal.seconds
    header = {"model": job.experiment.model, **task.described()}
    files.write_bytes(out / MODEL, wire.pack(state(model), header))
    judgement = federation.last(model)
    files.write_json(out / "evaluation.json", {"confusion": judgement.confusion.tolist()})
    first = [torch.nonzero(task.test.labels == c).flatten()[:_SHOWN] for c in range(task.test.num_classes)]
    save_images(out / "images" / "real.npz", task.test[torch.cat(first)])
    clients = job.experiment.clients
    summary = {
        "method": job.name,
        "label": job.label or job.name,
        "data": job.experiment.data,
        "partition": job.experiment.partition,
        "clients": clients,
        "model": job.experiment.model,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "rounds": federation.num_rounds,
        "seed": job.experiment.seed,
        "judged_on": _judged_on(job.experiment),
        "accuracy": judgement.accuracy,
        "bytes_up": journal.bytes_up,
        "bytes_down": journal.bytes_down,
        "bytes_up_per_client": journal.bytes_up / clients,
        "bytes_down_per_client": journal.bytes_down / clients,
        "bytes_judging": journal.bytes_judging,
        "seconds": round(seconds, 2),
        "guarantee": asdict(federation.guarantee()),
        "refused": [asdict(refusal) for refusal in journal.refusals()],
        "version": fedstill.__version__,
    }
    if judgement.clients is not None:
        summary |= {"accuracy_of_clients": judgement.clients, "spread_over_clients": judgement.spread}
    files.write_json(out / "summary.json", summary)
    forget_state(out / "clients", keep={refusal.client for refusal in journal.refusals()})
    return summary


def _judged_on(experiment: Experiment) -> str:
    if experiment.local_test:
        return "the clients' own test records"
    return "validation records" if experiment.validation else "test records"


_LOCK = ".lock"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder; the system opens the lock when its holder dies, however it dies."""
    try:
        with FileLock(folder / _LOCK, timeout=0):
            yield
    except Timeout as error:
        raise ValueError(
            f"{folder} is being written by another process; wait for it or choose another --out"
        ) from error


def _same_or_refuse(place: Path, description: dict[str, Any]) -> None:
    if other := config.difference(read_json(place, {"experiment", "method"}), description):
        raise ValueError(f"{place.parent} holds a run with {other}; choose another --out, or delete it to start anew")


def read_json(place: Path, keys: set[str]) -> dict[str, Any]:
    """A file of a run folder that holds ``keys``; raises `Damaged` where it does not."""
    try:
        found = json.loads(place.read_text())
        if not (isinstance(found, dict) and keys <= found.keys()):
            raise ValueError(f"it must hold {', '.join(sorted(keys))}")
    except (OSError, ValueError, RecursionError) as error:
        raise files.Damaged(f"{place} is damaged ({error}); delete {place.parent} and run again") from error
    return found
