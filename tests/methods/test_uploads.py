"""Clients with models of their own, and long work at the server."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from small import federation, noise_images, site, weights

from fedstill import wire
from fedstill.data.sources import DataSet
from fedstill.engines import server
from fedstill.engines.inprocess import Inline
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import Job, run
from fedstill.methods import get
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.dense import Dense
from fedstill.methods.feddf import FedDF
from fedstill.protocol import Method, load, state
from fedstill.train.local import SGD, Diverged, evaluate, outputs

LOCAL = SGD(lr=0.05, batch_size=32)
KINDS = ("convnet:width=8,depth=2", "convnet:width=4,depth=1")
SMALL: dict[str, Any] = {"local": LOCAL, "epochs": 4, "student": LOCAL}


def dense(**changes: Any) -> Dense:
    return Dense(**{**SMALL, "generation": {"steps": 2, "batch_size": 16, "ngf": 8, "nz": 16}, **changes})


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_server_that_dies_between_two_epochs_goes_on_behind_the_last(
    after: int, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SAVE_EVERY", 0.0)
    expected, _ = small.run(dense(), digits, tmp_path / "whole")
    learnt: list[int] = []
    learn = Dense.learn

    def counted(self: Dense, *args: Any) -> None:
        learnt.append(1)
        if len(learnt) > after:
            raise Killed
        learn(self, *args)

    monkeypatch.setattr(Dense, "learn", counted)
    if after < 4:
        with pytest.raises(Killed):
            small.run(dense(), digits, tmp_path / "run")
        learnt[:] = [1] * (after - 4)  # so many are left
    monkeypatch.setattr(Dense, "learn", learn)
    model, _ = small.run(dense(), digits, tmp_path / "run")
    assert weights(model) == weights(expected)


def test_epochs_of_a_finished_stage_are_not_done_again(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SAVE_EVERY", 0.0)
    expected, _ = small.run(dense(), digits, tmp_path)

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Dense, "learn", never)
    (tmp_path / "journal" / "checkpoint").unlink()  # died after the last epoch, before the round was over
    model, _ = small.run(dense(), digits, tmp_path)
    assert weights(model) == weights(expected)


def mixed(method: Method, transport: Any, digits: DataSet, folder: Path, **options: Any) -> Any:
    fed = federation(method, transport, digits, folder, **options)
    fed.agreement = transport.site.agreement
    fed.architectures = [fed.agreement.architecture(client) for client in fed.clients]
    return fed


def site_of(method: Method, digits: DataSet, folder: Path, **changes: Any) -> Any:
    from dataclasses import replace

    here = site(method, digits.train, folder, public=noise_images(digits))()
    here.agreement = replace(here.agreement, models=KINDS, **changes)
    return here


class Held(Inline):
    """In this process, with the site at hand."""

    def __init__(self, here: Any) -> None:
        super().__init__(here)
        self.site = here


def test_clients_may_have_models_that_differ(digits: DataSet, tmp_path: Path) -> None:
    method = FedDF(local=LOCAL, distillation={"epochs": 1})  # type: ignore[arg-type]
    fed = mixed(method, Held(site_of(method, digits, tmp_path)), digits, tmp_path, public=noise_images(digits)())
    taught: list[Any] = []
    teach = FedDF.teach

    def watched(self: FedDF, fed: Any, teachers: Any, student: Any, round: Any) -> None:
        taught.append((teachers, {name: value.clone() for name, value in state(student).items()}))
        teach(self, fed, teachers, student, round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedDF, "teach", watched)
        model = method.server(fed)
    ((teachers, start),) = taught
    sizes = [sum(p.numel() for p in network.parameters()) for network in teachers.networks]
    assert sizes[0] == sizes[2] == sum(p.numel() for p in model.parameters()) != sizes[1] == sizes[3]
    counts = [len(fed.journal.read_reply(0, "train", client)) for client in range(4)]
    assert counts[0] == counts[2] > counts[1] == counts[3]
    alike = [(len(digits.train) / 4, state(teachers.networks[k])) for k in (0, 2)]
    expected = {name: torch.zeros_like(value) for name, value in start.items()}
    load(expected, weighted_mean(alike))
    for name, value in start.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)  # up to one record of difference


@pytest.mark.parametrize("averaged", ["logits", "probabilities"])
def test_the_teachers_are_judged_together_averaged_and_alone(averaged: str, digits: DataSet, tmp_path: Path) -> None:
    method = FedDF(local=LOCAL, distillation={"epochs": 1, "outputs": averaged})  # type: ignore[arg-type]
    fed = mixed(method, Held(site_of(method, digits, tmp_path)), digits, tmp_path, public=noise_images(digits)())
    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedDF, "teach", lambda self, fed, teachers, *_: kept.append(teachers))
        method.server(fed)
    (line,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    networks, test = kept[0].networks, fed._test
    logits = torch.stack([torch.cat(outputs(network, test)) for network in networks])
    together = (logits if averaged == "logits" else logits.softmax(2)).mean(0)
    right = [float((found.argmax(1) == test.labels).double().mean()) for found in (*logits, together)]
    assert line["ensemble"] == right[-1]
    assert line["clients_alone"] == pytest.approx(sum(right[:4]) / 4, abs=1e-12)
    average = fed.new_model()
    counts = [read_count(fed, client) for client in (0, 2)]  # the two of the student's architecture
    load(average, weighted_mean(zip(counts, (state(networks[k]) for k in (0, 2)), strict=True)))
    assert line["average"] == evaluate(average, test)
    assert len({line["ensemble"], line["clients_alone"], line["average"]}) == 3


def read_count(fed: Any, client: int) -> int:
    """What it said of its records."""
    _, header = wire.unpack(fed.journal.read_reply(0, "train", client))
    return int(header["fields"]["num_records"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet18", "must match the model's state of resnet18, which is not known here"),
        (KINDS[1], "which the model does not have"),
        ("x\n" * 90, "must match the model's state of x?x?"),
        (7, "field 'architecture' is 7"),
    ],
)
def test_a_model_is_rebuilt_only_from_the_run_s_own_list(
    name: Any, sentence: str, digits: DataSet, tmp_path: Path
) -> None:
    class Renames(Held):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            for arrival in super().exchange(request, clients, sent):
                if arrival.client == 2:
                    tensors, header = wire.unpack(arrival.reply)
                    header["fields"]["architecture"] = name
                    arrival = arrival._replace(reply=wire.pack(tensors, header))
                yield arrival

    method = FedDF(local=LOCAL, distillation={"epochs": 1})  # type: ignore[arg-type]
    fed = mixed(
        method,
        Renames(site_of(method, digits, tmp_path)),
        digits,
        tmp_path,
        public=noise_images(digits)(),
        min_clients=3,
    )
    method.server(fed)
    ((client, reason),) = [(refusal.client, refusal.reason) for refusal in fed.journal.refusals()]
    assert client == 2
    assert sentence in reason


def test_clients_that_differ_can_t_start_from_one_student(digits: DataSet, tmp_path: Path) -> None:
    method = dense(rounds=2)
    fed = mixed(method, Held(site_of(method, digits, tmp_path)), digits, tmp_path)
    with pytest.raises(ValueError, match="can't start from the student, a convnet:width=8,depth=2; take --rounds 1"):
        method.server(fed)


def test_in_a_second_round_clients_start_from_the_student(digits: DataSet, tmp_path: Path) -> None:
    _, fed = small.run(dense(rounds=2), digits, tmp_path)
    assert {"train", "train_on"} == fed.asked_steps.keys()
    assert fed.journal.bytes_down > fed.journal.bytes_up / 2


def test_models_whose_training_failed_are_blamed_on_it(digits: DataSet, tmp_path: Path) -> None:
    method = dense(local=SGD(lr=1e20, batch_size=4096))  # a step, after which weights are finite still
    with pytest.raises(Diverged, match=r"4 of the clients' 4 models give logits that are not finite.*--local\.lr"):
        small.run(method, digits, tmp_path)


def test_a_mean_of_nothing_is_said_to_be_a_random_start(
    digits: DataSet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method = dense(start="mean", epochs=1)
    fed = mixed(method, Held(site_of(method, digits, tmp_path)), digits, tmp_path)
    fed.architecture = "convnet:width=16,depth=1"
    fed.new_model = partial(new_or_wider, fed.new_model)
    method.server(fed)
    assert "no client has the student's architecture convnet:width=16,depth=1; it starts at random" in caplog.text


def new_or_wider(new_model: Any, *, architecture: str | None = None) -> Any:
    return new_model(architecture=architecture or KINDS[1])


def test_options_in_another_order_name_the_same_network(digits: DataSet, tmp_path: Path) -> None:
    method = dense(start="mean", epochs=1)
    fed = mixed(method, Held(site_of(method, digits, tmp_path)), digits, tmp_path)
    fed.architecture = "convnet:depth=2,width=8"  # as KINDS[0]
    method.server(fed)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "average" in json.loads(line)


def test_a_damaged_checkpoint_of_epochs_costs_no_reply(digits: DataSet, tmp_path: Path) -> None:
    expected, _ = small.run(dense(), digits, tmp_path)
    (tmp_path / "journal" / "checkpoint").unlink()
    place = tmp_path / "journal" / "epochs"
    place.write_bytes(place.read_bytes()[:-9])
    with pytest.raises(ValueError, match="epochs is damaged .*; delete it and run again: .* nobody is asked again"):
        small.run(dense(), digits, tmp_path)
    place.unlink()
    model, fed = small.run(dense(), digits, tmp_path)
    assert weights(model) == weights(expected)
    assert len((tmp_path / "journal" / "meter.jsonl").read_text().splitlines()) == 8  # four requests, four replies


def test_a_method_with_one_model_refuses_several(tmp_path: Path) -> None:
    job = Job(Experiment(data="digits", models=KINDS, clients=4), "fedavg", get("fedavg")(), tmp_path / "run")
    with pytest.raises(ValueError, match="fedavg wants one model for all clients; leave --models out"):
        run(job)


def test_unbalanced_clients_may_train_with_margins(digits: DataSet, tmp_path: Path) -> None:
    plain, _ = small.run(dense(epochs=1), digits, tmp_path / "ce")
    margins, _ = small.run(dense(epochs=1, local_loss="ldam"), digits, tmp_path / "ldam")
    assert weights(plain) != weights(margins)


def test_published_dense_runs(digits: DataSet, tmp_path: Path) -> None:
    from fedstill.distill.generator import Generation

    published = Generation.published().model_copy(update={"steps": 2, "batch_size": 16, "nz": 16, "ngf": 8})
    method = dense(generation=published, pool=4, student_view="crop_flip", temperature=20.0)
    model, fed = small.run(method, digits, tmp_path)
    assert all(torch.isfinite(value).all() for value in state(model).values() if value.is_floating_point())
    assert fed.journal.load_checkpoint() is not None
