"""Ledgers: charged before the release, refusing beyond the budget, surviving on disk; and what a run guarantees."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from releases import ONE, entry

from fedstill.base import files
from fedstill.privacy import accounting, guarantee
from fedstill.privacy.ledger import BudgetExceeded, Charge, Ledger, covers, open_ledger, total_epsilon
from fedstill.privacy.releases import Event, Gaussian, Pure, Unbounded, Unit
from fedstill.report import guarantees


def test_a_ledger_refuses_before_it_is_overdrawn_and_charges_nothing_then(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.jsonl", delta=1e-5, budget=1.2)
    ledger.charge(entry(ONE))
    with pytest.raises(
        BudgetExceeded, match=r"above the budget of 1.2 at delta 1e-05; it would come to 1\.\d+.*--budget"
    ):
        ledger.charge(entry(ONE, index=1))
    assert len(ledger.entries) == 1
    assert len(open_ledger(tmp_path / "ledger.jsonl", delta=1e-5, budget=1.2).entries) == 1
    with pytest.raises(BudgetExceeded):
        ledger.charge(entry(Unbounded(reason="no noise"), index=1))


def test_a_ledger_survives_a_restart_and_refuses_when_it_is_damaged(tmp_path: Path) -> None:
    place = tmp_path / "ledger.jsonl"
    open_ledger(place, delta=1e-5).charge(entry(ONE))
    with place.open("a") as file:
        file.write('{"half a li')  # a crash before the release: nothing was released
    assert open_ledger(place, delta=1e-5).entries == [entry(ONE)]
    place.write_text('{"exchange": 0}\n')
    with pytest.raises(files.Damaged, match="nothing more is released"):
        open_ledger(place, delta=1e-5)


def test_simulated_noise_repeats_and_costs_once_but_real_noise_costs_again(tmp_path: Path) -> None:
    for repeatable, count in ((True, 1), (False, 2)):
        ledger = open_ledger(tmp_path / f"{repeatable}", delta=1e-5, repeatable=repeatable)
        ledger.charge(entry(ONE))
        ledger.charge(entry(ONE))
        assert len(ledger.entries) == count
        ledger.charge(entry(Gaussian(noise_multiplier=2.0)))  # another release under the same number is another one
        assert len(ledger.entries) == count + 1


class Remembered:
    """A store in memory, with what another process wrote meanwhile."""

    def __init__(self, *entries: Charge) -> None:
        self.entries = list(entries)
        self.locked = 0

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.locked += 1
        try:
            yield
        finally:
            self.locked -= 1

    def read(self) -> list[Charge]:
        return list(self.entries)

    @property
    def size(self) -> int:
        return len(self.entries)

    def append(self, entry: Charge) -> None:
        assert self.locked
        self.entries.append(entry)


def test_a_ledger_is_any_store_and_any_rule() -> None:
    asked: list[tuple[int, int]] = []

    def at_most_three(entries: Sequence[Charge], entry: Charge) -> None:
        assert not store.locked  # others may charge while it thinks
        asked.append((len(entries), entry.index))
        if len(entries) == 3:
            raise BudgetExceeded("three are enough")

    store = Remembered(entry(index=0))
    ledger = Ledger(store, at_most_three)
    ledger.charge(entry(index=1))
    store.entries.append(entry(index=9))
    with pytest.raises(BudgetExceeded, match="three are enough"):
        ledger.charge(entry(index=2))
    assert asked == [(1, 1), (3, 2)]  # the rule sees what another process charged
    assert [e.index for e in store.entries] == [e.index for e in ledger.entries] == [0, 1, 9]
    assert not store.locked


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("unit", ["record", "label"])
def test_a_ledger_charges_what_its_budget_covers(tmp_path: Path, adaptive: bool, unit: Unit) -> None:
    for number, budget in enumerate((0.5, 1.1, 2.0, 6.0)):
        ledger = open_ledger(tmp_path / f"{number}", delta=1e-5, budget=budget)
        for index in range(8):
            event = Pure(epsilon=0.5) if unit == "label" else Gaussian(noise_multiplier=4.0 + index)
            following = entry(event, index=index, unit=unit, adaptive=adaptive)
            if covers(ledger.entries, following, budget, 1e-5):
                ledger.charge(following)
                assert total_epsilon(ledger.entries, 1e-5, budget) <= budget
            else:
                with pytest.raises(BudgetExceeded):
                    ledger.charge(following)
    assert len(ledger.entries) > 1


def test_releases_that_no_accountant_can_add_up_are_not_covered() -> None:
    made_up, following = [entry(Pure(epsilon=600.0)), entry(ONE)], entry(ONE, index=1)
    assert total_epsilon(made_up, 1e-5, 100.0) == math.inf
    assert not covers(made_up, following, 100.0, 1e-5)
    assert covers([], following, 100.0, 1e-5)


def test_adaptive_noise_goes_through_a_filter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a --budget"):
        open_ledger(tmp_path / "a", delta=1e-5).charge(entry(ONE, adaptive=True))
    ledger = open_ledger(tmp_path / "b", delta=1e-5, budget=2.0)
    releases = 0
    with pytest.raises(BudgetExceeded):
        while True:
            ledger.charge(entry(Gaussian(noise_multiplier=8.0 + releases % 5), index=releases, adaptive=True))
            releases += 1
    assert releases > 5
    spent = accounting.epsilon([e.event for e in ledger.entries], 1e-5, "record")
    assert spent <= 2.0
    assert guarantee.derive([], {0: ledger.entries}, 1e-5, budget=2.0).epsilon == 2.0


def test_the_guarantee_is_that_of_the_client_who_spent_most() -> None:
    two = Gaussian(noise_multiplier=accounting.gaussian_noise(2.0, 1e-5))
    found = guarantee.derive([], {0: [entry(ONE)], 1: [entry(two)], 2: []}, 1e-5)
    assert guarantee.derive([], {0: [entry(two)], 1: [entry(ONE)]}, 1e-5).epsilon == found.epsilon
    assert found.holds
    assert found.unit == "record"
    assert found.epsilon == pytest.approx(2.0, rel=1e-3)
    assert found.delta == 1e-5
    assert "simulation" in found.reason
    assert found.simulated
    real = guarantee.derive([], {0: [entry(ONE)]}, 1e-5, simulated=False)
    assert "simulation" not in real.reason
    assert not real.simulated
    assert not guarantee.derive([], {0: []}, 1e-5).simulated  # there was no noise
    assert guarantee.derive(["field 'x'"], {0: [entry(ONE)]}, 1e-5).simulated


def test_no_guarantee_and_why() -> None:
    released = {0: [entry(ONE)]}
    assert (
        guarantee.derive(["field 'x' of step 's'"], released, 1e-5).reason
        == "field 'x' of step 's' is released unprotected"
    )
    found = guarantee.derive(["field 'x'", "field 'y'", "field 'z'"], released, 1e-5)
    assert found.reason == "field 'x', field 'y' and field 'z' are released unprotected"
    broken = {0: [entry(ONE)], 1: [entry(Unbounded(reason="the noise is missing"))]}
    assert "the noise is missing" in guarantee.derive([], broken, 1e-5).reason
    mixed = {0: [entry(ONE), entry(Pure(epsilon=1.0), index=1, unit="label")]}
    found = guarantee.derive([], mixed, 1e-5)
    assert not found.holds
    assert "different adjacencies" in found.reason


def test_labels_and_public_fields() -> None:
    labels = guarantee.derive([], {0: [entry(Pure(epsilon=1.0), unit="label")]}, 1e-5)
    assert (labels.unit, labels.epsilon, labels.delta) == ("label", 1.0, 0.0)
    assert "label" in str(labels.adjacency)
    nothing = guarantee.derive([], {}, 1e-5)
    assert (nothing.holds, nothing.epsilon) == (True, 0.0)
    assert not math.isnan(nothing.epsilon or 0)


def test_a_guarantee_is_per_client_only_where_every_proof_lets_all_records_change() -> None:
    whole, other = (entry(ONE).model_copy(update={"mechanism": name}) for name in ("ClippedUpdate", "ClassSums"))
    found = guarantee.derive([], {0: [whole], 1: [whole, whole]}, 1e-5)
    assert found.unit == "client" and "all records of one client" in str(found.adjacency)
    assert found.epsilon == guarantee.derive([], {0: [other, other]}, 1e-5).epsilon
    assert guarantees.words(found).endswith("per client")
    assert "which of two data sets a client has" in guarantees.explained(found, sent=True)[0]
    for spent in ({0: [whole, other]}, {0: [whole], 1: [other]}):
        assert guarantee.derive([], spent, 1e-5).unit == "record"
    assert guarantee.derive([], {0: []}, 1e-5).unit == "record"


def label(event: Event, index: int, part: str | None = None, adaptive: bool = False) -> Charge:
    return entry(event, index=index, unit="label", part=part, adaptive=adaptive)


def test_of_disjoint_parts_the_costliest_counts() -> None:
    one, two = Pure(epsilon=1.0), Pure(epsilon=2.0)
    split = [label(one, 0, "first"), label(two, 1, "second")]
    found = guarantee.derive([], {0: split}, 1e-5)
    assert (found.epsilon, found.delta) == (2.0, 0.0)
    assert "parallel composition" in str(found.accountant)
    whole = guarantee.derive([], {0: [label(one, 0), label(two, 1)]}, 1e-5)
    assert float(whole.epsilon or 0) > 2.9  # the same without parts adds up
    # what is made from all records adds to every part, and one part twice adds up
    common = guarantee.derive([], {0: [*split, label(one, 2)]}, 1e-5)
    assert common.epsilon == pytest.approx(accounting.epsilon([two, one], 1e-5, "label"))
    assert common.delta == 1e-5
    again = guarantee.derive([], {0: [*split, label(one, 2, "first"), label(two, 3, "first")]}, 1e-5)
    assert again.epsilon == pytest.approx(accounting.epsilon([one, one, two], 1e-5, "label"))


def test_a_budget_holds_for_each_part(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.jsonl", delta=1e-5, budget=1.0)
    ledger.charge(label(Pure(epsilon=1.0), 0, "first"))
    ledger.charge(label(Pure(epsilon=1.0), 1, "second"))
    assert open_ledger(tmp_path / "ledger.jsonl", delta=1e-5).entries == ledger.entries
    for part in ("first", "second", None):
        with pytest.raises(BudgetExceeded):
            ledger.charge(label(Pure(epsilon=0.1), 2, part))
    ledger.charge(label(Pure(epsilon=0.9), 2, "third"))


def test_a_filter_watches_over_each_part(tmp_path: Path) -> None:
    def number(parts: tuple[str | None, ...]) -> int:
        ledger = open_ledger(tmp_path / f"{len(parts)}", delta=1e-5, budget=3.0)
        for index in range(1000):
            try:
                ledger.charge(label(Pure(epsilon=0.2), index, parts[index % len(parts)], adaptive=True))
            except BudgetExceeded:
                return index
        raise AssertionError("the filter never stops")

    alone = number((None,))
    assert alone > 5
    assert number(("a", "b")) == 2 * alone


def test_parts_are_for_labels_only() -> None:
    # whoever adds a record may move others into another part
    with pytest.raises(ValueError, match="parts are for mechanisms that protect labels"):
        entry(ONE, part="first")


def test_a_budget_that_the_releases_do_not_keep_is_no_guarantee() -> None:
    loud = entry(Gaussian(noise_multiplier=1.0, sampling=0.08, count=20), adaptive=True)
    assert accounting.rdp_filter(8.0, 1e-5).allows([loud.event])
    assert guarantee.derive([], {0: [loud]}, 1e-5, budget=8.0).epsilon == 8.0
    assert not guarantee.derive([], {0: [loud] * 2}, 1e-5, budget=0.5).holds
    assert not guarantee.derive([], {0: [loud]}, 1e-5, budget=None).holds


@pytest.mark.parametrize("noise", [0.0, -1.0, 1e-200, 1e160, float("nan")])
def test_a_multiplier_that_nobody_means_is_refused(noise: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        Gaussian(noise_multiplier=noise)


def test_next_to_no_noise_is_judged_at_once() -> None:
    began = time.process_time()
    assert accounting.epsilon([Gaussian(noise_multiplier=0.05, sampling=0.05, count=20)], 1e-5, "record") == math.inf
    many = accounting.epsilon([Gaussian(noise_multiplier=0.1, count=40)], 1e-5, "record")
    assert many == pytest.approx(accounting.gaussian_epsilon(0.1 / 40**0.5, 1e-5))
    assert accounting.epsilon([Gaussian(noise_multiplier=0.01), Pure(epsilon=1.0)], 1e-5, "record") == math.inf
    assert time.process_time() - began < 30
