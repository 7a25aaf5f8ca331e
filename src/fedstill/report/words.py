"""Accuracies, numbers of bytes and texts of others in words."""

from rich.text import Text


def accuracy_words(mean: float | None, spread: float | None) -> str:
    """``"92.31 ± 0.18"`` in percent, or only one number, or a dash."""
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}" + (f" ± {100 * spread:.2f}" if spread is not None else "")


def human_bytes(count: float) -> str:
    """Three significant digits in decimal units: ``"78.5 kB"``, ``"1.27 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plain(text: str) -> Text:
    """A text for the terminal without markup or control characters, which words of a stranger's run may have."""
    return Text("".join(c if c.isprintable() else "?" for c in text))
