"""Builds that are broken on purpose: each function plants a fault that an audit or a comparison must catch."""

from dataclasses import replace
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.base.seeds import Simulated
from fedstill.engines.client import SiteClient
from fedstill.methods import fedgm_records
from fedstill.methods.adap_dp_fl import AdapDPFL
from fedstill.methods.dp_fl import DPFL
from fedstill.methods.parts import feature_sums, label_sets
from fedstill.methods.parts.private_rounds import TrainedModel
from fedstill.privacy import logistic, mechanisms, rowwise, second_moments
from fedstill.privacy.dp_sgd import DPSGD
from fedstill.privacy.ledger import Charge
from fedstill.protocol import Client, Parameters, Public, Released, step

# --- methods


class Counted(TrainedModel):
    """A reply with the number of records, called public."""

    count: Annotated[int, Public()]


class Counts(DPFL):
    """Sends how many records it has."""

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> Counted:
        released = client.release(self.local.mechanism(client.new_model(weights), noise), client.train)
        return Counted(weights=released, count=len(client.train))


class Judged(TrainedModel):
    """A reply with a loss, called public."""

    loss: Annotated[float, Public()]


class Losses(DPFL):
    """Sends its loss."""

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> Judged:
        model = client.new_model(weights)
        released = client.release(self.local.mechanism(model, noise), client.train)
        loss = cross_entropy(model(client.train.inputs()), client.train.labels)
        return Judged(weights=released, loss=float(loss.detach()))


class Hidden(DPFL):
    """Adds a private number to a released value, as if it were released."""

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> TrainedModel:
        released = client.release(self.local.mechanism(client.new_model(weights), noise), client.train)
        return TrainedModel(weights=Released({n: w + 1e-6 * len(client.train) for n, w in released.value.items()}))


class RawClip(AdapDPFL):
    """Clips at the exact mean length of the images."""

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> TrainedModel:
        clip = float(client.train.inputs().flatten(1).norm(dim=1).mean())
        mechanism = self.local.mechanism(client.new_model(weights), noise, clip=clip)
        return TrainedModel(weights=client.release(mechanism, client.train, adaptive=True))


class RawRate(DPFL):
    """Samples at a rate that follows from its number of records."""

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> TrainedModel:
        mechanism = self.local.mechanism(client.new_model(weights), noise)
        return TrainedModel(weights=client.release(replace(mechanism, sampling=1 / len(client.train)), client.train))


# --- changes of the library


def half_the_noise(patch: pytest.MonkeyPatch) -> None:
    drawn = Simulated.gaussian
    patch.setattr(Simulated, "gaussian", lambda self, shape: drawn(self, shape) / 2)


def half_the_sensitivity(patch: pytest.MonkeyPatch) -> None:
    """The noise is for half of what a record moves."""
    for kind in (mechanisms.ClassSums, mechanisms.ClippedUpdate, second_moments.SecondMoments, logistic._Head):
        exact = kind.sensitivity
        patch.setattr(kind, "sensitivity", property(lambda self, exact=exact: exact.fget(self) / 2))


def shared_noise(patch: pytest.MonkeyPatch) -> None:
    """The class head's noise serves the score head too."""
    drawn, last = Simulated.gaussian, [torch.zeros(0)]

    def again(self: Simulated, shape: Any) -> Tensor:
        if len(shape) == 1:
            return last[0].flatten()[: shape[0]]
        last[0] = drawn(self, shape)
        return last[0]

    patch.setattr(Simulated, "gaussian", again)


def centred(patch: pytest.MonkeyPatch) -> None:
    release = feature_sums.release_sums
    patch.setattr(fedgm_records, "release_sums", lambda c, rows, centre, *more: release(c, rows, rows.mean(0), *more))


def heads_centred(patch: pytest.MonkeyPatch) -> None:
    extended = logistic._Head.extended
    patch.setattr(logistic._Head, "extended", lambda self, h: extended(self, h - h.mean(0)))


def longest_row(patch: pytest.MonkeyPatch) -> None:
    def divided(rows: Tensor, radius: float) -> Tensor:
        wide = rows.double()
        return wide * (radius / wide.norm(dim=1).max().clamp_min(radius))

    patch.setattr(mechanisms, "clipped", divided)
    patch.setattr(logistic, "clipped", divided)


def released_twice(patch: pytest.MonkeyPatch) -> None:
    """A second release that nobody is charged for; the reply has the mean of both."""
    release = SiteClient.release

    def twice(self: SiteClient, mechanism: Any, rows: Any, **more: Any) -> Released[Any]:
        first = release(self, mechanism, rows, **more)
        again = mechanism(rows, Simulated(self.rng("more")))
        return first.map(lambda value: (value + again) / 2)

    patch.setattr(SiteClient, "release", twice)


def counts_beside(patch: pytest.MonkeyPatch) -> None:
    def release(client: Any, rows: Tensor, centre: Tensor, radius: float, settings: Any) -> Any:
        reply = feature_sums.release_sums(client, rows, centre, radius, settings)
        counts = client.train.class_counts().float()
        return feature_sums.FeatureSums(sums=reply.sums.map(lambda s: torch.cat([s[:, :-1], counts[:, None]], 1)))

    patch.setattr(fedgm_records, "release_sums", release)


def private_prior(patch: pytest.MonkeyPatch) -> None:
    def prior(model: Any, records: Any, temperature: float) -> Tensor:
        return torch.eye(records.num_classes)[records.labels] * 0.98 + 0.01

    patch.setattr(label_sets, "predicted_prior", prior)


def a_tenth_of_lambda(patch: pytest.MonkeyPatch) -> None:
    solve = logistic.solve
    patch.setattr(logistic, "solve", lambda x, y, k, penalty, **more: solve(x, y, k, penalty / 10, **more))


def half_the_noise_of_training(patch: pytest.MonkeyPatch) -> None:
    noised = DPSGD._noised
    patch.setattr(
        DPSGD,
        "_noised",
        lambda self, *more: noised(replace(self, noise_multiplier=self.noise_multiplier / 2), *more),
    )


def without_the_root_of_two(patch: pytest.MonkeyPatch) -> None:
    """A class head's sensitivity as if one probability changed instead of two."""
    patch.setattr(logistic.LogisticHead, "steepness", 1.0)


def stopped_early(patch: pytest.MonkeyPatch) -> None:
    solve = logistic.solve
    patch.setattr(logistic, "solve", lambda x, y, k, penalty, **more: solve(x, y, k, penalty, tolerance=0.5))


def shared_stream(patch: pytest.MonkeyPatch) -> None:
    rng = SiteClient.rng
    patch.setattr(SiteClient, "rng", lambda self, *use: rng(self, *(use[:1] if use[0] == "privacy noise" else use)))


def train_mode(patch: pytest.MonkeyPatch) -> None:
    mode_of = rowwise.mode_of
    patch.setattr(rowwise, "mode_of", lambda model, training: mode_of(model, training=True))
    patch.setattr(rowwise, "sizes", lambda *args: (64,))


def charged_late(patch: pytest.MonkeyPatch) -> None:
    def release(self: SiteClient, mechanism: Any, rows: Any, *, adaptive: bool = False, part: Any = None) -> Any:
        value = mechanism(rows, Simulated(self.rng("privacy noise", 0)))
        facts = {"exchange": self._exchange, "step": self._step, "index": 0, "mechanism": "m", "unit": mechanism.unit}
        self._ledger.charge(Charge(event=mechanism.event, theorem=mechanism.theorem, adaptive=adaptive, **facts))
        return Released(value)

    patch.setattr(SiteClient, "release", release)
