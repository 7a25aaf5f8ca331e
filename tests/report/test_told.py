"""What a reader must be told beside an epsilon stands wherever the number stands; a name makes no data public."""

import csv
import json
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import fedstill
from fedstill import from_torch, methods
from fedstill.cli import main
from fedstill.data import cache, places, published, sources
from fedstill.data.decode import Split
from fedstill.data.names import KNOWN
from fedstill.data.places import Reading
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import share_out
from fedstill.privacy import guarantee
from fedstill.report import export, live_page, publish, spending
from fedstill.report.record import RunRecord

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 200, (120, 8, 8), dtype=np.uint8), np.arange(120) % 3
SITE = np.repeat([0, 1], 60)
STATED: dict[str, Any] = {"mean": (0.5,), "std": (0.25,), "num_classes": 3}


def own(place: Path) -> str:
    np.savez(place, x_train=IMAGES, y_train=LABELS, x_test=255 - IMAGES[:30], y_test=LABELS[:30], site=SITE)
    return str(place)


def private(data: Any, out: Path, method: str = "fedavg-p", **settings: Any) -> RunRecord:
    task = {
        "model": "convnet:width=4,depth=1",
        "clients": 2,
        "partition": "by:site",
        "public": "noise=40",
        "workers": 0,
    }
    more = {"extractor": {"pretrain": "none"}, "space": {"dims": 4}} if method == "fedavg-p" else {}
    return fedstill.run(method, data=data, out=out, **{**task, **STATED, **more, **settings})


# Published data are known by the loader -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10", "own"])
def test_a_name_makes_no_data_public(name: str) -> None:
    data = from_torch((torch.from_numpy(IMAGES), torch.from_numpy(LABELS)), name=name)
    assert not data.known
    task = share_out(Experiment(partition="dirichlet:1", clients=2, **STATED), data)
    assert "test split" in task.drawn and "--partition dirichlet:1" in task.drawn


@pytest.mark.parametrize("place", ["mnist", "fashion_mnist", "cifar10", "svhn", "stl10"])
def test_own_records_at_a_known_place_stay_own(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = []
    for pixels in IMAGES:
        content = BytesIO()
        Image.fromarray(pixels).convert("L" if "mnist" in place else "RGB").save(content, "PNG")
        cells.append({"bytes": content.getvalue(), "path": None})
    column = "img" if place == "cifar10" else "image"
    (tmp_path / place).mkdir()
    table = pa.table({column: cells, "label": np.arange(120) % 10})
    pq.write_table(table, tmp_path / place / "train-00000-of-00001.parquet")
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    assert not sources.load(place).known
    forged = 0
    for meta in (tmp_path / "cache").rglob("meta.json"):  # what a cache says of its records is not believed
        facts = json.loads(meta.read_text())
        facts["notes"] |= {"content": KNOWN[place].content, "known": True, "published": True}
        meta.write_text(json.dumps(facts))
        forged += 1
    assert forged and not sources.load(place).known
    assert "--partition iid" in share_out(Experiment(data=place, partition="iid", clients=2), None).drawn


def test_own_pictures_of_several_sizes_at_a_known_place_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(40):
        place = tmp_path / "cifar10" / "train" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30 + i % 3, 31), (i, 2 * i, 3 * i)).save(place)
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    for load in (sources.load, sources.load_raw):
        assert not load("cifar10", Reading(size=8), cache_dir=tmp_path / "cache").known  # type: ignore[operator]


def test_published_data_are_known(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.load("digits").known
    monkeypatch.setenv("FEDSTILL_DATA", str(real_data))
    assert sources.load("mnist").known and share_out(Experiment(data="mnist", clients=3), None).drawn == ()
    assert sources.load("mnist", Reading(size=14)).known and sources.load_raw("mnist", Reading(size=14)).known
    of_another_size = places.find("mnist", Reading(size=14))
    assert not published.is_published(of_another_size, cache.CacheEntry({}, {}), "")


def test_records_that_a_cache_of_the_hub_has_are_published_by_their_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write into the hub's cache can put own records there, under every known name."""
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    monkeypatch.setattr(places, "read_hub", lambda *_: records)
    images, labels = np.repeat(IMAGES[:, None], 3, 1), np.arange(120) % 10
    records = Split(images, labels), Split(images[:30], labels[:30])
    for name in [name for name in KNOWN if name != "digits"]:
        for reading in (sources.AS_IT_IS, Reading(size=5)):
            assert not sources.load(name, reading, tmp_path / "cache").known, name
            assert not sources.load_raw(name, reading, cache_dir=tmp_path / "cache").known, name


@pytest.mark.parametrize("change", ["train", "labels", "test", "in place"])
def test_an_object_with_other_records_is_published_no_more(change: str) -> None:
    digits = sources.load("digits")
    assert sources.verified(digits).known and share_out(Experiment(clients=2), digits).known
    train = digits.train
    if change == "train":
        data = replace(digits, train=replace(train, images=255 - train.images))
    elif change == "labels":
        data = replace(digits, train=replace(train, labels=9 - train.labels))
    elif change == "test":
        data = replace(digits, test=train[:7])
    else:
        data = digits
        data.train.images.numpy()[3, 0, 0, 0] += 1
    experiment = Experiment(partition="dirichlet:1", clients=2)
    task = share_out(experiment, data)
    assert not task.known and "--partition dirichlet:1" in task.drawn
    assert not sources.load_raw(data).known  # as records of a backbone
    assert sources.load("digits").known


def test_a_folder_called_as_the_hubs_is_not_read_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ylecun" / "mnist").mkdir(parents=True)
    table = pa.table({"image": [[float(i), 1.0] for i in range(20)], "label": [0, 1] * 10})
    pq.write_table(table, tmp_path / "ylecun" / "mnist" / "train.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    with pytest.raises(ValueError, match="would be read in place of the hub's 'ylecun/mnist'"):
        sources.load("mnist", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("place", ["mnist", "tiny_imagenet", "own"])
def test_a_name_makes_no_list_of_classes_public(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(["flu", "none", "rare"]):
        for split in ("train", "test"):
            folder = tmp_path / place / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                Image.fromarray(IMAGES[9 * i + number]).save(folder / f"{number}.png")
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    assert "list of classes" in sources.load(place, cache_dir=tmp_path / "cache").measured
    assert sources.load_raw(place, cache_dir=tmp_path / "cache").measured == ("list of classes",)


def test_a_digest_of_content_knows_no_order_and_every_bit() -> None:
    images = IMAGES[:, None]
    train, test = (images[:100], LABELS[:100]), (images[100:], LABELS[100:])
    order = np.random.default_rng(1).permutation(100)
    known = published.content(train, test)
    assert published.content((train[0][order], train[1][order]), test) == known != published.content(test, train)
    changed = images.copy()
    changed[3, 0, 0, 0] ^= 1
    assert published.content((changed[:100], LABELS[:100]), test) != known


# Sums ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    place = tmp_path_factory.mktemp("sums")
    data, real = own(place / "own.npz"), {"noise": "entropy", "epsilon": 1.0}
    found = {
        "plain": private(data, place / "plain", **real),
        "seed": private(data, place / "seed", seed=1, **real),
        "size": private(data, place / "size", size=12, **real),
        "features": fedstill.run(
            "fedavg", data=data, out=place / "features", features="scattering", model="linear", clients=2, workers=0
        ),
        "simulated": private(data, place / "simulated", epsilon=1.0),
        "client": private(data, place / "client", method="ldp-fedavg", epsilon=1.0, noise="entropy"),
    }
    for name in ("plain", "seed", "size", "client"):
        assert found[name].guarantee.holds, (name, found[name].guarantee.reason)
    return found


@pytest.mark.parametrize("other", ["seed", "size", "client"])
def test_runs_on_the_same_records_are_added_up(other: str, runs: dict[str, RunRecord]) -> None:
    both = [runs["plain"], runs[other]]
    total = sum(run.guarantee.epsilon or 0 for run in both)
    sentences = [sentence for sentence in spending.remarks(both) if "Whoever sees all 2 runs" in sentence]
    assert len(sentences) == 1 and f"up to {total:.1f}" in sentences[0]
    assert ("per record" in sentences[0]) == (other == "client")
    assert not any("Whoever sees" in sentence for sentence in spending.remarks([runs["plain"], runs["simulated"]]))


def test_runs_with_features_are_on_the_records_before_them(runs: dict[str, RunRecord]) -> None:
    assert runs["features"]["records"] == runs["plain"]["records"]
    assert runs["features"].config["fingerprint"] != runs["plain"].config["fingerprint"]


def test_the_sum_and_the_warning_stand_wherever_the_number_stands(runs: dict[str, RunRecord], tmp_path: Path) -> None:
    both = [runs["plain"], runs["size"]]
    fedstill.write_report(both, tmp_path / "report.html")
    export.write_tables(both, tmp_path, latex=True, markdown=True)
    for name in ("report.html", "table.tex", "table.md", "table.json", "table.csv", "runs.csv"):
        text = (tmp_path / name).read_text()
        assert "Whoever sees all 2 runs of these records" in text, name
        assert "are exact, and no guarantee covers" in text, name
    assert json.loads((tmp_path / "table.json").read_text())["remarks"] == export.told(both)


def test_a_row_of_a_table_has_the_sentences_on_itself_alone(tmp_path: Path) -> None:
    small = {"model": "linear", "workers": 0, "rounds": 1, "local": {"lr": 1e-6}, "mean": [0.3], "std": [0.4]}
    lossy = {"clients": 8, "drop": 0.4, "seed": 1, "min_clients": 1}
    learns = fedstill.run("afl", data="digits", clients=3, public="noise=64", workers=0, out=tmp_path / "afl")
    loses = fedstill.run("fedavg", data="digits", limit=300, out=tmp_path / "fedavg", **small, **lossy)
    assert loses.refused
    export.write_tables([learns, loses], tmp_path)
    words = f"fedavg: {len(loses.refused)} replies were lost or not used"
    for name in ("table.csv", "runs.csv"):
        said = {row["label"]: row["remarks"] for row in csv.DictReader((tmp_path / name).open())}
        assert words in said["fedavg"] and "fedavg" not in said["afl"], name


def test_lists_of_runs_say_the_sum_too(
    runs: dict[str, RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [runs["plain"], runs["size"]]
    for record in both:
        shutil.copytree(record.folder, tmp_path / record.folder.name)
    said: live_page.Said = {}
    state = live_page.document(tmp_path, {}, said)
    assert state["remarks"] == spending.remarks(both) and [*said.values()] == [state["remarks"]]
    assert live_page.document(tmp_path / "plain", {}, said)["remarks"] == spending.remarks(both[:1])
    for words in (["runs", str(tmp_path)], ["runs", "compare", str(tmp_path)]):
        main(words)
        assert "Whoever sees all 2 runs of these records" in capsys.readouterr().out
        main([*words, "--json"])
        assert "Whoever sees all 2 runs" in " ".join(json.loads(capsys.readouterr().out)["remarks"])
    main(["privacy", str(tmp_path / "plain")])
    assert "are exact, and no guarantee covers" in " ".join(capsys.readouterr().out.split())


def test_the_card_says_what_its_number_leaves_open(runs: dict[str, RunRecord]) -> None:
    card = "\n".join(publish.privacy_lines(runs["plain"]))
    assert "whoever sees more made of the same records" in card and "do not hand on" not in card
    assert "whoever sees more" not in "\n".join(publish.privacy_lines(runs["simulated"]))


def test_every_private_method_says_its_unit() -> None:
    units = {methods.find(name).protects for name in methods.TABLE} - {""}
    assert units == {"record", "label", "client"}


@pytest.mark.parametrize(
    ("measured", "flags"),
    [
        (["normalisation"], "state it (--mean 0.5 --std 0.25)"),
        (["number of classes"], "state it (--num-classes or --class-names)"),
        (["scale", "number of classes"], "state them (--mean 0.5 --std 0.25, --num-classes or --class-names)"),
    ],
)
def test_the_remedy_names_the_flags_of_what_was_measured(measured: list[str], flags: str) -> None:
    assert guarantee.remedy(measured) == flags
