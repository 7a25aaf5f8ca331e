"""Run folders as a run writes them, and the report's page as a test reads it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.report.groups import Group, group
from fedstill.report.page import write_report
from fedstill.report.record import RunRecord

NONE = {
    "holds": False,
    "adjacency": None,
    "accountant": None,
    "simulated": False,
    "unit": None,
    "epsilon": None,
    "delta": None,
    "adversary": None,
    "reason": "`x` is not released",
}
PRIVATE = {
    "holds": True,
    "unit": "record",
    "epsilon": 1.0,
    "delta": 1e-5,
    "adversary": "the server",
    "reason": "PLD",
    "adjacency": "one record",
    "accountant": "PLD",
    "simulated": False,
}


def write_run(folder: Path, *, label: str = "fedgm", seed: int = 0, setting: Any = None, **summary: Any) -> Path:
    """A run folder with the two files that every run has."""
    content = {
        "method": "fedgm",
        "label": label,
        "data": "digits",
        "partition": "iid",
        "clients": 2,
        "rounds": 1,
        "seed": seed,
        "accuracy": 0.9,
        "bytes_up": 2000,
        "bytes_down": 6000,
        "bytes_up_per_client": 1000,
        "bytes_down_per_client": 3000,
        "seconds": 1.5,
        "guarantee": NONE,
        "refused": [],
        **summary,
    }
    experiment = {key: content[key] for key in ("data", "partition", "clients", "seed")}
    method = {"name": content["method"], **(setting or {})}
    command = f"fedstill run {label} --seed {seed}"
    config = {"experiment": experiment, "method": method, "label": label, "command": command}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps(content))
    return folder


def add_parts(folder: Path, *, names: tuple[str, ...] = ("cat", "dog"), clients: int = 2, rounds: int = 2) -> Path:
    """All the files a run may have, for two classes and images of 4 x 6 pixels."""
    counts = [[i + 1, 0] for i in range(clients)]
    (folder / "partition.json").write_text(json.dumps({"class_names": names, "counts": counts}))
    (folder / "evaluation.json").write_text(json.dumps({"confusion": [[3, 1], [0, 4]]}))
    lines = [
        {"round": r, "accuracy": 0.4 * r, "bytes_up": 1000 * r, "bytes_down": 3000 * r} for r in range(1, rounds + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "images").mkdir()
    for name, channels in (("synthetic", 3), ("real", 1)):
        images = np.full((4, channels, 4, 6), 7, dtype=np.uint8)
        np.savez(folder / "images" / f"{name}.npz", images=images, labels=np.array([0, 0, 0, 1]))
    return folder


def page(records: list[RunRecord], folder: Path, command: str | None = None) -> str:
    """The report."""
    write_report(records, folder / "report.html", command=command)
    return (folder / "report.html").read_text("utf-8")


def only_task(records: list[RunRecord]) -> Group:
    """The one task of these runs."""
    (task,) = group(records)
    return task


class Outline(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.drawn: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] and self.tags[-1][0] in ("text", "title", "svg"):
            self.drawn.append(data)
        elif self.tags[-1:] and self.tags[-1][0] not in ("script", "style"):
            self.words += data

    def headings(self) -> int:
        return sum(tag == "h2" for tag, _ in self.tags)
