"""The task of a run: its records, and their partition among the clients."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.base import seeds
from fedstill.base.errors import Changed
from fedstill.base.lookup import nfc, repeated
from fedstill.base.records import Normalisation, Records, check, twins
from fedstill.data import features, partition, places, public, published, sources, vectors
from fedstill.data.image_folder import FOLDER
from fedstill.data.shards import Shards, changed, unchanged
from fedstill.experiment.config import Experiment


def check_given(data: sources.DataSet) -> None:
    """Refuse a data set of a caller whose records do not fit together."""
    check(data.train, "training")
    check(data.test, "test")
    if data.train.shape != data.test.shape:
        raise ValueError(
            f"training images have shape {data.train.shape}, test images {data.test.shape}; give one shape"
        )
    if data.train.num_classes != data.test.num_classes:
        raise ValueError(
            f"training records have {data.train.num_classes} classes, test records {data.test.num_classes}; give one "
            "number"
        )


def with_stated(experiment: Experiment, data: sources.DataSet) -> sources.DataSet:
    """``data`` with the normalisation and the classes that the experiment states.

    Raises:
        ValueError: they don't fit the records.
    """
    columns, measured = data.train.shape[0], set(data.measured)
    mean, std, schema = experiment.mean, experiment.std, experiment.table_schema
    if schema is not None and not (mean or std):
        mean, std = (0.0,), (1.0,)  # it has scaled the columns
    if mean or std:
        if not data.train.are_vectors and not all(0 <= value <= 1 for value in mean):
            raise ValueError(f"--mean is {', '.join(map(str, mean))}, but the pixels of images lie in [0, 1]")
        what = "vectors have {} columns" if data.train.are_vectors else "images have {} channels"
        if not all(len(values) in (1, columns) for values in (mean, std)):
            raise ValueError(
                f"--mean has {len(mean)} numbers and --std {len(std)}, but {what.format(columns)}; give both, "
                f"one number or {columns} each"
            )
        normalisation = Normalisation(*(values * (columns // len(values)) for values in (mean, std)))
        measured -= {"normalisation", "scale"}
    else:
        normalisation = data.train.normalisation
    names, count, places = data.class_names, experiment.num_classes, None
    if schema is not None and schema.range is not None:
        measured -= {*published.CLASSES}
    elif stated := experiment.class_names or (schema.classes if schema else ()):
        names, places = _classes_of(experiment, stated, data)
        measured -= {*published.CLASSES}
    elif count is not None and published.CLASSES[0] in measured:
        raise ValueError(f"--num-classes is {count}, but the classes are names; give all with --class-names")
    elif count is not None:
        if count < len(names):
            raise ValueError(f"--num-classes is {count}, but the labels go up to {len(names) - 1}; take {len(names)}")
        names = (*names, *map(str, range(len(names), count)))
        measured -= {"number of classes"}
    train, test = (
        replace(
            r,
            labels=r.labels if places is None else places[r.labels],
            num_classes=len(names),
            normalisation=normalisation,
        )
        for r in (data.train, data.test)
    )
    left = tuple(name for name in data.measured if name in measured)
    constant = "" if mean or std else data.constant
    return replace(data, train=train, test=test, class_names=names, measured=left, constant=constant)


def _classes_of(
    experiment: Experiment, stated: Sequence[str], data: sources.DataSet
) -> tuple[tuple[str, ...], torch.Tensor | None]:
    """All classes that the experiment states, and the place of each of the data's among them; None if they are numbers.

    Raises:
        ValueError: the names don't fit the data's.
    """
    names = tuple(map(nfc, stated))
    if experiment.num_classes not in (None, len(names)):
        raise ValueError(f"--num-classes is {experiment.num_classes}, but --class-names has {len(names)}; leave it out")
    if twice := repeated(names):
        raise ValueError(f"--class-names has {twice!r} twice; name each class once")
    occur = data.class_names
    if published.CLASSES[1] in data.measured:  # labels are numbers, of which not all up to the largest need occur
        labels = torch.cat([data.train.labels, data.test.labels])
        occur = tuple(data.class_names[label] for label in torch.unique(labels).tolist())
    if published.CLASSES[1] in data.measured and not published.numbers_are_names(names):
        if len(names) < len(data.class_names):
            most = len(data.class_names)
            raise ValueError(f"--class-names has {len(names)} names, but the labels go up to {most - 1}; give {most}")
        return names, None
    if missing := next((name for name in occur if name not in names), None):
        raise ValueError(f"--class-names lacks the class {missing!r}, which has records; name all that may occur")
    return names, torch.tensor([names.index(name) if name in names else -1 for name in data.class_names])


_log = logging.getLogger(__name__)
_SHOWN = 20
"""Number of columns that are named at the start of a run."""


class Task(NamedTuple):
    """A data set partitioned among clients.

    Attributes:
        parts: indices of each client's training and test (or validation) records in ``train``.
        source: name or records from which another process loads ``train``.
        public: indices of the public records in ``train``, or None.
    """

    train: Records
    test: Records
    parts: list[tuple[partition.Indices, partition.Indices]]
    class_names: tuple[str, ...]
    fingerprint: str
    source: str | Records
    public: partition.Indices | None = None
    measured: tuple[str, ...] = ()
    """Facts of the task that were computed from the train records (`DataSet.measured`)."""
    backbone: str | None = None
    """SHA-256 of the backbone that made the vectors (`fedstill.models.backbones.Backbone.digest`)."""
    values: Mapping[str, list[list[str]]] = {}
    """The column of the partition by:COLUMN with its values at each client (`partition.values_of`)."""
    drawn: tuple[str, ...] = ()
    """Draws that decided which client has which of somebody's own records, and depend on all of them (`_drawn`)."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a table's vectors, in order."""
    copies: int | None = None
    """Number of test records that equal a training record; None where nobody counted."""
    origin: tuple[str, ...] = ()
    """Sentences on the files of each split."""
    known: bool = False
    """Whether the records are published ones (`DataSet.known`)."""
    records: str = ""
    """Fingerprint of the records before a backbone, by which runs on the same records are told."""
    remarks: tuple[str, ...] = ()
    """Sentences on what was left out of the records, and on what looks wrong."""
    groups: tuple[str, np.ndarray] | None = None
    """The column whose values stay on one side of every split, and its value for each record of ``train``."""
    test_values: tuple[str, NDArray[np.str_]] | None = None
    """The column of the partition by:COLUMN and its value for each test record; None where these have none."""
    test_groups: NDArray[Any] | None = None
    """The value of the column that stays together for each test record; None without such a column."""
    pictures: tuple[int, ...] = ()
    """Channels, height and width of the images from which a backbone made the vectors; empty for texts."""

    @property
    def held(self) -> int:
        """Number of the task's own records that are public in place of a client's."""
        return 0 if self.public is None else len(self.public)

    def largest_group(self) -> dict[str, Any] | None:
        """The most training records, and the most clients, of one value of the column that stays together, if any."""
        if self.groups is None or not self.parts:
            return None
        column, values = self.groups
        own = [values[indices] for indices, _ in self.parts]
        sizes = np.unique(np.concatenate(own), return_counts=True)[1]
        places = np.unique(np.concatenate([np.unique(each) for each in own]), return_counts=True)[1]
        return {"column": column, "records": int(sizes.max()), "clients": int(places.max())}

    def counts(self) -> NDArray[np.int64]:
        """Number of training records of each client and class, ``(K, C)``."""
        return partition.class_counts([own for own, _ in self.parts], self.train.labels.numpy(), len(self.class_names))


def share_out(
    experiment: Experiment,
    data: sources.DataSet | None,
    *,
    share: bool = True,
    progress: features.Progress | None = None,
) -> Task:
    """Load the data set and partition it among the clients, or among none with ``share=False``.

    ``progress`` observes the computation of ``--features``.

    Raises:
        ValueError: the data set cannot be read or partitioned in this way.
    """
    loaded, source, backbone = _loaded(experiment, data, progress)
    if not share:
        _check_scale(loaded)
        alone = Task(loaded.train, loaded.test, [], loaded.class_names, loaded.fingerprint, source, backbone=backbone)
        columns = () if backbone else tuple(map(nfc, loaded.features))
        return alone._replace(columns=columns, copies=loaded.copies, pictures=loaded.pictures)
    if loaded.train.num_classes == 1 and loaded.train.targets is None:
        folders = np.unique(loaded.columns.get(FOLDER, np.empty(0, str))).tolist()
        above = f", though the folders above it differ ({', '.join(folders[:3])}, ...)" if folders else ""
        raise ValueError(
            f"{experiment.data!r} has one class in all ({loaded.class_names[0]}), but a classifier needs two; an "
            f"image's class is the last folder on its way{above}, a table's is in the column 'label' or that of --label"
        )
    labels, test = loaded.train.labels.numpy(), loaded.test
    rows, validation, public_records = _set_aside(experiment, labels, loaded.columns.get(loaded.group))
    if validation is not None:
        test = loaded.train[torch.from_numpy(validation)]
    unscaled = "scale" in loaded.measured or (backbone is not None and not experiment.mean)
    if unscaled and experiment.public is not None:
        loaded = _scaled_by_public(experiment, loaded, public_records, backbone, progress)
        source, test = loaded.train, replace(test, normalisation=loaded.train.normalisation)
    _check_scale(loaded)
    _warn_of_mixing(experiment, loaded.columns)
    split = partition.split(
        experiment.partition,
        labels[rows],
        experiment.clients,
        rng=seeds.numpy_stream(experiment.seed, "partition"),
        columns={name: column[rows] for name, column in loaded.columns.items()},
    )
    groups = loaded.columns.get(loaded.group)
    dealt = [rows[part] for part in split]
    if groups is not None and experiment.local_test:
        parts = _own_groups(experiment, dealt, labels, groups)
    else:
        parts = [_own_split(experiment, client, own, labels) for client, own in enumerate(dealt)]
    if experiment.validation and experiment.local_test:
        test = loaded.train[torch.from_numpy(np.sort(np.concatenate([judged for _, judged in parts])))]
    parts, beyond = _bounded(experiment, parts, groups, loaded.group)
    values = partition.values_of(experiment.partition, loaded.columns, dealt)
    facts = loaded.class_names, loaded.fingerprint, source, public_records, loaded.measured, backbone, values
    task = Task(loaded.train, test, parts, *facts, _drawn(experiment, loaded, rows))
    described = _described(experiment, task, loaded, rows, validation)
    return described._replace(origin=(*described.origin, *beyond))


def _bounded(
    experiment: Experiment,
    parts: list[tuple[partition.Indices, partition.Indices]],
    groups: np.ndarray | None,
    column: str | None,
) -> tuple[list[tuple[partition.Indices, partition.Indices]], tuple[str, ...]]:
    """The parts with the first ``--group-bound`` training records of each group, and a sentence on those left out.

    Which of a group's records stay depends on this group alone, so that a neighbour without a group differs in its
    records only.

    Raises:
        ValueError: there is no column of groups.
    """
    bound = experiment.group_bound
    if bound is None:
        return parts, ()
    if groups is None:
        raise ValueError(
            f"group_bound is {bound}, but no column says which records belong together; name it with --group COLUMN"
        )
    everywhere = np.sort(np.concatenate([own for own, _ in parts]))
    codes = np.unique(groups[everywhere], return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    rank = np.empty(len(codes), dtype=np.int64)
    rank[order] = np.arange(len(codes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    stays = np.zeros(len(groups), dtype=np.bool_)
    stays[everywhere[rank < bound]] = True
    if empty := [client for client, (own, _) in enumerate(parts) if len(own) and not stays[own].any()]:
        raise ValueError(
            f"group_bound is {bound}, which leaves client {empty[0]} without records, as other clients have the first "
            f"{bound} of each {column!r} there; raise it, or take fewer clients"
        )
    left = len(everywhere) - int(stays.sum())
    words = f"left out {left} training records beyond the first {bound} of each {column!r} (--group-bound)"
    return [(own[stays[own]], judged) for own, judged in parts], (words,) if left else ()


def _described(
    experiment: Experiment,
    task: Task,
    loaded: sources.DataSet,
    rows: partition.Indices,
    validation: partition.Indices | None,
) -> Task:
    """The task with words on its records, and the number of test records that the clients have too."""
    origin, remarks, copies = loaded.origin, loaded.remarks, loaded.copies
    if validation is not None:
        copies = int(twins(task.test.images, loaded.train.images[torch.from_numpy(rows)]).sum())
    elif any(len(judged) for _, judged in task.parts):
        trained, judged = (torch.from_numpy(np.concatenate(some)) for some in zip(*task.parts, strict=True))
        copies = int(twins(loaded.train.images[judged], loaded.train.images[trained]).sum())
    groups = (loaded.group, loaded.columns[loaded.group]) if loaded.group in loaded.columns else None
    if experiment.limit is not None and experiment.limit < len(loaded.train):
        origin = (*origin, f"{experiment.limit:,} of the train records are used, drawn at random (--limit)")
    if loaded.group:
        origin = (*origin, f"splits keep all records of a {loaded.group!r} on one side (--group)")
    columns = () if task.backbone else tuple(map(nfc, loaded.features))
    if columns:
        origin = (*origin, f"columns: {', '.join(columns[:_SHOWN])}{', ...' * (len(columns) > _SHOWN)}")
    told = task._replace(columns=columns, copies=copies, origin=origin, remarks=remarks, groups=groups)
    told = told._replace(pictures=loaded.pictures)
    by, _, column = experiment.partition.partition(":")
    test = {} if by != "by" else loaded.test_columns if validation is None else loaded.columns
    if column in test and not experiment.local_test:
        found = test[column] if validation is None else test[column][validation]
        told = told._replace(test_values=(column, found.astype(str)))
    of_test = loaded.test_columns if validation is None else loaded.columns
    if loaded.group in of_test and not experiment.local_test:
        rows_of = slice(None) if validation is None else validation
        told = told._replace(test_groups=of_test[loaded.group][rows_of])
    return told._replace(known=loaded.known, records=loaded.source or loaded.fingerprint)


def _drawn(experiment: Experiment, loaded: sources.DataSet, rows: partition.Indices) -> tuple[str, ...]:
    """Draws that decided which client has which records, and depend on all of them: with one more, many change places.

    Nothing for known data sets, which are public.
    """
    if loaded.known:
        return ()
    rule, _, column = experiment.partition.partition(":")
    if rule == "by":
        dealt = len(np.unique(loaded.columns[column][rows])) > experiment.clients
    else:
        dealt = experiment.clients > 1
    found = {
        "test split": loaded.held_out,
        "--limit": experiment.limit is not None and experiment.limit < len(loaded.train),
        "--validation": bool(experiment.validation),
        "--public held": public.held_out_count(experiment.public) is not None,
        "--local-test by groups": bool(loaded.group and experiment.local_test),
        f"--partition {experiment.partition}": dealt,
    }
    return tuple(what for what, was_drawn in found.items() if was_drawn)


def _loaded(
    experiment: Experiment, data: sources.DataSet | None, progress: features.Progress | None
) -> tuple[sources.DataSet, str | Records, str | None]:
    """The data set as the experiment states it, from where another process loads it, and its backbone's digest."""
    if data is not None:
        if experiment.size is not None:
            size = f"size is {experiment.size}, but the records were given as they are"
            raise ValueError(f"{size}; load them with this size")
        check_given(data)
    backbone = None
    if experiment.features is None:
        data = None if data is None else sources.verified(data)
    else:
        data, found = features.load(
            data or experiment.data,
            experiment.features,
            reading=experiment.reading,
            device=experiment.device,
            progress=progress,
        )
        backbone = found.digest
    loaded = with_stated(experiment, data or sources.load(experiment.data, experiment.reading))
    stated = experiment.mean or experiment.std or experiment.num_classes or experiment.class_names
    stated = stated or experiment.table_schema is not None
    return loaded, loaded.train if data is not None or stated else experiment.data, backbone


def _set_aside(
    experiment: Experiment, labels: NDArray[np.int64], groups: np.ndarray | None
) -> tuple[partition.Indices, partition.Indices | None, partition.Indices | None]:
    """Places of the training records that clients may have, of those to validate on, and of public ones.

    Validation records of the clients' own (``--local-test``) are not set aside here.
    """
    rows = np.arange(len(labels))
    if experiment.limit is not None and experiment.limit < len(rows):
        order = seeds.numpy_stream(experiment.seed, "limit").permutation(len(labels))
        rows = np.sort(order[: experiment.limit])
    judged = None
    if experiment.validation and not experiment.local_test:
        rng = seeds.numpy_stream(experiment.seed, "validation")
        own = None if groups is None else groups[rows]
        training, validation = sources.divided(np.arange(len(rows)), experiment.validation, rng, labels[rows], own)
        rows, judged = rows[training], rows[validation]
    number = public.held_out_count(experiment.public)
    if number is None:
        return rows, judged, None
    if number >= len(rows):
        raise ValueError(f"--public held={number} uses all {len(rows)} training records; leave some to clients")
    rng = seeds.numpy_stream(experiment.seed, "public")
    order = rng.permutation(len(rows))
    if groups is not None:  # whole groups, until there are as many records
        values, codes, sizes = np.unique(groups[rows], return_inverse=True, return_counts=True)
        drawn = rng.permutation(len(values))
        number = int(np.cumsum(sizes[drawn])[np.searchsorted(np.cumsum(sizes[drawn]), number)])
        order = np.argsort(np.argsort(drawn)[codes], kind="stable")
        if number >= len(rows):
            raise ValueError(
                f"--public {experiment.public} takes whole groups of up to {sizes.max()} records (--group), which "
                f"leaves none of {len(rows)} to the clients; hold fewer"
            )
    return np.sort(rows[order[number:]]), judged, np.sort(rows[order[:number]])


def _own_groups(
    experiment: Experiment, dealt: list[partition.Indices], labels: NDArray[np.int64], groups: np.ndarray
) -> list[tuple[partition.Indices, partition.Indices]]:
    """As `_own_split` for every client, with whole groups, which may have records at several clients."""
    parts = [(own, own[:0]) for own in dealt]
    for what, fraction in (("local test", experiment.local_test), ("local validation", experiment.validation)):
        if not fraction:
            continue
        left = np.sort(np.concatenate([own for own, _ in parts]))
        _, judged = partition.group_split(
            left,
            fraction=fraction,
            rng=seeds.numpy_stream(experiment.seed, what),
            labels=labels,
            groups=groups,
        )
        taken = set(groups[judged])
        for own, _ in parts:  # a client keeps a group at least
            if taken.issuperset(own_groups := sorted(set(groups[own]))):
                taken.discard(own_groups[0])
        marks = [np.isin(groups[own], list(taken)) for own, _ in parts]
        parts = [(own[~mark], own[mark]) for (own, _), mark in zip(parts, marks, strict=True)]
    return parts


def _own_split(
    experiment: Experiment, client: int, own: partition.Indices, labels: NDArray[np.int64]
) -> tuple[partition.Indices, partition.Indices]:
    """A client's training records and those to evaluate on: its test records, or its validation records instead."""
    rng = seeds.numpy_stream(experiment.seed, "local test", client)
    if not experiment.local_test:
        return own, own[:0]
    training, test = partition.local_test_split(own, fraction=experiment.local_test, rng=rng, labels=labels)
    if not experiment.validation:
        return training, test
    rng = seeds.numpy_stream(experiment.seed, "local validation", client)
    return partition.local_test_split(training, fraction=experiment.validation, rng=rng, labels=labels)


def _scaled_by_public(
    experiment: Experiment,
    data: sources.DataSet,
    held: partition.Indices | None,
    backbone: str | None,
    progress: features.Progress | None,
) -> sources.DataSet:
    """``data`` with the mean and the standard deviation of each column of the public records.

    Raises:
        ValueError: the public records do not fit.
    """
    assert experiment.public is not None
    if held is not None:
        values = data.train.images[torch.from_numpy(held)]
    elif public.is_noise(experiment.public):
        return data
    else:
        values = _public_records(experiment, data.train, backbone, progress=progress).images
    normalisation, constant = vectors.scale(values.numpy())
    train, test = (replace(records, normalisation=normalisation) for records in (data.train, data.test))
    constant = () if backbone else constant  # a feature that the public records lack
    name = f"{vectors.column_name(constant[0], ())} of the public records" if constant else ""
    left = tuple(name for name in data.measured if name != "scale")
    return replace(data, train=train, test=test, measured=left, constant=name)


def measured_columns(experiment: Experiment, task: Task) -> tuple[int, ...]:
    """Places of the columns whose scale is measured privately: numbers and dates of a schema, or all.

    Raises:
        ValueError: there are none, or they have no public range.
    """
    given = f"--scale is {experiment.scale!r}, "
    if not task.train.are_vectors:
        raise ValueError(f"{given}which is for columns of a table; pixels have a public range, so leave it out")
    schema = experiment.table_schema
    if schema is None and not experiment.mean:
        raise ValueError(
            f"{given}but the columns have no public range, so one record could move a mean without bound; give ranges "
            "with --schema-file, or the middle and half the width of each with --mean and --std"
        )
    if schema is None:
        return tuple(range(task.train.shape[0]))
    ranged = [nfc(name) for name, column in schema.columns.items() if column.range is not None]
    if not (places := tuple(place for place, name in enumerate(task.columns) if name in ranged)):
        raise ValueError(f"{given}but no column of {experiment.schema_file} is a number or a date; leave it out")
    return places


def scaled(task: Task, normalisation: Normalisation) -> Task:
    """The task with another normalisation of its records."""
    train, test = (replace(records, normalisation=normalisation) for records in (task.train, task.test))
    return task._replace(train=train, test=test)


def _check_scale(data: sources.DataSet) -> None:
    """Refuse a measured scale of a column that is constant.

    Raises:
        ValueError: there is such a column.
    """
    if data.constant:
        raise ValueError(
            f"{data.constant} has the same value in all records, so it has no scale; drop the column, or give a scale "
            "with --mean and --std"
        )


def _warn_of_mixing(experiment: Experiment, columns: Mapping[str, np.ndarray]) -> None:
    """Say so if records lie in folders, such as hospitals, which the partition does not follow."""
    if FOLDER not in columns or experiment.partition.startswith("by:"):
        return
    folders = np.unique(columns[FOLDER]).tolist()
    some = ", ".join(folders[:3]) + (", ..." if len(folders) > 3 else "")
    _log.warning(
        "%s has its records in %d folders (%s), which --partition %s mixes; --partition by:%s --clients %d makes each "
        "folder a client",
        *(experiment.data, len(folders), some, experiment.partition, FOLDER, len(folders)),
    )


def client_data(
    experiment: Experiment,
    task: Task,
    progress: features.Progress | None = None,
    public_fingerprint: str | None = None,
) -> Shards:
    """The clients' records and the public ones.

    Args:
        experiment: the task.
        task: the same with its records.
        progress: observes the ``--features`` of the public records, which are loaded here then.
        public_fingerprint: that of the public records as the run began; by default theirs now.
    """
    load_public = loaded = None
    if experiment.public is None or not public.is_own(experiment.public):
        public_fingerprint = None
    else:
        public_fingerprint = public_fingerprint or public.fingerprint(experiment.public, experiment.size)
    if task.public is not None:
        load_public = partial(_subset, task.source, experiment.reading, task.fingerprint, task.public)
    elif experiment.public is not None:
        load_public = partial(_public_records, experiment, task.train[:0], task.backbone, public_fingerprint)
        loaded = None if progress is None else load_public(progress=progress)
    return Shards(task.source, task.parts, load_public, experiment.reading, loaded, task.fingerprint)


def _public_records(
    experiment: Experiment,
    like: Records,
    backbone: str | None,
    fingerprint: str | None = None,
    progress: features.Progress | None = None,
) -> Records:
    """The public records in the shape of ``like`` and with its normalisation.

    Raises:
        ValueError: they are not those of the ``fingerprint``.
    """
    assert experiment.public is not None
    size, device = experiment.size, experiment.device
    if experiment.features is None:
        records = public.load(experiment.public, like.shape, like.normalisation, size=size)
    else:
        found = (experiment.features, str(backbone))
        records = features.load_public(experiment.public, found, like, size=size, device=device, progress=progress)
    if fingerprint is not None and fingerprint != public.fingerprint(experiment.public, size):
        raise Changed(changed(experiment.public))
    return records


def _subset(source: str | Records, reading: places.Reading, fingerprint: str, indices: partition.Indices) -> Records:
    return unchanged(source, reading, fingerprint)[torch.from_numpy(indices)]
