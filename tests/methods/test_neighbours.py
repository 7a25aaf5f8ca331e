"""Every private method on neighbouring data sets, and builds with planted faults, which the same check must catch.

Two clients with other numbers of records and other classes answer every request, with replies of one size.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import torch
from method_settings import ALL, FACTS, PRIVATE, SMALL
from overheard import compare, hear
from small import noise_images

from fedstill import methods
from fedstill.audits.neighbours import Heard
from fedstill.base import seeds
from fedstill.base.records import Records
from fedstill.privacy import mechanisms
from fedstill.protocol import client_steps

PUBLIC_FIELDS = {("fedaux", "train_score", "client"), ("fedaux", "update", "client")}
"""Fields of replies that are declared public, of methods with a release: a client's number, and nothing else."""


def made(name: str, **more: Any) -> Any:
    return methods.find(name)(**{**PRIVATE[name], **more})


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
    rest = np.arange(100, 117)
    own = [[(part, part[:0]), (rest, rest[:0])] for part in (more, less)]
    facts = {"public": noise_images(digits), "budget": 50.0, **facts}
    one, other = (hear(method, data, parts, folder / str(i), **facts) for i, parts in enumerate(own))
    compare(one, other, 0 if len(more) > 1 and more[1] == less[0] else len(more) - 1)
    assert_sizes_are_public(one)


def assert_sizes_are_public(heard: Heard) -> None:
    """Replies to one request have one size, whatever the clients' records, their number and their classes."""
    sizes: dict[bytes, set[int]] = {}
    for request, reply in heard.messages:
        sizes.setdefault(request, set()).add(len(reply))
    assert len(heard.messages) == 2 * len(sizes)
    assert all(len(found) == 1 for found in sizes.values()), sizes.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("pair", ["a first record", "the last record of a class", "an outlier"])
def test_nothing_but_releases_depends_on_a_record(name: str, pair: str, digits: Any, tmp_path: Path) -> None:
    check(made(name), digits, pair, tmp_path, **FACTS.get(name, {}))


@pytest.mark.slow
def test_with_batch_norm_too(digits: Any, tmp_path: Path) -> None:
    check(made("fedavg-p"), digits, "an outlier", tmp_path, model="resnet8")


def test_a_size_that_depends_on_records_is_caught() -> None:
    with pytest.raises(AssertionError):
        assert_sizes_are_public(Heard(messages=[(b"request", b"two"), (b"request", b"three")]))


def labels_heard(digits: Any, folder: Path, record: int) -> list[Heard]:
    """What two data sets show that differ by the label of a record."""
    method = methods.find("fedgm-labels")(**SMALL["fedgm-labels"])
    part, rest = np.arange(40), np.arange(100, 140)
    heard = []
    for i, shift in enumerate((0, 3)):
        labels = digits.train.labels.clone()
        labels[record] = (labels[record] + shift) % 10
        train = Records(digits.train.images, labels, 10, digits.train.normalisation)
        data = type("Data", (), {"train": train, "test": digits.test[:20]})
        parts = [(part, part[:0]), (rest, rest[:0])]
        heard.append(hear(method, data, parts, folder / str(i)))
    assert len(heard[0].charged) == 4
    return heard


@pytest.mark.slow
def test_nothing_but_releases_depends_on_a_label(digits: Any, tmp_path: Path) -> None:
    one, other = labels_heard(digits, tmp_path, 7)
    compare(one, other)
    assert_sizes_are_public(one)


@pytest.mark.slow
def test_a_prior_from_private_labels_is_caught(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.private_prior(monkeypatch)
    later = int(torch.randperm(40, generator=seeds.stream(0, "client", 0, 0, "part"))[-1])  # of the second stage
    with pytest.raises(AssertionError, match="a prior depends on a label"):
        compare(*labels_heard(digits, tmp_path, later))


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
        if f.protection == "public"
    }
    assert found == PUBLIC_FIELDS


# --- planted faults


def half_the_noise(patch: pytest.MonkeyPatch) -> None:
    added = mechanisms.GaussianMechanism.noised
    patch.setattr(
        mechanisms.GaussianMechanism,
        "noised",
        lambda self, exact, noise: added(replace(self, noise_multiplier=self.noise_multiplier / 2), exact, noise),
    )


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The fault is in the method."""


UNWHITENED = {"whiten": False}
"""Under which the outlier's row is the longest."""
Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Callable[[], Any], Plant, str, dict[str, Any]]] = {
    "a noise stream for two releases": (lambda: made("fedauxfdp"), faults.shared_stream, "the same noise", {}),
    "features in train mode": (lambda: made("fedavg-p"), faults.train_mode, "a row depends", {"model": "resnet8"}),
    "a count called public": (lambda: faults.Counts(**ALL), nothing, "replies differ", {}),
    "a loss without noise": (lambda: faults.Losses(**ALL), nothing, "replies differ", {}),
    "a private number in a released field": (lambda: faults.Hidden(**ALL), nothing, "replies differ", {}),
    "a clip from raw records": (lambda: faults.RawClip(**ALL), nothing, "differ|depends on records", {}),
    "class counts beside sums": (lambda: made("fedgm-records"), faults.counts_beside, "replies differ", {}),
    "a charge after the release": (lambda: made("fedavg-p"), faults.charged_late, "before it was charged", {}),
    "half the noise": (lambda: made("fedgm-records"), half_the_noise, "moves a release", {}),
    "noise for half the sensitivity": (lambda: made("fedgm-records"), faults.half_the_sensitivity, "moves a rel", {}),
    "heads about the private mean": (lambda: made("fedavg-p"), faults.heads_centred, "a row depends", {}),
    "clipping by the longest row": (lambda: made("afl", space=UNWHITENED), faults.longest_row, "a row depends", {}),
    "a second release unaccounted": (lambda: made("fedgm-records"), faults.released_twice, "before it was charged", {}),
    "heads solved with a tenth of Lambda": (lambda: made("fedavg-p"), faults.a_tenth_of_lambda, "moves a release", {}),
    "half the noise of DP-SGD": (lambda: made("dp-fl"), faults.half_the_noise_of_training, "moves a release", {}),
    "a rate from the number of records": (lambda: faults.RawRate(**ALL), nothing, "differ|depends on records", {}),
    "a solver that stops early": (lambda: made("fedavg-p"), faults.stopped_early, "solver stopped", {}),
    "sums about the private mean": (lambda: made("fedgm-records"), faults.centred, "a row depends", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, plant, sentence, facts = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=sentence):
        check(make(), digits, "an outlier", tmp_path, **facts)
