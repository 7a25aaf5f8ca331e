"""SimCLR: features of images learned without labels, from two random views of each.

Chen, Kornblith, Norouzi, Hinton, "A simple framework for contrastive learning of visual representations", ICML 2020
(arXiv:2002.05709), algorithm 1; the defaults are those of FedAUX's pretraining (leftthomas/SimCLR).

Differs from the paper: Adam at a constant learning rate in place of LARS; no blur, as in the paper's runs on CIFAR-10
(appendix B.9); one order of the four colour changes for each batch. Differs from leftthomas/SimCLR: both views pass
the network together, so batch norm sees them as one batch (there one after the other), and a smaller last batch is
used (there dropped).
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fedstill import models
from fedstill.base import files
from fedstill.base.errors import Diverged
from fedstill.base.records import Records
from fedstill.base.seeds import derive, draw_seed, isolated, stream
from fedstill.base.settings import Settings
from fedstill.base.weights import load, state
from fedstill.evaluation import mode_of
from fedstill.protocol import wire
from fedstill.ticks import tick
from fedstill.train.augment import Views
from fedstill.train.sgd import is_finite, lower_rate

__all__ = ["SimCLR", "fingerprint", "knn_accuracy", "nt_xent"]

_BATCH = 512
"""Images in one forward pass without gradients."""
_CHECKPOINT_SECONDS = 60.0
"""Minimum seconds between two checkpoints, except for the last."""


class SimCLR(Settings):
    """Pretraining by SimCLR: Adam on the normalised, temperature-scaled cross-entropy of two views of each image."""

    epochs: PositiveInt = 100
    """Passes over the images."""
    batch_size: Annotated[int, Ge(2)] = 512
    """Images per step, with two views each; a view's negatives are all other images' views."""
    temperature: PositiveFloat = 0.5
    """tau, the divisor of similarities."""
    lr: PositiveFloat = 1e-3
    """Adam's learning rate."""
    weight_decay: NonNegativeFloat = 1e-6
    """Multiple of the weights added to their gradients."""
    projection: tuple[PositiveInt, PositiveInt] = (512, 128)
    """Hidden and output units of the projection head, which is discarded after pretraining."""
    views: Views = Views()
    """The random views."""

    def fit(
        self,
        model: nn.Module,
        images: Records,
        rng: torch.Generator,
        *,
        on_epoch: Callable[[int, int], None] | None = None,
        checkpoint: Path | None = None,
    ) -> float:
        """Train in place the part of ``model`` that ``models.features`` runs; a classifier after it does not change.

        The result depends on the arguments and the device only: every epoch has its own random streams, so a training
        resumed from a checkpoint ends with the same bits. Both views of a batch go through the model together.

        Args:
            model: trained in train mode on its own device; afterwards every module has its former mode.
            images: at least 2; labels are ignored.
            rng: gives the seed of all streams.
            on_epoch: called after each epoch with the numbers of epochs done and of all epochs.
            checkpoint: a file, written at most once a minute and after the last epoch, from which a later call with the
                same arguments resumes. The caller deletes it.

        Returns:
            The last epoch's mean loss.

        Raises:
            ValueError: there are fewer than 2 images, no trainable parameter influences the features, or the checkpoint
                is damaged or of another pretraining.
            Diverged: the loss, parameters or buffers are not finite.
        """
        if len(images) < 2:
            raise ValueError(f"SimCLR compares images with each other, so {len(images)} are too few; give at least 2")
        seed = draw_seed(rng)
        facts = {"recipe": self.model_dump(mode="json"), "seed": seed}
        file = checkpoint and _Checkpoint(checkpoint, fingerprint(model, images, facts))
        with mode_of(model, training=True):
            with isolated(derive(seed, "start")):
                training = _Training(self, model, images)
            done, mean = file.resume(training) if file else (0, math.nan)
            for epoch in range(done + 1, self.epochs + 1):
                with isolated(derive(seed, "epoch", epoch, "model")):
                    mean = training.epoch(stream(seed, "epoch", epoch))
                if not (is_finite(model) and math.isfinite(mean)):
                    raise Diverged(
                        f"pretraining with lr={self.lr:g} left weights that are not finite after epoch {epoch}; "
                        f"{lower_rate(self.lr)}"
                    )
                if file:
                    file.write(epoch, mean, training, last=epoch == self.epochs)
                tick("pretraining", epoch, self.epochs)
                if on_epoch is not None:
                    on_epoch(epoch, self.epochs)
        return mean


def nt_xent(first: Float[Tensor, "n d"], second: Float[Tensor, "n d"], temperature: float) -> Float[Tensor, ""]:
    """The normalised, temperature-scaled cross-entropy of ``n`` positive pairs, mean over the 2n views.

    With unit vectors z of all views, view i and its partner j: ``-log(exp(z_i z_j / tau) / sum_{k != i} exp(z_i z_k /
    tau))`` (arXiv:2002.05709, eq. 1).
    """
    n = len(first)
    z = normalize(torch.cat([first, second]))
    similar = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    partners = torch.arange(2 * n, device=z.device).roll(n)
    return cross_entropy(similar, partners)


def knn_accuracy(model: nn.Module, train: Records, test: Records, k: int = 200, temperature: float = 0.5) -> float:
    """Accuracy in [0, 1] of a vote among the ``k`` records of ``train`` with the most similar features.

    A neighbour's vote for its class has the weight ``exp(s / temperature)`` at cosine similarity s (Wu et al. 2018,
    arXiv:1805.01978, section 3.4). Features are computed in eval mode.

    Raises:
        ValueError: ``train`` or ``test`` has no records.
    """
    if not (len(train) and len(test)):
        raise ValueError(f"kNN has {len(train)} records to vote and {len(test)} to classify; give at least 1 of both")
    voters = torch.cat(list(_directions(model, train)))
    labels = train.labels.to(voters.device)
    right = 0
    for start, z in enumerate(_directions(model, test)):
        similar, nearest = (z @ voters.T).topk(min(k, len(voters)))
        votes = torch.zeros(len(z), train.num_classes, device=z.device)
        votes.scatter_add_(1, labels[nearest], (similar / temperature).exp())
        batch = test.labels[start * _BATCH : (start + 1) * _BATCH]
        right += int((votes.argmax(1).cpu() == batch.cpu()).sum())
    return right / len(test)


def fingerprint(model: nn.Module, images: Records, facts: Mapping[str, Any]) -> str:
    """SHA-256 of everything that a pretraining depends on: the model, its device, the images, ``facts`` as JSON."""
    start = {
        **facts,
        "model": repr(model),
        "device": next((p.device.type for p in model.parameters()), "cpu"),
        "images": list(images.images.shape),
        "normalisation": asdict(images.normalisation),
    }
    digest = hashlib.sha256(wire.pack(state(model), start))
    for some in torch.split(images.images, _BATCH):
        digest.update(some.contiguous().cpu().numpy().data)
    return digest.hexdigest()


class _Training:
    """A model in training with its projection head and Adam."""

    def __init__(self, settings: SimCLR, model: nn.Module, images: Records) -> None:
        self.settings, self.model, self.images = settings, model, images
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = parameters[0].device if parameters else torch.device("cpu")
        with mode_of(model, training=False):
            features = models.features(model, images.inputs(slice(0, 1)).to(self.device))
            if not (parameters and features.requires_grad):
                raise ValueError(
                    f"the features of {type(model).__name__} have no trainable parameters, so that there is nothing to "
                    "pretrain; take them as they are (--extractor.pretrain none), or set requires_grad on some"
                )
            gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
        hidden, out = settings.projection
        self.head = nn.Sequential(
            nn.Linear(features.shape[1], hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out)
        ).to(self.device)
        self.weights = [p for p, g in zip(parameters, gradients, strict=True) if g is not None]
        self.weights += self.head.parameters()
        self.adam = torch.optim.Adam(self.weights, lr=settings.lr, weight_decay=settings.weight_decay)

    def epoch(self, rng: torch.Generator) -> float:
        """Train for one pass over the images, and return the mean loss."""
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        order = torch.randperm(len(self.images), generator=rng)
        for batch in torch.split(order, self.settings.batch_size):
            if len(batch) < 2:  # one image alone has no negatives
                continue
            pixels = self.images.pixels(batch.to(self.images.images.device)).to(self.device)
            views = torch.cat([self.settings.views(pixels, rng) for _ in range(2)])
            z = self.head(models.features(self.model, self.images.normalisation.apply(views)))
            loss = nt_xent(z[: len(batch)], z[len(batch) :], self.settings.temperature)
            gradients = torch.autograd.grad(loss, self.weights)
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            self.adam.step()
            total += loss.detach() * len(batch)
            count += len(batch)
        for weight in self.weights:
            weight.grad = None
        return float(total) / count

    def tensors(self) -> dict[str, Tensor]:
        """The state of model, head and Adam by name."""
        moments = self.adam.state_dict()["state"]
        return {
            **{f"model/{name}": value for name, value in state(self.model).items()},
            **{f"head/{name}": value for name, value in state(self.head).items()},
            **{f"adam/{i}/{name}": value for i, entry in moments.items() for name, value in entry.items()},
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the state to that of `tensors`."""
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "adam":
                index, _, key = rest.partition("/")
                moments.setdefault(int(index), {})[key] = value
            else:
                load(self.model if kind == "model" else self.head, {rest: value})
        self.adam.load_state_dict({**self.adam.state_dict(), "state": moments})


class _Checkpoint:
    """The checkpoint file: a training's tensors and its number of epochs."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self.identity = path, identity
        self.written = time.monotonic()

    def resume(self, training: _Training) -> tuple[int, float]:
        """Restore the training, if there is a file, and return its number of epochs and the last loss."""
        if not self.path.exists():
            return 0, math.nan
        remedy = "delete it and start again"
        tensors, header = wire.unpack(files.read_checked(self.path, remedy))
        if header.get("identity") != self.identity:
            raise ValueError(f"{self.path} is the checkpoint of another pretraining; {remedy}, or name another file")
        training.restore(tensors)
        return header["epoch"], header["loss"]

    def write(self, epoch: int, loss: float, training: _Training, *, last: bool) -> None:
        """Write the file, unless the last time is less than a minute ago."""
        if last or time.monotonic() - self.written >= _CHECKPOINT_SECONDS:
            header = {"identity": self.identity, "epoch": epoch, "loss": loss}
            files.write_checked(self.path, wire.pack(training.tensors(), header))
            self.written = time.monotonic()


@torch.no_grad()
def _directions(model: nn.Module, records: Records) -> Iterator[Float[Tensor, "m d"]]:
    """Features of unit length, batch by batch."""
    device = next((t.device for t in chain(model.parameters(), model.buffers())), records.labels.device)
    for start in range(0, len(records), _BATCH):
        x = records.inputs(slice(start, start + _BATCH)).to(device)
        with mode_of(model, training=False):
            directions = normalize(models.features(model, x))
        yield directions
