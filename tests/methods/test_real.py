"""REAL with crops, several pictures in an image and soft labels: each against a computation written out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate, kl_div, log_softmax

from fedstill.base.records import AS_THEY_ARE, Examples, Records
from fedstill.data.sources import DataSet
from fedstill.methods import real
from fedstill.methods.real import Real
from fedstill.train.condensation import CondensedTraining

PLAIN = CondensedTraining(epochs=1, lr=0.1, momentum=0.0, weight_decay=0.0, batch_size=10_000, augment="none")
"""One step of steepest descent, as `small.STEEPEST`'s."""
WHOLE: dict[str, Any] = {"crops": 1, "smallest": 1.0, "pool": 10_000}
"""Of every record the whole image, so that pixels tell which one it is."""


def asked(method: Real, data: DataSet, folder: Path, *sizes: int) -> tuple[Any, Any, list[Any]]:
    """A federation whose clients have so many records, its parts, and what was sent to it."""
    parts = small.of_sizes(*sizes)
    fed = small.holding(parts, method, data, folder)
    method.server(fed)
    step = Real.select_labelled if method.soft_labels == "client" else Real.select
    return fed, parts, list(small.kept(fed, step))


def trained(fed: Any, own: Records) -> nn.Module:
    """The network of a client with these records, whose ``teacher`` is `small.STEEPEST`."""
    return small.descended(fed.new_model(), small.loss_on(own)).eval()


def test_the_pictures_sent_are_those_of_which_the_client_s_network_is_surest(digits: DataSet, tmp_path: Path) -> None:
    method = Real(ipc=3, choice="crops", crops=WHOLE, teacher=small.STEEPEST, training=PLAIN)  # type: ignore[arg-type]
    fed, parts, replies = asked(method, digits, tmp_path, 200, 150)
    for reply, (index, _) in zip(replies, parts, strict=True):
        own = digits.train[torch.from_numpy(index)]
        losses = cross_entropy(trained(fed, own)(own.inputs()).detach(), own.labels, reduction="none")
        for label in range(10):
            of_class = np.flatnonzero(own.labels.numpy() == label)
            surest = of_class[np.argsort(losses.numpy()[of_class], kind="stable")[:3]]
            sent = {image.numpy().tobytes() for image in reply.images[reply.labels == label]}
            assert sent == {own.images[i].numpy().tobytes() for i in surest}


def test_a_client_s_soft_labels_are_of_the_pictures_as_the_server_sees_them(
    digits: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Examples] = []
    monkeypatch.setattr(real, "train_on", lambda fed, images, _: used.append(images) or fed.new_model())
    method = Real(ipc=2, formation=2, soft_labels="client", teacher=small.STEEPEST, training=PLAIN)
    fed, parts, replies = asked(method, digits, tmp_path, 300)
    (reply,), own = replies, digits.train[torch.from_numpy(parts[0][0])]
    assert reply.images.shape == (20, 1, 8, 8) and reply.logits.shape == (20, 4, 10)
    size = 20 * 8 * 8 + 20 * 4 * 10 * 4  # a byte a pixel, four a logit; the header says what they are
    assert size < fed.journal.bytes_up < size + 260
    held = avg_pool2d(own.pixels(), 2)
    quarters = torch.stack([reply.images[..., r : r + 4, c : c + 4] for r in (0, 4) for c in (0, 4)], 1).flatten(0, 1)
    for quarter in quarters.float() / 255:  # a record at half of its sides, rounded to 8 bits
        assert float((held - quarter).abs().flatten(1).max(1).values.min()) <= 0.5 / 255 + 1e-6
    enlarged = interpolate(quarters.float(), size=(8, 8), mode="bilinear", align_corners=False).round() / 255
    x = own.normalisation.apply(enlarged)
    expected = trained(fed, own)(x).detach()
    torch.testing.assert_close(reply.logits.flatten(0, 1), expected, rtol=0, atol=1e-4)  # float32 sums
    (examples,) = used
    torch.testing.assert_close(examples.inputs(), x)
    assert torch.equal(examples.labels, reply.logits.flatten(0, 1).softmax(1))


def test_a_class_with_few_records_fills_its_images_with_them(digits: DataSet, tmp_path: Path) -> None:
    few = digits.train.of_class(3)[:3]

    class Few:
        train, test = few, digits.test[:20]

    fed = small.holding(small.of_sizes(3), Real(formation=2, training=PLAIN), Few, tmp_path, min_clients=1)
    (reply,) = fed.ask(Real.select)
    quarters = [reply.images[0, 0, r : r + 4, c : c + 4] for r in (0, 4) for c in (0, 4)]
    assert len(reply.images) == 1 and torch.equal(quarters[3], quarters[0])
    assert len({quarter.numpy().tobytes() for quarter in quarters}) == 3


def test_the_server_s_soft_labels_are_its_first_network_s(digits: DataSet, tmp_path: Path) -> None:
    method = Real(ipc=3, soft_labels="server", temperature=2.0, training=PLAIN)
    fed, _, (reply,) = asked(method, digits, tmp_path / "one", 300)
    pictures = Records(reply.images, reply.labels.long(), 10, digits.train.normalisation)
    first = small.descended(fed.new_model(), small.loss_on(pictures)).eval()
    x = pictures.inputs()
    with torch.no_grad():
        target = (first(x) / 2).softmax(1)

    def loss(model: nn.Module) -> Tensor:
        return 4 * kl_div(log_softmax(model(x) / 2, 1), target, reduction="batchmean")

    expected = small.descended(fed.new_model(draw=1), loss)
    again = small.holding(small.of_sizes(300), method, digits, tmp_path / "two")
    assert small.near(method.server(again), expected)
    assert not small.near(first, expected)


@pytest.mark.parametrize(("name", "value"), [("choice", "crops"), ("soft_labels", "client")])
def test_vectors_have_neither_crops_nor_pictures(name: str, value: str, digits: DataSet, tmp_path: Path) -> None:
    rows = Records(digits.train.images[:60].float().flatten(1), digits.train.labels[:60], 10, AS_THEY_ARE)

    class Table:
        train, test = rows, rows

    with pytest.raises(ValueError, match=f"{name} is '{value}', which is for images, but the records are vectors"):
        small.run(Real(**{name: value}), Table, tmp_path, model="mlp:hidden=8")  # type: ignore[arg-type]
