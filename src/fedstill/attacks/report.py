"""Results of a membership attack, for the terminal and as a page."""

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
from fedstill.experiment.job import Job
from fedstill.privacy.guarantee import Guarantee
from fedstill.report import figures, guarantees, html


def allowed(guarantee: Guarantee) -> Callable[[float], float] | None:
    """The maximum TPR at an FPR under the guarantee; None if it does not protect records."""
    if not guarantee.holds or guarantee.unit == "label":
        return None
    assert guarantee.epsilon is not None and guarantee.delta is not None
    return partial(lira.bound, epsilon=guarantee.epsilon, delta=guarantee.delta)


def show(results: dict[str, Any]) -> Iterator[Table | Text]:
    """The results for a terminal."""
    yield Text(_finding(results), style="bold")
    table = Table(*_HEADINGS, box=SIMPLE_HEAD, pad_edge=False)
    for line in _lines(results):
        table.add_row(*line)
    yield table
    yield Text(_verdict(results))
    if "posteriors" in results:
        yield Text(_posteriors(results))


def _finding(results: dict[str, Any]) -> str:
    rate = results["likelihood_ratio"]["online"]["rates"][-1]
    return (
        f"True positive rate {100 * rate['tpr']:.1f} % at a false positive rate of {100 * rate['fpr']:g} %, on the "
        f"{results['records']} records of client {results['client']} ({results['shadows']} shadow runs{_rmia(results)})"
    )


def _rmia(results: dict[str, Any]) -> str:
    """The relative attack's settings, if the scores are its."""
    return f", RMIA with a {results['rmia']['a']:g}, gamma {results['rmia']['gamma']:g}" if "rmia" in results else ""


_HEADINGS = ("attack", "FPR, %", "TPR, %", "95 % interval", "allowed, %", "AUC")


def _lines(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for form, rates in results["likelihood_ratio"].items():
        for rate in rates["rates"]:
            yield (
                form,
                f"{100 * rate['fpr']:g}",
                f"{100 * rate['tpr']:.2f}",
                f"{100 * rate['low']:.2f} to {100 * rate['high']:.2f}",
                "-" if rate["bound"] is None else f"{100 * rate['bound']:.2f}",
                f"{rates['auc']:.3f}",
            )


def _verdict(results: dict[str, Any]) -> str:
    guarantee = Guarantee(**results["guarantee"])
    rates = [rate for form in results["likelihood_ratio"].values() for rate in form["rates"]]
    others = results["records"] - results["members"]
    least = rates[0]["fpr"]
    note = f" {100 * least:g} % of the {others} non-members is less than one record." if others * least < 1 else ""
    if rates[0]["bound"] is None:
        reason = guarantee.reason if not guarantee.holds else "the guarantee is about labels, not about records"
        return f"There is no bound to compare with: {reason}.{note}"
    words = guarantees.words(guarantee)
    if any(rate["refuted"] for rate in rates):
        return f"REFUTED: a true positive rate exceeds the bound of {words}, including its interval.{note}"
    return f"Not refuted: the true positive rates are within the bound of {words}.{note}"


def _posteriors(results: dict[str, Any]) -> str:
    parts = []
    for name, rates in results["posteriors"].items():
        words = [f"{kind} {r['precision']:.2f}/{r['recall']:.2f}/{r['f1']:.2f}" for kind, r in rates.items()]
        parts.append(f"{name.replace('_', ' ')}: {', '.join(words)}")
    return f"An attack network on posteriors (precision/recall/F1): {'; '.join(parts)}"


def page(job: Job, results: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> str:
    """The content of ``attack.html``.

    Args:
        job: the attacked run.
        results: the entry of ``attack.json``.
        curves: false and true positive rates of each form of the attack, from `lira.roc`.
    """
    title = f"Membership inference: {job.label} on {job.experiment.data}"
    lines, words = list(_lines(results)), (0,)
    networks = f"<p>{escape(_posteriors(results))}.</p>\n" if "posteriors" in results else ""
    body = "".join(
        (
            f'<h1>{escape(title)}</h1>\n<p class="finding">{escape(_finding(results))}.</p>\n',
            html.section("Likelihood ratios", html.data_table(_HEADINGS, lines, words, caption=_verdict(results))),
            html.section("True and false positives", html.figure(_figure(results, curves), "roc", _CAPTION)),
            html.section("Attack networks", networks) if networks else "",
            html.section("Reproduce", f"<pre>{escape(job.command)}</pre>\n"),
        )
    )
    return html.framed(title, body)


_CAPTION = "Up and to the left is worse for the client. Axes are logarithmic, as few false positives matter."


def _figure(results: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> Any:
    figure = figures.axes("false positive rate", "true positive rate")
    low = 0.5 / max(results["members"], results["records"] - results["members"])  # a log axis has no 0
    for colour, (form, rates) in zip(figures.PALETTE, curves.items(), strict=False):
        false, true = (rate.clamp_min(low).tolist() for rate in rates)
        line = {"color": colour, "width": 2, "shape": "hv"}
        figure.add_scatter(x=false, y=true, mode="lines", line=line, name=form)
    xs = np.geomspace(low, 1, 200)
    figure.add_scatter(x=xs, y=xs, mode="lines", line={"color": figures.PALETTE[-1], "dash": "dot"}, name="guessing")
    if limit := allowed(Guarantee(**results["guarantee"])):
        line = {"color": figures.PALETTE[2], "dash": "dash"}
        figure.add_scatter(x=xs, y=[limit(x) for x in xs], mode="lines", line=line, name="allowed by the guarantee")
    span = [math.log10(low), 0.02]
    figure.update_xaxes(type="log", range=span)
    figure.update_yaxes(type="log", range=span)
    return figure
