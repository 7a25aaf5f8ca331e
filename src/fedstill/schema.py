"""Schemas of messages: annotations that declare the fields of a message, and checks of values against them.

========================================  ==================================================================
annotation                                allowed value
========================================  ==================================================================
``UInt8[Tensor, "n channels height"]``    a tensor of that dtype and shape; a dimension that the run fixes
                                          (``channels``, ``height``, ``width``, ``classes``; ``columns``
                                          of vectors) has that size, any other name has one size within the message
``Annotated[..., Below(9, least=1)]``     a tensor of integers from 1 to 8
``Annotated[..., MinLen(1)]``             a tensor with at least 1 row
``Labels``                                integers ``(n,)``, each below the number of classes
``State``, ``Parameters``                 named tensors exactly like the model's state or parameters
``Change``                                named tensors like the parameters: trained minus received
``Shared``                                the state entries that do not stay at the clients
``OwnState``                              named tensors exactly like the state of the model that the field
                                          ``architecture`` of the same message names
``int``, ``PositiveInt``, ``str``, ...    a JSON value that pydantic accepts in strict mode
``Released[...]`` of any of these         the same, from a privacy mechanism
``Summed[...]`` of a tensor               the same, of which the server gets the total over clients only
========================================  ==================================================================

Every number must be finite. Any other value is refused with one sentence (`Refused`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import numpy as np
import torch
from annotated_types import Gt, Lt, MinLen
from jaxtyping import AbstractArray, Integer
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedstill.base.errors import FedstillError
from fedstill.privacy.releases import Released


class Refused(FedstillError, ValueError):
    """A message does not match its schema; the text gives the field, its value and the allowed values."""


@dataclass(frozen=True)
class Below:
    """Mark of a tensor with values in ``[least, limit)``; ``limit`` is a number or a name in `Facts.sizes`."""

    limit: int | str
    least: int = 0


@dataclass(frozen=True)
class Like:
    """Mark of named tensors that must match a template in `Facts.templates`, for example ``"state"``.

    With ``of``, the template is that of the model whose name is the value of the field ``of`` of the same message.
    """

    template: str
    of: str | None = None


@dataclass(frozen=True)
class Public:
    """Mark of a field that depends on no record, or is agreed to be public, and so costs no privacy."""


@dataclass(frozen=True)
class OfSum:
    """Mark of a released field of which the server uses the total over clients only (`Summed`)."""


@dataclass(frozen=True)
class Difference:
    """Mark of named tensors that are a model's change (trained minus received); attacks need to know it."""


State = Annotated[dict[str, Tensor], Like("state")]
"""Every entry of the model's state, buffers included."""
Parameters = Annotated[dict[str, Tensor], Like("parameters")]
"""The model's trainable parameters only."""
Change = Annotated[dict[str, Tensor], Like("parameters"), Difference()]
"""The change of the model's trainable parameters in a client's training."""
Shared = Annotated[dict[str, Tensor], Like("shared")]
"""The model's state without the entries that stay at the clients (`fedstill.protocol.Method.own`)."""
OwnState = Annotated[dict[str, Tensor], Like("state", of="architecture")]
"""Every state entry of the client's own model; the field ``architecture``, declared before it, names that model."""


SomeTensor = TypeVar("SomeTensor")
Summed = Annotated[Released[SomeTensor], OfSum()]
"""A released tensor of which the server gets the total over clients (`fedstill.protocol.Federation.sum`)."""
Labels = Annotated[Integer[Tensor, " n"], Below("classes")]
"""One class per row; `compact` picks the smallest integer type that holds them."""
Count = Annotated[int, Gt(0), Lt(2**40)]
"""A positive number, of records for example, small enough for sums of counts not to overflow."""
Template = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Facts:
    """Facts about every message that a run fixes.

    Attributes:
        sizes: sizes of named dimensions (``channels``, ``height``, ``width`` of images, ``columns`` of vectors,
            ``classes``).
        templates: names, dtypes and shapes of the tensors in `State`, `Parameters` and `Shared` fields, and under
            ``"state of NAME"`` those of each model that clients may have.
        max_bytes: size of the largest message that is accepted.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    templates: Mapping[str, Template] = field(default_factory=dict)
    max_bytes: int = 1 << 30


def template(tensors: Mapping[str, Tensor]) -> Template:
    """The names, dtypes and shapes of ``tensors``, for `Facts`."""
    return {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}


def compact(labels: Tensor, num_classes: int) -> Tensor:
    """``labels`` in the smallest integer type that holds ``num_classes`` classes: one byte each up to 256."""
    return labels.to(torch.uint8 if num_classes <= 256 else torch.int32)


@dataclass(frozen=True)
class Field:
    """One declared field: its annotation without metadata, the metadata, and whether it is `Released`."""

    name: str
    annotation: Any
    marks: tuple[Any, ...]
    is_released: bool = False

    @property
    def protection(self) -> Literal["released", "public", "unprotected"]:
        """The protection of the field's value: a mechanism's noise, the method's word that it is public, or none."""
        if self.is_released:
            return "released"
        return "public" if any(isinstance(mark, Public) for mark in self.marks) else "unprotected"

    @property
    def is_summed(self) -> bool:
        """Whether the server uses the field's total over clients only."""
        return any(isinstance(mark, OfSum) for mark in self.marks)

    @property
    def like(self) -> Like | None:
        """The field's mark `Like`, if it has one."""
        return next((mark for mark in self.marks if isinstance(mark, Like)), None)

    def template(self, values: Mapping[str, Any]) -> str:
        """Name of the template that the field must match; ``values`` are the other fields of the message."""
        assert self.like is not None
        return self.like.template if self.like.of is None else f"{self.like.template} of {values.get(self.like.of)}"

    @property
    def is_tensor(self) -> bool:
        """Whether the field is one tensor."""
        return isinstance(self.annotation, type) and issubclass(self.annotation, AbstractArray)


Schema = tuple[Field, ...]


def schema_of(annotations: Mapping[str, Any]) -> Schema:
    """The fields that ``annotations`` declare: name -> type, as `typing.get_type_hints` gives them with extras."""
    fields = []
    for name, annotation in annotations.items():
        marks: tuple[Any, ...] = ()
        released = False
        while (origin := get_origin(annotation)) in (Annotated, Released):
            released = released or origin is Released
            annotation, *extra = get_args(annotation)
            marks = (*marks, *extra)
        fields.append(Field(name, annotation, marks, released))
    return tuple(fields)


def check_declared(fields: Schema, where: str) -> None:
    """Refuse fields that no message can carry, when their class is made.

    Args:
        fields: the declared fields.
        where: words for their class or step.

    Raises:
        TypeError: a field has no type that is allowed.
    """
    summed = [f for f in fields if f.is_summed]
    if summed and (other := [f for f in fields if not (f.is_summed and f.is_tensor)]):
        raise TypeError(
            f"{where} has the sum '{summed[0].name}' beside '{other[0].name}'; a reply to a sum is tensors declared "
            "Summed[...] alone, as the server learns no client's own"
        )
    for f in fields:
        if f.is_tensor or f.like is not None:
            continue
        named = f"the field '{f.name}' of {where} is {_type_words(f.annotation)}"
        if _holds_tensors(f.annotation):
            raise TypeError(
                f"{named}; declare a tensor with its type and shape, as Float32[Tensor, 'n features'], or named "
                "tensors of the model, as State or Parameters (fedstill.schema)"
            )
        try:
            validator(f.annotation, f.marks)
        except Exception as error:  # pydantic has several kinds of errors on types
            raise TypeError(f"{named}, which no message can carry; use a tensor, a number, a text or a list") from error


def _type_words(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else clean(str(annotation))


def _holds_tensors(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Tensor | AbstractArray | np.ndarray | np.generic):
        return True
    return any(_holds_tensors(part) for part in get_args(annotation))


@cache
def validator(annotation: Any, marks: tuple[Any, ...]) -> TypeAdapter[Any]:
    """Pydantic's validator of a field that is neither a tensor nor named tensors."""
    limits = tuple(mark for mark in marks if not isinstance(mark, Public))
    return TypeAdapter(Annotated[(annotation, *limits)] if limits else annotation)


def check(values: Mapping[str, Any], fields: Schema, facts: Facts, *, at_most: Mapping[str, int] | None = None) -> None:
    """Raise `Refused` unless each field has the declared type, dtype, shape and range, and only finite numbers."""
    sizes = dict(facts.sizes)
    for f in fields:
        if f.name not in values:
            raise Refused(f"field '{f.name}' is missing")
        value = values[f.name]
        if f.like:
            _check_like(f, value, f.template(values), facts)
        elif f.is_tensor:
            _check_tensor(f, value, sizes, at_most or {})
        else:
            scalar(f, value)
    if unknown := sorted(set(values) - {f.name for f in fields}):
        raise Refused(f"field {short(unknown[0])} is not declared")


def scalar(f: Field, value: Any, *, from_json: bool = False) -> Any:
    """``value`` in the field's type; raises `Refused` if it is not of that type."""
    adapter = validator(f.annotation, f.marks)
    try:
        if from_json:
            value = adapter.validate_json(json.dumps(value), strict=True)
        else:
            value = adapter.validate_python(value, strict=True)
    except (ValidationError, ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise Refused(f"field '{f.name}' is {short(value)}: {clean(str(why))}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(f"field '{f.name}' is {value}; it must be finite")
    return value


def _refuse_others(name: str, value: object) -> None:
    """Refuse a value that is no tensor, or still belongs to a graph of gradients."""
    if not isinstance(value, Tensor):
        remedy = "; send torch.from_numpy(...) of it" if isinstance(value, np.ndarray) else ""
        raise Refused(f"field '{name}' is a {type(value).__name__}; it must be a tensor{remedy}")
    if value.requires_grad:
        raise Refused(f"field '{name}' requires grad; send its .detach()")


def _check_like(f: Field, value: Mapping[str, Tensor], template: str, facts: Facts) -> None:
    if not isinstance(value, Mapping):
        raise Refused(f"field '{f.name}' is a {type(value).__name__}; it must be a dictionary of named tensors")
    if template not in facts.templates:
        raise Refused(f"field '{f.name}' must match the model's {clean(template)}, which is not known here")
    expected = facts.templates[template]
    if missing := expected.keys() - value.keys():
        raise Refused(f"field '{f.name}' lacks {short(min(missing))}")
    if unknown := value.keys() - expected.keys():
        raise Refused(f"field '{f.name}' has {short(min(unknown))}, which the model does not have")
    for key, (dtype, shape) in expected.items():
        entry = value[key]
        _refuse_others(f"{f.name}/{key}", entry)
        if entry.dtype != dtype or tuple(entry.shape) != shape:
            came, wanted = f"{entry.dtype}{list(entry.shape)}", f"{dtype}{list(shape)}"
            raise Refused(f"field '{f.name}' has {short(key)} as {clean(came)}; the model has {wanted}")
        _check_finite(f"{f.name}/{key}", entry)


def _check_tensor(f: Field, value: Tensor, sizes: dict[str, int], at_most: Mapping[str, int]) -> None:
    _refuse_others(f.name, value)
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in f.annotation.dtypes:
        raise Refused(f"field '{f.name}' is {dtype}; declared is {' or '.join(f.annotation.dtypes)}")
    names = f.annotation.dim_str.split()
    if value.ndim != len(names):
        raise Refused(f"field '{f.name}' has shape {clean(str(list(value.shape)))}; declared is ({', '.join(names)})")
    for name, size in zip(names, value.shape, strict=True):
        expected = int(name) if name.isdecimal() else sizes.setdefault(name, size)
        if size != expected:
            raise Refused(f"field '{f.name}' has {name}={size}; it must be {expected}")
        if size > at_most.get(name, size):
            raise Refused(f"field '{f.name}' has {name}={size}; at most {at_most[name]} were asked for")
    _check_finite(f.name, value)
    for mark in f.marks:
        if isinstance(mark, MinLen) and len(value) < mark.min_length:
            raise Refused(f"field '{f.name}' has {names[0]}={len(value)}; at least {mark.min_length} is needed")
        if isinstance(mark, Below) and value.numel():
            limit = mark.limit if isinstance(mark.limit, int) else sizes[mark.limit]
            wide = value.to(torch.int64)  # torch has no minimum of wide unsigned types; large uint64 turns negative
            low, high = int(wide.min()), int(wide.max())
            if low < mark.least or high >= limit:
                wrong = low if low < mark.least else high
                raise Refused(f"field '{f.name}' has the value {wrong}; allowed is {mark.least} to {limit - 1}")


def _check_finite(name: str, value: Tensor) -> None:
    if value.is_floating_point() and value.numel():
        low, high = torch.aminmax(value)  # one pass; NaN propagates
        if not (math.isfinite(low) and math.isfinite(high)):
            raise Refused(f"field '{name}' has a value that is not finite")


def clean(text: str, limit: int = 80) -> str:
    """``text`` from another machine, shortened and safe to print on one line."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short(value: object) -> str:
    """``repr(value)``, shortened and safe to print on one line."""
    return clean(repr(value))
