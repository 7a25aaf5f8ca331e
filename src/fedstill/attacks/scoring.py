"""Scores of a membership attack from the outputs of its worlds, and how often they are right."""

import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64
from torch import Tensor

from fedstill import files, seeds
from fedstill.attacks import lira, rmia
from fedstill.attacks.report import allowed
from fedstill.attacks.rmia import Rmia
from fedstill.attacks.shadow import ShadowAttack
from fedstill.privacy.guarantee import Guarantee
from fedstill.records import Records

FPRS = (0.001, 0.01)
"""False positive rates at which true positive rates are reported."""
_ROWS = 5_000
"""Maximum number of posteriors to train an attack network on."""


class Victim(NamedTuple):
    """``own`` are all its records; ``member[w]`` is True for the records it has in world w; ``others`` nobody has."""

    client: int
    own: Records
    indices: Tensor
    member: Bool[Tensor, "worlds n"]
    others: Records


class Outputs(NamedTuple):
    """Logits of a world's model on the victim's records and on others, as they are and mirrored."""

    own: Float32[Tensor, "2 n classes"]
    others: Float32[Tensor, "2 m classes"]


def by_lira(worlds: list[Outputs], victim: Victim, flip: bool, place: Path) -> dict[str, Tensor]:
    """LiRA's scores, which are also written to ``place``; with ``flip`` of both views of a record."""
    scores = torch.stack([lira.phi(world.own[_views(flip)], victim.own.labels).mean(0) for world in worlds])
    fitted = lira.fit(scores[1:], victim.member[1:])
    ratios = {"online": lira.online(scores[0], fitted), "offline": lira.offline(scores[0], fitted.absent)}
    _store(place / "scores.npz", victim, {"phi": scores, **ratios})
    return ratios


def by_rmia(
    worlds: list[Outputs], victim: Victim, flip: bool, place: Path, settings: Rmia
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """RMIA's scores, likewise, and the settings with their ``a``."""
    views = _views(flip)
    own = torch.stack([rmia.probability(world.own[views], victim.own.labels) for world in worlds], 1)
    others = torch.stack([rmia.probability(world.others[views], victim.others.labels) for world in worlds], 1)
    chosen = rmia.tuned(settings, own[0], others[0], victim.member)
    each = [rmia.attack(chosen, *view, victim.member) for view in zip(own, others, strict=True)]
    ratios = {form: torch.stack([scores[form] for scores in each]).mean(0) for form in each[0]}
    _store(place / "rmia.npz", victim, {"probability": own.mean(0), **ratios})
    return ratios, chosen.model_dump()


def _views(flip: bool) -> slice:
    return slice(None) if flip else slice(1)


def _store(place: Path, victim: Victim, arrays: dict[str, Tensor]) -> None:
    with io.BytesIO() as file:
        every: dict[str, Any] = {**arrays, "member": victim.member, "records": victim.indices}
        np.savez(file, **{name: value.numpy() for name, value in every.items()})
        files.write_bytes(place, file.getvalue())


def accuracy(ratio: Float64[Tensor, " n"], member: Bool[Tensor, " n"], guarantee: Guarantee) -> dict[str, Any]:
    """True positive rates of the scores, and whether they refute the guarantee."""
    limit = allowed(guarantee)
    rates = []
    for fpr in FPRS:
        rate = lira.tpr_at(fpr, ratio, member)
        most = None if limit is None else limit(fpr)
        refuted = None if limit is None else rate.low > limit(rate.fpr_high)
        rates.append({**rate._asdict(), "bound": most, "refuted": refuted})
    return {"auc": lira.auc(ratio, member), "rates": rates}


def posteriors(attack: ShadowAttack, logits_of_worlds: list[Tensor], member: Tensor, seed: int) -> dict[str, Any]:
    """Rates of an attack network on posteriors."""
    each = min(math.ceil(_ROWS / (len(logits_of_worlds) - 1)), member.shape[1])
    rng = seeds.stream(seed, "attack", "posteriors", attack.top or 0)
    chosen = [torch.randperm(member.shape[1], generator=rng)[:each] for _ in logits_of_worlds[1:]]
    rows = torch.cat([logits[0, index] for logits, index in zip(logits_of_worlds[1:], chosen, strict=True)])
    present = torch.cat([mask[index] for mask, index in zip(member[1:], chosen, strict=True)])
    return attack.rates(attack.fit(rows, present, rng), logits_of_worlds[0][0], member[0])
