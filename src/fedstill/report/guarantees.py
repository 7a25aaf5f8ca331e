"""Privacy guarantees in words, for tables and pages."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any

from fedstill.privacy.guarantee import Guarantee


def weakest(of_runs: Iterable[Guarantee]) -> Guarantee:
    """The weakest guarantee of several runs: none if one run has none, else that with the largest epsilon.

    What stands beside epsilon is that of the run for which it is weakest, too.
    """
    found = [*of_runs]
    worst = max(found, key=lambda g: (not is_finite(g), g.epsilon or 0.0, g.delta or 0.0))
    worst = replace(worst, exposed=max(g.exposed or 0 for g in found) or worst.exposed)
    if not is_finite(worst):
        return worst
    return replace(
        worst,
        pairs=min((g.pairs or 0 for g in found), default=0) or None,
        alone_epsilon=_largest([g.alone_epsilon for g in found if g.adders]),
        group_epsilon=_largest([g.group_epsilon for g in found if g.group]),
        group_delta=_largest([g.group_delta for g in found if g.group]),
    )


def _largest(values: Sequence[float | None]) -> float | None:
    """The largest number; None where there is none, or one is None, which promises nothing."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) and known else None


def is_finite(guarantee: Guarantee) -> bool:
    """Whether the guarantee holds with a finite epsilon."""
    return guarantee.holds and guarantee.epsilon is not None and math.isfinite(guarantee.epsilon)


def words(guarantee: Guarantee) -> str:
    """``"none"`` or ``"eps 1.0, delta 1e-5 per record"``; both numbers are rounded up, never down.

    Records that nothing protects are named after it: ``", 3 exposed"``; and a method on whose word it rests:
    ``", if Mine keeps records apart (unchecked)"``, or ``"(checked on 12 pairs)"``.
    """
    if not is_finite(guarantee):
        return "none"
    assert guarantee.epsilon is not None
    text = f"eps {round_up(guarantee.epsilon)}"
    text += f", delta {round_up(guarantee.delta)}" if guarantee.delta else ""
    text += f" per {guarantee.unit}" if guarantee.unit else ""
    return text + _others(guarantee) + exposed_words(guarantee.exposed) + _trusted(guarantee)


def conditions(guarantee: Guarantee) -> str:
    """What stands after an epsilon in `words`, but for the exposed records: on whom and on what it rests."""
    return _others(guarantee) + _trusted(guarantee)


def _others(guarantee: Guarantee) -> str:
    found = _alone(guarantee) if guarantee.adders else ""
    return found + (_of_group(guarantee) if guarantee.group else "")


def _trusted(guarantee: Guarantee) -> str:
    checked = f"checked on {guarantee.pairs} pairs" if guarantee.pairs else "unchecked"
    return f", if {guarantee.unchecked} keeps records apart ({checked})" if guarantee.unchecked else ""


def _alone(guarantee: Guarantee) -> str:
    """``" (alone eps 9.8)"``: what holds if all others work together."""
    found = guarantee.alone_epsilon
    return " (alone none)" if found is None else f" (alone eps {round_up(found)})"


def _of_group(guarantee: Guarantee) -> str:
    """``"; eps 3.3, delta 1e-5 per patient"``, whose largest number of records is public."""
    if guarantee.group_epsilon is None:
        return f"; none per {guarantee.group} (up to {guarantee.group_size} {guarantee.unit}s)"
    delta = f", delta {round_up(guarantee.group_delta)}" if guarantee.group_delta else ""
    several = f"(up to {guarantee.group_size} {guarantee.unit}s)"
    return f"; eps {round_up(guarantee.group_epsilon)}{delta} per {guarantee.group} {several}"


def exposed_words(exposed: int | None) -> str:
    """What stands after an epsilon that ``exposed`` records do not have; nothing if there are none, or none counted."""
    return f", {exposed} exposed" if exposed else ""


def as_json(guarantee: Guarantee | None) -> dict[str, Any] | None:
    """All facts of a guarantee; one with an infinite epsilon does not hold. None before the end of a run."""
    if guarantee is None:
        return None
    return asdict(guarantee) | ({} if is_finite(guarantee) else {"holds": False, "epsilon": None})


def is_simulated(guarantee: Guarantee) -> bool:
    """Whether the guarantee relies on noise drawn from the run's seed."""
    return is_finite(guarantee) and guarantee.simulated


def round_up(value: float) -> str:
    """Three significant digits, rounded up, so that no printed guarantee is stronger than the true one."""
    exact = Decimal(repr(float(value)))
    if not exact:
        return "0"
    exact = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), ROUND_CEILING).normalize()
    if exact < Decimal("0.01"):
        return f"{exact:e}".replace("e-0", "e-")
    text = f"{exact:f}"
    return text if "." in text or exact >= 100 else text + ".0"


def right_at_most(epsilon: float, delta: float) -> float:
    """Largest share of right guesses in percent, rounded up, of an attacker who tells apart two adjacent inputs.

    Kairouz, Oh, Viswanath 2015, Theorem 2.1: under (epsilon, delta) the error rates a, b of any test between adjacent
    inputs have a + e^epsilon b >= 1 - delta and b + e^epsilon a >= 1 - delta; adding both bounds their mean.
    """
    right = 1 - (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    return min(math.ceil(1000 * right - 1e-9) / 10, 100.0)


_QUESTIONS = {
    "record": ("records", "whether a record was used"),
    "label": ("records", "which of two labels a record has"),
    "client": ("clients' records", "which of two data sets a client has"),
}
"""Facts that the attacker knows, and the guess, by unit."""


def explained(guarantee: Guarantee, *, sent: bool) -> tuple[str, ...]:
    """The guarantee's meaning, in sentences.

    Args:
        guarantee: the guarantee of one or more runs.
        sent: whether the clients sent anything.
    """
    if not is_finite(guarantee):
        if not sent:
            return ("The clients send nothing.", *([f"{guarantee.reason}."] if guarantee.reason else []))
        because = f": {guarantee.reason}" if guarantee.reason else ""
        return (f"The replies may reveal any record of the clients{because}.",)
    assert guarantee.epsilon is not None
    percent = right_at_most(guarantee.epsilon, guarantee.delta or 0.0)
    known, question = _QUESTIONS.get(guarantee.unit or "", _QUESTIONS["record"])
    sentences = (
        f"An attacker who knows all other {known} and guesses {question} is right at most {percent:g} % of "
        "the time; random guesses are right 50 % of the time.",
        f"Holds against: {guarantee.adversary}." if guarantee.adversary else "",
        guarantee.reason,
        f"The noise is that of {guarantee.adders} honest clients together. If all others work together, what a client "
        + (
            "adds itself promises nothing."
            if guarantee.alone_epsilon is None
            else f"adds itself gives epsilon {round_up(guarantee.alone_epsilon)}."
        )
        if guarantee.adders
        else "",
        f"It supposes that each row which {guarantee.unchecked} makes depends on its own record only; "
        + (
            f"fedstill check found no other on {guarantee.pairs} pairs of data sets, which is no proof"
            if guarantee.pairs
            else "nobody checked that (fedstill check)"
        )
        + ", and a row that depends on others breaks it."
        if guarantee.unchecked
        else "",
    )
    return tuple(sentence for sentence in sentences if sentence)
