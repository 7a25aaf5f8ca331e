"""Run a method on a task, from the data to the finished run folder; resume an interrupted run."""

import importlib
import logging
import multiprocessing
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

import fedstill
from fedstill.base import errors, processes
from fedstill.base.processes import keep_memory
from fedstill.base.records import Records
from fedstill.base.settings import sentence
from fedstill.base.weights import state
from fedstill.data import places, public, sources
from fedstill.engines import reply_checks, transport
from fedstill.engines.client import Site
from fedstill.engines.client_evaluation import EvaluationResult
from fedstill.engines.column_scale import PrivateScale
from fedstill.engines.masked_sums import MaskedSums, Parties, adders_of, simulated_parties
from fedstill.engines.run_spec import DEFAULTS, RunSpec
from fedstill.engines.server import ServerFederation
from fedstill.engines.transport import Losing, Transport, Watcher, Watchers
from fedstill.evaluation import MOST_VALUES, Numbers, confusion_by_value
from fedstill.experiment import config, overlap
from fedstill.experiment.checks import check_classes, check_job, check_records, warn_of_depth
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job, is_importable
from fedstill.experiment.judging import measured, measures_of_two
from fedstill.experiment.progress import Lines, Quiet
from fedstill.experiment.reuse import check_begun, check_facts, check_schema, public_facts
from fedstill.experiment.task import Task, client_data, measured_columns, scaled, share_out
from fedstill.privacy import guarantee
from fedstill.runs import environment, formats
from fedstill.runs.folder import SITES, RunFolder, Taken
from fedstill.runs.journal import EVALUATIONS, Journal, JournalFiles, Refusal
from fedstill.runs.pieces import Config

_SETTINGS = {"max_bytes": "max_bytes (--max-message-mb)"}
"""Name of the flag for each field of a `RunSpec` that is called otherwise."""


def as_told(run: Path, begun: Config | None, spec: RunSpec, public_records: Records | None) -> RunSpec:
    """The spec with a sample of the public records; of a run that was begun before, the same as then.

    Sites name a run's state by all of its spec: with another they would take it for another run, forget what they did
    and release again.

    Args:
        run: the run's folder.
        begun: its ``config.json``; None before its first start.
        spec: the spec of this start.
        public_records: the server's public records.

    Raises:
        ValueError: a fact is another than at the first start.
    """
    before = None if begun is None or begun.spec is None else RunSpec.read(begun.spec)
    if before is not None:
        spec = spec.replace(public_sample=before.public_sample)
    elif public_records is not None and spec.public is not None and not public.is_noise(spec.public):
        spec = spec.replace(public_sample=public.sample(public_records))
    if before is not None and spec.text() != before.text():
        old, new = (one.model_dump(mode="json") for one in (before, spec))
        name = next(name for name in new if old[name] != new[name])
        raise ValueError(
            f"{run} was begun with {_SETTINGS.get(name, name)} = {old[name]}, now it is {new[name]}; the sites would "
            "take it for another run and release again: bring the former back, or start anew with another --out"
        )
    return spec


def connect(job: Job, make_site: Callable[[], Site], *, late: bool = False) -> Transport:
    """The transport to the simulated clients, by the engine of the job's experiment.

    Args:
        job: the run.
        make_site: makes the clients' side.
        late: whether the run extends a finished one, and asks only the clients whose reply is missing.

    Raises:
        ValueError: the engine's package is not installed, or the clients would run in this process and have a time
            limit.
    """
    transport, experiment = _engine(job, make_site), job.experiment
    if late or not (experiment.drop or experiment.slow):
        return transport
    return Losing(transport, experiment.clients, seed=experiment.seed, drop=experiment.drop, slow=experiment.slow)


def _engine(job: Job, make_site: Callable[[], Site]) -> Transport:
    experiment = job.experiment
    if experiment.engine == "flower":
        simulation: Transport = _flower().Simulation(
            make_site,
            experiment.clients,
            cpus=experiment.cpus_per_client,
            gpus=experiment.gpus_per_client,
            workers=experiment.workers,
            timeout=experiment.timeout,
        )
        return simulation
    if experiment.num_workers and is_importable(job):
        return transport.Workers(make_site, experiment.num_workers, timeout=experiment.timeout)
    if experiment.timeout is not None:
        why = "their code is in no file" if experiment.num_workers else "there are no --workers"
        raise ValueError(
            f"--timeout is {experiment.timeout:g}, but the clients run in the server's process, as {why}, and no step "
            "of theirs can be ended there; drop --timeout or use --workers 1 (with a GPU: --engine flower)"
        )
    return transport.Inline(make_site())


def _flower() -> ModuleType:
    try:
        return importlib.import_module("fedstill.engines.flower.simulation")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the engine 'flower' needs the package {error.name}, which is not installed; "
            f"{errors.install('flower')}, or use --engine inprocess"
        ) from error


def results(
    folder: RunFolder, task: Task, clients: int, evaluation: EvaluationResult, refused: Sequence[Refusal]
) -> list[dict[str, Any]]:
    """A row for each client.

    Args:
        folder: the run's folder, whose journal has the messages.
        task: the task; without parts if real sites have the records.
        clients: number of clients.
        evaluation: of the final model; perhaps by clients on their own test records.
        refused: the replies that were not used.
    """
    accuracies, cells = evaluation.clients or {}, evaluation.cells or {}
    rows: list[dict[str, Any]] = [
        {
            "client": client,
            "accuracy": accuracies.get(client),
            "confusion": cells.get(client),
            "records": len(task.parts[client][0]) if task.parts else None,
            "test_records": len(task.parts[client][1]) if task.parts else None,
            "bytes_up": 0,
            "bytes_down": 0,
            "refused": sum(refusal.client == client for refusal in refused),
        }
        for client in range(clients)
    ]
    for message in JournalFiles(folder.journal).messages():
        if message["exchange"] < EVALUATIONS:
            row = rows[message["client"]]
            row["bytes_up"] += message.get("up", 0)
            row["bytes_down"] += message.get("down", 0)
    return rows


log = logging.getLogger("fedstill")
_SHOWN = 10
"""Number of real images of each class in the report."""


def run(
    job: Job,
    *,
    data: sources.DataSet | None = None,
    watcher: Watcher | None = None,
    sites: Callable[[RunSpec], Transport] | None = None,
    parties: Parties | None = None,
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
        parties: helpers and keys of the masked sums of real sites.
        task: records of the simulated clients, if ``job.experiment`` does not describe them; a resumed run needs the
            same.
        on_model: receives the final model before ``summary.json`` is written; a resumed run may call it again.

    Raises:
        ValueError: the folder has another run (`fedstill.runs.folder.Taken`), or the task cannot be set up.
        TooFewReplies: too few clients gave a usable reply.
    """
    _refuse_worker()
    if not isinstance(job, Job):
        raise ValueError(f"run takes a Job, not {job!r}: run(Job(experiment, method, 'runs/first'))")
    check_job(job, late=_is_extension(job))
    if sites is not None and (job.experiment.drop or job.experiment.slow):
        raise ValueError("--drop and --slow are for simulated clients; real sites fail by themselves")
    if sites is not None:
        check_classes(job.experiment, "a run with real sites")
    if sites is not None and parties is None and job.experiment.masked is not None:
        raise ValueError("--sums masked needs helpers, which the server's roster names; use --sums open without one")
    if sites is not None and not RunFolder(job.out).config.exists():  # not on the replies of an earlier run
        _refuse_shares(job.experiment)
    with (
        processes.PROCESS
    ):  # a new thread takes over the number of threads, which a step of another run may have changed
        torch.get_num_threads()
        if processes.is_copy():
            torch.set_num_threads(1)  # a copy waits for ever for the threads that its parent computed with
    with RunFolder(job.out).locked(), _watched(watcher, job) as both:
        return _run(job, data, both, sites, parties, task, on_model)


def _refuse_shares(experiment: Experiment) -> None:
    """Refuse settings that choose among the records of simulated clients: a real site has its own."""
    chosen = {
        "--validation": experiment.validation,
        "--limit": experiment.limit,
        "--group-bound": experiment.group_bound,
        "--group": experiment.group not in (None, "none"),
    }
    if given := next((flag for flag, value in chosen.items() if value), None):
        raise ValueError(f"{given} chooses among the records of simulated clients; leave it out with real sites")


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
    parties: Parties | None,
    task: Task | None,
    on_model: Callable[[nn.Module], None] | None,
) -> dict[str, Any]:
    """As `run`, in the locked folder."""
    experiment, folder, description = job.experiment, RunFolder(job.out), job.description()
    begun = _begun(folder, description)
    if begun is not None and folder.summary.exists():
        summary = _finished_before(folder, begun, experiment, None if sites is not None else (data, task))
        watcher.finished(summary, folder.finished)
        return summary
    published = public_facts(experiment)  # first: what is read later is compared with it
    task = task or share_out(experiment, data, share=sites is None, progress=watcher.progressed)
    check_records(job, task)
    facts = {"version": fedstill.__version__, "fingerprint": task.fingerprint, **published}
    check_begun(folder, begun, facts, experiment)
    number = (begun and begun.run) or secrets.token_hex(16)
    parties = parties or parties_of(job, number, folder.helpers)
    spec = spec_of(job, task, number, parties)
    assert spec.facts  # raises where the model cannot be built
    warn_of_depth(spec)
    data_of_clients = client_data(experiment, task, watcher.progressed, published.get("public_fingerprint"))
    public_records = data_of_clients.public()
    origin = {} if begun is None else begun.model_dump(include={"extends", "answers"}, exclude_none=True)
    if sites is not None:
        spec = as_told(folder.path, begun, spec, public_records)
        origin["spec"] = spec.text()
    origin |= _source(experiment, own=data is None and sites is None)
    folder.write_config({**description, **facts, "run": spec.run, **origin}, private=not (sites or task.known))
    _tell(watcher, task, origin, is_first=_note_environment(folder, experiment.device, watcher))
    if sites is None:
        folder.write_partition(task.class_names, task.counts(), task.values, (*task.origin, *task.remarks))
        keep_memory()
        where: dict[str, Any] = {"device": experiment.device, "threads": experiment.threads}
        make_site = partial(Site, spec, data_of_clients, folder.clients, JournalFiles(folder.journal).newest, **where)
    late = "extends" in origin
    with connect(job, make_site, late=late) if sites is None else sites(spec) as transport:
        federation = _federation(job, spec, transport, task, public_records, watcher, parties)
        federation.measure_scale()
        task = task if spec.scale is None else scaled(task, federation.like.normalisation)
        model = reply_checks.checked_model(job.name, job.method.server(federation))
        if on_model is not None:
            on_model(model)
        summary = _finish(job, task, folder, federation, model, data)
    watcher.finished(summary, None)
    return summary


def _source(experiment: Experiment, *, own: bool) -> dict[str, Any]:
    """The content of the table's schema, and the place of somebody's ``own`` records, for ``config.json``."""
    found: dict[str, Any] = {}
    if (schema := experiment.table_schema) is not None:
        found["table_schema"] = schema.model_dump(mode="json")
    if own and (place := places.own_place(experiment.data)) is not None:
        found["data_path"] = str(place)
    return found


def _tell(watcher: Watcher, task: Task, origin: dict[str, Any], *, is_first: bool) -> None:
    """Tell what was read, and at the first start of a run also where from, and whose replies it begins with."""
    if is_first:
        watcher.read(task.origin)
    for remark in task.remarks:
        watcher.noted(remark)
    if is_first and (source := origin.get("answers") or origin.get("extends")):
        watcher.reused(source)


def _finished_before(
    folder: RunFolder,
    begun: Config,
    experiment: Experiment,
    given: tuple[sources.DataSet | None, Task | None] | None,
) -> dict[str, Any]:
    """The summary of a run that was finished before, whose records are still the same.

    Args:
        folder: the run's folder.
        begun: its ``config.json``.
        experiment: the task, as it is asked for now.
        given: the data set and the task of the simulation, where somebody gave them; None for real sites.
    """
    folder.check_results()
    Journal(folder.journal).check_answered(experiment.min_clients or experiment.clients)
    if given is not None and (given != (None, None) or places.is_own(experiment.data)):
        data, task = given
        now = task or share_out(experiment, data, share=False)
        check_facts(folder.path, begun, {"fingerprint": now.fingerprint})
    if experiment.public is not None and public.is_own(experiment.public):
        check_facts(folder.path, begun, public_facts(experiment))
    check_schema(folder.path, begun, experiment)
    _forget_states(folder, Journal(folder.journal))  # which a process killed at the end may have kept
    return formats.checked(folder.read_json(folder.summary), folder.summary)


def _federation(
    job: Job,
    spec: RunSpec,
    transport: Transport,
    task: Task,
    public_records: Records | None,
    watcher: Watcher,
    parties: Parties | None,
) -> ServerFederation:
    """The server's side of a run."""
    experiment = job.experiment
    return ServerFederation(
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
        helpers=() if parties is None else parties.reach(spec.text()),
    )


def parties_of(job: Job, run: str, folder: Path) -> Parties | None:
    """The simulated helpers of a run, whose keys lie in ``folder`` until the run ends; None if its sums are open."""
    options = job.experiment.masked
    if options is None:
        return None
    return simulated_parties(folder, options.helpers, run, job.experiment.clients)


def masked_sums(job: Job, parties: Parties) -> MaskedSums | None:
    """What all parties of a run agree on about its masked sums; None for open ones.

    Raises:
        ValueError: the honest clients are too few.
    """
    experiment = job.experiment
    options = experiment.masked
    if options is None:
        return None
    assert options.least is not None
    adders = adders_of(options.least, experiment.clients, options.colluding)
    if adders < 1:
        raise ValueError(
            f"of {experiment.clients} clients a share of {options.colluding:g} may work with the server (colluding), "
            f"which leaves none whose noise counts in a set of {options.least}; lower it, or raise least"
        )
    if len(parties.keys) != options.helpers:
        raise ValueError(
            f"sums is {experiment.sums!r} with {options.helpers} helpers, but the roster names {len(parties.keys)}; "
            f"say helpers={len(parties.keys)}, or change who helps (fedstill server invite FOLDER CLIENT --helper)"
        )
    return MaskedSums(
        signers=tuple(signer.hex() for signer, _ in parties.keys),
        boxes=tuple(box.hex() for _, box in parties.keys),
        traitors=options.traitors,
        least=options.least,
        adders=adders,
        clients=experiment.clients,
        width=options.width,
        records=options.records,
        members=tuple(key.hex() for key in parties.members),
    )


def private_scale(experiment: Experiment, task: Task) -> PrivateScale | None:
    """The columns whose scale a run measures first, and at which epsilon; None if it measures none."""
    epsilon = experiment.scale_epsilon
    return None if epsilon is None else PrivateScale(epsilon=epsilon, columns=measured_columns(experiment, task))


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
    """Store the environment of this start, and say so if it differs from that of the last; whether there was none.

    Starts of the runs whose replies this one took over (``of``) are not its own; any of them may have made replies.
    """
    now, before = environment.environment(device), folder.read_environments()
    folder.append_environment(now)
    is_first = all("of" in start for start in before)
    found: dict[str | None, str | None] = {}
    for start in before if is_first else before[-1:]:
        found[start.get("of")] = found.get(start.get("of")) or environment.changes(start, now)
    for owner, changes in found.items():
        if changes:
            what = f"the replies of {owner} are from" if is_first else "resuming in"
            watcher.noted(f"{what} another environment ({changes}); the last bits of the result may differ")
    return is_first


def spec_of(job: Job, task: Task, run: str = DEFAULTS["run"], parties: Parties | None = None) -> RunSpec:
    """The spec of a run; ``run`` is its random number.

    Without ``parties`` the spec is that of a run whose sums are open, as for reading what a run has left.

    Raises:
        ValueError: a value is out of its range.
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
            columns=task.columns,
            table_schema=None if (by := experiment.table_schema) is None else by.digest,
            target=None if by is None else by.range,
            sums=None if parties is None else masked_sums(job, parties),
            scale=private_scale(experiment, task),
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
    folder.write_model(state(model), federation.task | ({"pictures": list(task.pictures)} if task.pictures else {}))
    evaluation = federation.last(model)
    _write_judged(folder, evaluation, model, task)
    summary = {
        "method": job.name,
        "label": job.label or job.name,
        "data": experiment.data,
        "partition": SITES if folder.asked_sites else experiment.partition,
        "clients": experiment.clients,
        "model": experiment.model,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "rounds": federation.done,
        "seed": experiment.seed,
        "judged_on": _test_records(experiment),
        **evaluation.facts(),
        "measure": measured(experiment, model, evaluation, task),
        "errors": evaluation.numbers and evaluation.numbers.measures(),
        "copied_test_records": task.copies,
        "known_data": task.known,
        "largest_group": task.largest_group(),
        "records": task.records,
        "bytes_up": journal.bytes_up,
        "bytes_down": journal.bytes_down,
        "bytes_up_per_client": journal.bytes_up / experiment.clients,
        "bytes_down_per_client": journal.bytes_down / experiment.clients,
        "bytes_judging": journal.bytes_judging,
        "seconds": round(journal.seconds, 2),
        "guarantee": asdict(_guarantee(experiment, task, federation, data)),
        "sums": folder.sum_costs(),
        "refused": [asdict(refusal) for refusal in journal.refusals()],
        "version": fedstill.__version__,
        "finished": environment.now(),
        "files": folder.digests(),
    }
    if evaluation.clients is not None:
        summary |= {"accuracy_of_clients": evaluation.clients, "spread_over_clients": evaluation.spread}
    folder.write_clients(results(folder, task, experiment.clients, evaluation, journal.refusals()))
    folder.write_summary(summary)
    _forget_states(folder, journal)
    return summary


def _write_judged(folder: RunFolder, evaluation: EvaluationResult, model: nn.Module, task: Task) -> None:
    """Write the evaluation, and some test records of each class, to be shown beside synthetic ones, unless vectors."""
    _write_evaluation(folder, evaluation, model, task)
    if not task.test.are_vectors:
        first = [torch.nonzero(task.test.labels == c).flatten()[:_SHOWN] for c in range(task.test.num_classes)]
        folder.write_images("real", task.test[torch.cat(first)])


def _write_evaluation(folder: RunFolder, evaluation: EvaluationResult, model: nn.Module, task: Task) -> None:
    if evaluation.numbers is None:
        by_value = task.test_values and confusion_by_value(model, task.test, *task.test_values)
        measures = measures_of_two(model, evaluation, task)
        folder.write_evaluation(evaluation.confusion, by_value, measures, task.class_names)
    else:
        folder.write_numbers(numbers_of(replace(evaluation.numbers, persons=task.test_groups), task))


def numbers_of(found: Numbers, task: Task) -> dict[str, Any]:
    """The content of ``numbers.json``: measures with intervals, over all and for each value of by:COLUMN."""
    content: dict[str, Any] = {"target": task.class_names[0], "all": found.described()}
    column, values = task.test_values or ("", np.empty(0, str))
    names = np.unique(values).tolist()
    if 0 < len(names) <= MOST_VALUES:
        content["by_value"] = {"column": column, "values": {n: found.take(values == n).described() for n in names}}
    return content


def _guarantee(
    experiment: Experiment, task: Task, federation: ServerFederation, data: sources.DataSet | None
) -> guarantee.Guarantee:
    found = overlap.guarantee_of(federation.guarantee(), experiment, task, federation.public, data)
    return overlap.of_groups(found, experiment, task, federation.journal.releases())


def _forget_states(folder: RunFolder, journal: Journal) -> None:
    """Delete what helpers and simulated clients kept, unless an extension may ask the clients again."""
    shutil.rmtree(folder.helpers, ignore_errors=True)  # what was sealed to their keys opens no more
    if not (journal.refusals() and folder.exchanges == {0}):
        for place in (folder.clients, journal.files.newest):
            shutil.rmtree(place, ignore_errors=True)


def _test_records(experiment: Experiment) -> str:
    own = "the clients' own " if experiment.local_test else ""
    return own + ("validation records" if experiment.validation else "test records")
