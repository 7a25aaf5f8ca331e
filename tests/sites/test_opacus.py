"""``fedstill privacy import``: the epsilon of an Opacus accountant's history, and its place in a site's ledger."""

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.cli import main
from fedstill.privacy import accounting
from fedstill.privacy.ledger import Charge
from fedstill.sites.site import log, site_journal
from fedstill.sites.site.charges import Limits, SiteStore, open_site_ledger, read_charges
from fedstill.sites.site.opacus import Import, read

# opacus 1.6.0, delta 1e-5: epsilon by its PRVAccountant and by its RDPAccountant
KNOWN = [
    ([(1.1, 0.01, 500), (0.9, 0.02, 300)], 3.001202302024923, 3.477052740331913),
    ([(5.0, 1.0, 60)], 7.339730803636356, 7.884406222420491),
]


def state(history: Any, mechanism: str = "rdp") -> Any:
    return OrderedDict([("history", history), ("mechanism", mechanism)])


@pytest.mark.slow
@pytest.mark.parametrize(("history", "prv", "rdp"), KNOWN)
def test_epsilon_is_that_of_opacus_s_tighter_accountant(
    history: Any, prv: float, rdp: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state(history), tmp_path / "a.pt")
    main(["privacy", "import", str(tmp_path / "a.pt"), "--json"])
    told = json.loads(capsys.readouterr().out)
    events = [(event["noise_multiplier"], event["sampling"], event["count"]) for event in told["history"]]
    assert (events, told["delta"], told["unit"], told["charged"]) == (history, 1e-5, "record", None)
    epsilon = told["epsilon"]
    # PRVAccountant adds its error, .01, to be on the safe side
    assert prv - 0.011 <= epsilon <= prv + 0.005 < rdp


@pytest.mark.parametrize("form", ["state", "checkpoint", "json", "list", "prv"])
def test_every_form_is_the_same_history(form: str, tmp_path: Path) -> None:
    history, place = KNOWN[0][0], tmp_path / "file"
    if form == "json":
        place.write_text(json.dumps(state(history)))
    elif form == "list":
        place.write_text(json.dumps(history))
    elif form == "checkpoint":
        torch.save({"module_state_dict": {}, "privacy_accountant_state_dict": state(history)}, place)
    else:
        torch.save(state(history, "prv" if form == "prv" else "rdp"), place)
    events, name, _ = read(place)
    assert [(e.noise_multiplier, e.sampling, e.count) for e in events] == history
    assert name == ("prv" if form == "prv" else "rdp")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no history: a list of"),
        ({"mechanism": "rdp"}, "no history: a list of"),
        (state([(1.0, 0.1, 1)], "laplace"), "the mechanism 'laplace'; it must be one of rdp, prv, gdp"),
        (state([(1.0, 0.1, 1), (1.0, 1.5, 1)]), r"entry 2 of the history is \[1.0, 1.5, 1\].*less than or equal to 1"),
        (state([(0.0, 0.1, 1)]), "entry 1 of the history is .*greater than or equal to 0.000000001"),
        (state([(1.0, 0.1)]), "entry 1 of the history is .*not enough values"),
        (state([3]), "entry 1 of the history is 3, not"),
        (state([(1.0, 0.1, 2.5)]), "entry 1 of the history is .*integer"),
    ],
)
def test_another_history_is_a_sentence(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.json")


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"history": tmp_path, "more": Path}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="torch can't read it as plain tensors"):
        read(tmp_path / "a.pt")
    (tmp_path / "b").write_text("{")
    with pytest.raises(ValueError, match=r"has no history .*save accountant.state_dict\(\)"):
        read(tmp_path / "b")
    with pytest.raises(ValueError, match="can't be read"):
        read(tmp_path / "c")
    for words, sentence in ((["import"], "the file comes first"), (["import", "--delta", "1"], "the file comes first")):
        with pytest.raises(SystemExit) as stop:
            main(["privacy", *words])
        assert stop.value.code == 2 and sentence in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["privacy", "import", "--help"])
    assert stop.value.code == 0 and "--policy" in capsys.readouterr().out


@pytest.mark.slow
def test_a_site_s_budget_is_smaller_by_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('client = 0\ndata = "d"\nstate = "state"\nmethods = ["dp-fl"]\nbudget = 5.0\n')
    site_journal.create(tmp_path / "state")
    history, place = KNOWN[0][0], tmp_path / "a.json"
    place.write_text(json.dumps(state(history)))
    main(["privacy", "import", str(place), "--policy", str(policy)])
    assert "charged to" in capsys.readouterr().out
    ledger = open_site_ledger(tmp_path / "state", "another run", Limits(1e-5, 5.0))
    kept = open_site_ledger(tmp_path / "state", "a", Limits(1e-5, 5.0))
    assert kept.entries == [] and ledger.entries == []
    charges = read_charges(tmp_path / "state")
    assert len(charges) == 2 and charges[0].entry.mechanism == "Opacus (rdp)"

    def refused() -> str:
        with pytest.raises(SystemExit) as stop:
            main(["privacy", "import", str(place), "--policy", str(policy)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert "has this history already; it is charged once" in refused()
    # a history that the rest of the budget does not cover, though it alone would fit
    limit = accounting.rdp_filter(5.0, 1e-5, read(place)[0][0])
    most = max(k for k in range(1, 100) if limit.allows(read(place)[0] * k))
    place.write_text(json.dumps(state([(noise, rate, most * steps) for noise, rate, steps in history])))
    assert limit.allows(read(place)[0])
    assert "does not fit the budget of 5.0 at delta 1e-05 that is left" in refused()
    place.write_text(json.dumps(state([(1.1, 0.5, 600)])))
    assert "does not fit the budget" in refused()


def test_a_history_of_full_batches_that_the_ledger_admits_is_imported(tmp_path: Path) -> None:
    """A filter of Renyi divergences alone would ask for a budget of 1.09."""
    policy = tmp_path / "policy.toml"
    policy.write_text('client = 0\ndata = "d"\nstate = "state"\nmethods = ["dp-fl"]\nbudget = 1.0\n')
    site_journal.create(tmp_path / "state")
    place = tmp_path / "a.json"
    place.write_text(json.dumps(state([(accounting.release_noise(1.0, 1e-5), 1.0, 1)])))
    main(["privacy", "import", str(place), "--policy", str(policy)])
    assert len(read_charges(tmp_path / "state")) == 1


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The policy of a site with a ledger."""
    policy = tmp_path / "site" / "policy.toml"
    site_journal.create(policy.parent / "state")
    policy.write_text('client = 0\ndata = "d"\nstate = "state"\nmethods = ["dp-fl"]\nbudget = 20.0\n')
    return policy


def imported(policy: Path, history: Any = ((5.0, 1.0, 2), (6.0, 1.0, 2))) -> None:
    place = policy.parent / "a.json"
    place.write_text(json.dumps(state(history)))
    main(["privacy", "import", str(place), "--policy", str(policy)])


def test_an_imported_history_is_in_the_log_and_verifies(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(site)
    main(["site", "log", str(site.parent), "--verify"])
    assert "the journal, with ledger and log, is whole" in capsys.readouterr().out
    begun, *charged = log.read(site.parent / "state")
    assert (begun["what"], begun["step"]) == ("imported", "imported") and "2 entries of a.json" in begun["detail"]
    assert [(line["what"], line["charge"], line["unit"]) for line in charged] == [
        ("charged", 1, "record"),
        ("charged", 2, "record"),
    ]
    assert charged[1]["total"]["record"]["epsilon"] > charged[0]["total"]["record"]["epsilon"] == charged[0]["epsilon"]
    main(["site", "status", str(site.parent), "--json"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["releases"] == 2 and run["first"] is not None


def test_an_import_that_was_killed_goes_on(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, times = SiteStore.append, list[int]()

    def killed(store: SiteStore, charge: Charge) -> None:
        append(store, charge)
        times.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SiteStore, "append", killed)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            imported(site)
    found = log.verify(site.parent / "state")
    assert times == [1] and found.problems == [] and found.counts["charges"] == 1
    imported(site)
    found = log.verify(site.parent / "state")
    assert found.problems == [] and found.counts["charges"] == 2


def test_no_history_is_charged_to_a_site_of_a_newer_version_or_with_a_damaged_log(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = site.parent / "state" / "format.json"
    lines = site.parent / "state" / "journal.jsonl"
    whole = place.read_bytes()
    place.write_text('{"version": 4}')
    with pytest.raises(SystemExit):
        imported(site)
    assert "has the format 4; this fedstill reads formats up to 3" in capsys.readouterr().err
    assert lines.read_bytes() == b""
    place.write_bytes(whole)
    site_journal.append(site.parent / "state", {"what": "started", "detail": ""})
    (site.parent / "state" / "journal.head").unlink()
    before = lines.read_bytes()
    with pytest.raises(SystemExit):
        imported(site)
    assert "journal.head can't be read" in capsys.readouterr().err
    assert lines.read_bytes() == before


def test_no_other_user_charges_a_history(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's files in the journal would be closed to the site's own user."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    (site.parent / "a.json").write_text(json.dumps(state(((5.0, 1.0, 2),))))
    with pytest.raises(ValueError, match=r"belongs to .*; run it as its owner: sudo -u \w+ fedstill privacy import"):
        Import(policy=site).run(site.parent / "a.json")


def test_without_a_budget_the_ledger_has_an_epsilon_near_the_history_s(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = site.read_text().replace("budget = 20.0", "unprotected = true")
    site.write_text(text)
    place = site.parent / "a.json"
    place.write_text(json.dumps(state(((1.1, 0.01, 500), (0.9, 0.02, 300)))))
    main(["privacy", "import", str(place), "--policy", str(site), "--json"])
    exact = json.loads(capsys.readouterr().out)["epsilon"]
    main(["site", "status", str(site.parent), "--json"])
    found = json.loads(capsys.readouterr().out)["budget"]
    assert exact < found["spent"]["record"]["epsilon"] < 1.5 * exact  # it was 748
    main(["site", "status", str(site.parent)])
    assert "budget: none, so releases have no limit at delta 1e-05; 2 releases so far" in capsys.readouterr().out
