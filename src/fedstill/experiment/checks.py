"""Checks of a job before it runs: settings that its method does not support, records, and the network's depth."""

import logging
from functools import cache

from torch import nn

from fedstill import methods
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.transport import num_slow
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job, is_importable
from fedstill.experiment.judging import check_measure, check_measured_classes
from fedstill.experiment.task import Task, measured_columns
from fedstill.methods.parts.class_weights import ClassWeighted, check_names
from fedstill.models.build import OF_VECTORS, of_images
from fedstill.models.cnn import ConvNet
from fedstill.privacy.guarantee import APART, moving, remedy, telling
from fedstill.protocol import public_images, returns_run_model

_log = logging.getLogger(__name__)
_OTHER_METHODS = (
    "choose a method that makes none, as fedavg or afl, or one that distils vectors too, as fedgm, feddm or fedd3"
)


def check_classes(experiment: Experiment, what: str) -> None:
    """Refuse a target that is a number for ``what``, which knows classes only.

    Raises:
        ValueError: the target is one.
    """
    if experiment.target_range is not None:
        raise ValueError(
            f"the target of {experiment.schema_file} is a number, which {what} does not take; give the schema classes "
            "in place of a range (bins of the number, say)"
        )


def check_job(job: Job, *, late: bool = False) -> None:
    """Refuse settings that the method does not support.

    Args:
        job: the run.
        late: whether the run extends a finished one, and asks only the clients whose reply is missing.

    Raises:
        ValueError: there is such a setting.
    """
    kind, experiment = type(job.method), job.experiment
    if experiment.models and not kind.mixed:
        raise ValueError(f"{job.name} needs one model for all clients; use --model in place of --models")
    if experiment.min_clients is not None and experiment.min_clients > experiment.clients:
        raise ValueError(
            f"--min-clients is {experiment.min_clients}, but there are {experiment.clients} clients; it must not be "
            "larger"
        )
    if not late:
        _check_losses(experiment)
    check_measure(experiment)
    _check_number(job)
    _check_features(job)
    if kind.personal and not experiment.local_test:
        raise ValueError(
            f"{job.name} gives every client its own model, which only the client can evaluate; give clients test "
            "records with --local-test 0.2"
        )
    if experiment.local_test and not returns_run_model(kind):
        raise ValueError(f"{job.name} ends with a network that only the server can evaluate; leave --local-test out")
    _check_public(job)
    if (experiment.workers or experiment.engine == "flower") and not is_importable(job):
        raise ValueError(
            f"{job.name} or its model is defined where other processes cannot import it (a notebook's cell, say); move "
            "it to a file, or use one process: workers=0"
        )


def _check_number(job: Job) -> None:
    """Refuse what is for classes where the target is a number."""
    experiment, kind = job.experiment, type(job.method)
    if experiment.target_range is None:
        return
    if not kind.numeric:
        able = ", ".join(name for name in methods.TABLE if methods.find(name).numeric)
        raise ValueError(
            f"{job.name} is for classes, but the target of {experiment.schema_file} is a number; use one of {able}"
        )
    flags = {
        "--local-test": experiment.local_test,
        "--features": experiment.features,
        "--num-classes": experiment.num_classes,
        "--class-names": experiment.class_names,
        "--class-weights": isinstance(job.method, ClassWeighted) and job.method.class_weights,
        f"--partition {experiment.partition}": not experiment.partition.startswith(("iid", "quantity", "by:")),
    }
    if wrong := next((flag for flag, given in flags.items() if given), None):
        raise ValueError(
            f"{wrong} is for classes, but the target of {experiment.schema_file} is a number; leave it out (a "
            "partition is iid, quantity:A or by:COLUMN, and --validation sets records aside for tuning)"
        )


def _check_losses(experiment: Experiment) -> None:
    """Refuse lost replies where all are needed, or more than there can be."""
    if not (experiment.drop or experiment.slow):
        return
    flag = f"--drop is {experiment.drop:g}" if experiment.drop else f"--slow is {experiment.slow:g}"
    if experiment.min_clients is None:
        raise ValueError(f"{flag}, but a request needs every reply; say with --min-clients how many are enough")
    left = experiment.clients - num_slow(experiment.clients, experiment.slow)
    if experiment.min_clients > left:
        raise ValueError(
            f"--slow is {experiment.slow:g}, which leaves {left} of {experiment.clients} clients, but --min-clients is "
            f"{experiment.min_clients}; lower one of them"
        )


def _check_public(job: Job) -> None:
    """Refuse a run without the public records that its method needs, which the method would only at the server."""
    if job.experiment.public is None:
        if type(job.method).needs_public == "labelled":
            raise ValueError(
                f"{job.name} needs public records with labels; name some with --public, as --public held=1000"
            )
        if type(job.method).needs_public:
            public_images(None, job.name)


def _check_features(job: Job) -> None:
    """Refuse networks and methods of images before ``--features`` is computed, which may take long."""
    experiment = job.experiment
    if experiment.features is None:
        return
    backbone = f"--features {experiment.features} makes"
    for name in (experiment.model, *experiment.models):
        if of_images(name):
            raise ValueError(
                f"model {name!r} takes images, but {backbone} vectors; choose {' or '.join(OF_VECTORS)} with --model, "
                "or your own network"
            )
    if type(job.method).images_only:
        raise ValueError(f"{job.name} makes images, but {backbone} vectors; {_OTHER_METHODS}")


def check_records(job: Job, task: Task) -> None:
    """Refuse what the records do not allow, before a client is asked.

    That is: clients without test records that are to evaluate, vectors for a method that makes images, and a scale from
    private records where privacy is claimed.

    Raises:
        ValueError: the records are of this kind.
    """
    kind = type(job.method)
    if job.experiment.local_test and task.parts and not any(len(test) for _, test in task.parts):
        what, flag = ("validation", "--validation") if job.experiment.validation else ("test", "--local-test")
        raise ValueError(f"no client has a {what} record; raise {flag}, or lower --clients")
    if not job.experiment.local_test and not len(task.test):
        if job.experiment.validation:
            raise ValueError(
                f"--validation is {job.experiment.validation:g}, which leaves no validation record of so few; raise it"
            )
        raise ValueError(f"{job.experiment.data!r} has no test record; add some, or more records to take a fifth of")
    if task.train.are_vectors and kind.images_only:
        raise ValueError(
            f"{job.name} makes images, but the records are vectors of {task.train.shape[0]} numbers; {_OTHER_METHODS}"
        )
    if isinstance(job.method, ClassWeighted):
        check_names(job.method.class_weights, task.class_names)
    check_measured_classes(job.experiment, len(task.class_names))
    _check_private_scale(job, task)
    _warn_of_privacy(job, task)
    if "scale" in task.measured and job.method.claims == "record":
        raise ValueError(
            f"{job.name} protects records, but the columns would be scaled by the mean and the standard deviation of "
            "the private records; give public numbers with --mean and --std, or public records with --public"
        )


def _check_private_scale(job: Job, task: Task) -> None:
    """Refuse a private scale of what has none, or beside a guarantee to which its cost does not add up.

    Raises:
        ValueError: it is so.
    """
    if (scale := job.experiment.scale) is None:
        return
    measured_columns(job.experiment, task)
    if (unit := job.method.claims) in ("label", "client"):
        what = "labels only" if unit == "label" else "whole clients"
        raise ValueError(
            f"--scale is {scale!r}, whose noise is for one record, but {job.name} protects {what}, and the two do not "
            "add up; leave it out"
        )


def _warn_of_privacy(job: Job, task: Task) -> None:
    """Say before the run what will leave its guarantee empty: facts of private records, or a large delta."""
    if not (claims := job.method.claims):
        return
    if facts := telling(task.measured, claims):
        _log.warning(
            "the run will have no privacy guarantee, as the %s of the task came from the records; %s",
            *(" and the ".join(facts), remedy(facts)),
        )
    elif job.experiment.noise == "entropy" and (drawn := moving(task.drawn, claims)):
        _log.warning(
            "the run will have no privacy guarantee, as the %s of the task drew from all records which client has "
            "which; %s",
            *(" and the ".join(drawn), APART),
        )
    if claims == "label":  # randomised response has no delta
        return
    most, units = max((len(own) for own, _ in task.parts), default=0), "records"
    words = f"clients have up to {most} records"
    if claims == "client":
        most, units, words = len(task.parts), "clients", f"there are {len(task.parts)} clients"
    if most and job.experiment.delta * most >= 1:
        _log.warning(
            "delta is %g, and %s: at 1 / %s or more, publishing all of one chosen at random would count as private; "
            "lower --delta",
            *(job.experiment.delta, words, units),
        )


def warn_of_depth(spec: RunSpec) -> None:
    """Say so, once in a process, if a ConvNet normalises away what its last block has found.

    FedAvg on the 8x8 digits (10 rounds, width 32, learning rate 0.1): 73 % at depth 3, 91 % at depth 2.
    """
    for name in dict.fromkeys((spec.model, *spec.models)):
        model = spec.new_model(architecture=name)
        if isinstance(model, ConvNet) and model.positions <= 4:
            kinds = [type(module) for module in model.modules()]
            if nn.GroupNorm in kinds:
                warn_once(name, kinds.count(nn.Conv2d) - 1, spec.shape[1:])


@cache
def warn_once(name: str, depth: int, size: tuple[int, int]) -> None:
    """Warn of a ConvNet of ``depth`` blocks that halve images of ``size``; the same words come once in a process."""
    _log.warning(
        "the last block of model %s normalises 2 x 2 positions or fewer, which leaves little of images of %d x %d "
        "pixels: expect a low accuracy, or take a block less (depth=%d) or larger images (--size)",
        *(name, *size, depth),
    )
