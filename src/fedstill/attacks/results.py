"""Results of a membership attack, for the terminal and as a page."""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedstill.attacks import lira
from fedstill.attacks.release_policy import identity
from fedstill.base.files import Damaged
from fedstill.experiment.job import Job
from fedstill.privacy.guarantee import Guarantee, of_group
from fedstill.report import figures, guarantees, html
from fedstill.report.drawing import Axis, Line, Plot
from fedstill.report.markup import joined, part
from fedstill.runs.folder import RunFolder


def allowed(guarantee: Guarantee, size: int = 1) -> Callable[[float], float] | None:
    """The maximum TPR at an FPR under the guarantee, for ``size`` records together; None if it protects no records."""
    if not guarantee.holds or guarantee.unit == "label":
        return None
    assert guarantee.epsilon is not None and guarantee.delta is not None
    if guarantee.unit == "client":
        size = 1
    if (found := of_group(guarantee.epsilon, guarantee.delta, size)) is None:
        return lambda _: 1.0
    return partial(lira.bound, epsilon=found[0], delta=found[1])


def show(results: dict[str, Any]) -> Iterator[Table | Text]:
    """The results for a terminal."""
    yield Text(finding(results), style="bold")
    table = Table(*_HEADINGS, box=SIMPLE_HEAD, pad_edge=False)
    for line in _lines(results):
        table.add_row(*line)
    yield table
    yield Text(_verdict(results))
    if "posteriors" in results:
        networks = Table(*_NETWORKS, box=SIMPLE_HEAD, pad_edge=False)
        for line in _networks(results):
            networks.add_row(*line)
        yield networks
        yield Text(_ABOUT_NETWORKS)


def stored(run: Path) -> list[str]:
    """Findings of the membership attacks on a run, one text for each, for its published card.

    Where there is a guarantee they have no number of private records, nor the client; their rates are of such records.

    Raises:
        Damaged: their results can't be read, or are of another run.
    """
    own, found = identity(run), list[str]()
    for file in sorted(RunFolder(run).attack.glob("client-*/attack.json")):
        try:
            content = json.loads(file.read_text("utf-8"))
            kinds = [results for name, results in content.items() if name.startswith("membership")]
            if any(results.get("run") != own for results in kinds):
                raise ValueError("it does not name this run, but another one or none")
            found += map(_published, kinds)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise Damaged(f"{file} is damaged ({error}); delete it, or attack again") from error
    return found


def _published(results: dict[str, Any]) -> str:
    exact = not guarantees.is_finite(Guarantee(**results["guarantee"]))
    text = f"{finding(results, exact=exact)}. {_verdict(results, exact=exact)}"
    return text if exact else f"{text} These rates are of a client's private records, and no epsilon covers them."


def finding(results: dict[str, Any], *, exact: bool = True) -> str:
    """The stronger form of the attack: that with the most true positives, and with the largest area under the curve.

    Args:
        results: the attack's.
        exact: whether to say on how many records of which client.
    """
    those = f"the {_units(results)} of client {results['client']}" if exact else "records of one client"
    forms = results["likelihood_ratio"]
    best = max(forms, key=lambda form: (forms[form]["rates"][-1]["tpr"], forms[form]["auc"]))
    widest = max(forms, key=lambda form: forms[form]["auc"])
    rate, area = forms[best]["rates"][-1], forms[widest]
    return (
        f"True positive rate {100 * rate['tpr']:.1f} % at a false positive rate of {100 * rate['fpr']:g} % ({best} "
        f"form), AUC {area['auc']:.3f} (95 % interval {area['auc_low']:.3f} to {area['auc_high']:.3f}; {widest} "
        f"form; guessing has 0.5), on {those} ({results['shadows']} shadow runs{_rmia(results)})"
    )


def _units(results: dict[str, Any]) -> str:
    """What was inferred of, and how many: records, or whole groups of them."""
    group = results.get("group")
    if group is None:
        return f"{results['records']} records"
    return f"{results['records']} groups ({group['column']!r}, of up to {group['largest']} records)"


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
                f"{rates['auc']:.3f} ({rates['auc_low']:.3f} to {rates['auc_high']:.3f})",
            )


def _verdict(results: dict[str, Any], *, exact: bool = True) -> str:
    guarantee = Guarantee(**results["guarantee"])
    rates = [rate for form in results["likelihood_ratio"].values() for rate in form["rates"]]
    others = results["records"] - results["members"]
    below = list(dict.fromkeys(f"{100 * rate['fpr']:g} %" for rate in rates if others * rate["fpr"] < 1))
    verb = "is" if len(below) == 1 else "are each"
    note = f" {' and '.join(below)} of the {others} non-members {verb} less than one." if below and exact else ""
    if rates[0]["bound"] is None:
        reason = guarantee.reason if not guarantee.holds else "the guarantee is about labels, not about records"
        return f"There is no bound to compare with: {reason}.{note}"
    words = guarantees.words(guarantee)
    if group := results.get("group"):
        words += f" for {group['largest']} records together" if exact else " for a group's records together"
    if any(rate["refuted"] for rate in rates):
        return f"REFUTED: a true positive rate exceeds the bound of {words}, including its interval.{note}"
    return f"Not refuted: the true positive rates are within the bound of {words}.{note}"


_NETWORKS = ("posteriors of", "guess", "precision, %", "recall, %", "F1, %", "records")
_CLASSES = {"whole": "all classes", "three_largest": "three largest classes"}
"""Words of the column "posteriors of"."""
_ABOUT_NETWORKS = (
    "A network that learns from the shadow runs' posteriors, all or the three largest, which records are members: how "
    "often a guess is right (precision), and how many of these records it finds (recall)."
)


def _networks(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, rates in results["posteriors"].items():
        for kind, rate in rates.items():
            words = "non-member" if kind == "others" else "member"
            numbers = (f"{100 * rate[key]:.0f}" for key in ("precision", "recall", "f1"))
            yield (_CLASSES[name], words, *numbers, str(rate["support"]))


def page(job: Job, results: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> str:
    """The content of ``attack.html``.

    Args:
        job: the attacked run.
        results: the entry of ``attack.json``.
        curves: false and true positive rates of each form of the attack, from `lira.roc`.
    """
    title = f"Membership inference: {job.label} on {job.experiment.data}"
    lines, words = list(_lines(results)), (0,)
    networks = Markup()
    if "posteriors" in results:
        networks = html.data_table(_NETWORKS, list(_networks(results)), (0, 1), caption=_ABOUT_NETWORKS)
    body = joined(
        part("opening", title, f"{finding(results)}."),
        html.section("Likelihood ratios", html.data_table(_HEADINGS, lines, words, caption=_verdict(results))),
        html.section("True and false positives", html.figure(figure_of(results, curves), "roc", _CAPTION)),
        html.section("Attack networks", networks),
        html.section("Reproduce", part("preformatted", job.command)),
    )
    return html.framed(title, body)


_CAPTION = "Up and to the left is worse for the client. Axes are logarithmic, as few false positives matter."


def figure_of(results: dict[str, Any], curves: dict[str, tuple[Tensor, Tensor]]) -> Plot:
    """The curves of true over false positives, both on logarithmic axes."""
    low = 0.5 / max(results["members"], results["records"] - results["members"])  # a log axis has no 0
    lines = []
    for colour, (form, rates) in zip(figures.PALETTE, curves.items(), strict=False):
        false, true = (rate.clamp_min(low).tolist() for rate in rates)
        lines.append(_rates(form, false, true, colour, steps=True))
    xs = np.geomspace(low, 1, 200).tolist()
    lines.append(_rates("guessing", xs, xs, figures.PALETTE[-1], ":"))
    largest = 1 if results.get("group") is None else results["group"]["largest"]
    if limit := allowed(Guarantee(**results["guarantee"]), largest):
        lines.append(_rates("allowed by the guarantee", xs, [limit(x) for x in xs], figures.PALETTE[2], "--"))
    ticks = [(10.0**d, f"{10.0**d:g}") for d in range(math.ceil(math.log10(low)), 1)]
    axes = [Axis(f"{kind} positive rate", log=True, range=(low, 1.05), ticks=ticks) for kind in ("false", "true")]
    return Plot(axes[0], axes[1:], lines)


def _rates(
    name: str, false: list[float], true: list[float], colour: str, dash: str = "-", *, steps: bool = False
) -> Line:
    tips = [f"{name}: TPR {100 * t:.3g} % at FPR {100 * f:.3g} %" for f, t in zip(false, true, strict=True)]
    return Line(name, false, true, colour, "", dash, steps=steps, tips=tips)
