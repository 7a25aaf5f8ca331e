"""A model to hand on: files that plain PyTorch reads, and the card beside them."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tiny_backbones
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from fedstill import RunRecord, load_data, run
from fedstill.base import seeds
from fedstill.base.records import AS_THEY_ARE, Normalisation
from fedstill.cli import main
from fedstill.data import features, pictures
from fedstill.experiment.trained import Trained
from fedstill.models.build import build
from fedstill.report import pixels as reader
from fedstill.report import programs
from fedstill.report import publish as publishing

TASK = {"data": "digits", "clients": 2, "limit": 100, "model": "convnet:width=8,depth=2", "workers": 0}
POOLED = [
    *((name, (1, 28, 28)) for name in ("dense-mnist", "kadp-mnist", "lenet")),
    *((name, (3, 32, 32)) for name in ("dense-cnn1", "kadp-cifar", "lenet")),
]
"""Networks with 2 x 2 pooling, which looks at the size of a batch."""
PLAIN = """
import sys
import torch
images = torch.load(sys.argv[2], weights_only=True)
torch.save(torch.export.load(sys.argv[1]).module()(images), sys.argv[3])
assert not [name for name in sys.modules if name.startswith("fedstill")]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return run("fedavg", **TASK, rounds=1, out=tmp_path_factory.mktemp("run") / "fedavg")  # type: ignore[arg-type]


@pytest.mark.slow
def test_plain_pytorch_computes_the_same_logits(
    finished: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "published"
    main(["publish", str(finished.folder), "--out", str(out), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["README.md", "config.json", "model.pt2", "model.safetensors", "pixels.py"]
    images = load_data("digits").test.images[:5]
    torch.save(images, tmp_path / "images")
    words = [sys.executable, "-W", "error", "-c", PLAIN, str(out / "model.pt2"), str(tmp_path / "images")]
    subprocess.run([*words, str(tmp_path / "logits")], check=True, cwd=tmp_path)
    expected = finished.load_model()(images)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected, rtol=1e-5, atol=1e-5)
    weights = load_file(out / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) >= told["num_parameters"] == finished["num_parameters"]
    card = (out / "README.md").read_text()
    assert (
        f"{100 * finished['accuracy']:.2f} %" in card and "* No guarantee.\n* The replies may reveal any record" in card
    )
    assert "none" not in card.partition("## Privacy")[2].partition("##")[0]
    with pytest.raises(SystemExit):  # a second time, nothing is overwritten
        main(["publish", str(finished.folder), "--out", str(out)])
    assert f"{out} exists; choose an empty folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape"),
    [*POOLED, ("scattering", (1, 8, 8)), ("patches:centroids=8,side=3", (3, 8, 8)), ("mlp:hidden=8", (5,))],
)
def test_a_program_takes_any_number_of_records(spec: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    with seeds.isolated(0):
        network = build(spec, shape, 10)
    for buffer in network.buffers():  # centroids and whitening, which public images would give
        if buffer.is_floating_point() and not buffer.any():
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(1)))
    model = Trained(network, shape, tuple("0123456789"), Normalisation((0.5,), (0.25,)))
    programs.write(model, shape, tmp_path / "model.pt2")
    generator = torch.Generator().manual_seed(2)
    records = torch.rand(33, *shape, generator=generator)
    if len(shape) == 3:
        records = torch.randint(256, (33, *shape), generator=generator).byte()
    found = torch.export.load(tmp_path / "model.pt2").module()(records)
    expected = model(records)
    assert expected.std() > 1e-3  # logits that are all the same would prove nothing
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"), [("vit", (12, 20)), ("vit", (40, 40)), ("vit", (16, 16)), ("clip", (16, 16))]
)  # enlarged, made smaller, as it is
def test_a_program_begins_with_the_pretrained_backbone(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = tiny_backbones.save_images(kind, tmp_path / kind)
    name, shape = f"hf:{folder}", (1, *size)
    torch.manual_seed(0)
    digest = features.load_backbone(name, shape).digest
    model = Trained(nn.Linear(16, 3), (16,), ("a", "b", "c"), AS_THEY_ARE, (name, digest))
    onnx = tmp_path / "model.onnx" if size == (16, 16) else None
    if onnx is None:
        with pytest.raises(ValueError, match="which ONNX rounds in another way; .* --shape 1 16 16"):
            programs.write(model, shape, tmp_path / "model.pt2", tmp_path / "model.onnx")
    programs.write(model, shape, tmp_path / "model.pt2", onnx)
    images = torch.randint(256, (33, *shape), generator=torch.Generator().manual_seed(2)).byte()
    expected = model(images)
    assert expected.std(0).min() > 1e-3
    found = torch.export.load(tmp_path / "model.pt2").module()(images)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if onnx is None:
        return
    session = onnxruntime.InferenceSession(onnx)
    found = torch.from_numpy(session.run(["logits"], {"records": images.numpy()})[0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_model_of_a_run_on_features_is_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    task = {**TASK, "features": "patches:centroids=16,public=noise=60", "model": "linear"}
    trained = run("fedavg", **task, rounds=1, out=tmp_path / "run")  # type: ignore[arg-type]
    capfd.readouterr()
    main(["publish", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--onnx", "--json"])
    shown = capfd.readouterr()
    assert not shown.err  # torch's exporter warns and prints
    told = json.loads(shown.out)
    assert told["files"] == ["README.md", "config.json", "model.onnx", "model.pt2", "model.safetensors", "pixels.py"]
    assert told["shape"] == [1, 8, 8] and told["backbone"] == task["features"]
    images = load_data("digits").test.images[:40]
    torch.save(images, tmp_path / "images")
    words = [sys.executable, "-W", "error", "-c", PLAIN, str(tmp_path / "out" / "model.pt2"), str(tmp_path / "images")]
    subprocess.run([*words, str(tmp_path / "logits")], check=True, cwd=tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), trained.load_model()(images), rtol=1e-5, atol=1e-5)
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert "features of the public network patches:centroids=16,public=noise=60 (SHA-256" in card
    assert "images (n, 1, 8, 8), uint8 from 0 to 255" in card and 'InferenceSession("model.onnx")' in card


@pytest.mark.slow
def test_images_need_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    task = {**TASK, "features": "scattering", "model": "linear", "out": tmp_path / "run"}
    run("fedavg", **task, rounds=1)  # type: ignore[arg-type]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["experiment"]["data"] = "./gone.npz"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    words = ["publish", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    for more, sentence in (
        (["--shape", "8", "8"], "give channels, height and width of an image"),
        (["--shape", "1", "16", "16"], "is made for one shape of images; leave --shape out"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and sentence in said and said.count("\n") == 1
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    main(words)
    assert (tmp_path / "out" / "model.pt2").exists()
    monkeypatch.setattr(Trained, "pictures", property(lambda _: (), lambda *_: None), raising=False)
    with pytest.raises(ValueError, match="the run keeps no shape of images.*give it: --shape 3 224 224"):
        publishing.publish(tmp_path / "run", tmp_path / "none")
    publishing.publish(tmp_path / "run", tmp_path / "given", shape=(1, 8, 8))


@pytest.mark.slow
def test_the_shape_of_images_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    rng, place = np.random.default_rng(0), tmp_path / "images.npz"

    def write(side: int) -> None:
        x = rng.integers(0, 256, (80, side, side), dtype=np.uint8)
        np.savez(place, x_train=x[:60], y_train=np.arange(60) % 2, x_test=x[60:], y_test=np.arange(20) % 2)

    write(16)
    task = {**TASK, "data": str(place), "limit": None, "features": "scattering", "model": "linear"}
    trained = run("fedavg", **task, rounds=1, out=tmp_path / "run")  # type: ignore[arg-type]
    assert publishing.publish(trained.folder, tmp_path / "before")["shape"] == [1, 16, 16]
    write(24)
    assert publishing.publish(trained.folder, tmp_path / "after")["shape"] == [1, 16, 16]


def test_what_a_killed_publication_left_is_named(finished: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "out" / ".4711.part").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"out exists; delete \.4711\.part there, if nobody publishes"):
        publishing.publish(finished.folder, tmp_path / "out")


@pytest.mark.slow
def test_a_model_of_texts_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    encoder = f"hf:{tiny_backbones.save_texts(tmp_path / 'encoder')}"
    named = (encoder, features.load_backbone(encoder, ()).digest)
    model = Trained(nn.Linear(32, 2), (32,), ("a", "b"), AS_THEY_ARE, named)
    with pytest.raises(ValueError, match="takes texts; a tokenizer is no program"):
        programs.write(model, (), tmp_path / "model.pt2")


def test_a_shape_is_for_a_run_on_features(finished: RunRecord, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--shape is \(3, 8, 8\), but the model takes \(1, 8, 8\); leave it out"):
        publishing.publish(finished.folder, tmp_path / "out", shape=(3, 8, 8))
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_classifier_of_vectors_names_no_images(finished: RunRecord) -> None:
    facts = {"model": "mlp", "num_parameters": 1, "shape": [30], "class_names": ["a", "b"]}
    card = publishing.card_of(finished, facts)
    assert "vectors (n, 30), floats, not normalised" in card and "tabular-classification" in card
    assert "image" not in card.partition("## Privacy")[0]
    assert "images (n, 1, 8, 8), uint8 from 0 to 255" in publishing.card_of(finished, {**facts, "shape": [1, 8, 8]})


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 3)])
def test_a_card_has_the_way_from_a_picture_of_any_size_to_the_input(
    finished: RunRecord, mode: str, channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {**finished.config["experiment"], "size": 32}
    sized = RunRecord(finished.folder, "x", {**finished.config, "experiment": task}, finished.summary)
    model = Trained(nn.Linear(2, 2), (channels, 32, 32), ("a", "b"), AS_THEY_ARE)
    facts = publishing.facts_of(sized, model, model.shape)
    assert facts["preprocessing"]["size"] == 32 and facts["preprocessing"]["crop"] == "largest centred square"
    assert "preprocessing" not in publishing.facts_of(finished, model, model.shape)
    card = publishing.card_of(sized, facts)
    assert "largest centred square, resized to 32 x 32 (bilinear, antialiased)" in " ".join(card.split())
    code = next(block for block in card.split("```")[1::2] if "picture.jpg" in block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(reader.__file__, tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (50, 71, 4), np.uint8)
    picture = Image.fromarray(noise).convert(mode)
    picture.save("picture.jpg", "PNG")
    names: dict[str, Any] = {}
    exec(code.removeprefix("python"), names)
    assert names["images"].shape == (1, channels, 50, 71) and names["images"].dtype == torch.uint8
    pixels = torch.from_numpy(pictures.fitted(picture, 32, "it").transpose(2, 0, 1)[None].copy())
    assert torch.equal(programs.squares(names["images"], 32), pixels.double())


def test_a_card_says_whose_accuracy_it_has_and_who_took_part(finished: RunRecord) -> None:
    facts = {"model": "x", "num_parameters": 1, "shape": [1, 8, 8], "class_names": ["a", "b"]}
    assert "own training, which is not in this model" not in publishing.card_of(finished, facts)
    tuned = {**finished.config, "method": {"name": "fedavg-ft"}}
    card = publishing.card_of(RunRecord(finished.folder, "x", tuned, finished.summary), facts)
    assert "after each client's own training, which is not in this model | " in card
    lost = {**finished.summary, "refused": [{"client": 1, "step": "update", "round": 1, "reason": "late"}] * 2}
    card = publishing.card_of(RunRecord(finished.folder, "x", finished.config, lost), facts)
    assert "2 clients (1 of them without all of their replies) trained" in card and "pooling" not in card


def test_labels_of_others_are_no_markup_in_a_card(finished: RunRecord) -> None:
    summary = {**finished.summary, "data": "x](http://evil)<script>", "partition": "a\n\n# b"}
    hostile = RunRecord(finished.folder, "`x`|<b>", finished.config, summary)
    facts = {"model": "*", "num_parameters": 1, "shape": [1, 8, 8], "class_names": ["<i>", "\x1b[31mred\x9b"]}
    card = publishing.card_of(hostile, facts)
    assert "?\\[31mred?" in card and "\x1b" not in card and "\x9b" not in card
    assert "<script>" not in card.replace("\\<", "") and "<b>" not in card.replace("\\<", "") and "\n# b" not in card


def test_a_command_and_a_reason_of_others_are_no_markup_in_a_card(finished: RunRecord) -> None:
    config = {**finished.config, "command": "fedstill run\n```\n\n# Heading\n<img src=x>\n\n```"}
    promised = replace(finished.guarantee, reason="see [here](http://evil) <script>\n# h1")
    hostile = replace(finished, config=config, guarantee=promised)
    facts = {"model": "x", "num_parameters": 1, "shape": [1, 8, 8], "class_names": ["a", "b"]}
    card = publishing.card_of(hostile, facts)
    assert "````\nfedstill run ``` # Heading <img src=x> ```\n````" in card
    assert "<script>" not in card.replace("\\<", "") and "[here](" not in card and "\n# h1" not in card


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere"),
        (["--out", "x"], "the run comes first"),
        (["RUN", "--hubb", "x"], "did you mean --hub"),
    ],
)
def test_wrong_words_end_in_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["publish", *words])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.slow
def test_an_upload_that_fails_keeps_the_files(
    finished: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", _refuse)
    with pytest.raises(SystemExit):
        main(["publish", str(finished.folder), "--out", str(tmp_path / "p"), "--hub", "owner/name"])
    assert "is complete, but owner/name was not uploaded (no route)" in capsys.readouterr().err
    assert (tmp_path / "p" / "model.pt2").is_file()


def _refuse(*_: object, **__: object) -> None:
    raise OSError("no route")


def test_a_refusal_leaves_no_folder(
    finished: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the one for the files nor those above it; a folder that was there stays."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("ONNX rounds in another way; leave --onnx out")

    monkeypatch.setattr(programs, "write", refuse)
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "published" / "model", tmp_path / "empty"):
        with pytest.raises(SystemExit):
            main(["publish", str(finished.folder), "--out", str(out), "--onnx"])
        assert "ONNX rounds in another way" in capsys.readouterr().err
    assert [place.name for place in tmp_path.iterdir()] == ["empty"] and not any((tmp_path / "empty").iterdir())


@pytest.mark.slow
def test_torch_and_onnx_runtime_are_given_no_name_of_a_file(
    finished: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take it for UTF-8, which it is not in other locales."""
    load = torch.export.load

    def opened(file: Any, **more: Any) -> Any:
        assert hasattr(file, "read"), file
        return load(file, **more)

    monkeypatch.setattr(torch.export, "load", opened)
    publishing.publish(finished.folder, tmp_path / "out")


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_nothing(finished: RunRecord, tmp_path: Path) -> None:
    """PyTorch's own writer ended the process (SIGABRT), and its half file stood in the way of the next try."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "from fedstill.cli import main; main(sys.argv[1:])"
    )
    words = ["publish", str(finished.folder), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be written" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    main(words)
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[-2:] == ["model.safetensors", "pixels.py"]


def test_a_card_names_the_columns_of_a_table_and_how_pictures_are_turned(finished: RunRecord, tmp_path: Path) -> None:
    table = pa.table({"age": np.arange(40.0) ** 2, "b_m_i": np.arange(40.0) % 7, "label": np.arange(40) % 2})
    made = run("fedavg", data=table, model="linear", clients=2, rounds=1, workers=0, out=tmp_path / "table")
    facts = publishing.publish(made.folder, tmp_path / "handed")
    card = (tmp_path / "handed" / "README.md").read_text()
    assert facts["columns"] == ["age", "b_m_i"] and "these columns, in this order: age, b\\_m\\_i." in card
    assert json.loads((tmp_path / "handed" / "config.json").read_text())["columns"] == ["age", "b_m_i"]
    publishing.publish(finished.folder, tmp_path / "pictures")
    card = (tmp_path / "pictures" / "README.md").read_text()
    assert "turned as its EXIF tag says" in " ".join(card.split())
