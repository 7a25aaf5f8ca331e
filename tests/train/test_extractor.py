"""The public extractor: pretrained once, found again, resumed after a kill; files and refusals."""

import logging
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from doubles import Killed
from torch import Tensor, nn

from fedstill import models
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.protocol import state
from fedstill.train import contrastive, extractor
from fedstill.train.contrastive import SimCLR
from fedstill.train.extractor import Extractor

RECIPE = Extractor(simclr=SimCLR(epochs=3, batch_size=16, projection=(8, 4)))


def new_model(spec: str = "convnet:width=4,depth=2,norm=batch", seed: int = 0, num_classes: int = 3) -> nn.Module:
    with isolated(seed):
        return models.build(spec, (1, 8, 8), num_classes)


def public(n: int = 40, seed: int = 0, mean: float = 0.4) -> Records:
    images = torch.randint(0, 256, (n, 1, 8, 8), generator=stream(seed), dtype=torch.uint8)
    return Records(images, torch.zeros(n, dtype=torch.int64), 1, Normalisation((mean,), (0.3,)))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def kept(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "extractors").iterdir() if path.suffix != ".lock")


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each pretraining that was started."""
    calls: list[int] = []
    original = SimCLR.fit

    def counted(self: SimCLR, *args: object, **options: object) -> float:
        calls.append(1)
        return original(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SimCLR, "fit", counted)
    return calls


def test_it_is_trained_once_and_then_found(tmp_path: Path, trainings: list[int]) -> None:
    model, calls = new_model(), []
    before, rng = {name: value.clone() for name, value in state(model).items()}, stream(1)
    first = RECIPE.obtain(model, public(), rng, cache_dir=tmp_path, progress=lambda done, of: calls.append((done, of)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert equal(state(model), before)
    assert torch.equal(rng.get_state(), stream(1).get_state())
    assert kept(tmp_path) == [".safetensors"]  # and no checkpoint
    second = RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path)
    assert trainings == [1]
    assert equal(first, second)
    model.load_state_dict(first)
    direct = new_model()
    RECIPE.simclr.fit(direct, public(), stream(1))
    assert equal(state(model), state(direct))


@pytest.mark.parametrize("change", ["images", "normalisation", "recipe", "start", "structure", "rng", "advanced rng"])
def test_whatever_it_depends_on_is_in_the_key(change: str, tmp_path: Path, trainings: list[int]) -> None:
    RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path)
    images = {"images": public(seed=1), "normalisation": public(mean=0.5)}.get(change, public())
    other = Extractor(simclr=RECIPE.simclr.model_copy(update={"lr": 0.002}))
    spec = "convnet:width=4,depth=2,norm=batch" + (",activation=swish" if change == "structure" else "")
    rng = stream(2 if change == "rng" else 1)
    if change == "advanced rng":
        torch.rand(1, generator=rng)
    recipe = other if change == "recipe" else RECIPE
    recipe.obtain(new_model(spec, seed=int(change == "start")), images, rng, cache_dir=tmp_path)
    assert trainings == [1, 1]
    assert kept(tmp_path) == [".safetensors"] * 2


def test_labels_are_not_in_the_key(tmp_path: Path, trainings: list[int]) -> None:
    images = public()
    labelled = Records(images.images, torch.arange(40) % 5, 5, images.normalisation)
    for records in (images, labelled):
        RECIPE.obtain(new_model(), records, stream(1), cache_dir=tmp_path)
    assert trainings == [1]


def test_a_killed_pretraining_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(done: int, _of: int) -> None:
        if done == 2:
            raise Killed

    whole = RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path / "whole")
    monkeypatch.setattr(contrastive, "_CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(Killed):
        RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path, progress=kill)
    assert kept(tmp_path) == [".checkpoint"]
    calls: list[int] = []
    found = RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path, progress=lambda d, _: calls.append(d))
    assert calls == [3]
    assert equal(found, whole)
    assert kept(tmp_path) == [".safetensors"]


def test_a_damaged_cache_file_is_made_again(
    tmp_path: Path, trainings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    first = RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path)
    (file,) = (tmp_path / "extractors").glob("*.safetensors")
    whole = file.read_bytes()
    for damaged in (whole[:-9], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], b""):
        file.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert equal(RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path), first)
        assert "not using a cached extractor" in caplog.text and "damaged" in caplog.text
        caplog.clear()
        assert file.read_bytes() == whole
    assert trainings == [1] * 4


def test_the_cache_is_where_data_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "elsewhere"))
    RECIPE.obtain(new_model(), public(), stream(1))
    assert kept(tmp_path / "elsewhere") == [".safetensors"]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="can't be written.*FEDSTILL_CACHE") as caught:
        RECIPE.obtain(new_model(), public(), stream(1), cache_dir=tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_no_public_images_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--public") as caught:
        RECIPE.obtain(new_model(), None, stream(1), cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_without_pretraining_the_random_start_is_copied(tmp_path: Path) -> None:
    model = new_model()
    found = Extractor(pretrain="none").obtain(model, None, stream(1), cache_dir=tmp_path)
    assert equal(found, state(model))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(found.values(), state(model).values(), strict=True))
    assert not os.listdir(tmp_path)


# Files ---------------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_to_the_bit_and_needs_no_public_images(tmp_path: Path, trainings: list[int]) -> None:
    weights, path = state(new_model(seed=5)), tmp_path / "deep" / "er.safetensors"
    extractor.save(path, weights)
    for pretrain in ("simclr", "none"):
        recipe = Extractor(pretrain=pretrain, file=str(path))  # type: ignore[arg-type]
        assert equal(recipe.obtain(new_model(), None, stream(1), cache_dir=tmp_path), weights)
    assert trainings == []
    others = safetensors.torch.load_file(path)
    assert all(torch.equal(others[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("classifier.bias"), "'classifier.bias' is missing"),
        (lambda w: w.update(more=torch.zeros(1)), "the model has no 'more'"),
        (lambda w: w.update({"classifier.bias": torch.zeros(4)}), r"'classifier.bias'.*shape \(4,\).*shape \(3,\)"),
        (lambda w: w.update({"classifier.bias": torch.zeros(3).half()}), "'classifier.bias'.*float16.*float32"),
        (lambda w: w.update({"classifier.bias": torch.full((3,), torch.nan)}), "'classifier.bias'.*not finite"),
    ],
)
def test_weights_of_another_model_are_one_sentence(spoil: object, message: str, tmp_path: Path) -> None:
    weights, path = dict(state(new_model())), tmp_path / "weights"
    spoil(weights)  # type: ignore[operator]
    extractor.save(path, weights)
    with pytest.raises(ValueError, match=f"weights' holds no weights of this model.*{message}") as caught:
        Extractor(file=str(path)).obtain(new_model(), None, stream(1))
    assert "\n" not in str(caught.value)


def test_what_is_no_file_of_weights_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("weights")
    with pytest.raises(ValueError, match="text' holds no weights of this model.*neither safetensors nor torch's"):
        extractor.load(tmp_path / "text", new_model())
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="can't be read.*check the path") as caught:
            extractor.load(missing, new_model())
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_torch_state_dict_and_foreign_safetensors_are_taken(nested: bool, legacy: bool, tmp_path: Path) -> None:
    weights = new_model(seed=5).state_dict()
    content = {"state_dict": weights, "epoch": 3} if nested else weights
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    safetensors.torch.save_file(dict(weights), tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        found = Extractor(file=str(tmp_path / name)).obtain(new_model(), None, stream(1))
        assert equal(found, state(new_model(seed=5)))


class Bomb:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.place,)


def test_nothing_in_a_file_of_torch_is_run(tmp_path: Path) -> None:
    torch.save({**new_model().state_dict(), "more": Bomb(tmp_path / "ran")}, tmp_path / "bomb.pt")
    torch.save(new_model(), tmp_path / "module.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "module.pt").read_bytes()[:500])
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    for name, why in {
        "bomb.pt": "torch can't read it as plain tensors: ",
        "module.pt": "torch can't read it as plain tensors: ",
        "half.pt": "torch can't read it as plain tensors: ",
        "tensor.pt": "it has a Tensor that is not a state dict",
    }.items():
        with pytest.raises(ValueError, match=why) as caught:
            extractor.load(tmp_path / name, new_model())
        assert "\n" not in str(caught.value) and "torch.save(model.state_dict(), file)" in str(caught.value)
    assert not (tmp_path / "ran").exists()
