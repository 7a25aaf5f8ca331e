"""``fedstill server status``: what a server is, who its sites are, and which runs it had."""

import datetime
import json
from typing import Any

from fedstill import __version__
from fedstill.sites import roster, service
from fedstill.sites.certificates import expiry
from fedstill.sites.server import CONNECTION, Server

_RUNS = 10
"""Largest number of runs shown."""


def status(server: Server) -> dict[str, Any]:
    """The state of a server, as JSON values; nodes and runs are empty if it does not run."""
    running = service.is_running(server) and service.listens(server.settings.inner_port)
    members = roster.load(server.roster)
    nodes = (
        {str(node.get("node-id")): node for node in _listed(server, "nodes", "supernode", "list")} if running else {}
    )
    ends = expiry(server.certificates.certificate)
    sites = [
        {
            "client": member.client,
            "node": member.node,
            "max_records": member.max_records,
            "state": nodes.get(str(member.node), {}).get("status") if running else None,
        }
        for member in members.site
    ]
    runs = _listed(server, "runs", "list") if running else []
    return {
        "version": __version__,
        "folder": str(server.folder),
        "running": running,
        "address": server.address,
        "certificate_ends": ends.isoformat(),
        "certificate_days": (ends - datetime.datetime.now(datetime.UTC)).days,
        "sites": sites,
        "invited": [entry.client for entry in members.invited],
        "left": [entry.client for entry in members.left],
        "runs": [{"id": str(run.get("run-id")), "status": str(run.get("status"))} for run in runs[:_RUNS]],
    }


def _listed(server: Server, name: str, *words: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(server.flwr(*words, CONNECTION, "--format", "json").stdout)[name]
    except (ValueError, KeyError, TypeError):
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def sentences(state: dict[str, Any]) -> list[str]:
    """The state in lines of text."""
    days = state["certificate_days"]
    lines = [
        f"server {state['address']}: {'running' if state['running'] else 'not running'}, fedstill {state['version']}",
        f"certificate: {f'{days} days left' if days >= 0 else 'EXPIRED'} (fedstill server renew)",
    ]
    for site in state["sites"]:
        limit = "" if site["max_records"] is None else f", at most {site['max_records']:,} records"
        lines.append(f"client {site['client']}: {site['state'] or 'state unknown'}{limit}, node {site['node']}")
    lines += [f"client {client}: invited, its key has not been accepted yet" for client in state["invited"]]
    lines += [f"run {run['id']}: {run['status']}" for run in state["runs"]]
    return lines
