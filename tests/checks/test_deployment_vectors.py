"""Tables, texts through a backbone of each site, and unequal photographs, in a deployment on the loopback."""

import io
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_backbones
import tomli_w
from PIL import Image
from sklearn.datasets import load_breast_cancer

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fedstill[hf]'")

from fedstill import methods  # noqa: E402
from fedstill.data import sources  # noqa: E402
from fedstill.data.places import Reading  # noqa: E402
from fedstill.experiment.config import Experiment  # noqa: E402
from fedstill.experiment.job import Job  # noqa: E402
from fedstill.experiment.run import run  # noqa: E402
from fedstill.experiment.task import share_out  # noqa: E402
from fedstill.sites.loopback import Loopback, loopback  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("FEDSTILL_SLOW"), reason="takes minutes; set FEDSTILL_SLOW=1"),
]
SITES = 2
PATIENCE = 600.0
SETTINGS: dict[str, Any] = {"rounds": 2, "local": {"lr": 0.05, "batch_size": 32}}


def change_policy(here: Loopback, **changes: Any) -> None:
    for client in range(SITES):
        place = here.folder / f"site-{client}" / "policy.toml"
        place.write_text(tomli_w.dumps({**tomllib.loads(place.read_text()), **changes}))


def deployed(here: Loopback, name: str, task: dict[str, Any], status: str = "finished:completed") -> Path:
    run_id = here.run(name, {"method": "fedavg", **task, "fedavg": SETTINGS})
    assert here.finish(run_id, PATIENCE) == status, here.output(run_id)[-3000:]
    return here.folder / "runs" / name


def test_tables_and_texts_give_the_weights_of_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, other = (tiny_backbones.save_texts(tmp_path / f"backbones{i}/our/encoder", seed=i) for i in (0, 1))
    monkeypatch.setenv("FEDSTILL_BACKBONES", str(tmp_path / "backbones0"))
    table, reviews = tmp_path / "cancer.parquet", tmp_path / "reviews.parquet"
    load_breast_cancer(as_frame=True).frame.to_parquet(table)
    texts, labels = tiny_backbones.reviews(240)
    pq.write_table(pa.table({"text": texts, "label": labels}), reviews)
    common = {"clients": SITES, "model": "linear"}
    tasks = {
        "cancer": {**common, "data": str(table)},
        "reviews": {**common, "data": str(reviews), "features": "hf:our/encoder"},
    }
    with loopback(tmp_path / "deployment") as here:
        shared = {name: share_out(Experiment(**task), None) for name, task in tasks.items()}
        for client in range(SITES):
            own = shared["cancer"].parts[client][0]
            allowed = {"methods": ["fedavg"], "unprotected": True, "simulated_noise": True}
            place = here.add_site(client, data="cancer.parquet", **allowed)
            mine, columns = shared["cancer"].train[own], list(shared["cancer"].columns)
            rows = dict(zip(columns, mine.images.numpy().T, strict=True)) | {"target": mine.labels.numpy()}
            order = columns[::-1] if client else columns  # a site's columns may stand in another order
            pq.write_table(pa.table({name: rows[name] for name in (*order, "target")}), place / "cancer.parquet")
            # the texts that the simulated client has, by their places among the train records
            kept = _train_places(tasks["reviews"])[shared["reviews"].parts[client][0]]
            pq.write_table(pq.read_table(reviews).take(kept), place / "reviews.parquet")
            here.start_site(client)
        found = deployed(here, "cancer", tasks["cancer"])
        _compare(found, tasks["cancer"], tmp_path / "simulated-cancer")

        change_policy(here, data="reviews.parquet", features=["hf:our/encoder"])
        found = deployed(here, "reviews", tasks["reviews"])
        _compare(found, tasks["reviews"], tmp_path / "simulated-reviews")

        change_policy(here, features=[])
        deployed(here, "not-allowed", tasks["reviews"], "finished:failed")
        assert "does not allow the backbone 'hf:our/encoder' (features)" in (here.log("site-0") + _refusals(here))
        change_policy(here, features=["hf:our/encoder"])
        (encoder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        changed = here.run("changed", {"method": "fedavg", **tasks["reviews"], "fedavg": SETTINGS})
        assert here.finish(changed, PATIENCE) == "finished:completed"  # server and sites have it


def save_photographs(path: Path, count: int) -> None:
    """JPEG files of smooth colours in one table, each of sides of its own from 180 to 300 pixels; two classes."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        small = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8) // (1 + i % 2)
        stored, sides = io.BytesIO(), rng.integers(180, 301, 2).tolist()
        Image.fromarray(small).resize(sides, Image.Resampling.BICUBIC).save(stored, "JPEG")
        rows.append({"bytes": stored.getvalue(), "path": f"{i}.jpg"})
    pq.write_table(pa.table({"image": rows, "label": [i % 2 for i in range(count)]}), path)


def test_photographs_of_unequal_sizes_give_the_weights_of_a_simulation(tmp_path: Path) -> None:
    photographs = tmp_path / "photographs.parquet"
    save_photographs(photographs, 160)  # a site has at least 50 (min_records)
    task = {"data": str(photographs), "size": 224, "clients": SITES, "model": "convnet:width=8,depth=3"}
    shared = share_out(Experiment(**task), None)
    whole = [
        bytes(image.numpy()) for image in sources.load_part(str(photographs), Reading(224), cache_dir=tmp_path).train[0]
    ]
    assert len(set(whole)) == len(whole) == 160
    places = np.array([whole.index(bytes(image.numpy())) for image in shared.train.images])
    with loopback(tmp_path / "deployment") as here:
        for client in range(SITES):
            allowed = {"methods": ["fedavg"], "unprotected": True, "simulated_noise": True}
            place = here.add_site(client, data="photographs.parquet", size=224, **allowed)
            kept = places[shared.parts[client][0]]
            pq.write_table(pq.read_table(photographs).take(kept), place / "photographs.parquet")
            here.start_site(client)
        _compare(deployed(here, "photographs", task), task, tmp_path / "simulated")


def _train_places(task: dict[str, Any]) -> Any:
    """Places of the train records in the file, since a fifth is held out."""
    whole = pq.read_table(task["data"])["text"].to_pylist()
    found = [whole.index(text) for text in sources.load_raw(task["data"]).train[0]]
    assert len(set(found)) == len(found)
    return np.array(found)


def _refusals(here: Loopback) -> str:
    return "".join((here.folder / f"site-{client}/state/journal.jsonl").read_text() for client in range(SITES))


def _compare(found: Path, task: dict[str, Any], out: Path) -> None:
    summary = run(Job(Experiment(**task, workers=0), methods.find("fedavg")(**SETTINGS), out))
    assert (found / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    theirs = json.loads((found / "summary.json").read_text())
    same = ("bytes_up", "bytes_down", "accuracy", "refused", "rounds")
    assert {key: theirs[key] for key in same} == {key: summary[key] for key in same}
