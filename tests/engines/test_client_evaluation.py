"""Models that clients evaluate on their own test or validation records."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import small
import torch
from small import holding, last_state, weights
from torch import nn
from torch.nn.functional import cross_entropy

import fedstill
from fedstill.base.records import Normalisation, Records
from fedstill.data.sources import DataSet
from fedstill.engines import client_evaluation
from fedstill.engines.client_evaluation import EvaluationResult
from fedstill.evaluation import Numbers, confusion, confusion_by_value, evaluate
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.experiment.task import share_out
from fedstill.methods import find
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedavg_ft import FedAvgFT
from fedstill.methods.fedrd import FedRD
from fedstill.methods.fedrep import FedRep
from fedstill.models import build
from fedstill.protocol import Client, Method, Reply, Shared, client_steps, load, own_part, shared_part, state, step
from fedstill.protocol.wire import unpack
from fedstill.report.groups import group
from fedstill.report.record import read_run
from fedstill.report.sections import by_value, clients
from fedstill.train.sgd import SGD, Adam

TASK: dict[str, Any] = {"data": "digits", "clients": 4, "model": "convnet:width=8,depth=2", "workers": 0}
LOCAL = {"lr": 0.05, "batch_size": 32}


def made(out: Path, name: str = "fedavg", method: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    settings = {"rounds": 2, "local": LOCAL} if method is None else method
    task = {"local_test": 0.25, "partition": "dirichlet:0.5", **changes}
    return run(Job(Experiment(**TASK, **task), find(name)(**settings), out, name=name))


def test_the_accuracy_is_the_mean_over_clients_on_their_own_records(tmp_path: Path) -> None:
    summary = made(tmp_path / "run")
    task = share_out(Experiment(**TASK, local_test=0.25, partition="dirichlet:0.5"), None)
    model = build(TASK["model"], task.train.shape, task.train.num_classes)
    load(model, unpack((tmp_path / "run" / "model.safetensors").read_bytes())[0])
    expected = [evaluate(model, task.train[torch.from_numpy(test)]) for _, test in task.parts]
    assert list(summary["accuracy_of_clients"].values()) == pytest.approx(expected)
    assert summary["accuracy"] == pytest.approx(sum(expected) / 4)
    assert summary["spread_over_clients"] == pytest.approx(float(torch.tensor(expected).std()))
    assert summary["judged_on"] == "the clients' own test records"
    record = read_run(tmp_path / "run")
    assert record.metrics[-1]["accuracy"] == pytest.approx(summary["accuracy"])
    assert record.metrics[-1]["spread_over_clients"] == pytest.approx(summary["spread_over_clients"])
    assert record.confusion is not None
    assert record.confusion.sum() == sum(len(test) for _, test in task.parts)
    assert summary["predicted_classes"] == np.count_nonzero(record.confusion.sum(0)) > 1
    assert [entry["accuracy"] for entry in record.clients] == pytest.approx(expected)
    assert [(entry["records"], entry["test_records"]) for entry in record.clients] == [
        (len(own), len(test)) for own, test in task.parts
    ]
    for way in ("bytes_up", "bytes_down"):
        assert sum(entry[way] for entry in record.clients) == summary[way]
    page = clients(group([record])[0])
    assert f">{100 * min(expected):.1f}</td>" in page and "Each client" in page


def test_validation_records_of_each_client_take_the_place_of_its_test_records(tmp_path: Path) -> None:
    task = Experiment(**TASK, local_test=0.25, partition="dirichlet:0.5")
    plain, tuned = share_out(task, None), share_out(task.model_copy(update={"validation": 0.2}), None)
    labels = plain.train.labels.numpy()
    for (own, test), (training, validation) in zip(plain.parts, tuned.parts, strict=True):
        assert sorted([*training, *validation]) == own.tolist()  # nobody has the test records
        assert not set(test) & {*training, *validation}
        assert len(validation) == round(0.2 * len(own))
        shares = np.bincount(labels[own], minlength=10) * len(validation) / len(own)
        assert (np.abs(np.bincount(labels[validation], minlength=10) - shares) < 1).all()
    pooled = np.sort(np.concatenate([validation for _, validation in tuned.parts]))
    assert torch.equal(tuned.test.images, tuned.train.images[torch.from_numpy(pooled)])
    summary = made(tmp_path / "run", validation=0.2)
    assert summary["judged_on"] == "the clients' own validation records"
    assert read_run(tmp_path / "run").confusion.sum() == len(pooled)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--validation", {"validation": 0.1}),
        ("--limit", {"limit": 100}),
        ("--group-bound", {"group": "patient", "group_bound": 3}),
        ("--group", {"group": "patient"}),
    ],
)
def test_records_are_chosen_among_those_of_simulated_clients(
    flag: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A report said "at most 3 records a group", and each site had summed all of its own."""
    job = Job(Experiment(**{**TASK, **settings}), find("fedavg")(), tmp_path / "run")
    with pytest.raises(ValueError, match=f"{flag} chooses among the records of simulated clients; leave it out with"):
        run(job, sites=lambda spec: pytest.fail("asked"))


def test_judging_changes_neither_the_model_nor_the_method_s_bytes(tmp_path: Path) -> None:
    judged = made(tmp_path / "judged")
    seldom = made(tmp_path / "seldom", evaluate_every=2)
    assert seldom["bytes_judging"] * 2 == judged["bytes_judging"] > 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("judged", "seldom")]
    assert weights[0] == weights[1]
    for count in ("bytes_up", "bytes_down"):
        assert judged[count] == seldom[count]
    lines = [json.loads(line) for line in (tmp_path / "judged" / "journal" / "meter.jsonl").read_text().splitlines()]
    up_and_down = sum(line.get("up", 0) + line.get("down", 0) for line in lines)
    assert judged["bytes_up"] + judged["bytes_down"] + judged["bytes_judging"] == up_and_down


def test_judging_is_not_covered_by_a_guarantee(tmp_path: Path) -> None:
    assert "field 'confusion' of step 'judge'" in made(tmp_path)["guarantee"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_a_resumed_run_is_judged_alike(name: str, digits: DataSet, tmp_path: Path) -> None:
    settings = {"fedavg": {"rounds": 2, "local": LOCAL}, "fedrep": {"rounds": 2, "head": LOCAL, "body": LOCAL}}[name]
    method = find(name)(**settings)

    def finish(folder: Path) -> tuple[bytes, dict[str, Any], int]:
        model, fed = small.run(method, digits, folder, local_test=True)
        return weights(model), fed.evaluate_model(model).described(), fed.journal.bytes_judging

    whole = finish(tmp_path / "whole")
    finish(tmp_path / "run")
    assert finish(tmp_path / "run") == whole  # from the checkpoint of the last round


def test_personal_models_want_records_to_be_judged_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fedrep gives every client its own model, .* --local-test 0.2"):
        made(tmp_path / "run", "fedrep", {}, local_test=0.0)
    with pytest.raises(ValueError, match="fedavg-p ends with a network that only the server can evaluate"):
        made(tmp_path / "run", "fedavg-p", {}, local_test=0.2)


def test_fedaux_ends_with_the_run_s_model_which_clients_can_judge(tmp_path: Path) -> None:
    settings = {"extractor": {"pretrain": "none"}, "space": {"dims": 8}, "rounds": 1, "distillation": {"epochs": 1}}
    summary = made(tmp_path, "fedaux", settings, public="noise=50")
    assert len(summary["accuracy_of_clients"]) == 4


def test_a_client_s_own_part_never_leaves_and_lasts(digits: DataSet, tmp_path: Path) -> None:
    method = find("fedrep")(rounds=2, head=LOCAL, body=LOCAL)
    model, fed = small.run(method, digits, tmp_path, local_test=True)
    own = method.own(model)
    assert len(own) == 2
    last = fed.journal.read_reply(1, "update", 0)
    assert not any(name.encode() in last for name in own)
    kept = [unpack(f.read_bytes()[32:])[0] for f in sorted((tmp_path / "clients" / "00000").glob("*.state"))]
    assert kept[-1].keys() == own
    assert not all(torch.equal(kept[-1][name], dict(model.named_parameters())[name]) for name in own)


@pytest.mark.slow
def test_fine_tuning_helps_and_leaves_the_server_s_model_alone(tmp_path: Path) -> None:
    plain = made(tmp_path / "plain", partition="dirichlet:0.1")
    settings = {"rounds": 2, "local": LOCAL, "tuning": {**LOCAL, "epochs": 5}}
    tuned = made(tmp_path / "tuned", "fedavg-ft", settings, partition="dirichlet:0.1")
    assert tuned["accuracy"] > plain["accuracy"] + 0.1
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "tuned")]
    assert weights[0] == weights[1]


PERSONAL: dict[str, dict[str, Any]] = {
    "fedrep": {"rounds": 1, "head": {**LOCAL, "epochs": 3}, "body": LOCAL},
    "fedrd": {
        "rounds": 1,
        "dpc": 2,
        "projection": {"batch_size": 64, "epochs": 3},
        "matching": {"steps": 2, "batch_size": 16, "logits": False},
        "training": {"epochs": 20},
    },
}


@pytest.mark.parametrize("name", PERSONAL)
def test_an_evaluation_starts_from_the_part_that_the_client_has_kept(
    name: str, digits: DataSet, tmp_path: Path
) -> None:
    method = find(name)(**PERSONAL[name])
    parts = [(part[:150], part[150:]) for part in np.array_split(np.arange(900), 3)]
    method.server(holding(parts, method, digits, tmp_path / "run"))
    shutil.copytree(tmp_path / "run", tmp_path / "forgotten")
    shutil.rmtree(tmp_path / "forgotten" / "clients")

    def evaluated(place: str) -> Any:
        fed = holding(parts, method, digits, tmp_path / place)
        model = method.server(fed)  # from the checkpoint of the only round
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6)  # a model that no client has evaluated yet
        return fed.evaluate_model(model).clients

    kept, forgotten = evaluated("run"), evaluated("forgotten")
    assert kept.keys() == forgotten.keys() and kept != forgotten


def test_fine_tuning_is_not_on_the_records_it_is_judged_on(digits: DataSet, tmp_path: Path) -> None:
    # who has only seen the digits 0 to 4 takes every other for one of these
    low, high = (np.flatnonzero(half.numpy())[:200] for half in (digits.train.labels < 5, digits.train.labels >= 5))
    method = FedAvgFT(rounds=1, local=LOCAL, tuning={**LOCAL, "epochs": 5})  # type: ignore[arg-type]
    fed = holding([(low[:100], high[:100]), (low[100:], high[100:])], method, digits, tmp_path)
    table = fed.evaluate_model(method.server(fed)).confusion
    assert int(table.sum()) == int(table[5:].sum()) == 200
    assert int(table[5:, :5].sum()) > 190


class Told(Reply):
    """Nothing."""


class HeadsOnly(Method):
    """Trains what stays at the clients; the shared part never moves."""

    personal: ClassVar[bool] = True
    local: SGD = SGD(**LOCAL)

    def own(self, model: nn.Module) -> frozenset[str]:
        """The last linear layer."""
        return FedRep().own(model)

    def server(self, fed: Any) -> Any:
        """Four rounds, each evaluated."""
        model = fed.new_model()
        for round in fed.rounds(4, model):
            fed.ask(self.train, shared=shared_part(self, model))
            round.log(accuracy=fed.evaluate(model))
        return model

    @step
    def train(self, client: Client, shared: Shared) -> Told:
        model = self.personal_model(client, shared)
        self.local.fit(model, client.train, client.rng("batches"))
        client.state |= own_part(self, model)
        return Told()


@pytest.mark.slow
def test_clients_are_asked_again_when_only_their_own_parts_have_changed(digits: DataSet, tmp_path: Path) -> None:
    def accuracies(folder: str, **options: Any) -> dict[int, float]:
        """Accuracies by round."""
        model, fed = small.run(HeadsOnly(), digits, tmp_path / folder, local_test=True, **options)
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        logged = {line["round"]: line["accuracy"] for line in map(json.loads, lines) if "accuracy" in line}
        assert fed.evaluate_model(model).accuracy == logged[4]
        return logged

    every_round = accuracies("every")
    assert accuracies("every") == every_round  # the second time from the last round's checkpoint
    assert every_round.keys() == {1, 2, 3, 4}
    assert every_round[4] > every_round[1] + 0.1
    assert accuracies("last", evaluate_every=4) == {4: every_round[4]}


@pytest.mark.parametrize(
    "method",
    [
        FedRep(head=SGD(epochs=5, **LOCAL), body=SGD(**LOCAL)),  # type: ignore[arg-type]
        FedRD(dpc=1, projection=Adam(lr=0.01, epochs=5), matching={"steps": 1, "batch_size": 16}),  # type: ignore[arg-type]
    ],
    ids=["fedrep", "fedrd"],
)
def test_what_a_client_keeps_is_trained_under_the_shared_part_it_is_evaluated_with(
    method: Method, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[nn.Module] = []

    def watched(model: nn.Module, *args: Any) -> Any:
        evaluated.append(model)
        return confusion(model, *args)

    monkeypatch.setattr(client_evaluation, "confusion", watched)
    fed = holding([(np.arange(200), np.arange(200, 260))], method, digits, tmp_path)
    fed.ask(
        next(iter(client_steps(type(method)).values())),
        at_most={"n": 10},
        shared=shared_part(method, fed.new_model(draw=1)),
    )
    before = last_state(tmp_path / "clients", 0)
    other = fed.new_model(draw=2)
    fed.evaluate(other)
    (model,) = evaluated
    after = last_state(tmp_path / "clients", 0)
    assert before.keys() == after.keys() == own_part(method, model).keys()
    assert all(torch.equal(before[name], after[name]) for name in before)  # an evaluation leaves nothing behind
    for name, value in shared_part(method, other).items():
        assert "running" in name or "num_batches" in name or torch.equal(value, state(model)[name])
    stale = copy.deepcopy(model)
    load(stale, before)
    records = digits.train[:200]
    with torch.no_grad():
        fitted, unfitted = (cross_entropy(m(records.inputs()), records.labels) for m in (model, stale))
    assert fitted < unfitted - 0.1


class Twice(FedAvg):
    """Changes its model after it was judged, without another question."""

    def server(self, fed: Any) -> Any:
        """FedAvg's, and a model that knows one class."""
        model = super().server(fed)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            list(model.parameters())[-1][3] = 1.0
        fed.evaluate(model)
        return model


@pytest.mark.parametrize("killed", [False, True])
def test_another_model_is_judged_anew_even_without_a_question_between(
    killed: bool, digits: DataSet, tmp_path: Path
) -> None:
    method = Twice(rounds=2, local=LOCAL)  # type: ignore[arg-type]
    model, fed = small.run(method, digits, tmp_path, local_test=True)
    if killed:
        model, fed = small.run(method, digits, tmp_path, local_test=True)
    table = fed.evaluate_model(model).confusion
    assert int(table[:, 3].sum()) == int(table.sum()) > 0
    folders = sorted(place.name for place in (tmp_path / "journal").glob("*-judge"))
    assert folders == ["1000001-judge", "1000002-judge", "2000002-judge"]


def test_clients_without_test_records_are_left_out() -> None:
    tables = {
        0: torch.tensor([[3, 1], [0, 0]]),
        1: torch.zeros(2, 2, dtype=torch.int64),
        4: torch.tensor([[0, 2], [0, 2]]),
    }
    judgement = EvaluationResult.of_clients(tables.items(), 2)
    assert judgement.clients == {0: 0.75, 4: 0.5}
    assert judgement.accuracy == 0.625
    assert judgement.confusion.tolist() == [[3, 3], [0, 2]]
    again = EvaluationResult.read(json.loads(json.dumps(judgement.described())))
    assert again.clients == judgement.clients
    assert torch.equal(again.confusion, judgement.confusion)
    with pytest.raises(ValueError, match="no client has a test record"):
        _ = EvaluationResult.of_clients([(1, tables[1])], 2).accuracy


def test_each_clients_confusion_adds_up_to_the_whole(tmp_path: Path) -> None:
    made(tmp_path / "run")
    record = read_run(tmp_path / "run")
    total = np.zeros((10, 10), int)
    for entry in record.clients:
        cells = entry["confusion"]
        right = sum(count for true, predicted, count in cells if true == predicted)
        assert sum(count for *_, count in cells) == entry["test_records"]
        assert entry["accuracy"] == pytest.approx(right / entry["test_records"])
        for true, predicted, count in cells:
            total[true, predicted] += count
    assert record.confusion is not None and (total == record.confusion).all()


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_the_test_records_of_each_hospital_are_told_apart(validation: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(600, 3)), columns=["age", "lactate", "creatinine"])
    frame["died"] = (frame["age"] > 0).astype(int)
    frame["hospital"] = rng.choice(["Nord", "St. Mary", "Süd"], 600)
    frame.loc[frame["hospital"] == "Süd", "died"] ^= 1  # a hospital that the model of all cannot serve
    record = fedstill.run(
        "fedavg",
        data=(frame, "died"),
        partition="by:hospital",
        clients=3,
        rounds=3,
        local={"lr": 0.5},
        model="linear",
        out=tmp_path / "run",
        validation=validation,
        public="noise=500",
        workers=0,
    )
    found = record.by_value
    assert found is not None and list(found) == ["Nord", "St. Mary", "Süd"]
    total, shares = np.zeros((2, 2), int), {}
    for name, cells in found.items():
        for true, predicted, count in cells:
            total[true, predicted] += count
        shares[name] = sum(n for t, p, n in cells if t == p) / sum(n for *_, n in cells)
    assert record.confusion is not None and (total == record.confusion).all()
    assert shares["Süd"] < 0.2 and shares["Nord"] > 0.8
    page = by_value(group([record])[0])
    assert "St. Mary" in page and f">{100 * shares['Süd']:.1f}</td>" in page


def test_a_column_of_patients_is_not_told_apart() -> None:
    records = Records(torch.zeros(300, 1), torch.zeros(300, dtype=torch.int64), 2, Normalisation((0.0,), (1.0,)))
    model = torch.nn.Linear(1, 2)
    assert confusion_by_value(model, records, "patient", np.arange(300).astype(str)) is None
    found = confusion_by_value(model, records, "ward", np.array(["a", "b", "b"] * 100))
    assert found is not None and {w: sum(n for *_, n in c) for w, c in found["cells"].items()} == {"a": 100, "b": 200}


def test_a_model_that_says_the_same_of_every_record_is_counted() -> None:
    one, two = (EvaluationResult(torch.tensor(table)) for table in ([[0, 4], [0, 3]], [[1, 3], [0, 3]]))
    assert (one.predicted_classes, two.predicted_classes) == (1, 2)
    assert EvaluationResult(one.confusion, numbers=Numbers(np.zeros(7), np.zeros(7))).predicted_classes is None
