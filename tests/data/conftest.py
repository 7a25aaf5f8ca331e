"""Where the tests find real data, and a cache of their own."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets; skips where there is none."""
    folder = Path(os.environ.get("FEDSTILL_DATA") or REPOSITORY / "../shared/data").resolve()
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} does not exist, and FEDSTILL_DATA names no other folder")
    return folder


@pytest.fixture
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as ``FEDSTILL_DATA``, and an empty cache."""
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("FEDSTILL_DATA", str(root))
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    return root
