"""What the operator of a site sees and decides: status, log, ledger, approval, pause, evidence."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from real_sites import Direct, federation, make_site, spec_of
from releases import entry

import fedstill
from fedstill.cli import main
from fedstill.data.sources import DataSet
from fedstill.engines.server import TooFewReplies
from fedstill.experiment import config
from fedstill.experiment.job import Job
from fedstill.experiment.run import run as run_with
from fedstill.privacy.releases import Unbounded
from fedstill.protocol import wire
from fedstill.report.groups import group, words_of
from fedstill.runs import live
from fedstill.sites.site import answer, decisions, evidence, log, site_journal, state_format
from fedstill.sites.site import policy as policies
from fedstill.sites.site.charges import Limits, open_site_ledger, read_charges
from fedstill.sites.site.policy import SitePolicy

PRIVATE = {"methods": ["fedavg-p"], "unprotected": False, "simulated_noise": False, "budget": 4.0}
Run = Callable[..., bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "site-0"


@pytest.fixture
def run(digits: DataSet, tmp_path: Path) -> Run:
    """Runs FedAVG+P with a site, and returns the site's last reply."""

    def once(site: SitePolicy, number: int = 0, **facts: Any) -> bytes:
        place = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        facts = {"simulated_noise": False, "run": f"{number:032x}", **facts}
        fed = federation("fedavg-p", digits, [site], place, **facts)
        try:
            fed.spec.method.server(fed)
        except TooFewReplies:
            pass
        return bytes(fed.transport.replies[-1])  # type: ignore[attr-defined]

    return once


@pytest.fixture
def site(digits: DataSet, tmp_path: Path) -> SitePolicy:
    return make_site(tmp_path, digits, **PRIVATE)


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    main(["site", *map(str, words)])
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return json.loads(shown(capsys, *words, "--json"))


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["site", *map(str, words)])
    assert stop.value.code == 2
    return capsys.readouterr().err


def error_of(reply: bytes) -> str:
    return str(wire.envelope(reply).get("error"))


def test_every_line_tells_who_asked_what_and_what_left(site: SitePolicy, run: Run) -> None:
    reply = run(site)
    asked, accepted, charged, answered = log.read(site.state)
    assert [line["what"] for line in (asked, charged, answered)] == ["asked", "charged", "answered"]
    assert {line["question"] for line in (accepted, charged, answered)} == {asked["n"]} == {1}
    assert json.loads(asked["settings"])["epsilon"] == 1.0
    for line in (asked, charged, answered):
        assert len(line["request"]) == len(line["spec"]) == 64
        assert (line["method"], line["step"], line["exchange"]) == ("fedavg-p", "train_head", 0)
    assert charged["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert charged["total"]["record"]["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert 0.04 < charged["total"]["record"]["share"] < 0.25
    assert answered["charges"] == [1]
    assert "released" in answered["fields"].values()
    assert wire.unpack(reply)[0].keys() == answer.read(site.state, answered).tensors.keys()
    assert log.verify(site.state).problems == []


def test_nothing_that_arrives_goes_unlogged(site: SitePolicy, digits: DataSet) -> None:
    text = spec_of("fedavg-p", digits, simulated_noise=False).text()
    good = wire.pack({}, {"step": "train_head", "exchange": 0})
    bad = [
        ("", b""), ("{}", b"x"), (text, b""), (text, b"\0" * 100), (text.replace("fedavg-p", "\udcff"), good),
        (text, wire.pack({}, {})), (text, wire.pack({}, {"step": 3, "exchange": [1, {"x": "y"}]})),
        (text.replace('"epsilon":1.0', '"epsilon":NaN'), good), (text.replace('"seed":0', '"seed":[/red]'), good),
    ]  # fmt: skip
    for content, request in bad:
        assert "error" in wire.envelope(answer.answer(site, content, request))
    lines = log.read(site.state)
    assert [line["what"] for line in lines[::2]] == ["asked"] * len(bad)
    assert {line["what"] for line in lines[1::2]} <= {"refused", "failed"}
    assert all(line["reply_bytes"] and len(line["reply"]) == 64 for line in lines[1::2])


def test_a_log_that_was_changed_stops_all_answers(site: SitePolicy, run: Run) -> None:
    run(site)
    head = (site.state / "journal.head").read_bytes()
    (site.state / "journal.head").unlink()
    with pytest.raises(ValueError, match="journal.head can't be read"):
        run(site, 1)
    (site.state / "journal.head").write_bytes(head)
    assert len(read_charges(site.state)) == 1


def test_one_run_takes_its_share_of_the_budget_only(digits: DataSet, tmp_path: Path, run: Run) -> None:
    site = make_site(tmp_path, digits, **{**PRIVATE, "budget_per_run": 0.5})
    assert "budget of 0.5 at delta 1e-05 for a run (budget_per_run)" in error_of(run(site))
    wider = site.model_copy(update={"budget_per_run": 1.1})
    for number in (1, 2):
        assert wire.unpack(run(wider, number))[0]  # each run has a share of its own
    lines = log.read(site.state)
    assert lines[-2]["run_total"]["record"]["share"] > 0.8
    assert lines[-2]["total"]["record"]["epsilon"] > 1.2 * lines[-2]["run_total"]["record"]["epsilon"]


def test_what_was_sent_is_shown_again(
    digits: DataSet, tmp_path: Path, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path, digits, methods=["real", "fedavg-p"], budget=4.0, simulated_noise=False)
    request = wire.pack({}, {"step": "select", "exchange": 0, "fields": {}})
    answer.answer(site, spec_of("real", digits, simulated_noise=False).text(), request)
    run(site)
    assert (len(list(site.state.glob("sent/*"))), len(list(site.state.glob("runs/*/*/*.given")))) == (1, 1)
    found = as_json(capsys, "show", folder, 3, "--out", tmp_path / "shown")
    assert found["fields"]["images"] == "unprotected"
    assert {Path(name).name for name in found["files"]} >= {"images.npy", "images.png", "labels.npy"}
    assert found["values"]["images"]["type"] == "uint8"
    assert "released" in shown(capsys, "show", folder, 7)
    assert "no field of a reply left the site then" in fails(capsys, "show", folder, 1)
    assert "the log has no entry 99" in fails(capsys, "show", folder, 99)
    for place in site.state.glob("sent/*"):
        place.write_bytes(b"other")
    assert "has no copy of reply" in fails(capsys, "show", folder, 3)
    forgetful = site.model_copy(update={"keep_sent_days": 0.0})
    answer.answer(forgetful, spec_of("real", digits, simulated_noise=False).text(), request)
    assert not list(site.state.glob("sent/*"))


def test_copies_of_what_was_sent_stay_within_their_room(tmp_path: Path) -> None:
    policy = SitePolicy(client=0, data=tmp_path, state=tmp_path, methods=(), keep_sent_gb=2.5e-6)
    for number in range(4):
        answer.keep(policy, "run", b"", bytes([number]) * 1000)
    assert len(list(tmp_path.glob("sent/*"))) == 2
    answer.keep(policy, "run", b"", bytes(3000))
    assert len(list(tmp_path.glob("sent/*"))) == 2


def test_a_copy_that_another_process_deletes_meanwhile_costs_no_reply(tmp_path: Path) -> None:
    policy = SitePolicy(client=0, data=tmp_path, state=tmp_path, methods=())
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / f"{'0' * 64}.reply").symlink_to(tmp_path / "gone")  # listed, and there is nothing to measure
    answer.keep(policy, "run", b"", b"reply")
    assert sum(place.exists() for place in tmp_path.glob("sent/*")) == 1


def test_a_run_waits_for_a_yes_and_a_no_is_the_same_to_the_server(
    digits: DataSet, tmp_path: Path, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path, digits, **PRIVATE, approval="ask", budget_per_run=2.0)
    first, second = run(site), run(site, 1)
    assert first == second
    assert error_of(first) == "refused by the site: the run waits for the approval of the site's operator (approval)"
    names = [line.split()[0] for line in shown(capsys, "approve", folder).splitlines()]
    assert len(names) == 2
    assert "nobody can be asked here" in fails(capsys, "approve", folder, names[0])
    text = shown(capsys, "approve", folder, names[0], "--yes")
    for words in ("method:   fedavg-p", "epsilon = 1.0", "step train_head", "through a privacy mechanism",
                  "Costs at most: epsilon 2 of the site's budget of 4"):  # fmt: skip
        assert words in text
    assert text.endswith("approved\n")
    shown(capsys, "approve", folder, names[1], "--no")
    assert shown(capsys, "approve", folder) == "no run waits for approval\n"
    assert wire.unpack(run(site))[0]
    assert run(site, 1) == second
    assert run(site, 0, seed=1) == second  # another spec is another run
    assert len(read_charges(site.state)) == 1
    what = [line["what"] for line in log.read(site.state)]
    assert what == [*["asked", "waiting"] * 2, "approved", "denied", "asked", "accepted", "charged", "answered"] + [
        "asked", "waiting",
    ] * 2  # fmt: skip
    assert "no run has the name 'f'" in fails(capsys, "approve", folder, "f", "--yes")


@pytest.mark.parametrize("text", ["null", "{}", "[]", "[" * 100_000, "", "\0", '{"run": 1, "decision": null}'])
def test_a_damaged_approval_waits_again_and_holds_up_no_other(
    text: str, digits: DataSet, tmp_path: Path, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path, digits, **PRIVATE, approval="ask")
    waits = run(site)
    (place,) = (site.state / "approvals").glob("*.json")
    shown(capsys, "approve", folder, place.stem, "--yes")
    place.write_text(text)
    assert run(site, 1) == waits
    (other,) = [line.split()[0] for line in shown(capsys, "approve", folder).splitlines()]
    assert len(as_json(capsys, "status", folder)["waiting"]) == 1
    assert "is damaged; delete this file, and the run waits again" in fails(capsys, "approve", folder, place.stem)
    shown(capsys, "approve", folder, other, "--yes")
    assert wire.unpack(run(site, 1))[0]
    assert run(site) == waits
    assert [line.split()[0] for line in shown(capsys, "approve", folder).splitlines()] == [place.stem]


def test_the_words_of_a_server_move_no_cursor(
    digits: DataSet, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path, digits, approval="ask", methods=["real"], own_code=["a:\x1b[2J"])
    text = spec_of("real", digits, public="noise=9\x1b[2J").text()
    answer.answer(site, text, wire.pack({}, {"step": "select", "exchange": 0, "fields": {}}))
    answer.answer(site, text, wire.pack({}, {"step": "\x1b[2J", "exchange": "\x1b[2J", "fields": {}}))
    answer.answer(
        site, text.replace('"convnet', '"\\u001b[2Jconvnet'), wire.pack({}, {"step": "select", "exchange": 0})
    )
    (name,) = [line.split()[0] for line in shown(capsys, "approve", folder).splitlines()]
    for words in (["approve", folder, name, "--no"], ["status", folder], ["log", folder], ["ledger", folder]):
        assert "\x1b" not in shown(capsys, *words)


def test_runs_that_wait_fill_no_disk(
    digits: DataSet, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MOST_WAITING", 2)
    site = make_site(tmp_path, digits, **PRIVATE, approval="ask")
    assert len({run(site, number) for number in range(4)}) == 1
    assert len(decisions.waiting(site)) == 2


def test_a_paused_site_answers_nothing(
    site: SitePolicy, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(capsys, "pause", folder)
    assert error_of(run(site)) == "refused by the site: the site is paused; ask again later"
    assert as_json(capsys, "status", folder)["paused"] is True
    shown(capsys, "resume", folder)
    assert wire.unpack(run(site))[0]
    assert [line["what"] for line in log.read(site.state)] == [
        "paused", "asked", "refused", "resumed", "asked", "accepted", "charged", "answered",
    ]  # fmt: skip


def test_the_status_says_what_was_spent_and_by_whom(
    site: SitePolicy, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(capsys, "status", folder)["budget"]["left_share"] == 1
    run(site)
    run(site, 1)
    site_journal.append(site.state, {**log.read(site.state)[0], "n": 9, "request": "x"})  # of this very process
    found = as_json(capsys, "status", folder)
    assert [(each["releases"], each["answered"]) for each in found["runs"]] == [(1, 1), (1, 1)]
    assert found["budget"]["spent"]["record"]["epsilon"] > 1.3
    assert found["questions"] == {"asked": 3, "answered": 2, "refused": 0, "failed": 0, "waiting": 0}
    assert len(found["running"]) == 1
    assert found["health"]["is_well"] is True
    text = shown(capsys, "status", folder)
    assert "budget: epsilon 4 at delta 1e-05; 2 releases so far" in text
    metrics = shown(capsys, "status", folder, "--prometheus")
    for line in metrics.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) fedstill_site_\w+ .+|fedstill_site_\w+(\{\w+="\w+"\})? [-+.eInf\d]+', line)
    assert 'fedstill_site_questions{what="answered"} 2.0' in metrics
    shown(capsys, "status", folder, "--check")
    (site.state / "journal.head").unlink()
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            main(["site", "status", str(folder), "--check", *more])
        assert stopped.value.code == 1 and "journal.head can't be read" in capsys.readouterr().out
    found = as_json(capsys, "status", folder)
    assert found["health"]["is_well"] is False and "journal.head can't be read" in found["health"]["journal"]


def test_the_ledger_and_the_log_are_shown(
    site: SitePolicy, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run(site)
    found = as_json(capsys, "ledger", folder)
    assert [charge["number"] for charge in found["charges"]] == [1]
    assert found["charges"][0]["entry"]["mechanism"] in shown(capsys, "ledger", folder, "--all")
    assert [line["what"] for line in as_json(capsys, "log", folder)["log"]] == [
        "asked", "accepted", "charged", "answered",
    ]  # fmt: skip
    assert "fedavg-p.train_head" in shown(capsys, "log", folder)
    assert "the journal, with ledger and log, is whole: 1 releases" in shown(capsys, "log", folder, "--verify")
    data = site.state / "journal.jsonl"
    data.write_bytes(data.read_bytes().replace(b"answered", b"Answered"))
    with pytest.raises(SystemExit) as stop:
        main(["site", "log", str(folder), "--verify"])
    assert stop.value.code == 1
    assert "WRONG: " in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["html", "json"])
def test_the_evidence_is_one_file_without_the_words_of_failures(
    ending: str, site: SitePolicy, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run(site)
    log.write(site, {"run": "<script>"}, "failed", "the patient's pixels")
    place = folder / f"evidence.{ending}"
    shown(capsys, "log", folder, "--export", place)
    text = place.read_text()
    assert "patient" not in text
    assert "fedavg-p" in text and "sensitivity" in text
    if ending == "json":
        assert json.loads(text)["check"]["is_whole"] is True
    else:
        assert "Nothing was changed." in text
        assert "Run &lt;script&gt;" in text and "http://" not in text.replace("http://www.w3.org", "")
    assert "does not end in .html or .json" in fails(capsys, "log", folder, "--export", folder / "evidence.pdf")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fly"], "there is no command 'site fly'; choose "),
        (["status"], "the site's folder comes first: fedstill site status FOLDER"),
        (["status", "FOLDER", "more"], "'more' is an unexpected argument"),
        (["status", "nowhere"], "there is no policy 'nowhere/policy.toml'; make one with fedstill site init"),
        (["log", "FOLDER", "--export"], "--export needs a value"),
        (["log", "FOLDER", "--force"], "there is no flag --force; this command takes --json, --all"),
        (["log", "FOLDER", "--verfy"], "there is no flag --verfy; did you mean --verify? (fedstill site log --help)"),
        (["log", "FOLDER", "--json=maybe"], "--json is 'maybe'; it must be True or False"),
        (["log", "", "--all"], "the site's folder comes first: fedstill site log FOLDER"),
        (["log", "FOLDER", "--", "--all"], "there is no flag --;"),
        (["ledger", "FOLDER", "--verify"], "there is no flag --verify; this command takes --json, --all"),
        (["show", "FOLDER"], "show needs the number of an entry"),
        (["show", "FOLDER", "last"], "show needs the number of an entry"),
        (["approve", "FOLDER", "--yes"], "name the run, and give --yes or --no"),
        (["approve", "FOLDER", "abc"], "no run has the name 'abc'"),
    ],
)
def test_what_is_wrong_is_a_sentence(
    words: list[str], sentence: str, site: SitePolicy, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in fails(capsys, *(folder if word == "FOLDER" else word for word in words))


@pytest.mark.parametrize(
    "words",
    [
        "status FOLDER",
        "status FOLDER --prometheus",
        "ledger FOLDER",
        "log FOLDER",
        "log FOLDER --verify",
        "log FOLDER --export FOLDER/a.json",
        "show FOLDER 1",
        "check FOLDER",
        "pause FOLDER",
        "resume FOLDER",
        "approve FOLDER",
        "approve FOLDER 0 --yes",
    ],
)
def test_the_state_of_a_newer_version_is_refused_and_stays_as_it_is(
    words: str, site: SitePolicy, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ledger may count what this version does not."""
    site_journal.append(site.state, {"what": "asked", "detail": ""})
    (site.state / state_format.FORMAT).write_text('{"version": 4}')
    before = {place: place.read_bytes() for place in site.state.rglob("*") if place.is_file()}
    told = fails(capsys, *words.replace("FOLDER", str(folder)).split())
    assert "has the format 4; this fedstill reads formats up to 3, so install the newer fedstill" in told
    assert before == {place: place.read_bytes() for place in site.state.rglob("*") if place.is_file()}


def test_a_site_without_a_budget_is_said_to_release_nothing_or_anything(
    digits: DataSet, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With unprotected values a mechanism's releases leave too, and three pages said that nothing would."""
    for unprotected, words in ((False, "nothing is released"), (True, "releases have no limit")):
        place = tmp_path / str(unprotected)
        place.mkdir()
        settings = {**PRIVATE, "methods": ["fedavg-p", "fedavg"], "budget": None, "unprotected": unprotected}
        site = make_site(place, digits, **settings)
        folder = site.state.parent
        assert f"budget: none, so {words} at delta" in shown(capsys, "status", folder)
        assert f"no budget, so {words} at delta" in evidence.page(evidence.evidence(site))
        said = list(policies.words(site))
        words = "with the noise that the server asks for, which may be NONE, without a limit, as there is no budget"
        assert any(words in one for one in said) == unprotected
        assert not any("charged to the budget" in one for one in said)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"data": None}, "none, so that the site replies to nothing (data)"),
        ({"state_gb": 1e-9}, "state_gb reached, so that the site replies to nothing"),
        ({"refusals_per_day": 1}, "refusals_per_day reached, so that the site replies to nothing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_site_that_replies_to_nothing_is_not_well(policy: dict[str, Any], words: str, site: SitePolicy) -> None:
    log.write(site, {}, "refused", "a stranger's request")
    assert evidence.status(site)["health"]["is_well"]
    health = evidence.status(site.model_copy(update=policy))["health"]
    assert not health["is_well"] and words in (health["data"], health["limits"])


def test_the_status_says_what_fits_by_every_limit(site: SitePolicy, run: Run) -> None:
    run(site)
    limits = ({}, {"budget_per_run": 0.5}, {"max_releases": 1})
    whole, per_run, none = (evidence.status(site.model_copy(update=more))["budget"]["fits"] for more in limits)
    assert 2 < whole < 4 and (per_run, none) == (0.5, 0)


def test_the_evidence_counts_questions_by_what_became_of_them(site: SitePolicy, run: Run) -> None:
    """All that were neither answered nor failed were said to be refused, and lines of no run were left out."""
    run(site)
    log.write(site, {"run": "a"}, "asked", "")
    log.write(site, {}, "failed", "the policy can't be read")
    words = evidence.page(evidence.evidence(site))
    assert "2 runs asked 2 questions: 1 answered, 0 refused, 0 failed, 0 waiting, and 1 without an outcome" in words
    assert "Messages of no run: 1 failed." in words


def test_the_status_of_a_damaged_journal_counts_nothing(
    site: SitePolicy, run: Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(site)
    (site.state / "journal.head").unlink()
    said = shown(capsys, "status", folder)
    assert "how much of it is spent is unknown" in said and "one more release fits" not in said
    assert "releases so far" not in said


def test_a_release_without_noise_is_no_dash(
    digits: DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``status`` and ``ledger`` said "epsilon -", which reads as nothing spent."""
    site = make_site(tmp_path, digits, **{**PRIVATE, "budget": None, "unprotected": True})
    limits = Limits(public_images=True, delta=site.delta, budget=None, allow_unbounded=True)
    open_site_ledger(site.state, "a" * 32, limits).charge(entry(Unbounded(reason="no noise")))
    for words in (("status", site.state.parent), ("ledger", site.state.parent)):
        text = shown(capsys, *words)
        assert "per record: epsilon unbounded, as a release had no noise\n" in text and "epsilon -" not in text
    assert re.search(r"a{8} +- +1 +record +unbounded", shown(capsys, "ledger", site.state.parent))


def test_a_run_with_real_sites_has_no_partition(digits: DataSet, tmp_path: Path) -> None:
    """It was recorded as "iid", the default of the experiment's file, and so were its captions and rows."""
    sites = [make_site(tmp_path, digits, client) for client in range(2)]
    file = tmp_path / "run.yaml"
    file.write_text("{method: fedavg, data: digits, clients: 2, model: linear, seed: 1, fedavg: {rounds: 1}}")
    experiment, name, method = config.read_yaml(file)
    job = Job(experiment, method, tmp_path / "real", name=name, command="")
    run_with(job, sites=lambda spec: nullcontext(Direct(sites, spec)))
    task: dict[str, Any] = {"data": "digits", "clients": 2, "rounds": 1, "model": "linear", "workers": 0}
    simulated = fedstill.run("fedavg", out=tmp_path / "simulated", progress=False, **task)
    real = fedstill.read_run(tmp_path / "real")
    assert real.summary["partition"] == "sites" and simulated.summary["partition"] == "iid"
    assert words_of([real]) == "digits (the sites' own records, 2 clients)"
    assert words_of([real, simulated]) == "digits (partition iid or the sites' own records, 2 clients)"
    assert len(group([real, simulated])) == 2  # tasks, not two seeds of one row
    assert "the sites' own records" in live.live(tmp_path / "real").task
    (tmp_path / "real" / "summary.json").unlink()
    assert fedstill.read_run(tmp_path / "real", unfinished=True).summary["partition"] == "sites"
