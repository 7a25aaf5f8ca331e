"""LDP-FedAvg: the sensitivity of a clipped update, its noise, and what either privacy mode truly guarantees."""

import math
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import looks_like
from small import run

from fedstill.base import seeds
from fedstill.data.sources import DataSet
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.ldp_fedavg import LDPFedAvg
from fedstill.privacy import accounting
from fedstill.privacy.mechanisms import ClippedUpdate
from fedstill.privacy.releases import Gaussian
from fedstill.protocol import parameters

LOCAL: dict[str, Any] = {"lr": 0.05, "batch_size": 32}
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=32)


def still(seed: int = 0) -> seeds.Simulated:
    return seeds.Simulated(torch.Generator().manual_seed(seed))


@settings(max_examples=300, deadline=None)
@given(st.lists(VALUES, min_size=3, max_size=3), st.lists(VALUES, min_size=3, max_size=3), st.floats(1e-3, 1e3))
def test_no_records_move_the_clipped_update_by_more_than_twice_the_radius(a: Any, b: Any, radius: float) -> None:
    mechanism = ClippedUpdate(radius, 0.0)
    one, other = (mechanism(torch.tensor(v), still()) for v in (a, b))
    assert float((one - other).norm()) <= mechanism.sensitivity
    assert mechanism.sensitivity <= 2 * radius * (1 + 2.0**-19)  # next to no noise for it


def test_opposite_updates_move_it_by_just_that() -> None:
    mechanism = ClippedUpdate(0.5, 0.0)
    apart = mechanism(torch.tensor([9.0, 0.0]), still()) - mechanism(torch.tensor([-9.0, 0.0]), still())
    assert float(apart.norm()) == pytest.approx(1.0, rel=1e-12)


def test_its_noise_is_that_of_the_sensitivity() -> None:
    mechanism = ClippedUpdate(0.5, 3.0)
    noise = mechanism(torch.zeros(20_000), still(1))
    assert looks_like(noise, 3.0)  # 3 times 2 times 0.5
    assert not looks_like(noise, 1.5)
    assert not looks_like(noise, 4.5)
    assert mechanism.event == Gaussian(noise_multiplier=3.0)


@pytest.mark.parametrize(("radius", "noise"), [(0.0, 1.0), (math.inf, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_senseless_numbers_are_refused(radius: float, noise: float) -> None:
    with pytest.raises(ValueError, match="it must be"):
        ClippedUpdate(radius, noise)


@pytest.mark.parametrize("rounds", [1, 3])
def test_sound_noise_costs_epsilon_per_client_over_all_rounds(rounds: int, digits: DataSet, tmp_path: Path) -> None:
    _, fed = run(LDPFedAvg(epsilon=2.0, rounds=rounds, local=LOCAL), digits, tmp_path)
    found = fed.guarantee()
    assert (found.holds, found.unit, found.delta) == (True, "client", 1e-5)
    assert found.epsilon == pytest.approx(2.0, rel=1e-3)  # the accountant's discretisation
    assert "other records, one or all" in found.reason


def test_published_noise_costs_more_than_it_claims_and_the_guarantee_says_how_much(
    digits: DataSet, tmp_path: Path
) -> None:
    _, fed = run(LDPFedAvg(epsilon=1.0, privacy="published", local=LOCAL), digits, tmp_path)
    found = fed.guarantee()
    assert found.holds
    # sigma = 4.845 S is 2.42 times the true sensitivity 2S, where epsilon 1 takes 3.73 times
    sigma = math.sqrt(2 * math.log(1.25e5))
    assert found.epsilon == pytest.approx(accounting.gaussian_epsilon(sigma / 2, 1e-5), rel=1e-3)
    assert float(found.epsilon or 0) > 1.6


def test_without_epsilon_there_is_no_noise_and_no_guarantee(digits: DataSet, tmp_path: Path) -> None:
    model, fed = run(LDPFedAvg(epsilon=None, clip=1e9, local=LOCAL), digits, tmp_path)
    assert not fed.guarantee().holds
    assert "no noise" in fed.guarantee().reason
    site = small.site(LDPFedAvg(), digits.train, tmp_path / "again")()
    updates = []
    for client in range(4):
        trained, (own, _) = fed.new_model(), site.data.records(client)
        LDPFedAvg(local=LOCAL).local.fit(trained, own, seeds.stream(0, "client", client, 0, "batches"))
        updates.append((1, parameters(trained)))
    for name, w in weighted_mean(updates).items():  # clients of 359 and 360 records count alike
        torch.testing.assert_close(parameters(model)[name], w.float(), rtol=1e-5, atol=1e-6)


def test_updates_are_no_longer_than_the_clip(digits: DataSet, tmp_path: Path) -> None:
    method = LDPFedAvg(epsilon=None, clip=0.01, local=LOCAL)
    model, fed = run(method, digits, tmp_path)
    before = parameters(fed.new_model())
    moved = math.sqrt(sum(float((w - before[name]).square().sum()) for name, w in parameters(model).items()))
    assert 0.001 < moved <= 0.01 * (1 + 1e-4)  # float32 weights


def test_training_that_diverges_shows_in_nothing(digits: DataSet, tmp_path: Path) -> None:
    model, fed = run(LDPFedAvg(epsilon=None, local={"lr": 1e30}), digits, tmp_path)
    assert fed.journal.refusals() == []
    assert all(torch.equal(w, parameters(fed.new_model())[name]) for name, w in parameters(model).items())


def test_batch_norm_is_refused_in_a_sentence(digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "MODEL", "convnet:width=8,depth=2,norm=batch")
    with pytest.raises(ValueError, match="running statistics"):
        run(LDPFedAvg(local=LOCAL), digits, tmp_path)
