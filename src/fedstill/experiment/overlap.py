"""The clients' records that the public or the test records of a run have too, which nothing protects."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fedstill.base.records import Normalisation, Records, twins
from fedstill.data import features, public, sources
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import Task
from fedstill.privacy import guarantee
from fedstill.privacy.guarantee import Guarantee
from fedstill.privacy.ledger import Charge


def outside(
    experiment: Experiment,
    task: Task,
    public_records: Records | None,
    data: sources.DataSet | None = None,
    *,
    labels_only: bool = False,
) -> tuple[int, int]:
    """The number of the clients' records that are among the public or the test ones, and the number of all.

    Public are those of ``--public``, and those from which ``--features patches:public=...`` learns. Test records are at
    the server, and a report shows some. Vectors are compared with neither test records nor ``--public held``, as rows
    of a few values equal each other by chance; images of which ``--features`` makes vectors are.

    Args:
        experiment: the task's settings.
        task: the task; without clients' records (real sites) both numbers are 0.
        public_records: the records of ``--public``.
        data: the data set if it was given as an object.
        labels_only: whether records without their labels are public anyway.
    """
    found, owned = torch.zeros(2, len(task.train), dtype=torch.bool)
    for own in (indices for part in task.parts for indices in part):
        owned[torch.from_numpy(own)] = True
    if labels_only and public_records is not None and public_records.num_classes == 1:
        public_records = None
    if public_records is not None and not (task.held and task.train.are_vectors):
        found |= twins(task.train.images, public_records.images)
    if not task.train.are_vectors:
        found |= twins(task.train.images, task.test.images)
    if experiment.features is not None:
        raw = sources.load_raw(data or experiment.data, experiment.reading)
        images, spec = raw.train[0], features.public_of(experiment.features)
        if isinstance(images, Tensor) and isinstance(raw.test[0], Tensor) and images.ndim == 4:
            found |= twins(images, raw.test[0])
        if isinstance(images, Tensor) and spec is not None and not labels_only and not public.is_noise(spec):
            flat = Normalisation((0.5,) * images.shape[1], (0.25,) * images.shape[1])
            found |= twins(images, public.load(spec, tuple(images.shape[1:]), flat, size=experiment.size).images)
    return int((found & owned).sum()), int(owned.sum())


def guarantee_of(
    found: Guarantee,
    experiment: Experiment,
    task: Task,
    public_records: Records | None,
    data: sources.DataSet | None = None,
) -> Guarantee:
    """``found``, which the releases give, beside what else of the task's records leaves (`guarantee.beside`).

    Args:
        found: the guarantee by the releases alone.
        experiment: the task's settings.
        task: the task.
        public_records: the records of ``--public``.
        data: the data set if it was given as an object.
    """
    counted = partial(outside, experiment, task, public_records, data, labels_only=found.unit == "label")
    return guarantee.beside(found, task.measured, task.held, counted, task.drawn)


def of_groups(found: Guarantee, experiment: Experiment, task: Task, spent: Mapping[int, Sequence[Charge]]) -> Guarantee:
    """``found`` with that of all records of a group, where ``--group-bound`` says how many there are at most."""
    if experiment.group_bound is None or task.groups is None:
        return found
    return guarantee.for_group(found, spent, task.groups[0], experiment.group_bound)
