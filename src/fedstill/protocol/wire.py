"""The only encoder and decoder of messages.

A message is in the safetensors format; values other than tensors are JSON in its header. There is no pickle. Every
message is checked against its `fedstill.schema`, and a method sees only messages that pass.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedstill.schema import Facts, Refused, Schema, check, clean, scalar, short, validator

MAX_HEADER = 4 * 2**20
"""Size in bytes of the largest message header that is read."""


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """Bytes of named tensors and a JSON header; equal input gives equal bytes."""
    arrays = {name: value.detach().cpu().contiguous() for name, value in sorted(tensors.items())}
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(value.dtype).removeprefix("torch."),
            shape=list(value.shape),
            data_ptr=value.data_ptr(),
            data_len=value.nbytes,
        )
        for name, value in arrays.items()
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return bytes(safetensors.serialize(specs, {"fedstill": text}))


def unpack(
    data: bytes | bytearray, header: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a message; the inverse of `pack`. Raises `Refused` if ``data`` is no message.

    Args:
        data: the message. A ``bytearray`` must come from our own disk, where it was checked on arrival and has had a
            checksum since; its tensors then share its memory.
        header: the result of `envelope`, if it is known already.
    """
    fields = envelope(data) if header is None else dict(header)
    if isinstance(data, bytearray):
        return _views(data), fields
    _check_number(data, _MOST)
    try:
        return safetensors.torch.load(data), fields
    except (ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise Refused(f"{len(data)} bytes are not a fedstill message: {clean(str(error))}") from error


_MOST = 10_000
"""Largest number of tensors of a message whose fields are not known yet."""
_OWN = 1000
"""Largest number of JSON objects in a header beside the tensors' entries: the fields and the list of releases."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in the format; messages with other types are read by safetensors itself."""


def _views(data: bytearray) -> dict[str, Tensor]:
    """The tensors of a message that was checked before, without a copy."""
    start = 8 + int.from_bytes(data[:8], "little")
    entries = {name: entry for name, entry in json.loads(data[8:start]).items() if name != "__metadata__"}
    if any(entry["dtype"] not in _DTYPES for entry in entries.values()):
        return safetensors.torch.load(bytes(data))
    views = {}
    for name, entry in entries.items():
        dtype, (begin, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        flat = torch.empty(0, dtype=dtype)
        if end > begin:
            flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start + begin)
        views[name] = flat.reshape(entry["shape"])
    return views


def envelope(data: bytes | bytearray) -> dict[str, Any]:
    """The header of a message, without reading its tensors; raises `Refused` like `unpack`."""
    try:
        size = int.from_bytes(data[:8], "little")
        if not 0 < size <= min(len(data) - 8, MAX_HEADER):  # JSON takes many times its length in memory
            raise ValueError(f"a header of {size} bytes; at most {MAX_HEADER} are read")
        header = json.loads(data[8 : 8 + size], object_pairs_hook=_unique)
        fields = json.loads(header["__metadata__"]["fedstill"], parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{len(data)} bytes are not a fedstill message: {clean(str(error))}") from error
    if not isinstance(fields, dict):
        raise Refused(f"the header is a JSON {type(fields).__name__}; it must be an object")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name stands twice in the header")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def encode(values: Mapping[str, Any], fields: Schema, facts: Facts, envelope: Mapping[str, Any]) -> bytes:
    """The message that carries ``values``; raises `Refused` if they do not match ``fields``.

    ``envelope`` holds the entries that engines add: step, exchange.
    """
    check(values, fields, facts)
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for f in fields:
        value = values[f.name]
        if f.like:
            tensors |= {f"{f.name}/{key}": entry for key, entry in value.items()}
        elif f.is_tensor:
            tensors[f.name] = value
        else:
            scalars[f.name] = validator(f.annotation, f.marks).dump_python(value, mode="json")
    return pack(tensors, {**envelope, "fields": scalars})


def _most_tensors(fields: Schema, facts: Facts) -> int:
    """Largest number of tensors that a message with these fields can have."""
    return len(fields) + max(map(len, facts.templates.values()), default=0) * sum(bool(f.like) for f in fields)


def _check_number(data: bytes | bytearray, most: int) -> None:
    """Refuse a message with far more than ``most`` tensors before any is read: each takes 0.1 ms.

    A tensor's entry is a JSON object, and so are the header's own entries.
    """
    if data.count(b"{", 8, 8 + int.from_bytes(data[:8], "little")) > most + _OWN:
        raise Refused(f"the message has more than {most} tensors and {_OWN} other entries")


def decode(
    data: bytes | bytearray,
    fields: Schema,
    facts: Facts,
    *,
    at_most: Mapping[str, int] | None = None,
    header: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values and the envelope of a message; raises `Refused` if it does not match ``fields``.

    Args:
        data: the message; see `unpack` about a ``bytearray``.
        fields: the fields that it must have, no more and no less.
        facts: the run's sizes and templates.
        at_most: largest sizes of dimensions that the run does not fix.
        header: see `unpack`.
    """
    if len(data) > facts.max_bytes:
        raise Refused(f"the message has {len(data)} bytes; the limit is {facts.max_bytes} (--max-message-mb)")
    if isinstance(data, bytes):
        _check_number(data, _most_tensors(fields, facts))
    tensors, envelope = unpack(data, header)
    scalars = envelope.pop("fields", None)
    if not isinstance(scalars, dict):
        raise Refused("the header has no object called 'fields'")
    values: dict[str, Any] = {}
    for f in fields:
        if f.like:
            prefix = f"{f.name}/"
            order = {key: place for place, key in enumerate(facts.templates.get(f.template(values), {}))}  # the model's
            keys = [key.removeprefix(prefix) for key in tensors if key.startswith(prefix)]
            keys.sort(key=lambda key: (order.get(key, len(order)), key))  # noqa: B023
            values[f.name] = {key: tensors.pop(prefix + key) for key in keys}
        elif f.is_tensor:
            if f.name not in tensors:
                raise Refused(f"field '{f.name}' is missing")
            values[f.name] = tensors.pop(f.name)
        else:
            if f.name not in scalars:
                raise Refused(f"field '{f.name}' is missing")
            values[f.name] = scalar(f, scalars.pop(f.name), from_json=True)
    if unknown := sorted([*tensors, *scalars]):
        raise Refused(f"field {short(unknown[0])} is not declared")
    check(values, fields, facts, at_most=at_most)
    return values, envelope
