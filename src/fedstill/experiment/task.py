"""The task of a run: its records, and their partition among the clients."""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill import seeds
from fedstill.data import partition, public, shards, sources
from fedstill.experiment.config import Experiment
from fedstill.records import Records


class Task(NamedTuple):
    """A data set, partitioned among clients: ``parts`` are indices of training and test records by client."""

    train: Records
    test: Records
    parts: list[tuple[shards.Indices, shards.Indices]]
    class_names: tuple[str, ...]
    fingerprint: str
    source: str | Records
    public: shards.Indices | None = None

    def counts(self) -> NDArray[np.int64]:
        """Training records of each client and class, ``(K, C)``."""
        return partition.class_counts([own for own, _ in self.parts], self.train.labels.numpy(), len(self.class_names))


def share_out(experiment: Experiment, data: sources.DataSet | None, *, share: bool = True) -> Task:
    """Load the data and partition it among the clients; with ``share=False`` no client holds any of it.

    Raises:
        ValueError: the data cannot be read or partitioned so; one sentence.
    """
    found = data or sources.load(experiment.data)
    source = experiment.data if data is None else found.train
    if not share:
        return Task(found.train, found.test, [], found.class_names, found.fingerprint, source)
    labels, test = found.train.labels.numpy(), found.test
    kept = np.arange(len(labels))
    if experiment.limit is not None and experiment.limit < len(kept):
        order = seeds.numpy_stream(experiment.seed, "limit").permutation(len(labels))
        kept = np.sort(order[: experiment.limit])
    if experiment.validation:
        rng = seeds.numpy_stream(experiment.seed, "validation")
        inner, held = partition.local_test_split(
            np.arange(len(kept)), fraction=experiment.validation, rng=rng, labels=labels[kept]
        )
        kept, test = kept[inner], found.train[torch.from_numpy(kept[held])]
    public_records = None
    if (number := public.held_out_count(experiment.public)) is not None:
        if number >= len(kept):
            raise ValueError(f"--public held={number} leaves none of the {len(kept)} training records to the clients")
        order = seeds.numpy_stream(experiment.seed, "public").permutation(len(kept))
        public_records, kept = np.sort(kept[order[:number]]), np.sort(kept[order[number:]])
    split = partition.split(
        experiment.partition,
        labels[kept],
        experiment.clients,
        rng=seeds.numpy_stream(experiment.seed, "partition"),
        columns={name: column[kept] for name, column in found.columns.items()},
    )
    parts = []
    for client, own in enumerate(kept[part] for part in split):
        rng = seeds.numpy_stream(experiment.seed, "local test", client)
        if experiment.local_test:
            parts.append(partition.local_test_split(own, fraction=experiment.local_test, rng=rng, labels=labels))
        else:
            parts.append((own, own[:0]))
    return Task(found.train, test, parts, found.class_names, found.fingerprint, source, public_records)


def client_data(experiment: Experiment, task: Task) -> shards.Shards:
    """The clients' records and the public ones."""
    load_public = None
    if task.public is not None:
        load_public = partial(_some, task.source, task.public)
    elif experiment.public is not None:
        load_public = partial(public.load, experiment.public, task.train.shape, task.train.normalisation)
    return shards.Shards(task.source, task.parts, load_public)


def _some(source: str | Records, indices: shards.Indices) -> Records:
    records = sources.load(source).train if isinstance(source, str) else source
    return records[torch.from_numpy(indices)]
