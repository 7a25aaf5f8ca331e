"""``fedstill deploy``."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.output import Bad, asks_help, no_more, print_json, terminal, usage

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from fedstill.sites.server.service import Server


USAGE = """usage: fedstill server init FOLDER --host NAME [flags]
                         make a server: certificates, roster, unit of systemd
       fedstill server start FOLDER
                         run it; sites reach it, and nobody else does
       fedstill server invite FOLDER CLIENT ... [--records N]
                         write the invitation files of clients
       fedstill server accept FOLDER CLIENT KEY [--replace]
                         register a client's public key (a line, or its file)
       fedstill server remove FOLDER CLIENT
                         remove a client and its key
       fedstill server run FOLDER FILE.yaml --out DIR [flags]
                         run an experiment file with the sites
       fedstill server status FOLDER [--json]
                         show certificate, sites and runs
       fedstill server renew FOLDER [--authority]
                         make a new certificate, or first a new authority
       fedstill server stop FOLDER
                         stop it

FOLDER comes first; init and run have a --help of their own.

example: fedstill server init federation --host fl.example.org"""


def server(words: list[str]) -> None:
    """``fedstill server``."""
    if not words or words[0] in ("-h", "--help") or (asks_help(words) and words[0] not in ("init", "run")):
        usage(words and ["--help"], USAGE)
        return
    command = COMMANDS.get(words[0])
    if command is None:
        from fedstill.base.lookup import suggestion

        near = suggestion(words[0], COMMANDS) or f"; choose {', '.join(COMMANDS)}"
        raise Bad(f"there is no command 'server {words[0]}'{near} (fedstill server --help)")
    if not asks_help(words) and (len(words) < 2 or words[1].startswith("-")):
        raise Bad(f"the server's folder comes first: fedstill server {words[0]} FOLDER (fedstill server --help)")
    command(words[1:])


def _init(words: list[str]) -> None:
    from fedstill.cli import parser
    from fedstill.cli.parser import Section
    from fedstill.sites import units
    from fedstill.sites.server import service as servers

    about = (
        "Make a server's folder, with an authority, a certificate for its host name, an empty roster, an nginx.conf "
        "and a unit of systemd.\n\nExample: fedstill server init federation --host fl.example.org"
    )
    flags = words if words[0].startswith("-") else words[1:]
    section = Section(servers.ServerSettings(host="127.0.0.1"), title="settings of the server")
    (settings,) = parser.parse("fedstill server init FOLDER", about, flags, [section])
    if not any(word.partition("=")[0] == "--host" for word in flags):
        raise Bad("--host is missing; give the name or the IP address under which the sites reach this server")
    made = servers.init(Path(words[0]), settings.model_dump())
    print(f"{made.folder} is the server {made.address}; {made.certificates.authority_key} signs its certificates")
    print(f"start it: fedstill server start {words[0]}, or as a service: see {made.folder / units.SERVER}")


def _start(words: list[str]) -> None:
    from fedstill.sites.server import service

    no_more(words[1:])
    raise SystemExit(service.start(_open(words), partial(print, flush=True)))


def _invite(words: list[str]) -> None:
    from fedstill.sites.server.roster import fingerprint

    values, clients = _flags(words[1:], {"--records": 1})
    records = _number(values["--records"][0], "--records") if "--records" in values else None
    if records == 0:
        raise Bad("--records is 0; give the largest number of records that a reply may claim, or leave it out")
    if not clients:
        raise Bad("no client is named; give numbers from 0: fedstill server invite FOLDER 0 1")
    of = _open(words)
    for client in [_number(client, "CLIENT") for client in clients]:
        place = of.invite(client, records)
        print(f"client {client}: {place}, fingerprint {fingerprint(place)}")
    print("send each site its file, and compare fingerprints on another way (a call); nothing in it is secret")


def _accept(words: list[str]) -> None:
    from fedstill.sites.server import roster

    values, rest = _flags(words[1:], {"--replace": 0})
    if len(rest) < 2:
        raise Bad("usage: fedstill server accept FOLDER CLIENT KEY [--replace]; KEY is a public key or its file")
    of, client, text = _running(words), _number(rest[0], "CLIENT"), " ".join(rest[1:])
    if len(rest) == 2 and Path(text).is_file():
        text = Path(text).read_text(errors="replace")
    member = roster.accept(of.roster, client, text, of.supernode, replace="--replace" in values)
    limit = "without a limit of records" if member.max_records is None else f"at most {member.max_records:,} records"
    print(f"client {client} is accepted, {limit}; its site may serve now")


def _remove(words: list[str]) -> None:
    from fedstill.sites.server import roster

    if len(words) != 2:
        raise Bad("usage: fedstill server remove FOLDER CLIENT")
    of, client = _running(words), _number(words[1], "CLIENT")
    roster.remove(of.roster, client, of.supernode)
    print(f"client {client} is removed; to come back it needs an invitation and a new key (fedstill site rekey)")


def _run(words: list[str]) -> None:
    from fedstill.cli import parser
    from fedstill.cli.flags import Format
    from fedstill.cli.parser import Section
    from fedstill.sites.server import submit

    about = (
        "Run an experiment file with the sites of a server; it exits with 0 when the run has its results, with 1 when "
        "it failed.\n\nExample: fedstill server run federation run.yaml --out federation/runs/first"
    )
    files: list[str] = []
    flags = words if words[0].startswith("-") else words[1:]
    sections = [Section(submit.RunFlags()), Section(Format(), title="output")]
    settings, form = parser.parse("fedstill server run FOLDER FILE.yaml", about, flags, sections, others=files)
    no_more(files[1:])
    say = partial(print, flush=True, file=sys.stderr if form.json_ else sys.stdout)
    try:
        out = submit.run(_open(words), Path(files[0]) if files else None, settings, say)
    except submit.Ended as error:
        print(f"fedstill: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if form.json_:
        from fedstill.report.record import read_run

        print_json({**read_run(out).summary, "folder": str(out)})
        return
    print(f"show them: fedstill report {out}")


def _status(words: list[str]) -> None:
    from fedstill.sites.server import service

    values, rest = _flags(words[1:], {"--json": 0})
    no_more(rest)
    state = service.status(_open(words))
    if "--json" in values:
        print_json(state)
    else:
        print("\n".join(service.sentences(state)))


def _renew(words: list[str]) -> None:
    from fedstill.sites.server import service as servers

    values, rest = _flags(words[1:], {"--authority": 0})
    no_more(rest)
    print(servers.renew(_open(words), authority="--authority" in values))


def _stop(words: list[str]) -> None:
    from fedstill.sites.server import service

    no_more(words[1:])
    of = _open(words)
    print("the server has stopped" if service.stop(of) else f"the server in {of.folder} does not run")


def _open(words: list[str]) -> "Server":
    from fedstill.sites.server.service import Server

    return Server(Path(words[0]))


def _running(words: list[str]) -> "Server":
    """The server, whose SuperLink is needed."""
    from fedstill.sites.server import service

    of = _open(words)
    if not (service.is_running(of) and service.listens(of.settings.inner_port)):
        raise Bad(f"the server does not run; start it with 'fedstill server start {words[0]}'")
    return of


def _flags(words: list[str], known: dict[str, int]) -> tuple[dict[str, list[str]], list[str]]:
    """The flags among the words, each with so many values, and the other words."""
    found: dict[str, list[str]] = {}
    others: list[str] = []
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--"):
            others.append(name + equals + value)
            continue
        if name not in known:
            raise Bad(f"there is no flag {name}; this command takes {', '.join(known)} (fedstill server --help)")
        found[name] = [value] if equals else [left.pop(0) for _ in range(min(known[name], len(left)))]
        if len(found[name]) != known[name]:
            raise Bad(f"{name} needs {'a value' if known[name] else 'no value'} (fedstill server --help)")
    return found, others


def _number(word: str, name: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 16):
        raise Bad(f"{name} is {word!r}; it must be a whole number of 0 or more")
    return int(word)


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "init": _init,
    "start": _start,
    "invite": _invite,
    "accept": _accept,
    "remove": _remove,
    "run": _run,
    "status": _status,
    "renew": _renew,
    "stop": _stop,
}


DEPLOY_USAGE = """usage: fedstill deploy check [FOLDER]

Try a server and two sites on this machine, over TLS, in an empty folder or a
temporary one. 'fedstill server' and 'fedstill site' set up real ones.

example: fedstill deploy check"""


def _stop_trial(number: int, _: object) -> None:
    """Leave the check so that it ends what it has started, as after Ctrl-C."""
    raise SystemExit(128 + number)


def deployment(words: list[str]) -> None:
    """``fedstill deploy``."""
    if not words or asks_help(words):
        usage(words and ["--help"], DEPLOY_USAGE)
        return
    if words[0] != "check":
        raise Bad(f"there is no command 'deploy {words[0]}'; fedstill server --help, fedstill site --help")
    no_more(words[2:])
    if unknown := [word for word in words[1:] if word.startswith("-")]:
        raise Bad(f"there is no flag {unknown[0]}; deploy check takes only an empty folder")
    from fedstill.sites import trial

    console = terminal()
    for number in (signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ())):
        signal.signal(number, _stop_trial)
    try:
        for line in trial.check(Path(words[1]) if words[1:] else None):
            console.print(line, soft_wrap=True, highlight=False)
    except RuntimeError as error:
        print(f"fedstill: {error}", file=sys.stderr)
        raise SystemExit(1) from None
