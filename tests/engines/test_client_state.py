"""Files of a client's state: what is read before a request, whatever was unchanged, repeated or cut off."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.base.files import Damaged
from fedstill.engines.client import StateFiles


def files_in(place: Path, label: str = "run/0") -> StateFiles:
    return StateFiles(place / "00000", place / "newest" / "00000", label, "delete it and run again")


def state_of(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), float(number))} if number else {}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
def test_a_repeated_step_starts_from_the_state_before_it(steps: list[tuple[int, bool]]) -> None:
    """Each request leaves one of three states; some are repeated at once with another one, as after a crash."""
    with tempfile.TemporaryDirectory() as place:
        files, before = files_in(Path(place)), 0
        for exchange, (number, repeated) in enumerate(steps):
            for value in [(number + 1) % 3, number] if repeated else [number]:
                found = files.read(exchange)
                assert found.keys() == state_of(before).keys()
                assert all(torch.equal(found[name], value) for name, value in state_of(before).items())
                files.write(exchange, state_of(value))
            before = number
        assert len(list(files.folder.glob("*.state"))) <= 2


def test_a_state_that_was_deleted_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for exchange in range(3):
        assert files.read(exchange).keys() == state_of(exchange).keys()
        files.write(exchange, state_of(exchange + 1))
    assert torch.equal(files.read(2)["w"], state_of(2)["w"])
    for exchange in (0, 1):
        with pytest.raises(Damaged, match=f"no state from before request {exchange} any more; delete "):
            files.read(exchange)


def test_a_state_that_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(3, state_of(1))
    (only,) = files.folder.iterdir()
    written = only.stat().st_mtime_ns
    for exchange in range(4, 8):
        files.write(exchange, state_of(1))
    assert list(files.folder.iterdir()) == [only] and only.stat().st_mtime_ns == written
    files.write(8, state_of(2))
    assert sorted(file.stem for file in files.folder.iterdir()) == ["000003", "000008"]


def test_a_damaged_state_is_refused_and_not_taken_for_unchanged(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(0, state_of(1))
    (tmp_path / "00000/000000.state").write_bytes(b"x" * 40)
    with pytest.raises(Damaged, match="its checksum differs"):
        files.write(1, state_of(1))


def test_a_newest_state_that_is_gone_is_noticed(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for exchange in range(3):
        assert files.read(exchange).keys() == state_of(exchange).keys()
        files.write(exchange, state_of(exchange + 1))
    assert torch.equal(files.read(2)["w"], state_of(2)["w"])  # asked again
    files.write(2, state_of(3))
    files.write(3, state_of(3))  # unchanged
    assert torch.equal(files.read(7)["w"], state_of(3)["w"])
    (tmp_path / "00000" / "000002.state").unlink()
    with pytest.raises(Damaged, match="no state from before request 3 any more; delete it and run again"):
        files.read(3)
    assert torch.equal(files.read(2)["w"], state_of(2)["w"])
    shutil.rmtree(tmp_path / "00000")
    with pytest.raises(Damaged, match="no state from before request 3 any more"):
        files.read(3)
    (tmp_path / "newest" / "00000").write_text("no number")
    with pytest.raises(Damaged, match="00000 is damaged; delete it and run again"):
        files.read(3)


@pytest.mark.parametrize("label", ["another/0", "run/1"])
def test_the_state_of_another_run_or_client_is_not_taken(label: str, tmp_path: Path) -> None:
    """Nor that of another request, under whose name somebody has put it."""
    files, other = files_in(tmp_path), files_in(tmp_path / "other", label)
    for one in (files, other):
        one.write(0, state_of(1))
        one.write(1, state_of(2))
    shutil.copy(other.folder / "000001.state", files.folder / "000001.state")
    with pytest.raises(Damaged, match="its checksum differs"):
        files.read(2)
    shutil.copy(files.folder / "000000.state", files.folder / "000001.state")
    with pytest.raises(Damaged, match="its checksum differs"):
        files.read(2)
