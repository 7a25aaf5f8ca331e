"""The private scale of a table's columns: the first request of a run with ``--scale private:EPSILON``.

Clients release `ColumnSums` of their records, masked or open as all sums of the run. The server makes a mean and a
deviation of each column of the total, and sends them in the header of every later request; both sides compute the same
normalisation from them. So a client that missed the first request has the scale too, and a scale that a server made up
costs no privacy: mechanisms clip what they release, whatever its scale.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, Self

from annotated_types import Ge, Le, Len, Lt
from jaxtyping import Int64
from pydantic import PositiveFloat, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from fedstill import schema
from fedstill.base.records import Normalisation, Records
from fedstill.base.settings import Settings
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.column_sums import ColumnSums, ColumnTotals, scale_of
from fedstill.privacy.sum_ranges import check_columns
from fedstill.protocol import Client, Method, Reply, Step, Summation, Summed

HEADER = "scale"
"""Entry of a request's header that has the means and the deviations of the measured columns."""
NAME = "measure_scale"
"""Name of the step, which crosses to the sites."""


HIDDEN = (
    "the noise of the private scale hides how many records there are, so columns keep their public range; raise its "
    "epsilon, or take more records"
)
"""What a run says where the scale tells nothing."""


class PrivateScale(Settings):
    """What is measured, and at which cost."""

    epsilon: PositiveFloat
    """Epsilon of the release, at the run's delta."""
    columns: Annotated[tuple[Annotated[int, Ge(0), Lt(10_000)], ...], Len(1, 10_000)]
    """Places of the measured columns in a vector, in order; others keep the scale that they have."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if list(self.columns) != sorted(set(self.columns)):
            raise ValueError("columns must be in order, each once")
        return self

    def mechanism(self, num_classes: int, delta: float, adders: int) -> ColumnSums:
        """The clients' mechanism."""
        multiplier = release_noise(self.epsilon, delta)
        return ColumnSums(
            num_classes=num_classes, columns=len(self.columns), noise_multiplier=multiplier, adders=adders
        )


class ScaleReply(Reply):
    """Sums of a client's columns, of their squares and of its records by class, in whole numbers with noise."""

    values: Summed[Int64[Tensor, " measured"]]
    squares: Summed[Int64[Tensor, " measured"]]
    counts: Summed[Int64[Tensor, " classes"]]


def scale_step(scale: PrivateScale) -> Step[ScaleReply]:
    """The step that measures; what it releases is in the run's spec, so that a request has no arguments."""

    def measure_scale(self: Method, client: Client) -> ScaleReply:
        """Release sums of the columns under the public scale."""
        train = client.train
        mechanism = scale.mechanism(train.num_classes, client.delta, client.adders)
        rows = train.inputs()[:, list(scale.columns)]
        sums = client.release(mechanism, (rows, train.labels))
        return ScaleReply(
            values=sums.map(lambda found: found.values.cpu()),
            squares=sums.map(lambda found: found.squares.cpu()),
            counts=sums.map(lambda found: found.counts.cpu()),
        )

    return Step(measure_scale)


class Measured(NamedTuple):
    """The scale of a run, as ``scale.json`` and the headers of requests have it.

    Attributes:
        mean: mean of each measured column under the public scale, in [-1, 1].
        std: standard deviation of each.
        records: the records of each class at all clients, with noise.
        clear: whether the noise left the number of records to be told; without, the public scale stays.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    records: tuple[int, ...] = ()
    clear: bool = True

    @property
    def header(self) -> dict[str, Any]:
        """The entry of a request's header."""
        return {HEADER: [self.mean, self.std]}

    def normalisation(self, scale: PrivateScale, public: Normalisation, width: int) -> Normalisation:
        """The normalisation of vectors of ``width`` numbers: the public one, and then this scale's."""
        means, stds = (list(some) * (width // len(some)) for some in (public.mean, public.std))
        for column, mean, std in zip(scale.columns, self.mean, self.std, strict=True):
            means[column], stds[column] = means[column] + stds[column] * mean, stds[column] * std
        return Normalisation(tuple(means), tuple(stds))


def measured(scale: PrivateScale, summed: Summation[ScaleReply], num_classes: int, delta: float) -> Measured:
    """The scale that a sum tells.

    Raises:
        OutOfRange: no records give this total.
    """
    mechanism, total = scale.mechanism(num_classes, delta, summed.adders), summed.total
    totals = ColumnTotals(total.values.value, total.squares.value, total.counts.value)
    check_columns(mechanism, totals, len(summed.clients), summed.records)
    found = scale_of(mechanism, totals, len(summed.clients))
    return Measured(found.mean, found.std, found.counts, found.clear)


_LEAST = 1e-6
"""Smallest deviation of a column under the public scale, far below one step of `ColumnSums`."""
_Means = tuple[Annotated[float, Ge(-1), Le(1)], ...]
_Stds = tuple[Annotated[float, Ge(_LEAST), Le(1)], ...]
_ENTRY = TypeAdapter(tuple[_Means, _Stds])


def read_header(header: Mapping[str, Any], scale: PrivateScale | None) -> Measured | None:
    """The scale that a request brings; None without one.

    Raises:
        Refused: it is malformed, or the run has none.
    """
    if HEADER not in header:
        return None
    if scale is None:
        raise schema.Refused("the request has a scale of columns, but the run measures none")
    try:
        mean, std = _ENTRY.validate_python(header[HEADER])
    except ValidationError as error:
        raise schema.Refused(
            f"the request's scale is not of means in [-1, 1] and deviations in [{_LEAST:g}, 1]"
        ) from error
    if not len(mean) == len(std) == len(scale.columns):
        raise schema.Refused(
            f"the request has a scale of {len(mean)} and {len(std)} columns; the run measures {len(scale.columns)}"
        )
    return Measured(mean, std)


def rescaled(records: Records, normalisation: Normalisation, *, drawn: bool = False) -> Records:
    """The records with another normalisation; ``drawn`` ones, of noise at the scale's size, stay the same inputs."""
    if not drawn:
        return replace(records, normalisation=normalisation)
    mean, std = (records.images.new_tensor(values) for values in (normalisation.mean, normalisation.std))
    return replace(records, images=mean + std * records.inputs(), normalisation=normalisation)
