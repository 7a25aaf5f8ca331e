"""Embeddings against their definition, images fitted to them, and what a record can do to a release of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import small
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import fedstill
from fedstill import methods, models
from fedstill.base.seeds import Simulated, isolated, stream
from fedstill.data.sources import DataSet
from fedstill.distill.embedding import ImageFitting, embed, unit_features
from fedstill.engines.server import ServerFederation
from fedstill.methods.fedgm_records import FedGMRecords
from fedstill.methods.parts.feature_sums import class_means as private_means
from fedstill.methods.parts.feature_sums import release_sums
from fedstill.models.cnn import ConvNet
from fedstill.protocol import Method, Records, Released, Summation, client_steps, wire


@cache
def nets(count: int = 4) -> list[nn.Module]:
    found = []
    for seed in range(count):
        with isolated(seed):
            found.append(ConvNet((1, 8, 8), 10, width=8, depth=2))
    return found


def class_means(rows: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([rows[labels == c].mean(0) for c in range(10)])


def test_rows_are_unit_features_of_all_networks_side_by_side(digits: DataSet) -> None:
    records = digits.train[:7]
    rows = embed(nets(), records)
    by_hand = [normalize(models.features(net.eval(), records.inputs()), dim=1) / 2 for net in nets()]
    assert torch.allclose(rows, torch.cat(by_hand, 1), atol=1e-6)
    assert torch.allclose(rows.norm(dim=1), torch.ones(7), atol=1e-5)
    assert not rows.requires_grad


def test_modes_come_back_and_pixels_get_gradients(digits: DataSet) -> None:
    with isolated(0):
        net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)).train()
    x = digits.train[:5].inputs().requires_grad_()
    before = torch.get_rng_state()
    first = unit_features(net, x)
    assert torch.equal(first, unit_features(net, x)) and torch.equal(torch.get_rng_state(), before)  # no dropout
    assert all(module.training for module in net.modules())
    (gradient,) = torch.autograd.grad(first[:, 0].sum(), x)
    assert gradient.abs().max() > 0
    assert torch.equal(unit_features(lambda_zero(), x[:2].detach()), torch.zeros(2, 64))  # no direction, no error


def lambda_zero() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(64, 3))
    net.register_forward_pre_hook(lambda _module, args: (args[0] * 0,))
    return net


def fit(data: DataSet, *, seed: int = 0, steps: int = 150, lr: float = 0.05, **changes: Any) -> tuple[Records, Tensor]:
    """Images fitted to the class means of real ones, and these."""
    means = class_means(embed(nets(), data.train[:500]), data.train.labels[:500])
    settings = ImageFitting(steps=steps, lr=lr, **changes)
    return settings.fit(nets(), means, 3, data.train[:0], stream(seed)), means


def distance(images: Records, means: Tensor) -> float:
    return float((class_means(embed(nets(), images), images.labels) - means).square().sum())


def test_fitting_reaches_the_means_it_is_given(digits: DataSet) -> None:
    begun, means = fit(digits, steps=1, lr=1e-9)
    found, _ = fit(digits)
    assert distance(found, means) < 0.1 * distance(begun, means)
    assert distance(found, means.roll(1, 0)) > 2 * distance(found, means)  # each class its own
    assert torch.equal(found.labels, torch.arange(10).repeat_interleave(3))
    assert found.images.shape == (30, 1, 8, 8) and found.images.dtype == torch.uint8
    assert (found.num_classes, found.normalisation) == (10, digits.train.normalisation)


def test_fitting_is_the_streams_alone(digits: DataSet) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = fit(digits, steps=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(first.images, fit(digits, steps=5)[0].images)
    assert not torch.equal(first.images, fit(digits, steps=5, seed=1)[0].images)


def test_augmentation_and_all_networks_at_once_work(digits: DataSet) -> None:
    plain, _ = fit(digits, steps=5)
    for changes in ({"augment": "crop_scale"}, {"nets_per_step": 4}, {"nets_per_step": 99}):
        assert not torch.equal(fit(digits, steps=5, **changes)[0].images, plain.images)


def test_progress_is_told_to_the_end(digits: DataSet) -> None:
    means, seen = torch.zeros(10, 4 * 32), []
    ImageFitting(steps=45).fit(
        nets(), means, 1, digits.train[:0], stream(0), lambda done, total: seen.append((done, total))
    )
    assert seen[0] == (20, 45) and seen[-1] == (45, 45)


# --- what FedGM with record-level privacy releases


def method(**changes: Any) -> Method:
    settings = {"epsilon": None, "nets": 3, "ipc": 2, "fitting": {"steps": 3}, "training": {"epochs": 1}}
    return methods.find("fedgm-records")(**{**settings, **changes})


def released(
    data: DataSet, folder: Path, *, public: Callable[[], Records] | None, **changes: Any
) -> tuple[Tensor, ServerFederation]:
    """Client 0's sums, after a whole run."""
    chosen = method(**changes)
    fed = small.world(chosen, data, folder, 1, public, test=data.test[:20]).federation
    chosen.server(fed)
    kind = client_steps(type(chosen))["sum_up"].reply
    values, _ = wire.decode(fed.journal.read_reply(0, "sum_up", 0), kind.schema, fed.spec.facts)
    sums: Tensor = values["sums"]
    return sums.double(), fed


@pytest.fixture
def request_of(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    ask = ServerFederation.ask

    def watched(self: ServerFederation, step: Any, *args: Any, **payload: Any) -> Any:
        seen.append(payload)
        return ask(self, step, *args, **payload)

    monkeypatch.setattr(ServerFederation, "ask", watched)
    return seen


@pytest.mark.parametrize("with_public", [False, True])
def test_one_record_moves_the_release_by_the_radius_at_most(
    with_public: bool, digits: DataSet, tmp_path: Path, request_of: list[dict[str, Any]]
) -> None:
    public = small.noise_images(digits) if with_public else None
    few = digits.train[:40]
    whole, _ = released(replace(digits, train=few), tmp_path / "whole", public=public)
    radius = request_of[0]["radius"]
    moved = []
    for gone in range(0, 40, 4):
        kept = torch.tensor([i for i in range(40) if i != gone])
        less, _ = released(replace(digits, train=few[kept]), tmp_path / f"{gone}", public=public)
        moved.append(float((whole - less).norm()))
        assert request_of[-1]["radius"] == radius  # which is public
    assert max(moved) <= radius * (1 + 1e-4)  # sums cross in float32
    assert max(moved) > 0.9 * radius  # and the bound is not idle
    other = replace(few, images=torch.cat([255 - few.images[:1], few.images[1:]]))
    turned = replace(other, labels=torch.cat([(few.labels[:1] + 1) % 10, few.labels[1:]]))
    replaced, _ = released(replace(digits, train=turned), tmp_path / "replaced", public=public)
    assert float((whole - replaced).norm()) <= 2 * radius * (1 + 1e-4)


def test_without_noise_the_server_fits_the_class_means(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = ImageFitting.fit

    def watched(self: Any, nets: Any, means: Tensor, *rest: Any) -> Records:
        seen.append((nets, means))
        return real(self, nets, means, *rest)

    monkeypatch.setattr(ImageFitting, "fit", watched)
    few = replace(digits, train=digits.train[:200], test=digits.test[:20])
    for public in (None, small.noise_images(few)):
        small.run(method(), few, tmp_path / str(public is None), public=public)
        nets, means = seen[-1]
        expected = class_means(embed(nets, few.train), few.train.labels)
        if public is None:  # nothing is clipped: rows have length 1
            assert torch.allclose(means.float(), expected, atol=1e-5)
        else:  # what is clipped counts for less, in sums and counts alike
            rows = embed(nets, few.train).double()
            noise = embed(nets, public()).double()
            centre = noise.mean(0)
            radius = (noise - centre).norm(dim=1).quantile(0.9)
            constant = radius * math.sqrt(0.01)
            lengths = (0.99 * (rows - centre).norm(dim=1) ** 2 + constant**2).sqrt()
            weight = (radius / lengths).clamp_max(1)
            assert 0 < int((weight < 1).sum())
            for c in range(10):
                own = few.train.labels == c
                mean = centre + (weight[own, None] * (rows[own] - centre)).sum(0) / weight[own].sum().clamp_min(1)
                assert torch.allclose(means[c].double(), mean, atol=1e-4)


def test_masked_sums_have_the_means_of_open_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constant of 25.6 steps was rounded, and means were too long by that."""
    seen: list[Tensor] = []
    real = ImageFitting.fit

    def watched(self: Any, nets: Any, means: Tensor, *rest: Any) -> Records:
        seen.append(means)
        return real(self, nets, means, *rest)

    monkeypatch.setattr(ImageFitting, "fit", watched)
    task: dict[str, Any] = {"data": "digits", "clients": 3, "workers": 0, "progress": False, "epsilon": None}
    fast = {"nets": 2, "fitting": {"steps": 1}, "training": {"epochs": 1}}
    for sums in ("open", "masked:least=2"):
        fedstill.run("fedgm-records", out=tmp_path / sums[:4], sums=sums, **task, **fast)
    exact, masked = seen
    assert torch.allclose(masked.norm(dim=1), exact.norm(dim=1), rtol=4e-3)  # rows of the largest length lose a step
    assert float((masked - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("length", [0.5, 1.7, 3.0, 20.0])
def test_means_of_rows_longer_than_the_radius_are_those_of_open_sums(length: float) -> None:
    """Their constant is scaled down and rounded, alike for rows of one length: of 256 steps means were 13 % off."""
    rng = stream(0, "rows")
    rows = torch.randn(4000, 300, generator=rng) + torch.ones(300)
    rows *= length / rows.norm(dim=1, keepdim=True)
    method, centre, means = FedGMRecords(epsilon=None), torch.zeros(300), []
    for masked in (False, True):
        facts = {"device": torch.device("cpu"), "delta": 1e-5, "masked": masked, "adders": 1}
        records = SimpleNamespace(num_classes=10, labels=torch.arange(4000) % 10)

        def release(mechanism: Any, rows: Any) -> Released[Any]:
            return Released(mechanism(rows, Simulated(stream(0, "noise"))))

        client: Any = SimpleNamespace(train=records, release=release, **facts)
        summed = Summation(release_sums(client, rows, centre, 1.0, method), range(1))
        means.append(private_means(cast(Any, SimpleNamespace(**facts)), summed, centre, 1.0, method))
    assert torch.allclose(means[1].norm(dim=1), means[0].norm(dim=1), rtol=0.025 if length > 5 else 4e-3)


def test_every_class_has_its_images_whoever_holds_it_and_they_are_shown(digits: DataSet, tmp_path: Path) -> None:
    ones = digits.train.of_class(1)[:30]
    shown: dict[str, Records] = {}
    data = replace(digits, train=ones, test=digits.test[:20])
    for epsilon in (None, 0.1):
        chosen = method(epsilon=epsilon)

        class Shows(ServerFederation):
            def show(self, name: str, images: Records) -> None:
                shown[name] = images

        fed = small.world(chosen, data, tmp_path / str(epsilon), 2, kind=Shows).federation
        model = chosen.server(fed)
        assert torch.equal(shown["synthetic"].labels, torch.arange(10).repeat_interleave(2))
        assert all(torch.isfinite(p).all() for p in model.parameters())
