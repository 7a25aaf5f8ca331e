"""``fedstill site``: what the operator of a real site sees and decides."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.base.files import expanded
from fedstill.cli.command import FORM, Command, Part
from fedstill.cli.output import Bad, asks_help, print_json, print_wide, table

if TYPE_CHECKING:  # `fedstill --help` imports nothing heavy
    from fedstill.cli.flags import Approval, Format, Founding, Invite, Ledger, Log, Sent, Status
    from fedstill.sites.site.policy import SitePolicy


_UNSET = {"client": 0, "state": Path("state")}
"""Values of the policy's settings that have no default."""


PRESETS: dict[str, dict[str, Any]] = {
    "study": {},
    "open": {"unprotected": True, "min_records": 1},
    "strict": {
        "approval": "ask",
        "min_epsilon": 1e-2,
        "max_releases": 1000,
        "max_failures_ever": 10,
        "runs_per_day": 10,
        "refusals_per_day": 200,
        "reply_seconds": 60.0,
    },
}
"""Settings of a policy by the name of a preset."""


def init(words: list[str], invited: "Founding", parsed: "SitePolicy") -> None:
    """``fedstill site init``."""
    invitation = _invitation(invited)
    if parsed.data is None and not parsed.helper:
        raise Bad(
            "--data is missing; give the file or folder of records (a mere helper of masked sums has none: --helper)"
        )
    if not parsed.methods and parsed.data is not None:
        raise Bad("--methods is empty; name the allowed methods or steps, as --methods fedavg-p fedgm.distil")
    if parsed.data is not None and not expanded(parsed.data).exists():
        raise Bad(f"--data is {str(parsed.data)!r}, which does not exist; give the file or folder of records")
    from fedstill.sites import units
    from fedstill.sites.server import roster
    from fedstill.sites.site import policy as policies
    from fedstill.sites.site import setup

    folder = Path(words[0])
    if (folder / setup.POLICY).exists():
        raise Bad(f"{folder} is a site already; edit its {setup.POLICY}, or choose another folder")

    units.check_folder(folder.resolve())
    invite = roster.read_invitation(invitation)
    settings = {**PRESETS[invited.preset], **_changes(parsed), "client": invite.client, "state": parsed.state}
    policy = setup.read_settings({**settings, "state": folder.resolve() / expanded(parsed.state)})
    units.check_folder(policy.state)
    settings |= {} if policy.classes or policy.data is None else {"classes": policies.class_names(policy)}
    policy = policy.model_copy(update={"classes": settings.get("classes", policy.classes)})
    warnings = list(policies.check(policy))
    setup.site(folder, {name: value for name, value in settings.items() if value != {}})
    key = setup.join(folder, invitation)
    folder.chmod(0o700)
    print(f"client {invite.client} of {invite.address}, invitation {roster.fingerprint(invitation)}")
    if sentence := units.of_root("this site"):
        print(sentence, file=sys.stderr)
    _say(policy, warnings)
    _say_prints(_policy(words))
    print(f"send this public key ({folder / 'site.key.pub'}) to the server, for 'fedstill server accept':\n{key}")
    print(f"then: fedstill site serve {words[0]}, or as a service: see {folder / units.SITE}")


def _invitation(invited: "Invite") -> Path:
    if invited.invite is None:
        raise Bad("--invite is missing; give the file that the server's operator sent (fedstill server invite)")
    return invited.invite


def _changes(parsed: "SitePolicy") -> dict[str, Any]:
    """The settings of a policy that flags have changed; files by absolute paths.

    A path of the command line is relative to where the command is given, and one of the policy to the policy.
    """
    base = type(parsed)(**_UNSET)
    changed = {n: getattr(parsed, n) for n in type(parsed).model_fields if getattr(parsed, n) != getattr(base, n)}
    public = {name: expanded(place).resolve() for name, place in parsed.public.items()}
    files = {n: expanded(value).resolve() for n, value in changed.items() if isinstance(value, Path)}
    return {**changed, **files, "public": public}


def check(words: list[str], form: "Format") -> None:
    """``fedstill site check``."""
    from fedstill.sites import units
    from fedstill.sites.certificates import client_of
    from fedstill.sites.site import log, setup
    from fedstill.sites.site import policy as policies
    from fedstill.sites.site.site_sums import prints

    policy = _policy(words)
    for problem in log.verify(policy.state).problems[:1]:
        raise Bad(problem)
    place, on_cpu = Path(words[0]).resolve(), policy.device == "cpu"
    public = place / f"{setup.KEY}.pub"
    named = client_of(setup.public_key(place)) if public.exists() else None
    if named not in (None, policy.client):
        raise Bad(
            f"the policy is of client {policy.client}, but {public} was made for client {named}, and "
            f"the server takes it for no other; set client = {named} again, or make a key of {policy.client} (fedstill "
            "site rekey)"
        )
    warnings = [*policies.check(policy), *units.disagreements(place, policy.state.resolve(), on_cpu=on_cpu)]
    if form.json_:
        leaves = list(policies.words(policy))
        print_json({"client": policy.client, "leaves": leaves, "sums": prints(policy), "warnings": warnings})
    else:
        _say(policy, warnings)
        _say_prints(policy)


def join(words: list[str], invited: "Invite") -> None:
    """``fedstill site join``."""
    invitation = _invitation(invited)
    from fedstill.sites.server import roster
    from fedstill.sites.site import setup

    key = setup.join(_own(words, "join"), invitation)
    print(f"the server is {roster.read_invitation(invitation).address}, invitation {roster.fingerprint(invitation)}")
    print(f"the site's public key is\n{key}\nstart the site again")


def rekey(words: list[str]) -> None:
    """``fedstill site rekey``."""
    from fedstill.sites.site import setup

    key = setup.rekey(_own(words, "rekey"))
    print("send this public key to the server, for 'fedstill server accept --replace', then start the site again:")
    print(key)


def serve(words: list[str]) -> None:
    """``fedstill site serve``; further words are options of ``flower-supernode``."""
    if asks_help(words):
        print("usage: fedstill site serve FOLDER [OPTION ...]\n")
        print("Run the site's node, and answer the server. flower-supernode gets each OPTION.")
        return
    if not words or not words[0] or words[0].startswith("-"):
        raise Bad("the site's folder comes first: fedstill site serve FOLDER (fedstill site serve --help)")
    from fedstill.sites.site import launcher

    raise SystemExit(launcher.serve(_own(words[:1], "serve"), words[1:], partial(print, file=sys.stderr)))


def _policy(words: Sequence[str], command: str = "") -> "SitePolicy":
    """The policy of the site whose folder comes first; ``command`` is named if it writes there."""
    from fedstill.sites import units
    from fedstill.sites.site.policy import SitePolicy

    policy = SitePolicy.read(Path(words[0]) / "policy.toml")
    if command:
        units.check_owner(policy.state, f"site {command} {' '.join(words)}")
    return policy


def _own(words: Sequence[str], command: str) -> Path:
    """The site's folder, which must be this user's."""
    from fedstill.sites import units

    folder = Path(words[0])
    units.check_owner(folder, f"site {command} {' '.join(words)}")
    return folder


def _say(policy: Any, warnings: Sequence[str]) -> None:
    from fedstill.sites.site import policy as policies

    print("what leaves this site:")
    for line in policies.words(policy):
        print(f"  {line}")
    for warning in warnings:
        print(f"warning: {warning}")


def _say_prints(policy: "SitePolicy") -> None:
    from fedstill.sites.site.site_sums import prints

    own = prints(policy)
    role = f"; as a helper {own['helper']}" if policy.helper else ""
    print(f"fingerprints for other sites' policies (masked sums): as a partner {own['partner']}{role}")


_LAST = 30
"""Number of lines of a log without --all."""


def status(words: list[str], form: "Status") -> None:
    """``fedstill site status``."""
    from fedstill.sites.site import evidence

    found = evidence.status(_policy(words))
    if form.prometheus:
        print(evidence.prometheus(found), end="")
    elif form.json_:
        print_json(found)
    else:
        _print_status(found)
    if form.check and not found["health"]["is_well"]:
        raise SystemExit(1)


def _print_status(found: dict[str, Any]) -> None:
    from fedstill.schema import clean
    from fedstill.sites.site.decisions import without_budget
    from fedstill.sites.site.evidence import brief

    budget, health = found["budget"], found["health"]
    state = "paused" if found["paused"] else "open"
    print(f"site {found['client']}, {state}, fedstill {found['version']}")
    for part in ("journal", "data", "limits"):
        print(f"  {part}: {health[part]}")
    limit = f"none, so {without_budget(budget)}" if budget["epsilon"] is None else f"epsilon {budget['epsilon']:g}"
    is_whole = health["journal"] == "whole"
    releases = f"{budget['releases']} releases so far" if is_whole else "how much of it is spent is unknown"
    print(f"  budget: {limit} at delta {budget['delta']:g}; {releases}")
    if budget["fits"] is not None and is_whole:
        print(f"  one more release fits up to epsilon {budget['fits']:.3g} per record")
    for unit, use in budget["spent"].items():
        print(f"  spent, per {unit}: {_spent(use)}")
    print("  questions: " + ", ".join(f"{number} {what}" for what, number in found["questions"].items()))
    failed = found["failures"]
    what = "questions that failed or went beyond the budget, each of which may tell the server a bit"
    print(f"  {what}: {failed['number']} of {failed['limit']}")
    rows = [
        (run["run"][:8], str(run["method"]), str(run["last"]), str(run["asked"]), str(run["answered"]))
        + (str(run["releases"]), "; ".join(f"{_percent(use['share'])} {u}" for u, use in run["spent"].items()) or "-")
        for run in found["runs"]
    ]
    _print_rows(("run", "method", "last", "asked", "answered", "releases", "of its budget"), rows[-_LAST:])
    for run in found["waiting"]:
        print(f"waits for approval since {run['time']}: {run['run']}")
    for line in (*found["running"], *found["last"]):
        facts = brief(line)
        print(clean(f"{facts['time']}  {facts['what']:<8}  {_words(facts['method'])}.{_words(facts['step'])}", 200))


def show_log(words: list[str], flags: "Log") -> None:
    """``fedstill site log``."""
    from fedstill.sites.site import log

    policy = _policy(words)
    if flags.export is not None:
        from fedstill.sites.site import evidence

        evidence.export(policy, flags.export)
        print(f"evidence: {flags.export}")
    elif flags.verify:
        _verify(policy, as_json=flags.json_)
    elif flags.json_:
        print_json({"log": log.read(policy.state)})
    else:
        lines = log.read(policy.state)
        _warn_older(policy)
        shown = lines if flags.all else lines[-_LAST:]
        rows = [
            (_words(line.get("n")), line["time"], line["what"], _words(line.get("run"))[:8])
            + (f"{_words(line.get('method'))}.{_words(line.get('step'))}", _number(line.get("epsilon")), line["detail"])
            for line in shown
        ]
        _print_rows(("entry", "time", "what", "run", "step", "epsilon", "detail"), rows)
        if len(shown) < len(lines):
            print(f"and {len(lines) - len(shown)} earlier lines (--all)")


def _warn_older(policy: "SitePolicy") -> None:
    from fedstill.base.files import Damaged
    from fedstill.sites.site.state_format import check_newest

    try:
        check_newest(policy.state)
    except Damaged as error:
        print(f"warning: {error}", file=sys.stderr)


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
        print(f"the journal, with ledger and log, is whole: {counts}" if verdict.is_whole else "something is wrong")
    if not verdict.is_whole:
        raise SystemExit(1)


def show(words: list[str], flags: "Sent") -> None:
    """``fedstill site show``."""
    if not words[1].isdecimal():
        raise Bad(_ENTRY)
    from fedstill.sites.site import answer, log

    policy, number = _policy(words), int(words[1])
    line = next((line for line in log.read(policy.state) if line.get("n") == number), None)
    if line is None:
        raise Bad(f"the log has no entry {number} (fedstill site log FOLDER)")
    reply = answer.read(policy.state, line)
    found = {"entry": number, "fields": line["fields"], **answer.described(reply)}
    if flags.out is not None:
        found["files"] = [str(place) for place in answer.write(reply, flags.out)]
    if flags.json_:
        print_json(found)
        return
    print(f"entry {number}, {line['time']}: {line['method']}.{line['step']}, {line['reply_bytes']:,} bytes")
    rows = [
        (name, line["fields"].get(name.partition("/")[0], "-"), facts["type"], facts["shape"], facts["values"])
        for name, facts in found["values"].items()
    ]
    _print_rows(("field", "protection", "type", "shape", "values"), rows)
    for place in found.get("files", ()):
        print(place)


def ledger(words: list[str], flags: "Ledger") -> None:
    """``fedstill site ledger``."""
    from fedstill.report.spending import cost_words
    from fedstill.sites.site import evidence

    policy = _policy(words)
    lines, charges, found = evidence.read(policy)
    runs = [run for run in evidence.runs(policy, lines, charges) if run["releases"]]
    budget = evidence.budget(policy, found)
    if flags.json_:
        listed = [{**charge._asdict(), "entry": charge.entry.model_dump(mode="json")} for charge in charges]
        print_json({"budget": budget, "runs": runs, "charges": listed})
        return
    if flags.all:
        rows = [
            (str(c.number), c.time or "-", c.run[:8], c.entry.step, c.entry.mechanism, c.entry.unit)
            + (cost_words(c.entry),)
            for c in charges
        ]
        _print_rows(("charge", "time", "run", "step", "mechanism", "protects", "cost"), rows)
    _print_rows(
        ("run", "method", "releases", "protects", "epsilon", "of its budget"),
        [
            (run["run"][:8], _words(run["method"]), str(run["releases"]), unit, _number(use["epsilon"], "unbounded"))
            + (_percent(use["share"]),)
            for run in runs
            for unit, use in run["spent"].items()
        ],
    )
    for unit, use in budget["spent"].items():
        print(f"all runs, per {unit}: {_spent(use)}")


def pause(words: list[str]) -> None:
    """``fedstill site pause``."""
    from fedstill.sites.site import decisions

    decisions.pause(_policy(words, "pause"))
    print("paused: the site replies to no question (fedstill site resume)")


def resume(words: list[str]) -> None:
    """``fedstill site resume``."""
    from fedstill.sites.site import decisions

    decisions.resume(_policy(words, "resume"))
    print("resumed: the site replies to questions")


def approve(words: list[str], given: "Approval") -> None:
    """``fedstill site approve``."""
    folder, *run = words
    if (given.yes and given.no) or ((given.yes or given.no) and not run):
        raise Bad("name the run, and give --yes or --no: fedstill site approve FOLDER RUN --yes")
    from fedstill.sites.site import decisions

    policy = _policy(words, "approve" if run else "")
    if not run:
        print("\n".join(decisions.list_waiting(policy)) or "no run waits for approval")
        return
    request = decisions.request_of(policy, run[0])
    print("\n".join(decisions.words(decisions.proposal(policy, request))))
    yes = given.yes
    if not (given.yes or given.no):
        if not sys.stdin.isatty():
            raise Bad("nobody can be asked here, so nothing is approved; read the above and add --yes or --no")
        yes = input("Approve this run? [y/N] ").strip().lower() in ("y", "yes")
    decisions.decide(policy, request["run"], yes=yes)
    print("approved" if yes else "not approved; the site does not answer this run")


def _print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, unless it has no rows; words of a server are among its cells."""
    from fedstill.schema import clean

    if rows:
        print_wide(table(heads, ([clean(cell, 300) for cell in row] for row in rows)))


def _words(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(epsilon: float | None, without: str = "-") -> str:
    from fedstill.report.guarantees import round_up

    return without if epsilon is None else round_up(epsilon)


def _spent(use: Mapping[str, Any]) -> str:
    """Words on what a unit has spent: of releases without noise no epsilon bounds it."""
    of_budget = "" if use["share"] is None else f", {_percent(use['share'])} of the budget"
    return f"epsilon {_number(use['epsilon'], 'unbounded, as a release had no noise')}{of_budget}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


_INIT = (
    "Make a site's folder: its policy, its ledger, its key, and a unit of systemd. It reads the data once, and says in "
    "plain words what the policy lets out.\n\nExample: fedstill site init hospital --invite site-0.toml --data images "
    "--methods fedavg-p --budget 4"
)
_ENTRY = "show needs the number of an entry in the log: fedstill site show FOLDER ENTRY [--out FOLDER]"
_SETTINGS = Part("fedstill.sites.site.policy:SitePolicy", "settings of the policy", values=_UNSET, without=("client",))
COMMANDS: dict[str, Command] = {
    "init": Command(init, "FOLDER", _INIT, (Part("Founding", "server"), _SETTINGS)),
    "check": Command(check, "FOLDER", "Say what the policy lets out, after a change of it.", (FORM,)),
    "serve": Command(serve, "FOLDER", "Run the site's node, and answer the server.", raw=True),
    "join": Command(join, "FOLDER", "Take a server's new invitation.", ("Invite",)),
    "rekey": Command(rekey, "FOLDER", "Make another key."),
    "status": Command(status, "FOLDER", "Show budget, runs, questions, waiting runs and health.", ("Status",)),
    "log": Command(show_log, "FOLDER", "Show the last questions and outcomes; check or export all.", ("Log",)),
    "show": Command(show, "FOLDER ENTRY", "Show what was sent in an entry of the log.", ("Sent",), _ENTRY),
    "ledger": Command(ledger, "FOLDER", "Show what was spent, on what, by which run.", ("Ledger",)),
    "pause": Command(pause, "FOLDER", "Reply to no question."),
    "resume": Command(resume, "FOLDER", "Reply to questions again."),
    "approve": Command(
        approve, "FOLDER [RUN]", "List the runs that wait for approval, or decide on one.", ("Approval",)
    ),
}
SITE = Command(
    about="Set up, run, show and govern a real site. FOLDER is the site's folder, with its policy.toml.\n\n"
    "Example: fedstill site status /srv/fedstill",
    below=COMMANDS,
)
