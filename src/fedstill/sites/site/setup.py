"""Files of a site: its policy and ledger, its key, and the server that it answers."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedstill.base import files
from fedstill.base.files import expanded
from fedstill.base.settings import sentence
from fedstill.sites import certificates, units
from fedstill.sites.server import roster
from fedstill.sites.site import site_journal, site_sums
from fedstill.sites.site.policy import SitePolicy

POLICY = "policy.toml"
"""Name of the policy's file in a site's folder."""
KEY, NODE_KEY = "site.key", "node.key"
"""Names of the files with a site's private key, and with its copy for the node that runs (`node_key`)."""
_AUTHORITY = "ca.crt"
_CONNECTION = "connection.toml"


def read_settings(settings: Mapping[str, Any]) -> SitePolicy:
    """The policy with these settings.

    Raises:
        ValueError: a setting is invalid.
    """
    try:
        return SitePolicy(**settings)
    except ValidationError as error:
        raise ValueError(f"the policy is invalid: {sentence(error)}") from error


def site(folder: Path, settings: Mapping[str, Any]) -> SitePolicy:
    """Make a site's journal, write its policy, and return the policy.

    Raises:
        ValueError: a setting is invalid, or the folder has a policy already, or a journal that was used.
    """
    place = folder / POLICY
    if place.exists():
        raise ValueError(f"{place} exists already; edit it, or choose another folder")
    state = folder.resolve() / expanded(read_settings(settings).state)
    site_journal.create(state)
    plain = {name: _plain(value) for name, value in settings.items() if value is not None}
    files.write_bytes(place, tomli_w.dumps(plain).encode())  # last: with it, the folder is a site
    return SitePolicy.read(place)


def join(folder: Path, invite: Path) -> str:
    """Take a server's invitation, make a key unless there is one, and return the public key.

    A site that has a server already takes the new address and the new authority.

    Raises:
        ValueError: the folder has no policy, the file is no invitation, or it is another client's.
    """
    policy, invited = SitePolicy.read(folder / POLICY), roster.read_invitation(invite)
    if invited.client != policy.client:
        raise ValueError(f"{invite} is for client {invited.client}; the policy in {folder} is client {policy.client}'s")
    files.write_bytes(folder / _AUTHORITY, invited.authority.encode())
    connection = {"address": invited.address, "server": invited.server}
    files.write_bytes(folder / _CONNECTION, tomli_w.dumps(connection).encode())
    key = folder / KEY
    if not key.exists():
        certificates.site_key(key, policy.client, site_sums.keys_of(policy.state).public)
    unit = units.site(folder.resolve(), policy.state.resolve(), on_cpu=policy.device == "cpu")
    files.write_bytes(folder / units.SITE, unit.encode())
    return public_key(folder)


def rekey(folder: Path) -> str:
    """Make another key for a site, and return its public key; the earlier one is kept as ``site.key.old``.

    Raises:
        ValueError: the folder has no key.
    """
    key = folder / KEY
    if not key.exists():
        raise ValueError(f"{folder} has no {KEY}; make a site with 'fedstill site init'")
    files.write_bytes(old := folder / f"{KEY}.old", b"")
    old.chmod(0o600)
    old.write_bytes(key.read_bytes())
    policy = SitePolicy.read(folder / POLICY)
    certificates.site_key(key, policy.client, site_sums.keys_of(policy.state).public)
    return public_key(folder)


def public_key(folder: Path) -> str:
    """A site's public key, as a line of OpenSSH."""
    return (folder / f"{KEY}.pub").read_text("utf-8").strip()


def server_of(folder: Path) -> str | None:
    """The public key by which a site's server signs requests; None for a site that has no server."""
    place = folder / _CONNECTION
    if not place.exists():
        return None
    return str(tomllib.loads(place.read_text("utf-8"))["server"])


def connection(folder: Path) -> tuple[str, list[str]]:
    """The address of a site's server, and the options of ``flower-supernode`` that connect to it.

    Raises:
        ValueError: the site has no server, or others can read its key.
    """
    place, key, authority = (folder.resolve() / name for name in (_CONNECTION, KEY, _AUTHORITY))
    try:
        address = str(tomllib.loads(place.read_text("utf-8"))["address"])
        mode = key.stat().st_mode
        authority.stat()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder} has no server to answer ({error}); 'fedstill site join {folder} --invite FILE' gives it one"
        ) from error
    if mode & 0o077:
        raise ValueError(f"others than its owner can read {key}; chmod 600 {key}")
    options = ["--superlink", address, "--root-certificates", str(authority)]
    return address, [*options, "--auth-supernode-private-key", str(key.with_name(NODE_KEY))]


def node_key(folder: Path) -> Path:
    """The key by which the running node of a site signs: that of its start, whatever `rekey` has made since.

    The server has accepted that one, and takes a reply under another key for a stranger's. A folder whose node was
    never started has `KEY` alone.
    """
    return next((place for name in (NODE_KEY, KEY) if (place := folder / name).exists()), folder / KEY)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
