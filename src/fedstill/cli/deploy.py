"""``fedstill deploy``."""

import sys
from pathlib import Path

from fedstill.cli.common import Bad, no_more, terminal, usage


def deployment(words: list[str]) -> None:
    """``fedstill deploy``."""
    text = (
        "usage: fedstill deploy site FOLDER --client N --data PATH --state FOLDER --methods METHOD ... [--budget E]\n"
        "                                   make a site's policy and ledger; flags: fedstill deploy site --help\n"
        "       fedstill deploy app FOLDER  make the app folder for 'flwr run'\n"
        "       fedstill deploy check [FOLDER]\n"
        "                                   try a SuperLink and two sites on this machine (docs/deploy.md)"
    )
    if usage(words, text):
        return
    from fedstill.sites import check, setup

    if words[0] == "check":
        no_more(words[2:])
        if unknown := [word for word in words[1:] if word.startswith("-")]:
            raise Bad(f"there is no flag {unknown[0]}; deploy check takes only an empty folder")
        console = terminal()
        try:
            for line in check.check(Path(words[1]) if words[1:] else None):
                console.print(line, soft_wrap=True, highlight=False)
        except RuntimeError as error:
            print(f"fedstill: {error}", file=sys.stderr)
            raise SystemExit(1) from None
    elif words[0] == "app" and len(words) == 2 and not words[1].startswith("-"):
        print(f"app: {setup.app(Path(words[1]))}; run it with 'flwr run {words[1]} CONNECTION --run-config ...'")
    elif words[0] == "site":
        from fedstill.cli import flags

        folder, settings = flags.parse_site("fedstill deploy site", words[1:])
        setup.site(folder, settings)
        print(f"policy: {folder / 'policy.toml'}; the site reads it for each request, so you can edit it")
    else:
        raise Bad(f"'deploy {' '.join(words)}' is none of: deploy site FOLDER, deploy app FOLDER, deploy check")
