"""``fedstill site``: what the operator of a real site sees and decides."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.output import Bad, asks_help, no_more, print_json, print_rows

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from fedstill.sites.site.policy import SitePolicy


def init(words: list[str]) -> None:
    """``fedstill site init``."""
    about = (
        "Make a site's folder: its policy, its ledger, its key, and a unit of systemd. It reads the data once, and "
        "says in plain words what the policy lets out.\n\nExample: fedstill site init hospital --invite site-0.toml "
        "--data images --methods fedavg-p --budget 4"
    )
    from fedstill.cli import parser
    from fedstill.cli.flags import Invite
    from fedstill.cli.parser import Section

    base = _policy(words)
    sections = [
        Section(Invite(), title="server"),
        Section(base, title="settings of the policy", without=("client",)),
    ]
    flags = words if words[:1] and words[0].startswith("-") else words[1:]
    invited, parsed = parser.parse("fedstill site init FOLDER", about, flags, sections)
    folder = _folder(words)
    if invited.invite is None:
        raise Bad("--invite is missing; give the file that the server's operator sent (fedstill server invite)")
    if parsed.methods == base.methods:
        raise Bad("--methods is empty; name the allowed methods or steps, as --methods fedavg-p fedgm.distil")
    if not parsed.data.expanduser().exists():
        raise Bad(f"--data is {str(parsed.data)!r}, which does not exist; give the file or folder of records")
    from fedstill.sites import units
    from fedstill.sites.server import roster
    from fedstill.sites.site import policy as policies
    from fedstill.sites.site import setup

    if (folder / setup.POLICY).exists():
        raise Bad(f"{folder} is a site already; edit its {setup.POLICY}, or choose another folder")

    units.check_folder(folder.resolve())
    invite = roster.read_invitation(invited.invite)
    changed = {n: getattr(parsed, n) for n in type(parsed).model_fields if getattr(parsed, n) != getattr(base, n)}
    settings = {
        **changed,
        "client": invite.client,
        "state": parsed.state,
        "data": parsed.data.expanduser().resolve(),
        "public": {name: place.expanduser().resolve() for name, place in parsed.public.items()},
    }
    policy = setup.read_settings({**settings, "state": folder.resolve() / parsed.state.expanduser()})
    units.check_folder(policy.state)
    warnings = list(policies.check(policy))
    setup.site(folder, {name: value for name, value in settings.items() if value != {}})
    key = setup.join(folder, invited.invite)
    folder.chmod(0o700)
    print(f"client {invite.client} of {invite.address}, invitation {roster.fingerprint(invited.invite)}")
    _say(policy, warnings)
    print(f"send this public key ({folder / 'site.key.pub'}) to the server, for 'fedstill server accept':\n{key}")
    print(f"then: fedstill site serve {words[0]}, or as a service: see {folder / units.SITE}")


def check(words: list[str]) -> None:
    """``fedstill site check``."""
    folder, as_json = _folder(words), words[1:] == ["--json"]
    no_more([] if as_json else words[1:])
    from fedstill.sites.site import log, setup
    from fedstill.sites.site import policy as policies
    from fedstill.sites.site.policy import SitePolicy

    policy = SitePolicy.read(folder / setup.POLICY)
    for problem in log.verify(policy.state).problems[:1]:
        raise Bad(problem)
    warnings = list(policies.check(policy))
    if as_json:
        print_json({"client": policy.client, "leaves": list(policies.words(policy)), "warnings": warnings})
    else:
        _say(policy, warnings)


def join(words: list[str]) -> None:
    """``fedstill site join``."""
    from fedstill.cli import parser
    from fedstill.cli.flags import Invite
    from fedstill.cli.parser import Section

    folder = _folder(words)
    (flags,) = parser.parse("fedstill site join FOLDER", "", words[1:], [Section(Invite())])
    if flags.invite is None:
        raise Bad("--invite is missing; give the file that the server's operator sent (fedstill server invite)")
    from fedstill.sites.server import roster
    from fedstill.sites.site import setup

    key = setup.join(folder, flags.invite)
    print(
        f"the server is {roster.read_invitation(flags.invite).address}, invitation {roster.fingerprint(flags.invite)}"
    )
    print(f"the site's public key is\n{key}\nstart the site again")


def rekey(words: list[str]) -> None:
    """``fedstill site rekey``."""
    no_more(words[1:])
    from fedstill.sites.site import setup

    key = setup.rekey(_folder(words))
    print("send this public key to the server, for 'fedstill server accept --replace', then start the site again:")
    print(key)


def serve(words: list[str]) -> None:
    """``fedstill site serve``; further words are options of ``flower-supernode``."""
    from fedstill.sites.site import launcher

    raise SystemExit(launcher.serve(_folder(words), words[1:]))


def _folder(words: Sequence[str]) -> Path:
    if not words or words[0].startswith("-"):
        raise Bad("the site's folder comes first: fedstill site COMMAND FOLDER (fedstill site --help)")
    return Path(words[0])


def _say(policy: Any, warnings: Sequence[str]) -> None:
    from fedstill.sites.site import policy as policies

    print("what leaves this site:")
    for line in policies.words(policy):
        print(f"  {line}")
    for warning in warnings:
        print(f"warning: {warning}")


def _policy(words: Sequence[str]) -> Any:
    required = {"client": 0, "data": Path("data"), "state": Path("state"), "methods": ("none",)}
    if asks_help(words) or not words:
        from fedstill.cli.declared import declared

        with suppress(LookupError):
            return declared("fedstill.sites.site.policy:SitePolicy")(**required)
    from fedstill.sites.site.policy import SitePolicy

    return SitePolicy(**required)


USAGE = """usage: fedstill site COMMAND FOLDER ...
FOLDER is the site's folder, with its policy.toml.

set up and run:
  init FOLDER --invite FILE --data PATH [flags]
      make a site: policy, ledger, key, unit of systemd
  check FOLDER [--json]
      say what the policy lets out, after a change of it
  serve FOLDER
      run the site's node, and answer the server
  join FOLDER --invite FILE
      take a server's new invitation
  rekey FOLDER
      make another key

show and govern:
  status FOLDER [--json | --prometheus]
      show budget, runs, questions, waiting runs and health
  log FOLDER [--all] [--json]
      show the last questions and outcomes, or all
  log FOLDER --verify [--json]
      check log and ledger; exit code 1 if something is wrong
  log FOLDER --export FILE.html|.json
      write all evidence into one file
  log FOLDER --restart
      put a damaged log aside and begin another
  show FOLDER ENTRY [--out FOLDER] [--json]
      show what was sent in an entry of the log; --out writes values and images
  ledger FOLDER [--all] [--json]
      show what was spent, on what, by which run
  pause FOLDER, resume FOLDER
      reply to no question; reply again
  approve FOLDER [RUN [--yes | --no]]
      list the runs that wait for approval, or show what one asks for and decide

example: fedstill site status /srv/fedstill"""

_LAST = 30
"""Number of lines of a log without --all."""


def site(words: list[str]) -> None:
    """``fedstill site``."""
    if not words or (asks_help(words) and words[0] != "init"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        raise SystemExit(0 if words else 2)
    name, *rest = words
    if name not in COMMANDS:
        raise Bad(f"there is no command 'site {name}'; choose {', '.join(COMMANDS)} (fedstill site --help)")
    COMMANDS[name](rest)


def _status(words: list[str]) -> None:
    policy, _, flags = _parse("status", words, ("--json", "--prometheus"))
    from fedstill.sites.site import evidence

    found = evidence.status(policy)
    if "--prometheus" in flags:
        print(evidence.prometheus(found), end="")
    elif "--json" in flags:
        print_json(found)
    else:
        _print_status(found)


def _print_status(found: dict[str, Any]) -> None:
    from fedstill.schema import clean
    from fedstill.sites.site.evidence import brief

    budget, health = found["budget"], found["health"]
    state = "paused" if found["paused"] else "open"
    print(f"site {found['client']}, {state}, fedstill {found['version']}")
    for part in ("log", "ledger", "data"):
        print(f"  {part}: {health[part]}")
    limit = "none, so nothing is released" if budget["epsilon"] is None else f"epsilon {budget['epsilon']:g}"
    print(f"  budget: {limit} at delta {budget['delta']:g}; {budget['releases']} releases so far")
    for unit, use in budget["spent"].items():
        print(f"  spent, per {unit}: epsilon {_number(use['epsilon'])}, {_percent(use['share'])} of the budget")
    print("  questions: " + ", ".join(f"{number} {what}" for what, number in found["questions"].items()))
    rows = [
        (run["run"][:8], str(run["method"]), str(run["last"]), str(run["asked"]), str(run["answered"]))
        + (str(run["releases"]), "; ".join(f"{_percent(use['share'])} {u}" for u, use in run["spent"].items()) or "-")
        for run in found["runs"]
    ]
    print_rows(("run", "method", "last", "asked", "answered", "releases", "of its budget"), rows[-_LAST:])
    for run in found["waiting"]:
        print(f"waits for approval since {run['time']}: {run['run']}")
    for line in (*found["running"], *found["last"]):
        facts = brief(line)
        print(clean(f"{facts['time']}  {facts['what']:<8}  {_words(facts['method'])}.{_words(facts['step'])}", 200))


def _log(words: list[str]) -> None:
    policy, rest, flags = _parse("log", words, ("--json", "--all", "--verify", "--restart", "--export"), 1)
    if ("--export" in flags) != bool(rest):
        raise Bad("--export needs a file, as --export evidence.html, and no other word follows the folder")
    from fedstill.sites.site import log

    if "--export" in flags:
        from fedstill.sites.site import evidence

        evidence.export(policy, Path(rest[0]))
        print(f"evidence: {rest[0]}")
    elif "--restart" in flags:
        print(f"the old log is in {log.restart(policy.state)}; another begins")
    elif "--verify" in flags:
        _verify(policy, as_json="--json" in flags)
    elif "--json" in flags:
        print_json({"log": log.read(policy.state)})
    else:
        lines = log.read(policy.state)
        shown = lines if "--all" in flags else lines[-_LAST:]
        rows = [
            (_words(line.get("n")), line["time"], line["what"], _words(line.get("run"))[:8])
            + (f"{_words(line.get('method'))}.{_words(line.get('step'))}", _number(line.get("epsilon")), line["detail"])
            for line in shown
        ]
        print_rows(("entry", "time", "what", "run", "step", "epsilon", "detail"), rows)
        if len(shown) < len(lines):
            print(f"and {len(lines) - len(shown)} earlier lines (--all)")


def _verify(policy: "SitePolicy", *, as_json: bool) -> None:
    from fedstill.sites.site import log

    verdict = log.verify(policy.state)
    if as_json:
        print_json({"is_whole": verdict.is_whole, **vars(verdict)})
    else:
        for sentence in verdict.notes:
            print(f"note: {sentence}")
        for sentence in verdict.problems:
            print(f"WRONG: {sentence}")
        counts = ", ".join(f"{number} {what}" for what, number in verdict.counts.items())
        print(f"log and ledger are whole and agree: {counts}" if verdict.is_whole else "something is wrong")
    if not verdict.is_whole:
        raise SystemExit(1)


def _show(words: list[str]) -> None:
    policy, rest, flags = _parse("show", words, ("--json", "--out"), 2)
    if not rest or not rest[0].isdecimal() or ("--out" in flags) != (len(rest) == 2):
        raise Bad("show needs the number of an entry in the log: fedstill site show FOLDER ENTRY [--out FOLDER]")
    from fedstill.sites.site import answer, log

    number = int(rest[0])
    line = next((line for line in log.read(policy.state) if line.get("n") == number), None)
    if line is None:
        raise Bad(f"the log has no entry {number} (fedstill site log FOLDER)")
    reply = answer.read(policy.state, line)
    found = {"entry": number, "fields": line["fields"], **answer.described(reply)}
    if len(rest) == 2:
        found["files"] = [str(place) for place in answer.write(reply, Path(rest[1]))]
    if "--json" in flags:
        print_json(found)
        return
    print(f"entry {number}, {line['time']}: {line['method']}.{line['step']}, {line['reply_bytes']:,} bytes")
    rows = [
        (name, line["fields"].get(name.partition("/")[0], "-"), facts["type"], facts["shape"], facts["values"])
        for name, facts in found["values"].items()
    ]
    print_rows(("field", "protection", "type", "shape", "values"), rows)
    for place in found.get("files", ()):
        print(place)


def _ledger(words: list[str]) -> None:
    policy, _, flags = _parse("ledger", words, ("--json", "--all"))
    from fedstill.report.spending import cost_words
    from fedstill.sites.site import evidence, log
    from fedstill.sites.site.charges import read_charges

    lines, charges = log.read(policy.state), read_charges(policy.ledger)
    runs = [run for run in evidence.runs(policy, lines, charges) if run["releases"]]
    if "--json" in flags:
        listed = [{**charge._asdict(), "entry": charge.entry.model_dump(mode="json")} for charge in charges]
        print_json({"budget": evidence.budget(policy, charges), "runs": runs, "charges": listed})
        return
    if "--all" in flags:
        rows = [
            (str(c.number), c.time or "-", c.run[:8], c.entry.step, c.entry.mechanism, c.entry.unit)
            + (cost_words(c.entry),)
            for c in charges
        ]
        print_rows(("charge", "time", "run", "step", "mechanism", "protects", "cost"), rows)
    print_rows(
        ("run", "method", "releases", "protects", "epsilon", "of its budget"),
        [
            (run["run"][:8], _words(run["method"]), str(run["releases"]), unit, _number(use["epsilon"]))
            + (_percent(use["share"]),)
            for run in runs
            for unit, use in run["spent"].items()
        ],
    )
    budget = evidence.budget(policy, charges)
    for unit, use in budget["spent"].items():
        print(f"all runs, per {unit}: epsilon {_number(use['epsilon'])}, {_percent(use['share'])} of the budget")


def _pause(words: list[str]) -> None:
    policy, _, _ = _parse("pause", words, ())
    from fedstill.sites.site import decisions

    decisions.pause(policy)
    print("paused: the site replies to no question (fedstill site resume)")


def _resume(words: list[str]) -> None:
    policy, _, _ = _parse("resume", words, ())
    from fedstill.sites.site import decisions

    decisions.resume(policy)
    print("resumed: the site replies to questions")


def _approve(words: list[str]) -> None:
    policy, rest, flags = _parse("approve", words, ("--yes", "--no"), 1)
    if {"--yes", "--no"} <= flags or (flags and not rest):
        raise Bad("name the run, and give --yes or --no: fedstill site approve FOLDER RUN --yes")
    from fedstill.sites.site import decisions

    if not rest:
        lines = decisions.list_waiting(policy)
        print("\n".join(lines) or "no run waits for approval")
        return
    request = decisions.request_of(policy, rest[0])
    print("\n".join(decisions.words(decisions.proposal(policy, request))))
    if not flags:
        if not sys.stdin.isatty():
            raise Bad("nobody can be asked here, so nothing is approved; read the above and add --yes or --no")
        yes = input("Approve this run? [y/N] ").strip().lower() in ("y", "yes")
    else:
        yes = "--yes" in flags
    decisions.decide(policy, request["run"], yes=yes)
    print("approved" if yes else "not approved; the site does not answer this run")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "init": init,
    "check": check,
    "serve": serve,
    "join": join,
    "rekey": rekey,
    "status": _status,
    "log": _log,
    "show": _show,
    "ledger": _ledger,
    "pause": _pause,
    "resume": _resume,
    "approve": _approve,
}


def _parse(
    command: str, words: Sequence[str], known: Sequence[str], most: int = 0
) -> "tuple[Any, list[str], set[str]]":
    """The policy in the folder that comes first, further words, at most ``most``, and the flags."""
    flags = {word for word in words if word.startswith("-")}
    folder, *rest = [word for word in words if word not in flags] or [""]
    if unknown := sorted(flags - set(known)):
        raise Bad(f"there is no flag {unknown[0]}; site {command} takes {', '.join(known) or 'none'}")
    if not folder:
        raise Bad(f"the site's folder comes first: fedstill site {command} FOLDER")
    if len(rest) > most:
        raise Bad(f"'{rest[most]}' is an unexpected argument (fedstill site --help)")
    from fedstill.sites.site.policy import SitePolicy

    return SitePolicy.read(Path(folder) / "policy.toml"), rest, flags


def _words(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(epsilon: float | None) -> str:
    from fedstill.report.guarantees import round_up

    return "-" if epsilon is None else round_up(epsilon)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
