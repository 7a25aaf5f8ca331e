"""Accuracies of AFL, FedCGS and GH-OFL on features that are computed once: ten clients with one class each.

The features of all images are kept in a folder; a run then adds up each client's rows by the mechanism itself, once
without noise, and adds the mechanism's noise for each epsilon and seed. So one set of features serves all settings.
`--validate` holds out the last tenth of the training records and never reads the test set: for choosing settings.

Usage: python benchmarks/moments.py --data mnist --model scattering --public noise --folder /tmp/features \
    --dims 512 --epsilons 0.5 1 2 4 None
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from torch import Tensor

from fedstill import methods, models
from fedstill.base.records import Records
from fedstill.base.seeds import Simulated, isolated, stream
from fedstill.data import public as public_data
from fedstill.data.sources import load_data
from fedstill.distill.public_map import PublicMap
from fedstill.engines.server import added_up
from fedstill.methods.parts.feature_sums import Total, add_up
from fedstill.methods.parts.moments import MomentSums, Sums
from fedstill.models.patches import Patches
from fedstill.privacy.accounting import release_noise
from fedstill.privacy.logistic import extend
from fedstill.privacy.second_moments import Moments, SecondMoments
from fedstill.protocol import Released, Summation

DELTA = 1e-5
Rows = tuple[Tensor, Tensor]


def raw_features(args: argparse.Namespace) -> dict[str, np.ndarray[Any, Any]]:
    """Features and labels of public, training and test images, computed on the first call."""
    parts = ("public", "train", "test")
    names = [name for part in parts for name in (part, f"{part}_y")]
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "done").exists():
        data = load_data(args.data)
        public = public_data.load(args.public, data.train.shape, data.train.normalisation)
        public = public[torch.randperm(len(public), generator=stream(0, "some"))[: args.public_records]]
        with isolated(0):
            model = models.build(args.model, data.train.shape, data.train.num_classes)
        if isinstance(model, Patches):
            model.learn(public, stream(0, "learn"))
        for part, records in zip(parts, (public, data.train, data.test), strict=True):
            write(args.folder / f"{part}.npy", model.eval(), records)
            np.save(args.folder / f"{part}_y.npy", records.labels.numpy())
        (args.folder / "done").touch()
    return {name: np.load(args.folder / f"{name}.npy", mmap_mode="r") for name in names}


def write(path: Path, model: torch.nn.Module, records: Records) -> None:
    width = models.feature_width(model, records.shape)
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (len(records), width))
    with torch.no_grad():
        for start in range(0, len(records), 100):
            rows[start : start + 100] = models.features(model, records.inputs(slice(start, start + 100))).numpy()
    rows.flush()


def principal(public: Tensor, place: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variances and principal directions ``(p, p)`` of public rows, computed on the first call for all widths."""
    if not place.exists():
        mean = public.double().mean(0)
        centred = public.double() - mean
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(public))
        np.savez(place, mean=mean, values=values.flip(0).clamp_min(0), vectors=vectors.flip(1).float())
    known = np.load(place)
    mean, values, vectors = (torch.from_numpy(known[name]).double() for name in ("mean", "values", "vectors"))
    return mean, values, vectors


class Mapped:
    """The rows of the public map, for one number of directions."""

    def __init__(self, raw: dict[str, np.ndarray[Any, Any]], dims: int, args: argparse.Namespace) -> None:
        space = PublicMap(dims=dims, ridge=args.map_ridge, quantile=args.quantile, records=args.public_records)
        public = torch.from_numpy(np.array(raw["public"][: space.records]))
        mean, variances, directions = principal(public, args.folder / f"principal-{space.records}.npz")
        scales = (variances[:dims] + space.ridge * variances[0]).rsqrt()
        self.mean, self.projection = mean.float(), (directions[:, :dims] * scales).float()
        lengths = ((public - self.mean) @ self.projection).norm(dim=1).double()
        self.dims, self.radius = self.projection.shape[1], float(lengths.quantile(space.quantile))
        self.raw = raw

    def rows(self, part: str, index: Tensor) -> Iterator[Rows]:
        """Batches of rows and labels at the given positions."""
        for some in index.split(2000):
            features = torch.from_numpy(self.raw[part][some.numpy()])
            labels = torch.from_numpy(self.raw[f"{part}_y"][some.numpy()])
            yield (features - self.mean) @ self.projection, labels


def exact_sums(mapped: Mapped, kept: Tensor, labels: Tensor, facts: dict[str, Any]) -> list[Moments]:
    """Each client's sums without noise, which no share changes; client k has the records of class k."""
    silent = SecondMoments(noise_multiplier=0.0, **facts)
    parts = [kept[labels[kept] == label] for label in range(facts["num_classes"])]
    return [silent(mapped.rows("train", part), Simulated(stream(0))) for part in parts]


def released(exact: Moments, mechanism: SecondMoments, noise: Simulated) -> Sums:
    """A client's reply: its exact sums, and what the mechanism adds to none."""
    added = mechanism([], noise)
    return Sums(
        second=Released((exact.second + added.second).float()), first=Released((exact.first + added.first).float())
    )


def summed(replies: Sequence[Sums]) -> Summation[Sums]:
    """The clients' total in float64, as the server has it."""
    return Summation(added_up(Sums, replies), range(len(replies)))


def accuracy(method: Any, total: Total, judged: list[Rows]) -> float:
    """Of the head, or of the quadratic classifier, on batches of rows that are clipped as in training."""
    quadratic = getattr(method, "classifier", "") == "qda"
    head = method.quadratic(total) if quadratic else method.head(total)
    right = 0
    for x, labels in judged:
        logits = head(x[:, :-1]) if quadratic else x @ head.T
        right += int((logits.argmax(1) == labels).sum())
    return right / sum(len(labels) for _, labels in judged)


def settings_of(text: str) -> tuple[str, dict[str, Any]]:
    """``"afl:ridge=1,share=0.3"``."""
    name, _, rest = text.partition(":")
    pairs = (item.split("=") for item in rest.split(",") if item)
    return name, {key: json.loads(value) if value[0] in "0123456789." else value for key, value in pairs}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What a command takes that computes features once."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--public", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--public-records", type=int, default=5000)
    parser.add_argument("--map-ridge", type=float, default=0.003)
    parser.add_argument("--quantile", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[512])
    parser.add_argument("--methods", nargs="+", default=["afl", "fedcgs"])
    parser.add_argument("--epsilons", nargs="+", default=["0.5", "1", "2", "4", "None"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    raw = raw_features(args)
    labels = torch.from_numpy(np.array(raw["train_y"]))
    held = len(labels) // 10 if args.validate else 0
    kept, classes = torch.arange(len(labels) - held), int(labels.max()) + 1
    index = torch.arange(len(labels) - held, len(labels)) if held else torch.arange(len(raw["test_y"]))
    found = []
    for dims in args.dims:
        mapped, sums = Mapped(raw, dims, args), dict[bool, list[Moments]]()
        rows = mapped.rows("train" if held else "test", index)
        judged = [(extend(features, mapped.radius, MomentSums().bias), y) for features, y in rows]
        for text in args.methods:
            name, changes = settings_of(text)
            by_class = changes.get("classifier") == "qda"
            plain: MomentSums = methods.find(name)(epsilon=None, **changes)  # type: ignore[assignment]
            facts: dict[str, Any] = {"num_classes": classes, "dims": mapped.dims, "radius": mapped.radius}
            facts |= {"bias": plain.bias, "share": plain.share, "by_class": by_class}
            if by_class not in sums:
                sums[by_class] = exact_sums(mapped, kept, labels, facts)
            for epsilon in args.epsilons:
                method: Any = plain.model_copy(update={"epsilon": None if epsilon == "None" else float(epsilon)})
                mechanism = SecondMoments(noise_multiplier=release_noise(method.epsilon, DELTA), **facts)
                scores, seconds = [], 0.0
                for seed in range(args.seeds if method.epsilon else 1):
                    noise = [Simulated(stream(seed, "noise", client)) for client in range(classes)]
                    replies = [released(e, mechanism, n) for e, n in zip(sums[by_class], noise, strict=True)]
                    began = time.process_time()
                    total = add_up(summed(replies), method, DELTA, torch.device("cpu"))
                    scores.append(accuracy(method, total, judged))
                    seconds += time.process_time() - began
                row = {"method": text, "dims": mapped.dims, "epsilon": method.epsilon, "accuracies": scores}
                row["bytes"] = 4 * (replies[0].second.value.numel() + replies[0].first.value.numel())
                print(
                    f"{row['method']:40} {row['dims']:5} {epsilon:>5}", *(f"{100 * s:.2f}" for s in scores), flush=True
                )
                found.append(row)
    if args.out:
        chosen = {key: str(value) for key, value in vars(args).items() if key not in ("out", "folder")}
        record.keep(args.out, found, **chosen)


if __name__ == "__main__":
    main()
