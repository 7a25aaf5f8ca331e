"""An evolutionary search for requests under which one record moves a release most, through the code of a real site.

Two sites hold the same records but for one. The searcher changes weights, maps, centres and radii of the server's
request, keeps what moves most, and goes on from there. Real noise is drawn and left out of the value, so that the
movement is exact; it is divided by the sensitivity that the ledger was charged for. Above 1, a guarantee is false.

Usage: python benchmarks/hostile_requests.py --requests 2000 [METHOD ...]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import record
import torch
from method_settings import SMALL
from torch import Tensor

from fedstill import methods, seeds, wire
from fedstill.audit.play import Copies, Task, play
from fedstill.audit.scene import LIKE, joined, random_images
from fedstill.distill.public_map import PublicFeatures
from fedstill.engines.run_spec import RunSpec
from fedstill.engines.site import NO_REPLY
from fedstill.privacy.events import Event, Gaussian
from fedstill.privacy.ledger import Entry, Ledger
from fedstill.protocol import client_steps
from fedstill.records import Records
from fedstill.sites import setup
from fedstill.sites.answer import answer
from fedstill.sites.policy import SitePolicy

ROUNDS = {"rounds": 1, "participation": 1.0, "local": {"steps": 1, "batch_size": 64, "supposed_records": 64}}
METHODS: dict[str, dict[str, Any]] = {
    **{name: SMALL[name] for name in ("fedavg-p", "fedauxfdp", "afl", "gh-ofl", "fedgm-records")},
    **{name: ROUNDS for name in ("dp-fl", "fedkd")},
    "ldp-fedavg": {"local": {"lr": 0.05, "batch_size": 16}},
}
MODEL, RECORDS, POOL = "convnet:width=4,depth=1", 100, 8
Values = dict[str, Any]


@dataclass
class Heard:
    """Exact values and the noise of a reply, and what was charged."""

    exact: list[tuple[Tensor, float]] = field(default_factory=list)
    charged: list[Event] = field(default_factory=list)


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

    def spy(ledger: Ledger, entry: Entry, *more: Any) -> None:
        charge(ledger, entry, *more)
        heard.charged.append(entry.event)

    with mock.patch.object(seeds.Entropy, "added", added), mock.patch.object(Ledger, "charge", spy):
        yield


class Sites:
    """Two real sites, with and without a record."""

    def __init__(self, name: str, folder: Path, rng: np.random.Generator) -> None:
        self.rng = rng
        kind: Any = methods.find(name)
        method = kind(**METHODS[name])
        more = random_images(RECORDS, "hostile")
        outlier = replace(more[:1], images=255 * (torch.arange(64).view(1, 1, 8, 8) % 2).to(torch.uint8))
        more = joined(outlier, more[1:])
        public = random_images(40, "public")
        self.first = play(method, Copies([more], [0], public), Task(MODEL), quiet=True).requests[0]
        self.step = next(iter(client_steps(kind).values()))
        facts = {"name": name, "model": MODEL, "public": "noise=40", "simulated_noise": False, "run": "0" * 32}
        self.spec = RunSpec.of(method, LIKE, **facts)
        self.policies = [self._site(folder / str(i), name, part) for i, part in enumerate((more, more[1:]))]
        self.asked = 0

    def _site(self, place: Path, name: str, records: Records) -> SitePolicy:
        place.mkdir()
        np.savez(place / "data.npz", x_train=records.images.permute(0, 2, 3, 1).numpy(), y_train=records.labels.numpy())
        limits = {"max_questions": 10**6, "max_failures": 10**6}
        policy = {"client": 0, "data": "data.npz", "state": "state", "methods": [name], "unprotected": True, **limits}
        return setup.site(place, policy)

    def movement(self, values: Values) -> float:
        """How far the record moves the releases, over the sensitivity; 0 for requests without a reply."""
        self.asked += 1
        arguments = dict(values)
        if "features" in self.first:
            fields = {n: arguments.pop(n) for n in ("weights", "mean", "projection", "radius")}
            arguments["features"] = PublicFeatures(**fields)
        envelope = {"step": self.step.name, "exchange": self.asked}
        try:
            request = wire.encode(self.step.payload(arguments), self.step.request, self.spec.facts, envelope)
        except ValueError:
            return 0.0
        heard = [Heard(), Heard()]
        for policy, mine in zip(self.policies, heard, strict=True):
            with listening(mine):
                reply = answer(policy, self.spec.text(), request)
            if reply == NO_REPLY or "error" in wire.envelope(reply):
                return 0.0
        one, other = heard
        assert one.charged == other.charged and len(one.exact) == len(other.exact), "what was charged tells the record"
        multipliers = [event.noise_multiplier for event in one.charged if isinstance(event, Gaussian)]
        per_release = len(one.exact) // len(multipliers)
        ratios = []
        for i, ((a, std), (b, _)) in enumerate(zip(one.exact, other.exact, strict=True)):
            ratios.append(float((a - b).norm()) / std * multipliers[i // per_release])
        return max(ratios)

    def start(self) -> Values:
        """What an honest server asks."""
        values: Values = {}
        for name, value in self.first.items():
            values |= vars(value) if isinstance(value, PublicFeatures) else {name: value}
        return values

    def changed(self, values: Values) -> Values:
        """A hostile variant: of some tensors and numbers; noise, which the charge follows, stays as it is."""
        return {
            n: v if self.rng.random() < 0.4 or n in ("noise", "energy") else self._mutated(v) for n, v in values.items()
        }

    def _mutated(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: w if self.rng.random() < 0.5 else self._mutated(w) for name, w in value.items()}
        if isinstance(value, float):
            return float(np.clip(value * 10 ** self.rng.normal(0, 3), 1e-20, 1e20))
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        kind, rng = int(self.rng.integers(6)), torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        if kind == 0:
            return value * 10 ** float(self.rng.normal(0, 2))
        if kind == 1:
            return value + torch.randn(value.shape, generator=rng) * value.abs().mean() * 10 ** float(
                self.rng.normal(-1, 1)
            )
        if kind == 2:
            return value * (torch.rand(value.shape, generator=rng) < 0.5)
        if kind == 3:  # twins with opposite signs leave nothing but rounding
            half = len(value) // 2
            return torch.cat([value[:half], -value[:half], value[2 * half :]])
        if kind == 4:
            return value[:1].expand_as(value).contiguous()
        return -value


def search(name: str, requests: int) -> dict[str, Any]:
    """The largest movement that ``requests`` requests find."""
    began, rng = time.process_time(), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        sites = Sites(name, Path(place), rng)
        first = sites.movement(sites.start())
        pool, answered = [(first, sites.start())], int(first > 0)
        for _ in range(requests - 1):
            child = sites.changed(pool[int(rng.integers(len(pool)))][1])
            found = sites.movement(child)
            answered += found > 0
            pool = sorted([*pool, (found, child)], key=lambda each: -each[0])[:POOL]
    row = {"method": name, "requests": requests, "answered": int(answered), "honest": first, "largest": pool[0][0]}
    return {**row, "seconds": round(time.process_time() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hostile_requests.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for name in args.methods:
        table.append(search(name, args.requests))
        print(table[-1], flush=True)
        record.keep(args.out, table)
    if wrong := [row["method"] for row in table if not row["largest"] <= 1 + 1e-9]:
        raise SystemExit(f"one record moves a release by more than its sensitivity: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
