"""A run's picture for a notebook's cell: its accuracy per round, or the images that its clients sent."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedstill.report.drawing import PAGE_WIDTH, Axis, Line, Plot, page_svg
from fedstill.runs.folder import Images

TEST = "real"
"""The name of the test images in a run's folder."""
_BLUE = "#0072B2"
_MOST_CLASSES, _PER_CLASS, _PIXELS = 10, 5, 32


def curve(accuracies: dict[int, float]) -> str:
    """Accuracy in percent by round as an SVG; empty for fewer than two rounds."""
    if len(accuracies) < 2:
        return ""
    xs, ys = [*map(float, accuracies)], [100 * value for value in accuracies.values()]
    tips = [f"round {at:g}: {value:.2f} %" for at, value in zip(xs, ys, strict=True)]
    plot = Plot(Axis("round", integer=True), [Axis("accuracy, %")], [Line("", xs, ys, _BLUE, tips=tips)], height=0.45)
    svg = page_svg(plot, "curve", "accuracy in percent by round")
    return f'<div style="max-width: {PAGE_WIDTH:g}px">{svg}</div>'


def sent(images: dict[str, Images] | None) -> str:
    """Images that clients sent, a row for each class, as one PNG; empty without such images."""
    pair = next((pair for name, pair in (images or {}).items() if name != TEST), None)
    if pair is None:
        return ""
    pixels, labels = pair
    _, channels, height, width = pixels.shape
    shown = np.unique(labels)[:_MOST_CLASSES]
    found = [np.flatnonzero(labels == label)[:_PER_CLASS] for label in shown]
    page = np.zeros((len(shown) * (height + 1), max(map(len, found)) * (width + 1), channels + 1), np.uint8)
    for row, places in enumerate(found):
        for column, image in enumerate(pixels[places]):
            top, left = row * (height + 1), column * (width + 1)
            page[top : top + height, left : left + width, :channels] = image.transpose(1, 2, 0)
            page[top : top + height, left : left + width, channels] = 255
    scale = max(1, _PIXELS // height)
    about = f"images that clients sent, of {len(shown)} classes"
    high, wide = scale * page.shape[0], scale * page.shape[1]
    style = f'alt="{about}" title="{about}" style="image-rendering:pixelated"'
    return f'<img src="data:image/png;base64,{png(page)}" width="{wide}" height="{high}" {style}>'


def png(pixels: NDArray[np.uint8]) -> str:
    """Pixels with transparency, uint8 ``(height, width, channels + 1)``, as a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")  # two channels: grey and alpha; four: colours and alpha
    return base64.b64encode(file.getvalue()).decode("ascii")
