"""Clients with models of their own, and long work at the server."""

import json
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from doubles import Killed
from small import (
    STEEPEST,
    descended,
    holding,
    kept,
    loss_on,
    near,
    noise_images,
    of_sizes,
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fedstill.base.errors import Diverged
from fedstill.base.records import Examples, Records
from fedstill.cli import flags
from fedstill.data.sources import DataSet
from fedstill.distill.ensemble import Distillation
from fedstill.distill.generation import Generation
from fedstill.distill.pool import Pool
from fedstill.engines import server
from fedstill.engines.transport import Inline
from fedstill.evaluation import evaluate, outputs
from fedstill.experiment.config import Experiment
from fedstill.experiment.job import Job
from fedstill.experiment.run import run
from fedstill.methods import feddf, find
from fedstill.methods.averaging import weighted_mean
from fedstill.methods.dense import Dense
from fedstill.methods.feddf import FedDF
from fedstill.protocol import Method, Step, load, state, wire
from fedstill.train.augment import VIEWS
from fedstill.train.sgd import SGD

LOCAL = SGD(lr=0.05, batch_size=32)
KINDS = ("convnet:width=8,depth=2", "convnet:width=4,depth=1")
SMALL: dict[str, Any] = {"local": LOCAL, "epochs": 4, "student": LOCAL}


def dense(**changes: Any) -> Dense:
    return Dense(**{**SMALL, "generation": {"steps": 2, "batch_size": 16, "ngf": 8, "nz": 16}, **changes})


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_server_that_dies_between_two_epochs_goes_on_behind_the_last(
    after: int, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SAVE_EVERY", 0.0)
    expected, _ = small.run(dense(), digits, tmp_path / "whole")
    learnt: list[int] = []
    examples = Pool.examples

    def counted(self: Pool) -> Examples:
        learnt.append(1)
        if len(learnt) > after:
            raise Killed
        return examples(self)

    monkeypatch.setattr(Pool, "examples", counted)
    if after < 4:
        with pytest.raises(Killed):
            small.run(dense(), digits, tmp_path / "run")
        learnt[:] = [1] * (after - 4)  # so many are left
    monkeypatch.setattr(Pool, "examples", examples)
    model, _ = small.run(dense(), digits, tmp_path / "run")
    assert weights(model) == weights(expected)


def test_epochs_of_a_finished_stage_are_not_done_again(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SAVE_EVERY", 0.0)
    expected, _ = small.run(dense(), digits, tmp_path)

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Pool, "examples", never)
    (tmp_path / "journal" / "checkpoint").unlink()  # died after the last epoch, before the round was over
    model, _ = small.run(dense(), digits, tmp_path)
    assert weights(model) == weights(expected)


def mixed(method: Method, digits: DataSet, folder: Path, **options: Any) -> Any:
    return world(method, digits, folder, public=noise_images(digits), models=KINDS, **options).federation


def test_clients_may_have_models_that_differ(digits: DataSet, tmp_path: Path) -> None:
    method = FedDF(local=LOCAL, distillation={"epochs": 1})  # type: ignore[arg-type]
    fed = mixed(method, digits, tmp_path)
    taught: list[Any] = []
    distil = Distillation.distil

    def watched(self: Distillation, student: Any, *args: Any, **options: Any) -> None:
        taught.append({name: value.clone() for name, value in state(student).items()})
        distil(self, student, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distillation, "distil", watched)
        groups = made_by(patch, feddf, "Teachers")
        model = method.server(fed)
    (start,), (teachers,) = taught, groups
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
    fed = mixed(method, digits, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distillation, "distil", lambda *_, **__: None)
        groups = made_by(patch, feddf, "Teachers")
        method.server(fed)
    (line,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    networks, test = groups[0].networks, digits.test
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


def test_uploads_need_no_evaluation_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task: dict[str, Any] = {"data": "digits", "clients": 2, "model": KINDS[0], "workers": 0, "limit": 120}

    def made(name: str, **changes: Any) -> dict[str, Any]:
        run(Job(Experiment(**task, **changes), dense(), tmp_path / name, name="dense"))
        (line,) = (json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return {key: value for key, value in line.items() if key != "seconds"}

    def no_evaluation(*_: Any) -> list[float]:
        raise AssertionError("the uploads were evaluated")

    full = made("full")
    monkeypatch.setattr(server, "accuracies", no_evaluation)
    extra = {"ensemble", "average", "clients_alone"}
    assert made("less", evaluate_uploads=False) == {key: value for key, value in full.items() if key not in extra}
    assert extra < full.keys()
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("full", "less")]
    assert models[0] == models[1]


def made_by(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """All that ``module`` makes by the class of this name from now on."""
    kind, made = getattr(module, name), list[Any]()

    def counted(*args: Any, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    patch.setattr(module, name, counted)
    return made


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
    class Renames(Inline):
        def exchange(self, request: bytes, clients: Any, sent: Any) -> Any:
            for arrival in super().exchange(request, clients, sent):
                if arrival.client == 2:
                    tensors, header = wire.unpack(arrival.reply)
                    header["fields"]["architecture"] = name
                    arrival = arrival._replace(reply=wire.pack(tensors, header))
                yield arrival

    method = FedDF(local=LOCAL, distillation={"epochs": 1})  # type: ignore[arg-type]
    fed = mixed(method, digits, tmp_path, transport=Renames, min_clients=3)
    method.server(fed)
    ((client, reason),) = [(refusal.client, refusal.reason) for refusal in fed.journal.refusals()]
    assert client == 2
    assert sentence in reason


def test_clients_that_differ_can_t_start_from_one_student(digits: DataSet, tmp_path: Path) -> None:
    method = dense(rounds=2)
    fed = mixed(method, digits, tmp_path)
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
    fed = mixed(method, digits, tmp_path)
    fed.architecture = "convnet:width=16,depth=1"
    fed.new_model = partial(new_or_wider, fed.new_model)
    method.server(fed)
    assert (
        "no client has the student's architecture convnet:width=16,depth=1; the student starts at random" in caplog.text
    )


def new_or_wider(new_model: Any, *, architecture: str | None = None) -> Any:
    return new_model(architecture=architecture or KINDS[1])


def test_options_in_another_order_name_the_same_network(digits: DataSet, tmp_path: Path) -> None:
    method = dense(start="mean", epochs=1)
    fed = mixed(method, digits, tmp_path)
    fed.architecture = "convnet:depth=2,width=8"  # as KINDS[0]
    method.server(fed)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "average" in json.loads(line)


def test_a_damaged_checkpoint_of_epochs_costs_no_reply(digits: DataSet, tmp_path: Path) -> None:
    expected, _ = small.run(dense(), digits, tmp_path)
    (tmp_path / "journal" / "checkpoint").unlink()
    place = tmp_path / "journal" / "epochs"
    place.write_bytes(place.read_bytes()[:-9])
    with pytest.raises(ValueError, match="epochs is damaged .*; delete it and run again: .* no client is asked again"):
        small.run(dense(), digits, tmp_path)
    place.unlink()
    model, fed = small.run(dense(), digits, tmp_path)
    assert weights(model) == weights(expected)
    assert len((tmp_path / "journal" / "meter.jsonl").read_text().splitlines()) == 8  # four requests, four replies


def test_a_method_with_one_model_refuses_several(tmp_path: Path) -> None:
    job = Job(Experiment(data="digits", models=KINDS, clients=4), find("fedavg")(), tmp_path / "run")
    with pytest.raises(ValueError, match="fedavg needs one model for all clients; use --model"):
        run(job)


def uploaded(fed: Any, asked: Step[Any] = Dense.train, exchange: int = 0) -> list[nn.Module]:
    """The clients' models, as they arrived."""
    networks = []
    for reply in kept(fed, asked, exchange):
        networks.append(fed.new_model())
        load(networks[-1], reply.weights)
    return networks


def test_the_student_starts_from_the_mean_by_numbers_of_records(digits: DataSet, tmp_path: Path) -> None:
    method = dense(epochs=1, student=SGD(lr=1e-12), start="mean")
    fed = holding(of_sizes(20, 180), method, digits, tmp_path)
    found = state(method.server(fed))
    few, many = (state(network) for network in uploaded(fed))
    for name, value in found.items():
        assert torch.allclose(value.double(), 0.1 * few[name].double() + 0.9 * many[name].double(), rtol=0, atol=1e-6)


def test_in_a_second_round_clients_train_what_the_first_has_taught_the_student(digits: DataSet, tmp_path: Path) -> None:
    parts = of_sizes(50, 50)
    once, twice = dense(local=STEEPEST), dense(local=STEEPEST, rounds=2)
    taught = once.server(holding(parts, once, digits, tmp_path / "once"))
    fed = holding(parts, twice, digits, tmp_path / "twice")
    twice.server(fed)
    assert not near(fed.new_model(), taught)
    for network, (part, _) in zip(uploaded(fed, Dense.train_on, 1), parts, strict=True):
        assert near(network, descended(taught, loss_on(digits.train[torch.from_numpy(part)])))


def mirrored(x: Tensor, _: torch.Generator) -> Tensor:
    """A view that draws nothing."""
    return x.flip(3)


@pytest.mark.parametrize("view", VIEWS)
def test_a_client_trains_on_views_of_its_records(
    view: Any, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if view != "none":
        monkeypatch.setitem(VIEWS, view, mirrored)
    method = dense(local=STEEPEST.model_copy(update={"epochs": 2}), local_view=view)
    fed = holding(of_sizes(60), method, digits, tmp_path)
    fed.ask(Dense.train)
    records = digits.train[:60]
    x = records.inputs() if view == "none" else records.inputs().flip(3)
    expected = descended(fed.new_model(), lambda net: cross_entropy(net(x), records.labels), steps=2)
    (found,) = uploaded(fed)
    assert near(found, expected)


def ldam(records: Records, beta: float) -> Callable[[nn.Module], Tensor]:
    """``CE(4 (z - m_y 1_y), y)`` with margins up to a half, classes weighted by ``(1 - beta) / (1 - beta^n)``."""
    counts = records.class_counts()[records.labels].double()
    margin = 0.5 * (counts / counts.min()) ** -0.25
    weight = (1 - beta) / (1 - beta**counts)

    def loss(net: nn.Module) -> Tensor:
        z = net(records.inputs()).double()
        z = 4 * (z - margin[:, None] * one_hot(records.labels, z.shape[1]))
        losses = z.logsumexp(1) - z.gather(1, records.labels[:, None])[:, 0]
        return (weight * losses).sum() / weight.sum()

    return loss


def test_classes_of_unbalanced_clients_are_weighted_in_the_later_epochs(digits: DataSet, tmp_path: Path) -> None:
    """Two epochs with margins alone, two with weights as well."""
    labels = digits.train.labels.numpy()
    held = np.concatenate([np.flatnonzero(labels == label)[:n] for label, n in ((0, 50), (1, 2), (2, 10))])
    margins: Any = {"defer": 0.5, "beta": 0.99}
    local = STEEPEST.model_copy(update={"epochs": 4})
    method = dense(local=local, local_loss="ldam", ldam=margins)
    fed = holding([(held, held[:0])], method, digits, tmp_path)
    fed.ask(Dense.train)
    expected = fed.new_model()
    for beta in (0.0, 0.99):
        expected = descended(expected, ldam(digits.train[torch.from_numpy(held)], beta), steps=2)
    (found,) = uploaded(fed)
    assert near(found, expected)


def test_unbalanced_clients_may_train_with_margins(digits: DataSet, tmp_path: Path) -> None:
    plain, _ = small.run(dense(epochs=1), digits, tmp_path / "ce")
    margins, _ = small.run(dense(epochs=1, local_loss="ldam"), digits, tmp_path / "ldam")
    assert weights(plain) != weights(margins)


def test_clients_may_freeze_their_batch_norms_after_an_epoch(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MODEL", "convnet:width=8,depth=2,norm=batch")
    method = dense(local=LOCAL.model_copy(update={"epochs": 3}), local_norm="frozen-after-first")
    assert method.first_reply != method.model_copy(update={"local_norm": "batch"}).first_reply
    fed = holding(of_sizes(60, 60), method, digits, tmp_path)
    method.server(fed)
    batches = -(-60 // LOCAL.batch_size)
    counts = [int(value) for model in uploaded(fed) for name, value in state(model).items() if "num_batches" in name]
    assert counts
    assert set(counts) == {batches}  # of the first epoch alone


def test_published_dense_runs(digits: DataSet, tmp_path: Path) -> None:
    published = Generation.published().model_copy(update={"steps": 2, "batch_size": 16, "nz": 16, "ngf": 8})
    method = dense(generation=published, pool=4, student_view="crop_flip", temperature=20.0)
    model, fed = small.run(method, digits, tmp_path)
    assert all(torch.isfinite(value).all() for value in state(model).values() if value.is_floating_point())
    assert fed.journal.load_checkpoint() is not None


def test_published_settings_are_those_of_the_readme() -> None:
    script = Path(__file__).parents[2] / "reproduce" / "dense" / "published.sh"
    words = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=True).stdout.split()
    method = flags.parse_run("fedstill run dense", words, Experiment(), Dense()).method
    assert isinstance(method, Dense) and method.generation == Generation.published()
    assert (method.local.lr, method.local.momentum, method.local.epochs) == (0.01, 0.9, 400)
    assert (method.student.lr, method.student.momentum, method.student.batch_size) == (0.005, 0.9, 256)
    assert (method.temperature, method.epochs, method.pool) == (20.0, 200, 200)
    assert method.local_view == method.student_view == "crop_flip"  # of the code, for CIFAR
    assert method.local_norm == "frozen-after-first"


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_what_the_ensemble_is_the_mean_of_can_be_chosen(average: Any, digits: DataSet, tmp_path: Path) -> None:
    labels = digits.train.labels.numpy()
    pairs = [np.flatnonzero((labels == label) | (labels == label + 1)) for label in (0, 3, 6)]
    method = dense(epochs=1, local=LOCAL.model_copy(update={"epochs": 3}), average=average)
    fed = holding([(pair, pair[:0]) for pair in pairs], method, digits, tmp_path)
    method.server(fed)
    logits = torch.stack([torch.cat(outputs(network, digits.test)) for network in uploaded(fed)])
    means = {"logits": logits.mean(0), "probabilities": logits.softmax(2).mean(0)}
    right = {name: float((mean.argmax(1) == digits.test.labels).double().mean()) for name, mean in means.items()}
    (line,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["ensemble"] == right[average]
    assert abs(right["logits"] - right["probabilities"]) > 0.01


def shown(folder: Path, digits: DataSet) -> Records:
    """The images that the student saw last: of a few, the report has all."""
    with np.load(folder / "images" / "synthetic.npz", allow_pickle=False) as held:
        images, labels = (torch.from_numpy(held[name]) for name in ("images", "labels"))
    return Records(images, labels, 10, digits.train.normalisation)


def lesson(networks: Sequence[nn.Module], x: Tensor, temperature: float) -> Callable[[nn.Module], Tensor]:
    """``T^2 KL(s(D / T) || s(f / T))`` of a student, with D the mean of the networks' logits."""
    with torch.no_grad():
        said = (torch.stack([network(x) for network in networks]).mean(0) / temperature).softmax(1)

    def loss(student: nn.Module) -> Tensor:
        own = (student(x) / temperature).log_softmax(1)
        return temperature**2 * (said * (said.log() - own)).sum(1).mean()

    return loss


@pytest.mark.parametrize(("temperature", "view"), [(1.0, "none"), *((8.0, view) for view in VIEWS)])
def test_the_student_learns_what_the_teachers_say_at_the_temperature_about_what_it_sees(
    temperature: float, view: Any, digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if view != "none":
        monkeypatch.setitem(VIEWS, view, mirrored)
    method = dense(epochs=1, student=STEEPEST, temperature=temperature, student_view=view)
    fed = holding(of_sizes(100, 100), method, digits, tmp_path)
    found, images = method.server(fed), shown(tmp_path, digits)
    assert len(images) == 16
    x = images.inputs() if view == "none" else images.inputs().flip(3)
    assert near(found, descended(fed.new_model(), lesson(uploaded(fed), x, temperature)))


@pytest.mark.parametrize("pool", [1, 2])
def test_the_student_learns_on_the_images_of_as_many_epochs_as_the_pool_holds(
    pool: int, digits: DataSet, tmp_path: Path
) -> None:
    for epochs in (1, 2):
        method = dense(epochs=epochs, student=STEEPEST, pool=pool)
        fed = holding(of_sizes(100, 100), method, digits, tmp_path / str(epochs))
        found = method.server(fed)
    expected = fed.new_model()
    for epoch, seen in ((1, 1), (2, pool)):
        images = shown(tmp_path / str(epoch), digits)
        assert len(images) == 16 * seen
        expected = descended(expected, lesson(uploaded(fed), images.inputs(), method.temperature))
    assert near(found, expected)
