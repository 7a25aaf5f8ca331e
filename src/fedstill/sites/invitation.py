"""Invitations: the file that a server gives to a site, with nothing secret in it."""

import hashlib
import re
import tomllib
from pathlib import Path

import tomli_w
from pydantic import NonNegativeInt, ValidationError, field_validator

from fedstill import files
from fedstill.settings import Settings, sentence
from fedstill.sites import certificates

_LARGEST = 1 << 20


class Invitation(Settings):
    """What a site needs to know of a server."""

    client: NonNegativeInt
    """Number of the client that the site is."""
    address: str
    """The server's address, as HOST:PORT."""
    authority: str
    """Certificates of the authorities that may sign the server's certificate, in PEM."""

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not re.fullmatch(r"[A-Za-z0-9.\-\[\]:]{1,253}", host) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("it must be HOST:PORT")
        return value

    @field_validator("authority")
    @classmethod
    def _authority(cls, value: str) -> str:
        certificates.check_authority(value)
        return value

    def write(self, place: Path) -> None:
        """Write the invitation's file."""
        files.write_bytes(place, tomli_w.dumps(self.model_dump(), multiline_strings=True).encode())


def read(place: Path) -> Invitation:
    """Read an invitation.

    Raises:
        ValueError: the file is no invitation, or one of a newer fedstill; one sentence.
    """
    try:
        content = place.open("rb").read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        return Invitation(**files.without_format(tomllib.loads(content.decode()), place))
    except files.Damaged:  # its format
        raise
    except ValidationError as error:
        raise ValueError(f"{place} is no invitation: {sentence(error)[:300]}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{place} is no invitation of 'fedstill server invite': {error}") from error


def fingerprint(place: Path) -> str:
    """A short fingerprint of a file, which two people can compare on the phone: 80 bits of its SHA-256."""
    digest = hashlib.sha256(place.read_bytes()).hexdigest()[:20]
    return "-".join(digest[start : start + 4] for start in range(0, 20, 4))
