"""Masked sums in a run: their public settings, the masked reply to a step, and the server's opening of a total.

`fedstill.sums` has the protocol. Here a step whose reply is declared `Summed` gets another reply, `MaskedReply`, of
bytes that nobody can read alone; the rest of an engine treats it as any other.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from annotated_types import Ge, Le, Len
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jaxtyping import UInt8
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor
from typing_extensions import override

from fedstill.base.settings import Settings
from fedstill.privacy.integer_sums import IntegerSum
from fedstill.privacy.releases import Released
from fedstill.protocol import Public, Reply, Step
from fedstill.sums.helpers import Answers, Helper, Roster, masks_of, total_of, usable
from fedstill.sums.masks import LEAST_BYTES, MOST_BYTES, Terms, Upload, box_size, mask, quorum

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MaskedSums(Settings):
    """What the server, the clients and the helpers of a run agree on about its sums."""

    signers: Annotated[tuple[Key, ...], Len(2, 16)]
    """Public Ed25519 keys of the helpers, by which they sign the set of clients."""
    boxes: Annotated[tuple[Key, ...], Len(2, 16)]
    """Public X25519 keys of the helpers, made for this run, to which clients seal the seeds of their masks."""
    traitors: PositiveInt = 1
    """Helpers that may work with the server."""
    least: Annotated[int, Ge(2), Le(10**7)]
    """Clients below which no sum is opened (n_min)."""
    adders: Annotated[int, Ge(1), Le(10**7)]
    """Honest clients of these whose noise the guarantee counts on."""
    clients: Annotated[int, Ge(2), Le(10**7)]
    """Clients of the run, the most that a sum can have."""
    width: Annotated[int, Ge(LEAST_BYTES), Le(MOST_BYTES)] = 5
    """Bytes of a masked number: totals are known modulo 2^(8 width)."""
    records: Annotated[int, Ge(1), Le(2**40)] = 2**20
    """Most records of all clients together, a public bound."""
    members: tuple[Key, ...] = ()
    """Public Ed25519 keys of real sites, by number of the client; none for simulated clients."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.signers) != len(self.boxes):
            raise ValueError(
                f"{len(self.signers)} keys to sign by and {len(self.boxes)} to seal to; each helper has one of each"
            )
        if self.members and len(set(self.members)) < len(self.members):
            raise ValueError("two members have the same key; they are one owner, who would count twice")
        if self.members and len(self.members) != self.clients:
            raise ValueError(f"{len(self.members)} members have keys, but the run has {self.clients} clients")
        if self.adders > self.least:
            raise ValueError(f"adders is {self.adders}, above the least number of clients in a sum, {self.least}")
        needed = quorum(len(self.signers), self.traitors)
        if needed > len(self.signers):
            raise ValueError(
                f"{len(self.signers)} helpers are too few for {self.traitors} that may work with the server"
            )
        return self

    def terms(self, run: bytes, exchange: int, length: int, step: str) -> Terms:
        """The terms of one sum of ``length`` numbers, the replies to a step."""
        boxes, signers = (tuple(map(bytes.fromhex, some)) for some in (self.boxes, self.signers))
        return Terms(run, exchange, boxes, signers, self.traitors, self.least, length, self.width, step)

    @property
    def words(self) -> str:
        """The parties, for a person."""
        return (
            f"masked, of {self.least} to {self.clients} clients, opened by {len(self.signers)} helpers of whom "
            f"{self.traitors} may work with the server; the noise of {self.adders} clients counts"
        )

    def roster(self, client: int) -> bytes | None:
        """The key by which a real site signs its uploads; None for a number that is no client."""
        return bytes.fromhex(self.members[client]) if 0 <= client < len(self.members) else None


class MaskedReply(Reply):
    """A client's upload to a masked sum."""

    masked: Released[UInt8[Tensor, " bytes"]]
    key: Annotated[UInt8[Tensor, "32"], Public()]
    boxes: Annotated[UInt8[Tensor, "helpers box"], Public()]
    signature: Annotated[UInt8[Tensor, "64"], Public()]


def adders_of(least: int, clients: int, colluding: float) -> int:
    """Honest clients in any set of ``least``, if a share of all ``clients`` works with the server; 0 if there is none.

    The server chooses the set, so that all who work with it are among its clients.
    """
    return max(0, least - int(np.ceil(colluding * clients - 1e-9)))


class MaskedStep(Step[MaskedReply]):
    """A step whose reply is masked: ``inner`` computes it; ``run`` is the digest of the run's spec."""

    def __init__(self, inner: Step[Any], sums: MaskedSums, run: bytes) -> None:
        super().__init__(inner.function)
        self._inner, self._sums, self._run = inner, sums, run
        self.function = self._masked

    @cached_property
    @override
    def _hints(self) -> dict[str, Any]:
        return self._inner._hints

    @property
    @override
    def reply(self) -> type[MaskedReply]:
        return MaskedReply

    @property
    @override
    def sums(self) -> bool:
        return True

    def _masked(self, method: Any, client: Any, **arguments: Any) -> MaskedReply:
        reply = self._inner.function(method, client, **arguments)
        numbers = _flat(reply, self._inner.reply)
        terms = self._sums.terms(self._run, client.exchange, len(numbers), self._inner.name)
        data, upload = mask(numbers, terms, client.id, client.sign)
        boxes = torch.from_numpy(np.frombuffer(b"".join(upload.boxes), np.uint8).copy())
        return MaskedReply(
            masked=Released(as_tensor(data)),
            key=as_tensor(upload.key),
            boxes=boxes.reshape(len(upload.boxes), -1),
            signature=as_tensor(upload.signature),
        )


def as_tensor(data: bytes) -> Tensor:
    """The bytes as a uint8 tensor of their own."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _flat(reply: Reply, kind: type[Reply]) -> NDArray[np.int64]:
    """The whole numbers of a reply, one field after the other.

    Raises:
        TypeError: a field is no released int64 tensor.
    """
    parts = []
    for name, value in reply.payload().items():
        if not isinstance(value, Tensor) or value.dtype != torch.int64:
            what = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"field '{name}' of {kind.__name__} is {what}; a masked sum takes whole numbers, int64")
        parts.append(value.detach().cpu().reshape(-1).numpy())
    return np.concatenate(parts)


def shapes(kind: type[Reply], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of each field of a reply; every dimension's size must be known.

    Raises:
        TypeError: one is not.
    """
    found: dict[str, tuple[int, ...]] = {}
    for f in kind.schema:
        names = f.annotation.dim_str.split()
        if unknown := [name for name in names if not name.isdecimal() and name not in sizes]:
            raise TypeError(
                f"fed.sum needs the size of {unknown[0]!r} of {kind.__name__}.{f.name} before it asks; give "
                f"exactly={{{unknown[0]!r}: ...}}"
            )
        found[f.name] = tuple(int(name) if name.isdecimal() else sizes[name] for name in names)
    return found


def check_range(mechanism: IntegerSum[Any, Any], sums: MaskedSums) -> None:
    """Refuse a sum that may leave the range of its masks, by public numbers, before anything is released.

    Raises:
        ValueError: it may.
    """
    reach, most = mechanism.largest(sums.records, sums.clients), 2 ** (8 * sums.width - 1) - 1
    if reach > most:
        needed = math.ceil((math.log2(reach) + 1) / 8)
        wider = f"use --sums masked:width={needed} or " if needed <= MOST_BYTES else "use "
        raise ValueError(
            f"the sums of {sums.records} records may reach {reach:.3g}, but masks of {sums.width} bytes hold "
            f"{most:.3g} at most; {wider}a smaller bound of records"
        )


def masked_steps(steps: Mapping[str, Step[Any]], sums: MaskedSums | None, run: bytes) -> dict[str, Step[Any]]:
    """The steps with masked replies in place of sums, if the run's sums are masked."""
    if sums is None:
        return dict(steps)
    return {name: MaskedStep(step, sums, run) if step.sums else step for name, step in steps.items()}


# Simulated parties ----------------------------------------------------------------------------------------------------


def simulated_key(run: str, client: int) -> Ed25519PrivateKey:
    """The signing key of a simulated client, which anybody can make who knows the run: it is no secret."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"simulated client {run} {client}".encode()).digest())


def simulated_roster(run: str, clients: int) -> Roster:
    """The keys of simulated clients."""

    def key(client: int) -> bytes | None:
        return simulated_key(run, client).public_key().public_bytes_raw() if 0 <= client < clients else None

    return key


class Parties(NamedTuple):
    """Who takes part in a run's masked sums, as its server knows them.

    Attributes:
        keys: public keys of the helpers, to sign by and to seal to.
        members: public keys by which real sites sign, by number of the client; none for simulated clients.
        reach: the helpers, given the text of the run's spec.
    """

    keys: Sequence[tuple[bytes, bytes]]
    members: Sequence[bytes]
    reach: Callable[[str], Sequence[Answers]]


def simulated_parties(folder: Path, number: int, run: str, clients: int) -> Parties:
    """Helpers in the server's process, with folders in the run's; their keys last as long as the run."""
    roster = simulated_roster(run, clients)
    helpers = [Helper(folder / str(place), place, roster) for place in range(number)]
    return Parties([(helper.keys.signer, helper.keys.box) for helper in helpers], (), lambda _: helpers)


# The server -----------------------------------------------------------------------------------------------------------


def masked_sizes(terms: Terms) -> dict[str, int]:
    """Sizes of a masked reply's fields."""
    return {"bytes": terms.length * terms.width, "helpers": len(terms.boxes), "box": box_size(terms)}


def upload_of(client: int, reply: MaskedReply) -> Upload:
    """What helpers see of a reply."""
    return Upload(
        client,
        hashlib.sha256(reply.masked.value.numpy().tobytes()).digest(),
        reply.key.numpy().tobytes(),
        tuple(box.numpy().tobytes() for box in reply.boxes),
        reply.signature.numpy().tobytes(),
    )


class Opening:
    """The server's opening of one masked sum.

    Args:
        terms: the terms of the sum.
        helpers: the run's helpers.
        clients: numbers of the clients whose replies arrived.
        reply: reads the reply of a client.
    """

    def __init__(
        self, terms: Terms, helpers: Sequence[Answers], clients: Sequence[int], reply: Callable[[int], MaskedReply]
    ) -> None:
        self.terms, self.helpers, self._reply = terms, helpers, reply
        self.uploads = [upload_of(client, reply(client)) for client in clients]

    def refusals(self) -> dict[int, str]:
        """The clients to leave out, with the reasons, which are left out from here on."""
        reasons = usable(self.helpers, self.terms, self.uploads)
        self.uploads = [upload for upload in self.uploads if upload.client not in reasons]
        return reasons

    def total(self) -> NDArray[np.int64]:
        """The clients' total."""
        masks = masks_of(self.helpers, self.terms, self.uploads)
        replies = (self._reply(upload.client).masked.value.numpy() for upload in self.uploads)
        return total_of(replies, masks, self.terms.width)

    @property
    def helper_bytes(self) -> tuple[int, int]:
        """Bytes that one helper receives and sends."""
        each = 8 + 32 + 32 + 64 + sum(map(len, self.uploads[0].boxes)) if self.uploads else 0
        down = 2 * len(self.uploads) * each + len(self.helpers) * 64
        return down, 64 + len(self.terms.held(0)) * self.terms.length * self.terms.width


def unflattened(kind: type[Reply], total: NDArray[np.int64], sizes: Mapping[str, int]) -> Any:
    """A reply with the totals in its fields."""
    values: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes(kind, sizes).items():
        count = int(np.prod(shape))
        values[name] = torch.from_numpy(total[start : start + count].copy()).reshape(shape)
        start += count
    return kind.from_payload(values)
