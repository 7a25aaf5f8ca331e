"""What bounds a site over its life, whatever the runs: bits that failures tell, releases, and its disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_sites import federation, make_site, spec_of, write_data
from releases import entry

from fedstill.cli import main
from fedstill.data.sources import DataSet
from fedstill.engines.client import NO_REPLY
from fedstill.engines.server import TooFewReplies
from fedstill.privacy.releases import Gaussian
from fedstill.protocol import wire
from fedstill.sites.site import log, site_journal
from fedstill.sites.site.answer import answer
from fedstill.sites.site.charges import Limits, open_site_ledger, read_charges
from fedstill.sites.site.evidence import status
from fedstill.sites.site.policy import SitePolicy, check
from fedstill.sites.site.site_journal import SiteJournal


def asked(site: SitePolicy, text: dict[str, Any], **envelope: Any) -> bytes:
    """The reply to a question without weights."""
    return answer(site, json.dumps(text), wire.pack({}, {"step": "select", "exchange": 0, "fields": {}, **envelope}))


def counts(site: SitePolicy) -> tuple[int, int]:
    """Numbers of questions that were accepted, and that neither failed nor went beyond the budget."""
    at = SiteJournal(site.state).standing().at
    return at.accepted, at.ended


@pytest.fixture
def make(digits: DataSet, tmp_path: Path) -> Callable[..., SitePolicy]:
    return lambda **policy: make_site(tmp_path, digits, 0, **policy)


def test_failures_of_all_runs_are_counted_for_good(digits: DataSet, make: Callable[..., SitePolicy]) -> None:
    site = make(methods=["real"], min_records=10_000, max_failures_ever=4, runs_per_day=100)
    text = json.loads(spec_of("real", digits).text())
    for i in range(4):
        assert asked(site, {**text, "run": f"{i:032x}"}) == NO_REPLY
    assert counts(site) == (4, 0)
    good = site.model_copy(update={"min_records": 1})
    assert b"4 questions have failed at the site or went beyond its budget, its limit (max_failures_ever)" in asked(
        good, {**text, "run": "e" * 32}
    )
    found = status(good)
    assert found["failures"] == {"number": 4, "limit": 4} and not found["health"]["is_well"]
    assert found["health"]["limits"] == "max_failures_ever reached, so that the site replies to nothing"
    raised = good.model_copy(update={"max_failures_ever": 5})
    assert wire.unpack(asked(raised, {**text, "run": "d" * 32}))[0]
    assert counts(raised) == (5, 1)


def test_a_question_beyond_the_budget_counts_as_a_failure(
    digits: DataSet, make: Callable[..., SitePolicy], tmp_path: Path
) -> None:
    """Its step has read the records, so that whether it fails tells of them, and it is charged for nothing."""
    private = {"methods": ["fedavg-p"], "unprotected": False, "simulated_noise": False, "budget": 0.5}
    site = make(**private, max_failures=2, max_failures_ever=3)

    def refusal(i: int, run: str) -> str:
        fed = federation("fedavg-p", digits, [site], tmp_path / f"{run[0]}{i}", run=run, simulated_noise=False)
        with pytest.raises(TooFewReplies) as why:
            fed.spec.method.server(fed)
        return str(why.value)

    for i in range(2):
        assert "budget of 0.5" in refusal(i, "a" * 32)
    assert "gives no reply" in refusal(2, "a" * 32)
    assert "2 questions of the run failed or went beyond the budget" in log.read(site.state)[-1]["detail"]
    assert "budget of 0.5" in refusal(0, "b" * 32)
    assert "3 questions have failed at the site or went beyond its budget" in refusal(0, "c" * 32)
    assert counts(site) == (3, 0)
    assert status(site)["failures"] == {"number": 3, "limit": 3}


@pytest.mark.parametrize("has", [True, False])
def test_whether_a_site_has_a_rare_class_is_told_by_its_policy_alone(
    has: bool, digits: DataSet, tmp_path: Path
) -> None:
    train = digits.train[digits.train.labels < (8 if has else 7)]
    site = make_site(tmp_path, digits, 0, records=train, methods=["real"], classes=tuple("01234567"))
    text = json.loads(spec_of("real", digits).text())
    reply = asked(site, {**text, "class_names": list("0123456x")})
    assert b"the site's class '7' is not a class of the run (classes)" in reply
    assert log.read(site.state)[-1]["what"] == "refused" and counts(site) == (0, 0)


def test_init_states_the_classes_and_check_finds_new_ones(
    digits: DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = digits.train[digits.train.labels < 7]
    write_data(tmp_path / "data.npz", train)
    server = tmp_path / "server"
    main(["server", "init", str(server), "--host", "fl.example.org"])
    main(["server", "invite", str(server), "0"])
    invite = server / "invitations" / "site-0.toml"
    words = ["--invite", str(invite), "--data", str(tmp_path / "data.npz"), "--methods", "fedavg-p", "--budget", "1"]
    main(["site", "init", str(tmp_path / "site"), *words])
    policy = SitePolicy.read(tmp_path / "site" / "policy.toml")
    assert policy.classes == tuple("0123456")
    assert not any("tells its server a bit" in line for line in check(policy))
    assert any("tells its server a bit" in line for line in check(policy.model_copy(update={"classes": ()})))
    write_data(tmp_path / "data.npz", digits.train)
    with pytest.raises(ValueError, match="the class '7', which its policy lacks .classes."):
        list(check(policy))


def test_a_disk_is_not_filled_by_a_server(digits: DataSet, make: Callable[..., SitePolicy]) -> None:
    site = make(methods=["real"], state_gb=1e-5, keep_sent_days=0)
    (site.state / "large").write_bytes(bytes(10_000))
    text = json.loads(spec_of("real", digits).text())
    assert b"GB, its limit (state_gb)" in asked(site, text)


def test_releases_are_bounded_in_number_and_from_below(digits: DataSet, tmp_path: Path) -> None:
    site_journal.create(tmp_path)

    def ledger(**limits: Any) -> Any:
        return open_site_ledger(tmp_path, "a", Limits(1e-5, 1e6, **limits))

    for i in range(2):
        ledger(max_releases=2).charge(entry(exchange=i))
    with pytest.raises(ValueError, match="has released 2 times, its limit for all runs .max_releases."):
        ledger(max_releases=2).charge(entry(exchange=2))
    faint = entry(Gaussian(noise_multiplier=1e4), exchange=3)
    with pytest.raises(ValueError, match=r"alone, below the site's least of 0.001 \(min_epsilon\); lower the noise"):
        ledger(min_epsilon=1e-3).charge(faint)
    assert len(read_charges(tmp_path)) == 2


def test_numbers_that_no_ledger_takes_are_refused_where_they_are_written(tmp_path: Path) -> None:
    from fedstill.sites.site.setup import read_settings

    plain = {"client": 0, "data": tmp_path, "state": tmp_path, "methods": ["real"]}
    with pytest.raises(ValueError, match="budget is 1000000000.0"):
        read_settings({**plain, "budget": 1e9})


@pytest.mark.parametrize("exchange", [True, 10**4000, 10**12, -1, 1.0, "1"])
def test_a_number_of_a_question_is_a_whole_number_that_a_file_can_have(
    exchange: Any, digits: DataSet, make: Callable[..., SitePolicy]
) -> None:
    site = make(methods=["real"])
    text = json.loads(spec_of("real", digits).text())
    try:
        reply = asked(site, text, exchange=exchange)
    except (ValueError, OverflowError):
        pytest.skip("no message can hold it")
    assert b"it must be a whole number from 0" in reply and log.read(site.state)[-1]["what"] == "refused"
    assert wire.unpack(asked(site, text))[0]  # the run goes on
