"""Data and a cache of each test's own."""

from pathlib import Path

import pytest


@pytest.fixture
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as ``FEDSTILL_DATA``, and an empty cache."""
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("FEDSTILL_DATA", str(root))
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    return root
