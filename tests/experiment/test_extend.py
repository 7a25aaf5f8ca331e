import hashlib
import json
from pathlib import Path
from typing import Any

import late
import pytest

import fedstill
from fedstill.base.files import Damaged
from fedstill.cli import main
from fedstill.experiment import reuse
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.reuse import leave_out, read_job
from fedstill.experiment.run import run
from fedstill.methods import find
from fedstill.protocol.wire import unpack
from fedstill.train.sgd import SGD

MODELS = {"rounds": 1, "local": {"lr": 0.05}}
HEADS = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}}


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a file called by a client's number keeps that client away."""
    folder = tmp_path / "away"
    folder.mkdir()
    monkeypatch.setenv(late.AWAY, str(folder))
    return folder


def job(out: Path, name: str = "late:LateModels", **changes: Any) -> Job:
    task = {"data": "digits", "clients": 4, "model": "convnet:width=8,depth=2", "workers": 0, "min_clients": 3}
    settings = HEADS if name == "late:LateHeads" else {"rounds": 1} if name == "late:LateRep" else MODELS
    if name == "late:LateHeads":
        task["public"] = "noise=64"
    return Job(Experiment(**{**task, **changes}), find(name)(**settings), out, name=name)


def extended(finished: Path, out: Path) -> dict[str, Any]:
    again = read_job(finished, out, "")
    reuse.begin(finished, again)
    return run(again)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()
    }


@pytest.mark.parametrize("name", ["late:LateModels", "late:LateHeads"])
def test_a_late_client_s_reply_makes_the_model_of_a_run_that_missed_nobody(
    name: str, away: Path, tmp_path: Path
) -> None:
    whole = run(job(tmp_path / "whole", name))
    (away / "2").touch()
    partial = run(job(tmp_path / "run", name))
    assert [refusal["client"] for refusal in partial["refused"]] == [2]
    before = digests(tmp_path / "run")
    (away / "2").unlink()
    summary = extended(tmp_path / "run", tmp_path / "out")
    assert digests(tmp_path / "run") == before
    assert summary["refused"] == []
    assert unpack((tmp_path / "out" / "model.safetensors").read_bytes())[1]["model"] == "convnet:width=8,depth=2"
    parts = [(tmp_path / f / "model.safetensors").read_bytes() for f in ("whole", "run", "out")]
    assert parts[2] == parts[0] != parts[1]
    assert summary["accuracy"] == whole["accuracy"]
    meter = [json.loads(line) for line in (tmp_path / "out" / "journal" / "meter.jsonl").read_text().splitlines()]
    assert sorted(line["client"] for line in meter if "down" in line) == [0, 1, 2, 2, 3]
    assert summary["bytes_down"] * 4 == whole["bytes_down"] * 5
    assert run(read_job(tmp_path / "run", tmp_path / "out", "")) == summary


def test_an_extension_evaluates_every_client_with_its_own_part(away: Path, tmp_path: Path) -> None:
    """Those that had replied before lost their own heads when the run had finished, and were judged without."""
    whole = run(job(tmp_path / "whole", "late:LateRep", local_test=0.2))
    (away / "2").touch()
    run(job(tmp_path / "run", "late:LateRep", local_test=0.2))
    (away / "2").unlink()
    summary = extended(tmp_path / "run", tmp_path / "out")
    assert summary["refused"] == [] and summary["accuracy_of_clients"] == whole["accuracy_of_clients"]
    assert not (tmp_path / "out" / "clients").exists() and (tmp_path / "run" / "clients").exists()


def test_what_a_client_released_before_it_failed_still_counts(away: Path, tmp_path: Path) -> None:
    (away / "2").touch()
    run(job(tmp_path / "run", "late:LateHeads", noise="entropy"))
    (away / "2").unlink()
    summary = extended(tmp_path / "run", tmp_path / "out")
    spent = [json.loads(line) for line in (tmp_path / "out" / "journal" / "spent.jsonl").read_text().splitlines()]
    assert [len(line["spent"]) for line in spent if line["client"] == 2] == [1, 2]
    assert summary["guarantee"]["epsilon"] > 1.3  # of client 2, twice 1


def test_an_extension_that_died_goes_on(away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (away / "2").touch()
    run(job(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr("fedstill.base.files.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            extended(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [refusal["client"] for refusal in extended(tmp_path / "run", tmp_path / "out")["refused"]] == [2]
    (away / "2").unlink()
    assert extended(tmp_path / "out", tmp_path / "again")["refused"] == []  # an extension can be extended


def test_only_what_can_be_extended_is(away: Path, tmp_path: Path) -> None:
    def refusal(finished: Path, **changes: Any) -> str:
        with pytest.raises(ValueError, match=r"\S") as caught:
            again = read_job(finished, tmp_path / "out", "")
            reuse.begin(finished, again.replace(experiment=again.experiment.model_copy(update=changes)))
        return str(caught.value)

    run(job(tmp_path / "whole"))
    assert "all 4 clients of" in refusal(tmp_path / "whole")
    (away / "2").touch()
    finished = tmp_path / "run"
    run(job(finished))
    assert "seed = 0, not 1; an extension may change the clients only" in refusal(finished, seed=1)
    assert "--clients is 5;" in refusal(finished, clients=5)
    assert "there is no folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert "is not empty" in refusal(finished)
    (tmp_path / "out" / "thesis.tex").unlink()
    (finished / "summary.json").unlink()
    assert "summary.json is missing" in refusal(finished)
    twice = job(tmp_path / "twice")
    run(twice.replace(method=find(twice.name)(**{**MODELS, "rounds": 2})))
    assert "made 2 requests; only a one-shot run can be extended" in refusal(tmp_path / "twice")


def test_real_sites_are_asked_by_flower(away: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (away / "2").touch()
    finished = tmp_path / "run"
    run(job(finished))
    (finished / "partition.json").unlink()  # as a deployment leaves it
    with pytest.raises(SystemExit):
        main(["run", "--extend", str(finished)])
    assert f'\'extend="{finished}" out="{finished}-extended"\'' in capsys.readouterr().err
    again = read_job(finished, tmp_path / "out", "")
    more = again.replace(experiment=again.experiment.model_copy(update={"clients": 6}))
    reuse.begin(finished, more)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["experiment"]["clients"] == 6


LOCAL = ["--local.epochs", "1", "--local.lr", "0.05"]
SMALL = "--data digits --clients 3 --model dense-mnist --workers 0 --public noise=64".split()
FEDDF = ["--distillation.epochs", "1", *LOCAL]
DAFL = ["--epochs", "1", "--generation.steps", "1", "--generation.batch-size", "20", *LOCAL]


def test_a_comparison_asks_for_the_same_models_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    fit = SGD.fit
    monkeypatch.setattr(SGD, "fit", lambda self, *rest, **more: (trained.append(self.lr), fit(self, *rest, **more))[1])
    main(["run", "fed-dafl", *SMALL, *DAFL, "--out", str(tmp_path / "alone")])
    before = trained.count(0.05)
    prefixed = [
        f"--{name}.{word[2:]}" if word.startswith("--") else word
        for name, words in (("feddf", FEDDF), ("fed-dafl", DAFL))
        for word in words
    ]
    main(["compare", "feddf", "fed-dafl", *SMALL, *prefixed, "--out", str(tmp_path / "both")])
    assert before == trained.count(0.05) - before == 3
    alone, again = tmp_path / "alone", tmp_path / "both" / "fed-dafl" / "seed-0"
    assert (alone / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (alone, again)]
    counted = ("accuracy", "bytes_up", "bytes_down", "refused", "guarantee", "rounds")
    assert [summaries[0][key] for key in counted] == [summaries[1][key] for key in counted]
    assert json.loads((again / "config.json").read_text())["answers"] == str(tmp_path / "both" / "feddf" / "seed-0")


@pytest.mark.parametrize(
    "change", [{"local": {"epochs": 2}}, {"local_view": "crop"}, {"local_loss": "ldam"}, "seed", "begun", "other"]
)
def test_other_questions_are_asked_anew(tmp_path: Path, change: dict[str, Any] | str) -> None:
    task = {"data": "digits", "clients": 3, "model": "dense-mnist", "workers": 0, "public": "noise=64"}
    settings = {"local": {"epochs": 1}, "distillation": {"epochs": 1}}
    first = Job(Experiment(**task), find("feddf")(**settings), tmp_path / "first")
    run(first)
    settings = settings | {"start": "fresh"} | (change if isinstance(change, dict) else {})
    out = tmp_path / "out"
    name = "late:LateModels" if change == "other" else "feddf"
    method = find(name)(**({} if change == "other" else settings))
    if change == "begun":
        out.mkdir()
        (out / "config.json").touch()
    reuse.prepare(Job(Experiment(**task, seed=int(change == "seed")), method, out, name=name), [first.out])
    assert not (out / "journal").exists()
    if change == "seed":  # all else was equal
        reuse.prepare(first.replace(method=method, out=out), [first.out])
        assert len(list((out / "journal" / "000000-train").glob("*.reply"))) == 3


def test_the_command_says_what_it_did(away: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (away / "2").touch()
    run(job(tmp_path / "run"))
    (away / "2").unlink()
    main(["run", "--extend", str(tmp_path / "run"), "--min-clients", "4"])
    summary = json.loads((tmp_path / "run-extended" / "summary.json").read_text())
    assert summary["refused"] == []
    assert json.loads((tmp_path / "run-extended" / "config.json").read_text())["extends"] == str(tmp_path / "run")
    assert "report.html" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["run", "--extend"])
    assert "--extend needs a finished run" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- without a client


def left_out(finished: Path, client: int, out: Path, **changes: Any) -> dict[str, Any]:
    again = read_job(finished, out, "")
    again = again.replace(experiment=again.experiment.model_copy(update=changes))
    return run(leave_out(finished, client, again))


@pytest.mark.parametrize("name", ["late:LateModels", "late:LateHeads"])
def test_a_client_that_is_left_out_leaves_the_model_that_the_others_would_have_made(
    name: str, away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job(tmp_path / "whole", name, min_clients=None))
    before = digests(tmp_path / "whole")
    (away / "2").touch()
    others = run(job(tmp_path / "others", name))
    for client in "013":
        (away / client).touch()  # nobody is asked
    summary = left_out(tmp_path / "whole", 2, tmp_path / "out")
    assert digests(tmp_path / "whole") == before
    parts = [(tmp_path / f / "model.safetensors").read_bytes() for f in ("whole", "others", "out")]
    assert parts[0] != parts[1] == parts[2]
    assert summary["accuracy"] == others["accuracy"]
    assert summary["guarantee"] == others["guarantee"]
    assert [(r["client"], r["reason"]) for r in summary["refused"]] == [(2, "its reply was withdrawn (--without)")]
    for name in ("meter.jsonl", "spent.jsonl"):
        place = tmp_path / "out" / "journal" / name
        lines = place.read_text().splitlines() if place.exists() else []
        assert all(json.loads(line)["client"] != 2 for line in lines)
    left_out(tmp_path / "out", 0, tmp_path / "again")  # and another one, whose missing client stays missing
    assert {r["client"] for r in run(read_job(tmp_path / "out", tmp_path / "again", ""))["refused"]} == {0, 2}


@pytest.mark.parametrize("kept", [0, 1])
def test_releases_that_the_journal_lost_are_those_that_the_replies_list(kept: int, away: Path, tmp_path: Path) -> None:
    run(job(tmp_path / "whole", "late:LateHeads", min_clients=None))
    expected = left_out(tmp_path / "whole", 3, tmp_path / "out")["guarantee"]
    assert expected["epsilon"] > 0.1
    lost = leave_out(tmp_path / "whole", 3, read_job(tmp_path / "whole", tmp_path / "lost", ""))
    for folder in (lost.out, tmp_path / "whole"):
        spent = folder / "journal" / "spent.jsonl"
        spent.write_bytes(b"".join(spent.read_bytes().splitlines(keepends=True)[:kept]))
    assert run(lost)["guarantee"] == expected
    with pytest.raises(Damaged, match="spent.jsonl is missing, or not the file that .*summary.json is of"):
        left_out(tmp_path / "whole", 3, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_private_reply_that_is_lost_is_not_released_anew(away: Path, tmp_path: Path) -> None:
    """The second release, with other noise, was in no sum: it is refused, by a run that extends or repeats too."""
    run(job(tmp_path / "whole", "late:LateHeads", noise="entropy"))
    (tmp_path / "whole" / "journal" / "000000-train_head" / "00002.reply").unlink()
    extension = read_job(tmp_path / "whole", tmp_path / "more", "")
    with pytest.raises(Damaged, match="client 2 has released private values to .*whole, but neither the reply nor"):
        reuse.begin(tmp_path / "whole", extension)
    assert not (tmp_path / "more").exists()
    other = reuse.repeat(tmp_path / "whole", read_job(tmp_path / "whole", tmp_path / "other", ""))
    with pytest.raises(Damaged, match="client 2 has released private values"):
        run(other)
    assert not list(tmp_path.rglob("other/**/00002.reply"))
    anew = read_job(tmp_path / "whole", tmp_path / "anew", "")
    reuse.prepare(anew, [tmp_path / "whole"])  # a comparison asks everybody, rather than this one alone
    assert not anew.out.exists()


def test_a_reply_that_is_lost_comes_again_where_its_noise_is_the_seed_s(away: Path, tmp_path: Path) -> None:
    whole = run(job(tmp_path / "whole", "late:LateHeads"))
    (tmp_path / "whole" / "journal" / "000000-train_head" / "00002.reply").unlink()
    assert extended(tmp_path / "whole", tmp_path / "more")["accuracy"] == whole["accuracy"]
    assert fedstill.read_run(tmp_path / "more").guarantee == fedstill.read_run(tmp_path / "whole").guarantee


def test_only_a_reply_that_is_there_can_be_left_out(away: Path, tmp_path: Path) -> None:
    (away / "2").touch()
    run(job(tmp_path / "run"))
    for client, words in ((2, "has no reply of client 2; it has those of 0, 1, 3"), (9, "has no reply of client 9")):
        with pytest.raises(ValueError, match=words):
            left_out(tmp_path / "run", client, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    left_out(tmp_path / "run", 0, tmp_path / "out")
    with pytest.raises(ValueError, match="has another run"):
        left_out(tmp_path / "out", 1, tmp_path / "out")
    left_out(tmp_path / "out", 1, tmp_path / "two")
    with pytest.raises(ValueError, match="client 3 is the only one"):
        left_out(tmp_path / "two", 3, tmp_path / "three")
    twice = job(tmp_path / "twice")
    run(twice.replace(method=find(twice.name)(**{**MODELS, "rounds": 2})))
    with pytest.raises(ValueError, match="only a one-shot run can be repeated without a client"):
        left_out(tmp_path / "twice", 0, tmp_path / "x")


def test_a_folder_without_one_client_is_not_taken_for_one_without_another(away: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run(job(whole, min_clients=None))
    left_out(whole, 3, tmp_path / "out")
    for _ in range(2):  # a withdrawal that is done is done
        assert [r["client"] for r in left_out(whole, 3, tmp_path / "out")["refused"]] == [3]
    with pytest.raises(ValueError, match="out has another run; choose another folder with --out"):
        left_out(whole, 2, tmp_path / "out")
    (away / "2").touch()
    slow = tmp_path / "slow"
    run(job(slow))
    left_out(slow, 0, tmp_path / "fewer")
    with pytest.raises(ValueError, match="fewer has another run"):  # of the same replies
        reuse.begin(slow, read_job(slow, tmp_path / "fewer", ""))


def test_an_extension_may_need_the_slow_clients(tmp_path: Path) -> None:
    task = Experiment(
        data="digits", limit=80, clients=4, model="linear", workers=0, slow=0.5, min_clients=2, public="noise=9"
    )
    begun = Job(task, find("fedavg")(rounds=1), tmp_path / "run")
    assert len(run(begun)["refused"]) == 2
    again = read_job(tmp_path / "run", tmp_path / "out", "")
    every = again.replace(experiment=again.experiment.model_copy(update={"min_clients": 4}))
    with pytest.raises(ValueError, match="leaves 2 of 4 clients, but --min-clients is 4"):
        run(every)
    reuse.begin(tmp_path / "run", every)
    assert run(every)["refused"] == []


def test_the_command_leaves_a_client_out(away: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(job(tmp_path / "run"))
    for spelling in (tmp_path / "run", away / ".." / "run"):  # the second time it is finished
        main(["run", "--without", "1", str(spelling), "--quiet", "--out", str(tmp_path / "run-without-1")])
    (refused,) = json.loads((tmp_path / "run-without-1" / "summary.json").read_text())["refused"]
    assert refused["client"] == 1
    for words, told in (
        (["--without"], "--without needs a client's number and a finished run"),
        (["--without", "x", str(tmp_path / "run")], "--without needs a client's number"),
        (["--without", "1", str(tmp_path / "run"), "--seed", "5"], "with its own settings, but seed = 0, not 5"),
        (["--without", "8", str(tmp_path / "run")], "has no reply of client 8"),
        (["--without", "1", str(tmp_path / "run"), "--min-clients", "2"], "leave --min-clients out"),
        (["--without", "1", str(tmp_path / "run"), "--out", str(tmp_path / "run")], "has another run"),
        (["--extend", str(tmp_path / "run-without-1")], "the reply of client 1 was withdrawn"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["run", *words])
        assert stopped.value.code == 2
        assert told in capsys.readouterr().err
    main(["run", "--without", "--help"])
    assert "usage: fedstill run --without CLIENT RUN" in capsys.readouterr().out


def of_version(run: Path, version: str) -> None:
    """Let another version of fedstill have written a run."""
    for name in ("config.json", "summary.json"):
        (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), "version": version}))


@pytest.mark.parametrize("version", ["0.0.1", "0.1.99"])
def test_a_client_is_left_out_of_a_run_of_another_version(
    version: str, away: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise an upgrade would take away the right to withdraw."""
    run(job(tmp_path / "run"))
    left_out(tmp_path / "run", 1, tmp_path / "same")
    of_version(tmp_path / "run", version)
    main(["run", "--without", "1", str(tmp_path / "run"), "--quiet"])
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("same", "run-without-1")]
    assert models[0] == models[1]
    content = json.loads((tmp_path / "run-without-1" / "config.json").read_text())
    assert content["version"] == fedstill.__version__ and content["answers"] == str(tmp_path / "run")


def test_an_extension_needs_the_version_of_the_run_and_leaves_no_folder(away: Path, tmp_path: Path) -> None:
    (away / "2").touch()
    run(job(tmp_path / "run"))
    of_version(tmp_path / "run", "0.0.1")
    (away / "2").unlink()
    with pytest.raises(ValueError, match="is of fedstill 0.0.1, and this is .*, so install fedstill 0.0.1"):
        extended(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
