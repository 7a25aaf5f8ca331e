"""Checks that a reply must pass before the server uses it."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from fedstill import schema, wire
from fedstill.engines import outliers
from fedstill.engines.transport import Arrival
from fedstill.privacy.ledger import Entry
from fedstill.privacy.theorems import own_words
from fedstill.protocol import Step

_SPENT: TypeAdapter[list[Entry]] = TypeAdapter(Annotated[list[Entry], Field(max_length=100)])


class Checked(NamedTuple):
    """The result of `check`.

    Attributes:
        reason: the reason to refuse the reply, or None.
        spent: the releases that the reply lists, also of a refused one: they have reached the server.
        size: size of the reply's numbers (`fedstill.engines.outliers`); 0 for a refused reply.
    """

    reason: str | None
    spent: list[Entry] = []  # noqa: RUF012 - never changed
    size: float = 0.0


def check(
    arrival: Arrival, exchange: int, step: Step[Any], facts: schema.Facts, at_most: Mapping[str, int] | None
) -> Checked:
    """Check a reply to request ``exchange``; one that arrives with a failure is refused, but its releases count."""
    spent: list[Entry] = []
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
        outliers.check_released(values, fields)
        if values.get("client", arrival.client) != arrival.client:
            raise schema.Refused(f"it says that it is client {schema.short(values['client'])}")
    except schema.Refused as refused:
        return Checked(str(refused) if arrival.failure is None else arrival.failure, spent)
    envelope.pop("spent", None)
    if envelope != {"step": step.name, "exchange": exchange}:
        return Checked(f"the reply is not to step '{step.name}' of exchange {exchange}", spent)
    if not spent and any(f.is_released for f in fields):
        return Checked("the reply has released fields, but lists no release", spent)
    return Checked(None, spent, outliers.size(values, fields))


def _check_variances(values: Mapping[str, Any], fields: schema.Schema) -> None:
    for f in fields:
        for name, value in values[f.name].items() if f.like else ():
            if name.endswith("running_var") and value.numel() and float(value.min()) < 0:
                raise schema.Refused(f"field '{f.name}' has the variance {float(value.min()):g} in '{name}'")


def listed(header: Mapping[str, Any], step: str, exchange: int) -> list[Entry]:
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
