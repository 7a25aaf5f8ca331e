"""What methods share whose clients train models of their own and send them whole; the server teaches a student by them.

The shape of DENSE (Zhang et al. 2022, arXiv:2112.12371, Algorithm 1) and of FedDF (Lin et al. 2020, arXiv:2006.07242):
they differ in what the student is taught on.
"""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Len
from pydantic import PositiveInt
from torch import Tensor, nn

from fedstill.distill.generator import VIEWS, View
from fedstill.distill.teachers import Teachers
from fedstill.methods.averaging import weighted_mean
from fedstill.models import same
from fedstill.protocol import Client, Count, Federation, Method, OwnState, Reply, Round, State, load, state, step
from fedstill.train.ldam import LDAM
from fedstill.train.local import SGD, Norms

log = logging.getLogger("fedstill")


class Upload(Reply):
    """A client's model after its local training."""

    architecture: Annotated[str, Len(1, 200)]
    weights: OwnState
    num_records: Count


class UploadingMethod(Method):
    """Clients train and send their models, which may differ; the server has them teach one model."""

    mixed: ClassVar[bool] = True
    rounds: PositiveInt = 1
    """Exchanges; from the second on, clients start from the student, so that all must have its architecture."""
    local: SGD = SGD(batch_size=128, epochs=200)
    """A client's training in one round."""
    local_view: View = "none"
    """How its records are augmented: not, shifted, flipped, or both."""
    local_loss: Literal["ce", "ldam"] = "ce"
    """Cross-entropy, or LDAM's for unbalanced classes."""
    ldam: LDAM = LDAM()
    """Of --local-loss ldam."""
    local_norm: Norms = "batch"
    """Statistics of a client's batch norms: each batch's, or from a round's second local epoch on the running ones, as
    in the code of DENSE's authors."""
    start: Literal["fresh", "mean"] = "fresh"
    """The student before its training: as it was (at first a random start), or the mean of the clients' models of its
    architecture, where there are some."""

    @property
    def first_answer(self) -> tuple[Any, ...]:
        """See `Method.first_answer`: who is taught by the models, and how, makes no difference to them."""
        return self.train, self.local, self.local_view, self.local_loss, self.ldam, self.local_norm

    def server(self, fed: Federation) -> nn.Module:
        """Collect the models, teach the student; again, with clients that start from it."""
        student = fed.new_model()
        if self.rounds > 1 and not all(same(one, fed.architecture) for one in fed.architectures):
            raise ValueError(
                f"rounds is {self.rounds}, but clients have models {', '.join(sorted(set(fed.architectures)))}, which "
                f"can't start from the student, a {fed.architecture}; take --rounds 1, or leave --models out"
            )
        for round in fed.rounds(self.rounds, student):
            if round.number == 1:
                replies = fed.ask(self.train)
            else:
                replies = fed.ask(self.train_on, weights=state(student))
            networks, alike = [], []
            for reply in replies:  # once: each is read from the disk
                networks.append(fed.new_model(architecture=reply.architecture))
                load(networks[-1], reply.weights)
                if same(reply.architecture, fed.architecture):
                    alike.append((reply.num_records, networks[-1]))
            mean = _mean(fed, alike)
            if self.start == "mean" and mean is not None:
                load(student, state(mean))
            elif self.start == "mean":
                log.warning("no client has the student's architecture %s; it starts at random", fed.architecture)
            teachers = self.teachers(networks)
            self.teach(fed, teachers, student, round)
            round.log(accuracy=fed.evaluate(student), **_shares(fed, teachers, mean))
        return student

    @abstractmethod
    def teachers(self, networks: Sequence[nn.Module]) -> Teachers:
        """The clients' models, to be asked together, and what of them is averaged."""

    @abstractmethod
    def teach(self, fed: Federation, teachers: Teachers, student: nn.Module, round: Round) -> None:
        """Train ``student`` in place."""

    @step
    def train(self, client: Client) -> Upload:
        """The client's own model, trained from the random start that all of its architecture share."""
        return self._trained(client, client.new_model(architecture=client.architecture))

    @step
    def train_on(self, client: Client, weights: State) -> Upload:
        """The student, trained on."""
        return self._trained(client, client.new_model(weights))

    def _trained(self, client: Client, model: nn.Module) -> Upload:
        view = VIEWS[self.local_view]
        rng = client.rng("batches")
        fit = partial(self.local.fit, model, client.train, rng, augment=view, norms=self.local_norm)
        if self.local_loss == "ldam":
            loss = self.ldam.loss(client.train.class_counts())
            fit(loss=loss, on_epoch=loss.on_epoch)
        else:
            fit()
        return Upload(architecture=client.architecture, weights=state(model), num_records=len(client.train))


def _mean(fed: Federation, alike: Sequence[tuple[int, nn.Module]]) -> nn.Module | None:
    """FedAvg of the models that have the student's architecture, by records; None without any."""
    if not alike:
        return None
    model = fed.new_model()
    load(model, weighted_mean((records, state(network)) for records, network in alike))
    return model


def _shares(fed: Federation, teachers: Teachers, mean: nn.Module | None) -> dict[str, float | None]:
    """How good the teachers are together, averaged and alone."""
    found = fed.server_accuracies(_Together(teachers, mean))
    if found is None:
        return {}
    ensemble, *others = found
    alone = others[: len(teachers)]
    average = None if mean is None else others[-1]
    return {"ensemble": ensemble, "average": average, "clients_alone": sum(alone) / len(alone)}


class _Together(nn.Module):
    """The ensemble, every teacher and the mean of their weights, where there is one; each network is asked once."""

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
