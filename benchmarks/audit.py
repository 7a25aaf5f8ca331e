"""Audits of every mechanism, and of builds that are broken on purpose: what attacks on the code itself prove.

A lower bound above the claimed epsilon proves a claim false. "One run" plants many canaries in one release, each by a
fair coin; "many runs" releases anew with one canary and without it, some thousand times each; "as Gaussian" are the
same runs against the claim that the mechanism is a Gaussian one. Every bound holds with probability `--confidence`, so
that no sound build is refuted by chance, but those of one run with a delta: there what a delta could hide, 2 m delta
alpha, leaves nothing to prove at more than 0.95, and the bounds are far below the truth anyhow.

Usage: python benchmarks/audit.py
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import record
import torch
from canaries import (
    NoNoise,
    class_head_canaries,
    class_sum_canaries,
    joint,
    label_canaries,
    moment_canaries,
    opposing_rows,
    row_canaries,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedstill.audits import lower_bounds as audit
from fedstill.audits.lower_bounds import AuditResult, Canaries, ManyRunsResult
from fedstill.base.seeds import Noise, Simulated, stream
from fedstill.privacy.accounting import epsilon, gaussian_noise
from fedstill.privacy.logistic import BinaryHead, Labelled, LogisticHead, PublishedLogisticHead, extend
from fedstill.privacy.mechanisms import ClassSums, ClippedUpdate, Histogram, NoisySum
from fedstill.privacy.randomized_response import RandomizedResponse, RRWithPrior
from fedstill.privacy.releases import Gaussian, Pure
from fedstill.privacy.second_moments import SecondMoments, upper
from fedstill.privacy.solver import solve

# an audit of a Gaussian needs runs by 1 / epsilon^2; the code of a mechanism is the same for every epsilon
EPSILON, LABEL_EPSILON, DELTA, CLASSES = 4.0, 1.0, 1e-5, 10
SIGMA = gaussian_noise(EPSILON, DELTA)
HALVES = (SIGMA / math.sqrt(0.5),) * 2
MOMENT_BIAS, MOMENT_DIMS = 0.1, 60
Release = Callable[[Labelled, Noise], Tensor]
Make = Callable[[int, Noise], Canaries[Any]]


@dataclass(frozen=True)
class Build:
    """One mechanism as built.

    Attributes:
        name: what the table calls it.
        sound: whether its claim should hold.
        claim: the events that it says it costs.
        make: its canaries, from their number and the noise.
        lone: the same for many runs, where another canary is worse than ``make(1, noise)``.
        fitted: whether each release solves for a head, which takes a millisecond.
    """

    name: str
    sound: bool
    claim: tuple[Gaussian | Pure, ...]
    make: Make
    lone: Make | None = None
    fitted: bool = False


@dataclass(frozen=True)
class Row:
    """What the audits found of one build."""

    build: str
    sound: bool
    claimed: float
    gaussian: bool
    one_run: AuditResult
    many_runs: ManyRunsResult
    seconds: float

    @property
    def bound(self) -> float:
        """The largest of the three lower bounds."""
        return max(self.one_run.epsilon, self.many_runs.epsilon, self.many_runs.gaussian)

    @property
    def verdict(self) -> str:
        """What the bounds say of the claim."""
        return "REFUTED" if self.bound > self.claimed else "holds"


# --- sound builds


def eye(count: int) -> Tensor:
    return torch.eye(count, dtype=torch.float64)


def noisy_sum(count: int, noise: Noise) -> Canaries[Any]:
    return row_canaries(NoisySum(radius=1.0, noise_multiplier=SIGMA), eye(count), noise)


def class_sums(count: int, noise: Noise) -> Canaries[Any]:
    return class_sum_canaries(ClassSums(CLASSES, radius=1.0, noise_multiplier=SIGMA), CLASSES, eye(count), noise)


def twice(count: int, noise: Noise) -> Canaries[Any]:
    """Two rounds of class sums over the same records, each at half the budget."""
    parts = [class_sum_canaries(ClassSums(CLASSES, 1.0, sigma), CLASSES, eye(count), noise) for sigma in HALVES]
    return joint(parts, [1.0, 1.0])


def histogram(count: int, noise: Noise) -> Canaries[Any]:
    return row_canaries(Histogram(count, SIGMA), torch.arange(count), noise)


def head(sigma: float, penalty: float) -> LogisticHead:
    return LogisticHead(num_classes=CLASSES, penalty=penalty, radius=1.0, noise_multiplier=sigma, bias=0.0)


def surroundings(count: int) -> tuple[float, Tensor]:
    """A penalty and other rows that give a lone canary nearly the largest influence, and many a good one cheaply."""
    return (0.3, opposing_rows(1, 128, 0.03)) if count == 1 else (30.0, opposing_rows(count, 1, 0.0)[:1])


def class_head(count: int, noise: Noise, sigma: float = SIGMA) -> Canaries[Any]:
    penalty, others = surroundings(count)
    return class_head_canaries(head(sigma, penalty), eye(count), others, noise)


def score_head(count: int, noise: Noise, sigma: float = SIGMA) -> Canaries[Any]:
    penalty, others = (0.05, opposing_rows(1, 512, 0.005)) if count == 1 else surroundings(count)
    mechanism = BinaryHead(negatives=others, penalty=penalty, radius=1.0, noise_multiplier=sigma, bias=0.0)
    return row_canaries(mechanism, eye(count), noise)


def both_heads(count: int, noise: Noise) -> Canaries[Any]:
    """FedAUXfdp's reply."""
    parts = [class_head(count, noise, HALVES[0]), score_head(count, noise, HALVES[1])]
    # a canary moves either by nearly its sensitivity, and the noise is a fixed multiple of that
    penalties = (0.3, 0.05) if count == 1 else (30.0, 30.0)
    return joint(parts, [penalties[0] / math.sqrt(2), penalties[1]])


def update(count: int, noise: Noise, sigma: float = SIGMA) -> Canaries[Any]:
    """An update of length S: a canary turns the sign of one entry, a lone one that of the whole update, by 2S."""
    mechanism = ClippedUpdate(radius=1.0, noise_multiplier=sigma)

    def release(included: Tensor) -> Tensor:
        return mechanism((2 * included.double() - 1) / math.sqrt(count), noise)

    return Canaries(count, release, lambda value: value)


def moments(noise: float, dims: int, share: float = 0.5, scale: float = math.sqrt(2)) -> Release:
    """G's triangle, its entries off the diagonal times ``scale``, and H times a, with noise on each number."""
    mechanism = SecondMoments(
        num_classes=CLASSES, dims=dims, radius=1.0, noise_multiplier=0.0, bias=MOMENT_BIAS, share=share
    )
    scales = torch.full((dims + 1, dims + 1), scale, dtype=torch.float64).fill_diagonal_(1.0)[upper(dims + 1)]

    def release(rows: Labelled, source: Noise) -> Tensor:
        exact = mechanism([rows], source)
        flat = torch.cat([exact.second.flatten() * scales, exact.first.flatten() * mechanism.weight])
        return flat + noise * source.gaussian(flat.shape)

    return release


def second_moments(count: int, noise: Noise, sigma: float = SIGMA) -> Canaries[Any]:
    """The mechanism itself; its result with its scales again, so that all coordinates have the same noise."""
    dims = min(count, MOMENT_DIMS)
    mechanism = SecondMoments(num_classes=CLASSES, dims=dims, radius=1.0, noise_multiplier=sigma, bias=MOMENT_BIAS)
    silent = replace(mechanism, noise_multiplier=0.0)
    scales = torch.full((dims + 1, dims + 1), math.sqrt(2), dtype=torch.float64).fill_diagonal_(1.0)[upper(dims + 1)]

    def release(rows: Labelled, source: Noise) -> Tensor:
        sums = (silent if isinstance(source, NoNoise) else mechanism)([rows], source)
        return torch.cat([sums.second.flatten() * scales, sums.first.flatten() * mechanism.weight])

    return moment_canaries(release, CLASSES, canary_rows(count, dims), noise)


def canary_rows(count: int, dims: int) -> Tensor:
    """Unit rows: one a direction, and random ones beyond."""
    rng = stream(0, "canary rows")
    others = torch.randn(max(0, count - dims), dims, dtype=torch.float64, generator=rng)
    return torch.cat([eye(dims)[: min(count, dims)], others / others.norm(dim=1, keepdim=True)])


def randomized_response(count: int, noise: Noise) -> Canaries[Any]:
    return label_canaries(RandomizedResponse(CLASSES, LABEL_EPSILON), count, noise)


def with_prior(count: int, noise: Noise) -> Canaries[Any]:
    prior = torch.tensor([0.3, 0.4] + [0.3 / (CLASSES - 2)] * (CLASSES - 2)).expand(count, -1)
    return label_canaries(RRWithPrior(LABEL_EPSILON, prior), count, noise)


# --- broken builds


def silent(count: int, noise: Noise) -> Canaries[Any]:
    """The noise is forgotten."""
    return row_canaries(NoisySum(1.0, 0.0), eye(count), noise)


def half(count: int, noise: Noise) -> Canaries[Any]:
    """Half the noise."""
    return row_canaries(NoisySum(1.0, SIGMA / 2), eye(count), noise)


def half_sensitivity(count: int, noise: Noise) -> Canaries[Any]:
    """The noise is for sensitivity S: a record was thought to shorten the update, not to turn it round."""
    return update(count, noise, SIGMA / 2)


def wrong_penalty(count: int, noise: Noise) -> Canaries[Any]:
    """The penalty is lam, while the noise is for n lam: FedAUX's C = 1 / lam beside the sum of losses."""
    lam, others = surroundings(count)

    def release(rows: Labelled, noise: Noise) -> Tensor:
        return head(SIGMA / len(rows[1]), lam)(rows, noise)  # sensitivities fall with 1 / penalty

    return class_head_canaries(release, eye(count), others, noise)


def own_maximum(rows: Labelled, noise: Noise) -> Tensor:
    """Features are divided by the data's own longest row; the noise is the clipped head's."""
    h, labels = rows
    clipping = head(SIGMA, penalty=5.0)
    beta = solve(extend(h, max(float(h.norm(dim=1).max()), 1e-12), 0.0), labels, CLASSES, clipping.penalty)
    return beta + SIGMA * clipping.sensitivity * noise.gaussian(beta.shape)


def outlier(mechanism: Callable[[Labelled, Noise], Tensor], noise: Noise) -> Canaries[Any]:
    """A canary a thousand times as long as 200 rows of two classes; scored along what it changes without noise."""
    h = torch.zeros(201, 2, dtype=torch.float64)
    h[:100, 0], h[100:200, 0], h[200, 1] = 1.0, -1.0, 1000.0
    labels = torch.arange(201) // 100 % 2

    def release(included: Tensor, noise: Noise = noise) -> Tensor:
        n = 200 + int(included)
        return mechanism((h[:n], labels[:n]), noise)

    inside, outside = (release(torch.tensor([included]), NoNoise()) for included in (True, False))
    return Canaries(1, release, lambda value: (value * (inside - outside)).sum()[None])


def maximum_norm(count: int, noise: Noise) -> Canaries[Any]:
    return class_head_canaries(own_maximum, eye(count), surroundings(count)[1], noise)


def published(scaling: Any, bias: float = 0.1) -> PublishedLogisticHead:
    return PublishedLogisticHead(
        num_classes=CLASSES, lam=0.01, epsilon=EPSILON, delta=DELTA, scaling=scaling, bias=bias
    )


def published_build(scaling: str) -> Build:
    def make(count: int, noise: Noise) -> Canaries[Any]:
        return class_head_canaries(published(scaling, bias=0.0), eye(count), surroundings(count)[1], noise)

    name = f"published class head, '{scaling}' scaling"
    return Build(name, False, GAUSSIAN, make, lambda _, noise: outlier(published(scaling), noise), fitted=True)


def same_seed(count: int, noise: Noise) -> Canaries[Any]:
    """Class sums before and after the canaries join, with noise from one seed."""
    mechanism, each = ClassSums(CLASSES, 1.0, HALVES[0]), torch.arange(count)

    def release(included: Tensor) -> Tensor:
        seed = int(float(noise.uniform((1,))) * 2**53)
        before, after = (
            mechanism((eye(count)[mask], each[mask] % CLASSES), Simulated(stream(seed)))
            for mask in (torch.zeros_like(included), included)
        )
        return after - before

    return Canaries(count, release, lambda value: value[each % CLASSES, each])


def charged_once(count: int, noise: Noise) -> Canaries[Any]:
    """Labels are randomised anew in each of four rounds, and charged for in one."""
    return joint([randomized_response(count, noise) for _ in range(4)], [1.0] * 4)


def products_counted_once(count: int, noise: Noise) -> Canaries[Any]:
    """Entries off the diagonal aren't scaled, and the products are thought to move by the half of their length."""
    share, dims = 0.05, min(count, MOMENT_DIMS)
    believed = math.sqrt(0.5 + share / (1 - share))
    return moment_canaries(moments(SIGMA * believed, dims, share, 1.0), CLASSES, canary_rows(count, dims), noise)


def own_radius(rows: Labelled, noise: Noise) -> Tensor:
    """Sums of rows that were divided by the data's own largest length."""
    features, labels = rows
    longest = max(float(features.norm(dim=1).max()), 1e-12) if len(features) else 1.0
    release = moments(0.0 if isinstance(noise, NoNoise) else SIGMA * math.sqrt(2), features.shape[1])
    return release((features / longest, labels), noise)


def private_radius(count: int, noise: Noise) -> Canaries[Any]:
    dims = min(count, MOMENT_DIMS)
    return moment_canaries(own_radius, CLASSES, canary_rows(count, dims), noise)


def counts_beside(count: int, noise: Noise) -> Canaries[Any]:
    """The exact number of records of each class is sent beside the noisy sums."""
    rows, labels = canary_rows(count, min(count, MOMENT_DIMS)), torch.arange(count) % CLASSES
    release = moments(SIGMA * math.sqrt(2), rows.shape[1])

    def sent(included: Tensor) -> Tensor:
        release((rows[included], labels[included]), noise)
        return torch.bincount(labels[included], minlength=CLASSES).double()

    return Canaries(count, sent, lambda counts: counts[labels])


GAUSSIAN = (Gaussian(noise_multiplier=SIGMA),)
SIGMA_1 = gaussian_noise(1.0, DELTA)
GAUSSIAN_1 = (Gaussian(noise_multiplier=SIGMA_1),)
PAIR = tuple(Gaussian(noise_multiplier=sigma) for sigma in HALVES)
PURE = (Pure(epsilon=LABEL_EPSILON),)
BUILDS = [
    Build("NoisySum", True, GAUSSIAN, noisy_sum),
    Build("ClassSums", True, GAUSSIAN, class_sums),
    Build("ClassSums, two rounds", True, PAIR, twice),
    Build("Histogram", True, GAUSSIAN, histogram),
    Build("LogisticHead", True, GAUSSIAN, class_head, fitted=True),
    Build("BinaryHead", True, GAUSSIAN, score_head, fitted=True),
    Build("both heads (FedAUXfdp)", True, PAIR, both_heads, fitted=True),
    Build("ClippedUpdate", True, GAUSSIAN, update),
    Build("SecondMoments", True, GAUSSIAN, second_moments),
    Build("SecondMoments, epsilon 1", True, GAUSSIAN_1, lambda m, noise: second_moments(m, noise, SIGMA_1)),
    Build("RandomizedResponse", True, PURE, randomized_response),
    Build("RRWithPrior", True, PURE, with_prior),
    Build("no noise", False, GAUSSIAN, silent),
    Build("half the noise", False, GAUSSIAN, half),
    Build("ClippedUpdate, noise for S", False, GAUSSIAN, half_sensitivity),
    Build("penalty lam, noise for n lam", False, GAUSSIAN, wrong_penalty, fitted=True),
    Build(
        "maximum norm, not clipping",
        False,
        GAUSSIAN,
        maximum_norm,
        lambda _, noise: outlier(own_maximum, noise),
        fitted=True,
    ),
    published_build("paper"),
    published_build("repository"),
    Build("SecondMoments, products unscaled", False, GAUSSIAN, products_counted_once),
    Build(
        "SecondMoments, private radius", False, GAUSSIAN, private_radius, lambda _, noise: outlier(own_radius, noise)
    ),
    Build("SecondMoments, counts beside", False, GAUSSIAN, counts_beside),
    Build("two rounds, one seed", False, PAIR, same_seed),
    Build("labels in four rounds, charged once", False, PURE, charged_once),
]


def run(build: Build, confidence: float = 0.999, fast: bool = False) -> Row:
    """Both audits of one build."""
    began = time.process_time()
    label = any(isinstance(event, Pure) for event in build.claim)
    delta = 0.0 if label else DELTA  # a pure claim is one of delta 0
    claimed = epsilon(build.claim, DELTA, "label" if label else "record")
    canaries = (400 if build.fitted else 1000) if fast else 2000
    runs = (800 if build.fitted else 4000) if fast else (6000 if build.fitted else 30_000)
    noise = Simulated(stream(0, build.name, "noise"))
    one = audit.one_run(
        build.make(canaries, noise),
        guesses=canaries // 5,
        rng=stream(0, build.name, "coins"),
        delta=delta,
        confidence=0.95 if delta else confidence,
    )
    lone = (build.lone or build.make)(1, noise)
    many = audit.many_runs(lone.alone, runs if build.sound else runs // 4, delta=delta, confidence=confidence)
    return Row(build.name, build.sound, claimed, not label, one, many, time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--confidence", type=float, default=0.999)
    parser.add_argument("--fast", action="store_true", help="fewer canaries and runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "audit.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("mechanism or build", "claimed", "one run", "many runs", "as Gaussian", "claim", "should", "CPU s")
    found = []
    for build in BUILDS:
        row = run(build, args.confidence, args.fast)
        numbers = (row.claimed, row.one_run.epsilon, row.many_runs.epsilon, row.many_runs.gaussian)
        table.add_row(
            row.build,
            *(f"{number:.2f}" for number in numbers[:3]),
            f"{numbers[3]:.2f}" if row.gaussian else "-",
            row.verdict,
            "hold" if row.sound else "be refuted",
            f"{row.seconds:.0f}",
        )
        found.append(
            {
                "build": row.build,
                "sound": row.sound,
                "claimed_epsilon": row.claimed,
                "one_run": vars(row.one_run),
                "many_runs": vars(row.many_runs) if row.gaussian else {"epsilon": row.many_runs.epsilon},
                "verdict": row.verdict,
                "seconds": round(row.seconds, 1),
            }
        )
    Console(width=120).print(table)
    record.keep(args.out, found, delta=DELTA, confidence=args.confidence)
    wrong = [row["build"] for row in found if (row["verdict"] == "holds") != row["sound"]]
    if wrong:
        raise SystemExit(f"not as it should be: {', '.join(map(str, wrong))}")


if __name__ == "__main__":
    main()
