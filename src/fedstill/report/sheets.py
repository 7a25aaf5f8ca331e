"""Sheets of sample images for the report: a table with a strip of images for each class and kind."""

import base64
import io
from html import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedstill.report.record import RunRecord
from fedstill.runs.folder import Images

IMAGES_PER_CLASS = 5
MOST_CLASSES = 20


def sheets(groups: dict[str, list[RunRecord]]) -> str:
    """The sheet of the first run with images of each label, as HTML."""
    text = ""
    for label, runs in groups.items():
        record = next((run for run in runs if set(run.images or ()) - {"real"}), None)
        if record is not None:
            text += f"<h3>{escape(label)}</h3>\n{_sheet(record)}"
    return text


def _sheet(record: RunRecord) -> str:
    images = dict(record.images or {})
    if real := images.pop("real", None):
        images["real"] = real
    labels = sorted({int(label) for _, found in images.values() for label in found})
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in images)
    body = ""
    for label in labels[:MOST_CLASSES]:
        name = record.class_name(label)
        body += f'<tr><th scope="row">{escape(name)}</th>'
        for kind, found in images.items():
            body += f"<td>{_strip(found, label, f'{kind} images of class {name}')}</td>"
        body += "</tr>\n"
    about = f"Seed {record.summary['seed']}, at most {IMAGES_PER_CLASS} images per class"
    about += f", {MOST_CLASSES} of {len(labels)} classes" if len(labels) > MOST_CLASSES else ""
    return (
        f'<table class="sheet"><thead><tr><th scope="col">class</th>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table>\n"
        f'<p class="note">{about}. Real images: {escape(record.summary["judged_on"])}.</p>\n'
    )


def _strip(found: Images, label: int, words: str) -> str:
    images, labels = found
    mine = np.flatnonzero(labels == label)
    if not len(mine):
        return "–"
    few = mine[np.linspace(0, len(mine) - 1, min(IMAGES_PER_CLASS, len(mine))).astype(int)]
    _, channels, height, width = images.shape
    # One slot per image and transparent gaps, so that strips of fewer images keep the scale of full ones.
    strip = np.zeros((height, IMAGES_PER_CLASS * (width + 1) - 1, channels + 1), dtype=np.uint8)
    for slot, image in enumerate(images[few]):
        left = slot * (width + 1)
        strip[:, left : left + width, :channels] = image.transpose(1, 2, 0)
        strip[:, left : left + width, channels] = 255
    source = f"data:image/png;base64,{_png(strip)}"
    return f'<img src="{source}" width="{strip.shape[1]}" height="{height}" alt="{escape(words)}">'


def _png(pixels: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")  # two channels are grey with alpha, four are colours with alpha
    return base64.b64encode(file.getvalue()).decode("ascii")
