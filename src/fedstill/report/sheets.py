"""Sample images for the report: tables with a strip of images for each class and kind."""

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
    """HTML tables of sample images, from the first run of each label that has any."""
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
    labels = sorted({int(label) for _, values in images.values() for label in values})
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in images)
    body = ""
    for label in labels[:MOST_CLASSES]:
        name = record.class_name(label)
        body += f'<tr><th scope="row">{escape(name)}</th>'
        for kind, pair in images.items():
            body += f"<td>{_strip(pair, label, f'{kind} images of class {name}')}</td>"
        body += "</tr>\n"
    about = f"Seed {record.summary['seed']}, at most {IMAGES_PER_CLASS} images per class"
    about += f", {MOST_CLASSES} of {len(labels)} classes" if len(labels) > MOST_CLASSES else ""
    return (
        f'<table class="sheet"><thead><tr><th scope="col">class</th>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table>\n"
        f'<p class="note">{about}. Real images: {escape(record.summary["judged_on"])}.</p>\n'
    )


def _strip(pair: Images, label: int, words: str) -> str:
    images, labels = pair
    places = np.flatnonzero(labels == label)
    if not len(places):
        return "–"
    few = places[np.linspace(0, len(places) - 1, min(IMAGES_PER_CLASS, len(places))).astype(int)]
    _, channels, height, width = images.shape
    # one slot per image, with transparent gaps, so that all strips have one scale
    strip = np.zeros((height, IMAGES_PER_CLASS * (width + 1) - 1, channels + 1), dtype=np.uint8)
    for slot, image in enumerate(images[few]):
        left = slot * (width + 1)
        strip[:, left : left + width, :channels] = image.transpose(1, 2, 0)
        strip[:, left : left + width, channels] = 255
    source = f"data:image/png;base64,{_png(strip)}"
    return f'<img src="{source}" width="{strip.shape[1]}" height="{height}" alt="{escape(words)}">'


def _png(pixels: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")  # two channels: grey and alpha; four: colours and alpha
    return base64.b64encode(file.getvalue()).decode("ascii")
