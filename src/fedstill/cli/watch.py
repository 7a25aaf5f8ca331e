"""``fedstill watch``."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.common import Bad, print_json, usage

if TYPE_CHECKING:
    from fedstill.cli.flags import Watching


def watch(words: list[str]) -> None:
    """``fedstill watch``."""
    from fedstill.cli import flags, parser

    about = (
        "Follow a run, or all runs of a comparison, on a page of this machine: rounds, clients that answered, bytes, "
        "epsilon and time left. The page only reads, and no other machine can open it.\n\n"
        "Example: fedstill watch runs/fedavg-digits-0"
    )
    sections = [parser.Section(flags.Watching()), parser.Section(flags.Format())]
    text = f"usage: fedstill watch RUN [flags]\n\n{about}\n" + parser.flags_text("fedstill watch", sections)
    if usage(words, text):
        return
    if words[0].startswith("-"):
        raise Bad(f"the run comes first: fedstill watch RUN {' '.join(words)}")
    chosen, form = parser.parse("fedstill watch RUN", about, words[1:], sections)
    from fedstill.report.live_page import states

    if form.json_:
        print_json(states(Path(words[0]), {}))
    else:
        _serve(Path(words[0]), chosen)


def _serve(place: Path, chosen: "Watching") -> None:
    from fedstill.report.live_page import LivePage

    with LivePage(place, chosen.port) as page:
        try:
            print(f"{place}: {page.url} (Ctrl-C ends the page, not the run)", flush=True)
            if chosen.browser:
                import webbrowser

                webbrowser.open(page.url)
            threading.Event().wait()
        except KeyboardInterrupt:
            print()
