import math

import pytest

from fedstill.train.feedback import Feedback, PublicLoss


def course(changes: list[float], losses: list[float], accuracies: list[float]) -> PublicLoss:
    made = PublicLoss(10)
    for number, (change, loss, accuracy) in enumerate(zip(changes, losses, accuracies, strict=True)):
        made.record(number, change=change, loss=loss, accuracy=accuracy)
    return made


def only(part: int, **changes: float) -> Feedback:
    weights = [0.0] * 4
    weights[part] = 1.0
    return Feedback(weights=tuple(weights), **changes)  # type: ignore[arg-type]


SEEN = course([0.0, 2.0, 4.0, 2.4], [2.0, 1.5, 1.0, 1.25], [0.1, 0.3, 0.5, 0.55])


@pytest.mark.parametrize(
    ("part", "now", "rounds", "metric"),
    [
        (0, 1, 10, 0.0),  # no rounds before
        (0, 2, 10, 0.0),  # twice the usual change
        (0, 3, 10, 100 * (1 - 0.6 / 3)),
        (1, 1, 10, 100.0),  # a fall is more than 100
        (1, 3, 10, 100 * (1 - 0.25 / 2)),
        (2, 1, 10, 0.0),
        (2, 2, 10, 100.0),
        (2, 3, 10, 25.0),
        (3, 3, 6, 50.0),
        (3, 3, 3, 100 / (1 + math.exp(-5))),
    ],
)
def test_each_part_of_the_metric_by_hand(part: int, now: int, rounds: int, metric: float) -> None:
    assert only(part).metric(SEEN, now, rounds) == pytest.approx(metric, rel=1e-5)


def test_a_fall_of_the_loss_can_be_read_by_its_magnitude() -> None:
    other = Feedback(weights=(0.0, 1.0, 0.0, 0.0), loss_fall="magnitude")
    assert [other.metric(SEEN, now, 10) for now in (1, 3)] == pytest.approx([75.0, 100 * (1 - 0.25 / 2)])


def test_the_metric_is_the_weighted_sum() -> None:
    alone = [only(part).metric(SEEN, 3, 10) for part in range(4)]
    both = Feedback(weights=(0.1, 0.2, 0.3, 0.4)).metric(SEEN, 3, 10)
    assert both == pytest.approx(0.1 * alone[0] + 0.2 * alone[1] + 0.3 * alone[2] + 0.4 * alone[3])


def test_an_accuracy_that_stood_still_divides_by_no_zero() -> None:
    still = course([0.0, 1.0, 1.0], [2.0, 1.0, 1.0], [0.1, 0.1, 0.1005])
    assert only(2).metric(still, 2, 10) == pytest.approx(100 * 0.0005 / 0.005, rel=1e-4)


def test_temperature_rises_with_the_metric_and_noise_falls_from_a_threshold() -> None:
    rules = Feedback()
    assert rules.temperature(70.0) == 2.5
    assert rules.temperature(80.0) == pytest.approx(2 + 1 / (1 + math.exp(-1)))
    assert rules.noise(5.0, 79.9) == 5.0
    assert rules.noise(5.0, 80.0) == pytest.approx(4.85)
    assert rules.noise(1.01, 100.0) == 1.0  # the floor
    assert rules.noise(0.5, 100.0) == 0.5  # which noise below it does not rise to


def test_temperatures_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"coldest is 4.0, hottest 3.0"):
        Feedback(coldest=4.0)
