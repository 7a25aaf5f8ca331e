"""Scripts of reproduce/ that prepare data and collect results."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPRODUCE = Path(__file__).parents[2] / "reproduce"
STL10 = REPRODUCE / "fedauxfdp/stl10.py"


def converted(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, STL10, source, target], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_images_of_stl10s_file_stand_upright_in_colour(tmp_path: Path) -> None:
    from fedstill.base.records import Normalisation
    from fedstill.data import public

    images = np.zeros((1003, 3, 96, 96), np.uint8)  # rows before columns, as an image is read
    images[:, 0, :48] = 200  # red above
    images[1002, 2, :, :20] = 100  # blue at the left of the last
    images.swapaxes(2, 3).tofile(tmp_path / "unlabeled_X.bin")  # the file has columns before rows
    done = converted(tmp_path / "unlabeled_X.bin", tmp_path / "stl10.npz")
    assert done.returncode == 0 and "1,003 images of 32 x 32 pixels" in done.stdout, done.stderr
    like = Normalisation((0.5,) * 3, (0.25,) * 3)
    found = public.load(f"{tmp_path / 'stl10.npz'}:unlabeled", (3, 32, 32), like)
    assert len(found) == 1003 and found.num_classes == 1
    upright = found.images[:, :, 5, 25] == found.images.new_tensor([200, 0, 0])
    assert bool(upright.all()) and not found.images[:, :, 25, 25].any()
    blue = found.images[:, 2, 25, 2]  # the order is not kept: some are set aside as test records
    assert blue.sort().values[-2:].tolist() == [0, 100]
    (tmp_path / "cut.bin").write_bytes((tmp_path / "unlabeled_X.bin").read_bytes()[:-1])
    done = converted(tmp_path / "cut.bin", tmp_path / "cut.npz")
    assert done.returncode == 1 and "no file of images of 3 x 96 x 96 bytes" in done.stderr
    assert not (tmp_path / "cut.npz").exists()


def test_results_are_those_of_the_finished_runs(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.5), (1, None)):
        run = tmp_path / "runs" / f"seed-{seed}"
        run.mkdir(parents=True)
        config = {
            "label": "fedavg",
            "experiment": {"seed": seed},
            "method": {"name": "fedavg"},
            "command": "fedstill x",
        }
        (run / "config.json").write_text(json.dumps(config))
        (run / "environment.jsonl").write_text(json.dumps({"commit": f"c{seed}"}) + "\n")
        (run / "metrics.jsonl").write_text(json.dumps({"round": 1, "accuracy": 0.4}) + '\n{"round": 2, "acc')  # killed
        if accuracy is not None:
            done = {"accuracy": accuracy, "seconds": 3.4, "finished": "2026-03-01T10:30:00+01:00"}
            (run / "summary.json").write_text(json.dumps(done))

    def collected(*more: str) -> dict[str, object]:
        words = [
            sys.executable,
            REPRODUCE / "collect.py",
            "some",
            tmp_path / "runs",
            *more,
            "--to",
            tmp_path / "to.json",
        ]
        subprocess.run(words, check=True, capture_output=True)
        found: dict[str, object] = json.loads((tmp_path / "to.json").read_text())
        return found

    found = collected()
    assert [found[key] for key in ("finished", "commit", "date", "seconds")] == [False, "c0", "2026-03-01", 3]
    assert found["commands"] == ["fedstill x"] and "status" not in found
    (run,) = found["runs"]  # type: ignore[misc]
    assert (run["seed"], run["accuracy"], run["accuracies"]) == (0, 0.5, [0.4])  # type: ignore[has-type]
    piece = collected("--status", "124", "--seconds", "5")
    assert piece["status"] == 124 and piece["seconds"] == 8 and len(piece["runs"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("summary", ["", "{}", '{"accuracy": 0.5}', "[1]", '{"accuracy": 0.5, "seconds": null}'])
def test_a_damaged_run_is_named_and_costs_no_other_its_results(summary: str, tmp_path: Path) -> None:
    config = {"label": "fedavg", "experiment": {"seed": 0}, "method": {"name": "fedavg"}, "command": "fedstill x"}
    for name, content in (("good", '{"accuracy": 0.5, "seconds": 3.4}'), ("bad", summary)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text(json.dumps(config))
        (tmp_path / "runs" / name / "summary.json").write_text(content)

    def collected(folder: str, *more: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, REPRODUCE / "collect.py", "some", tmp_path / folder, *more, "--to", tmp_path / "to"]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    for folder, sentence in (
        ("runs", f"collect: {tmp_path / 'runs' / 'bad'} is damaged"),
        ("no", "there is no folder"),
    ):
        ended = collected(folder)
        assert ended.returncode == 1 and sentence in ended.stderr and ended.stderr.count("\n") == 1
        assert not (tmp_path / "to").exists()
    piece = collected("runs", "--status", "0")
    assert piece.returncode == 0 and "it is left out" in piece.stderr
    assert len(json.loads((tmp_path / "to").read_text())["runs"]) == 1
