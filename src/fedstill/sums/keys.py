"""The keys of one party to masked sums: one by which it signs, and one to which others seal.

A client signs its uploads, a helper the sets of clients, by Ed25519 (RFC 8032); the texts begin differently, so that
one key can do both. Clients seal to a helper's X25519 key (RFC 7748).
"""

from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedstill.base import files

SIGN, OPEN = "sign.key", "open.key"
"""Names of the files with the two private keys."""
JOURNAL = "signed.jsonl"
"""Name of the file with the sets of clients that a helper has signed, which lies beside its keys from the first."""


class Keys:
    """The keys in a folder, which are made if the folder has neither.

    The journal is made with them. A helper without it might sign a second set of clients, so keys whose journal is gone
    are of no use: another folder has others.

    Args:
        folder: folder of the keys, for their owner alone.

    Raises:
        Damaged: the folder lacks a key or the journal.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        missing = [name for name in (JOURNAL, OPEN, SIGN) if not (folder / name).exists()]
        signed = (folder / JOURNAL).exists() and (folder / JOURNAL).stat().st_size
        if SIGN in missing and not signed:  # it is made last: nobody knows the other one
            self._make()
        elif missing:
            raise files.Damaged(
                f"{folder} is damaged: it lacks {missing[0]}; remove the folder, which makes new keys that the server "
                "and the other sites must be told; a copy of it may lack what was signed later"
            )
        self._signing = Ed25519PrivateKey.from_private_bytes(_read(folder / SIGN))
        self.opening = X25519PrivateKey.from_private_bytes(_read(folder / OPEN))

    def _make(self) -> None:
        for name, content in (
            (JOURNAL, b""),
            (OPEN, _raw(X25519PrivateKey.generate)),
            (SIGN, _raw(Ed25519PrivateKey.generate)),
        ):
            files.write_secret(self.folder / name, content)

    @property
    def signer(self) -> bytes:
        """The public Ed25519 key, 32 bytes."""
        return self._signing.public_key().public_bytes_raw()

    @property
    def box(self) -> bytes:
        """The public X25519 key, 32 bytes."""
        return self.opening.public_key().public_bytes_raw()

    @property
    def public(self) -> str:
        """Both public keys in hexadecimal, the one to sign by first: 128 characters, which `read_public` reads."""
        return (self.signer + self.box).hex()

    def sign(self, text: bytes) -> bytes:
        """The Ed25519 signature of a text, 64 bytes."""
        return self._signing.sign(text)


def read_public(text: str) -> tuple[bytes, bytes]:
    """The public keys to sign by and to seal to that `Keys.public` wrote."""
    data = bytes.fromhex(text)
    return data[:32], data[32:]


def fingerprint(signer: bytes, box: bytes) -> str:
    """A short fingerprint of a party's public keys, which two people can compare: 80 bits of their SHA-256."""
    return files.fingerprint(b"fedstill masked sum 1 keys" + signer + box)


def _raw(make: Callable[[], Ed25519PrivateKey | X25519PrivateKey]) -> bytes:
    return make().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def _read(place: Path) -> bytes:
    content = place.read_bytes()
    if len(content) != 32:
        raise files.Damaged(f"{place} is damaged: it has {len(content)} bytes in place of 32; bring its copy back")
    return content
