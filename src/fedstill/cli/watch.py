"""``fedstill watch``."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.common import print_json

if TYPE_CHECKING:
    from fedstill.cli.flags import Watching


def watch(words: list[str]) -> None:
    """``fedstill watch``."""
    from fedstill.cli import flags

    about = (
        "Follow a run, or all runs of a comparison, on a page of this machine: rounds, clients that answered, bytes, "
        "epsilon and time left. The page only reads, and no other machine can open it.\n\n"
        "Example: fedstill watch runs/fedavg-digits-0"
    )
    if (found := flags.of_run("fedstill watch", about, words, flags.Watching())) is None:
        return
    run, chosen, form = found
    from fedstill.report.live_page import document

    if form.json_:
        print_json(document(run, {}))
    else:
        _serve(run, chosen)


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
