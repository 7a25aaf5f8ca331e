"""Public backbones: what they load, how they prepare images, and that no record's vector depends on another's."""

import json

import numpy as np
import pytest
import safetensors.torch
import tiny_backbones
import torch
from PIL import Image

from fedstill.base import seeds
from fedstill.base.records import Normalisation
from fedstill.data import features
from fedstill.data import public as public_data
from fedstill.data.features import rows_of
from fedstill.models import backbones
from fedstill.models.backbones import Preprocessing
from fedstill.models.patches import Patches

slow = pytest.mark.slow  # transformers takes seconds to import


def pictures(n: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (n, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


# Preparation of images -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
@pytest.mark.parametrize("size", [(50, 37), (9, 20), (224, 224)])
def test_resizing_gives_pillow_s_numbers(size, resample):
    """A level here and there is all that differs; a filter of another width or place is 10 levels off."""
    image = pictures(1, 3, 61, 83)[0]
    ours = Preprocessing(size=size, resample=int(resample))(image)[0] * 255
    pillow = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size[::-1], resample)
    difference = (ours - torch.from_numpy(np.array(pillow)).permute(2, 0, 1)).abs()
    assert difference.max() <= 2.001 and difference.mean() < 0.02


@pytest.mark.parametrize(("height", "width"), [(61, 83), (83, 61), (40, 40), (10, 200)])
def test_the_shorter_side_and_the_crop_are_pillow_s(height, width):
    image = pictures(1, 3, height, width)[0]
    ours = Preprocessing(shortest=36, crop=(32, 32), resample=3)(image)[0] * 255
    scaled = (36, 36 * width // height) if height <= width else (36 * height // width, 36)
    pillow = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(scaled[::-1], Image.Resampling.BICUBIC)
    top, left = (scaled[0] - 32) // 2, (scaled[1] - 32) // 2
    pillow = pillow.crop((left, top, left + 32, top + 32))
    assert (ours - torch.from_numpy(np.array(pillow)).permute(2, 0, 1)).abs().max() <= 2.001


def test_gray_becomes_colour_and_small_images_are_padded_for_a_crop():
    image = pictures(1, 1, 6, 8)[0]
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    x = Preprocessing(crop=(10, 10), mean=mean, std=std)(image)[0] * torch.tensor(std)[:, None, None]
    x += torch.tensor(mean)[:, None, None]
    assert torch.allclose(x[:, 2:8, 1:9], (image / 255).expand(3, -1, -1), atol=1e-6)
    assert x[:, :2].abs().max() < 1e-6 and x[:, :, 9:].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"size": 224}, {"size": (224, 224)}),
        ({"size": {"height": 30, "width": 40}}, {"size": (30, 40)}),
        (
            {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}},
            {"shortest": 256, "crop": (224, 224)},
        ),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, {"shortest": 256, "crop": (224, 224)}),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, {"size": (384, 384)}),
        ({"do_resize": False}, {}),
        ({"image_processor": {"size": 20}}, {"size": (20, 20)}),
    ],
)
def test_the_files_of_a_model_are_understood(tmp_path, facts, found):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    half = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    assert Preprocessing.read(tmp_path, 16) == Preprocessing(**found, **half)
    assert Preprocessing.read(tmp_path / "none", 16) == Preprocessing(size=(16, 16), **half)


def test_an_unknown_filter_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"resample": 1}')
    with pytest.raises(ValueError, match=r"resizes by filter 1; only \[0, 2, 3\] are supported"):
        Preprocessing.read(tmp_path, 16)


# Backbones -----------------------------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("kind", tiny_backbones.KINDS)
def test_a_saved_model_gives_the_vectors_of_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    folder = tiny_backbones.save_images(kind, tmp_path / kind)
    backbone = backbones.load(f"hf:{folder}", (1, 8, 8))
    images = pictures(70, 1, 8, 8)
    rows = torch.from_numpy(rows_of(backbone, images))
    chosen = transformers.CLIPVisionModel if kind.startswith("clip") else transformers.AutoModel
    net = chosen.from_pretrained(folder).eval()
    x = torch.cat([backbone.image_input(image) for image in images])
    with torch.no_grad():
        output = net(pixel_values=x)
    expected = output.last_hidden_state[:, 0] if kind == "vit" else output.pooler_output.flatten(1)
    assert rows.shape == (70, 16) and torch.allclose(rows, expected, atol=1e-5)


@slow
@pytest.mark.parametrize("kind", [*tiny_backbones.KINDS, "texts"])
def test_a_record_s_vector_has_the_same_bits_whatever_the_others_are(tmp_path, kind):
    pytest.importorskip("transformers")
    if kind == "texts":
        backbone = backbones.load(f"hf:{tiny_backbones.save_texts(tmp_path)}", ())
        records, others = (tiny_backbones.reviews(90, seed)[0] for seed in (0, 1))
        mixed = [own if i % 3 else other for i, (own, other) in enumerate(zip(records, others, strict=True))]
    else:
        backbone = backbones.load(f"hf:{tiny_backbones.save_images(kind, tmp_path)}", (3, 9, 9))
        records, others = pictures(90, 3, 9, 9), pictures(90, 3, 9, 9, seed=1)
        mixed = torch.where((torch.arange(90) % 3 > 0)[:, None, None, None], records, others)
    rows = rows_of(backbone, records)
    kept = np.arange(90) % 3 > 0
    assert np.array_equal(rows_of(backbone, mixed)[kept], rows[kept])
    assert not np.array_equal(rows_of(backbone, mixed)[~kept], rows[~kept])
    assert np.array_equal(rows_of(backbone, records[7:]), rows[7:])
    assert np.array_equal(rows_of(backbone, records[40:41]), rows[40:41])


@slow
@pytest.mark.parametrize("kind", [*tiny_backbones.KINDS, "texts"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
            ],
        ),
    ],
)
def test_in_bfloat16_vectors_are_those_of_float32_but_for_rounding(tmp_path, kind, device, monkeypatch):
    """A GPU computes in bfloat16, which a processor does here too when it is told to."""
    pytest.importorskip("transformers")
    if kind == "texts":
        backbone = backbones.load(f"hf:{tiny_backbones.save_texts(tmp_path)}", ())
        records = tiny_backbones.reviews(60)[0]
    else:
        backbone = backbones.load(f"hf:{tiny_backbones.save_images(kind, tmp_path)}", (3, 9, 9))
        records = pictures(60, 3, 9, 9)
    whole = rows_of(backbone, records)
    assert features.is_half(backbone, "cuda") and not features.is_half(backbone, "cpu")
    monkeypatch.setattr(features, "is_half", lambda *_: True)
    half = rows_of(backbone, records, device=device)
    assert half.dtype == np.float32 and not np.array_equal(half, whole)
    assert np.abs(half - whole).max() < 0.05 * np.abs(whole).max()  # 8 bits in each of a few layers
    kept = rows_of(backbone, records[:30], device=device)
    assert np.array_equal(kept, half[:30])  # the same bits whatever the others are
    monkeypatch.undo()
    assert np.array_equal(rows_of(backbone, records), whole)  # the caller's network is as it was


@slow
def test_a_text_s_vector_is_the_mean_of_its_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tiny_backbones.save_texts(tmp_path)
    texts, _ = tiny_backbones.reviews(20)
    rows = torch.from_numpy(rows_of(backbones.load(f"hf:{folder}", ()), texts))
    net = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, row in zip(texts, rows, strict=True):
        with torch.no_grad():
            states = net(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert torch.allclose(row, states.mean(0), atol=1e-5)


@slow
def test_the_digest_follows_weights_preparation_and_tokens_not_the_place(tmp_path):
    pytest.importorskip("transformers")
    one = tiny_backbones.save_images("vit", tmp_path / "one")
    same = tiny_backbones.save_images("vit", tmp_path / "same")
    other = tiny_backbones.save_images("vit", tmp_path / "other", seed=1)
    sized = tiny_backbones.save_images("vit", tmp_path / "sized", resample=3)
    first, *rest = (backbones.load(f"hf:{folder}", ()).digest for folder in (one, same, other, sized))
    assert rest[0] == first and len({first, *rest}) == 3
    texts = tiny_backbones.save_texts(tmp_path / "texts")
    before = backbones.load(f"hf:{texts}", ()).digest
    content = (texts / "tokenizer.json").read_text()
    (texts / "tokenizer.json").write_text(content.replace("good", "odd"))
    assert backbones.load(f"hf:{texts}", ()).digest != before


@slow
def test_what_is_not_here_is_one_sentence_with_the_folder_to_fill(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(ValueError, match=r"'hf download nobody/nothing --local-dir nobody/nothing' and put the folder"):
        backbones.load("hf:nobody/nothing", ())
    tiny_backbones.save_images("vit", tmp_path / "nobody/nothing")
    assert backbones.load("hf:nobody/nothing", ()).takes == "images"
    whole = safetensors.torch.load_file(tmp_path / "nobody/nothing/model.safetensors")
    del whole["embeddings.cls_token"]
    safetensors.torch.save_file(whole, tmp_path / "nobody/nothing/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="its weights lack 'embeddings.cls_token'"):
        backbones.load("hf:nobody/nothing", ())
    for broken, message in (("model.safetensors", "can't be loaded from"), ("config.json", "can't be loaded from")):
        (tmp_path / "nobody/nothing" / broken).write_bytes(b"{")
        with pytest.raises(ValueError, match=message) as refused:
            backbones.load("hf:nobody/nothing", ())
        assert "\n" not in str(refused.value)
    (tmp_path / "nobody/nothing/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="its kind is 'gpt2'; supported are vit, dinov2"):
        backbones.load("hf:nobody/nothing", ())
    with pytest.raises(ValueError, match="there is no folder './none' with a backbone"):
        backbones.load("hf:./none", ())


@slow
def test_a_backbone_of_the_hub_is_downloaded_where_there_is_a_network():
    pytest.importorskip("transformers")
    from huggingface_hub import HfApi

    try:
        HfApi().model_info("hf-internal-testing/tiny-random-ViTModel", timeout=5)
    except Exception:
        pytest.skip("no network")
    backbone = backbones.load("hf:hf-internal-testing/tiny-random-ViTModel", ())
    assert np.isfinite(rows_of(backbone, pictures(2, 3, 30, 30))).all()


def test_own_functions_and_scattering_are_backbones_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_backbone.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))\n"
        "\n\ndef number():\n    return 3\n\n\ndef nan():\n    return nn.Threshold(300.0, float('nan'))\n"
    )
    images = pictures(20, 3, 8, 8)
    backbone = backbones.load("own_backbone:net", (3, 8, 8))
    rows = rows_of(backbone, images)
    assert np.allclose(rows, backbone.net(images / 255).numpy(), atol=1e-6)
    assert np.array_equal(rows_of(backbone, images[3:4]), rows[3:4])
    one, other = (backbones.load("scattering", (3, side, side)) for side in (8, 16))
    assert rows_of(one, images).shape[1] == 3 * 81 * 4 and one.digest != other.digest
    for name, message in (
        ("own_backbone:number", "is a int; the function must return a torch.nn.Module"),
        ("own_backbone:none", "can't be made"),
        ("resnet18", "there is no backbone 'resnet18'; name mobilenet-v2, efficientnet-lite0, a model of another"),
        ("mobilenetv2", r"there is no backbone 'mobilenetv2'; did you mean mobilenet-v2\?"),
    ):
        with pytest.raises(ValueError, match=message):
            backbones.load(name, (3, 8, 8))
    with pytest.raises(ValueError, match="gives record 0 a vector that is not finite"):
        rows_of(backbones.load("own_backbone:nan", (3, 8, 8)), images)
    with pytest.raises(ValueError, match="takes images, but the records are texts"):
        rows_of(backbone, ["a text"])
    with pytest.raises(ValueError, match="takes images, but the records are texts"):
        backbones.load("scattering", ())
    with pytest.raises(ValueError, match="the records are vectors already; leave --features out"):
        backbones.load("scattering", (12,))


def test_patches_are_learnt_once_from_public_images(tmp_path, monkeypatch):
    learn, asked = Patches.learn, []
    monkeypatch.setattr(Patches, "learn", lambda net, public, rng: (asked.append(len(public)), learn(net, public, rng)))
    name = "patches:centroids=4,public=noise=60"
    one, again = (features.load_backbone(name, (3, 8, 8), cache_dir=tmp_path) for _ in range(2))
    assert asked == [60] and one.digest == again.digest and one.takes == "images"
    others = (name.replace("60", "61"), (3, 8, 8)), (name.replace("=4", "=5"), (3, 8, 8)), (name, (1, 8, 8))
    digests = {features.load_backbone(*other, cache_dir=tmp_path).digest for other in others}
    assert len(digests | {one.digest}) == 4
    images = pictures(5, 3, 8, 8)
    public = public_data.load("noise=60", (3, 8, 8), Normalisation((0.5,) * 3, (0.25,) * 3))
    with seeds.isolated(0):
        net = Patches((3, 8, 8), 2, centroids=4)
    learn(net, public, seeds.stream(0, "learn"))
    assert np.allclose(rows_of(again, images), net.features((images / 255 - 0.5) / 0.25).numpy(), atol=1e-5)
    with pytest.raises(ValueError, match="takes images, but the records are texts"):
        features.load_backbone(name, ())
    with pytest.raises(ValueError, match="are some of a simulation's own records"):
        features.load_backbone("patches:public=held=5", (3, 8, 8), cache_dir=tmp_path)
