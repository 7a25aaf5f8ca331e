"""A checkpoint of a site's journal: it forgets lines, and no cost and no count that decides what comes next."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from releases import entry

from fedstill.privacy import accounting
from fedstill.privacy.ledger import BudgetExceeded, Charge, Part
from fedstill.privacy.releases import Event, Gaussian, Pure, Unbounded
from fedstill.sites.site import checkpoint, site_journal
from fedstill.sites.site.charges import Limits, largest_fitting, open_site_ledger, read_charges, standing, uses_of
from fedstill.sites.site.checkpoint import MOST_KINDS, Checkpoint, Past, Standing, compact
from fedstill.sites.site.log import verify
from fedstill.sites.site.site_journal import SiteJournal

DELTA, COUNT = 1e-5, 8
EVENTS = st.one_of(
    st.builds(Gaussian, noise_multiplier=st.floats(0.5, 1e6), count=st.integers(1, 1000)),
    st.builds(Gaussian, noise_multiplier=st.floats(0.5, 1e6), sampling=st.floats(1e-4, 1.0), count=st.integers(1, 99)),
    st.builds(Pure, epsilon=st.floats(1e-9, 3.0)),
)
FIRSTS = (Gaussian(noise_multiplier=3.0), Gaussian(noise_multiplier=2.0, sampling=0.1), Pure(epsilon=0.1))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    site_journal.create(tmp_path / "state")
    return tmp_path / "state"


def samples(events: Iterable[Event]) -> bool:
    return any(isinstance(event, Gaussian) and event.sampling < 1 for event in events)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENTS, min_size=1, max_size=40), most=st.sampled_from([0, 1, 3, MOST_KINDS]))
def test_no_filter_adds_up_less_for_the_few_kinds(events: list[Event], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "MOST_KINDS", most)
        few = compact(Counter(events))
        again = compact(few + compact(Counter()))
    for first in FIRSTS:
        own = accounting.used(events, first, 2.0, DELTA)
        for costs in (few, again):
            if samples(few) == samples(events):  # else samples count as whole, for which there is one more filter
                assert accounting.used(costs, first, 2.0, DELTA).share >= own.share * (1 - 1e-9)
                assert not accounting.admits(costs, first, 2.0, DELTA) or accounting.admits(events, first, 2.0, DELTA)
            renyi = accounting.rdp_filter(2.0, DELTA, first)
            assert renyi.share(costs) >= renyi.share(events) * (1 - 1e-9)
    if most == MOST_KINDS:  # nothing is rounded
        assert accounting.used(few, FIRSTS[0], 2.0, DELTA).share == pytest.approx(
            accounting.used(events, FIRSTS[0], 2.0, DELTA).share, rel=1e-9
        )


def test_the_kinds_have_a_bound_whatever_a_server_asks_for() -> None:
    sampled = [Gaussian(noise_multiplier=1 + i / 7, sampling=1 / (2 + i % 97), count=1 + i % 11) for i in range(20_000)]
    pure = [Pure(epsilon=10 ** (-9 + i / 1000)) for i in range(9000)]
    few = compact(Counter([*sampled, *pure]))
    assert len(few) <= MOST_KINDS + 1
    with pytest.raises(ValueError, match="finite number"):
        Pure(epsilon=float("inf"))
    assert compact(Counter([Unbounded(reason="none")])) == Counter([Unbounded(reason="none")])


def test_kinds_of_many_step_counts_keep_the_budget() -> None:
    """257 trainings by DP-SGD, each of another length, once counted as if on all records: 4000 times too much."""
    events = [Gaussian(noise_multiplier=20.0 + i % 3, sampling=0.01, count=100 + i) for i in range(MOST_KINDS + 1)]
    few = compact(Counter(events))
    assert sum(times * event.count for event, times in few.items() if isinstance(event, Gaussian)) == sum(
        event.count for event in events
    )
    for first in (FIRSTS[0], events[0]):
        own, after = (accounting.used(costs, first, 4.0, DELTA).share for costs in (events, few))
        assert own < 0.05 and after == pytest.approx(own, rel=1e-9)


def test_it_is_read_as_it_was_written() -> None:
    label = entry(Pure(epsilon=0.25), unit="label").model_copy(update={"records": part({0, 3})})
    past = Past().after([entry(Gaussian(noise_multiplier=0.3, count=10**9)), entry(Pure(epsilon=0.1)), label])
    before = Checkpoint(past=past, first=FIRSTS[1], asked={7: {"spec": "a", "process": 3}})  # type: ignore[dict-item]
    assert Checkpoint.model_validate_json(before.model_dump_json()) == before


def part(positions: set[int], data: bytes = bytes(32)) -> bytes:
    return Part("a part", torch.tensor(sorted(positions))).records(COUNT, data)


def spent_by(charges: list[tuple[float, set[int] | None, bool]], data: bool) -> list[float]:
    """For each record of one of two data sets, the epsilon of its label; parts of the other data count whole."""
    spent = [0.0] * COUNT
    for epsilon, positions, other in charges:
        spent = [
            cost + epsilon * (positions is None or other != data or i in positions) for i, cost in enumerate(spent)
        ]
    return spent


def test_many_data_sets_have_a_bound_and_forget_no_cost() -> None:
    site = Standing()
    for number in range(1, 3 * checkpoint.MOST_DATA):
        label = entry(Pure(epsilon=0.25), unit="label").model_copy(
            update={"records": part({0, 3}, number.to_bytes(2) * 16)}
        )
        site.recent.append(checkpoint.ChargeLine(number, "run", label, "", ""))
        if number % 50 == 0:
            site = Standing(Checkpoint.model_validate_json(site.checkpoint(0.0).model_dump_json()))
    past = site.checkpoint(0.0).past
    assert len(past.parts) == checkpoint.MOST_DATA and (number.to_bytes(2) * 8).hex() in next(reversed(past.parts))
    use = standing([], FIRSTS[2], 50.0, 1e-300, past)["label"]
    assert use.epsilon == pytest.approx(number * 0.25)


CHARGES = st.lists(
    st.tuples(
        st.sampled_from([0.05, 0.25, 0.5]), st.none() | st.sets(st.integers(0, COUNT - 1), min_size=1), st.booleans()
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(charges=CHARGES, cuts=st.sets(st.integers(0, 12), max_size=3))
def test_parts_count_no_less_after_checkpoints_and_as_much_without(
    charges: list[tuple[float, set[int] | None, bool]], cuts: set[int]
) -> None:
    site = Standing()
    for number, (epsilon, positions, other) in enumerate(charges, 1):
        if number in cuts:
            site = Standing(Checkpoint.model_validate_json(site.checkpoint(0.0).model_dump_json()))
        records = None if positions is None else part(positions, bytes([other]) * 32)
        label = entry(Pure(epsilon=epsilon), unit="label").model_copy(update={"records": records})
        site.recent.append(checkpoint.ChargeLine(number, "run", label, "", ""))
    if not charges:
        return
    entries = [charge.entry for charge in site.recent]
    use = standing(entries, FIRSTS[2], 50.0, 1e-300, site.at.past)["label"]
    datas = {other for _, positions, other in charges if positions is not None} or {False}
    most = max(max(spent_by(charges, data)) for data in datas)
    assert use.epsilon >= most - 1e-9
    if not cuts & set(range(2, len(charges) + 1)):
        assert use.epsilon == pytest.approx(most)


def ledger(state: Path, run: str = "run", **limits: Any) -> Any:
    return open_site_ledger(state, run, Limits(DELTA, 2.0, public_images=True, **limits))


@pytest.mark.parametrize("size", [1, 3000, 10**9])
def test_a_budget_and_a_run_know_what_earlier_files_have(
    size: int, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_journal, "LARGEST", size)
    charged = 0
    with pytest.raises(BudgetExceeded, match="budget of 2 at delta 1e-05, including earlier runs"):
        for index in range(100):
            noise = Gaussian(noise_multiplier=8.0 + index % 5)
            ledger(state, f"run {index % 3}").charge(entry(noise, index=index))
            charged += 1
    assert charged == 23  # as many as without a checkpoint
    assert (len(list(state.glob("journal-*.jsonl"))) > 0) is (size < 10**9)
    for run in range(3):
        assert [one.index for one in ledger(state, f"run {run}").entries] == list(range(run, 23, 3))
    assert [charge.number for charge in read_charges(state)] == [*range(1, 24)]
    assert verify(state).problems == []


def test_what_is_shown_of_a_budget_is_what_the_filter_counts(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint rounds many kinds of noise to the safe side: the filter then counts more than was charged."""
    monkeypatch.setattr(site_journal, "LARGEST", 1)
    monkeypatch.setattr(checkpoint, "MOST_KINDS", 1)
    for index in range(12):
        noise = Gaussian(noise_multiplier=9.0 + index / 7, sampling=0.19 + index / 100)
        ledger(state).charge(entry(noise, index=index))
    found = SiteJournal(state).standing()
    charges = [charge.entry for charge in read_charges(state)]
    assert uses_of(found, 2.0, DELTA)["record"].share > 1.2 * standing(charges, None, 2.0, DELTA)["record"].share
    most = largest_fitting(found, 2.0, DELTA)
    for epsilon, fits in ((most, True), (most + 0.01, False)):
        copy = shutil.copytree(state, state.with_name(f"copy-{fits}"))
        release = entry(Gaussian(noise_multiplier=accounting.gaussian_noise(epsilon, DELTA)), index=99)
        with nullcontext() if fits else pytest.raises(BudgetExceeded, match="above the site's budget of 2 at delta"):
            ledger(copy).charge(release)


def test_the_limit_of_a_run_holds_over_files(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_journal, "LARGEST", 1)
    run = {"run_limit": (0.5, DELTA)}
    first: Charge = entry(Gaussian(noise_multiplier=8.5))
    ledger(state, "a", **run).charge(first)
    ledger(state, "b", **run).charge(first)
    with pytest.raises(BudgetExceeded, match="budget of 0.5 at delta 1e-05; it would come to"):
        ledger(state, "a", **run).charge(first.model_copy(update={"index": 1}))


def test_an_object_that_saw_the_last_file_notices_an_older_copy_after_others_went_on(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from fedstill.base import files

    monkeypatch.setattr(site_journal, "LARGEST", 2000)
    for index in range(5):
        ledger(state).charge(entry(Gaussian(noise_multiplier=50.0), index=index))
    copy = shutil.copytree(state, tmp_path / "copy")
    site = SiteJournal(state)
    ledger(state).charge(entry(Gaussian(noise_multiplier=50.0), index=5))
    assert site.standing().at.charges == 6
    for index in range(6, 20):
        ledger(state).charge(entry(Gaussian(noise_multiplier=50.0), index=index))
    assert site.standing().at.charges == 20  # over several files that it had not seen
    shutil.rmtree(state)
    shutil.copytree(copy, state)
    with pytest.raises(files.Damaged, match="was replaced by another copy"):
        site.standing()


def test_an_outcome_without_a_question_ends_none(state: Path) -> None:
    """The first line may be a question; a message that never became one must not count as its end."""
    journal = SiteJournal(state)
    assert journal.append({"time": "2026-01-01T00:00:00Z", "what": "asked"}) == 1
    journal.append({"time": "2026-01-01T00:00:00Z", "what": "accepted", "run": "a", "question": 1, "at": 0.0})
    for what in ("refused", "failed", "answered"):
        journal.append({"time": "2026-01-01T00:00:00Z", "what": what, "detail": ""})
    at = journal.standing().at
    assert (at.accepted, at.ended, at.failed, set(at.asked)) == (1, 0, 1, {1})


def test_a_budget_s_parts_follow_from_the_first_release_of_a_list() -> None:
    few = [entry().model_copy(update={"event": event}) for event in (FIRSTS[1], FIRSTS[0])]
    for entries in (few, few[::-1], few[:1]):
        given, found = (standing(entries, first, 2.0, DELTA) for first in (entries[0].cost, None))
        assert given == found
    one, other = (standing(few, first.cost, 2.0, DELTA)["record"].share for first in few)
    assert one != other  # so that the order is seen


def test_files_of_a_journal_are_their_owner_s_alone(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_journal, "LARGEST", 1)
    before = os.umask(0)
    try:
        for _ in range(4):
            SiteJournal(state).append({"time": "2026-01-01T00:00:00Z", "what": "paused", "detail": "x" * 2000})
    finally:
        os.umask(before)
    modes = {place.name: place.stat().st_mode & 0o777 for place in state.glob("journal*.jsonl")}
    assert len(modes) > 1 and set(modes.values()) == {0o600}
