"""Features that are stopped and go on where they were."""

import numpy as np
import pytest
import torch

from fedstill.data import features
from fedstill.data.features import VectorFile

GROUPS = [[0, 2], [1, 3]]
IMAGES = torch.randint(256, (700, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def stopped(after):
    """The groups that a computation does before it is stopped by its observer."""
    seen = []

    def stop(done, total):
        seen.append(done)
        if len(seen) == after:
            raise KeyboardInterrupt

    return seen, stop


@pytest.mark.slow
def test_a_stopped_computation_goes_on_with_equal_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SECONDS", 0)
    backbone = features.load_backbone("scattering", (1, 8, 8))
    whole = features.rows_of(backbone, IMAGES)
    seen, stop = stopped(2)
    with pytest.raises(KeyboardInterrupt):
        features.rows_of(backbone, IMAGES, file=tmp_path / "train.npy", progress=stop)
    again, go_on = stopped(9)
    rows = features.rows_of(backbone, IMAGES, file=tmp_path / "train.npy", progress=go_on)
    assert seen == [256, 512] and again == [700] and np.array_equal(rows, whole)
    third = []
    rows = features.rows_of(backbone, IMAGES, file=tmp_path / "train.npy", progress=lambda done, _: third.append(done))
    assert third == [] and np.array_equal(rows, whole)


@pytest.mark.parametrize("damage", ["note", "rows", "count", "negative", "too many", "none"])
def test_what_cannot_be_gone_on_with_is_begun_anew(damage, tmp_path):
    file = VectorFile(tmp_path / "train.npy", GROUPS)
    file.put(np.ones((2, 3), np.float32))
    file.note()
    note, rows = tmp_path / "train.done", tmp_path / "train.npy"
    if damage == "note":
        note.write_text("{")
    elif damage == "rows":
        rows.write_bytes(rows.read_bytes()[:100])
    elif damage == "count":
        np.save(rows, np.ones((5, 3), np.float32))
    elif damage == "negative":
        note.write_text("[-1, 0]")
    elif damage == "too many":
        note.write_text("[7, 14]")
    again = VectorFile(tmp_path / "train.npy", GROUPS)
    assert again.count == 2 * (damage == "none")
    for _ in again.left:
        again.put(np.full((2, 3), 2, np.float32))
    assert again.rows()[:, 0].tolist() == ([1, 2, 1, 2] if damage == "none" else [2, 2, 2, 2])


def test_a_new_file_has_no_note_of_an_old_one(tmp_path):
    (tmp_path / "train.done").write_text("[1, 1]")
    file = VectorFile(tmp_path / "train.npy", [[0], [1]])
    file.put(np.ones((1, 3), np.float32))
    assert VectorFile(tmp_path / "train.npy", [[0], [1]]).count == 0


def test_no_records_have_no_rows(tmp_path):
    assert VectorFile(tmp_path / "test.npy", []).rows().shape == (0, 1)
