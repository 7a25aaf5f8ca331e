"""A Sphinx extension: the commands of gallery.md are run, and the page shows their reports from ``gallery/runs``."""

import re
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from fedstill.cli import main


def commands(page: str) -> list[list[str]]:
    """The commands in the fenced blocks of a page, in words."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("fedstill ")]


def run(app: Sphinx) -> None:
    """Run the commands beside the pages, before these are written: a build that is stopped leaves no half site.

    They run in this process, which imports torch once. Finished runs of an earlier build stay as they are.
    """
    if app.builder.name != "html":
        return
    text = (Path(app.srcdir) / "gallery.md").read_text("utf-8")
    folder = Path(app.outdir) / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    for words in commands(text):
        print(f"gallery: fedstill {' '.join(words)}", file=sys.stderr, flush=True)
        said, places = StringIO(), [*sys.path]
        try:
            with chdir(folder), redirect_stdout(said), redirect_stderr(said):
                main(words)
        except SystemExit as end:
            failed = f"gallery.md: fedstill {' '.join(words)} failed: {said.getvalue().strip()[-500:]}"
            if end.code:
                raise ExtensionError(failed) from None
        finally:
            sys.path[:] = places  # without the folder, where the command looks for code
    shown = re.findall(r'<iframe src="([^"#]+)', text)
    if lost := [place for place in shown if not (Path(app.outdir) / place).is_file()]:
        raise ExtensionError(f"gallery.md: no command has written {lost[0]}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("builder-inited", run)
    return {"parallel_read_safe": True}
