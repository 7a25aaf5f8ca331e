"""A model to hand on: files that plain PyTorch reads, and the card beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedstill import RunRecord, load_data, run, seeds
from fedstill.cli import main
from fedstill.experiment.trained import Trained
from fedstill.models.build import build
from fedstill.records import Normalisation
from fedstill.report import publish as publishing

TASK = {"data": "digits", "clients": 2, "limit": 100, "model": "convnet:width=8,depth=2", "workers": 0}
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
    assert told["files"] == ["README.md", "config.json", "model.pt2", "model.safetensors"]
    images = load_data("digits").test.images[:5] / 255
    torch.save(images, tmp_path / "images")
    words = [sys.executable, "-W", "error", "-c", PLAIN, str(out / "model.pt2"), str(tmp_path / "images")]
    subprocess.run([*words, str(tmp_path / "logits")], check=True, cwd=tmp_path)
    expected = finished.load_model()(images)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected, rtol=1e-5, atol=1e-5)
    weights = load_file(out / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) >= told["num_parameters"] == finished["num_parameters"]
    card = (out / "README.md").read_text()
    assert f"{100 * finished['accuracy']:.2f} %" in card and "* none" in card and "may reveal any record" in card
    with pytest.raises(SystemExit):  # a second time, nothing is overwritten
        main(["publish", str(finished.folder), "--out", str(out)])
    assert f"{out} exists; choose an empty folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape"),
    [("scattering", (1, 8, 8)), ("patches:centroids=8,side=3", (3, 8, 8)), ("mlp:hidden=8", (5,))],
)
def test_a_program_takes_any_number_of_records(spec: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    with seeds.isolated(0):
        network = build(spec, shape, 10)
    for buffer in network.buffers():  # centroids and whitening, which public images would give
        if buffer.is_floating_point() and not buffer.any():
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(1)))
    model = Trained(network, shape, tuple("0123456789"), Normalisation((0.5,), (0.25,)))
    publishing._export(model, tmp_path / "model.pt2")
    records = torch.rand(33, *shape, generator=torch.Generator().manual_seed(2))
    found = torch.export.load(tmp_path / "model.pt2").module()(records)
    expected = model(records)
    assert expected.std() > 1e-3  # logits that are all the same would prove nothing
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_card_of_a_classifier_of_vectors_names_no_images(finished: RunRecord) -> None:
    facts = {"architecture": "mlp", "num_parameters": 1, "shape": [30], "class_names": ["a", "b"]}
    card = publishing._card(finished, facts)
    assert "vectors (n, 30), floats, not normalised" in card and "tabular-classification" in card
    assert "image" not in card.partition("## Privacy")[0]
    assert "images (n, 1, 8, 8), floats in [0, 1]" in publishing._card(finished, {**facts, "shape": [1, 8, 8]})


def test_labels_of_others_are_no_markup_in_a_card(finished: RunRecord) -> None:
    summary = {**finished.summary, "data": "x](http://evil)<script>", "partition": "a\n\n# b"}
    hostile = RunRecord(finished.folder, "`x`|<b>", finished.config, summary)
    facts = {"architecture": "*", "num_parameters": 1, "shape": [1, 8, 8], "class_names": ["<i>"]}
    card = publishing._card(hostile, facts)
    assert "<script>" not in card.replace("\\<", "") and "<b>" not in card.replace("\\<", "") and "\n# b" not in card


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
