"""Sample images for the report: one table per task, with a strip of images for each class and kind."""

from collections.abc import Sequence
from html import escape

import numpy as np

from fedstill.report.picture import TEST, png
from fedstill.report.record import RunRecord
from fedstill.report.tasks import Row
from fedstill.runs.folder import Images

IMAGES_PER_CLASS = 5
MOST_CLASSES = 20


def sheet(rows: Sequence[Row]) -> str:
    """An HTML table of the images of each row's first run that has any, beside test images; empty without images."""
    chosen = [(row, next((run for run in row.runs if set(run.images or ()) - {TEST}), None)) for row in rows]
    shown = [(row, run) for row, run in chosen if run is not None]
    if not shown:
        return ""
    columns: dict[str, tuple[Images, RunRecord]] = {}
    for row, run in shown:
        own = {kind: pair for kind, pair in (run.images or {}).items() if kind != TEST}
        columns |= {row.name if len(own) == 1 else f"{row.name}: {kind}": (pair, run) for kind, pair in own.items()}
    record = shown[0][1]
    if test := (record.images or {}).get(TEST):
        columns[record.summary["judged_on"]] = (test, record)
    return _table(columns, record)


def _table(columns: dict[str, tuple[Images, RunRecord]], record: RunRecord) -> str:
    labels = sorted({int(label) for (_, values), _ in columns.values() for label in values})
    slots = {name: _slots(pair) for name, (pair, _) in columns.items()}
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = ""
    for label in labels[:MOST_CLASSES]:
        name = record.class_name(label)
        body += f'<tr><th scope="row">{escape(name)}</th>'
        for column, (pair, _) in columns.items():
            body += f"<td>{_strip(pair, label, slots[column], f'class {name}: {column}')}</td>"
        body += "</tr>\n"
    seeds = ", ".join(str(seed) for seed in sorted({run.summary["seed"] for _, run in columns.values()}))
    about = f"Seed {seeds}; at most {IMAGES_PER_CLASS} images per class"
    about += f"; {MOST_CLASSES} of {len(labels)} classes" if len(labels) > MOST_CLASSES else ""
    return (
        '<div class="scroll" tabindex="0"><table class="sheet">'
        f'<thead><tr><th scope="col">class</th>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
        f'<p class="note">{about}.</p>\n'
    )


def _slots(pair: Images) -> int:
    """Largest number of images to show of a class."""
    return min(IMAGES_PER_CLASS, int(np.unique(pair[1], return_counts=True)[1].max(initial=1)))


def _strip(pair: Images, label: int, slots: int, words: str) -> str:
    images, labels = pair
    places = np.flatnonzero(labels == label)
    if not len(places):
        return "–"
    few = places[np.linspace(0, len(places) - 1, min(slots, len(places))).astype(int)]
    _, channels, height, width = images.shape
    # as many slots in each strip of a column, with transparent gaps, so that all strips have one scale
    strip = np.zeros((height, slots * (width + 1) - 1, channels + 1), dtype=np.uint8)
    for slot, image in enumerate(images[few]):
        left = slot * (width + 1)
        strip[:, left : left + width, :channels] = image.transpose(1, 2, 0)
        strip[:, left : left + width, channels] = 255
    source = f"data:image/png;base64,{png(strip)}"
    return f'<img src="{source}" width="{strip.shape[1]}" height="{height}" alt="{escape(words)}">'
