"""Certificates and keys for a trial deployment on this machine."""

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOST = "127.0.0.1"
"""Address of the certificate."""


class Certificates(NamedTuple):
    """Files of a certificate authority, and of a server with its certificate and key."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path, *, days: float = 7.0) -> Certificates:
    """Make an authority and a certificate for this machine's loopback address, valid for ``days`` days."""
    now = datetime.datetime.now(datetime.UTC)
    start, end = now - datetime.timedelta(days=30), now + datetime.timedelta(days=days)
    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def builder(name: str, key: Any) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(
            issuer_name=named("fedstill loopback"),
            subject_name=named(name),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=start,
            not_valid_after=end,
        )

    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    root = (
        builder("fedstill loopback", authority)
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))])
    server = (
        builder("localhost", own)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    files.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _secret(
        files.key,
        own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    return files


def site_key(place: Path) -> Path:
    """Make a site's key pair as `ssh-keygen -t ecdsa` does, and return the path of the public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    openssh = serialization.PrivateFormat.OpenSSH
    _secret(place, key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption()))
    public = place.with_name(f"{place.name}.pub")
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    )
    return public


def _secret(place: Path, content: bytes) -> None:
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
