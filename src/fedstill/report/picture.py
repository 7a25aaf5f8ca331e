"""A run's picture for a notebook's cell: its accuracy per round, or the images that its clients sent."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedstill.runs.folder import Images

TEST = "real"
"""The name of the test images in a run's folder."""
_BLUE = "#0072B2"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 340, 150, 44, 26
_MOST_CLASSES, _PER_CLASS, _PIXELS = 10, 5, 32


def curve(accuracies: dict[int, float]) -> str:
    """Accuracy in percent by round as an SVG; empty for fewer than two rounds."""
    if len(accuracies) < 2:
        return ""
    first, last = min(accuracies), max(accuracies)
    low, high = (f(100 * value for value in accuracies.values()) for f in (min, max))
    low, high = low - 0.05 * (high - low) - 0.5, high + 0.05 * (high - low) + 0.5

    def place(at: int, value: float) -> str:
        x = _LEFT + (at - first) / (last - first) * (_WIDTH - _LEFT - 6)
        return f"{x:.1f},{6 + (high - value) / (high - low) * (_HEIGHT - _BOTTOM - 6):.1f}"

    points = " ".join(place(at, 100 * value) for at, value in accuracies.items())
    base = _HEIGHT - _BOTTOM
    words = [(_LEFT - 4, base, "end", f"{low:.0f} %"), (_LEFT - 4, 12, "end", f"{high:.0f} %")]
    words += [(_LEFT, base + 14, "start", f"round {first}"), (_WIDTH - 6, base + 14, "end", f"round {last}")]
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in words)
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="accuracy in percent by round" '
        'font-family="sans-serif" font-size="11" fill="currentColor">'
        f'<path d="M{_LEFT} 6V{base}H{_WIDTH - 6}" fill="none" stroke="currentColor" opacity="0.4"/>'
        f'<polyline points="{points}" fill="none" stroke="{_BLUE}" stroke-width="2"/>{texts}</svg>'
    )


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
