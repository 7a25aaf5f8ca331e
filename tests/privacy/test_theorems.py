"""Words on mechanisms in guarantees come from fedstill's own table, never from a client."""

from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest
import torch
from releases import entry

import fedstill
from fedstill.privacy.class_gaussians import PublishedGaussians
from fedstill.privacy.column_sums import ColumnSums
from fedstill.privacy.dp_sgd import DPSGD, UNBOUNDED, BatchClippedSGD
from fedstill.privacy.integer_sums import IntegerClassSums, IntegerHead, IntegerMoments, IntegerUpdate
from fedstill.privacy.ledger import Charge
from fedstill.privacy.logistic import BinaryHead, LogisticHead, PublishedBinaryHead, PublishedLogisticHead
from fedstill.privacy.mechanisms import (
    NO_REASON,
    NO_THEOREM,
    UNKNOWN,
    ClassSums,
    ClippedUpdate,
    Histogram,
    Mechanism,
    NoisySum,
    UnprotectedLabels,
    own_words,
)
from fedstill.privacy.randomized_response import RandomizedResponse, RRWithPrior
from fedstill.privacy.releases import Unbounded
from fedstill.privacy.second_moments import SecondMoments

PRIOR = torch.full((3, 4), 0.25)
HEAD: dict[str, Any] = {"num_classes": 4, "penalty": 0.3, "radius": 2.0, "noise_multiplier": 1e-5}
PUBLISHED: dict[str, Any] = {"lam": 1e-3, "epsilon": 1.0, "delta": 1e-5}


def made() -> list[Mechanism[Any, Any]]:
    """Mechanisms of every kind, with numbers of every form."""
    few = [NoisySum(1e-7, 1.0), NoisySum(123456.0, 0.0), ClassSums(4, 0.25, 1.0), ClippedUpdate(1e9, 1.0)]
    few += [Histogram(4, 1.0), RandomizedResponse(4, 1e-6), RRWithPrior(0.5, PRIOR), RRWithPrior(0.5, PRIOR, k=2)]
    few += [UnprotectedLabels("labels are not randomised"), LogisticHead(**HEAD)]
    binary = {name: value for name, value in HEAD.items() if name != "num_classes"}
    few += [BinaryHead(**binary, negatives=torch.zeros(1, 2))]
    few += [SecondMoments(num_classes=4, dims=3, radius=1.0, noise_multiplier=1.0, share=0.123456789)]
    whole: dict[str, Any] = {"radius": 0.5, "noise_multiplier": 1.0, "adders": 90}
    few += [IntegerMoments(num_classes=4, dims=3, share=0.123, **whole), IntegerUpdate(**whole)]
    few += [IntegerClassSums(num_classes=4, **whole)]
    exact = LogisticHead(**{**HEAD, "noise_multiplier": 0.0})
    few += [IntegerHead(head=exact, features=3, noise_multiplier=1.0, adders=90)]
    few += [ColumnSums(num_classes=4, columns=7, noise_multiplier=3.0, adders=90)]
    few += [PublishedGaussians(radius=1.0, epsilon=1.0, delta=1e-5)]
    sgd: dict[str, Any] = {"lr": 0.1, "clip": 1e-4, "noise_multiplier": 1.0, "sampling": 1 / 3, "steps": 10**6}
    few += [DPSGD(model=torch.nn.Linear(2, 2), batch_size=8, **sgd)]
    few += [PublishedBinaryHead(**PUBLISHED, negatives=torch.zeros(1, 2))]
    few += [PublishedLogisticHead(**PUBLISHED, num_classes=4, scaling=how) for how in ("paper", "repository")]
    return few


def listed(mechanism: Mechanism[Any, Any]) -> Charge:
    facts = {"mechanism": type(mechanism).__name__, "theorem": mechanism.theorem, "event": mechanism.event}
    return entry().model_copy(update=facts)


@pytest.mark.parametrize("mechanism", made(), ids=lambda each: type(each).__name__)
def test_an_honest_client_s_words_are_those_of_the_table(mechanism: Mechanism[Any, Any]) -> None:
    assert own_words(listed(mechanism)) == listed(mechanism)


def test_every_mechanism_has_its_sentences() -> None:
    root = Path(fedstill.__file__).parent
    for path in (root / "privacy").glob("*.py"):
        import_module(f"fedstill.privacy.{path.stem}")

    def kinds(kind: type) -> set[type]:
        return {kind}.union(*map(kinds, kind.__subclasses__()))

    own = {k for k in kinds(Mechanism) if k.__module__.startswith("fedstill.") and not isabstract(k)}
    public = {k for k in own if not k.__name__.startswith("_")}
    assert {type(each) for each in made()} | {BatchClippedSGD} == public
    assert all(k.theorems and all(words.strip() for words in k.theorems) for k in public)
    assert UNBOUNDED.reason in BatchClippedSGD.reasons


def test_a_class_of_one_s_own_with_a_name_of_fedstill_s_takes_no_sentence_away() -> None:
    class NoisySum(Mechanism[Any, Any]):
        """A namesake without sentences."""

    honest = listed(made()[0])
    assert NoisySum.__name__ == honest.mechanism and own_words(honest) == honest


def test_a_client_s_own_words_stand_nowhere() -> None:
    praise = "epsilon is 0. The auditor approved this run."
    for mechanism, theorem, event in (
        ("NoisySum", praise, entry().event),
        ("NoisySum", listed(NoisySum(1.0, 1.0)).theorem + praise, entry().event),
        ("NoisySum", listed(NoisySum(1.0, 1.0)).theorem.replace("most 1,", f"most {praise},"), entry().event),
        ("NoisySum", listed(Histogram(4, 1.0)).theorem, entry().event),
        ("the_auditor_approved_this_run", praise, entry().event),
        ("NoisySum", praise, Unbounded(reason=praise)),
    ):
        found = own_words(entry().model_copy(update={"mechanism": mechanism, "theorem": theorem, "event": event}))
        assert "auditor" not in found.model_dump_json()
        assert found.theorem == NO_THEOREM
        assert found.mechanism == (UNKNOWN if "auditor" in mechanism else "NoisySum")
        assert found.event == (Unbounded(reason=NO_REASON) if isinstance(event, Unbounded) else event)
