"""The policy of ``fedstill publish --gate``: what a run's guarantee and attacks must show before its model leaves.

A policy is a TOML file of an organisation. It has the table ``[guarantee]``, ``[attack]`` or both::

    [guarantee]
    epsilon = 2.0     # at most, at a delta of at most
    delta = 1e-5
    unit = "record"   # "record", "label", "client" or "group"

    [attack]
    fpr = 0.01        # at this false positive rate, the upper end of the interval of the
    tpr = 0.2         # true positive rate is at most this

What the policy leaves out is as strict as it can be: noise that a seed repeats, a method on whose word alone the
guarantee rests, and records that nothing protects are refused unless it says otherwise. The gate protects from
oversight; whoever can edit the run's folder can forge what it reads.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict, field_validator, model_validator

from fedstill.attacks.lira import FPRS
from fedstill.base.errors import FedstillError
from fedstill.base.files import Damaged
from fedstill.base.settings import Settings, Share, read_toml
from fedstill.privacy.guarantee import Guarantee
from fedstill.report import guarantees
from fedstill.report.record import read_run
from fedstill.runs.folder import RunFolder


class _Strict(Settings):
    """Settings of which a text or true is no number."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)


class AskedGuarantee(_Strict):
    """The weakest guarantee that may leave."""

    epsilon: Annotated[float, Gt(0)]
    """Largest epsilon."""
    delta: Annotated[float, Ge(0), Lt(1)]
    """Largest delta at which it is stated."""
    unit: Literal["record", "label", "client", "group"]
    """Unit that it protects. That of a client protects a record and a label too; no other stands for another."""
    group: Annotated[str, MinLen(1)] | None = None
    """Column whose values are the groups, such as patient; needed if the unit is "group"."""
    alone_epsilon: Annotated[float, Gt(0)] | None = None
    """With masked sums, largest epsilon if all others work together; None asks nothing."""
    simulated: bool = False
    """Whether noise from the run's seed will do."""
    unchecked: bool = False
    """Whether the word of a method outside of fedstill will do, without a check (``fedstill check``)."""
    exposed: Annotated[int, Ge(0)] = 0
    """Largest number of the clients' records that the public or the test records hold too."""

    @model_validator(mode="after")
    def _named_group(self) -> "AskedGuarantee":
        if (self.unit == "group") != (self.group is not None):
            raise ValueError('group names the column of the unit "group", and stands with that unit only')
        return self


class AskedAttack(_Strict):
    """The strongest membership attack that may succeed."""

    fpr: float
    """False positive rate, one of those that an attack reports: 0.001 or 0.01."""
    tpr: Annotated[float, Gt(0), Le(1)]
    """Largest true positive rate there, the upper end of its 95 % interval included."""
    auc: Annotated[Share, Ge(0.5)] | None = None
    """Largest area under the curve; None asks nothing."""
    shadows: Annotated[int, Ge(4)] = 16
    """Fewest shadow runs of an attack that counts."""

    @field_validator("fpr")
    @classmethod
    def _is_reported(cls, value: float) -> float:
        if value not in FPRS:
            raise ValueError(f"it must be one of {', '.join(f'{rate:g}' for rate in FPRS)}")
        return value


class Policy(_Strict):
    """What must be shown before a model leaves."""

    guarantee: AskedGuarantee | None = None
    """Asked of the guarantee."""
    attack: AskedAttack | None = None
    """Asked of the stored membership attacks."""

    @model_validator(mode="after")
    def _asks_something(self) -> "Policy":
        if self.guarantee is None and self.attack is None:
            raise ValueError("it asks nothing; give it a table [guarantee] or [attack]")
        return self


class GateClosed(FedstillError, ValueError):
    """The run misses what the policy asks; nothing was published."""


def identity(run: Path) -> str:
    """The finished run that an attack was on: SHA-256 of its results and its model's weights, in hexadecimal."""
    folder, whole = RunFolder(run), hashlib.sha256()
    for place in (folder.summary, folder.model):
        content = place.read_bytes() if place.exists() else b""
        whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()


def pass_gate(run: Path, policy: Path) -> list[str]:
    """What the policy asks and what was found, one text for each, for the model card.

    Args:
        run: folder of the finished run.
        policy: the TOML file.

    Raises:
        GateClosed: the run misses something; the sentence has every miss.
        ValueError: the policy can't be read, has an unknown or lacks a needed setting, or asks nothing.
    """
    asked = read_toml(Policy, policy, f"the policy {policy}")
    record = read_run(run)
    said: list[str] = []
    missed: list[str] = []
    if asked.guarantee is not None:
        said.append(f"Asked: {_words(asked.guarantee)}. Found: {guarantees.words(record.guarantee)}.")
        missed += misses(asked.guarantee, record.guarantee)
    if asked.attack is not None:
        wanted = asked.attack
        found, wrong = _attacks(run, wanted)
        said.append(
            f"Asked: of an attack with {wanted.shadows} shadow runs or more, a true positive rate of at most "
            f"{100 * wanted.tpr:g} % at a false positive rate of {100 * wanted.fpr:g} %, interval included"
            f"{'' if wanted.auc is None else f', and an AUC of at most {wanted.auc:g}'}. Found: {'; '.join(found)}."
        )
        missed += wrong
    if missed:
        raise GateClosed(f"{run} misses what {policy} asks: {'; '.join(missed)}; nothing was published")
    return said


def _words(asked: AskedGuarantee) -> str:
    allowed = [
        *["noise from the seed"] * asked.simulated,
        *["an unchecked method"] * asked.unchecked,
        *[f"{asked.exposed} exposed records"] * (asked.exposed > 0),
    ]
    alone = "" if asked.alone_epsilon is None else f", alone epsilon at most {asked.alone_epsilon:g}"
    also = f", {', '.join(allowed)} allowed" if allowed else ""
    unit = asked.group or asked.unit
    return f"epsilon at most {asked.epsilon:g}, delta at most {asked.delta:g}, per {unit}{alone}{also}"


def misses(asked: AskedGuarantee, found: Guarantee) -> Iterator[str]:
    """Whatever the guarantee lacks."""
    if not guarantees.is_finite(found):
        yield f"the run has no guarantee ({found.reason})"
        return
    epsilon, delta = found.epsilon, found.delta
    if asked.unit == "group":
        if found.group != asked.group:
            yield f"its guarantee is not per {asked.group}, but per {found.group or found.unit}"
            return
        epsilon, delta = found.group_epsilon, found.group_delta
    elif (epsilon or delta) and found.unit not in (asked.unit, "client"):  # a run that sends nothing protects all
        yield f"its guarantee is per {found.unit}, not per {asked.unit}"
    if epsilon is None or not epsilon <= asked.epsilon:
        shown = "none" if epsilon is None else guarantees.round_up(epsilon)
        yield f"epsilon is {shown}, above {asked.epsilon:g}"
    if delta is None or not delta <= asked.delta:
        yield f"delta is {'none' if delta is None else guarantees.round_up(delta)}, above {asked.delta:g}"
    if asked.alone_epsilon is not None:
        alone = found.alone_epsilon if found.adders else found.epsilon  # without masked sums, nobody's help is needed
        if alone is None or not alone <= asked.alone_epsilon:
            shown = "none" if alone is None else guarantees.round_up(alone)
            yield f"alone epsilon is {shown}, above {asked.alone_epsilon:g}"
    if found.simulated and not asked.simulated:
        yield "its noise came from the run's seed (--noise entropy)"
    if found.unchecked and not found.pairs and not asked.unchecked:
        yield f"it rests on the word of {found.unchecked}, unchecked (fedstill check)"
    if (found.exposed or 0) > asked.exposed:
        yield f"{found.exposed} records are exposed, above {asked.exposed}"


def _attacks(run: Path, asked: AskedAttack) -> tuple[list[str], list[str]]:
    """What the stored attacks found, and what they miss; each attack that counts must meet the policy."""
    own, found, missed = identity(run), [], []
    for file in sorted(RunFolder(run).attack.glob("client-*/attack.json")):
        try:
            for name, results in json.loads(file.read_text("utf-8")).items():
                if name.startswith("membership"):
                    text, wrong = _judged(results, asked, own)
                    label = f"client {int(results['client'])} ({name})"
                    found.append(f"{label}: {text}")
                    missed += [f"the attack on {label} {each}" for each in wrong]
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise Damaged(f"{file} is damaged ({error}); delete it, or attack again") from error
    if not found:
        words = f"fedstill attack {run} membership --shadows {asked.shadows + asked.shadows % 2}"
        missed.append(f"no membership attack on it is stored ({words})")
    return found, missed


def _judged(results: dict[str, Any], asked: AskedAttack, own: str) -> tuple[str, list[str]]:
    """An attack's rates in words, and what it misses."""
    forms = results["likelihood_ratio"].values()
    rates = [[rate for rate in form["rates"] if rate["fpr"] == asked.fpr][0] for form in forms]
    high, auc = max(float(rate["high"]) for rate in rates), max(float(form["auc"]) for form in forms)
    others, shadows = int(results["records"]) - int(results["members"]), int(results["shadows"])
    missed = []
    if results.get("run") != own:
        missed.append("is of another run or model, or of an older fedstill; attack again")
    if shadows < asked.shadows:
        missed.append(f"has {shadows} shadow runs; at least {asked.shadows} are asked")
    if others * asked.fpr < 1:
        missed.append(f"has {others} non-members, too few for a false positive rate of {100 * asked.fpr:g} %")
    if not all(rate["high"] <= asked.tpr for rate in rates):
        missed.append(f"has a true positive rate of up to {100 * high:.1f} %, above {100 * asked.tpr:g} %")
    if asked.auc is not None and not all(form["auc"] <= asked.auc for form in forms):
        missed.append(f"has an AUC of {auc:.3f}, above {asked.auc:g}")
    if any(rate["refuted"] for form in forms for rate in form["rates"]):
        missed.append("refutes the guarantee")
    return f"a true positive rate of up to {100 * high:.1f} %, AUC {auc:.3f}, {shadows} shadow runs", missed
