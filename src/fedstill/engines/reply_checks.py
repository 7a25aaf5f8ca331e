"""Checks that a reply must pass before the server uses it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fedstill import schema, wire
from fedstill.engines.transport import Arrival
from fedstill.privacy.ledger import Entry
from fedstill.protocol import Step

_SPENT: TypeAdapter[list[Entry]] = TypeAdapter(Annotated[list[Entry], Field(max_length=100)])


def check(
    arrival: Arrival, exchange: int, step: Step[Any], facts: schema.Facts, at_most: Mapping[str, int] | None
) -> tuple[str | None, list[Entry]]:
    """The reason to refuse a reply, or None; and the releases that the reply lists."""
    if arrival.failure is not None:
        return arrival.failure, []
    spent: list[Entry] = []
    try:
        header = wire.envelope(arrival.reply)
        spent = listed(header, step.name, exchange)
        if header.get("error") is not None:
            return schema.clean(str(header["error"]), 500) or "the client gave no reason", spent
        _, envelope = wire.decode(arrival.reply, step.reply.schema, facts, at_most=at_most, header=header)
    except schema.Refused as refused:
        return str(refused), spent
    envelope.pop("spent", None)
    if envelope != {"step": step.name, "exchange": exchange}:
        return f"the reply is not to step '{step.name}' of exchange {exchange}", spent
    if not spent and any(f.is_released for f in step.reply.schema):
        return "the reply has released fields, but lists no release", spent
    return None, spent


def listed(header: Mapping[str, Any], step: str, exchange: int) -> list[Entry]:
    """The releases that a reply lists.

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
    return entries
