"""A search for requests under which one record moves a release most, through the code of a real site.

Two sites hold the same records but for one, or but for one label. The searcher changes weights, maps, centres, radii
and numbers among the settings: by gradient ascent where a release has a differentiable form (`hostile_aims`), else and
then by evolution, which keeps what moves most and goes on from there. Real noise is drawn and left out of the value,
so that the movement is exact; it is divided by the sensitivity that the ledger was charged for. Above 1, a guarantee
is false. All else in both replies must be equal to the bit, and no request may be answered by one site alone.

Methods that the file of results has already, with as many requests or more, are left out.

Usage: python benchmarks/hostile_requests.py --requests 2000 [METHOD ...]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import hostile_aims as aims
import numpy as np
import record
import torch
from method_settings import SMALL
from torch import Tensor

from fedstill import methods
from fedstill.audits import neighbours
from fedstill.audits.play import Copies, Game, play
from fedstill.audits.scenes import LIKE, joined, random_images
from fedstill.base import seeds
from fedstill.base.records import Records
from fedstill.distill.public_map import PublicFeatures, split_public
from fedstill.engines.client import NO_REPLY
from fedstill.engines.run_spec import RunSpec
from fedstill.privacy import randomized_response
from fedstill.privacy.ledger import Charge, Ledger
from fedstill.privacy.releases import Event, Gaussian, Pure
from fedstill.protocol import client_steps, wire
from fedstill.sites.site import setup
from fedstill.sites.site.answer import answer
from fedstill.sites.site.policy import SitePolicy

ROUNDS: dict[str, Any] = {"rounds": 1, "participation": 1.0, "local": {"steps": 1, "batch_size": 64}}
ROUNDS["local"]["supposed_records"] = 64
LABELS = {**SMALL["fedgm-labels"], "relabel": "none", "matching": {"nets": 1, "steps": 1, "batch_size": 2}}
METHODS: dict[str, dict[str, Any]] = {
    **{name: SMALL[name] for name in ("fedavg-p", "fedd-p")},
    "fedauxfdp": {**SMALL["fedauxfdp"], "negatives": 0.9},
    **{name: SMALL[name] for name in ("afl", "deepafl", "fedcgs", "fedcgs-p", "gh-ofl", "safle")},
    "fedpft": {**SMALL["fedpft"], "epsilon": 1.0, "mixture": {"components": 1, "covariance": "full"}},
    "fedcof": {**SMALL["fedcof"], "epsilon": 1.0},
    **{name: SMALL[name] for name in ("fedgm-records", "fedrd-records")},
    "ldp-fedavg": {"local": {"momentum": 0.0, "batch_size": 128, "epochs": 1}},
    **{name: ROUNDS for name in ("dp-fl", "adap-dp-fl", "fedkd", "fedkadp")},
    "fedgm-labels": LABELS,
}
MODELS = {"fedrd-records": "projected:width=4"}
_HEAD, _LENGTHS = {"head.penalty": (0.01, 1e3), "head.bias": (0.0, 0.99)}, (1e-9, 1e9)
_MOMENTS = {"bias": (1e-3, 0.999), "share": (1e-3, 0.999)}
NUMBERS: dict[str, dict[str, tuple[float, float]]] = {
    **dict.fromkeys(("fedavg-p", "fedd-p"), _HEAD),
    "fedauxfdp": {**_HEAD, "scores.penalty": (0.01, 1e3)},
    **dict.fromkeys(("afl", "deepafl", "fedcgs", "fedcgs-p", "gh-ofl", "safle", "fedpft"), _MOMENTS),
    "fedcof": {"bias": (1e-3, 0.999)},
    **dict.fromkeys(("fedgm-records", "fedrd-records"), {"count_share": (1e-3, 0.999)}),
    **dict.fromkeys(("dp-fl", "adap-dp-fl", "fedkd", "fedkadp"), {"local.lr": _LENGTHS, "local.clip": _LENGTHS}),
    "ldp-fedavg": {"local.lr": _LENGTHS, "clip": _LENGTHS},
    "fedgm-labels": {"temperature": (1e-3, 1e3)},
}
"""Settings that the searcher changes, within these bounds."""
RECORDS, HEAD_RECORDS, PUBLIC, POOL, AIMED, FRESH = 100, 1500, 40, 8, 0.4, 250
"""Records of a site, and of one that trains heads; public images; requests that are kept; share of requests by gradient
ascent; requests between new folders of the sites, whose ledgers grow."""
Values = dict[str, Any]
Candidate = tuple[Values, dict[str, float]]


@dataclass
class Heard:
    """What a site released, what it was charged, and what it sent."""

    exact: list[tuple[Tensor, float]] = field(default_factory=list)
    labels: list[tuple[Tensor, ...]] = field(default_factory=list)
    epsilon: float = 0.0
    charged: list[Event] = field(default_factory=list)
    reply: bytes = b""


@contextmanager
def listening(heard: Heard) -> Iterator[None]:
    """Real noise is drawn, what it was for is noted, and a value that does not depend on records is released.

    So that whatever follows a release, as later steps and a client's state, is the same at both sites.
    """
    charge = Ledger.charge

    def added(noise: seeds.Entropy, exact: Tensor, std: float) -> Tensor:
        noise.gaussian(exact.shape)
        heard.exact.append((exact.clone(), std))
        return std * torch.randn(exact.shape, dtype=torch.float64, generator=seeds.stream(len(heard.exact), "released"))

    def drawn(labels: Tensor, order: Tensor, k: Tensor, epsilon: float, noise: seeds.Entropy) -> Tensor:
        noise.uniform((2, len(labels)))
        heard.labels.append((order, k, labels))
        heard.epsilon = epsilon
        return order[:, 0].roll(1)

    def spy(ledger: Ledger, entry: Charge, *more: Any) -> None:
        charge(ledger, entry, *more)
        heard.charged.append(entry.event)

    with (
        mock.patch.object(seeds.Entropy, "added", added),
        mock.patch.object(randomized_response, "_drawn", drawn),
        mock.patch.object(Ledger, "charge", spy),
    ):
        yield


def moved(one: Heard, other: Heard) -> list[float]:
    """How far each release moves, over what it was charged for.

    Raises:
        AssertionError: something else that leaves depends on the record.
    """
    assert one.charged == other.charged and len(one.exact) == len(other.exact), "what was charged tells the record"
    assert one.reply == other.reply, "replies differ beside their releases"
    if one.labels:
        return [_odds(a, b, one) for a, b in zip(one.labels, other.labels, strict=True)]
    multipliers = [event.noise_multiplier for event in one.charged if isinstance(event, Gaussian)]
    per_release = len(one.exact) // len(multipliers)
    return [
        float((a - b).norm()) / std * multipliers[i // per_release]
        for i, ((a, std), (b, _)) in enumerate(zip(one.exact, other.exact, strict=True))
    ]


def _odds(one: tuple[Tensor, ...], other: tuple[Tensor, ...], heard: Heard) -> float:
    """The largest log ratio of a randomised label's probabilities, over the epsilon that was charged."""
    (order, k, _), (event,) = one, heard.charged
    assert torch.equal(order, other[0]) and torch.equal(k, other[1]), "a prior depends on a label"
    assert isinstance(event, Pure)
    ranks = (order.shape[1] - order.argsort(1)).double()
    logs = randomized_response.probabilities(ranks, heard.epsilon, k).log()
    spread = logs.amax(1) - logs.amin(1)
    return float(spread[torch.isfinite(spread)].max()) / event.epsilon


class Sites:
    """Two real sites that differ by a record, or by a label."""

    def __init__(self, name: str, folder: Path, rng: np.random.Generator) -> None:
        self.name, self.folder, self.rng = name, folder, rng
        self.asked, self.alone, self.seed = 0, 0, 0
        self.kind: Any = methods.find(name)
        self.model = MODELS.get(name, "convnet:width=4,depth=1")
        more = random_images(RECORDS, "hostile")
        if "head.bias" in NUMBERS[name]:  # heads move most beside many alike records of the other class
            more = more[torch.arange(HEAD_RECORDS) % 8]
            more = replace(more, labels=torch.ones_like(more.labels))
        outlier = replace(more[:1], images=255 * (torch.arange(64).view(1, 1, 8, 8) % 2).to(torch.uint8))
        self.records = joined(replace(outlier, labels=torch.zeros(1, dtype=torch.int64)), more[1:])
        self.public = random_images(PUBLIC, "public")
        method = self.kind(**METHODS[name])
        task = Game(self.model, 1e3 if name in ("adap-dp-fl", "fedkadp") else None)
        asked = play(method, Copies([self.records], [0], self.public), task, quiet=True).requests
        self.labels = method.protects == "label"
        self.first = asked[-1] if self.labels else asked[0]
        heard = neighbours.Heard()
        play(method, Copies([self.records], [0], self.public), task, heard=heard)
        names = [wire.envelope(request)["step"] for request, _ in heard.messages]
        self.step = client_steps(self.kind)[names[-1] if self.labels else names[0]]

    def _fresh(self) -> None:
        other = self.records[1:]
        if self.labels:
            other = replace(self.records, labels=self.records.labels.clone())
            other.labels[0] = 1 - other.labels[0]
        self.policies = [
            self._site(self.folder / f"{self.asked}-{i}", part) for i, part in enumerate((self.records, other))
        ]
        while self.labels:  # the label that differs must not be in the first part
            heard = self._asked(self._spec({}), self._encoded({}, client_steps(self.kind)["distil_part"], 0))
            if torch.equal(heard[0].labels[0][2], heard[1].labels[0][2]):
                return
            self.seed += 1

    def _site(self, place: Path, records: Records) -> SitePolicy:
        place.mkdir()
        np.savez(place / "data.npz", x_train=records.images.permute(0, 2, 3, 1).numpy(), y_train=records.labels.numpy())
        limits = {"max_questions": 10**6, "max_failures": 10**6, "runs_per_day": 10**6, "keep_sent_gb": 0}
        budget = {"budget": 1e6} if self.name in ("adap-dp-fl", "fedkadp") else {}
        names = {"client": 0, "data": "data.npz", "state": "state", "methods": [self.name], "unprotected": True}
        return setup.site(place, {**names, **limits, **budget})

    def _spec(self, numbers: Mapping[str, float]) -> RunSpec:
        settings = json.loads(json.dumps(METHODS[self.name]))
        for name, value in numbers.items():
            place, _, last = name.rpartition(".")
            (settings.setdefault(place, {}) if place else settings)[last] = value
        facts = {"name": self.name, "model": self.model, "public": f"noise={PUBLIC}", "simulated_noise": False}
        return RunSpec.of(self.kind(**settings), LIKE, run="0" * 32, seed=self.seed, **facts)

    def _encoded(self, values: Values, step: Any, exchange: int) -> bytes:
        arguments = dict(values)
        if "features" in self.first and values:
            fields = {n: arguments.pop(n) for n in ("weights", "mean", "projection", "radius")}
            arguments["features"] = PublicFeatures(**fields)
        envelope = {"step": step.name, "exchange": exchange}
        return wire.encode(step.payload(arguments), step.request, self._spec({}).facts, envelope)

    def _asked(self, spec: RunSpec, request: bytes) -> list[Heard]:
        heard = [Heard(), Heard()]
        for policy, mine in zip(self.policies, heard, strict=True):
            with listening(mine):
                mine.reply = answer(policy, spec.text(), request)
        return heard

    def movement(self, candidate: Candidate) -> list[float]:
        """How far the record moves each release, over its sensitivity; nothing for requests without a reply."""
        if self.asked % FRESH == 0:
            self._fresh()
        self.asked += 1
        try:
            request = self._encoded(candidate[0], self.step, self.asked)
            spec = self._spec({} if self.labels else candidate[1])  # labels' first part belongs to one run
        except ValueError:
            return []
        heard = self._asked(spec, request)
        none = [each.reply == NO_REPLY or "error" in wire.envelope(each.reply) for each in heard]
        self.alone += none[0] != none[1]
        return [] if any(none) else moved(*heard)

    def start(self) -> Candidate:
        """What an honest server asks."""
        values: Values = {}
        for name, value in self.first.items():
            values |= vars(value) if isinstance(value, PublicFeatures) else {name: value}
        spec = self._spec({}).method.model_dump()
        numbers = {}
        for name in NUMBERS[self.name]:
            found: Any = spec
            for part in name.split("."):
                found = found[part]
            if found is not None:
                numbers[name] = float(found)
        return values, numbers

    def aimed(self, requests: int) -> Iterator[Candidate]:
        """Candidates by gradient ascent, some from each of several starts."""
        values, numbers = self.start()
        release: list[tuple[Any, float, dict[str, float]]] = []
        if "head.bias" in NUMBERS[self.name]:
            for room, penalty in ((1.0, 0.4), (0.7, 0.2), (1.5, 2.0)):
                release.append((aims.heads, room, {"head.penalty": penalty, "head.bias": 0.0}))
                if "scores.penalty" in numbers:
                    more = {"scores.penalty": penalty, "head.bias": 0.0, "head.penalty": 1.0}
                    release.append((partial(aims.heads, scores=True), room, more))
        elif self.name == "ldp-fedavg":
            release = [(aims.updates, scale, {"local.lr": 1e3, "clip": 1e-6}) for scale in (1.0, 0.1)]
        for aim, room, more in release:
            settings = {**numbers, **more}
            negatives = self.public[split_public(self.public, 0.9)[1]]
            worlds = aims.Worlds(self._spec({}).new_model().eval(), self.records, negatives, settings)
            for found in aim(values, worlds, room, requests // len(release)):
                yield found, settings

    def changed(self, candidate: Candidate) -> Candidate:
        """A hostile variant: of some tensors and numbers; noise, which the charge follows, stays as it is."""
        values, numbers = candidate
        some = {
            n: v if self.rng.random() < 0.4 or n in ("noise", "energy") else self._mutated(v) for n, v in values.items()
        }
        bounds = NUMBERS[self.name]
        more = {
            n: v if self.rng.random() < 0.7 else float(np.clip(v * 10 ** self.rng.normal(0, 1), *bounds[n]))
            for n, v in numbers.items()
        }
        return some, more

    def _mutated(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: w if self.rng.random() < 0.5 else self._mutated(w) for name, w in value.items()}
        if isinstance(value, float):
            return float(np.clip(value * 10 ** self.rng.normal(0, 3), 1e-20, 1e20))
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        kind, rng = int(self.rng.integers(8)), torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        noise = torch.randn(value.shape, generator=rng) * value.abs().mean()
        if kind == 0:
            return value * 10 ** float(self.rng.normal(0, 2))
        if kind == 1:
            return value + noise * 10 ** float(self.rng.normal(-1, 1))
        if kind == 2:
            return value * (torch.rand(value.shape, generator=rng) < 0.5)
        if kind == 3:  # twins with opposite signs leave nothing but rounding
            half = len(value) // 2
            return torch.cat([value[:half], -value[:half], value[2 * half :]])
        if kind == 4:
            return value[:1].expand_as(value).contiguous()
        return -value if kind == 5 else value + noise * 10 ** float(self.rng.normal(-3, 1))


def search(name: str, requests: int) -> dict[str, Any]:
    """The largest movement that ``requests`` requests find."""
    began, rng = time.process_time(), np.random.default_rng(0)
    torch.manual_seed(0)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        sites = Sites(name, Path(place), rng)
        honest = sites.movement(sites.start())
        most, answered, best = honest, int(bool(honest)), 0.0
        pool = [(max(honest, default=0.0), sites.start())]
        aimed = sites.aimed(int(AIMED * (requests - 1)))
        for _ in range(requests - 1):
            child = next(aimed, None)
            by_ascent = child is not None
            child = child or sites.changed(pool[int(rng.integers(len(pool)))][1])
            found = sites.movement(child)
            answered += bool(found)
            most = [max(pair) for pair in zip(most, found, strict=True)] if found and most else most or found
            best = max([best, *found]) if by_ascent else best
            pool = sorted([*pool, (max(found, default=0.0), child)], key=lambda each: -each[0])[:POOL]
    row = {"method": name, "requests": requests, "answered": answered, "by_one_site_alone": sites.alone}
    row |= {"honest": max(honest, default=0.0), "by_ascent": best, "largest": max(most, default=0.0)}
    return {**row, "by_release": most, "seconds": round(time.process_time() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hostile_requests.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = json.loads(args.out.read_text())["table"] if args.out.exists() else []
    table = [row for row in table if row["requests"] >= args.requests]
    for name in args.methods:
        if name not in {row["method"] for row in table}:
            table.append(search(name, args.requests))
            print(table[-1], flush=True)
            record.keep(args.out, table)
    if wrong := [row["method"] for row in table if not row["largest"] <= 1 + 1e-9 or row["by_one_site_alone"]]:
        raise SystemExit(f"one record moves a release too far, or is told otherwise: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
