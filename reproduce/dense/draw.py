"""Draw what run.sh left: every method's accuracy against alpha, a dot for each seed.

python reproduce/dense/draw.py runs/reproduce-dense docs/images/dense-alpha.svg
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

METHODS = {"feddf": "FedDF", "fed-dafl": "Fed-DAFL", "fed-adi": "Fed-ADI", "dense": "DENSE"}
COLOURS = ("#0072B2", "#A67C00", "#009E73", "#D55E00")
COLUMNS = {"cpu-mnist": "MNIST", "cpu-fashion_mnist": "Fashion-MNIST", "small-cifar10": "CIFAR-10"}
ROWS = {"": "mean of logits", "-p": "mean of probabilities"}
ALPHAS = ("0.1", "0.3", "0.5")
WIDTH, HEIGHT, LEFT, TOP, GAP = 240, 150, 60, 30, 30


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 10) -> str:
    """Grey words at a point, legible on light and on dark pages."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="#777">{words}</text>'


def found(runs: Path, column: str, alpha: str, label: str) -> list[float]:
    """Accuracies of all seeds, in percent."""
    each = sorted((runs / f"{column}-{alpha}-5" / label).glob("seed-*/summary.json"))
    return [100 * json.loads(path.read_text())["accuracy"] for path in each]


def averages(runs: Path, column: str, alpha: str) -> list[float]:
    """One-shot FedAvg's of all seeds, in percent."""
    each = sorted((runs / f"{column}-{alpha}-5" / "dense").glob("seed-*/metrics.jsonl"))
    return [100 * json.loads(path.read_text().splitlines()[-1])["average"] for path in each]


def panel(runs: Path, column: str, suffix: str, x: int, y: int) -> Iterator[str]:
    """One data set with one kind of mean, its upper left corner at (x, y)."""
    yield f'<path d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}" fill="none" stroke="#999"/>'
    for level in (0, 20, 40, 60, 80, 100):
        at = y + HEIGHT * (1 - level / 100)
        yield f'<path d="M{x} {at:.1f}h{WIDTH}" stroke="#8883"/>'
        yield text(x - 6, at + 3, str(level), anchor="end")
    for i, alpha in enumerate(ALPHAS):
        middle = x + WIDTH * (i + 0.5) / len(ALPHAS)
        yield text(middle, y + HEIGHT + 14, f"alpha {alpha.removeprefix('0')}", anchor="middle")
        for share in averages(runs, column, alpha):
            at = y + HEIGHT * (1 - share / 100)
            yield f'<path d="M{middle - 30:.1f} {at:.1f}h60" stroke="#777" stroke-dasharray="3 2" opacity=".8"/>'
        for k, (method, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
            for share in found(runs, column, alpha, method + suffix):
                at = y + HEIGHT * (1 - share / 100)
                yield f'<circle cx="{middle + 14 * (k - 1.5):.1f}" cy="{at:.1f}" r="3.2" fill="{colour}" opacity=".8"/>'


def drawing(runs: Path) -> str:
    """The whole picture."""
    lines = []
    for j, (suffix, mean) in enumerate(ROWS.items()):
        y = TOP + j * (HEIGHT + GAP + 14)
        turned = f'transform="translate(18 {y + HEIGHT / 2:.0f}) rotate(-90)"'
        lines.append(f'<text {turned} text-anchor="middle" font-size="11" fill="#777">{mean}, %</text>')
        for i, (column, name) in enumerate(COLUMNS.items()):
            x = LEFT + i * (WIDTH + GAP)
            if not j:
                lines.append(text(x + WIDTH / 2, 18, name, anchor="middle", size=12))
            lines += panel(runs, column, suffix, x, y)
    y = TOP + 2 * (HEIGHT + GAP + 14) + 4
    for k, (name, colour) in enumerate(zip(METHODS.values(), COLOURS, strict=True)):
        x = LEFT + 110 * k
        lines.append(f'<circle cx="{x + 6}" cy="{y - 4}" r="4" fill="{colour}"/>')
        lines.append(text(x + 16, y, name, size=12))
    x = LEFT + 110 * len(METHODS)
    lines.append(f'<path d="M{x} {y - 4}h24" stroke="#777" stroke-dasharray="3 2"/>')
    lines.append(text(x + 30, y, "one-shot FedAvg", size=12))
    size = LEFT + len(COLUMNS) * (WIDTH + GAP), y + 14
    head = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"'
    return "\n".join(
        [f'<svg {head} width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">', *lines, "</svg>\n"]
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawing(Path(sys.argv[1])))
