"""The relative attack against the paper's formulas, written out one pair of records at a time."""

import pytest
import torch
from torch import Tensor

from fedstill.attacks import lira, rmia
from fedstill.attacks.membership import membership_design
from fedstill.attacks.rmia import Rmia
from fedstill.base.seeds import stream


def worlds(shadows: int, n: int = 60, m: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of records, which are higher in worlds that were trained on them, and of a population."""
    rng = stream(0, "worlds")
    member = membership_design(0, 0, n, shadows)
    hard = torch.randn(n, generator=rng, dtype=torch.float64) * 2  # records differ more than worlds do
    noise = torch.randn(shadows + 1, n, generator=rng, dtype=torch.float64) * 0.3
    own = torch.sigmoid(hard + noise + member.double())
    others = torch.sigmoid(torch.randn(m, generator=rng, dtype=torch.float64) * 2).expand(shadows + 1, m)
    return own, others.contiguous(), member


def by_hand(own: Tensor, others: Tensor, member: Tensor, a: float, gamma: float, offline: bool) -> list[float]:
    found = []
    if not offline:
        others_of = [(own[w, i], bool(member[w, i])) for w in range(1, len(own)) for i in range(own.shape[1])]
        present, absent = (torch.stack([p for p, m in others_of if m is kind]).mean() for kind in (True, False))
        a = 1 - float(((present - absent) / (1 - absent)).clamp(0, 1))
    for i in range(own.shape[1]):
        outside = [float(own[w, i]) for w in range(1, len(own)) if not member[w, i]]
        if offline:
            usual = 0.5 * ((1 + a) * sum(outside) / len(outside) + (1 - a))
        else:
            usual = float(own[1:, i].mean())
        wins = 0
        for z in range(others.shape[1]):
            usual_z = 0.5 * ((1 + a) * float(others[1:, z].mean()) + (1 - a))
            wins += (float(own[0, i]) / usual) / (float(others[0, z]) / usual_z) > gamma
        found.append(wins / others.shape[1])
    return found


@pytest.mark.parametrize("shadows", [2, 4])
@pytest.mark.parametrize(("a", "gamma"), [(0.0, 1.0), (0.3, 2.0), (1.0, 1.0)])
def test_scores_are_those_of_the_formula(shadows: int, a: float, gamma: float) -> None:
    own, others, member = worlds(shadows)
    found = rmia.attack(Rmia(a=a, gamma=gamma), own, others, member)
    assert found["offline"].tolist() == pytest.approx(by_hand(own, others, member, a, gamma, True))
    assert found["online"].tolist() == pytest.approx(by_hand(own, others, member, a, gamma, False))
    assert 0 < float(found["offline"].std())


def test_one_pair_of_shadow_runs_finds_members_that_lira_needs_more_for() -> None:
    own, others, member = worlds(2, n=2000, m=500)
    found = rmia.attack(rmia.tuned(Rmia(), own, others, member), own, others, member)
    areas = {form: lira.auc(score, member[0]) for form, score in found.items()}
    alone = lira.auc(own[0], member[0])  # the probability by itself: most of its spread is how hard a record is
    # 2000 coins: the area has a standard deviation of 0.013
    assert alone < 0.7 and min(areas.values()) > alone + 4 * 0.013
    swapped = {form: lira.auc(score, member[1]) for form, score in found.items()}
    assert max(swapped.values()) < 0.5 + 4 * 0.013  # of another world's members it tells nothing


def test_a_is_tuned_on_shadow_runs_alone() -> None:
    own, others, member = worlds(6)
    tuned = rmia.tuned(Rmia(), own, others, member)
    unlike = own.clone()
    unlike[0] = 0.5  # the target
    assert tuned.a == rmia.tuned(Rmia(), unlike, others, member).a
    areas = {}
    for a in (0.0, tuned.a, 1.0):
        each = [rmia.attack(Rmia(a=a), own, others, member, world)["offline"] for world in range(1, 7)]
        areas[a] = sum(lira.auc(score, member[world + 1]) for world, score in enumerate(each))
    assert areas[tuned.a] == max(areas.values())
    assert rmia.tuned(Rmia(a=0.7), own, others, member).a == 0.7
    one_pair = rmia.tuned(Rmia(), own[:3], others[:3], member[:3]).a
    assert one_pair == rmia.slope(own[1:3], member[1:3]) and 0.3 < one_pair < 1.0


@pytest.mark.parametrize("shadows", [2, 4])
def test_records_of_an_unconfident_model_are_not_all_above_the_population(shadows: int) -> None:
    """Their probabilities rise from .1 to .11, where the authors' a of .3 would have them rise to .7."""
    rng = stream(1, "unconfident")
    member = membership_design(0, 0, 2000, shadows)
    noise = torch.randn(shadows + 1, 2000, generator=rng, dtype=torch.float64) * 0.002
    own = 0.1 + 0.02 * torch.rand(2000, generator=rng, dtype=torch.float64) + noise + 0.01 * member
    others = 0.1 + 0.002 * torch.randn(shadows + 1, 1000, generator=rng, dtype=torch.float64)
    found = rmia.attack(rmia.tuned(Rmia(), own, others, member), own, others, member)
    for score in found.values():
        assert (score[~member[0]] == 1).double().mean() < 0.05
        assert lira.auc(score, member[0]) > 0.9
    assert rmia.slope(own[1:], member[1:]) == pytest.approx(1 - 0.01 / 0.89, abs=1e-3)
    assert rmia.slope(own[1:], ~member[1:]) == 1.0  # a probability that falls


def test_a_shadow_run_is_attacked_without_its_pair() -> None:
    own, others, member = worlds(4)
    before = rmia.attack(Rmia(a=0.3), own, others, member, target=3)["online"]
    own[4], own[0] = 0.0, 0.0
    assert torch.equal(rmia.attack(Rmia(a=0.3), own, others, member, target=3)["online"], before)
    with pytest.raises(ValueError, match="there must be a pair besides the attacked one"):
        rmia.attack(Rmia(a=0.3), own[:3], others[:3], member[:3], target=1)


def test_extreme_logits_score_as_numbers() -> None:
    logits = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [0.0, 0.0]])
    p = rmia.probability(logits, torch.tensor([0, 0, 1]))
    assert p.tolist() == [1.0, 0.0, 0.5]
    nothing = torch.zeros(3, dtype=torch.float64)
    found = rmia.scores(p, nothing, nothing, nothing)
    assert torch.isfinite(found).all() and found.tolist() == [1.0, 0.0, 1.0]
