"""Steps (the client-side functions of methods), their requests and their replies."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from fedstill import schema
from fedstill.privacy.released import Released
from fedstill.schema import Schema


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Reply:
    """A step's message to the server: a frozen class whose annotations are the wire schema (see `fedstill.schema`).

    The server refuses a reply whose field ``client`` is not the number of the client that sent it.
    """

    schema: ClassVar[Schema] = ()

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
        cls.schema = schema.schema_of(_annotations(cls))

    def payload(self) -> dict[str, Any]:
        """The values by name, without `Released` around them.

        Raises:
            TypeError: if the value of a field declared ``Released`` did not come from `Client.release`.
        """
        values = {f.name: getattr(self, f.name) for f in self.schema}
        for f in self.schema:
            if f.is_released:
                if not isinstance(values[f.name], Released):
                    raise TypeError(f"field '{f.name}' is declared released, but its value is not from client.release")
                values[f.name] = values[f.name].value
        return values

    @classmethod
    def from_payload(cls, values: Mapping[str, Any]) -> Self:
        """The reply that carries ``values``; the inverse of `payload`."""
        return cls(**{f.name: Released(values[f.name]) if f.is_released else values[f.name] for f in cls.schema})


def _annotations(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


R = TypeVar("R", bound=Reply)


class Step(typing.Generic[R]):
    """A client-side ``function(self, client, **arguments) -> SomeReply`` with the schemas that its annotations declare.

    A request carries the arguments after ``client``. An argument whose type is a dataclass crosses as the fields of
    that class, in their order, as if each were a separate argument.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self.name: str = function.__name__
        self.function = function
        self.__doc__ = function.__doc__
        names = list(inspect.signature(function).parameters)
        assert names[:2] == ["self", "client"], f"step {self.name} must start with (self, client), not {names[:2]}"
        self._names = names[2:]

    @cached_property
    def _hints(self) -> dict[str, Any]:  # not in __init__: the reply's class may be defined after the method
        return typing.get_type_hints(self.function, include_extras=True)

    @cached_property
    def _fields(self) -> dict[str, dict[str, Any] | None]:
        """Field names and types of each argument that is a dataclass; None for other arguments."""
        kinds = {name: self._hints[name] for name in self._names}
        return {name: _annotations(kind) if dataclasses.is_dataclass(kind) else None for name, kind in kinds.items()}

    @cached_property
    def request(self) -> Schema:
        """The schema of a request."""
        annotations: dict[str, Any] = {}
        for name, fields in self._fields.items():
            more = {name: self._hints[name]} if fields is None else fields
            assert not annotations.keys() & more.keys(), f"step {self.name} has two fields of one name in '{name}'"
            annotations |= more
        return schema.schema_of(annotations)

    def payload(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request by name, from the step's arguments."""
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            fields = self._fields.get(name)
            values |= {name: value} if fields is None else {field: getattr(value, field) for field in fields}
        return values

    def arguments(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The step's arguments, from a request's fields; the inverse of `payload`."""
        return {
            name: payload[name] if fields is None else self._hints[name](**{field: payload[field] for field in fields})
            for name, fields in self._fields.items()
        }

    @property
    def reply(self) -> type[R]:
        """The class of the reply."""
        reply = self._hints["return"]
        assert issubclass(reply, Reply), f"step {self.name} must return a Reply, not {reply}"
        return typing.cast(type[R], reply)


def step(function: Callable[..., R]) -> Step[R]:
    """Declare a client step: ``@step def update(self, client: Client, weights: State) -> Update``."""
    return Step(function)
