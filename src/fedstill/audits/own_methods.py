"""A check of a private method on neighbouring data sets of many sizes: nothing but releases may tell them apart.

This is the comparison by which fedstill's own methods are tested (`fedstill.audits.neighbours`), for a method of the
user's own: whole runs with and without one record, whose releases are replaced by the same fake values.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from annotated_types import Ge, Le
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fedstill.audits.neighbours import Exact, Heard, difference
from fedstill.audits.play import Copies, Game, play
from fedstill.base import processes
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import stream
from fedstill.base.settings import Settings
from fedstill.engines.server import TooFewReplies
from fedstill.privacy import rowwise
from fedstill.privacy.guarantee import Guarantee
from fedstill.privacy.per_record import ClippedGradients
from fedstill.privacy.releases import Gaussian
from fedstill.protocol import Method

_PUBLIC = 200
"""Public records of a run, for methods that need some."""
_OTHERS = 3
"""Records of other classes beside a class that grows."""
_ALONE = 61
"""The pair whose data sets have a process each has that number of records which is the nearest to this."""
_LONG = 1e6
"""Length of an outlying vector, in standard deviations of the others."""


class CheckSettings(Settings):
    """The runs in which a method's clients have one record more or less."""

    model: str = "convnet"
    """Model of the runs, as for fedstill run; the check holds for it alone."""
    shape: Annotated[tuple[PositiveInt, ...], "channels, height and width, or the length of a vector"] = (1, 8, 8)
    """Channels, height and width of an image, or the number of columns of a table."""
    classes: Annotated[int, Ge(2), Le(1000)] = 10
    """Number of classes."""
    records: tuple[Annotated[int, Ge(3), Le(10**6)], ...] = (3, 61, 2051)
    """Numbers of records of the client: few, an odd batch, thousands."""
    class_records: Annotated[int, Ge(0), Le(10**4)] = 33
    """A class of a client grows to this number record by record, so that no rule by a class's size is passed over."""
    budget: float | None = None
    """Budget of the clients' ledgers, for a method that needs one."""
    seed: NonNegativeInt = 0
    """Seed of the records."""


class Pair(NamedTuple):
    """Two neighbouring data sets.

    Attributes:
        words: the record that differs, in words.
        more: the records of one.
        less: those of the other: without the record at ``place``, or with another label of it.
        place: the place of that record in ``more``.
        neighbours: whether no more than this record differs; else all do.
    """

    words: str
    more: Records
    less: Records
    place: int
    neighbours: bool = True


class Checked(NamedTuple):
    """The outcome of a check.

    Attributes:
        guarantee: what the runs would claim.
        pairs: number of pairs that were compared.
        found: a sentence for each pair on whatever depends on the record and must not.
        mixed: whether a network computed private records in a batch, outside of `fedstill.privacy.rowwise`: for some
            weights, which a server chooses, rounding lets one record move all rows of its batch.
    """

    guarantee: Guarantee
    pairs: int
    found: list[str]
    mixed: bool


def check(method: Method, settings: CheckSettings, progress: Callable[[int, int], None]) -> Checked:
    """Compare ``method`` on neighbouring data sets.

    Args:
        method: the method with its settings.
        settings: sizes, model and shape of the records.
        progress: gets the numbers of pairs done and of all.

    Raises:
        ValueError: the method claims nothing for records or labels, or does not run on such records.
    """
    first = Heard()
    try:
        claim = _run(method, settings, _records(settings, min(settings.records)), first)
    except TooFewReplies as error:
        raise ValueError(f"the method does not run on these records: {error}") from error
    if not claim.holds or not claim.epsilon:
        raise ValueError(f"the method has no guarantee to check: {claim.reason or 'its clients release nothing'}")
    if claim.unit == "client":
        raise ValueError(
            "the method's guarantee is for clients, whose rows may depend on each other; records need none"
        )
    if any(isinstance(event, Gaussian) and event.sampling < 1 for event in first.charged):
        raise ValueError(
            "the method trains on drawn batches, which differ with one record more for no fault of its own; give "
            "settings that put every record in every batch, as --local.batch-size 64 --local.supposed-records 64 "
            "--records 61"
        )
    labels = claim.unit == "label"
    some = [*_pairs(settings, labels=labels), *_growing(settings, labels=labels)]
    size = min(settings.records, key=lambda number: abs(number - _ALONE))
    *_, alone, _ = _pairs(settings, labels=labels, sizes=[size])  # an outlier
    number = len(some) + 1
    found, mixed = [], [False]
    last: tuple[Records, Heard] | None = None
    for done, pair in enumerate(some):
        progress(done, number)
        more, less = (
            last[1] if last and own is last[0] else _heard(method, settings, own, pair, mixed)
            for own in (pair.more, pair.less)
        )
        last = pair.more, more
        found += _found(pair, more, less, labels=labels)
    progress(number - 1, number)
    more, less = (_apart(method, settings, own, alone) for own in (alone.more, alone.less))
    found += _found(alone._replace(words=f"{alone.words}, each in its own process"), more, less, labels=labels)
    progress(number, number)
    return Checked(claim, number, found, mixed[0] and claim.unit == "record")  # pixels are no label's secret


def _found(pair: Pair, more: Heard, less: Heard, *, labels: bool) -> list[str]:
    """A sentence if the two data sets of ``pair`` can be told apart."""
    removed = None if labels else pair.place
    if not (sentence := difference(more, less, removed, neighbours=pair.neighbours)):
        return []
    errors = ", ".join(dict.fromkeys(one.error for one in (more, less) if one.error))
    return [f"{pair.words}: {sentence}" + f" ({errors})" * bool(errors)]


def _apart(method: Method, settings: CheckSettings, own: Records, pair: Pair) -> Heard:
    """As `_heard`, in a process of its own: what a method keeps between calls is not there, as at another client."""
    try:
        with processes.pool(1, _begin) as pool:
            found = pool.submit(_as_arrays, method, settings, own, pair).result()
    except BrokenExecutor as error:
        raise ValueError("the method ended the process that ran it; nothing of it can be compared") from error
    heard: Heard = _each(np.ndarray, torch.from_numpy, found)
    return heard


def _begin() -> None:
    torch.set_num_threads(1)


def _as_arrays(method: Method, settings: CheckSettings, own: Records, pair: Pair) -> Any:
    """As `_heard`, with arrays: each tensor would be memory that the processes share, and an open file."""
    return _each(Tensor, lambda tensor: tensor.detach().cpu().numpy(), _heard(method, settings, own, pair, [False]))


def _each(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each object of a ``kind`` in it changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_each(kind, change, part) for part in value)
    if isinstance(value, Heard | Exact):
        return replace(value, **{name: _each(kind, change, part) for name, part in vars(value).items()})
    return value


def _heard(method: Method, settings: CheckSettings, own: Records, pair: Pair, mixed: list[bool]) -> Heard:
    """What a run on ``own``, one data set of ``pair``, shows."""
    heard = Heard()
    try:
        with _watching(pair.more[pair.place : pair.place + 1].inputs()[0], mixed):
            _run(method, settings, own, heard)
    except Exception as error:  # whether it comes may depend on the record, which is what is looked for
        heard.error = f"{type(error).__name__}: {error}"
    return heard


@contextmanager
def _watching(record: Tensor, mixed: list[bool]) -> Iterator[None]:
    """Note in ``mixed`` whether a network gets ``record`` together with others in a way that is not tested by rows."""
    inside = [0]

    def apart(compute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute)
        def computed(*arguments: Any, **more: Any) -> Any:
            inside[0] += 1
            try:
                return compute(*arguments, **more)
            finally:
                inside[0] -= 1

        return computed

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inside[0] or mixed[0] or not inputs or not isinstance(inputs[0], Tensor):
            return
        x = inputs[0]
        if x.ndim == record.ndim + 1 and len(x) > 1 and x.shape[1:] == record.shape:
            mixed[0] = bool((x == record).flatten(1).all(1).any())

    handle = register_module_forward_pre_hook(hook)
    try:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(rowwise, "features", apart(rowwise.features)))
            clipped = apart(ClippedGradients.clipped_sum)
            patches.enter_context(mock.patch.object(ClippedGradients, "clipped_sum", clipped))
            yield
    finally:
        handle.remove()


def _run(method: Method, settings: CheckSettings, own: Records, heard: Heard) -> Guarantee:
    """A run with the client, and another one that stays the same; returns what it claims."""
    other = _records(settings, 17, "another client")
    public = _records(settings, _PUBLIC, "public")
    game = Game(settings.model, settings.budget)
    return play(method, Copies([own, other], [0, 1], public), game, heard=heard).claim


def _records(settings: CheckSettings, number: int, *name: str) -> Records:
    """Random records of all classes in turn."""
    rng, shape = stream(settings.seed, "check", *name), (number, *settings.shape)
    labels = torch.arange(number) % settings.classes
    if len(settings.shape) == 1:
        return Records(torch.randn(shape, generator=rng), labels, settings.classes, Normalisation((0.0,), (1.0,)))
    images = torch.randint(256, shape, generator=rng).to(torch.uint8)
    flat = Normalisation((0.5,) * settings.shape[0], (0.25,) * settings.shape[0])
    return Records(images, labels, settings.classes, flat)


def _pairs(settings: CheckSettings, *, labels: bool, sizes: Sequence[int] = ()) -> Iterator[Pair]:
    """For each size six records that differ, and two data sets without a record in common."""
    for number in sizes or settings.records:
        plain = _records(settings, number)
        single = torch.where(torch.arange(number) == number - 1, settings.classes - 1, _of_others(settings, number))
        choices = {
            "the first record": (plain, 0),
            "a record in the middle": (plain, number // 2),
            "the only record of its class": (replace(plain, labels=single, images=_longest(plain.images)), number - 1),
            "a record of zeros": (replace(plain, images=_with_last(plain.images, 0)), number - 1),
            "a record that is there twice": (
                replace(plain, images=_with_last(plain.images, plain.images[0])),
                number - 1,
            ),
            "an outlier": (replace(plain, images=_outlying(plain.images)), number - 1),
        }
        for words, (more, place) in choices.items():
            yield Pair(f"{words} of {number:,}", more, _less(more, place, settings.classes, labels=labels), place)
        other = _records(settings, number // 2 + 1, "other records")
        if labels:
            rng = stream(settings.seed, "check", "other labels")
            other = replace(plain, labels=torch.randint(settings.classes, (number,), generator=rng))
        yield Pair(f"all {number:,} records", plain, other, 0, neighbours=False)


def _growing(settings: CheckSettings, *, labels: bool) -> Iterator[Pair]:
    """The last class grows record by record, and the client with it; or labels of others become its own, one by one."""
    others, grown = _OTHERS, settings.class_records
    number = grown if labels else others + grown
    plain = _records(settings, number, "a growing class")
    rest = _of_others(settings, number)

    def with_some(count: int) -> Records:
        own = torch.arange(number) < count if labels else torch.arange(number) >= others
        whole = replace(plain, labels=torch.where(own, settings.classes - 1, rest))
        return whole if labels else whole[torch.arange(number) < others + count]

    less = with_some(0)
    for count in range(1, grown + 1):
        more = with_some(count)
        yield Pair(f"record {count} of a class", more, less, count - 1 if labels else others + count - 1)
        less = more


def _of_others(settings: CheckSettings, number: int) -> Tensor:
    """Labels of all classes but the last in turn."""
    return torch.arange(number) % max(settings.classes - 1, 1)


def _less(more: Records, place: int, classes: int, *, labels: bool) -> Records:
    """The same without the record at ``place``, or with another label of it."""
    if not labels:
        return more[torch.arange(len(more.labels)) != place]
    changed = more.labels.clone()
    changed[place] = (changed[place] + 1) % classes
    return replace(more, labels=changed)


def _longest(records: Tensor) -> Tensor:
    """The same with a last image that is white, the longest there is; vectors have no longest."""
    return _with_last(records, 255) if records.ndim > 2 else records


def _with_last(records: Tensor, value: Tensor | int) -> Tensor:
    """The same with the last record ``value``, or with this number everywhere."""
    found = records.clone()
    found[-1] = value
    return found


def _outlying(records: Tensor) -> Tensor:
    """The same with a last record that is far from all others."""
    found = records.clone()
    if found.ndim == 2:
        found[-1] = _LONG
    else:
        found[-1] = 255 * (torch.arange(found[-1].numel()) % 2).view_as(found[-1]).to(torch.uint8)
    return found
