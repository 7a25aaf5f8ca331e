"""Checks that a reply must pass before the server uses it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, overload

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from fedstill import schema
from fedstill.engines.transport import Arrival
from fedstill.privacy.ledger import Charge
from fedstill.privacy.mechanisms import own_words
from fedstill.privacy.releases import Released
from fedstill.protocol import Reply, Step, wire
from fedstill.runs.journal import Journal
from fedstill.schema import Refused, Schema

R = TypeVar("R", bound=Reply)


class Replies(Sequence[R]):
    """Replies of ``clients``, in their order, read from the journal one at a time when they are used."""

    def __init__(
        self, journal: Journal, facts: schema.Facts, exchange: int, step: Step[R], clients: Sequence[int]
    ) -> None:
        self.clients = clients
        self._journal = journal
        self._facts = facts
        self._exchange = exchange
        self._step = step

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        data = self._journal.read_reply(self._exchange, self._step.name, self.clients[index])
        values, _ = wire.decode(data, self._step.reply.schema, self._facts)
        return self._step.reply.from_payload(values)


FACTOR = 1000.0
"""Largest size of a client's reply, as a multiple of the median size of the other clients' (at least 1)."""
LARGEST = 1e18
"""Largest magnitude in a private release: sums grow with a client's records, so other clients' are no measure."""


def size(values: Mapping[str, Any], fields: Schema) -> float:
    """Size of a reply's numbers: the length of its named tensors, or a larger root mean square of another tensor.

    Integers and tensors of a private release do not count; 0 without others.
    """
    parts = [(f, _plain(values[f.name])) for f in fields if _is_measured(f)]
    named = [tensor for f, part in parts if f.like for tensor in part.values() if tensor.is_floating_point()]
    others = [part for f, part in parts if not f.like and part.numel() and part.is_floating_point()]
    return max([math.hypot(*map(_norm, named)), *(_norm(tensor) / math.sqrt(tensor.numel()) for tensor in others)])


def _plain(part: Any) -> Any:
    return part.value if isinstance(part, Released) else part


def _is_measured(f: schema.Field) -> bool:
    return f.like is not None or f.is_tensor and not f.is_released


def _norm(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(tensor.double()))


def check_released(values: Mapping[str, Any], fields: Schema) -> None:
    """Raise `Refused` if a tensor of a private release has a magnitude above `LARGEST`."""
    for f in fields:
        if not (f.is_released and f.is_tensor):
            continue
        tensor = _plain(values[f.name])
        if tensor.is_floating_point() and tensor.numel():
            low, high = map(float, torch.aminmax(tensor))
            if (largest := max(-low, high)) > LARGEST:
                raise Refused(f"field '{f.name}' has a value of magnitude {largest:.3g}; the limit is {LARGEST:g}")


def sizes_of(replies: Replies[Any], fields: Schema, known: Mapping[int, float]) -> dict[int, float]:
    """The size of each reply by client, ``known`` or from the journal; empty for replies without measured numbers."""
    if not any(map(_is_measured, fields)):
        return {}
    found = {
        client: known[client] if client in known else size(vars(replies[i]), fields)
        for i, client in enumerate(replies.clients)
    }
    return found if any(found.values()) else {}


def too_large(sizes: Mapping[int, float]) -> dict[int, str]:
    """The clients with an outlying size, each with the reason to refuse its reply."""
    reasons = {}
    for client, own in sizes.items():
        if own <= FACTOR:  # below every limit, so that honest clients cost no median
            continue
        others = [size for other, size in sizes.items() if other != client]
        if others and own > FACTOR * max(1.0, median := statistics.median(others)):
            reasons[client] = (
                f"its numbers have size {own:.3g}, the median of the other clients is {median:.3g}; "
                f"the limit is {FACTOR:g} times that"
            )
    return reasons


def check_finite(round: int, carried: Sequence[nn.Module | dict[str, Tensor]], sizes: Mapping[int, float]) -> None:
    """Refuse models that are not finite before they become a checkpoint; a method's own tensors may be infinite.

    Raises:
        ValueError: one is not; the text names the client whose last reply had the largest numbers.
    """
    for part in carried:
        if isinstance(part, nn.Module) and (name := not_finite(part)) is not None:
            whose = ""
            if sizes:
                client = max(sizes, key=sizes.__getitem__)
                whose = f"; the largest numbers came from client {client} (size {sizes[client]:.3g})"
            raise ValueError(
                f"round {round} gave '{name}' values that are not finite, so nothing of it was saved{whose}; lower "
                "the learning rate, or leave that client out"
            )


def not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter or buffer with an infinite value or NaN, or None."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return str(name)
    return None


def checked_model(name: str, model: object) -> nn.Module:
    """The final model of the method called ``name``.

    Raises:
        ValueError: its server gave no model, another type of numbers, or values that are not finite.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the server of {name} returned {type(model).__name__}; it must return the final model")
    if other := [p.dtype for p in model.parameters() if p.dtype != torch.float32]:
        raise ValueError(f"the final model of {name} has parameters of {other[0]}; they must be torch.float32")
    if (where := not_finite(model)) is not None:
        raise ValueError(
            f"the final model of {name} has values that are not finite in '{where}', so the run has no result; lower "
            "the learning rate"
        )
    return model


_SPENT: TypeAdapter[list[Charge]] = TypeAdapter(Annotated[list[Charge], Field(max_length=100)])


class Checked(NamedTuple):
    """The result of `check`.

    Attributes:
        reason: the reason to refuse the reply, or None.
        spent: the releases that the reply lists, also of a refused one: they have reached the server.
        size: size of the reply's numbers (`fedstill.engines.reply_checks`); 0 for a refused reply.
    """

    reason: str | None
    spent: list[Charge] = []  # noqa: RUF012 - never changed
    size: float = 0.0


def check(
    arrival: Arrival, exchange: int, step: Step[Any], facts: schema.Facts, at_most: Mapping[str, int] | None
) -> Checked:
    """Check a reply to request ``exchange``; one that arrives with a failure is refused, but its releases count."""
    spent: list[Charge] = []
    fields = step.reply.schema
    try:
        header = wire.envelope(arrival.reply)
        spent = listed(header, step.name, exchange)
        if arrival.failure is not None:
            return Checked(arrival.failure, spent)
        if header.get("error") is not None:
            return Checked(schema.clean(str(header["error"]), 500) or "the client gave no reason", spent)
        values, envelope = wire.decode(arrival.reply, fields, facts, at_most=at_most, header=header)
        _check_variances(values, fields)
        check_released(values, fields)
        if values.get("client", arrival.client) != arrival.client:
            raise schema.Refused(f"it says that it is client {schema.short(values['client'])}")
    except schema.Refused as refused:
        return Checked(str(refused) if arrival.failure is None else arrival.failure, spent)
    envelope.pop("spent", None)
    if envelope != {"step": step.name, "exchange": exchange}:
        return Checked(f"the reply is not to step '{step.name}' of exchange {exchange}", spent)
    if not spent and any(f.is_released for f in fields):
        return Checked("the reply has released fields, but lists no release", spent)
    return Checked(None, spent, size(values, fields))


def _check_variances(values: Mapping[str, Any], fields: schema.Schema) -> None:
    for f in fields:
        for name, value in values[f.name].items() if f.like else ():
            if name.endswith("running_var") and value.numel() and float(value.min()) < 0:
                raise schema.Refused(f"field '{f.name}' has the variance {float(value.min()):g} in '{name}'")


def listed(header: Mapping[str, Any], step: str, exchange: int) -> list[Charge]:
    """The releases that a reply lists, with this fedstill's own words for their mechanisms.

    Raises:
        Refused: the list is malformed, or belongs to another step.
    """
    try:
        entries = _SPENT.validate_python(header.get("spent", []))
    except ValidationError as error:
        first = error.errors()[0]
        where = schema.clean(".".join(map(str, first["loc"])))
        raise schema.Refused(
            f"its list of releases is invalid at {where}: {schema.clean(first['msg'], 200)}"
        ) from error
    if any((entry.step, entry.exchange) != (step, exchange) for entry in entries):
        raise schema.Refused("its list of releases belongs to another step")
    for entry in entries:
        if not entry.mechanism.isidentifier():
            raise schema.Refused(f"its list of releases names the mechanism '{schema.clean(entry.mechanism)}'")
    return [own_words(entry) for entry in entries]
