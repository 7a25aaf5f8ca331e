"""Results of a membership attack, for a terminal and as a page."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedstill.attacks import lira
from fedstill.experiment.run import Job
from fedstill.privacy.guarantee import Guarantee
from fedstill.report import figures, guarantees, html


def allowed(guarantee: Guarantee) -> Callable[[float], float] | None:
    """The largest TPR at an FPR that the guarantee allows; None where it does not protect records."""
    if not guarantee.holds or guarantee.unit != "record":
        return None
    assert guarantee.epsilon is not None and guarantee.delta is not None
    return partial(lira.bound, epsilon=guarantee.epsilon, delta=guarantee.delta)


def show(found: dict[str, Any]) -> Iterator[Table | Text]:
    """The results for a terminal."""
    yield Text(_finding(found), style="bold")
    table = Table(*_HEADINGS, box=SIMPLE_HEAD, pad_edge=False)
    for line in _lines(found):
        table.add_row(*line)
    yield table
    yield Text(_verdict(found))
    yield Text(_posteriors(found))


def _finding(found: dict[str, Any]) -> str:
    rate = found["likelihood_ratio"]["online"]["rates"][-1]
    return (
        f"{100 * rate['tpr']:.1f} % of the members among client {found['client']}'s {found['records']} records are "
        f"found with {100 * rate['fpr']:g} % of the others taken for members ({found['shadows']} shadow runs)"
    )


_HEADINGS = ("attack", "FPR, %", "TPR, %", "95 % interval", "allowed, %", "AUC")


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for form, rates in found["likelihood_ratio"].items():
        for rate in rates["rates"]:
            yield (
                form,
                f"{100 * rate['fpr']:g}",
                f"{100 * rate['tpr']:.2f}",
                f"{100 * rate['low']:.2f} to {100 * rate['high']:.2f}",
                "-" if rate["bound"] is None else f"{100 * rate['bound']:.2f}",
                f"{rates['auc']:.3f}",
            )


def _verdict(found: dict[str, Any]) -> str:
    guarantee = Guarantee(**found["guarantee"])
    rates = [rate for form in found["likelihood_ratio"].values() for rate in form["rates"]]
    others = found["records"] - found["members"]
    least = rates[0]["fpr"]
    note = f" {100 * least:g} % of {others} others is none." if others * least < 1 else ""
    if rates[0]["bound"] is None:
        why = guarantee.reason if not guarantee.holds else "the guarantee is about labels, not about records"
        return f"There is no bound to compare with: {why}.{note}"
    promise = guarantees.words(guarantee)
    if any(rate["refuted"] for rate in rates):
        return f"REFUTED: more is found than {promise} allows, beyond the intervals.{note}"
    return f"Not refuted: what is found is within what {promise} allows.{note}"


def _posteriors(found: dict[str, Any]) -> str:
    parts = []
    for name, judged in found["posteriors"].items():
        words = [f"{kind} {r['precision']:.2f}/{r['recall']:.2f}/{r['f1']:.2f}" for kind, r in judged.items()]
        parts.append(f"{name}: {', '.join(words)}")
    return f"An attack network on posteriors (precision/recall/F1): {'; '.join(parts)}"


def page(job: Job, found: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> str:
    """``attack.html``.

    Args:
        job: the run that was attacked.
        found: what ``attack.json`` has.
        curves: false and true positives of every form, as lira.roc gives them.

    Returns:
        The whole page.
    """
    title = f"Membership inference: {job.label} on {job.experiment.data}"
    lines, words = list(_lines(found)), (0,)
    body = "".join(
        (
            f'<h1>{escape(title)}</h1>\n<p class="finding">{escape(_finding(found))}.</p>\n',
            html.section("Likelihood ratios", html.data_table(_HEADINGS, lines, words, caption=_verdict(found))),
            html.section("Found against falsely accused", html.figure(_figure(found, curves), "roc", _CAPTION)),
            html.section("Attack networks", f"<p>{escape(_posteriors(found))}.</p>\n"),
            html.section("Reproduce", f"<pre>{escape(job.command)}</pre>\n"),
        )
    )
    return html.framed(title, body)


_CAPTION = "Up and to the left is worse for the client. Both axes are logarithmic: what counts is who is surely found."


def _figure(found: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> Any:
    figure = figures.axes("false positives, share of the others", "true positives, share of the members")
    low = 0.5 / max(found["members"], found["records"] - found["members"])  # a log axis has no 0
    for colour, (form, rates) in zip(figures.PALETTE, curves.items(), strict=False):
        false, true = (rate.clamp_min(low).tolist() for rate in rates)
        line = {"color": colour, "width": 2, "shape": "hv"}
        figure.add_scatter(x=false, y=true, mode="lines", line=line, name=form)
    xs = np.geomspace(low, 1, 200)
    figure.add_scatter(x=xs, y=xs, mode="lines", line={"color": figures.PALETTE[-1], "dash": "dot"}, name="guessing")
    if limit := allowed(Guarantee(**found["guarantee"])):
        line = {"color": figures.PALETTE[2], "dash": "dash"}
        figure.add_scatter(x=xs, y=[limit(x) for x in xs], mode="lines", line=line, name="allowed by the guarantee")
    span = [math.log10(low), 0.02]
    figure.update_xaxes(type="log", range=span)
    figure.update_yaxes(type="log", range=span)
    return figure
