"""Run a method on a task, from the data to the finished run folder; resume an interrupted run."""

import logging
import multiprocessing
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

import fedstill
from fedstill import locks
from fedstill.data import places, public, sources
from fedstill.engines import outliers
from fedstill.engines.client_state import forget_state
from fedstill.engines.run_spec import DEFAULTS, RunSpec
from fedstill.engines.server import ServerFederation
from fedstill.engines.site import Site
from fedstill.engines.transport import Transport, Watcher, Watchers
from fedstill.experiment import clients, config, overlap, told
from fedstill.experiment.checks import check_job, check_records, warn_of_depth
from fedstill.experiment.config import Experiment
from fedstill.experiment.finished import check_facts, public_facts
from fedstill.experiment.job import Job
from fedstill.experiment.lines import Lines, Quiet
from fedstill.experiment.simulation import connect
from fedstill.experiment.task import Task, client_data, share_out
from fedstill.journal import Journal
from fedstill.runs import environment, formats
from fedstill.runs.contents import Config
from fedstill.runs.folder import RunFolder
from fedstill.runs.lock import Taken
from fedstill.settings import sentence
from fedstill.train.allocator import keep_memory
from fedstill.weights import state

log = logging.getLogger("fedstill")
_SHOWN = 10
"""Number of real images of each class in the report."""


def run(
    job: Job,
    *,
    data: sources.DataSet | None = None,
    watcher: Watcher | None = None,
    sites: Callable[[RunSpec], Transport] | None = None,
    task: Task | None = None,
    on_model: Callable[[nn.Module], None] | None = None,
) -> dict[str, Any]:
    """Run ``job``, or resume it if it was interrupted, and return its ``summary.json``.

    The logger "fedstill" gets lines about the progress at level INFO. Runs in several threads of a process compute
    their steps in turn, and each gives the result that it gives alone. A start that fails before it has asked a client
    leaves no folder.

    Args:
        job: the run.
        data: the data set, if `fedstill.data.sources.load` cannot find it by ``job.experiment.data``.
        watcher: observes the progress.
        sites: connects to real sites, which have their own records; the server's data set then only gives image shape,
            classes, normalisation and test records. By default clients are simulated on this machine.
        task: records of the simulated clients, if ``job.experiment`` does not describe them; a resumed run needs the
            same.
        on_model: receives the final model before ``summary.json`` is written; a resumed run may call it again.

    Raises:
        ValueError: the folder has another run (`fedstill.runs.lock.Taken`), or the task cannot be set up; one
            sentence.
        TooFewReplies: too few clients gave a usable reply.
    """
    _refuse_worker()
    if not isinstance(job, Job):
        raise ValueError(f"run takes a Job, not {job!r}: run(Job(experiment, method, 'runs/first'))")
    check_job(job, late=_is_extension(job))
    if sites is not None and (job.experiment.drop or job.experiment.slow):
        raise ValueError("--drop and --slow are for simulated clients; real sites fail by themselves")
    if sites is not None and job.experiment.validation:
        raise ValueError("--validation splits the records of simulated clients; leave it out with real sites")
    with locks.PROCESS:  # a new thread takes over the number of threads, which a step of another run may have changed
        torch.get_num_threads()
    with RunFolder(job.out).locked(), _watched(watcher, job) as both:
        return _run(job, data, both, sites, task, on_model)


@contextmanager
def _watched(watcher: Watcher | None, job: Job) -> Iterator[Watcher]:
    """``watcher`` and, if anybody reads them, lines for `logging`."""
    if not log.isEnabledFor(logging.INFO):
        yield watcher or Quiet()
        return
    with Lines(log.info, job.title) as lines:
        yield Watchers(watcher, lines) if watcher else lines


def _run(
    job: Job,
    data: sources.DataSet | None,
    watcher: Watcher,
    sites: Callable[[RunSpec], Transport] | None,
    task: Task | None,
    on_model: Callable[[nn.Module], None] | None,
) -> dict[str, Any]:
    """As `run`, in the locked folder."""
    experiment, folder, description = job.experiment, RunFolder(job.out), job.description()
    begun = _begun(folder, description)
    if begun is not None and folder.summary.exists():
        folder.read_summary()
        Journal(folder.journal).check_answered(experiment.min_clients or experiment.clients)
        if sites is None and (task is not None or data is not None or places.is_own(experiment.data)):
            now = task or share_out(experiment, data, share=False)
            check_facts(folder.path, begun, {"fingerprint": now.fingerprint})
        if experiment.public is not None and public.is_own(experiment.public):
            check_facts(folder.path, begun, public_facts(experiment))
        summary = formats.checked(folder.read_json(folder.summary), folder.summary)
        _forget_states(folder, Journal(folder.journal))  # which a process killed at the end may have kept
        watcher.finished(summary, folder.finished)
        return summary
    task = task or share_out(experiment, data, share=sites is None, progress=watcher.progressed)
    check_records(job, task)
    facts = {"version": fedstill.__version__, "fingerprint": task.fingerprint, **public_facts(experiment)}
    check_facts(folder.path, begun, facts)
    spec = spec_of(job, task, (begun and begun.run) or secrets.token_hex(16))
    assert spec.facts  # raises where the model cannot be built
    warn_of_depth(spec)
    data_of_clients = client_data(experiment, task)
    public_records = data_of_clients.public()
    origin = {} if begun is None else begun.model_dump(include={"extends", "answers"}, exclude_none=True)
    if sites is not None:
        spec = told.as_told(folder.path, begun, spec, public_records)
        origin["spec"] = spec.text()
    folder.write_config({**description, **facts, "run": spec.run, **origin})
    is_first = _note_environment(folder, experiment.device, watcher)
    if is_first and (source := origin.get("answers") or origin.get("extends")):
        watcher.reused(source)
    if sites is None:
        folder.write_partition(task.class_names, task.counts(), task.values)
        keep_memory()
        make_site = partial(
            Site, spec, data_of_clients, folder.clients, device=experiment.device, threads=experiment.threads
        )
    late = "extends" in origin
    with connect(job, make_site, late=late) if sites is None else sites(spec) as transport:
        federation = ServerFederation(
            spec,
            transport,
            num_clients=experiment.clients,
            folder=job.out,
            test=task.test,
            public=public_records,
            min_clients=experiment.min_clients,
            keep_replies=experiment.keep_replies,
            evaluate_every=experiment.evaluate_every,
            evaluate_uploads=experiment.evaluate_uploads,
            device=experiment.device,
            watcher=watcher,
            local_test=experiment.local_test > 0,
        )
        model = outliers.checked_model(job.name, job.method.server(federation))
        if on_model is not None:
            on_model(model)
        summary = _finish(job, task, folder, federation, model, data)
    watcher.finished(summary, None)
    return summary


def _is_extension(job: Job) -> bool:
    """Whether the run's folder was prepared for an extension, which asks the slow clients too."""
    folder = RunFolder(job.out)
    return folder.config.exists() and folder.read_config().extends is not None


def _refuse_worker() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the mark that multiprocessing itself checks
        raise ValueError(
            "run(...) is called again by a worker process, which imports the script; put it under "
            "if __name__ == '__main__':, or set workers=0"
        )


def _begun(folder: RunFolder, description: dict[str, Any]) -> Config | None:
    """The configuration of an earlier start of the same run; None in a new folder.

    Raises:
        Taken: the folder has another run.
        ValueError: the folder has other files.
    """
    if folder.config.exists():
        begun = folder.read_config()
        if other := config.difference(begun.content, description):
            raise Taken(f"{folder} has a run with {other}; choose another --out, or delete it to start anew")
        return begun
    if name := folder.stranger():
        raise ValueError(f"{folder} has {name} and no run; choose an empty folder with --out")
    return None


def _note_environment(folder: RunFolder, device: str, watcher: Watcher) -> bool:
    """Store the environment of this start, and say so if it differs from that of the last; whether there was none."""
    now, before = environment.environment(device), folder.read_environments()
    folder.append_environment(now)
    if before and (changes := environment.changes(before[-1], now)):
        watcher.noted(f"resuming in another environment ({changes}); the last bits of the result may differ")
    return not before


def spec_of(job: Job, task: Task, run: str = DEFAULTS["run"]) -> RunSpec:
    """The spec of a run; ``run`` is its random number.

    Raises:
        ValueError: a value is out of its range; one sentence.
    """
    experiment = job.experiment
    try:
        return RunSpec.of(
            job.method,
            task.train,
            name=job.name,
            run=run,
            class_names=task.class_names,
            model=experiment.model,
            seed=experiment.seed,
            max_bytes=experiment.max_message_mb * 10**6,
            delta=experiment.delta,
            budget=experiment.budget,
            simulated_noise=experiment.noise == "simulated",
            models=experiment.models,
            public=experiment.public,
            features=experiment.features,
            backbone=task.backbone,
        )
    except ValidationError as error:
        raise ValueError(f"the run is not possible: {sentence(error)}") from error


def _finish(
    job: Job,
    task: Task,
    folder: RunFolder,
    federation: ServerFederation,
    model: nn.Module,
    data: sources.DataSet | None,
) -> dict[str, Any]:
    """Write the results of the run."""
    experiment, journal = job.experiment, federation.journal
    seconds = journal.seconds
    folder.write_model(state(model), federation.spec.task)
    evaluation = federation.last(model)
    folder.write_evaluation(evaluation.confusion)
    if not task.test.are_vectors:
        first = [torch.nonzero(task.test.labels == c).flatten()[:_SHOWN] for c in range(task.test.num_classes)]
        folder.write_images("real", task.test[torch.cat(first)])
    summary = {
        "method": job.name,
        "label": job.label or job.name,
        "data": experiment.data,
        "partition": experiment.partition,
        "clients": experiment.clients,
        "model": experiment.model,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "rounds": federation.done,
        "seed": experiment.seed,
        "judged_on": _test_records(experiment),
        "accuracy": evaluation.accuracy,
        "bytes_up": journal.bytes_up,
        "bytes_down": journal.bytes_down,
        "bytes_up_per_client": journal.bytes_up / experiment.clients,
        "bytes_down_per_client": journal.bytes_down / experiment.clients,
        "bytes_judging": journal.bytes_judging,
        "seconds": round(seconds, 2),
        "guarantee": asdict(overlap.guarantee_of(federation.guarantee(), experiment, task, federation.public, data)),
        "refused": [asdict(refusal) for refusal in journal.refusals()],
        "version": fedstill.__version__,
        "finished": environment.now(),
    }
    if evaluation.clients is not None:
        summary |= {"accuracy_of_clients": evaluation.clients, "spread_over_clients": evaluation.spread}
    own = clients.results(folder, task, experiment.clients, evaluation.clients, journal.refusals())
    folder.write_clients(own)
    folder.write_summary(summary)
    _forget_states(folder, journal)
    return summary


def _forget_states(folder: RunFolder, journal: Journal) -> None:
    """Delete what simulated clients kept, but of those that were refused, which may be asked again."""
    forget_state(folder.clients, keep={refusal.client for refusal in journal.refusals()})


def _test_records(experiment: Experiment) -> str:
    own = "the clients' own " if experiment.local_test else ""
    return own + ("validation records" if experiment.validation else "test records")
