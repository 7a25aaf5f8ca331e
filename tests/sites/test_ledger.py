"""A real site's ledger: one budget over all runs, on disk for good, and no release once anything about it is wrong."""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from releases import ONE, entry

from fedstill.base import files
from fedstill.privacy import accounting
from fedstill.privacy.ledger import BudgetExceeded, Charge, Ledger, Part
from fedstill.privacy.releases import Gaussian, Pure, Unbounded
from fedstill.sites.site.charges import Limits, largest_fitting, open_site_ledger
from fedstill.sites.site.site_journal import SiteJournal, create
from fedstill.sites.site.state_format import FORMAT, HEAD, KEY, LINES, LOCK

DELTA = 1e-5


def label(epsilon: float, part: str | None = None, exchange: int = 0) -> Charge:
    return entry(Pure(epsilon=epsilon), unit="label", part=part, exchange=exchange)


def part(*positions: int, count: int = 40, data: bytes = bytes(32)) -> bytes:
    return Part("a part", torch.tensor(positions)).records(count, data)


def opened(folder: Path, run: str = "run", budget: float | None = None, allow_unbounded: bool = False) -> Ledger:
    facts = {"delta": DELTA, "budget": budget, "allow_unbounded": allow_unbounded}
    return open_site_ledger(folder, run, Limits(public_images=True, **facts))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create(tmp_path / "ledger")
    return tmp_path / "ledger"


@pytest.fixture
def sample(folder: Path) -> Path:
    ledger = opened(folder, "first")
    ledger.charge(entry())
    ledger.charge(label(0.5, "a part"))
    opened(folder, "second").charge(entry(index=1))
    return folder


def test_a_ledger_is_made_once_and_for_the_site_alone(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "ledger"
    create(place)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (place, *place.iterdir())}
    assert modes == {"ledger": 0o700, KEY: 0o600, LINES: 0o600, HEAD: 0o600, LOCK: 0o600, FORMAT: modes[FORMAT]}
    assert len((place / KEY).read_bytes()) == 32
    assert opened(place).entries == []
    create(place)  # of no line yet
    opened(place).charge(entry())
    for name in (KEY, LINES, HEAD, FORMAT):
        other = shutil.copytree(place, tmp_path / name)
        (other / name).unlink()
        before = {path: path.read_bytes() for path in other.iterdir()}
        with pytest.raises(ValueError, match="has a site's journal already; a new journal would forget"):
            create(other)
        assert {path: path.read_bytes() for path in other.iterdir()} == before


def test_it_is_used_like_a_ledger_and_shows_this_run_only(folder: Path) -> None:
    first, second = opened(folder, "first"), opened(folder, "second")
    first.charge(entry())
    second.charge(entry(index=1))
    second.charge(entry(index=2, exchange=3))
    assert first.of_exchange(0) == [entry().model_dump(mode="json")]
    assert second.of_exchange(0) == [entry(index=1).model_dump(mode="json")]
    again = opened(folder, "second")
    assert again.entries == second.entries == [entry(index=1), entry(index=2, exchange=3)]
    assert again.of_exchange(3) == [entry(index=2, exchange=3).model_dump(mode="json")]
    assert opened(folder, "third").entries == []


def test_accounting_that_takes_long_holds_up_no_other_charge(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is worked out without the lock, and again if somebody charged meanwhile."""
    slow, quick = opened(folder, "slow", 1.8), opened(folder, "quick", 1.8)
    rule, calls = slow.rule, list[int]()

    def check(entries: Sequence[Charge], new: Charge) -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            quick.charge(entry())
        rule(entries, new)

    slow.rule = check
    slow.charge(entry())
    assert len(calls) == 2
    assert len(opened(folder, "slow").entries) == len(opened(folder, "quick").entries) == 1
    with pytest.raises(BudgetExceeded):
        slow.charge(entry(index=1))


def test_a_run_s_own_limit_on_a_giant_training_is_worked_out_at_once(folder: Path) -> None:
    ledger = open_site_ledger(folder, "run", Limits(DELTA, 4.0, run_limit=(3.9, DELTA)))
    began = time.process_time()
    for count in (10**8, 10**9):
        try:
            ledger.charge(entry(Gaussian(noise_multiplier=1.0, sampling=1e-6, count=count)))
        except BudgetExceeded:
            pass
    assert time.process_time() - began < 60


def test_a_budget_covers_all_runs_and_restarts(folder: Path) -> None:
    opened(folder, "first", 1.8).charge(entry())
    opened(folder, "second", 1.8).charge(entry())
    spent = accounting.epsilon([ONE] * 3, DELTA, "record")
    sentence = "budget of 1.8 at delta 1e-05, including earlier runs; nothing was released"
    for run in ("first", "second", "third"):
        ledger = opened(folder, run, 1.8)
        with pytest.raises(BudgetExceeded, match=sentence):
            ledger.charge(entry(index=1))
        assert len(ledger.entries) == (run != "third")
    assert spent < 2.0
    opened(folder, "third", 2.0).charge(entry(index=1))
    with pytest.raises(BudgetExceeded):
        opened(folder, "third", 2.0).charge(entry(index=2))


def test_a_step_that_runs_again_is_charged_again(folder: Path) -> None:
    for count in (1, 2, 3):
        opened(folder).charge(entry())
        assert opened(folder).entries == [entry()] * count


def test_nothing_unbounded_leaves_unless_the_site_allows_it(folder: Path) -> None:
    bare = entry(Unbounded(reason="the noise is missing"))
    for budget in (None, 5.0):
        with pytest.raises(BudgetExceeded, match="no epsilon bounds Noisy in step 's' .the noise is missing"):
            opened(folder, budget=budget).charge(bare)
    with pytest.raises(BudgetExceeded, match="above the site's budget of 5"):
        opened(folder, budget=5.0, allow_unbounded=True).charge(bare)
    assert opened(folder).entries == []
    opened(folder, allow_unbounded=True).charge(bare)
    with pytest.raises(BudgetExceeded):  # now no budget can hold any more
        opened(folder, "later", 100.0).charge(entry())


@pytest.mark.parametrize("budget", [-1.0, float("nan"), float("inf")])
def test_a_budget_is_a_number(folder: Path, budget: float) -> None:
    with pytest.raises(ValueError, match="budget is"):
        opened(folder, budget=budget)


def test_parts_count_apart_only_where_the_ledger_knows_their_records(folder: Path) -> None:
    first, second = opened(folder, "first", 1.0), opened(folder, "second", 1.0)
    even, odd = part(*range(0, 40, 2)), part(*range(1, 40, 2))
    first.charge(label(0.5, "a"), even)
    first.charge(label(1.0, "b"), odd)
    second.charge(label(0.5, "x"), part(0, 4))  # of another run: labels that have half their budget left
    for name, records in (("a", even), ("c", part(0)), ("c", part(1)), ("b", None), (None, None)):
        with pytest.raises(BudgetExceeded, match="epsilon per label above the site's budget of 1 at delta 1e-05"):
            second.charge(label(0.2, name), records)
    second.charge(label(0.5, "b"), part(2))
    with pytest.raises(BudgetExceeded):  # of other data: whose labels they are is unknown
        second.charge(label(0.2, "a"), part(6, data=b"1" * 32))


def test_labels_alone_are_protected_only_where_images_are_public(folder: Path) -> None:
    ledger = open_site_ledger(folder, "run", Limits(DELTA, 1.0))
    with pytest.raises(BudgetExceeded, match="protects labels only, and this site does not declare its images public"):
        ledger.charge(label(0.5))
    ledger.charge(entry(Gaussian(noise_multiplier=8.0)))
    assert len(ledger.entries) == 1


def test_a_name_alone_makes_no_part(folder: Path) -> None:
    ledger = opened(folder, budget=1.0)
    ledger.charge(label(0.6, "a"))
    with pytest.raises(BudgetExceeded):
        ledger.charge(label(0.6, "b"))
    ledger.charge(label(0.4, "b"))


def test_parts_that_overlap_keep_what_a_run_announced(folder: Path) -> None:
    """Questions that split the records anew randomise some labels three times, whatever their parts are called."""
    ledger = open_site_ledger(folder, "run", Limits(DELTA, 10.0, run_limit=(2.0, DELTA), public_images=True))
    ledger.charge(label(1.0, "first"), part(*range(24)))
    ledger.charge(label(1.0, "second"), part(*range(24, 40)))
    ledger.charge(label(1.0, "first", exchange=3), part(*range(16, 40)))
    with pytest.raises(BudgetExceeded, match="budget of 2 at delta 1e-05; it would come to 3"):
        ledger.charge(label(1.0, "second", exchange=4), part(*range(8, 24)))
    ledger.charge(label(1.0, "second", exchange=4), part(*range(16)))


def test_the_records_of_a_part_stay_in_the_ledger(folder: Path) -> None:
    ledger = opened(folder)
    ledger.charge(label(1.0, "a"), part(3))
    assert ledger.of_exchange(0) == [label(1.0, "a").model_dump(mode="json")]
    assert "records" not in ledger.of_exchange(0)[0]
    assert opened(folder).entries[0].records == part(3)


def test_a_persons_data_have_one_budget_whatever_the_unit(folder: Path) -> None:
    ledger = opened(folder, budget=2.0)
    ledger.charge(label(0.5))
    with pytest.raises(BudgetExceeded, match="epsilon per label above"):
        ledger.charge(entry())  # replacing a label is as removing a record and adding one
    ledger.charge(entry(Gaussian(noise_multiplier=30.0)))
    other = opened(folder, "other", budget=2.0)
    with pytest.raises(BudgetExceeded, match="epsilon per label above"):
        other.charge(label(1.7))


def test_a_gaussian_for_labels_counts_with_twice_the_influence(folder: Path) -> None:
    noise = accounting.gaussian_noise(1.0, DELTA)
    with pytest.raises(BudgetExceeded):
        opened(folder, budget=1.1).charge(entry(Gaussian(noise_multiplier=noise), unit="label"))
    opened(folder, budget=1.1).charge(entry(Gaussian(noise_multiplier=2 * noise), unit="label"))


def test_a_filter_watches_over_adaptive_noise_of_all_runs(folder: Path) -> None:
    with pytest.raises(ValueError, match="needs a --budget"):
        opened(folder).charge(entry(adaptive=True))
    first, second = opened(folder, "first", 2.0), opened(folder, "second", 2.0)
    for index in range(10):
        first.charge(entry(Gaussian(noise_multiplier=8.0 + index % 5), adaptive=True))
    small = Gaussian(noise_multiplier=20.0)
    with pytest.raises(BudgetExceeded, match="budget of 2 at delta 1e-05, including earlier runs"):
        while True:
            second.charge(entry(small))  # fixed noise beside adaptive noise
    every = [e.event for e in (*first.entries, *second.entries)]
    assert len(every) > 15
    # the sum of 1 / s^2 is a filter
    assert accounting.epsilon(every, DELTA, "record") <= 2.0 < accounting.epsilon([*every, small], DELTA, "record")


@pytest.mark.slow
def test_a_filter_watches_where_noise_is_on_samples_since_servers_choose_what_comes_next(folder: Path) -> None:
    # by either of these two endings the first five steps fit the sum of losses; choosing after looking does not
    first = Gaussian(noise_multiplier=1.2, sampling=32 / 600, count=5)
    endings = (
        Gaussian(noise_multiplier=1.166, sampling=32 / 600),
        Gaussian(noise_multiplier=9.633, sampling=32 / 600, count=400),
    )
    for index, ending in enumerate(endings):
        assert accounting.epsilon([first, ending], DELTA, "record") <= 1.0 + 1e-6
        ledger = opened(folder, f"run {index}", 1.0)
        if not index:
            assert not accounting.RdpFilter(1.0, DELTA).allows([first])
            with pytest.raises(BudgetExceeded, match="budget of 1 at delta 1e-05"):
                ledger.charge(entry(first))
        with pytest.raises(BudgetExceeded):
            ledger.charge(entry(ending if index == 0 else first))


def test_what_a_run_announced_is_kept_as_well(folder: Path) -> None:
    ledger = open_site_ledger(folder, "run", Limits(DELTA, 10.0, run_limit=(1.0, 1e-6)))
    with pytest.raises(BudgetExceeded, match="budget of 1 at delta 1e-06; it would come to"):
        ledger.charge(entry(Gaussian(noise_multiplier=2.0)))
    ledger.charge(entry(Gaussian(noise_multiplier=8.0)))
    other = open_site_ledger(folder, "other", Limits(DELTA, 10.0, run_limit=(1.0, 1e-6)))
    other.charge(entry(Gaussian(noise_multiplier=8.0)))  # the limit is each run's own


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.sets(st.integers(0, 3)), st.sampled_from([0.05, 0.2, 0.5, 1.0])),
        max_size=7,
    )
)
def test_no_label_costs_more_than_the_budget(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[str, set[int], float]]
) -> None:
    place = tmp_path_factory.mktemp("site") / "ledger"
    create(place)
    spent = [0.0] * 4
    for run, positions, epsilon in wanted:
        try:
            opened(place, run, 1.5).charge(label(epsilon, "a"), part(*positions, count=4) if positions else None)
        except BudgetExceeded:
            continue
        spent = [cost + epsilon * (i in positions or not positions) for i, cost in enumerate(spent)]
    assert max(spent) <= 1.5 + 1e-9


@pytest.mark.slow
def test_every_changed_byte_is_noticed(sample: Path) -> None:
    whole = {name: (sample / name).read_bytes() for name in (KEY, LINES, HEAD)}
    entries = opened(sample, "first").entries
    for name, data in whole.items():
        for i in range(len(data)):
            longer = data[:i] + b" \n"[i % 2 : i % 2 + 1] + data[i:]
            for changed in (
                data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :],
                (data[:i] + data[i + 1 :], longer, data[:i])[i % 3],
            ):
                (sample / name).write_bytes(changed)
                with pytest.raises(files.Damaged, match="is damaged: .*; the site replies to nothing until"):
                    opened(sample, "first")
        (sample / name).write_bytes(data)
    assert opened(sample, "first").entries == entries


def test_every_other_arrangement_of_lines_is_noticed(sample: Path) -> None:
    a, b, c = (sample / LINES).read_bytes().splitlines(keepends=True)
    for lines in (
        [a, b],
        [b, c],
        [a, c],
        [],
        [b, a, c],
        [a, c, b],
        [a, b, c, c],
        [a, b, b, c],
        [a, b, c, a],
        [c, b, a],
    ):
        (sample / LINES).write_bytes(b"".join(lines))
        with pytest.raises(files.Damaged):
            opened(sample)
    for extra in (b"\n", b"{}\n", b'{"run":"x","entry":{},"mac":"' + b"0" * 64 + b'"}\n', b"[" * 5000 + b"\n"):
        (sample / LINES).write_bytes(a + b + c + extra)
        with pytest.raises(files.Damaged):
            opened(sample)
    (sample / LINES).write_bytes(a + b + c)
    assert len(opened(sample, "first").entries) == 2


def test_a_missing_file_stops_everything(sample: Path, tmp_path: Path) -> None:
    for name in (KEY, LINES, HEAD):
        ledger = opened(sample)
        (sample / name).rename(tmp_path / name)
        with pytest.raises(files.Damaged, match=f"{name} can't be read ."):
            opened(sample)
        with pytest.raises(files.Damaged, match=name):  # of one that was opened before as well
            ledger.charge(entry())
        (tmp_path / name).rename(sample / name)
    with pytest.raises(files.Damaged, match="has no journal"):
        opened(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (sample / LOCK).unlink()  # holds nothing
    opened(sample).charge(entry())


def test_files_of_another_ledger_do_not_fit(sample: Path, tmp_path: Path) -> None:
    create(tmp_path / "other")
    opened(tmp_path / "other", "first").charge(entry())
    create(tmp_path / "empty")
    for source in (tmp_path / "other", tmp_path / "empty"):
        for names in ([KEY], [LINES], [HEAD], [KEY, LINES], [KEY, HEAD], [LINES, HEAD]):
            mixed = tmp_path / "mixed"
            shutil.copytree(sample, mixed)
            for name in names:
                shutil.copy(source / name, mixed / name)
            with pytest.raises(files.Damaged):
                opened(mixed)
            shutil.rmtree(mixed)
    # two empty ledgers differ in their keys alone
    create(tmp_path / "another")
    shutil.copy(tmp_path / "another" / KEY, tmp_path / "empty" / KEY)
    with pytest.raises(files.Damaged, match=HEAD):
        opened(tmp_path / "empty")


def test_a_key_that_only_counts_as_the_same_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("secrets.token_bytes", lambda n: b"k" * (n - 1) + b"\0")
        create(tmp_path / "ledger")
    (tmp_path / "ledger" / KEY).write_bytes(b"k" * 31)  # HMAC fills keys up with zeros
    with pytest.raises(files.Damaged, match="has 31 bytes in place of 32"):
        opened(tmp_path / "ledger")


def test_an_older_copy_is_noticed_by_who_knows_the_newer(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "old")
    ledger = opened(sample)
    ledger.charge(entry())
    shutil.rmtree(sample)
    shutil.copytree(tmp_path / "old", sample)
    with pytest.raises(files.Damaged, match="replaced by another copy"):
        ledger.charge(entry())
    opened(sample).charge(entry())  # as the docstring says


def test_a_crash_between_line_and_head_is_charged(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, before = (sample / HEAD).read_bytes(), (sample / LINES).read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    ledger = opened(sample)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "write_bytes", killed)
        ledger.charge(entry(index=7))
    assert (sample / HEAD).read_bytes() == old
    lines = (sample / LINES).read_bytes()
    for end in range(len(before), len(lines)):  # it fell short within the line: there was no release
        (sample / LINES).write_bytes(lines[:end])
        (sample / HEAD).write_bytes(old)
        assert opened(sample).entries == []
        assert (sample / HEAD).read_bytes() == old
    for i in range(len(before), len(lines) - 1):  # a line that is whole but not right is no crash
        (sample / LINES).write_bytes(lines[:i] + bytes([lines[i] ^ 1]) + lines[i + 1 :])
        with pytest.raises(files.Damaged):
            opened(sample)
    (sample / LINES).write_bytes(lines)
    assert opened(sample).entries == [entry(index=7)]
    assert (sample / HEAD).read_bytes() != old
    ledger.charge(entry(index=8))  # the object that was interrupted goes on
    assert ledger.entries == opened(sample).entries == [entry(index=7), entry(index=8)]
    (sample / HEAD).write_bytes(old)  # two lines more are no crash
    with pytest.raises(files.Damaged, match=f"{HEAD} does not fit"):
        opened(sample)


@pytest.mark.parametrize("torn", [b"{", b'{"run":"x","entry":{"exch', b"\0" * 700])
def test_half_a_line_gives_way_to_the_next(sample: Path, torn: bytes) -> None:
    with (sample / LINES).open("ab") as file:
        file.write(torn)
    assert len(opened(sample, "first").entries) == 2
    opened(sample, "first").charge(entry(index=5))
    assert len(opened(sample, "first").entries) == 3
    assert len((sample / LINES).read_bytes().splitlines()) == 4


def test_a_charge_is_on_the_disk_when_it_returns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[str, bytes]] = []
    real = os.fsync

    def seen(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        flushed.append((path.name, path.read_bytes() if path.is_file() else b""))
        real(handle)

    ledger = opened(folder)
    monkeypatch.setattr(os, "fsync", seen)
    ledger.charge(entry())
    assert flushed[0] == (LINES, (folder / LINES).read_bytes())
    assert flushed[1][1] == (folder / HEAD).read_bytes()
    assert flushed[2][0] == folder.name

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        ledger.charge(entry(index=1))


CHARGE_ALL = """
import sys
from pathlib import Path
from fedstill.privacy.releases import Gaussian
from fedstill.privacy.ledger import BudgetExceeded, Charge
from fedstill.sites.site.charges import open_site_ledger, Limits

folder, run, noise = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
for index in range(100):
    event = Gaussian(noise_multiplier=noise)
    facts = {"exchange": 0, "step": "s", "index": index, "mechanism": "m", "unit": "record", "theorem": "t"}
    try:
        open_site_ledger(folder, run, Limits(1e-5, 2.0)).charge(Charge(event=event, **facts))
    except BudgetExceeded:
        break
"""


@pytest.mark.slow
def test_processes_that_charge_at_once_share_the_budget(folder: Path) -> None:
    noise = accounting.gaussian_noise(0.5, DELTA)
    runs = ("first", "second", "first")
    words = [sys.executable, "-c", CHARGE_ALL, str(folder)]
    crowd = [subprocess.Popen([*words, run, str(noise)]) for run in runs]
    assert [process.wait() for process in crowd] == [0, 0, 0]
    every = [e.event for run in ("first", "second") for e in opened(folder, run).entries]
    assert len(every) > 5
    assert accounting.epsilon(every, DELTA, "record") <= 2.0
    assert accounting.epsilon([*every, every[0]], DELTA, "record") > 2.0


def test_two_objects_of_one_process_see_each_other(folder: Path) -> None:
    first, second = opened(folder, "first", 1.2), opened(folder, "second", 1.2)
    first.charge(entry())
    with pytest.raises(BudgetExceeded):
        second.charge(entry())


def fastest(function: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()  # of this process alone, whatever else runs
        function()
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.slow
def test_a_thousand_releases_are_quick(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    small = Gaussian(noise_multiplier=200.0)
    ledgers = [opened(folder, f"run {i}") for i in range(5)]
    for i in range(1000):
        ledgers[i % 5].charge(entry(small, index=i))
    assert fastest(lambda: opened(folder)) < 3
    assert fastest(lambda: opened(folder, "new", 2.0).charge(entry(small))) < 3


@pytest.mark.parametrize("spent", [0, 1, 4])
def test_what_is_said_to_fit_fits_and_a_little_more_does_not(spent: int, tmp_path: Path) -> None:
    create(tmp_path)
    limits = Limits(1e-5, 3.0)
    for index in range(spent):
        open_site_ledger(tmp_path, "a", limits).charge(entry(index=index))
    most = largest_fitting(SiteJournal(tmp_path).standing(), 3.0, 1e-5)
    assert 0 < most <= 3.0

    def release(epsilon: float) -> Charge:
        return entry(Gaussian(noise_multiplier=accounting.gaussian_noise(epsilon, 1e-5)), index=99)

    with pytest.raises(BudgetExceeded):
        open_site_ledger(tmp_path, "b", limits).charge(release(most + 0.01))
    open_site_ledger(tmp_path, "b", limits).charge(release(most))
    assert largest_fitting(SiteJournal(tmp_path).standing(), 3.0, 1e-5) < 0.2
