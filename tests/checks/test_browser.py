"""The report in a real browser: it fits its window, is readable and reached by keyboard, and its buttons work."""

from pathlib import Path
from typing import Any

import pytest
from browser import WATCH, check, needs_browser, posted, script
from report_pages import add_parts, write_run

from fedstill.report import pareto
from fedstill.report.page import write_page
from fedstill.report.record import read_run

pytestmark = [pytest.mark.slow, needs_browser]
ASK = script("""
  const report = measured();
  report.figures = all(".plot").length;
  report.small = brief(all(".plot").filter((e) => e.getBoundingClientRect().width < 300));
  const ways = () => all(".way").map((e) => e.dataset.way);
  report.ways = [ways()];
  document.querySelector("input[value=up]").click();
  report.ways.push(ways());
  const mark = document.querySelector("#figure-rounds-0 title").parentElement;
  mark.scrollIntoView({ block: "center" });
  const place = mark.getBoundingClientRect();
  const under = document.elementFromPoint(place.x + place.width / 2, place.y + place.height / 2);
  report.under = under && under.querySelector("title") !== null;
  const column = () => all("table.data")[0].tBodies[0].rows[0].cells[0].textContent;
  report.first = [column()];
  document.querySelector("table.data thead button").click();
  report.first.push(column());
  document.querySelector(".copy").click();
  for (let i = 0; i < 50 && document.querySelector(".copy").textContent !== "Copied"; i++) await wait(100);
  await wait(200);
  report.copy = document.querySelector(".copy").textContent;
""")


def seen(page: Path, width: int, look: str) -> dict[str, Any]:
    """What a script in the page reports, in a frame of this width."""
    text = page.read_text("utf-8").replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{ASK}</body>", 1)
    (page.parent / "inner.html").write_text(text, "utf-8")
    return posted(page.parent, page.parent.as_uri(), "inner.html", width, look)


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window_and_its_buttons_work(tmp_path: Path, width: int, look: str) -> None:
    long = {"a.setting.with.a.very.long.name.that.nobody.would.choose": 1.0, "path": "/srv/" + "long/" * 40}
    runs = []
    for i in range(12):
        label = f"method-{i}-" + "of-a-long-name-" * (i % 4)
        for seed in range(2):
            setting = long | {"lr": 10.0**-i}
            command = {"label": label, "seed": seed, "accuracy": 0.5 + i / 100, "seconds": 1.0 + i, "setting": setting}
            runs.append(add_parts(write_run(tmp_path / "runs" / f"{i}-{seed}", **command)))
        runs.append(add_parts(write_run(tmp_path / "runs" / f"{i}-b", label=label, setting=long | {"lr": 7.0 * i})))
    records = [read_run(run) for run in runs]
    write_page(records, tmp_path / "report.html", fronts=pareto.pictures(records))
    report = seen(tmp_path / "report.html", width, look)
    check(report, width, look)
    assert (report["figures"] > 5, report["small"]) == (True, [])
    assert report["ways"] == [["up and down"], ["up"]] and report["under"]
    assert report["first"][0] != report["first"][1] and report["copy"] == "Copied"
