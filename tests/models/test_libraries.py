"""Backbones of timm and torchvision: their own vectors, and one sentence where something is missing."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from fedstill.data.features import rows_of
from fedstill.models import backbones, mobile

VIT = "test_vit.r160_in1k"  # timm's own tiny model; its weights here are random


def library(name: str) -> Any:
    """The package, or a skip where it is not installed or made for another torch."""
    try:
        return import_module(name)
    except Exception as error:  # torchvision for another torch raises a RuntimeError
        pytest.skip(f"{name} can't be imported: {error}")


def pictures(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(256, (n, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def saved_timm(folder: Path) -> Any:
    timm = library("timm")
    torch.manual_seed(0)
    net = timm.create_model(VIT)
    place = folder / "timm" / VIT
    place.mkdir(parents=True)
    safetensors.torch.save_file(net.state_dict(), place / "model.safetensors", {"format": "pt"})
    return net.eval()


def test_a_model_of_timm_gives_its_own_features(tmp_path, monkeypatch):
    timm, net = library("timm"), saved_timm(tmp_path)
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path))
    backbone = backbones.load(f"timm:{VIT}", (3, 200, 170), download=False)
    images = pictures(20, 3, 200, 170)
    rows = rows_of(backbone, images)
    x = torch.cat([backbone.image_input(image) for image in images])
    with torch.no_grad():
        expected = net.forward_head(net.forward_features(x), pre_logits=True)
    assert np.allclose(rows, expected, atol=1e-5) and rows.shape[1] == net.num_features
    assert np.array_equal(rows_of(backbone, images[3:4]), rows[3:4])
    steps = timm.data.create_transform(**timm.data.resolve_data_config(model=net))
    theirs = steps(Image.fromarray(images[0].permute(1, 2, 0).numpy()))
    assert (x[0] - theirs).abs().max() < 2.1 / 127 and x.shape == (20, 3, 160, 160)  # a level of 255 here and there
    for shape in ((), (12,)):
        with pytest.raises(ValueError, match="takes images, but the records are"):
            backbones.load(f"timm:{VIT}", shape)


def test_weights_of_timm_that_are_unknown_absent_or_damaged_are_one_sentence(tmp_path, monkeypatch):
    saved_timm(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path))
    with pytest.raises(ValueError, match=r"timm has no pretrained model 'resnet51'; did you mean timm:resnet50"):
        backbones.load("timm:resnet51", (3, 64, 64))
    with pytest.raises(
        ValueError, match=r"'timm:test_resnet' is not on this machine; .* 'hf download timm/test_resnet"
    ):
        backbones.load("timm:test_resnet", (3, 64, 64), download=False)
    file = tmp_path / "timm" / VIT / "model.safetensors"
    state = safetensors.torch.load_file(file)
    del state["blocks.0.attn.qkv.weight"]
    safetensors.torch.save_file(state, file, {"format": "pt"})
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"the backbone 'timm:{VIT}' can't be loaded from '.*' \(.*; remove the"):
            backbones.load(f"timm:{VIT}", (3, 64, 64), download=False)
        file.write_bytes(b"something else")


def test_a_classifier_of_torchvision_gives_the_input_of_its_last_layer(tmp_path, monkeypatch):
    models = library("torchvision").models
    torch.manual_seed(0)
    net = models.shufflenet_v2_x0_5().eval()
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    monkeypatch.setattr(backbones, "_checkpoint", lambda *_: tmp_path / "weights.pth")
    backbone = backbones.load("torchvision:shufflenet_v2_x0_5", (3, 200, 170))
    images = pictures(20, 3, 200, 170)
    rows = rows_of(backbone, images)
    x = torch.cat([backbone.image_input(image) for image in images])
    with torch.no_grad():
        assert torch.allclose(net.fc(torch.from_numpy(rows)), net(x), atol=1e-4)
    assert np.array_equal(rows_of(backbone, images[3:4]), rows[3:4])
    theirs = models.get_model_weights("shufflenet_v2_x0_5").DEFAULT.transforms()(images[0])
    assert (x[0] - theirs).abs().max() < 1.1 / 57  # a level of 255 here and there
    torch.save({}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"can't be loaded from '.*weights.pth' \(Error.*; remove the file, and fetch"):
        backbones.load("torchvision:shufflenet_v2_x0_5", (3, 200, 170))


def test_classifiers_of_torchvision_that_are_unknown_or_absent_are_one_sentence(tmp_path, monkeypatch):
    library("torchvision")
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for name, sentence in (
        ("resnet51", r"torchvision has no classifier 'resnet51'; did you mean torchvision:resnet50\?"),
        ("x", "torchvision has no classifier 'x'; choose one of alexnet, "),
        ("mobilenet_v2.V3", "'mobilenet_v2' has no weights 'V3'; choose one of IMAGENET1K_V1, IMAGENET1K_V2"),
        ("resnet18", rf"not on this machine; .*, download https://.*pth and put the file into {tmp_path}$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            backbones.load(f"torchvision:{name}", (3, 64, 64), download=False)
    (tmp_path / "resnet18-f37072fd.pth").write_bytes(b"something else")
    with pytest.raises(
        ValueError, match=r"have the SHA-256 .*, not f37072fd\.\.\.; remove the file, and fetch it again"
    ):
        backbones.load("torchvision:resnet18", (3, 64, 64))


@pytest.mark.slow  # it tests batches of 224 pixels for independent rows
def test_mobilenet_of_torchvision_is_ours(tmp_path, monkeypatch):
    """The same weights give the same vectors of a photograph by torchvision's network, preparation and ours."""
    library("torchvision")
    place = mobile.installed(mobile.PUBLISHED["mobilenet-v2"])
    if place is None:
        pytest.skip(f"the weights are not installed: {mobile.PUBLISHED['mobilenet-v2'].install}")
    (tmp_path / place.name).write_bytes(place.read_bytes())
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path))
    images = torch.stack([torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images])
    names = ("mobilenet-v2", "torchvision:mobilenet_v2.IMAGENET1K_V1")
    one, other = (rows_of(backbones.load(name, tuple(images[0].shape)), images) for name in names)
    assert np.abs(one - other).max() < 1e-4  # float32 through 50 layers


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_library_that_is_absent_or_made_for_another_torch_is_one_sentence(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"--features {package}:x needs the package {package}, which .*pip install"):
        backbones.load(f"{package}:x", (3, 64, 64))
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{package}.py").write_text("raise RuntimeError('operator nms does not exist')")
    with pytest.raises(
        ValueError, match=rf"{package}, which can't be imported \(operator nms does not exist\); install"
    ):
        backbones.load(f"{package}:x", (3, 64, 64))
