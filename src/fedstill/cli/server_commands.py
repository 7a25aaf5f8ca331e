"""``fedstill server`` and ``fedstill deploy``."""

import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.command import FORM, Command, Part
from fedstill.cli.output import Bad, print_json, terminal

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from fedstill.cli.flags import Acceptance, Format, Invitation, Probed, Renewal
    from fedstill.sites.server.service import Server, ServerSettings
    from fedstill.sites.server.submit import SubmitFlags


def init(words: list[str], settings: "ServerSettings") -> None:
    """``fedstill server init``."""
    from fedstill.sites import units
    from fedstill.sites.server import service as servers

    if settings.host == _UNSET["host"]:
        raise Bad("--host is missing; give the name or the IP address under which the sites reach this server")
    made = servers.init(Path(words[0]), settings.model_dump())
    print(f"{made.folder} is the server {made.address}; {made.certificates.authority_key} signs its certificates")
    _warn_root()
    print(f"start it: fedstill server start {words[0]}, or as a service: see {made.folder / units.SERVER}")


def start(words: list[str]) -> None:
    """``fedstill server start``."""
    from fedstill.sites.server import service

    _warn_root()
    raise SystemExit(service.start(_open(words, "start"), partial(print, flush=True)))


def invite(words: list[str], limit: "Invitation") -> None:
    """``fedstill server invite``."""
    from fedstill.sites.server.roster import fingerprint

    clients = [_number(client) for client in words[1:]]
    of = _open(words, "invite")
    for client in clients:
        place = of.invite(client, limit.records, helper=limit.helper or None)
        print(f"client {client}: {place}, fingerprint {fingerprint(place)}")
    print("send each site its file, and compare fingerprints on another way (a call); nothing in it is secret")


def accept(words: list[str], given: "Acceptance") -> None:
    """``fedstill server accept``."""
    from fedstill.sites.server import roster

    _, number, *key = words
    of, client, text = _running(words, "accept"), _number(number), " ".join(key)
    if len(key) == 1 and not text.startswith("ecdsa-") and Path(text).is_file():  # a key is too long for a name
        text = Path(text).read_text("utf-8", errors="replace")
    member = roster.accept(of.roster, client, text, of.supernode, replace=given.replace)
    limit = "without a limit of records" if member.max_records is None else f"at most {member.max_records:,} records"
    print(f"client {client} is accepted, {limit}; its site may serve now")


def remove(words: list[str]) -> None:
    """``fedstill server remove``."""
    from fedstill.sites.server import roster

    of, client = _running(words, "remove"), _number(words[1])
    roster.remove(of.roster, client, of.supernode)
    print(f"client {client} is removed; to come back it needs an invitation and a new key (fedstill site rekey)")


def run(words: list[str], settings: "SubmitFlags", form: "Format") -> None:
    """``fedstill server run``."""
    from fedstill.sites.server import submit

    _, *files = words
    say = partial(print, flush=True, file=sys.stderr if form.json_ else sys.stdout)
    try:
        out = submit.run(_open(words, "run"), Path(files[0]) if files else None, settings, say)
    except submit.Ended as error:
        print(f"fedstill: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if form.json_:
        from fedstill.report.record import read_run

        print_json({**read_run(out).summary, "folder": str(out)})
        return
    print(f"show them: fedstill report {out}")


def status(words: list[str], form: "Probed") -> None:
    """``fedstill server status``."""
    from fedstill.sites.server import service

    state = service.status(_open(words))
    if form.json_:
        print_json(state)
    else:
        print("\n".join(service.sentences(state)))
    if form.check and not (state["running"] and state["certificate_days"] >= 0):
        raise SystemExit(1)


def renew(words: list[str], given: "Renewal") -> None:
    """``fedstill server renew``."""
    from fedstill.sites.server import service

    print(service.renew(_open(words, "renew"), authority=given.authority))


def stop(words: list[str]) -> None:
    """``fedstill server stop``."""
    from fedstill.sites.server import service

    of = _open(words, "stop")
    print("the server has stopped" if service.stop(of) else f"the server in {of.folder} does not run")


def _open(words: list[str], command: str = "") -> "Server":
    """The server in the folder that comes first; ``command`` is named if it writes there."""
    from fedstill.sites import units
    from fedstill.sites.server.service import Server

    found = Server(Path(words[0]))
    if command:
        units.check_owner(found.folder, f"server {command} {' '.join(words)}")
    return found


def _warn_root() -> None:
    from fedstill.sites import units

    if sentence := units.of_root("this server"):
        print(sentence, file=sys.stderr)


def _running(words: list[str], command: str) -> "Server":
    """The server, whose SuperLink is needed."""
    from fedstill.sites.server import service

    of = _open(words, command)
    if not service.ready(of):
        raise Bad(f"the server does not run; start it with 'fedstill server start {words[0]}'")
    return of


def _number(client: str) -> int:
    if not (client.isascii() and client.isdecimal() and len(client) < 16):
        raise Bad(f"CLIENT is {client!r}; it must be a whole number of 0 or more")
    return int(client)


_INIT = (
    "Make a server's folder, with an authority, a certificate for its host name, an empty roster, an nginx.conf and a "
    "unit of systemd.\n\nExample: fedstill server init federation --host fl.example.org"
)
_RUN = (
    "Run an experiment file with the sites of a server; it exits with 0 when the run has its results, with 1 when it "
    "failed.\n\nExample: fedstill server run federation run.yaml --out federation/runs/first"
)
_CLIENTS = "no client is named; give numbers from 0: fedstill server invite FOLDER 0 1"
_KEY = "usage: fedstill server accept FOLDER CLIENT KEY [--replace]; KEY is a public key or its file"
_UNSET = {"host": "-"}
"""Values of the server's settings that have no default."""
_SETTINGS = Part("fedstill.sites.server.service:ServerSettings", "settings of the server", values=_UNSET)
COMMANDS: dict[str, Command] = {
    "init": Command(init, "FOLDER", _INIT, (_SETTINGS,)),
    "start": Command(start, "FOLDER", "Run the server; sites reach it, and nobody else does."),
    "invite": Command(invite, "FOLDER CLIENT ...", "Write the invitation files of clients.", ("Invitation",), _CLIENTS),
    "accept": Command(accept, "FOLDER CLIENT KEY ...", "Register a client's public key.", ("Acceptance",), _KEY),
    "remove": Command(remove, "FOLDER CLIENT", "Remove a client and its key."),
    "run": Command(run, "FOLDER [FILE.yaml]", _RUN, ("fedstill.sites.server.submit:SubmitFlags", FORM)),
    "status": Command(status, "FOLDER", "Show certificate, sites and runs.", ("Probed",)),
    "renew": Command(renew, "FOLDER", "Make a new certificate, or first a new authority.", ("Renewal",)),
    "stop": Command(stop, "FOLDER", "Stop the server."),
}
SERVER = Command(
    about="Set up and run the server of real sites. FOLDER is the server's folder.\n\n"
    "Example: fedstill server init federation --host fl.example.org",
    below=COMMANDS,
)


def _stop_trial(number: int, _: object) -> None:
    """Leave the check so that it ends what it has started, as after Ctrl-C."""
    raise SystemExit(128 + number)


def check(words: list[str]) -> None:
    """``fedstill deploy check``."""
    from fedstill.sites import trial

    console = terminal()
    for number in (signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ())):
        signal.signal(number, _stop_trial)
    try:
        for line in trial.check(Path(words[0]) if words else None):
            console.print(line, soft_wrap=True, highlight=False)
    except RuntimeError as error:
        print(f"fedstill: {error}", file=sys.stderr)
        raise SystemExit(1) from None


DEPLOY = Command(
    about="Try a deployment; 'fedstill server' and 'fedstill site' set up real ones.\n\nExample: fedstill deploy check",
    below={
        "check": Command(
            check,
            "[FOLDER]",
            "Try a server and two sites on this machine, over TLS, in an empty folder or a temporary one.",
        )
    },
)
