"""Pages in a real browser, in a frame of any width, as a window of Chromium is never narrower than 500 pixels."""

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs the browser chromium")
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}

WATCH = """<script>
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => faults.push(event.violatedDirective));
</script>"""
"""For the head of a page: collects its errors."""

MEASURE = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const all = (selector) => [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility());
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], back) => [r, g, b].map((value, i) => a * value + (1 - a) * back[i]);
function luminance(colour) {
  const [r, g, b] = colour.map((v) => v / 255).map((s) => s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(numbers(getComputedStyle(e).backgroundColor));
  return layers.reduceRight((back, layer) => over(layer, back), [255, 255, 255]);
}
function contrast(element) {
  const style = getComputedStyle(element), back = behind(element);
  const [r, g, b, a = 1] = numbers(element.closest("svg") ? style.fill : style.color);
  let seen = a;
  for (let e = element; e; e = e.parentElement) seen *= getComputedStyle(e).opacity;
  const [low, high] = [luminance(over([r, g, b, seen], back)), luminance(back)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}
const brief = (elements) => elements.map((e) => e.outerHTML.slice(0, 90));
function measured() {  // of all texts, once everything is unfolded
  for (const details of document.querySelectorAll("details")) details.open = true;
  const root = document.documentElement, report = { faults, width: root.clientWidth };
  report.spare = root.clientWidth - root.scrollWidth;
  report.outside = brief(all("body *").filter((e) => !e.closest(".scroll, svg, .plot")
    && e.getBoundingClientRect().right > root.clientWidth + 1));
  report.cut = brief(all("svg text").filter((e) => {
    const own = e.getBoundingClientRect(), box = e.ownerSVGElement.getBoundingClientRect();
    return own.left < box.left - 1 || own.right > box.right + 1 || own.bottom > box.bottom + 1;
  }));
  report.tiny = brief(all("svg text").filter((e) => e.textContent && e.getBoundingClientRect().height < 10));
  const texts = all("body *").filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  report.low = brief(texts.filter((e) => contrast(e) < 4.5));
  report.texts = texts.length;
  const reach = all("a[href], button, input, summary, [tabindex='0']");
  report.reach = reach.length;
  report.lost = brief(reach.filter((e) => {
    e.focus();
    return document.activeElement !== e || getComputedStyle(e.closest(".modebar") ?? e).opacity < 1;
  }));
  report.unnamed = brief(reach.filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)));
  document.activeElement.blur();
  report.background = getComputedStyle(document.body).backgroundColor;
  return report;
}
"""
"""For a script of a page: what is too wide, too faint (AA), out of the keyboard's reach or without a name."""

FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<body><iframe src="{page}" width="{width}" height="900" style="border: 0"></iframe><script>
addEventListener("message", (event) => document.body.textContent = JSON.stringify(event.data));</script>"""


def script(body: str) -> str:
    """A script for the end of a page: ``body``, which makes a ``report`` by ``measured()``, and its way to `posted`."""
    return f'<script>{MEASURE}\n(async () => {{\n{body}\n  parent.postMessage(report, "*");\n}})();</script>'


def browse(url: str, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A page's document after ten seconds of its own time, and the console."""
    assert CHROMIUM is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    words += [f"--user-data-dir={profile}", "--window-size=1400,1000", "--virtual-time-budget=20000"]
    words += ["--enable-logging=stderr", *flags, "--dump-dom", url]
    return subprocess.run([CHROMIUM, *words], capture_output=True, text=True, timeout=300, check=True)


def posted(folder: Path, place: str, page: str, width: int, look: str) -> dict[str, Any]:
    """The object that ``page`` posts to its parent, a frame of ``width`` pixels.

    Args:
        folder: the folder of the page, and of the frame's file.
        place: the URL of this folder.
        page: the name of the page, whose script ends in ``parent.postMessage(report, "*")``.
        width: the width of the frame in pixels.
        look: the reader's preference, light or dark.
    """
    (folder / "frame.html").write_text(FRAME.format(page=page, width=width), "utf-8")
    flag = f"--blink-settings=preferredColorScheme={int(look == 'light')}"
    shown = browse(f"{place}/frame.html", folder / "profile", flag)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    body = unescape(shown.stdout.partition("<body>")[2].partition("</body>")[0])
    report: dict[str, Any] = json.loads(body)
    return report


def check(report: dict[str, Any], width: int, look: str) -> None:
    """Nothing is wider than the window, every text is readable, and the keyboard reaches what a pointer reaches."""
    assert report["faults"] == []
    assert report["background"] == BACKGROUNDS[look]
    assert report["width"] in range(width - 20, width + 1)  # a scroll bar takes some
    assert (report["spare"], report["outside"], report["cut"], report["tiny"]) == (0, [], [], []), report
    assert (report["low"], report["texts"] > 15) == ([], True)
    assert (report["lost"], report["unnamed"], report["reach"] > 3) == ([], [], True)
