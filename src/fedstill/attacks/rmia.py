"""The relative attack: how many records of the population a record exceeds in the rise of its probability.

Zarifzadeh, Liu, Shokri, "Low-cost high-power membership inference attacks", ICML 2024 (arXiv:2312.03262), equations 2
to 4 and the offline form; with one to four reference models it is as good as LiRA with many.

Differs from the paper:

* gamma is 1 by default, as in the authors' code (ML Privacy Meter), in place of 2;
* probabilities are plain softmax, without the Taylor softmax and the soft margin of the paper's best settings;
* a record's two views are scored apart, and the scores averaged, in place of a vote;
* where the models with a record are at hand, ``a`` is measured (`slope`): to take the authors' .3 for an unconfident
  model lowers the population's ratios alone, and every record exceeds all of them.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Le
from jaxtyping import Bool, Float, Float64, Int64
from pydantic import PositiveFloat
from torch import Tensor

from fedstill.attacks import lira
from fedstill.base.settings import Settings

POPULATION = 1000
"""Maximum number of records of the population."""
_GRID = torch.arange(11, dtype=torch.float64) / 10


class Rmia(Settings):
    """The relative attack."""

    gamma: PositiveFloat = 1.0
    """Factor by which a record's ratio must exceed that of a population record."""
    a: Annotated[float, Ge(0), Le(1)] | None = None
    """Slope of a record's probability with it by that without it, for the offline form; tuned on the shadow runs,
    measured with one pair."""


def probability(logits: Float[Tensor, "*views n classes"], labels: Int64[Tensor, " n"]) -> Float64[Tensor, "*views n"]:
    """The softmax probability of each record's label."""
    p = logits.double().softmax(-1)
    return p.gather(-1, labels.expand(p.shape[:-1])[..., None])[..., 0]


def of_both(absent: Float64[Tensor, "..."], a: float) -> Float64[Tensor, "..."]:
    """``Pr(x)``, the mean over models with and without a record, from the mean ``absent`` over those without it.

    The mean with it is taken for ``a absent + 1 - a`` (offline form): the result is ``((1 + a) absent + 1 - a) / 2``.
    """
    return ((1 + a) * absent + 1 - a) / 2


def slope(records: Float64[Tensor, "worlds n"], member: Bool[Tensor, "worlds n"]) -> float:
    """``a`` of `of_both` by the mean probabilities with and without records, in [0, 1].

    A ratio of means: noise of single models would lower the slope of a regression.

    Args:
        records: probability of each record's label in worlds of which some were trained on it, some not.
        member: whether a world was trained on a record.
    """
    present, absent = (((records * own).sum(0) / own.sum(0)).mean() for own in (member, ~member))
    rise = (present - absent) / (1 - absent).clamp_min(torch.finfo(torch.float64).tiny)
    return 1 - min(max(float(rise), 0.0), 1.0)


def scores(
    target: Float64[Tensor, " n"],
    usual: Float64[Tensor, " n"],
    target_z: Float64[Tensor, " m"],
    usual_z: Float64[Tensor, " m"],
    gamma: float = 1.0,
) -> Float64[Tensor, " n"]:
    """The share of population records z with ``LR(x, z) > gamma``, of each record x.

    ``LR(x, z) = (Pr(x | target) / Pr(x)) / (Pr(z | target) / Pr(z))``. Larger for likely members.

    Args:
        target: probability of each record's label by the attacked model.
        usual: ``Pr(x)``, see `of_both`.
        target_z: probability of each population record's label by the attacked model.
        usual_z: ``Pr(z)``.
        gamma: the threshold.
    """
    least = torch.finfo(torch.float64).tiny
    ratio, others = target / usual.clamp_min(least), gamma * target_z / usual_z.clamp_min(least)
    return torch.searchsorted(others.sort().values, ratio).double() / len(others)  # those strictly below


def attack(
    settings: Rmia,
    records: Float64[Tensor, "worlds n"],
    population: Float64[Tensor, "worlds m"],
    member: Bool[Tensor, "worlds n"],
    target: int = 0,
) -> dict[str, Float64[Tensor, " n"]]:
    """The scores ``online``, with the reference models of both kinds, and ``offline``, with those without a record.

    Args:
        settings: the settings; ``a`` is set, see `tuned`.
        records: probability of each record's label in the target world 0 and in shadow worlds in pairs.
        population: the same of records that no world was trained on.
        member: whether a world was trained on a record; each is in one world of a pair.
        target: the attacked world; if it is a shadow world, its pair is left out too.

    Raises:
        ValueError: no reference models are left.
    """
    assert settings.a is not None
    pair = {target, target + 1 if target % 2 else target - 1} if target else {0}
    others = [world for world in range(1, len(records)) if world not in pair]
    if not others:
        raise ValueError(f"{len(records) - 1} shadow runs; there must be a pair besides the attacked one")
    outside = ~member[others]
    absent = (records[others] * outside).sum(0) / outside.sum(0)
    usual = {"online": records[others].mean(0), "offline": of_both(absent, settings.a)}
    slopes = {"online": slope(records[others], member[others]), "offline": settings.a}
    absent_z = population[others].mean(0)
    return {
        form: scores(records[target], usual[form], population[target], of_both(absent_z, a), settings.gamma)
        for form, a in slopes.items()
    }


def tuned(
    settings: Rmia,
    records: Float64[Tensor, "worlds n"],
    population: Float64[Tensor, "worlds m"],
    member: Bool[Tensor, "worlds n"],
) -> Rmia:
    """The settings with ``a`` chosen by the mean AUC of attacks on the shadow worlds, whose members are known.

    With one pair, none is left to attack with, and ``a`` is the `slope` between the two.
    """
    if settings.a is not None:
        return settings
    if len(records) == 3:
        return settings.model_copy(update={"a": slope(records[1:], member[1:])})
    worlds = range(1, len(records))

    def area(a: float) -> float:
        tried = settings.model_copy(update={"a": a})
        found = [attack(tried, records, population, member, world)["offline"] for world in worlds]
        return sum(lira.auc(score, member[world]) for score, world in zip(found, worlds, strict=True))

    return settings.model_copy(update={"a": max(_GRID.tolist(), key=area)})
