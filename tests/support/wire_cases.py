"""Messages for ``tests/vectors/wire.json``: what is good, and one fault after another, built byte by byte.

Everything a reader needs is in the file: the run's facts, the declared fields, the bytes, and for a good message the
values. A message is 8 bytes of the header's length (little-endian), the header (JSON), and the tensors' bytes.
"""

import json
from typing import Any

import torch
from jaxtyping import Float32, UInt8
from pydantic import PositiveInt
from torch import Tensor

from fedstill import schema
from fedstill.protocol import wire
from fedstill.schema import Labels, State

MODEL = {"bias": torch.tensor([0.5, -2.0]), "steps": torch.tensor(3)}
FACTS = schema.Facts(
    sizes={"channels": 1, "height": 2, "width": 2, "classes": 3},
    templates={"state": schema.template(MODEL)},
    max_bytes=4096,
)
REQUEST = schema.schema_of({"weights": State, "epochs": PositiveInt})
REPLY = schema.schema_of(
    {
        "images": UInt8[Tensor, "n channels height width"],
        "labels": Labels,
        "means": Float32[Tensor, "classes 2"],
        "note": str,
    }
)
FIELDS = {"request": REQUEST, "reply": REPLY}
DECLARED = {
    "request": {"weights": "state", "epochs": "int, 1 or more"},
    "reply": {
        "images": "uint8 (n, channels, height, width)",
        "labels": "integers (n), 0 to classes - 1",
        "means": "float32 (classes, 2)",
        "note": "text",
    },
}
AT_MOST = {"n": 4}
"""Largest sizes of dimensions that the run does not fix."""
ENVELOPE = {"step": "train", "exchange": 2}
VALUES: dict[str, dict[str, Any]] = {
    "request": {"weights": MODEL, "epochs": 5},
    "reply": {
        "images": torch.arange(8, dtype=torch.uint8).reshape(2, 1, 2, 2),
        "labels": torch.tensor([2, 0], dtype=torch.uint8),
        "means": torch.tensor([[1.0, -1.5], [0.0, 1e-3], [3e8, -0.25]]),
        "note": "a 'quoted' näme",
    },
}


def plain(value: Any) -> Any:
    """A value as JSON: tensors as type, shape and numbers."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "values": value.flatten().tolist()}
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a message and its tensors' bytes."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def joined(header: str, body: bytes) -> bytes:
    """The message with this header."""
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + body


def text_of(header: dict[str, Any]) -> str:
    return json.dumps(header, separators=(",", ":"))


def good(kind: str) -> bytes:
    return wire.encode(VALUES[kind], FIELDS[kind], FACTS, ENVELOPE)


def _repacked(**changes: Any) -> bytes:
    """The reply with other fields, written without a check; a field that is None is left out."""
    tensors: dict[str, Any] = {name: v for name, v in VALUES["reply"].items() if isinstance(v, Tensor)}
    scalars: dict[str, Any] = {"note": VALUES["reply"]["note"]}
    for name, value in changes.items():
        place = tensors if isinstance(value, Tensor) or (value is None and name in tensors) else scalars
        place[name] = value
    tensors = {name: value for name, value in tensors.items() if value is not None}
    return wire.pack(tensors, {**ENVELOPE, "fields": {n: v for n, v in scalars.items() if v is not None}})


def _with_fields(text: str) -> bytes:
    """The reply whose own part of the header is ``text``."""
    header, body = parts(good("reply"))
    return joined(text_of({**header, "__metadata__": {"fedstill": text}}), body)


def _with_entry(**changes: Any) -> bytes:
    """The reply whose header says something else of the tensor ``means``."""
    header, body = parts(good("reply"))
    return joined(text_of({**header, "means": {**header["means"], **changes}}), body)


def bad() -> list[tuple[str, str, bytes]]:
    """Name, kind and bytes of messages that must be refused."""
    reply = good("reply")
    header, body = parts(reply)
    means = VALUES["reply"]["means"]
    not_finite = means.clone()
    not_finite[0, 0] = torch.nan
    state = {"weights/bias": MODEL["bias"], "weights/steps": MODEL["steps"]}
    asked = {**ENVELOPE, "fields": {"epochs": 5}}
    twice = text_of(header).replace('"labels":', '"means":{},"labels":', 1)
    return [
        ("no byte", "reply", b""),
        ("seven bytes", "reply", reply[:7]),
        ("the last byte missing", "reply", reply[:-1]),
        ("a byte too many", "reply", reply + b"\0"),
        ("a header longer than the message", "reply", len(reply).to_bytes(8, "little") + reply[8:]),
        ("a header of length 0", "reply", bytes(8) + reply[8:]),
        ("a header that is no JSON", "reply", joined("{" + text_of(header), body)),
        ("a tensor's name twice", "reply", joined(twice, body)),
        ("no part of fedstill in the header", "reply", joined(text_of(header | {"__metadata__": {}}), body)),
        ("a part of fedstill that is a list", "reply", _with_fields("[]")),
        ("a part of fedstill with NaN", "reply", _with_fields('{"step":NaN,"fields":{"note":""}}')),
        ("a field twice", "reply", _with_fields('{"fields":{"note":"a","note":"b"}}')),
        ("no object of fields", "reply", _with_fields('{"step":"train","exchange":2}')),
        ("offsets beyond the end", "reply", _with_entry(data_offsets=[0, 10**6])),
        ("a shape that the bytes do not fill", "reply", _with_entry(shape=[3, 3])),
        ("a type that does not exist", "reply", _with_entry(dtype="F31")),
        ("a field missing", "reply", _repacked(labels=None)),
        ("a text missing", "reply", _repacked(note=None)),
        ("a field not declared", "reply", _repacked(more=torch.zeros(1))),
        ("a text not declared", "reply", _repacked(more="words")),
        ("another type", "reply", _repacked(means=means.double())),
        ("another number of axes", "reply", _repacked(means=means.flatten())),
        ("a size that the run fixes otherwise", "reply", _repacked(means=means[:2])),
        ("two sizes of one dimension", "reply", _repacked(labels=torch.zeros(3, dtype=torch.uint8))),
        (
            "more rows than were asked for",
            "reply",
            _repacked(
                images=torch.zeros(5, 1, 2, 2, dtype=torch.uint8),
                labels=torch.zeros(5, dtype=torch.uint8),
            ),
        ),
        ("a class too many", "reply", _repacked(labels=torch.tensor([3, 0], dtype=torch.uint8))),
        ("a negative class", "reply", _repacked(labels=torch.tensor([-1, 0]))),
        ("a number that is not finite", "reply", _repacked(means=not_finite)),
        ("a number in place of a text", "reply", _repacked(note=5)),
        ("a request in place of a reply", "reply", good("request")),
        ("more bytes than the limit", "reply", _repacked(note="x" * 5000)),
        ("an entry of the model missing", "request", wire.pack({"weights/bias": MODEL["bias"]}, asked)),
        (
            "an entry that the model lacks",
            "request",
            wire.pack(state | {"weights/more": torch.zeros(1)}, asked),
        ),
        ("an entry in another shape", "request", wire.pack(state | {"weights/bias": torch.zeros(3)}, asked)),
        ("epochs that are a text", "request", wire.pack(state, {**ENVELOPE, "fields": {"epochs": "5"}})),
        ("epochs that are a fraction", "request", wire.pack(state, {**ENVELOPE, "fields": {"epochs": 5.0}})),
        ("no epoch", "request", wire.pack(state, {**ENVELOPE, "fields": {"epochs": 0}})),
    ]


def as_file() -> dict[str, Any]:
    """The content of ``wire.json``."""
    cases = [
        {
            "name": f"a {kind}",
            "kind": kind,
            "good": True,
            "message": good(kind).hex(),
            "envelope": ENVELOPE,
            "values": plain(VALUES[kind]),
        }
        for kind in FIELDS
    ]
    cases += [{"name": name, "kind": kind, "good": False, "message": data.hex()} for name, kind, data in bad()]
    template = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in MODEL.items()}
    facts = {"sizes": dict(FACTS.sizes), "state": template, "max_bytes": FACTS.max_bytes, "at_most": AT_MOST}
    return {"format": 1, "facts": facts, "fields": DECLARED, "cases": cases}
