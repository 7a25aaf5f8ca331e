"""The page's colours are readable."""

import itertools
import re

from fedstill.report import figures, markup


def luminance(colour: str) -> float:
    """Of WCAG 2.1: between 0 for black and 1 for white."""
    digits = colour.removeprefix("#")
    parts = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    values = [int(parts[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_texts_and_figures_differ_enough_from_their_background_on_light_and_dark_pages() -> None:
    css = markup.asset("page.css") + markup.asset("watch.css")
    light, dark = (
        dict(re.findall(r"--(\w+(?:-\w+)?): (#\w+)", block)) for block in re.findall(r":root {(.*?)}", css, re.S)
    )
    assert set(light) == set(dark) >= {"back", "box", "text", "soft", "link", "good", "bad", "good-back", "bad-back"}
    for look in (light, dark):
        backs = itertools.product(("text", "soft", "link", "good", "bad"), ("back", "box"))
        pairs = [*backs, ("text", "good-back"), ("good", "good-back"), ("text", "bad-back"), ("bad", "bad-back")]
        assert {pair for pair in pairs if contrast(look[pair[0]], look[pair[1]]) < 4.5} == set()
        assert [colour for colour in figures.PALETTE if contrast(colour, look["back"]) < 3] == []
    faint = [rule for rule in re.findall(r"([^{}]+){[^}]*\bopacity:", css) if not rule.strip().endswith("svg")]
    assert faint == []
