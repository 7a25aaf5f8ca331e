"""Copies of somebody's own records are their owner's alone, as their source may be, and can be deleted."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedstill
from fedstill.cli import main


def others_can_read(top: Path) -> list[Path]:
    """Files that another user of the machine can reach: no folder on the way is closed to others."""
    found = []
    for place in [top, *top.rglob("*")]:
        ways = [place, *(parent for parent in place.parents if parent.is_relative_to(top))]
        if place.is_file() and all(
            path.stat().st_mode & (stat.S_IROTH if path.is_file() else stat.S_IXOTH) for path in ways
        ):
            found.append(place)
    return found


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """The umask under which others can read what a program writes; a strict one would hide what is tested."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for i in range(60):
        place = tmp_path / "our patients" / "train" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(place)
    return tmp_path / "our patients"


def test_what_is_made_of_own_records_is_their_owners_alone(patients: Path, tmp_path: Path) -> None:
    task = ["--model", "linear", "--clients", "2", "--workers", "0"]
    main(["compare", "fedavg", "real", "--data", str(patients), *task, "--out", "runs/own"])
    main(["run", "fedavg", "--data", str(patients), "--features", "scattering", "--model", "linear", "--clients", "2",
          "--workers", "0", "--mean", "0", "--std", "1", "--out", "runs/vectors"])  # fmt: skip
    main(["report", "runs/own", "--out", "runs/own/figures", "--figures", "svg"])  # they show exact counts
    readable = others_can_read(tmp_path / "runs")
    assert {place.name for place in readable} <= {"runs.csv", "table.csv", "table.json", ".lock"}, readable
    assert not [place for place in others_can_read(tmp_path / "cache") if place.suffix != ".lock"]
    sums = "--public noise=50 --each.extractor.pretrain none --each.space.dims 4".split()
    main(["compare", "afl", "fedcgs", "--data", str(patients), *task, *sums, "--out", "runs/shared"])
    main(["run", "--without", "1", "runs/shared/afl/seed-0", "--out", "runs/without", "--quiet"])
    main(["run", "--replies", "runs/shared/afl/seed-0", "gh-ofl", "--out", "runs/replies", "--quiet"])
    assert (tmp_path / "runs/shared/fedcgs/seed-0/config.json").read_text().count('"answers"') == 1
    readable = others_can_read(tmp_path / "runs")  # of runs on others' replies too
    assert {place.name for place in readable} <= {"runs.csv", "table.csv", "table.json", ".lock"}, readable
    main(["run", "fedavg", "--data", "digits", "--limit", "50", *task, "--out", "runs/digits"])
    assert others_can_read(tmp_path / "runs" / "digits")  # public records


def test_decoded_copies_are_deleted_also_of_a_source_that_is_gone(
    patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedstill.load_data(patients)
    main(["run", "fedavg", "--data", str(patients), "--features", "scattering", "--model", "linear", "--clients", "2",
          "--workers", "0", "--mean", "0", "--std", "1", "--out", "runs/vectors"])  # fmt: skip
    fedstill.load_data("digits")
    before = {place.name for place in (tmp_path / "cache").iterdir()}
    assert sum(name.startswith("features-") and not name.endswith(".lock") for name in before) == 1
    patients.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    main(["data", "forget", "our patients"])
    assert capsys.readouterr().out.count("deleted:") == 2
    left = {place.name for place in (tmp_path / "cache").iterdir()}
    assert not any("patients" in name or name.startswith("features-") for name in left)
    assert any(name.startswith("digits-") for name in left)
    main(["data", "forget", "nothing"])
    assert "has nothing of nothing" in capsys.readouterr().out
    main(["data", "forget", "all"])
    assert not [place for place in (tmp_path / "cache").glob("*-*") if place.is_dir()]


@pytest.mark.parametrize("again", ["decoded again", "forgotten"])
def test_vectors_of_a_record_that_was_taken_out_go(
    again: str, patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stayed beside those of the other records, and "forget" said that there was nothing."""

    def run(out: str) -> None:
        words = (
            f"--features scattering --model linear --clients 2 --workers 0 --mean 0 --std 1 --out runs/{out}".split()
        )
        main(["run", "fedavg", "--data", str(patients), *words])

    def vectors() -> set[Path]:
        return {place for place in (tmp_path / "cache").glob("features-*") if place.is_dir()}

    run("first")
    before = vectors()
    (patients / "train" / "a" / "0.png").unlink()  # a patient who takes back the consent
    run("second")
    assert len(before) == 1 and len(vectors()) == 1 and not before & vectors()
    if again == "forgotten":
        main(["data", "forget", "our patients"])
        assert not vectors()
    main(["data", "forget", "all"])
    assert not [place for place in (tmp_path / "cache").rglob("*") if place.is_file()]


def test_a_cache_is_its_owner_s_whatever_the_umask(patients: Path, tmp_path: Path) -> None:
    os.umask(0)  # which the fixture takes back
    fedstill.load_data(patients)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
