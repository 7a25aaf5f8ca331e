"""Signatures of requests and of replies, and receipts of a site's log.

Flower's nodes sign a time, and its messages go by numbers that logs and consoles show. So a server signs each request
to a client, and a site each reply, with the run's spec, and neither side rests on those numbers.

A site's reply has a *receipt* of its log: the number of its lines, the keyed hash of the last one, and a keyed hash of
both, which only that site can make. The server keeps the newest one of each client and sends it with every request. A
site whose log has another line there than a receipt of its own is an older copy, whose ledger has forgotten releases;
it notices, and replies to nothing.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from filelock import FileLock

from fedstill.base import files

KEY, RECEIPTS = "request.key", "receipts.json"
"""Names of the files with the key by which a server signs its requests, and with its clients' receipts."""


def sign_reply(key: Path, spec: str, request: bytes, reply: bytes, receipt: str) -> str:
    """A site's signature of a reply to a request of a run, in hexadecimal; the spec has the run's random number."""
    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey), "site_key makes keys of this kind only"
    return private.sign(_text("reply", spec, request, reply, receipt), ec.ECDSA(hashes.SHA256())).hex()


def has_signed(key: str, signature: str, spec: str, request: bytes, reply: bytes, receipt: str) -> bool:
    """Whether the owner of a public key, a line of OpenSSH, has signed a reply (`sign_reply`)."""
    public = serialization.load_ssh_public_key(key.encode())
    assert isinstance(public, ec.EllipticCurvePublicKey), "the roster has keys of this kind only"
    try:
        text = _text("reply", spec, request, reply, receipt)
        public.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True


def server_key(folder: Path) -> Ed25519PrivateKey:
    """The key by which the server in a folder signs its requests; it is made at the first use."""
    place = folder / KEY
    if not place.exists():
        files.write_secret(place, Ed25519PrivateKey.generate().private_bytes_raw())
    return Ed25519PrivateKey.from_private_bytes(place.read_bytes())


def sign_request(key: Ed25519PrivateKey, client: int, spec: str, request: bytes, receipt: str) -> str:
    """The server's signature of a request to a client, in hexadecimal."""
    return key.sign(_text("request", spec, request, str(client), receipt)).hex()


def is_request_signed(key: str, signature: object, client: int, spec: str, request: bytes, receipt: str) -> bool:
    """Whether a request to this client is signed by the owner of a public key, in hexadecimal (`sign_request`)."""
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(str(signature)), _text("request", spec, request, str(client), receipt))
    except (ValueError, InvalidSignature):
        return False
    return True


def _text(what: str, *parts: str | bytes) -> bytes:
    """The bytes that are signed, which no other parts give."""
    digests = (hashlib.sha256(part.encode() if isinstance(part, str) else part).digest() for part in parts)
    return f"fedstill {what}, version 2\n".encode() + b"".join(digests)


def number_of(receipt: object) -> int:
    """The number of lines in a receipt; 0 where it is none."""
    found = re.fullmatch(r"(\d{1,15})(\.[0-9a-f]{64}){2}", receipt, re.ASCII) if isinstance(receipt, str) else None
    return int(found[1]) if found else 0


class Receipts:
    """The newest receipt of each key, in a file of the server."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def of(self, key: str) -> str:
        """The newest receipt of a key; nothing where there is none."""
        return self._read().get(_short(key), "")

    def note(self, key: str, receipt: str, sent: str = "") -> None:
        """Keep a receipt if it is newer than the one that is kept.

        One with a lower number than the one that was ``sent`` with the request is of a log that was begun anew: a site
        that found the line of what was sent has more lines, and a site without it gives no receipt.
        """
        if not (number := number_of(receipt)) or self.of(key) == receipt:
            return
        with FileLock(self._place.with_suffix(".lock"), timeout=60):
            known = self._read()
            newest = known.get(_short(key), "")
            if number > number_of(newest) or (newest == sent and number <= number_of(sent)):
                files.write_json(self._place, {**known, _short(key): receipt})

    def hand_on(self, former: Sequence[str], key: str) -> None:
        """Keep the last receipt of a client's ``former`` keys, in order, for its new one, which has signed nothing yet.

        A site that took another key has the same log. A stranger under the client's number ignores it.
        """
        with FileLock(self._place.with_suffix(".lock"), timeout=60):
            known = self._read()
            last = next((known[_short(old)] for old in reversed(former) if _short(old) in known), None)
            if last is not None:
                files.write_json(self._place, {**known, _short(key): last})

    def _read(self) -> Mapping[str, str]:
        if not self._place.exists():
            return {}
        try:
            found = json.loads(self._place.read_bytes())
            return {str(key): str(value) for key, value in found.items()}
        except (ValueError, AttributeError) as error:
            raise files.Damaged(
                f"{self._place} is damaged; bring its newest copy back, or delete it: older copies of states are "
                "noticed from their next replies on then"
            ) from error


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]
