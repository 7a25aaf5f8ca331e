"""SimCLR: the loss against loops, what is trained, streams, checkpoints, the use."""

import math
from pathlib import Path

import pytest
import torch
from doubles import Killed
from torch import Tensor, nn

from fedstill import models
from fedstill.base import files
from fedstill.base.errors import Diverged
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.data.sources import DataSet
from fedstill.train import contrastive
from fedstill.train.augment import Views
from fedstill.train.contrastive import SimCLR, fingerprint, knn_accuracy, nt_xent

SMALL = SimCLR(epochs=3, batch_size=16, projection=(8, 4), lr=0.01)
STILL = Views(scale=(1, 1), ratio=(1, 1), flip=0, jitter=0, gray=0)


def small_records(n: int = 40, channels: int = 1, seed: int = 0) -> Records:
    images = torch.randint(0, 256, (n, channels, 8, 8), generator=stream(seed), dtype=torch.uint8)
    return Records(images, torch.arange(n) % 3, 3, Normalisation((0.4,) * channels, (0.3,) * channels))


def new_model(spec: str = "convnet:width=4,depth=2,norm=batch", channels: int = 1, seed: int = 0) -> nn.Module:
    with isolated(seed):
        return models.build(spec, (channels, 8, 8), 3)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in model.state_dict().values()])


# The loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_the_loss_is_equation_1_in_loops(temperature: float) -> None:
    first, second = (torch.randn(5, 3, generator=stream(i), dtype=torch.float64) for i in range(2))
    z = torch.cat([first, second])
    total = 0.0
    for i in range(10):
        j = (i + 5) % 10
        similar = [float(z[i] @ z[k] / z[i].norm() / z[k].norm()) for k in range(10)]
        others = sum(math.exp(similar[k] / temperature) for k in range(10) if k != i)
        total -= math.log(math.exp(similar[j] / temperature) / others)
    # float64 in another order
    assert float(nt_xent(first, second, temperature)) == pytest.approx(total / 10, rel=1e-12)


def test_the_loss_is_log_of_the_number_of_others_when_all_views_are_alike() -> None:
    same = torch.ones(6, 4, dtype=torch.float64)
    assert float(nt_xent(same, same, 0.5)) == pytest.approx(math.log(11))
    apart = torch.eye(6, dtype=torch.float64)
    assert float(nt_xent(apart, apart, 0.05)) < 1e-6


# Training ------------------------------------------------------------------------------------------------------------


def test_the_defaults_are_fedauxs() -> None:
    s = SimCLR()
    assert (s.epochs, s.batch_size, s.temperature, s.projection) == (100, 512, 0.5, (512, 128))
    assert (s.lr, s.weight_decay) == (1e-3, 1e-6)


def test_a_step_is_the_plain_algorithm() -> None:
    """One epoch of two batches, with views that change nothing, against a loop with torch's Adam."""
    ours, plain, records = new_model(), new_model(), small_records(20)
    settings = SimCLR(epochs=1, batch_size=12, projection=(8, 4), weight_decay=0.1, lr=0.01, views=STILL)
    settings.fit(ours, records, stream(5))
    seed = contrastive.draw_seed(stream(5))
    with isolated(contrastive.derive(seed, "start")):
        head = nn.Sequential(nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    features = plain.layers.train()
    adam = torch.optim.Adam([*features.parameters(), *head.parameters()], lr=0.01, weight_decay=0.1)
    rng = stream(seed, "epoch", 1)
    for batch in torch.randperm(20, generator=rng).split(12):
        views = [settings.views(records.pixels(batch), rng) for _ in range(2)]
        z = head(features(records.normalisation.apply(torch.cat(views))).flatten(1))
        adam.zero_grad()
        nt_xent(z[: len(batch)], z[len(batch) :], 0.5).backward()
        adam.step()
    # The same operations on the same numbers.
    torch.testing.assert_close(flat(ours), flat(plain), rtol=1e-6, atol=1e-7)
    assert (flat(ours) - flat(new_model())).abs().max() > 0.005


@pytest.mark.parametrize("spec", ["convnet:width=4,depth=2,norm=batch", "lenet:padding=2", "resnet8:width=2"])
def test_only_what_makes_the_features_is_trained(spec: str) -> None:
    model, start = new_model(spec), new_model(spec)
    SMALL.fit(model, small_records(), stream(1))
    last = "fc3" if spec.startswith("lenet") else "classifier"
    for name, value in model.state_dict().items():
        assert torch.equal(value, start.state_dict()[name]) == name.startswith(last), name
    assert all(p.grad is None for p in model.parameters())


def test_a_network_without_a_method_features_is_trained_up_to_its_last_linear_layer() -> None:
    def build() -> nn.Sequential:
        with isolated(0):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))

    model, start = build(), build()
    SMALL.fit(model, small_records(), stream(1))
    assert not torch.equal(model[1].weight, start[1].weight)
    assert torch.equal(model[4].weight, start[4].weight) and torch.equal(model[4].bias, start[4].bias)


def test_frozen_parameters_stay_and_a_wholly_frozen_extractor_is_refused() -> None:
    model = new_model()
    model.layers[0].weight.requires_grad_(False)
    before = model.layers[0].weight.clone()
    SMALL.fit(model, small_records(), stream(1))
    assert torch.equal(model.layers[0].weight, before)
    model.layers.requires_grad_(False)
    with pytest.raises(ValueError, match="features of ConvNet have no trainable parameters"):
        SMALL.fit(model, small_records(), stream(1))


def test_the_result_is_the_generators_alone() -> None:
    def fitted(seed: int, elsewhere: int = 0) -> Tensor:
        with isolated(0):
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
        with isolated(elsewhere):
            before = torch.get_rng_state()
            SMALL.fit(model, small_records(), stream(seed))
            assert torch.equal(before, torch.get_rng_state())
        return flat(model)

    assert torch.equal(fitted(1), fitted(1, elsewhere=7))
    assert not torch.equal(fitted(1), fitted(2))


def test_modes_labels_and_calls() -> None:
    model, other, records = new_model(), new_model(), small_records()
    model.eval()
    model.layers[0].train()
    calls: list[tuple[int, int]] = []
    loss = SMALL.fit(model, records, stream(1), on_epoch=lambda done, of: calls.append((done, of)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert not model.training and not model.layers[1].training and model.layers[0].training
    relabelled = Records(records.images, torch.zeros(40, dtype=torch.int64), 1, records.normalisation)
    assert SMALL.fit(other, relabelled, stream(1)) == loss
    assert torch.equal(flat(model), flat(other))


def test_a_last_image_alone_is_left_out() -> None:
    for n, sizes in ((17, [32]), (18, [32, 4])):
        model, seen = new_model(), []
        model.layers[0].register_forward_hook(lambda m, _, out: seen.append(len(out)) if m.training else None)  # noqa: B023
        loss = SimCLR(epochs=1, batch_size=16, projection=(8, 4)).fit(model, small_records(n), stream(1))
        assert seen == sizes
        assert loss > 0.5  # and it doesn't count as a loss of 0
    with pytest.raises(ValueError, match="1 are too few; give at least 2"):
        SMALL.fit(new_model(), small_records(1), stream(1))


def test_divergence_is_an_error_with_a_remedy() -> None:
    with pytest.raises(Diverged, match=r"lr=1e\+30.*smaller learning rate"):
        SimCLR(epochs=2, batch_size=16, projection=(8, 4), lr=1e30).fit(
            new_model("convnet:width=4,depth=2,norm=none"), small_records(), stream(1)
        )


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["convnet:width=4,depth=2,norm=batch", "resnet8:width=2", "dropout"])
def test_a_killed_training_goes_on_to_the_same_bits(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        with isolated(3):
            layers = (nn.Flatten(), nn.Linear(64, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
            return nn.Sequential(*layers) if spec == "dropout" else models.build(spec, (1, 8, 8), 3)

    def kill(done: int, _of: int) -> None:
        if done == 2:
            raise Killed

    monkeypatch.setattr(contrastive, "_CHECKPOINT_SECONDS", 0.0)
    whole, broken, again = build(), build(), build()
    settings, records, path = SMALL.model_copy(update={"epochs": 4}), small_records(), tmp_path / "here" / "ckpt"
    loss = settings.fit(whole, records, stream(1))
    with pytest.raises(Killed):
        settings.fit(broken, records, stream(1), on_epoch=kill, checkpoint=path)
    calls: list[int] = []
    assert settings.fit(again, records, stream(1), on_epoch=lambda d, _: calls.append(d), checkpoint=path) == loss
    assert calls == [3, 4]
    assert torch.equal(flat(again), flat(whole))
    assert not torch.equal(flat(broken), flat(whole))
    done = build()  # and a finished one is only read
    assert settings.fit(done, records, stream(1), on_epoch=kill, checkpoint=path) == loss
    assert torch.equal(flat(done), flat(whole))


def test_checkpoints_are_written_at_most_once_a_minute_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = [0.0], []
    monkeypatch.setattr(contrastive.time, "monotonic", lambda: now[0])
    original = files.write_checked
    monkeypatch.setattr(files, "write_checked", lambda p, d: (written.append(now[0]), original(p, d)))

    def tick(_done: int, _of: int) -> None:
        now[0] += 25

    settings = SMALL.model_copy(update={"epochs": 8})
    settings.fit(new_model(), small_records(), stream(1), on_epoch=tick, checkpoint=tmp_path / "ckpt")
    assert written == [75, 150, 175]


@pytest.mark.parametrize("change", ["settings", "images", "model", "seed"])
def test_another_trainings_checkpoint_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    SMALL.fit(new_model(), small_records(), stream(1), checkpoint=path)
    settings = SMALL.model_copy(update={"temperature": 0.4}) if change == "settings" else SMALL
    records = small_records(seed=1) if change == "images" else small_records()
    model = new_model(seed=1) if change == "model" else new_model()
    with pytest.raises(ValueError, match="checkpoint of another pretraining; delete it") as caught:
        settings.fit(model, records, stream(2 if change == "seed" else 1), checkpoint=path)
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    SMALL.fit(new_model(), small_records(), stream(1), checkpoint=path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(files.Damaged, match="damaged.*delete it and start again"):
        SMALL.fit(new_model(), small_records(), stream(1), checkpoint=path)


def test_the_fingerprint_sees_what_the_state_does_not_show() -> None:
    relu, swish = (new_model(f"convnet:width=4,depth=2,activation={a}") for a in ("relu", "swish"))
    assert torch.equal(flat(relu), flat(swish))
    records = small_records()
    brighter = Records(records.images, records.labels, 3, Normalisation((0.1,), (0.3,)))
    prints = [fingerprint(m, r, {}) for m in (relu, swish) for r in (records, brighter)]
    assert len(set(prints)) == 4
    assert fingerprint(relu, records, {}) == prints[0] != fingerprint(relu, records, {"seed": 1})


# What it is worth ----------------------------------------------------------------------------------------------------


def test_knn_is_a_weighted_vote_in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive, "_BATCH", 7)
    with isolated(0):  # features of either sign, so that similarities spread
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    train, test = small_records(50, seed=1), small_records(100, seed=2)
    model.eval()
    with torch.no_grad():
        a, b = (models.features(model, r.inputs()).double() for r in (train, test))
    right = 0
    unweighted = 0
    for z, label in zip(b, test.labels, strict=True):
        similar = torch.stack([z @ v / z.norm() / v.norm() for v in a])
        votes, counts = [0.0] * 3, [0] * 3
        for i in similar.argsort(descending=True)[:30]:
            votes[int(train.labels[i])] += math.exp(float(similar[i]) / 0.1)
            counts[int(train.labels[i])] += 1
        right += votes.index(max(votes)) == int(label)
        unweighted += counts.index(max(counts)) == int(label)
    model.train()
    assert right != unweighted  # the test can tell
    assert knn_accuracy(model, train, test, k=30, temperature=0.1) == right / 100
    assert model.training
    assert knn_accuracy(model, train, train, k=1) == 1
    assert 0 <= knn_accuracy(model, train, test, k=1000) <= 1
    with pytest.raises(ValueError, match="50 records to vote and 0 to classify"):
        knn_accuracy(model, train, test[:0])


@pytest.mark.slow
def test_pretraining_on_digits_beats_the_random_start(digits: DataSet) -> None:
    """Five seeds gave .84 to .92, at the start .67 to .77; the least gain was .11."""
    with isolated(0):
        model = models.build("convnet:width=16,depth=3,norm=batch", (1, 8, 8), 10)
    train = digits.train[:400]
    before = knn_accuracy(model, train, digits.test, k=10)
    # No flips and no small crops: they make other digits.
    settings = SimCLR(epochs=20, batch_size=64, lr=3e-3, projection=(64, 32), views=Views(flip=0, scale=(0.4, 1)))
    settings.fit(model, train, stream(0))
    assert knn_accuracy(model, train, digits.test, k=10) > before + 0.07
