"""What a hostile or broken client may send in place of its reply: each kind a near-miss of the honest bytes."""

import io
import itertools
import json
import math
import pickle
import random
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedstill.engines.client import Site
from fedstill.protocol import wire

Kind = Callable[[bytes], bytes]


class Booby:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 / 0",)


def _split(reply: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(reply[:8], "little")
    return reply[8 : 8 + size], reply[8 + size :]


def _joined(head: bytes, body: bytes, size: int | None = None) -> bytes:
    return (len(head) if size is None else size).to_bytes(8, "little") + head + body


def _head(change: Callable[[bytes], bytes], reply: bytes) -> bytes:
    head, body = _split(reply)
    return _joined(change(head), body)


def _outer(change: Callable[[dict[str, Any]], object], reply: bytes) -> bytes:
    """With another JSON object around the tensors; ``change`` works on it."""
    head, body = _split(reply)
    outer = json.loads(head)
    change(outer)
    return _joined(json.dumps(outer).encode(), body)


def _says(reply: bytes, **changes: Any) -> bytes:
    """With other entries in our own header."""
    tensors, header = wire.unpack(reply)
    return wire.pack(tensors, header | changes)


def _field(reply: bytes, **fields: Any) -> bytes:
    """With other numbers; None leaves one out."""
    found = wire.envelope(reply)["fields"] | fields
    return _says(reply, fields={name: value for name, value in found.items() if value is not None})


def _tensor(reply: bytes, **changes: Tensor | None) -> bytes:
    """With other tensors; None leaves one out."""
    tensors, header = wire.unpack(reply)
    return wire.pack({name: t for name, t in (tensors | changes).items() if t is not None}, header)


def _weights(change: Callable[[Tensor], Tensor | None], reply: bytes) -> bytes:
    """With another first tensor of the model."""
    tensors, _ = wire.unpack(reply)
    name = min(name for name in tensors if name.startswith("weights/"))
    return _tensor(reply, **{name: change(tensors[name].clone())})


def _flipped(reply: bytes, at: int) -> bytes:
    return reply[:at] + bytes([reply[at] ^ 0x80]) + reply[at + 1 :]


def _end_of(name: str, reply: bytes) -> int:
    """Where a tensor's last byte is."""
    head, body = _split(reply)
    return len(reply) - len(body) + int(json.loads(head)[name]["data_offsets"][1]) - 1


def _filled(value: float, tensor: Tensor) -> Tensor:
    tensor.view(-1)[-1] = value
    return tensor


def _shaped(shape: list[int], size: int | None, reply: bytes) -> bytes:
    """``noise`` declared with a shape, and with a number of bytes if not its own."""

    def change(outer: dict[str, Any]) -> None:
        start, end = outer["noise"]["data_offsets"]
        outer["noise"] |= {"shape": shape, "data_offsets": [start, end if size is None else start + size]}

    return _outer(change, reply)


def _empty_giant(reply: bytes) -> bytes:
    return _outer(
        lambda outer: outer["noise"].update(shape=[0, 2**62], data_offsets=[0, 0]), _tensor(reply, noise=torch.zeros(0))
    )


def _many_axes(reply: bytes) -> bytes:
    return _outer(lambda outer: outer["noise"].update(shape=[1] * 5000), _tensor(reply, noise=torch.zeros(1)))


def _share(outer: dict[str, Any]) -> None:
    outer["noise"]["data_offsets"] = [0, 12]


def _zip(reply: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("weights", bytes(50_000_000))
    return packed.getvalue()


def _saved(reply: bytes) -> bytes:
    packed = io.BytesIO()
    torch.save(wire.unpack(reply)[0], packed)
    return packed.getvalue()


def _terms(reply: bytes) -> bytes:
    return json.dumps({"version": 1, "run": "f" * 32, "method": "fedavg", "settings": {}, "model": "lenet"}).encode()


def _question(reply: bytes) -> bytes:
    return _field(_tensor(reply, noise=None, labels=None), seen=None)


def releases(reply: bytes, **changes: Any) -> bytes:
    """With a list of releases that the sender made up."""
    header = wire.envelope(reply)
    release = {
        "exchange": header["exchange"],
        "step": header["step"],
        "index": 0,
        "mechanism": "Histogram",
        "unit": "record",
        "event": {"kind": "gaussian", "noise_multiplier": 2.0},
        "theorem": "what everybody knows",
    }
    return _says(reply, spent=[release | changes])


KINDS: dict[str, Kind] = {
    "nothing": lambda reply: b"",
    "noise": lambda reply: random.Random(0).randbytes(len(reply)),
    "zeros": lambda reply: bytes(len(reply)),
    "cut in the head": lambda reply: reply[:100],
    "cut in the tensors": lambda reply: reply[:-1],
    "a byte more": lambda reply: reply + b"\0",
    "a bit flipped in the head": lambda reply: _flipped(reply, 9),
    "a bit flipped in a tensor": lambda reply: _flipped(reply, _end_of("labels", reply)),
    "a head of no bytes": lambda reply: _joined(*_split(reply), size=0),
    "a head beyond the message": lambda reply: _joined(*_split(reply), size=len(reply)),
    "a head of 2^63 bytes": lambda reply: _joined(*_split(reply), size=2**63),
    "a head of 5 MB": partial(_head, lambda head: head + b" " * 5_000_000),
    "a head that is not UTF-8": partial(_head, lambda head: head.replace(b"noise", b"no\xffse")),
    "a head in UTF-16": partial(_head, lambda head: head.decode().encode("utf-16")),
    "a head that is a list": partial(_head, lambda head: b"[" + head + b"]"),
    "a head without our part": partial(_outer, lambda outer: outer.pop("__metadata__")),
    "a head that nests": partial(_outer, lambda outer: outer["__metadata__"].update(fedstill="[" * 100_000)),
    "a number that nests": lambda reply: _field(reply, seen=json.loads("[" * 300 + "]" * 300)),
    "a number twice": partial(_head, lambda head: head.replace(b'\\"seen\\":', b'\\"seen\\":1,\\"seen\\":')),
    "a tensor twice": partial(_head, lambda head: head.replace(b'"labels":', b'"noise":')),
    "another exchange": lambda reply: _says(reply, exchange=wire.envelope(reply)["exchange"] + 1),
    "half an exchange": lambda reply: _says(reply, exchange=0.5),
    "another step": lambda reply: _says(reply, step="upgrade"),
    "a tensor more": lambda reply: _tensor(reply, images=torch.zeros(3)),
    "a number more": lambda reply: _field(reply, epsilon=0.1),
    "an entry more": lambda reply: _says(reply, client=0),
    "a tensor less": lambda reply: _tensor(reply, labels=None),
    "a number less": lambda reply: _field(reply, seen=None),
    "no numbers": lambda reply: _says(reply, fields=[]),
    "another type": lambda reply: _tensor(reply, noise=torch.zeros(3, dtype=torch.float64)),
    "labels that are no integers": lambda reply: _tensor(reply, labels=torch.zeros(3)),
    "another shape": lambda reply: _tensor(reply, noise=torch.zeros(3, 1)),
    "more rows than asked": lambda reply: _tensor(
        reply, noise=torch.zeros(4), labels=torch.zeros(4, dtype=torch.int64)
    ),
    "rows that disagree": lambda reply: _tensor(reply, noise=torch.zeros(2)),
    "a part of the model less": partial(_weights, lambda tensor: None),
    "another model": partial(_weights, lambda tensor: tensor[..., :1].contiguous()),
    "not a number": partial(_weights, partial(_filled, torch.nan)),
    "infinity": partial(_weights, partial(_filled, -torch.inf)),
    "a label too high": lambda reply: _tensor(reply, labels=torch.tensor([0, 1, 10])),
    "a label below 0": lambda reply: _tensor(reply, labels=torch.tensor([0, 1, -1])),
    "a count of 0": lambda reply: _field(reply, seen=0),
    "a count as text": lambda reply: _field(reply, seen="\x1b[2J\n" * 1000),
    "a count beyond floats": partial(_head, lambda head: head.replace(b'\\"seen\\":', b'\\"seen\\":1e999')),
    "a pickle": lambda reply: pickle.dumps([Booby(), reply]),
    "a torch file": _saved,
    "a zip bomb": _zip,
    "a giant without bytes": partial(_shaped, [2**40], None),
    "a giant beyond the message": partial(_shaped, [2**40], 2**42),
    "a giant of no entries": _empty_giant,
    "5,000 axes": _many_axes,
    "tensors that overlap": partial(_outer, _share),
    "another run's terms": _terms,
    "the question back": _question,
    "an error of 1 MB": lambda reply: wire.pack({}, {"error": "\x1b[31m\r\n\x07" * 150_000}),
    "an error that is an object": lambda reply: wire.pack({}, {"error": {"\x1b": [1] * 1000}}),
    "releases that are a number": lambda reply: _says(reply, spent=0.1),
    "an epsilon of its own": lambda reply: releases(reply, epsilon=0.1),
    "releases of another step": lambda reply: releases(reply, step="upgrade"),
    "noise below 0": lambda reply: releases(reply, event={"kind": "gaussian", "noise_multiplier": -1.0}),
    "101 releases": lambda reply: _says(reply, spent=[{}] * 101),
    "a release of no kind": lambda reply: releases(reply, event={"kind": "\x1b[31m" + "x" * 5000}),
    "a release of a part": lambda reply: releases(reply, part="\x1b[31m\r\n"),
}
"""From the honest reply's bytes to what comes instead; made for replies of `small.Probe`."""

CLIENT = 3
"""Who sends it, where one client does."""
VANDALS = (1, 2, 3)
"""Who sends it in a deployment, where every exchange takes seconds: three kinds at a time."""


class Vandal:
    """Answers like a site, but for one client, which sends a kind of garbage after the other."""

    failure = None

    def __init__(self, make_site: Callable[[], Site], kinds: Sequence[Kind] = ()) -> None:
        self._site = make_site()
        self._kinds = kinds or tuple(KINDS.values())

    def answer(self, client: int, request: bytes, tell: Any = None) -> bytes:
        reply = self._site.answer(client, request, tell)
        return self._kinds[exchange(request)](reply) if client == CLIENT else reply


def exchange(request: bytes) -> int:
    """Which question it is."""
    return int(wire.envelope(request)["exchange"])


def rounds() -> int:
    """How many exchanges `VANDALS` need."""
    return math.ceil(len(KINDS) / len(VANDALS))


def turns() -> Iterator[tuple[str, int, int]]:
    """Kind, client and exchange where `VANDALS` send it; they begin again when there is nothing left."""
    kinds = itertools.cycle(KINDS)
    for number in range(rounds()):
        for client in VANDALS:
            yield next(kinds), client, number


def spoil(launcher: ModuleType) -> None:
    """Makes a vandal of the site of this process; see hooks/sitecustomize.py."""
    honest = launcher.site_answer

    def answer(policy: Any, spec: str, request: bytes) -> bytes:
        reply = honest(policy, spec, request)
        (kind,) = (k for k, vandal, number in turns() if (vandal, number) == (policy.client, exchange(request)))
        return KINDS[kind](reply)

    launcher.site_answer = answer  # type: ignore[attr-defined]


def is_sentence(reason: str) -> bool:
    """Whether it can be shown to a person: short, on one line, without control characters."""
    return 0 < len(reason) <= 500 and reason.isprintable()


def check_told(kinds: Iterable[str], reasons: Iterable[str]) -> None:
    """Each kind is refused in a sentence."""
    wrong = {kind: why[:100] for kind, why in zip(kinds, reasons, strict=True) if not is_sentence(why)}
    assert not wrong
