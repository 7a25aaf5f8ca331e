"""The page of ``fedstill watch`` in a real browser: no error, nothing wider than the window, keyboard, contrast."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from report_pages import write_run
from typing_extensions import override

from fedstill.report.html import asset
from fedstill.report.live_page import LivePage, states
from fedstill.runs.folder import RunFolder

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs the browser chromium")]

ASK = """<script>
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
const all = (selector) => [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility());
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
function luminance(colour) {
  const [r, g, b] = numbers(colour).map((v) => v / 255).map((s) => s <= 0.04045 ? s / 12.92
    : ((s + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor, parts = numbers(colour);
    if (parts.length === 3 || parts[3] > 0) return colour;
  }
  return "rgb(255, 255, 255)";
}
function contrast(element) {
  const style = getComputedStyle(element), colour = element.closest("svg") ? style.fill : style.color;
  const [low, high] = [luminance(colour), luminance(behind(element))].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
setTimeout(() => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const root = document.documentElement, report = { faults };
  const texts = all("body *").filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  report.low = texts.filter((e) => contrast(e) < 4.5).map((e) => e.outerHTML.slice(0, 90));
  report.texts = texts.length;
  report.width = root.clientWidth;
  report.spare = root.clientWidth - root.scrollWidth;
  report.outside = all("body *").filter((e) => !e.closest(".scroll, svg")
    && e.getBoundingClientRect().right > root.clientWidth + 1).map((e) => e.outerHTML.slice(0, 90));
  const reach = all("button, summary, [tabindex='0']");
  report.reached = reach.filter((e) => { e.focus(); return document.activeElement === e; }).length;
  report.unnamed = reach.filter((e) => !(e.textContent.trim() || e.ariaLabel)).length;
  report.reach = reach.length;
  report.background = getComputedStyle(document.body).backgroundColor;
  document.querySelector("nav button").click();
  setTimeout(() => {
    report.label = document.querySelector("#label").textContent;
    report.state = document.querySelector("#state").textContent;
    report.progress = [...document.querySelectorAll("progress")].map((p) => [p.value, p.max]);
    root.setAttribute("data-report", JSON.stringify(report));
  }, 1500);
}, 2500);
</script>"""


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
    RunFolder(folder / "a-finished").append_metrics({"round": 2, "accuracy": 0.92})
    return folder


@pytest.fixture
def url(place: Path, tmp_path: Path) -> Iterator[str]:
    site = tmp_path / "site"
    site.mkdir()
    for name in ("page.css", "watch.css", "watch.js"):
        (site / name).write_text(asset(name))
    (site / "index.html").write_text(asset("watch.html").replace("</head>", f"{ASK}</head>"))
    (site / "state.json").write_text(json.dumps({"folder": str(place), "runs": states(place, {})}))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def browse(url: str, profile: Path, width: int, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    words += [f"--user-data-dir={profile}", f"--window-size={width},1000", "--virtual-time-budget=10000"]
    words += ["--enable-logging=stderr", *flags, "--dump-dom", url]
    return subprocess.run([CHROMIUM, *words], capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_is_readable_and_is_reached_by_keyboard(width: int, look: str, url: str, tmp_path: Path) -> None:
    flag = f"--blink-settings=preferredColorScheme={int(look == 'light')}"
    shown = browse(url, tmp_path / "profile", width, flag)
    found = re.search(r'data-report="([^"]*)"', shown.stdout)
    assert found is not None, shown.stdout[-2000:]
    report = json.loads(unescape(found[1]))
    assert report["faults"] == [] and "CONSOLE" not in shown.stderr
    assert report["background"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[look]
    assert (report["low"], report["texts"] > 15) == ([], True)
    assert report["width"] in range(width - 20, width + 1)  # a scroll bar takes some
    assert (report["spare"], report["outside"]) == (0, [])
    assert (report["reach"], report["reached"], report["unnamed"]) == (4, 4, 0)
    assert (report["label"], report["state"]) == ("<img src=x onerror=alert(1)>", "finished")


def test_the_real_server_s_policy_lets_the_page_work(place: Path, tmp_path: Path) -> None:
    with LivePage(place) as page:
        shown = browse(page.url, tmp_path / "profile", 800)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert "Read from the run" in shown.stdout and ">finished<" in shown.stdout
