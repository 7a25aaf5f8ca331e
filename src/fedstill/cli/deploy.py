"""``fedstill deploy``."""

import signal
import sys
from pathlib import Path

from fedstill.cli.common import Bad, asks_help, no_more, terminal, usage

USAGE = """usage: fedstill deploy check [FOLDER]

Try a server and two sites on this machine, over TLS, in an empty folder or a
temporary one. 'fedstill server' and 'fedstill site' set up real ones.

example: fedstill deploy check"""


def _stop(number: int, _: object) -> None:
    """Leave the check so that it ends what it has started, as after Ctrl-C."""
    raise SystemExit(128 + number)


def deployment(words: list[str]) -> None:
    """``fedstill deploy``."""
    if not words or asks_help(words):
        usage(words and ["--help"], USAGE)
        return
    if words[0] != "check":
        raise Bad(f"there is no command 'deploy {words[0]}'; fedstill server --help, fedstill site --help")
    no_more(words[2:])
    if unknown := [word for word in words[1:] if word.startswith("-")]:
        raise Bad(f"there is no flag {unknown[0]}; deploy check takes only an empty folder")
    from fedstill.sites import check

    console = terminal()
    for number in (signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ())):
        signal.signal(number, _stop)
    try:
        for line in check.check(Path(words[1]) if words[1:] else None):
            console.print(line, soft_wrap=True, highlight=False)
    except RuntimeError as error:
        print(f"fedstill: {error}", file=sys.stderr)
        raise SystemExit(1) from None
