"""The client's part of a masked sum: masks, sealed seeds and the signature of one upload.

With m helpers of whom t may work with the server, there is a *class* of masks for every t of them: the class has a seed
of its own, which all helpers but those t get. So any t helpers lack the seed of one class, whose mask hides the numbers
from them, and the classes of t + 1 helpers are all of them.

Numbers and masks are added modulo ``2^(8 b)``, with b bytes a number. A mask is the keystream of ChaCha20 (RFC 8439)
under its seed. Seeds are sealed by X25519 (RFC 7748), HKDF-SHA256 (RFC 5869) and ChaCha20-Poly1305, with one key of the
client for all helpers, made for this upload. Uploads are signed by Ed25519 (RFC 8032).
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedstill.base.errors import FedstillError

SEED = 32
"""Bytes of a seed."""
_PREFIX = b"fedstill masked sum 1 "
_CHUNK = 1 << 20
"""Numbers of a mask that are in memory at a time."""
LEAST_BYTES, MOST_BYTES = 2, 7
"""Bounds of the bytes of a number; decoded totals are int64."""


class SumRefused(FedstillError, ValueError):
    """A part of a masked sum is not what it must be; the text names whose, and nothing was opened."""


@dataclass(frozen=True)
class Terms:
    """What everybody who takes part in one masked sum agrees on; each upload and each answer is bound to it.

    Attributes:
        run: SHA-256 of the run's public settings.
        exchange: number of the server's request.
        boxes: public X25519 keys of the helpers, 32 bytes each, in the helpers' order.
        signers: public Ed25519 keys of the helpers.
        traitors: t, the number of helpers that may work with the server.
        least: number of clients below which nothing is opened.
        length: number of numbers of an upload.
        width: b, bytes of a number.
        step: name of the step that was asked for, whose noise the clients add; none outside of a run.
    """

    run: bytes
    exchange: int
    boxes: tuple[bytes, ...]
    signers: tuple[bytes, ...]
    traitors: int
    least: int
    length: int
    width: int
    step: str = ""

    def __post_init__(self) -> None:
        helpers = len(self.boxes)
        if len(set(self.boxes)) < helpers or len(set(self.signers)) < len(self.signers):
            raise SumRefused("two helpers have the same key; they are one owner, who would count twice")
        if len(self.signers) != helpers or not 1 <= self.traitors < helpers:
            raise SumRefused(
                f"{helpers} helpers of whom {self.traitors} may work with the server; at least "
                f"{self.traitors + 1} are needed, with a key to seal to and a key to sign by each"
            )
        if quorum(helpers, self.traitors) > helpers:
            raise SumRefused(f"{helpers} helpers are too few for {self.traitors} that may work with the server")
        if not LEAST_BYTES <= self.width <= MOST_BYTES:
            raise SumRefused(f"a number has {self.width} bytes; it must be {LEAST_BYTES} to {MOST_BYTES}")
        if self.least < 2:
            raise SumRefused(f"least is {self.least}; the sum of one client is that client's upload, so 2 are needed")

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        numbers = (self.exchange, len(self.boxes), self.traitors, self.least, self.length, self.width)
        text = b"".join(number.to_bytes(8, "big") for number in numbers)
        step = hashlib.sha256(self.step.encode()).digest() if self.step else b""
        return hashlib.sha256(
            _PREFIX + b"terms" + self.run + text + b"".join(self.boxes + self.signers) + step
        ).digest()

    @property
    def classes(self) -> list[tuple[int, ...]]:
        """The helpers that do not get the seed of each class."""
        return list(combinations(range(len(self.boxes)), self.traitors))

    def held(self, helper: int) -> list[int]:
        """Numbers of the classes whose seeds a helper gets."""
        return [number for number, without in enumerate(self.classes) if helper not in without]


def quorum(helpers: int, traitors: int) -> int:
    """The least number of helpers that must name the same set of clients before one of them opens it.

    Two sets of this size share more than ``traitors`` helpers, so an honest one, who names one set only. With fewer, a
    traitor and the server have two sets opened that differ by one client, and subtract.
    """
    return (helpers + traitors) // 2 + 1


class Upload(NamedTuple):
    """What helpers see of a client's upload.

    Attributes:
        client: number of the client.
        digest: SHA-256 of its masked numbers.
        key: its X25519 key of this upload.
        boxes: sealed seeds for each helper.
        signature: the client's, of all of it and of the terms.
    """

    client: int
    digest: bytes
    key: bytes
    boxes: tuple[bytes, ...]
    signature: bytes


def box_size(terms: Terms) -> int:
    """Bytes of one helper's box."""
    return SEED * len(terms.held(0)) + 16


def mask(numbers: NDArray[np.int64], terms: Terms, client: int, sign: Callable[[bytes], bytes]) -> tuple[bytes, Upload]:
    """The masked numbers and the upload of one client.

    Args:
        numbers: whole numbers ``(length,)`` whose total lies within ``-2^(8 b - 1)`` and ``2^(8 b - 1) - 1``.
        terms: the terms of the sum.
        client: number of the client.
        sign: the client's Ed25519 signature of bytes.
    """
    if numbers.shape != (terms.length,):
        raise SumRefused(f"{numbers.size} numbers are to be masked; the terms say {terms.length}")
    seeds = [os.urandom(SEED) for _ in terms.classes]
    masked = numbers.astype(np.int64, copy=True).view(np.uint64)
    for seed in seeds:
        add_mask(masked, seed, terms.width)
    data = packed(masked, terms.width)
    own = X25519PrivateKey.generate()
    key = own.public_key().public_bytes_raw()
    boxes = tuple(
        ChaCha20Poly1305(
            _box_key(own.exchange(X25519PublicKey.from_public_bytes(theirs)), key, theirs, terms, client)
        ).encrypt(bytes(12), b"".join(seeds[number] for number in terms.held(helper)), None)
        for helper, theirs in enumerate(terms.boxes)
    )
    unsigned = Upload(client, hashlib.sha256(data).digest(), key, boxes, b"")
    return data, unsigned._replace(signature=sign(signed_text(terms, unsigned)))


def signed_text(terms: Terms, upload: Upload) -> bytes:
    """The bytes that a client signs."""
    boxes = hashlib.sha256(b"".join(upload.boxes)).digest()
    return _PREFIX + b"upload" + terms.digest + upload.client.to_bytes(8, "big") + upload.digest + upload.key + boxes


def is_signed(terms: Terms, upload: Upload, key: bytes) -> bool:
    """Whether the signature of an upload is by the Ed25519 ``key``."""
    return verified(key, upload.signature, signed_text(terms, upload))


def verified(key: bytes, signature: bytes, text: bytes) -> bool:
    """Whether ``signature`` of ``text`` is by the Ed25519 ``key``."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def opened(upload: Upload, terms: Terms, helper: int, key: X25519PrivateKey) -> dict[int, bytes]:
    """The seeds in a helper's box, by number of their class.

    Raises:
        SumRefused: the box was not sealed to this helper for this sum by this client, or was changed.
    """
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(upload.key))
        own = _box_key(shared, upload.key, terms.boxes[helper], terms, upload.client)
        text = ChaCha20Poly1305(own).decrypt(bytes(12), upload.boxes[helper], None)
    except (InvalidTag, ValueError, IndexError) as error:
        raise SumRefused(f"the box of client {upload.client} for helper {helper} does not open") from error
    held = terms.held(helper)
    if len(text) != SEED * len(held):
        raise SumRefused(f"the box of client {upload.client} for helper {helper} has {len(text)} bytes")
    return {number: text[place * SEED : (place + 1) * SEED] for place, number in enumerate(held)}


def _box_key(shared: bytes, client_key: bytes, helper_key: bytes, terms: Terms, client: int) -> bytes:
    info = _PREFIX + b"box" + terms.digest + client.to_bytes(8, "big") + client_key + helper_key
    return HKDF(SHA256(), 32, None, info).derive(shared)


# Numbers modulo 2^(8 b) -----------------------------------------------------------------------------------------------


def add_mask(total: NDArray[np.uint64], seed: bytes, width: int) -> None:
    """Add a seed's mask to ``total`` in place, modulo 2^64; numbers of ``width`` bytes are its lowest ones."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    zeros = bytes(_CHUNK * width)
    for start in range(0, len(total), _CHUNK):
        some = total[start : start + _CHUNK]
        some += unpacked(stream.update(zeros[: len(some) * width]), width)


def packed(numbers: NDArray[np.uint64], width: int) -> bytes:
    """The lowest ``width`` bytes of each number, little-endian."""
    return numbers.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


def unpacked(data: bytes | NDArray[np.uint8], width: int) -> NDArray[np.uint64]:
    """The inverse of `packed`: numbers below ``2^(8 width)``."""
    if width == 4:
        return np.frombuffer(data, dtype="<u4").astype(np.uint64)
    wide = np.zeros((len(data) // width, 8), dtype=np.uint8)
    wide[:, :width] = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    return wide.reshape(-1).view("<u8")


def centred(numbers: NDArray[np.uint64], width: int) -> NDArray[np.int64]:
    """The whole numbers from ``-2^(8 b - 1)`` that equal these modulo ``2^(8 b)``."""
    unused = np.uint64(64 - 8 * width)
    return (numbers << unused).view(np.int64) >> np.int64(unused)


def signer_of(key: Ed25519PrivateKey) -> Callable[[bytes], bytes]:
    """The function that signs by ``key``."""
    return key.sign


def public_bytes(keys: Sequence[Ed25519PrivateKey | X25519PrivateKey]) -> tuple[bytes, ...]:
    """The public halves of keys, 32 bytes each."""
    return tuple(key.public_key().public_bytes_raw() for key in keys)
