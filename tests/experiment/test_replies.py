"""Other work of the server on the replies of a finished run."""

import json
from pathlib import Path
from typing import Any

import method_settings
import pytest

import fedstill
from fedstill import methods
from fedstill.cli import main
from fedstill.engines.client import Site
from fedstill.experiment import reuse
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.reuse import leave_out
from fedstill.experiment.run import run
from fedstill.runs.folder import RunFolder

TASK = {"data": "digits", "clients": 2, "limit": 80, "model": "convnet:width=8,depth=2", "workers": 0}
SERVER: dict[str, dict[str, Any]] = {
    "afl": {"ridge": 3.0},
    "co-boosting": {"epochs": 1},
    "deepafl": {"ridge": 3.0},
    "dense": {"epochs": 1},
    "fafi": {},
    "fed-adi": {"epochs": 1},
    "fed-dafl": {"epochs": 1},
    "fedaux": {"rounds": 1},
    "fedaux-f": {"student": "fresh"},
    "fedauxfdp": {"student": "fresh"},
    "fedavg-p": {},
    "fedcof": {"shrinkage": 3.0},
    "sim-pe": {"images": 7},
    "fedcvae": {"images": 40},
    "fedd-p": {"student": "fresh"},
    "fedd3": {"training": {"epochs": 1}},
    "feddf": {"distillation": {"epochs": 1}},
    "feddm": {"training": {"epochs": 1}},
    "fedgm": {"training": {"epochs": 1}},
    "fedgm-records": {"training": {"epochs": 1}, "ipc": 3},
    "fedlpa": {"solution": "expectation"},
    "fedsd2c": {"training": {"epochs": 1}},
    "real": {"training": {"epochs": 1}},
}
"""Settings of the server, which change no first reply."""
IN_ONE_ROUND = {"deepafl", "feddm", "sim-pe"}
"""Methods whose later rounds replace the first replies."""


def job(name: str, out: Path, **settings: Any) -> Job:
    public = {"public": "noise=40"} if methods.find(name).needs_public else {}
    both = {**method_settings.SMALL[name], **({"rounds": 1} if name in IN_ONE_ROUND else {}), **settings}
    if "epsilon" in methods.find(name).model_fields:
        both["epsilon"] = None  # noise is never the same again
    return Job(Experiment(**TASK, **public), methods.find(name)(**both), out, name=name)


def first_replies(folder: Path) -> dict[str, bytes]:
    """The replies to the first request, without their checksums, which cover the name of the journal."""
    return {place.name: place.read_bytes()[32:] for place in folder.glob("journal/000000-*/*.reply")}


def test_all_methods_that_say_so_are_here() -> None:
    saying = [name for name in methods.TABLE if methods.find(name)().first_reply is not None]
    sums = {"fedcgs", "fedcgs-p", "fedpft", "gh-ofl", "safle"}  # test_moments.py
    assert set(saying) - sums == set(SERVER)


def test_a_run_on_the_replies_of_another_says_so_and_not_that_it_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where that one ran in another environment; a second start of its own does resume."""
    words = "run real --data digits --limit 80 --clients 2 --model convnet:width=8,depth=2 --workers 0".split()
    words += ["--training.epochs", "1"]
    main([*words, "--out", str(tmp_path / "first")])
    place = tmp_path / "first" / "environment.jsonl"
    place.write_text(place.read_text().replace('"torch": "', '"torch": "0.'))
    again = ["run", "--replies", str(tmp_path / "first"), "real", "--training.epochs", "2"]
    again += ["--out", str(tmp_path / "second")]
    capsys.readouterr()
    main(again)
    told = " ".join(capsys.readouterr().out.split())
    assert f"2 of 2 replies are those of {tmp_path / 'first'}" in told and "resuming" not in told
    assert f"the replies of {tmp_path / 'first'} are from another environment (torch was 0." in told
    before, own = RunFolder(tmp_path / "second").read_environments()
    assert before["of"] == str(tmp_path / "first") and "of" not in own
    (tmp_path / "second" / "summary.json").unlink()
    main(again)
    assert "resuming: 2 of 2 replies kept" in capsys.readouterr().out
    third = ["--replies", str(tmp_path / "second"), "real", "--training.epochs", "3", "--out", str(tmp_path / "third")]
    main(["run", *third])  # its replies are still those of the first
    told = " ".join(capsys.readouterr().out.split())
    assert f"the replies of {tmp_path / 'first'} are from another environment (torch was 0." in told


@pytest.mark.parametrize("name", SERVER)
def test_first_replies_depend_on_the_settings_that_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that reads any other setting would make a reused reply a wrong one."""
    kind, read, inside = methods.find(name), set[str](), list[int]()
    answer, get = Site.answer, kind.__getattribute__

    def listening(self: Site, *rest: Any, **more: Any) -> Any:
        inside.append(1)
        try:
            return answer(self, *rest, **more)
        finally:
            inside.pop()

    def noting(self: Any, attribute: str) -> Any:
        if inside and attribute in kind.model_fields:
            read.add(attribute)
        return get(self, attribute)

    monkeypatch.setattr(Site, "answer", listening)
    monkeypatch.setattr(kind, "__getattribute__", noting)
    run(job(name, tmp_path / "run", **({"rounds": 1} if "rounds" in kind.model_fields else {})))
    monkeypatch.undo()
    assert read
    plain, named = kind(), set[str]()
    for field in kind.model_fields:

        class Other:
            """Equal to nothing else."""

        changed = plain.model_copy(update={field: Other()})
        if changed.first_reply != plain.first_reply:
            named.add(field)
    assert read - named <= ({"local"} if name == "fedaux" else set())  # which a later step reads


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, settings in SERVER.items() if settings])
def test_reused_replies_make_the_model_that_new_ones_would(name: str, tmp_path: Path) -> None:
    first, other = job(name, tmp_path / "first"), job(name, tmp_path / "alone", **SERVER[name])
    run(first)
    alone = run(other)
    reusing = reuse.repeat(first.out, other.replace(out=tmp_path / "reused"))
    for place in (tmp_path / "reused" / "journal").glob("000000-*/*.reply"):
        assert place.samefile(next((tmp_path / "first" / "journal").glob(f"000000-*/{place.name}")))
    reused = run(reusing)
    assert first_replies(tmp_path / "reused") == first_replies(tmp_path / "alone")
    models = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "alone", "reused")]
    assert models[0] != models[1] == models[2]
    counted = ("accuracy", "bytes_up", "bytes_down", "refused", "guarantee", "rounds")
    assert [alone[key] for key in counted] == [reused[key] for key in counted]


def test_replies_that_suit_their_own_method_alone_are_not_offered_to_others(tmp_path: Path) -> None:
    first = job("fedavg-p", tmp_path / "first")
    run(first)
    other = job("fedd-p", tmp_path / "other")
    with pytest.raises(ValueError, match="the replies of fedavg-p suit no other method; run fedd-p without --replies"):
        reuse.repeat(first.out, other)


def test_the_command_takes_the_clients_settings_from_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "runs" / "first"
    local = {"local": {"lr": 0.03, "epochs": 1}, "local_norm": "frozen-after-first", "epochs": 1}
    run(job("dense", first, **local))
    monkeypatch.setattr(Site, "answer", lambda *rest, **more: pytest.fail("a client was asked"))
    more = ["--epochs", "1", "--inversion.steps", "2", "--quiet"]
    main(["run", "--replies", str(first), "fed-adi", *more])
    again = first.with_name("first-fed-adi")
    config = json.loads((again / "config.json").read_text())
    assert config["method"]["local"]["lr"] == 0.03 and config["method"]["local_norm"] == "frozen-after-first"
    assert config["method"]["inversion"]["steps"] == 2 and config["answers"] == str(first)
    assert first_replies(again) == first_replies(first)
    capsys.readouterr()
    for words, told in (
        ([str(first), "fed-adi", "--local.lr", "0.1"], "do other work than those of"),
        ([str(first), "fedgm"], "its replies suit feddf, dense, co-boosting, fed-dafl, fed-adi with"),
        ([str(first), "fed-adi", "--seed", "1"], "its replies are of that task"),
        ([str(first), "fed-adi", "--epochs", "2"], "has a run with"),
        ([str(first)], "--replies needs a finished run and a method"),
        ([str(first), "feddfs"], "feddf"),
        ([str(tmp_path / "none"), "feddf"], "none"),
        ([str(first), "fed-adi", "--dry-run"], "--dry-run estimates a new run"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["run", "--replies", *words])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and told in said and said.count("\n") == 1, said


def test_the_replies_of_real_sites_serve_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "first"
    run(job("fedgm", first))
    (first / "partition.json").unlink()  # as after a deployment
    monkeypatch.setattr(Site, "answer", lambda *rest, **more: pytest.fail("a client was asked"))
    main(
        ["run", "--replies", str(first), "fedgm", "--training.epochs", "1", "--out", str(tmp_path / "again"), "--json"]
    )
    assert json.loads((tmp_path / "again" / "summary.json").read_text())["bytes_up"] > 0


def test_a_run_of_several_rounds_has_its_first_replies_no_more(tmp_path: Path) -> None:
    run(job("feddm", tmp_path / "first", rounds=2))
    other = job("feddm", tmp_path / "other", rounds=2, training={"epochs": 1})
    with pytest.raises(ValueError, match="has no reply to its first request any more"):
        reuse.repeat(tmp_path / "first", other)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_sweep_over_the_server_s_settings_asks_the_clients_once(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        """
data: digits
clients: 2
limit: 80
model: convnet:width=8,depth=2
validation: 0.2
methods:
  fedgm:
    ipc: 2
    matching: {nets: 2, batch_size: 16}
    try: {training.epochs: [1, 2, 3]}
"""
    )
    main(["sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"), "--parallel", "1"])
    replies = {place.stat().st_ino for place in (tmp_path / "out").rglob("00000.reply")}
    assert len(list((tmp_path / "out").rglob("00000.reply"))) == 3 and len(replies) == 1


def test_a_private_reply_is_not_released_again(tmp_path: Path) -> None:
    task = {**TASK, "public": "noise=40", "mean": (0.5,), "std": (0.25,), "num_classes": 10, "budget": 1.0}
    small = {**method_settings.SMALL["fedd-p"], "epsilon": 1.0}
    kind = methods.find("fedd-p")
    first = run(Job(Experiment(**task), kind(**small), tmp_path / "first"))
    other = Job(Experiment(**task), kind(**small, student="fresh"), tmp_path / "other")
    second = run(reuse.repeat(tmp_path / "first", other))
    assert first["guarantee"] == second["guarantee"] and first["guarantee"]["holds"]
    assert first_replies(tmp_path / "first") == first_replies(tmp_path / "other")  # the noise is the same too
    assert not list((tmp_path / "other").rglob("ledger.jsonl"))


# ------------------------------------------------------------------------------------- replies that are not the same


OWN = """
from fedstill.methods.feddf import FedDF
from fedstill.methods.parts import model_uploads
from fedstill.protocol import step
from fedstill.methods.parts.model_uploads import Upload

FACTOR = 0.0

class {name}(FedDF):
    @step
    def train(self, client) -> Upload:
        reply = model_uploads.local_upload(client, client.new_model(), self)
        weights = {{k: FACTOR * w for k, w in reply.weights.items()}}
        return Upload(architecture=reply.architecture, weights=weights, num_records=reply.num_records)
"""


def own_job(place: str, out: Path, **task: Any) -> Job:
    settings = {**method_settings.SMALL["feddf"]}
    return Job(Experiment(**{**TASK, "public": "noise=40", **task}), methods.find(place)(**settings), out, name=place)


def test_a_class_derived_from_a_method_has_clients_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "derived_method.py").write_text(OWN.format(name="Mine"))
    monkeypatch.chdir(tmp_path)
    first, own = job("feddf", tmp_path / "first"), own_job("derived_method.py:Mine", tmp_path / "own")
    run(first)
    assert own.method.first_reply == first.method.first_reply
    reuse.prepare(own, [first.out])
    assert not own.out.exists()
    with pytest.raises(ValueError, match="do other work than those of"):
        reuse.repeat(first.out, own)
    run(own)
    again = own_job("derived_method.py:Mine", tmp_path / "again")
    again = again.replace(method=again.method.model_copy(update={"start": "fresh"}))
    assert first_replies(run_of(reuse.repeat(own.out, again))) == first_replies(own.out)
    assert reuse.first_work(own) is not None  # with a budget it may release again, of which no ledger would know
    assert reuse.first_work(own_job("derived_method.py:Mine", tmp_path / "x", budget=1.0)) is None


def run_of(job: Job) -> Path:
    run(job)
    return job.out


def test_changed_code_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changing_method.py").write_text(OWN.format(name="Mine"))
    monkeypatch.chdir(tmp_path)
    first = own_job("changing_method.py:Mine", tmp_path / "first")
    run(first)
    other = own_job("changing_method.py:Mine", tmp_path / "other")
    monkeypatch.setattr(Job, "own_code", lambda self: {"changing_method.py:Mine": "of other code"})
    reuse.prepare(other, [first.out])
    assert not other.out.exists()
    with pytest.raises(ValueError, match="another version of the code of changing_method.py:Mine"):
        reuse.repeat(first.out, other)


def test_a_run_of_several_rounds_is_not_reused_and_no_byte_counts_twice(tmp_path: Path) -> None:
    first = job("feddm", tmp_path / "first", rounds=2)
    run(first)
    other = job("feddm", tmp_path / "other", rounds=2, training={"epochs": 1})
    reuse.prepare(other, [first.out])
    assert not other.out.exists()
    task = {**TASK, "clients": 5, "drop": 0.4, "min_clients": 1}
    real = methods.find("real")
    one = Job(Experiment(**task), real(**method_settings.SMALL["real"]), tmp_path / "one")
    two = one.replace(method=real(**{**method_settings.SMALL["real"], "training": {"epochs": 1}}), out=tmp_path / "two")
    before = run(one)
    reuse.prepare(two, [one.out])
    assert before["refused"] and two.out.exists()
    assert run(two)["bytes_down"] == before["bytes_down"]
    three = two.replace(out=tmp_path / "three")
    after = run(reuse.repeat(one.out, three))
    assert (after["bytes_down"], after["refused"]) == (before["bytes_down"], before["refused"])


@pytest.mark.parametrize(
    "place", ["config.json", "journal/meter.jsonl", "journal/spent.jsonl"], ids=["facts", "bytes", "releases"]
)
def test_a_damaged_neighbour_is_passed_over(place: str, tmp_path: Path) -> None:
    first = job("real", tmp_path / "first")
    run(first)
    (first.out / place).write_text("{\n")
    reuse.prepare(job("real", tmp_path / "other", training={"epochs": 1}), [first.out])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"local_test": 0.2}, "the sites of .* evaluate the model"), ({}, "asks in 2 rounds, and no site of")],
)
def test_what_would_ask_real_sites_again_is_refused_before_it_begins(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    task = {**TASK, "public": "noise=40", **changes}
    small, kind = method_settings.SMALL["dense"], methods.find("dense")
    run(Job(Experiment(**task), kind(**small), tmp_path / "first"))
    (tmp_path / "first" / "partition.json").unlink()
    other = Job(Experiment(**task), kind(**{**small, "rounds": 1 if changes else 2}), tmp_path / "other")
    with pytest.raises(ValueError, match=sentence):
        reuse.repeat(tmp_path / "first", other)
    assert not (tmp_path / "other").exists()


def of_version(run: Path, version: str, **more: Any) -> None:
    """Let another version of fedstill have written a run."""
    for name in ("config.json", "summary.json"):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**content, "version": version, **more}))


@pytest.mark.parametrize("version", ["0.0.1", "99.0.0"])
def test_replies_of_another_version_serve_if_the_format_is_the_same(version: str, tmp_path: Path) -> None:
    first, other = job("real", tmp_path / "first"), job("real", tmp_path / "other", training={"epochs": 1})
    run(first)
    of_version(first.out, version)
    run(reuse.repeat(first.out, other))
    run(other.replace(out=tmp_path / "alone"))
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("other", "alone")]
    assert models[0] == models[1]
    begun = RunFolder(other.out).read_config()
    assert begun.version == RunFolder(other.out).read_summary().version == fedstill.__version__
    of_version(other.out, version)  # a run in progress stays with the version that began it
    (other.out / "summary.json").unlink()
    with pytest.raises(ValueError, match=f"was begun with version {version}"):
        run(other)


def test_replies_of_another_format_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    first = job("real", tmp_path / "first")
    run(first)
    of_version(first.out, "99.0.0", format=2)
    with pytest.raises(ValueError, match=r"has the format 2; .*install fedstill 99.0.0"):
        reuse.repeat(first.out, job("real", tmp_path / "other", training={"epochs": 1}))
    assert not (tmp_path / "other").exists()


def test_a_comparison_asks_anew_after_a_change_of_version(tmp_path: Path) -> None:
    first = job("real", tmp_path / "first")
    run(first)
    of_version(first.out, "0.0.1")
    reuse.prepare(job("real", tmp_path / "other", training={"epochs": 1}), [first.out])
    assert not (tmp_path / "other").exists()


def test_settings_that_are_valid_together_only_are_taken_together() -> None:
    """A teacher is for soft labels, and FedPFT's epsilon for one component."""
    kind = methods.find("fedgm")
    soft = kind(soft_labels=True, teacher={"epochs": 2}, ipc=3)
    taken = reuse.with_client_settings(kind(training={"epochs": 7}), soft)
    assert taken == soft.model_copy(update={"training": taken.training}) and taken.training.epochs == 7
    sums = methods.find("gh-ofl")(classifier="qda", epsilon=2.0, space={"dims": 9})
    pft = reuse.with_client_settings(methods.find("fedpft")(), sums)
    assert (pft.first_reply == sums.first_reply) == (pft.epsilon == 2.0)


def test_a_folder_without_a_client_has_other_replies(tmp_path: Path) -> None:
    base, fewer, again = (tmp_path / name for name in ("base", "fewer", "again"))
    run(job("real", base))
    run(leave_out(base, 1, job("real", fewer)))
    with pytest.raises(ValueError, match="fewer has another run; choose another folder with --out"):
        reuse.repeat(base, job("real", fewer))
    run(reuse.repeat(base, job("real", again)))
    with pytest.raises(ValueError, match="again has another run"):
        leave_out(base, 1, job("real", again))
    few = reuse.repeat(fewer, job("real", tmp_path / "other").replace(experiment=few_needed(fewer)))
    assert [refusal["client"] for refusal in run(few)["refused"]] == [1]
    assert [refusal["client"] for refusal in run(reuse.repeat(fewer, few))["refused"]] == [1]  # finished before


def few_needed(run: Path) -> Experiment:
    return Experiment(**{**RunFolder(run).read_config().experiment, "min_clients": 1})
