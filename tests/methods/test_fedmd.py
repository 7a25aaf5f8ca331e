"""FedMD against its algorithm: the consensus, the digest's loss, and what a round trains on what."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import last_state, noise_images, run
from torch import nn

from fedstill import models
from fedstill.base.records import Records
from fedstill.base.seeds import isolated, stream
from fedstill.methods.fedmd import FedMD, Scores, mean_logits, score_distance
from fedstill.train.extractor import learn_public_classes
from fedstill.train.sgd import Adam

METHOD: dict[str, Any] = {"local": Adam(epochs=1), "transfer": Adam(epochs=1), "revisit": Adam(epochs=1), "images": 40}


def test_the_consensus_is_the_plain_mean() -> None:
    replies = [Scores(logits=torch.tensor([[1.0, -2.0]])), Scores(logits=torch.tensor([[2.0, 4.0]]))]
    assert mean_logits(replies).tolist() == [[1.5, 1.0]]


def test_the_digest_s_loss_and_gradient_are_those_of_the_mean_absolute_error() -> None:
    ours, theirs = torch.randn(2, 6, 4, generator=stream(0), dtype=torch.float64)
    ours.requires_grad_()
    loss = score_distance(ours, torch.zeros(6), theirs)
    (gradient,) = torch.autograd.grad(loss, ours)
    difference = ours.detach().numpy() - theirs.numpy()
    assert float(loss.detach()) == pytest.approx(np.abs(difference).mean(), rel=1e-15)
    np.testing.assert_array_equal(gradient.numpy(), np.sign(difference) / difference.size)


@pytest.mark.slow
def test_a_round_trains_each_model_towards_the_consensus_and_then_on_its_records(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, nn.Module]] = []
    fit = Adam.fit

    def watched(self: Adam, model: nn.Module, records: Any, rng: Any, **options: Any) -> None:
        seen.append((records, model))
        fit(self, model, records, rng, **options)

    monkeypatch.setattr(Adam, "fit", watched)
    public, architectures = noise_images(digits), ("convnet:width=4,depth=2", "lenet:padding=14")
    method = FedMD(rounds=1, **METHOD)
    run(method, digits, tmp_path, clients=2, public=public, models=architectures)
    transfer, local, _, _, digest, revisit, *_ = seen
    own = digits.train[torch.arange(len(digits.train)).tensor_split(2)[0]]
    assert torch.equal(transfer[0].images, public().images)
    for records, _ in (local, revisit):
        assert torch.equal(records.images, own.images)
    assert digest[1] is revisit[1]
    assert len(digest[0].labels) == 40
    # both clients digest the same public images and the same consensus, which no one of them has alone
    other = seen[6][0]
    assert torch.equal(digest[0].x.images, other.x.images)
    assert torch.equal(digest[0].labels, other.labels)
    kinds = [set(last_state(tmp_path / "clients", k)) for k in range(2)]
    assert kinds[0] != kinds[1]  # of different architectures


def test_each_round_draws_other_images_and_both_sides_draw_the_same(digits: Any) -> None:
    class Here:
        public = noise_images(digits)()

    method = FedMD(images=40)
    first, again, other = (method.drawn(Here(), draw).images for draw in (5, 5, 6))  # type: ignore[arg-type]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(FedMD(images=4000).drawn(Here(), 5)) == 64  # type: ignore[arg-type]


def test_public_classes_are_learnt_and_the_networks_own_classifier_stays(digits: Any) -> None:
    with isolated(0):
        model = models.build("convnet:width=8,depth=2", (1, 8, 8), 3)
    *_, last = (m for m in model.modules() if isinstance(m, nn.Linear))
    before, first = last.weight.detach().clone(), next(model.parameters()).detach().clone()
    public: Records = digits.train[:200]  # ten classes, where the task has three
    learn_public_classes(model, public, Adam(epochs=1), stream(1))
    assert torch.equal(last.weight, before)
    assert not torch.equal(next(model.parameters()), first)


def test_labels_are_asked_for(digits: Any, tmp_path: Path) -> None:
    def unlabelled() -> Records:
        images = noise_images(digits)()
        return Records(images.images, torch.zeros(len(images), dtype=torch.int64), 1, images.normalisation)

    with pytest.raises(ValueError, match="begins with the labels of the public records, which have none; name some"):
        run(FedMD(rounds=1, **METHOD), digits, tmp_path, clients=2, public=unlabelled)
