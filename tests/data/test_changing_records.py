"""Records that change while a run reads them: what is trained on is what was read at first, or the run says so."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedstill
from fedstill.base.errors import Changed
from fedstill.data import cache
from fedstill.data.places import Reading
from fedstill.data.shards import Shards
from fedstill.engines.transport import Watcher
from fedstill.experiment import reuse, sweep
from fedstill.experiment import run as engine
from fedstill.experiment.config import Experiment
from fedstill.experiment.task import client_data, share_out

CHANGED = "changed while the run was going on; bring the former records back"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))


def write(place: Path, *, swapped: bool = False) -> Path:
    rng = np.random.default_rng(0)
    y = np.arange(600) % 2
    x = (rng.normal(size=(600, 4)) + 3 * y[:, None]).astype(np.float32)
    y = 1 - y if swapped else y
    np.savez(place, x_train=x[:500], y_train=y[:500], x_test=x[500:], y_test=y[500:])
    return place


def settings(place: Path, **more: Any) -> dict[str, Any]:
    return {"data": str(place), "model": "linear", "clients": 4, "rounds": 2, "workers": 0} | more


def after(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[], object]) -> None:
    """Make a change each time that a run has called a function of its module."""
    function = getattr(engine, name)

    def then_changed(*given: Any, **more: Any) -> Any:
        found = function(*given, **more)
        change()
        return found

    monkeypatch.setattr(engine, name, then_changed)


@pytest.fixture
def swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose labels are swapped as soon as a run's task is known: before its clients read their records."""
    place = write(tmp_path / "d.npz")
    after(monkeypatch, "client_data", lambda: write(place, swapped=True))
    return place


@pytest.mark.parametrize("workers", [0, 2])
def test_clients_do_not_train_on_records_that_changed_since_the_run_began(
    tmp_path: Path, swap: Path, workers: int
) -> None:
    facts = settings(swap, workers=workers)
    with pytest.raises((ValueError, RuntimeError), match=CHANGED):
        fedstill.run("fedavg", out=tmp_path / "run", **facts)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_public_records_that_changed_are_noticed_by_each_process(tmp_path: Path) -> None:
    place, other = write(tmp_path / "d.npz"), write(tmp_path / "public.npz")
    experiment = Experiment(data=str(place), model="linear", clients=2, public=str(other))
    shards = client_data(experiment, share_out(experiment, None))
    assert shards.public() is not None
    shards.loaded = None  # as in another process
    write(other, swapped=True)
    with pytest.raises(ValueError, match=CHANGED):
        shards.public()


def test_two_processes_can_not_have_a_person_at_two_clients(tmp_path: Path) -> None:
    """Rows in another order would do this, though each client has as many records as before."""
    place = write(tmp_path / "d.npz")
    first = fedstill.load_data(str(place))
    parts = [(np.arange(250), np.arange(0)), (np.arange(250, 500), np.arange(0))]
    shards = Shards(str(place), parts, reading=Reading(), fingerprint=first.fingerprint)
    with np.load(place) as found:
        np.savez(place, **{name: found[name][::-1] for name in found.files})
    with pytest.raises(ValueError, match=CHANGED):
        shards.records(1)


def test_tries_and_the_run_that_they_are_for_are_on_one_data_set(tmp_path: Path) -> None:
    place = write(tmp_path / "d.npz")
    facts = settings(place)
    fedstill.run("fedavg", out=tmp_path / "run", tune=True, **facts)
    shutil.copytree(tmp_path / "run" / "tries", tmp_path / "again" / "tries")
    write(place, swapped=True)
    with pytest.raises(ValueError, match="the tries in .* the data changed since"):
        fedstill.run("fedavg", out=tmp_path / "again", tune=True, **facts)


def test_tries_that_stopped_do_not_go_on_with_other_records(tmp_path: Path) -> None:
    """They would count as tries that failed, and the choice would be among the rest."""
    place = write(tmp_path / "d.npz")
    facts = settings(place)
    fedstill.run("fedavg", out=tmp_path / "run", tune=True, **facts)
    for number in "01":
        shutil.copytree(tmp_path / "run" / "tries" / number, tmp_path / "again" / "tries" / number)
    write(place, swapped=True)
    with pytest.raises(Changed, match="the data changed since; bring the former back"):
        fedstill.run("fedavg", out=tmp_path / "again", tune=True, **facts)
    assert not (tmp_path / "again" / "tries" / "tries.json").exists()


def test_a_sweep_that_was_begun_on_other_records_is_refused(tmp_path: Path) -> None:
    place = write(tmp_path / "d.npz")

    def of(*rates: float) -> sweep.Sweep:
        tried = {"fedavg": {"rounds": 1, "try": {"local.lr": list(rates)}}}
        return sweep.checked("it", {"data": str(place), "model": "linear", "clients": 2, "methods": tried})

    sweep.run_sweep(of(0.1), tmp_path / "out", parallel=1, watcher=Watcher())
    write(place, swapped=True)
    for final in (False, True):
        with pytest.raises(Changed, match="the data changed since; bring the former back"):
            sweep.run_sweep(of(0.1, 0.2), tmp_path / "out", final=final, parallel=1, watcher=Watcher())
    assert not (tmp_path / "out" / "final.json").exists()


def test_no_try_is_on_other_records_than_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path / "d.npz")
    after(monkeypatch, "run", lambda: write(place, swapped=True))
    facts = settings(place)
    with pytest.raises(Changed, match="the records changed between the tries"):
        fedstill.run("fedavg", out=tmp_path / "run", tune=True, **facts)


def test_a_schema_that_is_edited_meanwhile_is_not_mixed_with_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records were scaled by the former one, so the model and the measures are in its unit."""
    place, schema = tmp_path / "d.csv", tmp_path / "schema.toml"
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, 300)
    rows = [f"{a:.3f},{2 * a + b:.3f}" for a, b in zip(x, rng.normal(size=300), strict=True)]
    place.write_text("\n".join(["x,y", *rows]))
    text = 'target = "y"\nrange = [-9, 30]\n[columns.x]\nkind = "number"\nrange = [0, 10]\n'
    schema.write_text(text)
    edited = text.replace("30", "3000").replace("10", "1000")
    after(monkeypatch, "share_out", lambda: schema.write_text(edited))
    facts = settings(place, schema_file=str(schema), rounds=30)
    record = fedstill.run("fedavg", out=tmp_path / "run", **facts)
    assert record.config["table_schema"]["range"] == [-9, 30]
    assert record["errors"]["rmse"] < 3


def test_a_sweep_chooses_among_tries_on_one_data_set(tmp_path: Path) -> None:
    place = write(tmp_path / "d.npz")
    tried = {"fedavg": {"rounds": 1, "try": {"local.lr": [0.1, 0.2]}}}
    found = sweep.checked("it", {"data": str(place), "model": "linear", "clients": 2, "methods": tried})
    outcome = sweep.run_sweep(found, tmp_path / "out", parallel=1, watcher=Watcher())
    first, second = (one.folders[0] for one in outcome.tries["fedavg"])
    config = json.loads((second / "config.json").read_text())
    assert reuse.contents(first) == reuse.contents(second)
    (second / "config.json").write_text(json.dumps(config | {"fingerprint": "0" * 64}))
    with pytest.raises(Changed, match="the records changed between the tries"):
        reuse.check_same([first, second])


def test_public_records_that_change_between_two_readings_of_a_run_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = write(tmp_path / "d.npz"), write(tmp_path / "public.npz")
    after(monkeypatch, "share_out", lambda: write(other, swapped=True))
    facts = settings(place, public=str(other))
    with pytest.raises(ValueError, match=CHANGED):
        fedstill.run("feddf", out=tmp_path / "run", **facts)


def test_a_reader_of_the_cache_gets_arrays_of_one_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process puts another entry in place between two of its arrays."""
    folder = tmp_path / "entry"

    def entry(value: int) -> cache.CacheEntry:
        return cache.CacheEntry({name: np.full(4, value) for name in ("a", "b")}, {})

    cache.cached(folder, "source", lambda: entry(1))
    cache.cached(tmp_path / "other", "source", lambda: entry(2))
    load, calls = np.load, [0]

    def replaced(*given: Any, **more: Any) -> NDArray[Any]:
        found: NDArray[Any] = load(*given, **more)
        calls[0] += 1
        if calls[0] == 1:
            shutil.rmtree(folder)
            (tmp_path / "other").rename(folder)
        return found

    monkeypatch.setattr(np, "load", replaced)
    found, fingerprint = cache.cached(folder, "source", lambda: entry(3))
    assert {int(array[0]) for array in found.arrays.values()} == {2}
    assert fingerprint == cache.fingerprint(entry(2))
