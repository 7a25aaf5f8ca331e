"""Which bundles are fedstill's own, by their bytes alone."""

import io
import zipfile
from pathlib import Path

import pytest

from fedstill.sites.site import launcher

OWN = launcher.APP.read_text()


def packed(**files: str | bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_dot_", "."), content)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_our_own_is_ours_as_flower_packs_it() -> None:
    flwr = pytest.importorskip("flwr.cli.build", reason="flwr is not installed")
    assert launcher.foreign(flwr.build_fab_from_disk(launcher.APP.parent)) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "can't be read"),
        (b"PK no zip", "can't be read"),
        (packed(), "can't be read"),
        (packed(pyproject_dot_toml=OWN, rogue_dot_py="1"), "it has the file 'rogue.py'"),
        (packed(pyproject_dot_toml=OWN, fedstill__sites__app_dot_py="1"), "it has the file 'fedstill/sites/app.py'"),
        (packed(pyproject_dot_toml=OWN, sitecustomize_dot_py="1"), "it has the file 'sitecustomize.py'"),
        (packed(pyproject_dot_toml=OWN, a_dot_pth="import os"), "it has the file 'a.pth'"),
        (packed(pyproject_dot_toml=OWN.replace("fedstill.sites.app:client_app", "os:abort")), "it asks for"),
        (packed(pyproject_dot_toml=OWN.replace("fedstill[flower]", "evil")), "it asks for"),
        (packed(pyproject_dot_toml=OWN + "#" * 70_000), "has more than 65,536 bytes"),
        (packed(pyproject_dot_toml=b"\xff"), "can't be read"),
        (packed(pyproject_dot_toml="[project]"), "can't be read"),
    ],
)
def test_all_others_are_foreign(content: bytes, reason: str) -> None:
    found = launcher.foreign(content)
    assert found is not None
    assert reason in found


@pytest.mark.slow
def test_a_zip_bomb_is_not_blown_up() -> None:
    bomb = packed(pyproject_dot_toml=OWN + "#" * 200_000_000)
    assert len(bomb) < 300_000
    assert "has more than" in str(launcher.foreign(bomb))


def test_the_app_folder_is_what_is_checked(tmp_path: Path) -> None:
    from fedstill.sites.server import service

    assert (service.init(tmp_path, {"host": "localhost"}).app / "pyproject.toml").read_text() == OWN
