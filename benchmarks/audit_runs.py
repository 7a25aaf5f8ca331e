"""Audits through whole runs of the private methods: real engine, real steps, canaries among one client's records.

One run: every canary is in by a fair coin (Steinke, Nasr, Jagielski 2023). Many runs: one canary, hundreds of small
runs with it and without. The attacker knows the canaries, all other records, settings, public images and start weights,
and sees the replies as the journal has them; not the noise. A lower bound above the epsilon that the same run's
guarantee states proves that false. Broken builds go the same way with one function replaced, which the guarantee
doesn't notice.

Usage: python benchmarks/audit_runs.py
"""

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import record
import torch
from doubles import Watched
from rich.console import Console
from rich.table import Table
from small import of_sizes, world
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, one_hot

from fedstill import methods
from fedstill.audit import lower_bounds as audit
from fedstill.audit.lower_bounds import Canaries
from fedstill.data import sources
from fedstill.distill.embedding import embed
from fedstill.distill.public_map import split_public
from fedstill.privacy import logistic, randomized_response, solver
from fedstill.privacy.guarantee import Guarantee
from fedstill.privacy.logistic import extend
from fedstill.privacy.mechanisms import ClippedUpdate, clipped
from fedstill.protocol import load, parameters, public_images
from fedstill.records import Records
from fedstill.seeds import Simulated, stream

EPSILON, LABEL_EPSILON, CONFIDENCE = 4.0, 1.0, 0.95
PER_GUESS, RUNS = 5, 800  # canaries for each guess; runs with a lone canary, and as many without


@dataclass(frozen=True)
class Build:
    """One way to build a method: what is replaced, and what the attacker makes of it.

    Attributes:
        name: what the table calls it.
        patch: replaces what is broken, while the run goes on.
        noise: how much of the stated noise the attacker faces; 0 also where only differences of classes have none.
        penalty: the class head's penalty by the stated one.
    """

    name: str = "as it is"
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    noise: float = 1.0
    penalty: float = 1.0


def gaussian(change: Callable[[Tensor], Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    real = Simulated.gaussian
    return lambda: mock.patch.object(Simulated, "gaussian", lambda noise, shape: change(real(noise, shape)))


SOLVE, INVERSE = solver.solve, randomized_response._inverse
LIGHTER = lambda x, y, classes, penalty, **rest: SOLVE(x, y, classes, penalty / 10, **rest)  # noqa: E731
ONES = lambda noise, shape: torch.ones(*shape).double()  # noqa: E731
SOUND = Build()
SILENT = Build("no noise", gaussian(torch.zeros_like), 0.0)
HALF = Build("half the noise", gaussian(lambda z: z / 2), 0.5)
SHARED = Build("every class has the same noise", gaussian(lambda z: z[:1].expand_as(z) if z.ndim > 1 else z), 0.0)
PENALTY = Build("a tenth of Lambda", lambda: mock.patch.object(logistic, "solve", LIGHTER), 0.1, 0.1)
KEPT = Build("no noise", lambda: mock.patch.object(Simulated, "uniform", ONES))
DOUBLED = Build(
    "labels at twice epsilon", lambda: mock.patch.object(randomized_response, "_inverse", lambda e: INVERSE(2 * e))
)
ONE_SIDED = Build(
    "noise for sensitivity S", lambda: mock.patch.object(ClippedUpdate, "sensitivity", property(lambda m: m.radius))
)


# --- scores: what the attacker makes of a run


def decode(parts: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The best linear guess at coins: of values ``sum_i coin_i effect_i + noise``, effects, the noise's deviation."""
    values = torch.cat([value.flatten() / (std or 1.0) for value, _, std in parts])
    effects = torch.cat([effect.flatten(1) / (std or 1.0) for _, effect, std in parts], 1)
    gram = effects @ effects.T / 4
    rounding = 1e-8 * float(gram.diagonal().mean()) + 1e-12
    gram.diagonal().add_(1.0 if parts[0][2] else rounding)
    guess: Tensor = torch.linalg.solve(gram, effects @ (values - effects.sum(0) / 2))
    return guess


def outer(factors: Tensor, rows: Tensor) -> Tensor:
    """``(m, classes)`` and ``(m, d)`` to ``(m, classes, d)``."""
    return factors[:, :, None] * rows[:, None, :]


def head_scores(fed: Watched, known: Records, canaries: Records, build: Build) -> Tensor:
    """Of a class head, and a score head: what is left to the canaries of ``Lambda beta = -(sum of gradients)``."""
    method: Any = fed.spec.method
    here, model = fed.down[0]["features"], fed.new_model()
    load(model, here.weights)

    def seen(records: Records) -> Tensor:
        return extend(here.rows(model, records), here.radius, method.head.bias)

    x, theirs, reply = seen(known), seen(canaries), fed.up[0][0]
    beta = reply.head.value.double()

    def pull(rows: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = one_hot(labels, len(beta)) - (rows @ beta.T).softmax(1)
        return found

    left = method.head.penalty * build.penalty * beta - pull(x, known.labels).T @ x
    left = left - left.mean(0)  # gradients sum to 0 over classes
    parts = [
        (left, outer(pull(theirs, canaries.labels), theirs), math.sqrt(2) * fed.noise_multipliers[0] * build.noise)
    ]
    if hasattr(reply, "score") and build in (SOUND, HALF):
        public = public_images(fed.public, "the audit")
        alpha, others = reply.score.value.double(), seen(public[split_public(public, method.negatives)[1]])
        left = method.scores.penalty * alpha - (-x @ alpha).sigmoid() @ x + (others @ alpha).sigmoid() @ others
        parts.append((left, (-theirs @ alpha).sigmoid()[:, None] * theirs, fed.noise_multipliers[1] * build.noise))
    return decode(parts)


def sum_scores(fed: Watched, known: Records, canaries: Records, build: Build) -> Tensor:
    """Of class sums: what the known records leave, along each canary's row in its class."""
    method: Any = fed.spec.method
    nets, radius = [fed.new_model(draw=1 + i) for i in range(method.nets)], fed.down[0]["radius"]

    def seen(records: Records) -> Tensor:
        rows = (embed(nets, records) - fed.down[0]["centre"]) * math.sqrt(1 - method.count_share)
        constant = rows.new_full((len(rows), 1), radius * math.sqrt(method.count_share))
        return outer(one_hot(records.labels, fed.num_classes).double(), clipped(torch.cat([rows, constant], 1), radius))

    left, effects = fed.up[0][0].sums.value.double() - seen(known).sum(0), seen(canaries)
    if not build.noise:
        left, effects = left - left.mean(0), effects - effects.mean(1, keepdim=True)
    return decode([(left, effects, radius * fed.noise_multipliers[0] * build.noise)])


def gradients(model: nn.Module, records: Records) -> Tensor:
    """Of each record's loss by the parameters, ``(n, p)``."""

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    found = vmap(grad(loss), (None, 0, 0))(parameters(model), records.inputs(), records.labels)
    return torch.cat([part.flatten(1) for part in found.values()], 1).double()


def update_scores(fed: Watched, known: Records, canaries: Records, build: Build) -> Tensor:
    """Of one step of SGD, clipped: along each canary's gradient at the start."""
    method: Any = fed.spec.method
    effects = -gradients(fed.new_model(), canaries)
    update = torch.cat([part.flatten() for part in fed.up[0][0].update.value.values()]).double()
    if len(effects) == 1:
        alone: Tensor = (effects / effects.norm()) @ update
        return alone
    expected = effects.sum(0) / 2 - gradients(fed.new_model(), known).sum(0)
    scale, along = float(expected.norm()) / method.clip, expected / expected.norm()

    def across(rows: Tensor) -> Tensor:  # clipping hides the length of the whole
        rest: Tensor = rows - (rows @ along)[..., None] * along
        return rest

    std = 2 * method.clip * fed.noise_multipliers[0] * scale * build.noise
    return decode([(across(scale * update) + across(effects).sum(0) / 2, across(effects), std)])


def label_scores(fed: Watched, known: Records, canaries: Records, build: Build) -> Tensor:
    """Of labels that are 0 or 1: with which of them a canary's image was sent."""
    reply = fed.up[1][0]
    images, labels = reply.images.value.flatten(1).float(), reply.labels.value
    same = torch.cdist(canaries.images.flatten(1).float(), images) < 1
    evidence: Tensor = (same & (labels == 1)).sum(1) - (same & (labels == 0)).sum(1)
    return evidence


# --- runs


def drawn(count: int, *name: str) -> Records:
    """Images of random pixels in random classes."""
    rng, like = stream(0, *name), sources.load("digits").train
    images = torch.randint(256, (count, *like.shape), generator=rng).to(torch.uint8)
    return replace(like, images=images, labels=torch.randint(like.num_classes, (count,), generator=rng))


def flat(brightness: int) -> Records:
    like = sources.load("digits").train[:1]
    return replace(like, images=torch.full_like(like.images, brightness), labels=torch.zeros_like(like.labels))


def linear(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """A model whose gradients point along the images, so that those of two records can be opposite."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes, bias=False))


def joined(*parts: Records) -> Records:
    images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    return replace(parts[0], images=images, labels=labels)


def few() -> tuple[str, Records, Records]:
    return "convnet:width=8,depth=1", drawn(5, "others"), drawn(1, "canary")


def opposite() -> tuple[str, Records, Records]:
    """One step goes one way without the canary, and the other way with it."""
    return f"{Path(__file__).stem}:linear", flat(74), flat(120)  # the pixels' mean is 78


@dataclass(frozen=True)
class Attack:
    """One method with what its audits need.

    Attributes:
        method: its name.
        settings: cheap ones.
        score: the attacker's.
        broken: builds that go the same way.
        model: whose features or start the method takes.
        canaries: how many, in one run.
        lone: gives the model, the other records and the canary of many runs; None for no such runs.
    """

    method: str
    settings: dict[str, Any]
    score: Callable[[Watched, Records, Records, Build], Tensor]
    broken: tuple[Build, ...]
    model: str = "scattering"
    canaries: int = 2000
    lone: Callable[[], tuple[str, Records, Records]] | None = None

    def play(self, build: Build, train: Records, model: str, public: Records, seed: int = 0) -> Watched:
        """A whole run with one client, which holds ``train``."""
        method = methods.find(self.method)(**self.settings)
        data, parts = SimpleNamespace(train=train, test=public[:20]), of_sizes(len(train))
        with tempfile.TemporaryDirectory() as place, build.patch():
            facts = {"model": model, "seed": seed, "budget": None, "kind": Watched, "local_test": False}
            fed: Watched = world(method, data, Path(place), parts, lambda: public, **facts).federation
            method.server(fed)
            fed.claim = fed.guarantee()
            fed.noise_multipliers = [
                getattr(entry.event, "noise_multiplier", 0.0) for entry in fed.journal.releases()[0]
            ]
        return fed

    def run(self, build: Build, share: float = 1.0) -> dict[str, Any]:
        """The audits of one build, with ``share`` of the canaries; many runs where one run does not refute it."""
        began, count = time.process_time(), int(self.canaries * share)
        known, canaries = sources.load("digits").train[:400], drawn(count, "canaries")
        found: list[Watched] = []

        def release(included: Tensor) -> Watched:
            # of label privacy, the coin throws the label
            some = replace(canaries, labels=included.long()) if self.score is label_scores else canaries[included]
            found.append(self.play(build, joined(known, some), self.model, drawn(1000, "public")))
            return found[-1]

        planted = Canaries(count, release, lambda fed: self.score(fed, known, canaries, build))
        one = audit.one_run(planted, count // PER_GUESS // 2 * 2, stream(0, self.method, "coins"), delta=0.0)
        claim = found[0].claim
        assert claim.epsilon is not None and claim.delta is not None, claim.reason
        bounds = {"one_run": audit.lower_bound(count, one.guesses, one.correct, claim.delta, CONFIDENCE)}
        if self.lone and (build is SOUND or bounds["one_run"] <= claim.epsilon) and share == 1:
            bounds |= self.often(build, claim, *self.lone())
        return {
            "method": self.method,
            "build": build.name,
            "claimed_epsilon": claim.epsilon,
            "delta": claim.delta,
            "unit": claim.unit,
            "guesses": one.guesses,
            "correct": one.correct,
            **bounds,
            "verdict": "REFUTED" if max(bounds.values()) > claim.epsilon else "not refuted",
            "sound": build is SOUND,
            "seconds": round(time.process_time() - began, 1),
        }

    def often(self, build: Build, claim: Guarantee, model: str, others: Records, canary: Records) -> dict[str, Any]:
        """Many small runs, each from a seed of its own."""
        seeds, public = itertools.count(1), drawn(40, "public")

        def score(included: bool) -> float:
            fed = self.play(build, joined(others, canary) if included else others, model, public, next(seeds))
            assert (fed.claim.epsilon, fed.claim.delta) == (claim.epsilon, claim.delta)
            return float(self.score(fed, others, canary, build)[0])

        assert claim.delta is not None
        found = audit.many_runs(score, RUNS, delta=claim.delta, confidence=CONFIDENCE)
        return {"many_runs": found.epsilon, "as_gaussian": found.gaussian}


HEADS = {"epsilon": EPSILON, "extractor": {"pretrain": "none"}, "head": {"penalty": 30.0}}
STUDENT = HEADS | {"distillation": {"epochs": 1}}
SUMS = {"epsilon": EPSILON, "nets": 4, "ipc": 1, "fitting": {"steps": 2}, "training": {"epochs": 1}}
STILL = {"nets": 1, "lr": 1e-9, "init": "real", "batch_size": 8, "augment": "none"}  # images stay as they start
LABELS = {"epsilon": LABEL_EPSILON, "ipc": 1500, "matching": STILL, "relabel": "none", "training": {"epochs": 1}}
UPDATES = {"epsilon": EPSILON, "local": {"lr": 30.0, "batch_size": 10_000}}  # long ones, of one step
ATTACKS = [
    Attack("fedavg-p", HEADS, head_scores, (SILENT, HALF, PENALTY, SHARED), lone=few),
    Attack("fedd-p", STUDENT, head_scores, (SILENT, HALF, PENALTY, SHARED), lone=few),
    Attack("fedauxfdp", STUDENT, head_scores, (SILENT, HALF, PENALTY, SHARED), lone=few),
    Attack("fedgm-records", SUMS, sum_scores, (SILENT, HALF, SHARED), "convnet:width=32,depth=1", lone=few),
    Attack("fedgm-labels", LABELS, label_scores, (KEPT, DOUBLED), "convnet:width=4,depth=1"),
    Attack("ldp-fedavg", UPDATES, update_scores, (SILENT, ONE_SIDED), "convnet:width=32,depth=1", 1000, opposite),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "audit_runs.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ("one_run", "many_runs", "as_gaussian")
    table = Table("method", "build", "claimed", "one run", "many runs", "as Gaussian", "claim", "should", "CPU s")
    found = [attack.run(build) for attack in ATTACKS for build in (SOUND, *attack.broken)]
    for row in found:
        numbers = [f"{row[name]:.2f}" if name in row else "-" for name in ("claimed_epsilon", *names)]
        should = "hold" if row["sound"] else "be refuted"
        table.add_row(row["method"], row["build"], *numbers, row["verdict"], should, f"{row['seconds']:.0f}")
    Console(width=120).print(table)
    record.keep(args.out, found, confidence=CONFIDENCE, runs=RUNS)
    wrong = [f"{row['method']} ({row['build']})" for row in found if row["sound"] and row["verdict"] == "REFUTED"]
    if wrong:
        raise SystemExit(f"a claim that should hold is refuted: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
