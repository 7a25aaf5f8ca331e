"""A data set with the facts that an experiment states of it, in place of those that were read off its records."""

from dataclasses import replace

import torch

from fedstill.data import sources
from fedstill.experiment.config import Experiment
from fedstill.records import Normalisation, Records, check


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
        ValueError: they don't fit the records; one sentence.
    """
    columns, measured = data.train.shape[0], set(data.measured)
    mean, std = experiment.mean, experiment.std
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
    if experiment.class_names:
        names, places = _classes_of(experiment, data)
        measured -= {*sources.CLASSES}
    elif count is not None and sources.CLASSES[0] in measured:
        raise ValueError(f"--num-classes is {count}, but the classes are names; give all with --class-names")
    elif count is not None:
        if count < len(names):
            raise ValueError(f"--num-classes is {count}, but the labels go up to {len(names) - 1}; take {len(names)}")
        names = (*names, *map(str, range(len(names), count)))
        measured -= {"number of classes"}
    train, test = (
        Records(r.images, r.labels if places is None else places[r.labels], len(names), normalisation)
        for r in (data.train, data.test)
    )
    left = tuple(name for name in data.measured if name in measured)
    constant = "" if mean or std else data.constant
    return replace(data, train=train, test=test, class_names=names, measured=left, constant=constant)


def _classes_of(experiment: Experiment, data: sources.DataSet) -> tuple[tuple[str, ...], torch.Tensor | None]:
    """All classes that the experiment names, and the place of each of the data's among them; None if they are numbers.

    Raises:
        ValueError: the names don't fit the data's; one sentence.
    """
    names = experiment.class_names
    if experiment.num_classes not in (None, len(names)):
        raise ValueError(f"--num-classes is {experiment.num_classes}, but --class-names has {len(names)}; leave it out")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--class-names has {twice!r} twice; name each class once")
    if sources.CLASSES[1] in data.measured:  # labels are numbers
        if len(names) < len(data.class_names):
            most = len(data.class_names)
            raise ValueError(f"--class-names has {len(names)} names, but the labels go up to {most - 1}; give {most}")
        return names, None
    if missing := next((name for name in data.class_names if name not in names), None):
        raise ValueError(f"--class-names lacks the class {missing!r}, which has records; name all that may occur")
    return names, torch.tensor([names.index(name) for name in data.class_names])
