"""``fedstill attack --updates``: files as plain PyTorch, Flower and NVFlare save them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.attacks.saved import named
from fedstill.base.seeds import isolated
from fedstill.cli import main
from fedstill.data.sources import DataSet

SMOOTH = "convnet:width=16,depth=2,activation=swish,norm=none,pooling=none"
SHAPE = ["--shape", "1", "8", "8"]
# the digits' own normalisation
TASK = ["--model", SMOOTH, *SHAPE, "--mean", "0.3056523391693256", "--std", "0.3760556917068352"]
PLACE = 30


def network(spec: str = SMOOTH) -> nn.Module:
    with isolated(7):
        return models.build(spec, (1, 8, 8), 10)


def gradient(model: nn.Module, digits: DataSet, n: int = 1) -> list[Tensor]:
    records = digits.train[PLACE : PLACE + n]
    loss = cross_entropy(model(records.inputs()), records.labels)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def attacked(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    main(["attack", "--updates", str(folder), *TASK, *flags])
    assert "updates.json" in capsys.readouterr().out
    found: list[dict[str, Any]] = json.loads((folder / "attack" / "updates.json").read_text())["updates"]
    return found


@pytest.mark.slow
def test_a_list_of_gradients_gives_the_image_back(
    tmp_path: Path, digits: DataSet, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = network(), tmp_path / "updates"
    folder.mkdir()
    torch.save(gradient(model, digits), folder / "client-0.pt")
    torch.save(model.state_dict(), tmp_path / "start.pt")
    flags = ["--kind", "gradients", "--start", str(tmp_path / "start.pt"), "--records", "1", "--inversion.steps", "300"]
    (found,) = attacked(folder, capsys, *flags)
    record = digits.train[PLACE]
    assert found["labels"] == [int(digits.train.labels[PLACE])] and found["distance"] < 0.01
    image = torch.from_numpy(np.array(Image.open(folder / "attack" / found["images"])))
    error = ((image.double() - record.images[0].double()) / 255).square().mean()
    other = ((image.double() - digits.train.images[PLACE + 1, 0].double()) / 255).square().mean()
    assert float(error) < 0.01 < float(other)


@pytest.mark.parametrize("form", ["torch", "safetensors", "flower", "named", "nvflare", "wrapped"])
@pytest.mark.parametrize("kind", ["gradients", "weights", "changes"])
def test_every_form_tells_the_classes(
    form: str, kind: str, tmp_path: Path, digits: DataSet, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder, lr = network(), tmp_path / "updates", 0.1
    folder.mkdir()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = dict(zip(before, gradient(model, digits, 4), strict=True))
    sent = {
        "gradients": step,
        "weights": {name: before[name] - lr * g for name, g in step.items()},
        "changes": {name: -lr * g for name, g in step.items()},
    }[kind]
    if form == "safetensors":
        safetensors.torch.save_file(sent, folder / "a.safetensors")
    elif form == "flower":
        np.savez(folder / "round-1-weights.npz", *[value.numpy() for value in sent.values()])
    elif form == "named":
        np.savez(folder / "a.npz", **{name: value.numpy() for name, value in sent.items()})
    elif form == "nvflare":
        torch.save({"model": sent, "train_conf": {"train": {"model": "net"}}}, folder / "FL_global_model.pt")
    else:
        torch.save({"_module." * (form == "wrapped") + name: value for name, value in sent.items()}, folder / "a.pth")
    np.savez(tmp_path / "start.npz", *[value.numpy() for value in before.values()])
    start = ["--start", str(tmp_path / "start.npz")] if kind == "weights" else []
    (found,) = attacked(folder, capsys, "--kind", kind, *start, "--records", "4", "--no-images")
    # before any training, a class's share decides the sign of its bias's gradient
    assert found["labels"] == sorted(digits.train.labels[PLACE : PLACE + 4].tolist())
    assert "images" not in found


class Bomb:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.place,)


def test_nothing_in_a_file_is_run_and_what_does_not_fit_is_a_sentence(
    tmp_path: Path, digits: DataSet, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = network(), tmp_path / "updates"

    def fails(*flags: str, content: Any = None, name: str = "a.pt") -> str:
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        if name.endswith(".npz") and content is not None:
            np.savez(folder / name, content)
        elif content is not None:
            torch.save(content, folder / name)
        with pytest.raises(SystemExit) as stop:
            main(["attack", "--updates", str(folder), *flags])
        assert stop.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    values, few = gradient(model, digits), [*TASK, "--kind", "gradients"]
    assert "can't read it as plain tensors" in fails(*few, content={"a": Bomb(tmp_path / "ran")})
    objects = np.array([Bomb(tmp_path / "ran")], dtype=object)
    assert "numpy can't read it as plain arrays" in fails(*few, content=objects, name="a.npz")
    assert not (tmp_path / "ran").exists()
    assert "has no files of updates; they end in .bin, .npz" in fails(*few)
    for place, state in ((tmp_path / "none", "missing"), (tmp_path / "file", "a file")):
        (tmp_path / "file").touch()
        with pytest.raises(SystemExit):
            main(["attack", "--updates", str(place), *few])
        assert f"{place} is {state}; give the folder of the updates" in " ".join(capsys.readouterr().err.split())
    assert "--model and --shape and --kind are missing; for example" in fails(content=values)
    assert "--start is missing: without the weights before" in fails(*TASK, "--kind", "weights", content=values)
    assert f"has 2 tensors without names, the model {len(values)}" in fails(*few, content=values[:2])
    names = list(model.state_dict())
    assert f"lacks 1 tensors of the model, such as '{names[-1]}'" in fails(
        *few, content=dict(zip(names[:-1], values[:-1], strict=True))
    )
    wide = [*few, "--num-classes", "12"]
    assert "of shape (10, 1024), the model of (12, 1024); check --model" in fails(*wide, content=values)
    values[0] = torch.full_like(values[0], torch.nan)
    assert "that are not finite" in fails(*few, content=values)
    assert "--mean and --std need 1 or 1 values" in fails(*few, "--mean", "1", "2", content=values)
    with pytest.raises(SystemExit):
        main(["attack", "--updates", "--model", "convnet"])
    assert "--updates needs the folder of the files" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["attack", "--updates", "--help"])
    assert stop.value.code == 0 and "--kind" in capsys.readouterr().out


def test_buffers_may_be_missing_from_gradients_but_not_from_weights(tmp_path: Path) -> None:
    model = network("resnet8")
    trainable = {name: p.detach() for name, p in model.named_parameters()}
    torch.save(list(trainable.values()), tmp_path / "a.pt")
    assert list(named(tmp_path / "a.pt", model, whole=False)) == list(trainable)
    safetensors.torch.save_file(trainable, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="running_mean"):
        named(tmp_path / "b.safetensors", model, whole=True)
