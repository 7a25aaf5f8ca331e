"""Shared parts of DENSE, Fed-DAFL, Fed-ADI and FedDF: clients upload models, which the server distils into one."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Len
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.distill.teachers import Teachers
from fedstill.methods.averaging import weighted_mean
from fedstill.models import same
from fedstill.protocol import Client, Count, Federation, OwnState, Reply, Settings, load, state
from fedstill.train.augment import VIEWS, View
from fedstill.train.losses import LDAM
from fedstill.train.sgd import SGD, Norms

log = logging.getLogger("fedstill")


class Upload(Reply):
    """A client's model after its local training."""

    architecture: Annotated[str, Len(1, 200)]
    weights: OwnState
    num_records: Count


class UploadSettings(Settings):
    """Settings of the clients' training and of the student's start."""

    mixed: ClassVar[bool] = True
    rounds: PositiveInt = 1
    """Communication rounds; from the second on, clients start from the student, so all need its architecture."""
    local: SGD = SGD(batch_size=128, epochs=200)
    """A client's training in one round."""
    local_view: View = "none"
    """Augmentation of a client's records: none, random shifts, random flips, or both."""
    local_loss: Literal["ce", "ldam"] = "ce"
    """Loss of a client's training: cross-entropy, or LDAM's loss for unbalanced classes."""
    ldam: LDAM = LDAM()
    """Settings of --local-loss ldam."""
    local_norm: Norms = "batch"
    """Statistics that a client's batch norms normalise with: each batch's own, or from the second local epoch on the
    running ones, which then no longer change, as in the code of DENSE's authors."""
    start: Literal["fresh", "mean"] = "fresh"
    """Start of the student: as it is (at first random), or the mean of the clients' models of its architecture."""

    @property
    def first_reply(self) -> tuple[Any, ...]:
        """Settings of the clients' training, on which the replies to the first request depend."""
        return local_upload, self.local, self.local_view, self.local_loss, self.ldam, self.local_norm


def local_upload(client: Client, model: nn.Module, settings: UploadSettings) -> Upload:
    """Train ``model`` on the client's records and make it the reply."""
    view, rng = VIEWS[settings.local_view], client.rng("batches")
    fit = partial(settings.local.fit, model, client.train, rng, augment=view, norms=settings.local_norm)
    if settings.local_loss == "ldam":
        loss = settings.ldam.loss(client.train.class_counts())
        fit(loss=loss, on_epoch=loss.on_epoch)
    else:
        fit()
    return Upload(architecture=client.architecture, weights=state(model), num_records=len(client.train))


def check_architectures(fed: Federation, rounds: int) -> None:
    """Refuse a second round, which starts from the student, if a client has another architecture than the student.

    Raises:
        ValueError: ``rounds`` is above 1 and a client has another architecture.
    """
    if rounds > 1 and not all(same(one, fed.architecture) for one in fed.architectures):
        raise ValueError(
            f"rounds is {rounds}, but clients have models {', '.join(sorted(set(fed.architectures)))}, which "
            f"can't start from the student, a {fed.architecture}; take --rounds 1, or leave --models out"
        )


@dataclass(frozen=True)
class Models:
    """The clients' models of one round.

    Attributes:
        networks: all models, in the order of the clients.
        mean: the mean, weighted by records, of the models with the student's architecture; None if there are none.
    """

    networks: list[nn.Module]
    mean: nn.Module | None


def collect(fed: Federation, replies: Iterable[Upload]) -> Models:
    """Load the uploaded models, reading each reply from disk once."""
    networks, averaged = list[nn.Module](), list[tuple[int, nn.Module]]()
    for reply in replies:
        networks.append(fed.new_model(architecture=reply.architecture))
        load(networks[-1], reply.weights)
        if same(reply.architecture, fed.architecture):
            averaged.append((reply.num_records, networks[-1]))
    if not averaged:
        return Models(networks, None)
    mean = fed.new_model()
    load(mean, weighted_mean((records, state(network)) for records, network in averaged))
    return Models(networks, mean)


def start_student(fed: Federation, student: nn.Module, models: Models, start: Literal["fresh", "mean"]) -> None:
    """Set ``student`` to the mean of the clients' models if ``start`` is "mean" and there is a mean."""
    if start == "mean" and models.mean is not None:
        load(student, state(models.mean))
    elif start == "mean":
        log.warning("no client has the student's architecture %s; the student starts at random", fed.architecture)


def ensemble_accuracies(fed: Federation, teachers: Teachers, mean: nn.Module | None) -> dict[str, float | None]:
    """Accuracies of the ensemble and the mean model, and the teachers' mean accuracy; empty if not evaluated."""
    accuracies = fed.evaluate_each(_Stacked(teachers, mean))
    if accuracies is None:
        return {}
    ensemble, *others = accuracies
    alone = others[: len(teachers)]
    average = None if mean is None else others[-1]
    return {"ensemble": ensemble, "average": average, "clients_alone": sum(alone) / len(alone)}


class _Stacked(nn.Module):
    """One module that evaluates the ensemble, every teacher and the mean model, if there is one, in one pass."""

    def __init__(self, teachers: Teachers, mean: nn.Module | None) -> None:
        super().__init__()
        self._teachers, self.mean = teachers, mean

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, 1 + m (+ 1), classes)``."""
        each = self._teachers.each(x)
        logits = [self._teachers.averaged(each)[:, None], each]
        if self.mean is not None:
            logits.append(self.mean(x)[:, None])
        return torch.cat(logits, 1)
