"""Questions of a server to the helpers of masked sums over a transport, and the helpers' replies.

A question is a message of `fedstill.protocol.wire` whose header names what is asked (``helper``: check, agree or open),
and the request and the step that the sum belongs to. Its tensors are the uploads as helpers see them, in rows; to open,
also the helpers' signatures. A reply has reasons, a signature, sums of masks, or the sentence of a refusal.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor

from fedstill import schema
from fedstill.engines.masked_sums import as_tensor
from fedstill.engines.transport import Transport
from fedstill.protocol import wire
from fedstill.sums.helpers import Answers
from fedstill.sums.masks import SumRefused, Terms, Upload, box_size

Kind = Literal["check", "agree", "open"]
MARK = "helper"
"""Entry of a question's header that tells it from a client's request."""
_WIDTHS = {"digests": 32, "keys": 32, "signatures": 64}
"""Bytes of each row of a question's tensors, besides the boxes."""
_NO_SIGNATURE = bytes(64)
Found = TypeVar("Found")


class Call(NamedTuple):
    """A question to a helper.

    Attributes:
        kind: what is asked.
        exchange: number of the server's request whose replies are added.
        length: number of numbers of an upload.
        uploads: the uploads.
        signatures: signatures of the set by helpers, by number of the helper; to open only.
    """

    kind: Kind
    exchange: int
    length: int
    uploads: list[Upload]
    signatures: dict[int, bytes]


def encode(kind: Kind, terms: Terms, uploads: Sequence[Upload], signatures: Mapping[int, bytes] | None = None) -> bytes:
    """The bytes of a question."""
    columns: dict[str, list[bytes]] = {
        "digests": [upload.digest for upload in uploads],
        "keys": [upload.key for upload in uploads],
        "signatures": [upload.signature for upload in uploads],
    }
    tensors = {name: _rows(values, _WIDTHS[name]) for name, values in columns.items()}
    boxes = _rows([b"".join(upload.boxes) for upload in uploads], len(terms.boxes) * box_size(terms))
    tensors |= {"boxes": boxes, "clients": torch.tensor([upload.client for upload in uploads], dtype=torch.int64)}
    if signatures is not None:
        signed = [signatures.get(helper, _NO_SIGNATURE) for helper in range(len(terms.signers))]
        tensors["agreed"] = _rows(signed, len(_NO_SIGNATURE))
    return wire.pack(tensors, {MARK: kind, "exchange": terms.exchange, "length": terms.length, "step": terms.step})


def decode(request: bytes, header: Mapping[str, Any], terms: Callable[[int, int, str], Terms]) -> tuple[Terms, Call]:
    """A question and its terms, which ``terms`` gives for a request's number, a length and the name of a step.

    Raises:
        Refused: the bytes are no such question.
    """
    kind, exchange, length = (header.get(name) for name in (MARK, "exchange", "length"))
    if kind not in get_args(Kind):
        raise schema.Refused(f"a helper is asked to {schema.short(kind)}; it can check, agree and open")
    for name, number in (("exchange", exchange), ("length", length)):
        if type(number) is not int or not 0 <= number < 2**40:
            raise schema.Refused(f"{name} is {schema.short(number)}; it must be a whole number from 0")
    if not isinstance(step := header.get("step"), str) or len(step) > 200:
        raise schema.Refused(f"step is {schema.short(step)}; it must be the name of one")
    of = terms(cast(int, exchange), cast(int, length), step)
    tensors, _ = wire.unpack(request, header)
    clients = tensors.get("clients", torch.zeros(0))
    if clients.dtype != torch.int64 or clients.ndim != 1 or (len(clients) and int(clients.min()) < 0):
        raise schema.Refused("the clients of a question to a helper are whole numbers from 0, in a row")
    widths = {**_WIDTHS, "boxes": len(of.boxes) * box_size(of)}
    columns = {name: _column(tensors, name, len(clients), width) for name, width in widths.items()}
    size = box_size(of)
    uploads = [
        Upload(client, digest, key, tuple(box[i : i + size] for i in range(0, len(box), size)), signature)
        for client, digest, key, box, signature in zip(
            clients.tolist(), *(columns[name] for name in ("digests", "keys", "boxes", "signatures")), strict=True
        )
    ]
    signatures: dict[int, bytes] = {}
    if kind == "open":
        given = _column(tensors, "agreed", len(of.signers), len(_NO_SIGNATURE))
        signatures = {helper: one for helper, one in enumerate(given) if one != _NO_SIGNATURE}
    return of, Call(cast(Kind, kind), cast(int, exchange), cast(int, length), uploads, signatures)


def reply(helper: Answers, terms: Terms, call: Call) -> bytes:
    """A helper's reply to a question; its refusal of the set is a reply too."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {MARK: call.kind}
    try:
        if call.kind == "check":
            reasons = helper.check(terms, call.uploads)
            header["reasons"] = {str(client): reason for client, reason in reasons.items()}
        elif call.kind == "agree":
            header["signature"] = helper.agree(terms, call.uploads).hex()
        else:
            sums = helper.open(terms, call.uploads, call.signatures)
            tensors = {str(number): as_tensor(data) for number, data in sums.items()}
    except SumRefused as refused:
        header["refused"] = str(refused)
    return wire.pack(tensors, header)


class RemoteHelper:
    """A helper that is reached over a transport.

    Args:
        number: the helper's place in the terms.
        client: its number at the transport.
        transport: the connection, which waits for absent clients as long as it is set to.
    """

    def __init__(self, number: int, client: int, transport: Transport) -> None:
        self.number, self._client, self._transport = number, client, transport
        self._absent: tuple[bytes, str] | None = None  # digest of the terms of which it is not asked again, and why

    def check(self, terms: Terms, uploads: Sequence[Upload]) -> dict[int, str]:
        """As `fedstill.sums.helpers.Helper.check`."""

        def read(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[int, str]:
            asked = {upload.client for upload in uploads}
            found = {int(client): schema.clean(str(reason), 300) for client, reason in header["reasons"].items()}
            return {client: reason for client, reason in found.items() if client in asked}

        return self._ask(terms, encode("check", terms, uploads), read)

    def agree(self, terms: Terms, uploads: Sequence[Upload]) -> bytes:
        """As `fedstill.sums.helpers.Helper.agree`."""
        return self._ask(terms, encode("agree", terms, uploads), lambda _, header: bytes.fromhex(header["signature"]))

    def open(self, terms: Terms, uploads: Sequence[Upload], signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """As `fedstill.sums.helpers.Helper.open`."""

        def read(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[int, bytes]:
            return {number: _sums(tensors, number, terms) for number in terms.held(self.number)}

        return self._ask(terms, encode("open", terms, uploads, signatures), read)

    def _ask(
        self, terms: Terms, request: bytes, read: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Found]
    ) -> Found:
        """What ``read`` makes of the reply's tensors and header.

        Raises:
            OSError: the helper does not answer, or not like one.
            SumRefused: it refuses the set.
        """
        if self._absent is not None and self._absent[0] == terms.digest:  # nobody waits for it twice
            raise OSError(self._absent[1])
        (arrival,) = self._transport.exchange(request, [self._client], lambda _: None)
        if arrival.failure is not None:
            self._absent = terms.digest, arrival.failure
            raise OSError(arrival.failure)
        try:
            tensors, header = wire.unpack(arrival.reply)
            if "refused" in header:
                raise SumRefused(f"helper {self.number}: {schema.clean(str(header['refused']), 300)}")
            if "error" in header:
                raise OSError(schema.clean(str(header["error"]), 300))
            return read(tensors, header)
        except (schema.Refused, KeyError, ValueError, TypeError, AttributeError, json.JSONDecodeError) as error:
            if isinstance(error, SumRefused):
                raise
            raise OSError(f"its reply is not a helper's: {schema.clean(str(error), 200)}") from error


def _sums(tensors: Mapping[str, Tensor], number: int, terms: Terms) -> bytes:
    data, size = tensors[str(number)], terms.length * terms.width
    if data.dtype != torch.uint8 or tuple(data.shape) != (size,):
        raise schema.Refused(f"the masks of class {number} have the shape {tuple(data.shape)}; they are {size} bytes")
    return data.numpy().tobytes()


def _rows(values: Sequence[bytes], width: int) -> Tensor:
    return as_tensor(b"".join(values)).reshape(len(values), width)


def _column(tensors: Mapping[str, Tensor], name: str, rows: int, width: int) -> list[bytes]:
    value = tensors.get(name)
    if value is None or value.dtype != torch.uint8 or tuple(value.shape) != (rows, width):
        shape = None if value is None else tuple(value.shape)
        raise schema.Refused(f"{name} of a helper's question has the shape {shape}; it must be {rows} x {width} bytes")
    return [row.tobytes() for row in value.numpy()]
