"""Members of a deployment: invitations, keys, nodes and clients, and what each may send.

A roster is a TOML file with one table for each client, which `accept` writes when it registers the key::

    [[site]]
    client = 0
    key = "ecdsa-sha2-nistp384 AAAA..."
    node = 1234567890
    max_records = 5000
    sums = "3f2a..."
    helper = true

Tables ``[[invited]]`` have the clients whose key has not come yet, tables ``[[left]]`` the keys that were removed, as
Flower never registers such a key again. A client that comes back has the limits that it had, and its newest receipt.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from filelock import FileLock, Timeout
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, field_validator

from fedstill.base import files
from fedstill.base.settings import Settings, read_toml, sentence
from fedstill.sites import certificates
from fedstill.sites.certificates import client_of, read_public
from fedstill.sites.seals import RECEIPTS, Receipts

_LARGEST = 1 << 20


class Invitation(Settings):
    """Facts of a server that a site needs."""

    client: NonNegativeInt
    """Number of the client that the site is."""
    address: str
    """The server's address, as HOST:PORT."""
    authority: str
    """Certificates of the authorities that may sign the server's certificate, in PEM."""
    server: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Public key by which the server signs its requests, in hexadecimal."""

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


def read_invitation(place: Path) -> Invitation:
    """Read an invitation.

    Raises:
        ValueError: the file is no invitation, or one of a newer fedstill.
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
    """A short fingerprint of a file (`fedstill.base.files.fingerprint`)."""
    return files.fingerprint(place.read_bytes())


Flwr = Callable[..., str]
"""Runs ``flwr supernode`` with some words at the server, and returns its output."""
_PATIENCE = 300.0
"""Seconds to wait for other commands that change the roster."""


class Invited(Settings):
    """A client whose key is not known yet."""

    client: NonNegativeInt
    """Number of the client."""
    max_records: PositiveInt | None = None
    """Largest number of records that its replies may claim; None for no limit."""
    helper: bool = False
    """Whether it is a helper of masked sums."""


class Member(Invited):
    """A client of the roster."""

    key: str
    """Its public key, in the format of OpenSSH, without a comment."""
    node: NonNegativeInt
    """Flower's id of the node with this key."""
    sums: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")] | None = None
    """Its public keys for masked sums (`fedstill.sums.keys.Keys.public`); None if its line had none."""


class Left(Invited):
    """A key that was removed, with the number and the limits that its client had."""

    key: str
    """The key, as in `Member`."""


class Roster(Settings):
    """Content of a roster's file."""

    site: tuple[Member, ...] = ()
    invited: tuple[Invited, ...] = ()
    left: tuple[Left, ...] = ()

    def of(self, client: int) -> Member | None:
        """The member with this number."""
        return next((member for member in self.site if member.client == client), None)


def load(place: Path) -> Roster:
    """The content of a roster's file.

    Raises:
        ValueError: the file is no roster, a newer fedstill wrote it (its ``format``), or two members have the same
            client, key or node.
    """
    roster = read_toml(Roster, place, f"the roster {str(place)!r}")
    for name in ("client", "key", "node"):
        values = [getattr(member, name) for member in roster.site]
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"the roster {str(place)!r} has the {name} {repr(twice[0])[:80]} twice")
    return roster


def read(place: Path) -> dict[int, Member]:
    """The members of a roster, by client; errors as of `load`."""
    return {member.client: member for member in load(place).site}


def write(place: Path, roster: Roster) -> None:
    """Write a roster's file, sorted by client."""
    tables = {
        name: [_table(entry) for entry in sorted(entries, key=lambda entry: entry.client)]
        for name, entries in (("site", roster.site), ("invited", roster.invited), ("left", roster.left))
        if entries
    }
    files.write_bytes(place, tomli_w.dumps(tables).encode())


def _limits(entry: Invited) -> dict[str, Any]:
    """What a client may send, and whether it is a helper."""
    return entry.model_dump(include={"max_records", "helper"})


def _left(member: Member) -> Left:
    return Left(client=member.client, key=member.key, **_limits(member))


def _table(entry: Settings) -> dict[str, object]:
    return {name: value for name, value in entry.model_dump(exclude_none=True).items() if value is not False}


def invite(place: Path, client: int, max_records: int | None, *, helper: bool | None = None) -> None:
    """Note that a client is invited; one that was stays what it is, with its new limit and part if they are given."""
    with _locked(place):
        roster = load(place)
        given = {"max_records": max_records, "helper": helper}
        if (member := roster.of(client)) is not None:
            limited = member.model_copy(update={name: value for name, value in given.items() if value is not None})
            others = (other for other in roster.site if other.client != client)
            write(place, roster.model_copy(update={"site": (*others, limited)}))
            return
        others_invited = tuple(entry for entry in roster.invited if entry.client != client)
        known = (*roster.invited, *reversed(roster.left))
        limits = next((_limits(entry) for entry in known if entry.client == client), {})
        before = Invited(client=client, **limits)
        invited = before.model_copy(update={name: value for name, value in given.items() if value is not None})
        write(place, roster.model_copy(update={"invited": (*others_invited, invited)}))


def accept(place: Path, client: int, public_key: str, flwr: Flwr, *, replace: bool = False) -> Member:
    """Register an invited client's public key at Flower, and make it a member.

    Args:
        place: the roster's file.
        client: number of the client.
        public_key: the key, as a line of OpenSSH.
        flwr: runs ``flwr supernode``.
        replace: whether the client may have another key already, which is then removed.

    Raises:
        ValueError: the client is not invited, the key was made for another one, is another's or was removed, or Flower
            does not register it.
    """
    key, named = read_public(public_key), client_of(public_key)
    if named not in (None, client):
        raise ValueError(
            f"this key was made for client {named}, not {client}; 'fedstill server accept FOLDER {named} KEY', as a "
            "key under a wrong number is lost"
        )
    with _locked(place):  # to the end: Flower takes seconds to register a key
        roster = load(place)
        before = roster.of(client)
        invited = next((entry for entry in roster.invited if entry.client == client), before)
        if invited is None:
            raise ValueError(f"client {client} is not invited; first 'fedstill server invite FOLDER {client}'")
        if owner := [member.client for member in roster.site if member.key == key]:
            if owner == [client] and before is not None:
                if (sums := certificates.sums_of(public_key)) in (None, before.sums):
                    return before
                told = before.model_copy(update={"sums": sums})
                others = (other for other in roster.site if other.client != client)
                write(place, roster.model_copy(update={"site": (*others, told)}))
                return told
            raise ValueError(f"this key is client {owner[0]}'s already; a key is one client")
        if any(left.key == key for left in roster.left):
            raise ValueError(
                "this key was removed, and Flower never takes it again; 'fedstill site rekey' makes a new one"
            )
        if before is not None and not replace:
            raise ValueError(f"client {client} has another key already; --replace removes that and registers this one")
        left = (*roster.left, *([] if before is None else [_left(before)]))
        receipts = Receipts(place.with_name(RECEIPTS))  # first: Flower takes a key once, and a damaged file stops here
        receipts.hand_on([one.key for one in left if one.client == client], key)
        node = _register(place.with_name(f".site-{client}.pub"), client, key, flwr)
        sums = certificates.sums_of(public_key)
        member = Member(client=client, key=key, node=node, sums=sums, **_limits(invited))
        update = {
            "site": (*(other for other in roster.site if other.client != client), member),
            "invited": tuple(entry for entry in roster.invited if entry.client != client),
            "left": left,
        }
        write(place, roster.model_copy(update=update))  # from here on no run asks the earlier node
        if before is not None:
            _unregister(before, flwr)
    return member


def remove(place: Path, client: int, flwr: Flwr) -> None:
    """Remove a client: no run asks it any more, and its key can never be registered again.

    Raises:
        ValueError: there is no such client, or Flower does not unregister its key.
    """
    with _locked(place):
        roster = load(place)
        member = roster.of(client)
        if member is None and client not in [entry.client for entry in roster.invited]:
            raise ValueError(f"the roster {str(place)!r} has no client {client}")
        left = () if member is None else (_left(member),)
        update = {
            "site": tuple(other for other in roster.site if other.client != client),
            "invited": tuple(entry for entry in roster.invited if entry.client != client),
            "left": (*roster.left, *left),
        }
        write(place, roster.model_copy(update=update))
        if member is not None:
            _unregister(member, flwr)


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Keep other commands from a change of the roster, from its reading to its writing."""
    load(place)  # where there is no roster, no lock is left
    lock = FileLock(place.with_suffix(".lock"))
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout as error:
        raise ValueError(
            f"another command has changed the roster {str(place)!r} for {_PATIENCE:g} s; wait for it, or stop it"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _register(file: Path, client: int, key: str, flwr: Flwr) -> int:
    """Register a key at Flower through a temporary file, and return the node's number."""
    files.write_bytes(file, f"{key}\n".encode())
    try:
        output = flwr("register", str(file), "--name", f"site-{client}", "--format", "json")
    finally:
        file.unlink()
    try:
        return int(json.loads(output)["node-id"])
    except (ValueError, KeyError, TypeError) as error:
        remedy = "; 'fedstill site rekey' makes another key" if "already in use" in output else ""
        raise ValueError(f"Flower does not register the key: {output.strip()[:500]!r}{remedy}") from error


def _unregister(member: Member, flwr: Flwr) -> None:
    output = flwr("unregister", str(member.node), "--format", "json")
    try:
        done = json.loads(output)["success"] is True
    except (ValueError, KeyError, TypeError):
        done = False
    if not done:
        raise ValueError(
            f"client {member.client}'s earlier key is in no run any more, but Flower did not unregister its node "
            f"{member.node}: {output.strip()[:500]!r}"
        )
