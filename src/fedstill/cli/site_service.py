"""``fedstill site init | check | join | rekey | serve``: the commands that set up a site and run it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstill.cli import parser
from fedstill.cli.common import Bad, asks_help, no_more, print_json
from fedstill.cli.declared import declared
from fedstill.cli.parser import Section
from fedstill.settings import Settings


class _Invite(Settings):
    """The invitation of ``fedstill site init``."""

    invite: Path | None = None
    """Invitation file of the server (fedstill server invite)."""


def init(words: list[str]) -> None:
    """``fedstill site init``."""
    about = (
        "Make a site's folder: its policy, its ledger, its key, and a unit of systemd. It reads the data once, and "
        "says in plain words what the policy lets out.\n\nExample: fedstill site init hospital --invite site-0.toml "
        "--data images --methods fedavg-p --budget 4"
    )
    base = _policy(words)
    sections = [
        Section(_Invite(), title="server"),
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
    from fedstill.sites import invitation, promises, setup, units

    if (folder / setup.POLICY).exists():
        raise Bad(f"{folder} is a site already; edit its {setup.POLICY}, or choose another folder")

    units.check_folder(folder.resolve())
    invite = invitation.read(invited.invite)
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
    warnings = list(promises.check(policy))
    setup.site(folder, {name: value for name, value in settings.items() if value != {}})
    key = setup.join(folder, invited.invite)
    folder.chmod(0o700)
    print(f"client {invite.client} of {invite.address}, invitation {invitation.fingerprint(invited.invite)}")
    _say(policy, warnings)
    print(f"send this public key ({folder / 'site.key.pub'}) to the server, for 'fedstill server accept':\n{key}")
    print(f"then: fedstill site serve {words[0]}, or as a service: see {folder / units.SITE}")


def check(words: list[str]) -> None:
    """``fedstill site check``."""
    folder, as_json = _folder(words), words[1:] == ["--json"]
    no_more([] if as_json else words[1:])
    from fedstill.sites import promises, setup, verify
    from fedstill.sites.policy import SitePolicy

    policy = SitePolicy.read(folder / setup.POLICY)
    for problem in verify.verify(policy.state).problems[:1]:
        raise Bad(problem)
    warnings = list(promises.check(policy))
    if as_json:
        print_json({"client": policy.client, "leaves": list(promises.words(policy)), "warnings": warnings})
    else:
        _say(policy, warnings)


def join(words: list[str]) -> None:
    """``fedstill site join``."""
    folder = _folder(words)
    (flags,) = parser.parse("fedstill site join FOLDER", "", words[1:], [Section(_Invite())])
    if flags.invite is None:
        raise Bad("--invite is missing; give the file that the server's operator sent (fedstill server invite)")
    from fedstill.sites import invitation, setup

    key = setup.join(folder, flags.invite)
    print(f"the server is {invitation.read(flags.invite).address}, invitation {invitation.fingerprint(flags.invite)}")
    print(f"the site's public key is\n{key}\nstart the site again")


def rekey(words: list[str]) -> None:
    """``fedstill site rekey``."""
    no_more(words[1:])
    from fedstill.sites import setup

    key = setup.rekey(_folder(words))
    print("send this public key to the server, for 'fedstill server accept --replace', then start the site again:")
    print(key)


def serve(words: list[str]) -> None:
    """``fedstill site serve``; further words are options of ``flower-supernode``."""
    from fedstill.sites import node

    raise SystemExit(node.serve(_folder(words), words[1:]))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "init": init,
    "check": check,
    "join": join,
    "rekey": rekey,
    "serve": serve,
}


def _folder(words: Sequence[str]) -> Path:
    if not words or words[0].startswith("-"):
        raise Bad("the site's folder comes first: fedstill site COMMAND FOLDER (fedstill site --help)")
    return Path(words[0])


def _say(policy: Any, warnings: Sequence[str]) -> None:
    from fedstill.sites import promises

    print("what leaves this site:")
    for line in promises.words(policy):
        print(f"  {line}")
    for warning in warnings:
        print(f"warning: {warning}")


def _policy(words: Sequence[str]) -> Any:
    required = {"client": 0, "data": Path("data"), "state": Path("state"), "methods": ("none",)}
    if asks_help(words) or not words:
        with suppress(LookupError):
            return declared("fedstill.sites.policy:SitePolicy")(**required)
    from fedstill.sites.policy import SitePolicy

    return SitePolicy(**required)
