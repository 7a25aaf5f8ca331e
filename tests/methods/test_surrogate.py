"""REAL, FedGM and FedDM: what is sent, and what the server makes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import MODEL, STEEPEST, descended, holding, kept, loss_on, near, of_sizes, run, world

from fedstill.base.records import Records
from fedstill.data.sources import DataSet
from fedstill.engines.server import ServerFederation
from fedstill.methods import fedgm
from fedstill.methods.feddm import FedDM
from fedstill.methods.fedgm import FedGM
from fedstill.methods.parts.surrogate import union
from fedstill.methods.real import Real
from fedstill.protocol import Method, client_steps

QUICK: dict[str, Any] = {"training": {"epochs": 2}}
MATCHING: dict[str, Any] = {"nets": 2, "batch_size": 16}


def one_class_each(method: Method, data: DataSet, folder: Path) -> tuple[ServerFederation, Any]:
    """Ten clients with one digit each, and the replies they sent."""
    own = [np.flatnonzero(data.train.labels.numpy() == label) for label in range(10)]
    fed = world(method, data, folder, [(o, o[:0]) for o in own]).federation
    return fed, fed.ask(next(iter(client_steps(type(method)).values())), at_most={"n": 30})


@pytest.mark.parametrize(
    "method", [Real(ipc=3, **QUICK), FedGM(ipc=3, matching=MATCHING, **QUICK)], ids=["real", "fedgm"]
)
def test_an_upload_is_ipc_images_of_the_classes_a_client_holds(method: Method, digits: DataSet, tmp_path: Path) -> None:
    fed, replies = one_class_each(method, digits, tmp_path)
    for label, reply in enumerate(replies):
        assert reply.images.shape == (3, 1, 8, 8)
        assert reply.images.dtype == torch.uint8
        assert reply.labels.tolist() == [label] * 3
    # one byte a pixel, one a label; the header says what they are
    size = 3 * (8 * 8 + 1)
    assert size < fed.journal.bytes_up / 10 < size + 260
    images = union(fed, replies)
    assert images.labels.tolist() == sorted(list(range(10)) * 3)
    assert torch.equal(images.images[3:6], replies[1].images)


@pytest.mark.parametrize("choice", ["random", "representatives"])
def test_real_sends_the_clients_own_images(choice: Any, digits: DataSet, tmp_path: Path) -> None:
    _, replies = one_class_each(Real(ipc=4, choice=choice, **QUICK), digits, tmp_path)
    for label, reply in enumerate(replies):
        held = {image.numpy().tobytes() for image in digits.train.of_class(label).images}
        sent = [image.numpy().tobytes() for image in reply.images]
        assert set(sent) <= held
        assert len(set(sent)) == 4


def test_fedgm_sends_none_of_them(digits: DataSet, tmp_path: Path) -> None:
    _, replies = one_class_each(FedGM(ipc=4, matching=MATCHING, **QUICK), digits, tmp_path)
    for label, reply in enumerate(replies):
        held = {image.numpy().tobytes() for image in digits.train.of_class(label).images}
        assert not held & {image.numpy().tobytes() for image in reply.images}


def test_a_class_with_fewer_records_than_asked_for_sends_what_it_has(digits: DataSet, tmp_path: Path) -> None:
    class Tiny:
        train = digits.train[:12]
        test = digits.test

    model, fed = run(Real(ipc=5, **QUICK), Tiny, tmp_path, clients=2)
    assert MODEL
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert fed.journal.refusals() == []


def test_the_pictures_are_kept_for_the_report(digits: DataSet, tmp_path: Path) -> None:
    run(FedGM(ipc=1, matching=MATCHING, **QUICK), digits, tmp_path)
    with np.load(tmp_path / "images" / "synthetic.npz", allow_pickle=False) as kept:
        assert kept["images"].shape[1:] == (1, 8, 8)
        assert len(kept["images"]) == len(kept["labels"])


def test_feddm_s_server_goes_on_from_its_last_model(digits: DataSet, tmp_path: Path) -> None:
    matching: Any = {"steps": 1, "batch_size": 16}
    method = FedDM(rounds=3, ipc=1, matching=matching, training=STEEPEST.model_copy(update={"epochs": 2}))
    fed = holding(of_sizes(60, 60), method, digits, tmp_path)
    found, expected = method.server(fed), fed.new_model()
    for round in range(3):
        expected = descended(expected, loss_on(union(fed, kept(fed, FedDM.distil, round))), steps=2)
    assert near(found, expected)


def test_soft_labels_are_those_of_a_network_trained_on_the_client_s_records(digits: DataSet, tmp_path: Path) -> None:
    method = FedGM(ipc=1, matching=MATCHING, soft_labels=True, teacher=STEEPEST, **QUICK)
    hard = FedGM(ipc=1, matching=MATCHING, **QUICK)
    parts = of_sizes(200, 100)
    fed = holding(parts, method, digits, tmp_path / "soft")
    trained: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedgm, "train_on", lambda fed, images, training: trained.append(images) or fed.new_model())
        method.server(fed)
    soft = list(kept(fed, FedGM.distil_soft))
    plain = holding(parts, hard, digits, tmp_path / "hard")
    plain.ask(FedGM.distil)
    for reply, other, (own, _) in zip(soft, kept(plain, FedGM.distil), parts, strict=True):
        assert torch.equal(reply.images, other.images)  # the same images
        teacher = descended(fed.new_model(), loss_on(digits.train[torch.from_numpy(own)])).eval()
        images = Records(reply.images, other.labels.long(), 10, digits.train.normalisation)
        with torch.no_grad():
            torch.testing.assert_close(reply.logits, teacher(images.inputs()), rtol=0, atol=1e-4)  # float32 sums
    (examples,) = trained
    expected = torch.cat([reply.logits for reply in soft]).softmax(1)
    assert torch.equal(examples.labels, expected)
    images = Records(torch.cat([r.images for r in soft]), examples.labels.argmax(1), 10, digits.train.normalisation)
    assert torch.equal(examples.inputs(), images.inputs())


def test_soft_labels_want_images_that_hold_one_each(digits: DataSet, tmp_path: Path) -> None:
    method = FedGM(matching={**MATCHING, "formation": 2}, soft_labels=True, **QUICK)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the records are images and formation is 2; leave --soft-labels out"):
        run(method, digits, tmp_path)
