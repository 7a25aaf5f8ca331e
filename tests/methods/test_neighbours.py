"""Every private method on neighbouring data sets, and builds with planted faults, which the same check must catch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from method_settings import SMALL
from neighbours import compare, hear
from small import noise_images
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill import methods, seeds
from fedstill.engines.client import SiteClient
from fedstill.methods import feature_sums, fedgm_records
from fedstill.methods.adap_dp_fl import AdapDPFL
from fedstill.methods.dp_fl import DPFL
from fedstill.methods.private_rounds import Trained
from fedstill.privacy import mechanisms, rowwise
from fedstill.privacy.ledger import Entry
from fedstill.protocol import Client, Parameters, Public, Released, client_steps, step
from fedstill.records import Records

ALL = {"rounds": 2, "participation": 1.0, "local": {"steps": 2, "batch_size": 64, "supposed_records": 64, "lr": 0.05}}
"""Every record in every batch, so that all that one record may do happens in every step."""
PRIVATE: dict[str, dict[str, Any]] = {
    **{name: ALL for name in ("dp-fl", "adap-dp-fl", "fedkd", "fedkadp")},
    **{
        name: SMALL[name]
        for name in (
            "fedavg-p",
            "fedd-p",
            "fedauxfdp",
            "fedgm-records",
            "fedrd-records",
            "afl",
            "fedcgs",
            "fedcgs-p",
            "gh-ofl",
            "safle",
        )
    },
    "fedpft": {**SMALL["fedpft"], "epsilon": 1.0, "mixture": {"components": 1, "covariance": "full"}},
    "ldp-fedavg": {**SMALL["ldp-fedavg"], "local": {"lr": 0.05, "batch_size": 16, "epochs": 1}},
}
FACTS: dict[str, dict[str, Any]] = {"fedrd-records": {"model": "projected:width=8"}}
PUBLIC_FIELDS = {("fedaux", "train_score", "client"), ("fedaux", "update", "client")}
"""Fields of replies that are declared public, of methods with a release: a client's number, and nothing else."""


def made(name: str) -> Any:
    return methods.find(name)(**PRIVATE[name])


def neighbours(digits: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Data with an outlier, and the records of client 0 with and without one: a first, a class's only, the outlier."""
    images, labels = digits.train.images.clone(), digits.train.labels
    images[60] = 255 * (torch.arange(64).view(1, 8, 8) % 2).to(torch.uint8)
    train = Records(images, labels, digits.train.num_classes, digits.train.normalisation)
    others = np.flatnonzero(labels.numpy()[:60] != 9)[:40]
    nine = np.flatnonzero(labels.numpy() == 9)[:1]
    return {
        "a first record": (train, others, others[1:]),
        "the last record of a class": (train, np.append(others, nine), others),
        "an outlier": (train, np.append(others, 60), others),
    }


def check(method: Any, digits: Any, pair: str, folder: Path, **facts: Any) -> None:
    train, more, less = neighbours(digits)[pair]
    data = type("Data", (), {"train": train, "test": digits.test[:20]})
    rest = np.arange(100, 140)
    own = [[(part, part[:0]), (rest, rest[:0])] for part in (more, less)]
    facts = {"public": noise_images(digits), "budget": 50.0, **facts}
    one, other = (hear(method, data, parts, folder / str(i), **facts) for i, parts in enumerate(own))
    compare(one, other, 0 if len(more) > 1 and more[1] == less[0] else len(more) - 1)


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("pair", ["a first record", "the last record of a class", "an outlier"])
def test_nothing_but_releases_depends_on_a_record(name: str, pair: str, digits: Any, tmp_path: Path) -> None:
    check(made(name), digits, pair, tmp_path, **FACTS.get(name, {}))


@pytest.mark.slow
def test_with_batch_norm_too(digits: Any, tmp_path: Path) -> None:
    check(made("fedavg-p"), digits, "an outlier", tmp_path, model="resnet8")


@pytest.mark.slow
def test_nothing_but_releases_depends_on_a_label(digits: Any, tmp_path: Path) -> None:
    method = methods.find("fedgm-labels")(**SMALL["fedgm-labels"])
    part, rest = np.arange(40), np.arange(100, 140)
    heard = []
    for i, shift in enumerate((0, 3)):
        labels = digits.train.labels.clone()
        labels[7] = (labels[7] + shift) % 10
        train = Records(digits.train.images, labels, 10, digits.train.normalisation)
        data = type("Data", (), {"train": train, "test": digits.test[:20]})
        parts = [(part, part[:0]), (rest, rest[:0])]
        heard.append(hear(method, data, parts, tmp_path / str(i)))
    assert len(heard[0].charged) == 4
    compare(*heard)


def test_every_private_method_is_compared() -> None:
    every = {name for name in SMALL if any(_releases(methods.find(name)))}
    # these send models or class heads without protection as well
    assert every - {"fedaux", "fedaux-f"} == {*PRIVATE, "fedgm-labels"}


def _releases(kind: Any) -> list[str]:
    steps = client_steps(kind).values()
    return [f.name for s in steps for f in s.reply.schema if f.is_released]


def test_what_is_declared_public_is_pinned() -> None:
    found = {
        (name, step.name, f.name)
        for name in SMALL
        if _releases(methods.find(name))
        for step in client_steps(methods.find(name)).values()
        for f in step.reply.schema
        if f.is_public
    }
    assert found == PUBLIC_FIELDS


# --- planted faults


class Counted(Trained):
    """A reply with the number of records, called public."""

    count: Annotated[int, Public()]


class Counts(DPFL):
    """Sends how many records it has."""

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> Counted:
        released = client.release(self.local.mechanism(client.new_model(weights), noise), client.train)
        return Counted(weights=released, count=len(client.train))


class Judged(Trained):
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
    def update(self, client: Client, weights: Parameters, noise: float) -> Trained:
        released = client.release(self.local.mechanism(client.new_model(weights), noise), client.train)
        return Trained(weights=Released({n: w + 1e-6 * len(client.train) for n, w in released.value.items()}))


class RawClip(AdapDPFL):
    """Clips at the exact mean length of the images."""

    @step
    def update(self, client: Client, weights: Parameters, noise: float) -> Trained:
        clip = float(client.train.inputs().flatten(1).norm(dim=1).mean())
        mechanism = self.local.mechanism(client.new_model(weights), noise, clip=clip)
        return Trained(weights=client.release(mechanism, client.train, adaptive=True))


def shared_stream(patch: pytest.MonkeyPatch) -> None:
    rng = SiteClient.rng
    patch.setattr(SiteClient, "rng", lambda self, *use: rng(self, *(use[:1] if use[0] == "privacy noise" else use)))


def train_mode(patch: pytest.MonkeyPatch) -> None:
    mode_of = rowwise.mode_of
    patch.setattr(rowwise, "mode_of", lambda model, training: mode_of(model, training=True))
    patch.setattr(rowwise, "sizes", lambda *args: (64,))


def counts_beside(patch: pytest.MonkeyPatch) -> None:
    def release(client: Any, rows: Tensor, centre: Tensor, radius: float, settings: Any) -> Any:
        reply = feature_sums.release_sums(client, rows, centre, radius, settings)
        counts = client.train.class_counts().float()
        return feature_sums.Embedding(sums=reply.sums.map(lambda s: torch.cat([s[:, :-1], counts[:, None]], 1)))

    patch.setattr(fedgm_records, "release_sums", release)


def private_centre(patch: pytest.MonkeyPatch) -> None:
    release = feature_sums.release_sums
    patch.setattr(fedgm_records, "release_sums", lambda c, rows, centre, *more: release(c, rows, rows.mean(0), *more))


def half_the_noise(patch: pytest.MonkeyPatch) -> None:
    added = mechanisms.GaussianMechanism.noised
    patch.setattr(
        mechanisms.GaussianMechanism,
        "noised",
        lambda self, exact, noise: added(replace(self, noise_multiplier=self.noise_multiplier / 2), exact, noise),
    )


def charged_late(patch: pytest.MonkeyPatch) -> None:
    def release(self: SiteClient, mechanism: Any, rows: Any, *, adaptive: bool = False, part: Any = None) -> Any:
        value = mechanism(rows, seeds.Simulated(self.rng("privacy noise", 0)))
        facts = {"exchange": self._exchange, "step": self._step, "index": 0, "mechanism": "m", "unit": mechanism.unit}
        self._ledger.charge(Entry(event=mechanism.event, theorem=mechanism.theorem, adaptive=adaptive, **facts))
        return Released(value)

    patch.setattr(SiteClient, "release", release)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The fault is in the method."""


Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Callable[[], Any], Plant, str, dict[str, Any]]] = {
    "a noise stream for two releases": (lambda: made("fedauxfdp"), shared_stream, "the same noise", {}),
    "features in train mode": (lambda: made("fedavg-p"), train_mode, "a row depends", {"model": "resnet8"}),
    "a count called public": (lambda: Counts(**ALL), nothing, "replies differ", {}),
    "a loss without noise": (lambda: Losses(**ALL), nothing, "replies differ", {}),
    "a private number in a released field": (lambda: Hidden(**ALL), nothing, "replies differ", {}),
    "a clip from raw records": (lambda: RawClip(**ALL), nothing, "differ|depends on records", {}),
    "class counts beside sums": (lambda: made("fedgm-records"), counts_beside, "replies differ", {}),
    "a charge after the release": (lambda: made("fedavg-p"), charged_late, "before it was charged", {}),
    "half the noise": (lambda: made("fedgm-records"), half_the_noise, "moved", {}),
    "sums about the private mean": (lambda: made("fedgm-records"), private_centre, "a row depends", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, plant, sentence, facts = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=sentence):
        check(make(), digits, "an outlier", tmp_path, **facts)
