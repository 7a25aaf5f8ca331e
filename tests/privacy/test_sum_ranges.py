"""Ranges of totals: honest ones pass with and without noise, and what no records give is refused in a sentence."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.base import seeds
from fedstill.privacy.integer_sums import IntegerMoments, IntegerSum, IntegerUpdate
from fedstill.privacy.second_moments import Moments, diagonal_places
from fedstill.privacy.sum_ranges import OutOfRange, check_length, check_moments


def noise(seed: int) -> seeds.Noise:
    return seeds.Simulated(torch.Generator().manual_seed(seed))


def moments(multiplier: float, classes: int = 3, adders: int = 1, by_class: bool = False) -> IntegerMoments:
    facts: dict[str, Any] = {
        "num_classes": classes,
        "dims": 6,
        "radius": 1.0,
        "noise_multiplier": multiplier,
        "by_class": by_class,
    }
    return IntegerMoments(adders=adders, **facts)


def total(mechanism: IntegerMoments, clients: int, records: int, length: float = 5.0) -> Moments:
    """The sums of clients whose rows all have the largest length and one direction, the most that rows can give."""
    width = mechanism.dims + 1
    second = torch.zeros(
        mechanism.num_classes if mechanism.by_class else 1, width * (width + 1) // 2, dtype=torch.int64
    )
    first = torch.zeros(mechanism.num_classes, width, dtype=torch.int64)
    for client in range(clients):
        rows = torch.zeros(records, 6)
        rows[:, 0] = length
        labels = torch.zeros(records, dtype=torch.int64) if mechanism.num_classes > 1 else torch.ones(records)
        found = mechanism([(rows, labels.double() if mechanism.num_classes == 1 else labels)], noise(client))
        second, first = second + found.second, first + found.first
    return Moments(second, first)


@pytest.mark.parametrize("multiplier", [0.0, 0.3, 4.0])
@pytest.mark.parametrize(("classes", "by_class"), [(3, False), (3, True), (1, False)])
def test_the_longest_honest_rows_pass(multiplier: float, classes: int, by_class: bool) -> None:
    mechanism = moments(multiplier, classes, adders=5, by_class=by_class)
    check_moments(mechanism, total(mechanism, 8, 200), clients=8, records=1600)


@pytest.mark.parametrize("multiplier", [0.0, 4.0])
@pytest.mark.parametrize("place", ["diagonal", "negative", "above", "first"])
def test_one_number_that_no_records_give_is_refused(multiplier: float, place: str) -> None:
    mechanism = moments(multiplier, adders=5)
    found, places = total(mechanism, 8, 200, length=0.01), diagonal_places(7)
    limit = 3 * (1600 * 256**2 + 60 * mechanism.noise_multiplier * max(mechanism.scales) * math.sqrt(8 / 5))
    if place == "first":
        found.first[0, 0] += int(limit)
    else:
        found.second[0, places[2] if place != "above" else places[2] + 1] += int(limit) * (-1) ** (place == "negative")
    with pytest.raises(OutOfRange, match=r"no records give"):
        check_moments(mechanism, found, clients=8)


def test_more_records_than_the_public_bound_and_fewer_than_none_are_refused() -> None:
    mechanism = moments(0.0)
    found = total(mechanism, 2, 100)
    check_moments(mechanism, found, 2, records=200)
    with pytest.raises(OutOfRange, match="claims 200 records.*199 at most"):
        check_moments(mechanism, found, 2, records=199)
    with pytest.raises(OutOfRange, match="0 at least"):
        check_moments(mechanism, Moments(found.second, -found.first), 2)


@pytest.mark.parametrize("multiplier", [0.0, 1.0])
def test_a_client_s_update_has_a_length(multiplier: float) -> None:
    mechanism = IntegerUpdate(radius=1.0, noise_multiplier=multiplier, adders=4)
    vector = torch.zeros(1000)
    vector[3] = 7.0
    whole: Any = sum(mechanism(vector, noise(client)) for client in range(6))
    check_length(mechanism, whole, 6, mechanism.steps, 6, "updates")
    whole[5] += int(8 * mechanism.steps + 40 * multiplier * mechanism.sensitivity * math.sqrt(1000))
    with pytest.raises(OutOfRange, match="6 updates of 6 clients give"):
        check_length(mechanism, whole, 6, mechanism.steps, 6, "updates")


def test_noise_alone_stays_in_the_range_and_the_range_is_no_wider_than_it_must_be() -> None:
    mechanism = IntegerUpdate(radius=1.0, noise_multiplier=1.0, adders=4)
    drawn = mechanism(torch.zeros(4000), noise(1))
    check_length(mechanism, drawn, 0, mechanism.steps, 1, "updates")
    with pytest.raises(OutOfRange):
        check_length(mechanism, (1.25 * drawn).to(torch.int64), 0, mechanism.steps, 1, "updates")


@pytest.mark.parametrize(
    ("method", "sums", "epsilon"),
    [
        ("afl", "masked", None),
        ("dp-fedavg", "masked", 1.0),
        ("dp-fedavg", "open", 1.0),
        ("fedgm-records", "masked", 1.0),
    ],
)
def test_a_hostile_client_s_numbers_stop_a_run_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, sums: str, epsilon: float | None
) -> None:
    honest = IntegerSum.integers

    def hostile(self: Any, exact: Any, scale: float, source: Any) -> Any:
        found = honest(self, exact, scale, source)
        found.view(-1)[1] += 2**34
        return found

    monkeypatch.setattr(IntegerSum, "integers", hostile)
    task: dict[str, Any] = {
        "data": "digits",
        "clients": 4,
        "public": "held=200",
        "model": "convnet:width=8,depth=1",
        "workers": 0,
    }
    with pytest.raises(OutOfRange, match="no records give"):
        fedstill.run(method, sums=sums, epsilon=epsilon, out=tmp_path / "run", **task)


def test_a_check_costs_little() -> None:
    mechanism = IntegerMoments(num_classes=10, dims=512, radius=1.0, noise_multiplier=1.0)
    second = torch.zeros(1, 513 * 514 // 2, dtype=torch.int64)
    first = torch.zeros(10, 513, dtype=torch.int64)
    before = time.process_time()
    check_moments(mechanism, Moments(second, first), 10)
    assert time.process_time() - before < 5.0
