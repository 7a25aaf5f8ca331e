"""The page of ``fedstill watch`` in a real browser: no error, nothing wider than the window, keyboard, contrast."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import WATCH, browse, check, needs_browser, posted, script
from report_pages import write_run
from typing_extensions import override

from fedstill.report.live_page import LivePage, states
from fedstill.report.markup import asset
from fedstill.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, needs_browser]
ASK = script("""
  await wait(2500);
  document.querySelector("nav button").click();
  await wait(1500);
  const report = measured();
  report.label = document.querySelector("#label").textContent;
  report.facts = document.querySelector("#facts").textContent;
  report.state = document.querySelector("#state").textContent;
  report.progress = [...document.querySelectorAll("progress")].map((p) => [p.value, p.max]);
""")


class Quiet(SimpleHTTPRequestHandler):
    """Serves the page's files with the script of the test in them."""

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A finished run, an interrupted one, and names that are long or would be markup."""
    folder = tmp_path / "runs"
    write_run(folder / "a-finished", label="<img src=x onerror=alert(1)>", accuracy=0.91)
    write_run(folder / ("b-" + "long-" * 30), label="long-" * 30, accuracy=0.5)
    for round, accuracy in ((1, 0.12), (2, 0.92)):
        RunFolder(folder / "a-finished").append_metrics({"round": round, "accuracy": accuracy})
    return folder


@pytest.fixture
def url(place: Path, tmp_path: Path) -> Iterator[str]:
    site = tmp_path / "site"
    site.mkdir()
    for name in ("page.css", "watch.css", "watch.js"):
        (site / name).write_text(asset(name))
    page = asset("watch.html").replace("<head>", f"<head>{WATCH}").replace("</body>", f"{ASK}</body>")
    (site / "index.html").write_text(page)
    (site / "state.json").write_text(json.dumps({"folder": str(place), "runs": states(place, {})}))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_is_readable_and_is_reached_by_keyboard(width: int, look: str, url: str, tmp_path: Path) -> None:
    report = posted(tmp_path / "site", url, "index.html", width, look)
    check(report, width, look)
    assert report["reach"] == 4
    assert "left outnone" in report["facts"]
    assert (report["label"], report["state"]) == ("<img src=x onerror=alert(1)>", "finished")


def test_the_real_server_s_policy_lets_the_page_work(place: Path, tmp_path: Path) -> None:
    with LivePage(place) as page:
        shown = browse(page.url, tmp_path / "profile")
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert "Read from the run" in shown.stdout and ">finished<" in shown.stdout
