"""FedGM with label privacy: labels are randomised once, before anything sees them, and what that guarantees."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from small import last_state, run, world
from torch import Tensor

from fedstill.base.records import Normalisation
from fedstill.data.sources import DataSet
from fedstill.engines.client import SiteClient
from fedstill.engines.server import ServerFederation, TooFewReplies
from fedstill.methods import fedgm_labels
from fedstill.methods.fedgm_labels import FedGMLabels
from fedstill.methods.parts import label_sets
from fedstill.methods.parts.label_sets import RandomisedSet
from fedstill.privacy.randomized_response import RRWithPrior
from fedstill.protocol import Records, Released, state

QUICK: dict[str, Any] = {"training": {"epochs": 2}, "matching": {"nets": 1, "batch_size": 8}}
LEVEL = 1e-6  # how seldom a binomial test may reject what is right


def federation(
    method: FedGMLabels, train: Records, own: list[Any], test: Records, folder: Path, **facts: Any
) -> ServerFederation:
    data = SimpleNamespace(train=train, test=test)
    fed: ServerFederation = world(method, data, folder, [(o, o[:0]) for o in own], **facts).federation
    return fed


@pytest.fixture
def distilled(monkeypatch: pytest.MonkeyPatch) -> list[Records]:
    """What reaches the matching, which is left out: the first images of every class stand for the synthetic ones."""
    seen: list[Records] = []

    def first_images(records: Records, _nets: Any, ipc: int, *_: Any) -> Records:
        seen.append(records)
        index = torch.cat([torch.nonzero(records.labels == c)[:ipc, 0] for c in records.labels.unique()])
        return records[index]

    monkeypatch.setattr(fedgm_labels, "synthesise", first_images)
    return seen


Release = tuple[int, Any, Tensor, Tensor, str | None]


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[Release]:
    """Everything that goes through ``client.release``: client, mechanism, what went in, what came out, part."""
    seen: list[Release] = []
    release: Callable[..., Released[Tensor]] = SiteClient.release

    def spy(self: SiteClient, mechanism: Any, rows: Tensor, **options: Any) -> Released[Tensor]:
        result = release(self, mechanism, rows, **options)
        part = options.get("part")
        own = (rows, None) if part is None else (rows[part.positions], part.name)
        seen.append((self.id, mechanism, own[0], result.value, own[1]))
        return result

    monkeypatch.setattr(SiteClient, "release", spy)
    return seen


# ------------------------------------------------------------------------------------------------------------ guarantee


@pytest.mark.slow
def test_the_guarantee_is_epsilon_for_a_label_not_twice_epsilon(digits: DataSet, tmp_path: Path) -> None:
    _, fed = run(FedGMLabels(epsilon=1.5, ipc=1, **QUICK), digits, tmp_path)
    found = fed.guarantee()
    assert (found.holds, found.unit, found.epsilon, found.delta) == (True, "label", 1.5, 0.0)
    assert "parallel composition" in str(found.accountant)
    assert [sorted(str(e.part) for e in entries) for entries in fed.journal.releases().values()] == 4 * [
        ["first", "second"]
    ]


def test_a_budget_of_epsilon_is_enough_and_less_is_not(digits: DataSet, distilled: Any, tmp_path: Path) -> None:
    method = FedGMLabels(epsilon=1.5, ipc=1, **QUICK)
    for budget in (1.5, 1.4):
        fed = federation(method, digits.train, [np.arange(50)], digits.test, tmp_path / f"{budget}", budget=budget)
        if budget < 1.5:
            with pytest.raises(TooFewReplies, match="above the budget"):
                method.server(fed)
        else:
            method.server(fed)


def test_published_guarantees_nothing_and_names_the_images(digits: DataSet, tmp_path: Path) -> None:
    _, fed = run(FedGMLabels(privacy="published", ipc=2, **QUICK), digits, tmp_path)
    found = fed.guarantee()
    assert not found.holds
    assert found.reason == (
        "field 'images' of step 'send_half' and field 'images' of step 'send_rest' are released unprotected"
    )
    # nor would it if somebody declared the images public: the tags are no records' labels
    assert all(entry.event.kind == "none" for entry in fed.journal.releases()[0])


# ------------------------------------------------------------------------------------------------ each label only once


def test_every_label_is_randomised_exactly_once(
    digits: DataSet, distilled: list[Records], releases: list[Release], tmp_path: Path
) -> None:
    # forty records of forty classes: a label says which record it is of
    train = Records(digits.train.images[:40], torch.arange(40), 40, digits.train.normalisation)
    method = FedGMLabels(ipc=1, **QUICK)
    method.server(federation(method, train, [np.arange(13), np.arange(13, 40)], train, tmp_path))
    for client, own in ((0, range(13)), (1, range(13, 40))):
        made = {part: rows.tolist() for c, _, rows, _, part in releases if c == client}
        assert sorted(made["first"] + made["second"]) == list(own)
        assert len(made["first"]) == round(0.6 * len(own))
        assert all(isinstance(m, RRWithPrior) for c, m, *_ in releases if c == client)


@pytest.mark.parametrize(("epsilon", "kept"), [(1e-3, 0.1), (20.0, 1.0)])
def test_only_randomised_labels_reach_the_matching(
    epsilon: float, kept: float, digits: DataSet, distilled: list[Records], releases: list[Release], tmp_path: Path
) -> None:
    run(FedGMLabels(epsilon=epsilon, relabel="none", ipc=2, **QUICK), digits, tmp_path)
    parts, whole = distilled[:4], distilled[4:]
    for client, (part, every) in enumerate(zip(parts, whole, strict=True)):
        first, second = (value for c, _, _, value, _ in releases if c == client)
        assert torch.equal(part.labels, first)
        assert torch.equal(every.class_counts(), (torch.cat([first, second])).bincount(minlength=10))
    # at epsilon 0.001 a plain randomised response tells nothing, at 20 everything
    true = {image.numpy().tobytes(): int(y) for image, y in zip(digits.train.images, digits.train.labels, strict=True)}
    hits = sum(true[x.numpy().tobytes()] == int(y) for s in parts for x, y in zip(s.images, s.labels, strict=True))
    trials = sum(map(len, parts))
    assert trials > 700
    if kept == 1.0:
        assert hits == trials  # each label changes with probability 2e-8
    else:
        assert stats.binomtest(hits, trials, kept).pvalue > LEVEL
        assert stats.binomtest(hits, trials, 2 * kept).pvalue < LEVEL


def test_the_split_and_the_prior_know_none_of_the_labels_they_are_for(
    digits: DataSet, distilled: list[Records], releases: list[Release], tmp_path: Path
) -> None:
    method = FedGMLabels(epsilon=1.0, ipc=1, **QUICK)
    some = digits.train[:60]
    fed = federation(method, some, [np.arange(60)], digits.test, tmp_path / "1")
    method.server(fed)
    (_, _, in_first, out_first, _), (_, one, _, _, _) = releases
    later = _state(fed)["labels"] < 0
    releases.clear()
    labels = torch.where(later, (some.labels + 3) % 10, some.labels)  # other labels in the second part only
    fed = federation(method, replace(some, labels=labels), [np.arange(60)], digits.test, tmp_path / "2")
    method.server(fed)
    (_, _, rows, out, _), (_, two, changed, _, _) = releases
    assert torch.equal(_state(fed)["labels"] < 0, later)
    assert torch.equal(rows, in_first)
    assert torch.equal(out, out_first)
    assert torch.equal(one.prior, two.prior)
    assert torch.equal(changed, labels[later])
    assert float(one.prior.std()) > 1e-3  # a prior at all


def _state(fed: ServerFederation) -> dict[str, Tensor]:
    return last_state(fed.journal.folder.parent / "clients", 0)


def test_without_epsilon_labels_stay_as_they_are(
    digits: DataSet, distilled: list[Records], releases: list[Release], tmp_path: Path
) -> None:
    _, fed = run(FedGMLabels(epsilon=None, ipc=1, **QUICK), digits, tmp_path)
    assert all(torch.equal(rows, value) for _, _, rows, value, _ in releases)
    assert all(torch.equal(s.labels.sort().values, y.sort().values) for s, y in _whole(digits, distilled))
    found = fed.guarantee()
    assert not found.holds
    assert "labels are not randomised" in found.reason


def _whole(digits: DataSet, distilled: list[Records]) -> list[tuple[Records, Tensor]]:
    own = [torch.from_numpy(part) for part in np.array_split(np.arange(len(digits.train)), 4)]
    return [(s, digits.train.labels[o]) for s, o in zip(distilled[4:], own, strict=True)]


# --------------------------------------------------------------------------------------------------------- what is sent


def test_a_client_of_one_class_sends_images_of_all(digits: DataSet, tmp_path: Path) -> None:
    method = FedGMLabels(epsilon=5.0, ipc=2, **QUICK)
    threes = np.flatnonzero(digits.train.labels.numpy() == 3)
    fed = federation(method, digits.train, [threes, threes[:1]], digits.test, tmp_path)
    for step, payload in ((method.distil_part, {}), (method.distil_all, {"weights": state(fed.new_model())})):
        for reply in fed.ask(step, at_most={"n": 20}, **payload):
            assert reply.images.value.shape == (20, 1, 8, 8)
            assert reply.labels.value.tolist() == [c for c in range(10) for _ in range(2)]
            assert reply.counts.value.shape == (10,)


def test_stage_two_drops_labels_that_the_first_model_finds_unlikely(
    digits: DataSet, distilled: list[Records], tmp_path: Path
) -> None:
    sizes = {}
    for relabel in ("drop", "none"):
        distilled.clear()
        method = FedGMLabels(epsilon=2.0, ipc=1, temperature=0.01, relabel=relabel, **QUICK)
        method.server(federation(method, digits.train, [np.arange(200)], digits.test, tmp_path / relabel))
        sizes[relabel] = len(distilled[1])
    assert sizes["none"] == 200
    assert 80 <= sizes["drop"] < 200  # the second part stays whole


@pytest.mark.slow
def test_clients_guess_most_true_labels_from_randomised_ones(
    digits: DataSet, distilled: list[Records], releases: list[Release], tmp_path: Path
) -> None:
    method = FedGMLabels(epsilon=1.5, ipc=1, denoising={"epochs": 20, "lr": 3e-3}, **QUICK)  # type: ignore[arg-type]
    method.server(federation(method, digits.train, [np.arange(1000)], digits.test, tmp_path))
    true = {image.numpy().tobytes(): int(y) for image, y in zip(digits.train.images, digits.train.labels, strict=True)}
    (_, _, labels, first, _), _ = releases
    assert float((labels == first).double().mean()) < 0.45  # 0.33 is expected
    for guessed in distilled:
        hits = [true[x.numpy().tobytes()] == int(y) for x, y in zip(guessed.images, guessed.labels, strict=True)]
        assert np.mean(hits) > 0.6
    assert len(distilled[1]) == 1000


def test_guesses_follow_from_what_was_released(
    digits: DataSet, distilled: list[Records], releases: list[Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # other true labels behind the same releases: the guesses are the same
    found = []
    some = digits.train[:100]
    for turn, labels in enumerate((some.labels, (some.labels + 3) % 10)):
        distilled.clear()
        if turn:
            kept = iter([value for *_, value, _ in releases])
            monkeypatch.setattr(RRWithPrior, "__call__", lambda *_, kept=kept: next(kept))
        method = FedGMLabels(epsilon=1.0, ipc=1, **QUICK)
        fed = federation(method, replace(some, labels=labels), [np.arange(100)], digits.test, tmp_path / f"{turn}")
        method.server(fed)
        found.append([s.labels for s in distilled])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_server_takes_images_as_often_as_labels_name_their_class() -> None:
    images = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)
    labels, counts = torch.tensor([0, 0, 1, 1], dtype=torch.uint8), torch.tensor([30, 10])
    reply = RandomisedSet(images=Released(images), labels=Released(labels), counts=Released(counts))
    weighted, equal = label_sets.weigh("counts", reply), label_sets.weigh("equal", reply)
    assert weighted.labels.tolist() == [0, 0, 0, 1]
    assert set(weighted.images.flatten().tolist()) >= {0, 1}
    assert torch.equal(equal.images, images)
    alone = label_sets.weigh("counts", replace(reply, counts=Released(torch.tensor([0, 7]))))
    assert alone.images.flatten().tolist() == [2, 2, 3, 3]


def test_published_sends_each_image_once_and_true_tags_without_noise(
    digits: DataSet, releases: list[Release], tmp_path: Path
) -> None:
    method = FedGMLabels(privacy="published", epsilon=None, ipc=3, **QUICK)
    threes = np.flatnonzero(digits.train.labels.numpy() == 3)
    fed = federation(method, digits.train, [threes], digits.test, tmp_path)
    (half,) = fed.ask(method.send_half, at_most={"n": 2})
    (rest,) = fed.ask(method.send_rest, at_most={"n": 1}, weights=state(fed.new_model()))
    assert [half.labels.value.tolist(), rest.labels.value.tolist()] == [[3, 3], [3]]
    assert len({image.numpy().tobytes() for image in torch.cat([half.images, rest.images])}) == 3


def test_clients_without_records_or_without_stage_one_say_so(digits: DataSet, tmp_path: Path) -> None:
    method = FedGMLabels(ipc=1, **QUICK)
    fed = federation(method, digits.train, [np.arange(0)], digits.test, tmp_path)
    with pytest.raises(TooFewReplies, match="0 records have no labels"):
        fed.ask(method.distil_part)
    with pytest.raises(TooFewReplies, match="no labels of stage 1"):
        fed.ask(method.distil_all, weights=state(fed.new_model()))
    assert fed.journal.releases() == {}


def test_records_whose_label_the_prior_makes_unlikely_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With k classes kept, a label of rank k (from 0) is the first that is left out; records of later parts stay."""
    prior = torch.tensor([[0.6, 0.3, 0.1]]).repeat(4, 1)
    records = small_records(torch.tensor([0, 1, 2, 2]))
    monkeypatch.setattr(label_sets, "top_k", lambda prior, epsilon: torch.full((len(prior),), 1))
    later = torch.tensor([False, False, False, True])
    assert label_sets.without_unlikely(records, prior, 1.0, later).labels.tolist() == [0, 2]
    monkeypatch.setattr(label_sets, "top_k", lambda prior, epsilon: torch.full((len(prior),), 2))
    assert label_sets.without_unlikely(records, prior, 1.0, later).labels.tolist() == [0, 1, 2]


def small_records(labels: Tensor) -> Records:
    return Records(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels, 3, Normalisation((0.5,), (0.25,)))
