"""Audits of methods through whole runs: what an attacker proves of epsilon, against the guarantee of the same runs.

An audit has three parts. Runs without noise choose the canaries that move the releases most, and show where to. A pilot
run shows the noise. Then runs with many clients, each with a random half of the canaries, give scores: the likelihood
ratio of each canary, for an attacker who knows all others. What chose a score is not what it is judged by.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from jaxtyping import Float64
from pydantic import NonNegativeInt, PositiveFloat
from scipy.special import ndtri
from torch import Tensor

import fedstill
from fedstill.audits.lower_bounds import Finding, Floats, fitted, from_scores
from fedstill.audits.play import Played
from fedstill.audits.scenes import Masks, Scene, scene
from fedstill.base import files, lookup
from fedstill.base.seeds import stream
from fedstill.base.settings import Settings
from fedstill.privacy.accounting import gaussian_noise
from fedstill.privacy.releases import Gaussian

_PILOT, _BATCH = 400, 200
"""Clients of the pilot run, and of each run that is judged."""
Progress = Callable[[str, int, int], None]
_MOST = 20_000
"""Largest default number of clients."""


class AuditSettings(Settings):
    """Lower bounds on the epsilon of private methods, from attacks on whole runs with worst-case records."""

    epsilon: tuple[PositiveFloat, ...] = (4.0,)
    """Claims to audit, one after the other."""
    clients: Annotated[int, Ge(8)] | None = None
    """Clients in all runs together, each with a random half of the canaries. By default, enough for a bound of 0.8 of
    the claim of a sound method, at most 20,000."""
    confidence: Annotated[float, Gt(0.5), Lt(1)] = 0.95
    """Probability that no bound of the whole command is above the truth; less if scores were judged before with fewer
    clients."""
    seed: NonNegativeInt = 0
    """Seed of the audit."""
    out: Path = Path("runs/audits")
    """Folder of the scores; a repeated command continues with those that are there."""


@dataclass(frozen=True)
class Scoring:
    """An attacker's scores of replies.

    Attributes:
        choice: the scene's choice of records.
        effects: what each canary adds to a reply, ``(canaries, numbers)``.
        weights: of each kind of score, ``(kinds, canaries, numbers)``.
        start: a reply without canaries.
        correlation: factor of the variance of means over canaries, of each kind.
        reach: see `Finding`.
    """

    choice: int
    effects: Float64[Tensor, "m v"]
    weights: Float64[Tensor, "kinds m v"]
    start: Float64[Tensor, " v"]
    correlation: list[float]
    reach: float | None

    def scores(self, replies: Float64[Tensor, "n v"], masks: Masks) -> Float64[Tensor, "kinds n m"]:
        """The score of each canary in each reply, what the other canaries add being known."""
        present = torch.tensor(masks, dtype=torch.float64)
        raw = torch.einsum("nv,kmv->knm", replies - self.start, self.weights)
        added = torch.einsum("iv,kmv->kim", self.effects, self.weights)
        others = added * (1 - torch.eye(len(self.effects), dtype=torch.float64))
        return raw - torch.einsum("ni,kim->knm", present, others)


def audit(names: Sequence[str], settings: AuditSettings, progress: Progress) -> Iterator[Finding]:
    """Audit methods at each epsilon; the probability that a bound is too high is at most the sum of their ``risk``.

    Args:
        names: methods, as `fedstill.audits.scenes.scene` takes them.
        settings: see `AuditSettings`.
        progress: called with a label and the numbers of clients done and of all clients.

    Raises:
        ValueError: a method has no audit, or its scores in the folder are of another audit.
    """
    alpha = (1 - settings.confidence) / (len(names) * len(settings.epsilon))
    for name in names:
        for epsilon in settings.epsilon:
            yield _audit(name, epsilon, settings, alpha, progress)


def _audit(name: str, epsilon: float, settings: AuditSettings, alpha: float, progress: Progress) -> Finding:
    made = scene(name, epsilon)
    attack, pilot = prepare(made, settings.seed)
    claim = pilot.claim
    if not claim.holds or claim.epsilon is None or claim.delta is None:
        raise ValueError(f"{name} claims nothing that could be refuted: {claim.reason}")
    wanted = settings.clients or _needed(claim.epsilon, claim.delta, len(attack.effects), alpha, labels=made.labels)
    place = settings.out / f"{''.join(c if c.isalnum() else '-' for c in name)}-{epsilon:g}.jsonl"
    facts = {
        "version": fedstill.__version__,
        "method": name,
        "settings": made.method.model_dump(mode="json"),
        "code": lookup.source_digests(type(made.method)),
        "seed": settings.seed,
        "start": attack.start.tolist(),
    }
    lines, looks = _read(place, facts)
    done = sum(len(line["masks"]) for line in lines)
    progress(f"{name}, epsilon {epsilon:g}", min(done, wanted), wanted)
    while done < wanted:
        number = len(lines) + 1
        masks = _masks(min(_BATCH, wanted - done), len(attack.effects), settings.seed, number)
        played = made.played(masks, choice=attack.choice, first=_first(settings.seed, _PILOT + done))
        if (played.claim.epsilon, played.claim.delta) != (claim.epsilon, claim.delta):
            raise ValueError(f"{name} claims {played.claim.epsilon} in run {number} and {claim.epsilon} in the pilot")
        lines.append({"masks": masks, "scores": attack.scores(played.replies, masks).tolist()})
        files.append_json(place, lines[-1])
        done += len(masks)
        progress(f"{name}, epsilon {epsilon:g}", min(done, wanted), wanted)
    if alpha > looks.get(done, 0.0):
        looks[done] = alpha
        files.append_json(place, {"clients": done, "alpha": alpha})
    masks = [mask for line in lines for mask in line["masks"]]
    scores = np.concatenate([np.array(line["scores"]) for line in lines], axis=1)
    gaussian = all(isinstance(event, Gaussian) and event.sampling == 1 for event in pilot.events)
    bound, fit = bounds(scores, np.array(masks), attack.correlation, claim.delta, alpha, gaussian=gaussian)
    return Finding(
        name,
        claim.unit or "record",
        claim.epsilon,
        claim.delta,
        bound,
        fit,
        attack.reach,
        len(attack.effects),
        len(masks),
        sum(looks.values()),
        len(looks),
        made.difference(attack.choice),
    )


def bounds(
    scores: Floats, masks: Any, correlation: Sequence[float], delta: float, alpha: float, *, gaussian: bool
) -> tuple[float, float | None]:
    """The largest lower bounds of all kinds of scores: for any mechanism, and by a fit; None if that is not valid.

    Both together are above the truth with probability ``alpha`` at most. Half of it is for the fit of the first kind;
    all other tests share the rest. Bounds for any mechanism use the first canary alone, whose scores are independent.
    """
    rest = alpha / 2 / max(1, 2 * len(scores) - 1)
    most, best = 0.0, 0.0
    for kind, values in enumerate(scores):
        first, has = values[:, 0], masks[:, 0]
        found = from_scores(first[~has], first[has], delta=delta, confidence=1 - (rest if gaussian else alpha / 2))
        most = max(most, found.epsilon)
        if gaussian:
            confidence = 1 - (alpha / 2 if kind == 0 else rest)
            fit = fitted(
                values[~masks], values[masks], delta=delta, confidence=confidence, correlation=correlation[kind]
            )
            best = max(best, fit)
    return most, best if gaussian else None


def prepare(made: Scene, seed: int) -> tuple[Scoring, Played]:
    """Choose canaries by runs without noise, and scores by a pilot run."""
    if made.labels:
        choice, effects, reach, start = 0, None, None, None
    else:
        choice, effects, reach, start = max((quiet(made, i) for i in range(len(made.choices))), key=lambda q: q[2])
    m = len(made.choices[choice].canaries)
    masks = _masks(_PILOT, m, seed, 0)
    pilot = made.played(masks, choice=choice, first=_first(seed, 0))
    present = torch.tensor(masks, dtype=torch.float64)
    if effects is None:  # labels: what randomised response leaves on average
        has = present.bool()[:, 0]
        start = pilot.replies[~has].mean(0)
        effects = (pilot.replies[has].mean(0) - start)[None]
    assert start is not None
    rest = pilot.replies - start - present @ effects
    rest = rest - rest.mean(0)
    variances = rest.var(0)
    least = 1e-9 * float(variances.mean()) + 1e-30
    kinds = [(effects / variances.clamp_min(least), torch.diag(variances.clamp_min(least)))]
    if len(start) <= _PILOT // 5:
        covariance = rest.T @ rest / (len(rest) - len(start)) + least * torch.eye(len(start))
        kinds.append((torch.linalg.solve(covariance, effects.T).T, covariance))
    weights, correlation = [], []
    for w, covariance in kinds:
        products = w @ covariance @ w.T
        scaled = w / products.diagonal().clamp_min(1e-300).sqrt()[:, None]
        weights.append(scaled)
        correlation.append(max(1.0, float((scaled @ covariance @ scaled.T).sum()) / m))
    return Scoring(choice, effects, torch.stack(weights), start, correlation, reach), pilot


def quiet(made: Scene, choice: int) -> tuple[int, Tensor, float, Tensor]:
    """Effects of one choice's canaries, and the largest share of the claimed sensitivity that one of them moves by."""
    m = len(made.choices[choice].canaries)
    masks = [[False] * m, *([i == j for i in range(m)] for j in range(m))]
    played = made.played(masks, choice=choice, quiet=True)
    moved = []
    for j in range(m):
        pairs = zip(played.exact[0], played.exact[1 + j], strict=True)
        moved.append(math.sqrt(sum((float((a - b).norm()) / std) ** 2 for (a, std), (b, _) in pairs)))
    multipliers = [event for event in played.events if isinstance(event, Gaussian)]
    claimed = math.sqrt(sum(event.count / event.noise_multiplier**2 for event in multipliers))
    return choice, played.replies[1:] - played.replies[0], max(moved) / claimed, played.replies[0]


def _masks(count: int, m: int, seed: int, number: int) -> Masks:
    """For each client a random half of ``m`` canaries; half of the clients have each."""
    rng = stream(seed, "audit", "masks", number)
    columns = [torch.randperm(count, generator=rng) < count // 2 for _ in range(m)]
    masks: Masks = torch.stack(columns, 1).tolist()
    return masks


def _first(seed: int, done: int) -> int:
    """The number of the first of a run's clients; no two runs of one audit share a client."""
    return (seed + 1) * 10**7 + done


def _needed(epsilon: float, delta: float, m: int, alpha: float, *, labels: bool) -> int:
    """Clients for a bound of 0.8 of the claim, nearly always."""
    if labels:
        return 4000
    mu = 1 / gaussian_noise(epsilon, delta)
    z = float(-ndtri(alpha / 2)) + 2
    scores = (z / (0.15 * mu)) ** 2 * (2 + mu**2 / 4)
    return min(_MOST, 2 * math.ceil(scores / m) // _BATCH * _BATCH + _BATCH)


def _read(place: Path, facts: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """The scores of an earlier audit with the same facts, and its judgements: the alpha of each number of clients.

    A last line that was not finished is left out.
    """
    lines = files.read_json_lines(place)
    if not lines:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.append_json(place, facts)
    elif lines[0] != json.loads(json.dumps(facts)):
        raise ValueError(f"{place} holds scores of another audit; remove it or give --out another folder")
    looks: dict[int, float] = {}
    for line in lines[1:]:
        if "alpha" in line:  # an extension after a look is another test, whose risk adds to the first one's
            looks[line["clients"]] = max(line["alpha"], looks.get(line["clients"], 0.0))
    return [line for line in lines[1:] if "masks" in line], looks
