"""Certificates of a server, by an authority of its own, and keys of sites."""

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedstill.base import files

HOST = "127.0.0.1"
"""This machine's own address, which every server certificate covers: the SuperLink's programs connect to it."""
_AUTHORITY_DAYS = 3650
_PEM = serialization.Encoding.PEM


class Certificates:
    """The files of an authority and of the server's certificate.

    Args:
        folder: their folder, which `add_authority` makes.

    Attributes:
        authority: certificates of all authorities that sites trust, the newest last.
        authority_key: private key of the newest authority.
        certificate: the server's certificate.
        key: the server's private key.
    """

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "ca.crt"
        self.authority_key = folder / "ca.key"
        self.certificate = folder / "server.crt"
        self.key = folder / "server.key"

    def add_authority(self) -> None:
        """Make a new authority, beside earlier ones, which sites go on to trust; the certificate stays as it is."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        name = _named(f"fedstill authority {x509.random_serial_number() % 10**8:08d}")
        certificate = (
            _builder(name, name, key, _AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        before = self.authority.read_bytes() if self.authority.exists() else b""
        files.write_secret(self.authority_key, _private(key, serialization.PrivateFormat.PKCS8))
        files.write_bytes(self.authority, before, certificate.public_bytes(_PEM))

    def sign(self, hosts: Sequence[str], days: float) -> None:
        """Make the server's key and certificate, signed by the newest authority; earlier ones are dropped.

        Args:
            hosts: names and IP addresses of the server, besides those of this machine.
            days: days for which it is valid.

        Raises:
            ValueError: the authority's key is missing or is not that of the newest authority.
        """
        issuer = x509.load_pem_x509_certificates(self.authority_text().encode())[-1]
        try:
            signer = serialization.load_pem_private_key(self.authority_key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{self.authority_key} can't be read ({error}); bring the authority's key back") from error
        if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != issuer.public_key():
            raise ValueError(f"{self.authority_key} is not the key of the last certificate in {self.authority}")
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_general(host) for host in dict.fromkeys((*hosts, "localhost", HOST))])
        certificate = (
            _builder(_named(hosts[0]), issuer.subject, key, days)
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
            .sign(signer, hashes.SHA256())
        )
        files.write_secret(self.key, _private(key, serialization.PrivateFormat.PKCS8))
        files.write_bytes(self.certificate, certificate.public_bytes(_PEM))
        files.write_bytes(self.authority, issuer.public_bytes(_PEM))

    def authority_text(self) -> str:
        """The certificates of the authorities, in PEM.

        Raises:
            ValueError: the file has something else.
        """
        try:
            check_authority(text := self.authority.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.authority} is damaged: {error}; bring it back from a copy") from error
        return text


def expiry(place: Path) -> datetime.datetime:
    """The time at which the last certificate of a file expires."""
    return x509.load_pem_x509_certificates(place.read_bytes())[-1].not_valid_after_utc


def check_authority(text: str) -> None:
    """Check a text with the certificates of authorities.

    Raises:
        ValueError: it has none, or another certificate.
    """
    try:
        found = x509.load_pem_x509_certificates(text.encode())
        authorities = [c.extensions.get_extension_for_class(x509.BasicConstraints).value.ca for c in found]
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ValueError(f"its authority is no certificate in PEM: {error}") from error
    if not all(authorities):
        raise ValueError("its authority is a certificate that may not sign others")


_COMMENT = "fedstill-client-"
"""Beginning of the comment of a site's key, before the client's number."""
_SUMS = "sums-"
"""Beginning of the word of that comment with the keys for masked sums."""


def site_key(place: Path, client: int, sums: str | None = None) -> Path:
    """Make a site's key pair as `ssh-keygen -t ecdsa` does, and return the path of the public key.

    Its comment has the client's number, so that a key that is accepted under another one is noticed, and the public
    keys for masked sums, as `fedstill.sums.keys.Keys.public` writes them.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    files.write_secret(place, _private(key, serialization.PrivateFormat.OpenSSH))
    public = place.with_name(f"{place.name}.pub")
    openssh = serialization.PublicFormat.OpenSSH
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, openssh)
    words = f" {_COMMENT}{client}" if sums is None else f" {_COMMENT}{client} {_SUMS}{sums}"
    files.write_bytes(public, line + f"{words}\n".encode())
    return public


def client_of(text: str) -> int | None:
    """The client's number in the comment of a site's public key; None if it has another comment."""
    comment = (text.split() + ["", "", ""])[2]
    number = comment.removeprefix(_COMMENT)
    return int(number) if comment.startswith(_COMMENT) and number.isdecimal() and len(number) < 16 else None


def sums_of(text: str) -> str | None:
    """The keys for masked sums in the comment of a site's public key; None if it has none."""
    words = [word for word in text.split()[3:] if re.fullmatch(rf"{_SUMS}[0-9a-f]{{128}}", word)]
    return words[0].removeprefix(_SUMS) if words else None


def read_public(text: str) -> str:
    """A site's public key in the format of OpenSSH, without its comment.

    Raises:
        ValueError: the text is no such key.
    """
    words = text.split()
    try:
        key = serialization.load_ssh_public_key(" ".join(words[:2]).encode())
    except Exception as error:  # whatever a library raises for a stranger's text
        raise ValueError(f"{text.strip()[:60]!r} is not a public key of OpenSSH (the line 'ecdsa-sha2-...')") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("the public key is not of the kind ecdsa-sha2-nistp384, which 'fedstill site init' makes")
    return " ".join(words[:2])


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(name: x509.Name, issuer: x509.Name, key: Any, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=min(now, end) - datetime.timedelta(hours=1),  # clocks differ
        not_valid_after=end,
    )


def _private(key: Any, form: serialization.PrivateFormat) -> bytes:
    content: bytes = key.private_bytes(_PEM, form, serialization.NoEncryption())
    return content
