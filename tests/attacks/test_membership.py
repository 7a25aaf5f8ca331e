"""``fedstill attack``: finds members where a model remembers them, goes on after a crash, asks nobody in vain."""

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from doubles import Killed

from fedstill.attacks import membership as attack
from fedstill.attacks import results as attack_report
from fedstill.attacks.membership import Membership, membership, membership_design, place_of
from fedstill.base import files
from fedstill.cli import main
from fedstill.data import own
from fedstill.data.places import Reading
from fedstill.engines import server
from fedstill.engines.transport import Watcher
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.reuse import leave_out, read_job
from fedstill.experiment.run import run
from fedstill.experiment.task import share_out
from fedstill.methods import find
from fedstill.privacy.guarantee import Guarantee, derive
from fedstill.protocol import wire
from fedstill.report.record import find_runs
from fedstill.runs.folder import RunFolder

OVERFITTED = {"rounds": 1, "local": {"lr": 0.1, "epochs": 30, "batch_size": 16}}
DENSE = {
    "local": {"lr": 0.05, "batch_size": 16, "epochs": 1},
    "epochs": 1,
    "generation": {"steps": 1, "batch_size": 16, "ngf": 8, "nz": 16},
}
PRIVATE = {"epsilon": 1.0, "clip": 3.0, "local": {"lr": 0.05, "epochs": 5}}
FOUR = Membership(shadows=4)


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "_ROWS", 200)


def finished(out: Path, name: str = "fedavg", settings: dict[str, Any] | None = None, **changes: Any) -> Path:
    task = {"data": "digits", "clients": 2, "model": "convnet:width=8,depth=2", "workers": 0, "limit": 120}
    chosen = {"fedavg": {"rounds": 1, "local": {"lr": 0.05}}, "dense": DENSE, "ldp-fedavg": PRIVATE}.get(name, {})
    run(Job(Experiment(**{**task, **changes}), find(name)(**(settings or chosen)), out, name=name))
    return out


def weights(folder: Path, client: int, world: int) -> bytes:
    return (place_of(folder, client) / f"world-{world:03d}" / "model.safetensors").read_bytes()


def share_of(folder: Path, world: int) -> list[int]:
    held = json.loads((place_of(folder, 0) / f"world-{world:03d}" / "partition.json").read_text())
    return [sum(counts) for counts in held["counts"]]


def test_each_record_is_in_half_of_the_shadow_runs_and_more_of_them_leave_the_first_as_they_are() -> None:
    member = membership_design(0, 2, 1000, 8)
    assert member.shape == (9, 1000)
    assert (member[1:].sum(0) == 4).all()
    # five standard deviations of 1000 coins
    assert all(421 < int(world.sum()) < 579 for world in member)
    assert torch.equal(membership_design(0, 2, 1000, 16)[:9], member)
    assert not torch.equal(membership_design(1, 2, 1000, 8), member)
    assert not torch.equal(membership_design(0, 1, 1000, 8), member)
    assert abs(np.corrcoef(member[0], member[1])[0, 1]) < 0.16  # five standard deviations


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder = finished(
        tmp_path_factory.mktemp("overfitted") / "run", settings=OVERFITTED, clients=1, model="convnet:width=16,depth=2"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attack, "_ROWS", 200)
        yield folder, membership(folder, Membership(shadows=16), command="fedstill attack <run>")


@pytest.mark.slow
def test_what_an_overfitted_model_remembers_is_found(attacked: tuple[Path, dict[str, Any]]) -> None:
    folder, found = attacked
    assert (found["client"], found["records"], found["shadows"]) == (0, 120, 16)
    for rates in found["likelihood_ratio"].values():
        # by chance, with 51 members of 120, the area has a standard deviation of 0.053
        assert rates["auc"] > 0.5 + 4 * 0.053
    online = found["likelihood_ratio"]["online"]
    assert online["rates"][1]["low"] > 0.05
    assert [rate["bound"] for rate in online["rates"]] == [None, None]
    assert found["posteriors"]["whole"]["members"]["support"] == found["members"]
    place = place_of(folder, 0)
    assert json.loads((place / "attack.json").read_text()) == {"membership": found}
    page = (place / "attack.html").read_text()
    assert "Membership inference: fedavg on digits" in page and "fedstill attack &lt;run&gt;" in page
    assert "src=" not in page.split("</head>")[1]
    with np.load(place / "scores.npz") as arrays:
        assert arrays["phi"].shape == arrays["member"].shape == (17, 120)
        expected = membership_design(0, 0, 120, 16).numpy()
        assert (arrays["member"] == expected).all()
        own = share_out(Experiment(data="digits", clients=1, limit=120), None).parts[0][0]
        assert (arrays["records"] == own).all()
    words = " ".join(str(part) for part in attack_report.show(found))
    assert "There is no bound to compare with" in words


@pytest.mark.slow
def test_few_shadow_runs_are_enough_for_the_relative_attack(attacked: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = attacked
    few = {score: membership(folder, Membership(score=score, shadows=4)) for score in ("lira", "rmia")}
    pair = membership(folder, Membership(score="rmia", shadows=2))
    areas = {name: found["likelihood_ratio"]["online"]["auc"] for name, found in {**few, "pair": pair}.items()}
    # by chance, with 51 members of 120, the area has a standard deviation of 0.053
    assert min(areas["rmia"], areas["pair"]) > 0.5 + 4 * 0.053
    assert areas["rmia"] > areas["lira"] - 0.053
    assert few["rmia"]["rmia"]["a"] in [step / 10 for step in range(11)] and 0 <= pair["rmia"]["a"] < 0.1
    place = place_of(folder, 0)
    assert f"RMIA with a {pair['rmia']['a']:g}" in (place / "rmia.html").read_text()
    kept = json.loads((place / "attack.json").read_text())
    assert kept["membership-rmia"] == pair and kept["membership"] == few["lira"]
    with np.load(place / "rmia.npz") as arrays:
        assert arrays["probability"].shape == (3, 120) and arrays["online"].max() <= 1


@pytest.mark.slow
def test_worlds_hold_what_they_should_and_are_no_runs_of_a_report(attacked: tuple[Path, dict[str, Any]]) -> None:
    folder, found = attacked
    held = [share_of(folder, world) for world in range(17)]
    assert held[0] == [found["members"]]
    assert all(held[world][0] + held[world + 1][0] == 120 for world in range(1, 17, 2))
    assert find_runs(folder) == [folder]


@pytest.mark.slow
def test_a_false_promise_is_refuted(attacked: tuple[Path, dict[str, Any]]) -> None:
    folder, before = attacked
    place = folder / "summary.json"
    honest = place.read_text()
    promise = {
        "holds": True,
        "unit": "record",
        "epsilon": 0.01,
        "delta": 0.0,
        "adversary": "all",
        "reason": "",
        "adjacency": "one record",
        "accountant": "PLD",
        "simulated": False,
    }
    place.write_text(json.dumps({**json.loads(honest), "guarantee": promise}))
    try:
        found = membership(folder, Membership(shadows=16))
    finally:
        place.write_text(honest)
    rate = found["likelihood_ratio"]["online"]["rates"][1]
    assert rate["refuted"] and rate["low"] > rate["bound"]
    assert "REFUTED" in " ".join(str(part) for part in attack_report.show(found))
    assert "allowed by the guarantee" in (place_of(folder, 0) / "attack.html").read_text()
    assert rate["tpr"] == before["likelihood_ratio"]["online"]["rates"][1]["tpr"]


@pytest.mark.slow
def test_a_private_run_keeps_its_promise_with_fresh_noise_in_every_world(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", "ldp-fedavg")
    found = membership(folder, FOUR)
    rates = [rate for form in found["likelihood_ratio"].values() for rate in form["rates"]]
    assert found["guarantee"]["epsilon"] == pytest.approx(1, rel=1e-3)
    assert all(rate["bound"] < 0.03 and not rate["refuted"] for rate in rates)
    assert "Not refuted: the true positive rates are within the bound of eps 1" in " ".join(
        str(part) for part in attack_report.show(found)
    )
    before = weights(folder, 0, 1)
    (place_of(folder, 0) / "world-001").rename(tmp_path / "before")
    membership(folder, FOUR)
    assert weights(folder, 0, 1) != before  # the same world, but for its noise


class Seen(Watcher):
    """Notes what worlds ask; dies with the third one's first reply."""

    def __init__(self, mortal: bool) -> None:
        self.questions: list[tuple[int, int]] = []
        self.mortal = mortal

    def asked(self, step: str, clients: int, answered: int, lost: int) -> None:
        self.questions.append((clients, answered))

    def arrived(self, _: object) -> None:
        if self.mortal and len(self.questions) == 3:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "fedavg"])
def test_a_killed_attack_that_used_the_others_replies_ends_as_one_that_asked_them_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished(tmp_path / "run", name, clients=3)
    first, second, again = Seen(True), Seen(False), Seen(False)
    with pytest.raises(Killed):
        membership(folder, FOUR, watch=lambda _: nullcontext(first))
    assert first.questions == [(3, 2)] * 3
    assert not (place_of(folder, 0) / "attack.json").exists()
    membership(folder, FOUR, watch=lambda _: nullcontext(second))
    # the reply that killed it had been kept
    assert second.questions == [(3, 3), (3, 2), (3, 2)]
    models = [weights(folder, 0, world) for world in range(5)]
    counts = [share_of(folder, world) for world in range(5)]
    assert len(set(models)) == 5
    assert all(world[1:] == [40, 40] for world in counts) and counts[1][0] + counts[2][0] == 40
    text = (place_of(folder, 0) / "attack.json").read_bytes()
    place_of(folder, 0).rename(tmp_path / "before")
    monkeypatch.setattr(attack, "_asked_once", lambda _: False)
    membership(folder, FOUR, watch=lambda _: nullcontext(again))
    assert again.questions == [(3, 0)] * 5
    assert [weights(folder, 0, world) for world in range(5)] == models
    assert (place_of(folder, 0) / "attack.json").read_bytes() == text


@pytest.mark.slow
def test_a_run_of_several_rounds_asks_everybody(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", settings={"rounds": 2, "local": {"lr": 0.05}})
    membership(folder, Membership(shadows=4, client=1))
    world = place_of(folder, 1) / "world-000"
    assert "answers" not in json.loads((world / "config.json").read_text())
    assert json.loads((world / "summary.json").read_text())["rounds"] == 2


@pytest.mark.slow
def test_shadow_runs_do_not_evaluate_the_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished(tmp_path / "run", "dense")
    monkeypatch.setattr(server, "accuracies", lambda *_: pytest.fail("the uploads were evaluated"))
    membership(folder, FOUR)
    world = place_of(folder, 0) / "world-000"
    assert json.loads((world / "summary.json").read_text())["accuracy"] > 0


@pytest.mark.slow
def test_what_is_there_is_kept_and_checked(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    place_of(folder, 1).mkdir(parents=True)
    (place_of(folder, 1) / "attack.json").write_text('{"labels": {"found": 1}}')
    membership(folder, Membership(shadows=4, client=1))
    before = weights(folder, 1, 4)
    found = membership(folder, Membership(shadows=6, client=1))
    damaged = place_of(folder, 1) / "world-002" / "outputs.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"outputs.safetensors is damaged.*and attack again"):
        membership(folder, Membership(shadows=6, client=1))
    assert json.loads((place_of(folder, 1) / "attack.json").read_text()) == {
        "labels": {"found": 1},
        "membership": found,
    }
    assert found["shadows"] == 6 and weights(folder, 1, 4) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "model"),
    [
        ("fedrep", {"rounds": 2}, "convnet:width=8,depth=2"),
        ("fedavg-ft", {"rounds": 1}, "convnet:width=8,depth=2"),
        ("fedrd-records", {"epsilon": None, "nets": 1, "fitting": {"steps": 2}}, "projected:width=8"),
    ],
)
def test_the_victims_own_model_is_attacked_as_it_evaluates_it(
    method: str, settings: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """FedRep's heads never leave and are trained under the last body; FedAvg's model is tuned before it is used."""
    folder = finished(tmp_path / "run", method, settings, local_test=0.2, model=model)
    membership(folder, Membership(shadows=4, client=1))
    task = share_out(Experiment(data="digits", clients=2, limit=120, local_test=0.2), None)
    records = task.train[torch.from_numpy(task.parts[1][0])]
    # a world in which the victim's test records are those of the attack tells how it evaluates them
    world = place_of(folder, 1) / "world-002"
    said = wire.unpack(files.read_checked(world / "outputs.safetensors", ""))[0]["logits"][0]
    member = membership_design(0, 1, len(records), 4)[2]
    own = torch.from_numpy(task.parts[1][0])
    parts = [task.parts[0], (own[member].numpy(), own.numpy())]
    job = read_job(world, tmp_path / "again", "")
    run(job, task=task._replace(parts=parts))
    accuracies = [row["accuracy"] for row in json.loads((tmp_path / "again" / "clients.json").read_text())["clients"]]
    assert accuracies[1] == float((said.argmax(1) == records.labels).double().mean())


def test_what_cannot_be_attacked_is_refused_in_a_sentence(tmp_path: Path) -> None:
    def refusal(folder: Path, **settings: Any) -> str:
        with pytest.raises(ValueError, match=r"\S") as caught:
            membership(folder, Membership(**{"shadows": 4, **settings}))
        return str(caught.value)

    assert "there is no folder" in refusal(tmp_path / "nowhere")
    folder = finished(tmp_path / "run", clients=5, limit=90)
    assert "--client is 5; the run has the clients 0 to 4" in refusal(folder, client=5)
    assert "client 0 has 18 records; an attack needs 20" in refusal(folder)
    (folder / "partition.json").unlink()  # as a deployment leaves it
    assert "asked real sites" in refusal(folder)
    other = finished(tmp_path / "other")
    kept = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**kept, "fingerprint": "of something else"}))
    assert "the data changed since" in refusal(other)
    (other / "config.json").write_text(json.dumps({**kept, "code": {"fedavg": "of something else"}}))
    assert membership(other, Membership(shadows=4, client=1))["records"] == 60  # its code is fedstill's own


def test_a_client_without_a_part_in_the_run_is_not_found_to_be_safe(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", clients=3)
    less = tmp_path / "less"
    run(leave_out(whole, 1, read_job(whole, less, "")))
    with pytest.raises(ValueError, match="has nothing of client 1: its reply was withdrawn"):
        membership(less, Membership(client=1, shadows=4))
    membership(less, Membership(client=0, shadows=4))
    for world in range(5):  # the same federation, so client 1 is not asked again
        place = RunFolder(place_of(less, 0) / f"world-{world:03d}")
        assert [refusal.client for refusal in place.read_summary().refused] == [1]
    late = finished(tmp_path / "late", slow=0.5, min_clients=1)
    (refusal,) = RunFolder(late).read_summary().refused
    with pytest.raises(ValueError, match=f"has nothing of client {refusal.client}: "):
        membership(late, Membership(client=refusal.client, shadows=4))
    membership(late, Membership(client=1 - refusal.client, shadows=4))


def test_a_client_with_another_architecture_is_attacked_by_its_own(tmp_path: Path) -> None:
    own: dict[str, Any] = {"models": ("convnet:width=8,depth=2", "mlp"), "public": "noise=32", "local_test": 0.2}
    short = {"pretrain": "none", "rounds": 1, "local": {"epochs": 40}, "revisit": {"epochs": 1}}
    folder = finished(tmp_path / "run", "fedmd", short, **own)
    found = membership(folder, Membership(client=1, shadows=4))
    assert found["likelihood_ratio"]["online"]["auc"] > 0.55  # the server's model has seen no record


def test_a_world_without_the_victim_ends_the_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished(tmp_path / "run")
    membership(folder, Membership(client=0, shadows=4))
    summary = place_of(folder, 0) / "world-002" / "summary.json"
    reason = {"client": 0, "step": "update", "round": None, "reason": "it is an outlier"}
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "refused": [reason]}))
    with pytest.raises(ValueError, match=r"world-002 has nothing of client 0: it is an outlier"):
        membership(folder, Membership(client=0, shadows=4))


def test_the_model_card_has_what_an_attack_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "run")
    assert attack_report.stored(folder) == []
    main(["publish", str(folder), "--out", str(tmp_path / "before")])
    assert "No attack on this run is stored" in (tmp_path / "before" / "README.md").read_text()
    membership(folder, Membership(shadows=4, client=1))
    (text,) = attack_report.stored(folder)
    assert "60 records of client 1 (4 shadow runs)" in text and "There is no bound to compare with" in text
    main(["publish", str(folder), "--out", str(tmp_path / "after")])
    card = (tmp_path / "after" / "README.md").read_text()
    assert card.partition("## Attacks")[2].strip().startswith("* True positive rate ") and "is stored" not in card
    results = json.loads((place_of(folder, 1) / "attack.json").read_text())
    promised = asdict(derive([], {0: []}, 1e-5)) | {"epsilon": 2.0, "delta": 1e-5}
    private = {"membership": results["membership"] | {"guarantee": promised, "records": 61}}
    (place_of(folder, 1) / "attack.json").write_text(json.dumps(private))
    (text,) = attack_report.stored(folder)  # the client with the most records is attacked: that tells which it is
    assert "on records of one client (4 shadow runs)" in text and "no epsilon covers them" in text
    assert "client 1" not in text and "61" not in text and "non-members" not in text
    results["membership"]["run"] = "0" * 64  # as of a folder that was copied from another run
    for content in ("", "[]", '{"membership": {"records": 60}}', '{"membership": []}', json.dumps(results)):
        (place_of(folder, 1) / "attack.json").write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["publish", str(folder), "--out", str(tmp_path / "never")])
        assert ended.value.code == 2 and not (tmp_path / "never").exists()
        assert "attack.json is damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished(tmp_path / "run")
    capsys.readouterr()
    for name in ([], ["membership"]):
        main(["attack", str(folder), *name, "--shadows", "4", "--client", "1", "--flip", "True"])
        told = " ".join(capsys.readouterr().out.split())
        assert "60 records of client 1" in told and "attack.html" in told

    def fails(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["attack", *words])
        assert stop.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    main(["attack", str(folder), "--score", "rmia", "--shadows", "2", "--client", "1", "--rmia.a", "0.5"])
    told = " ".join(capsys.readouterr().out.split())
    assert "2 shadow runs, RMIA with a 0.5, gamma 1" in told and "rmia.html" in told
    assert "it must be an even number of 2 or more" in fails(str(folder), "--score", "rmia", "--shadows", "1")
    world = place_of(folder, 1) / "world-001" / "outputs.safetensors"
    old = {"logits": wire.unpack(files.read_checked(world, ""))[0]["logits"]}
    files.write_checked(world, wire.pack(old, {}))  # as of a run of other attacks
    main(["attack", str(folder), "--shadows", "4", "--client", "1"])
    assert "does not fit these records; delete" in fails(str(folder), "--score", "rmia", "--client", "1")
    files.write_checked(world, wire.pack({"logits": old["logits"] * math.inf}, {}))
    assert "its training diverged and no score can be computed" in fails(str(folder), "--shadows", "4", "--client", "1")
    assert "the run comes first: fedstill attack RUN" in fails("--shadows", "4")
    assert "--shadows is 3; it must be an even number of 4 or more" in fails(str(folder), "--shadows", "3")
    assert "--client is -1; it must be greater than or equal to 0" in fails(str(folder), "--client", "-1")
    assert f"holds 1 run; name one of them, as {folder}" in fails(str(tmp_path))

    def interrupt(_: str) -> AbstractContextManager[Watcher]:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstill.experiment.progress.watch", lambda _, world, quiet: interrupt(world))
    with pytest.raises(SystemExit) as stop:
        main(["attack", str(folder), "--shadows", "4"])
    assert stop.value.code == 130


def test_all_records_of_a_patient_are_members_or_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(40), 6)
    frame = pd.DataFrame(rng.normal(size=(240, 4)) + rng.normal(size=(40, 4))[patients], columns=list("abcd"))
    frame["label"], frame["patient"] = patients % 2, [f"P{number}" for number in patients]
    data = own.given((frame, "label"), Reading())[0]
    job = Job(
        Experiment(data=data.name, clients=1, model="linear", workers=0, public="noise=100", noise="entropy"),
        find("ldp-fedavg")(epsilon=1.0, clip=3.0, local={"lr": 0.05, "epochs": 2}),
        tmp_path / "run",
        name="ldp-fedavg",
    )
    run(job, data=data)
    found = membership(tmp_path / "run", FOUR, data=data)
    task = share_out(job.experiment, data)
    assert task.groups is not None and found["group"] == {"column": "patient", "largest": 6}
    own_patients = task.groups[1][task.parts[0][0]]
    assert found["records"] == len(set(own_patients)) == 32
    with np.load(place_of(tmp_path / "run", 0) / "scores.npz") as arrays:
        for world in arrays["member"]:
            for patient in set(own_patients):
                assert len(set(world[own_patients == patient])) == 1
    words = " ".join(str(part) for part in attack_report.show(found))
    assert "32 groups ('patient', of up to 6 records)" in words


def test_a_bound_for_a_group_is_that_of_all_its_records(tmp_path: Path) -> None:
    promise = Guarantee(True, "record", "", 0.5, 1e-6, "", "", "", simulated=False)
    one, six = attack_report.allowed(promise), attack_report.allowed(promise, 6)
    assert one is not None and six is not None
    assert one(0.01) == pytest.approx(0.01 * np.exp(0.5) + 1e-6)
    assert six(0.01) == pytest.approx(0.01 * np.exp(3.0) + sum(np.exp(0.5 * i) for i in range(6)) * 1e-6)
    client = replace(promise, unit="client")
    assert attack_report.allowed(client, 6)(0.01) == pytest.approx(one(0.01))  # type: ignore[misc]
    huge = attack_report.allowed(replace(promise, epsilon=200.0), 6)
    assert huge is not None and huge(0.01) == 1.0


def test_with_few_patients_members_are_drawn_by_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = share_out(Experiment(data="digits", clients=1, limit=120), None)
    task = task._replace(groups=("writer", np.arange(len(task.train)) % 5))
    column, groups = attack.by_group(task, torch.from_numpy(task.parts[0][0]))
    assert column == "" and torch.equal(groups, torch.arange(120))
    assert "records of 5 values of 'writer'; members are drawn by record" in caplog.text
