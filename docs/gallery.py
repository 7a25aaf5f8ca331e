"""A Sphinx extension: the commands of gallery.md are run, and the page shows their reports from ``gallery/runs``."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def commands(page: str) -> list[list[str]]:
    """The commands in the fenced blocks of a page, in words."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("fedstill ")]


def run(app: Sphinx) -> None:
    """Run the commands beside the pages, before these are written: a build that is stopped leaves no half site.

    Finished runs of an earlier build stay as they are.
    """
    if app.builder.name != "html":
        return
    text = (Path(app.srcdir) / "gallery.md").read_text("utf-8")
    folder = Path(app.outdir) / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    for words in commands(text):
        print(f"gallery: fedstill {' '.join(words)}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "fedstill", *words], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ExtensionError(f"gallery.md: fedstill {' '.join(words)} failed: {done.stderr.strip()[-500:]}")
    shown = re.findall(r'<iframe src="([^"#]+)', text)
    if lost := [place for place in shown if not (Path(app.outdir) / place).is_file()]:
        raise ExtensionError(f"gallery.md: no command has written {lost[0]}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("builder-inited", run)
    return {"parallel_read_safe": True}
