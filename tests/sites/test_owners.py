"""Commands of another user of the machine, who would take a site's files away from its service."""

import os
from pathlib import Path

import pytest
from real_sites import make_site
from users import as_user

from fedstill.cli import main
from fedstill.data.sources import DataSet
from fedstill.sites import units
from fedstill.sites.site.chain import Chain

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")


def told_as_another(folder: Path, name: str) -> str:
    """The number of lines of a chain, or the error, as another user reads it with what this process has imported."""
    for place in (folder, *folder.parents):
        if place.stat().st_uid == os.geteuid() and not place.stat().st_mode & 0o001:
            place.chmod(0o711)
    return as_user(65534, lambda: f"{len(Chain(folder / name, 'log', 'put a copy back').read())} line")


@pytest.fixture
def owned(digits: DataSet, tmp_path: Path) -> Path:
    """A site whose files are another user's."""
    folder = make_site(tmp_path, digits, 0).state.parent
    for place in [folder, *folder.rglob("*")]:
        os.chown(place, 1234, 1234)
    return folder


@ROOT
@pytest.mark.parametrize("words", [["pause"], ["resume"], ["approve", "RUN", "--yes"], ["rekey"], ["serve"]])
def test_a_command_that_writes_is_refused_to_another_user(
    words: list[str], owned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {place: place.stat() for place in owned.rglob("*")}
    name, *more = words
    with pytest.raises(SystemExit) as stop:
        main(["site", name, str(owned), *more])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "belongs to #1234" in told and "run it as its owner: sudo -u #1234 fedstill" in told
    after = {place: place.stat() for place in owned.rglob("*")}
    assert {place: (s.st_uid, s.st_mtime) for place, s in after.items() if place in before} == {
        place: (s.st_uid, s.st_mtime) for place, s in before.items()
    }
    main(["site", "status", str(owned), "--json"])  # reading is allowed


@ROOT
def test_the_servers_commands_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["server", "init", str(tmp_path / "server"), "--host", "fl.example.org"])
    os.chown(tmp_path / "server", 1234, 1234)
    with pytest.raises(SystemExit):
        main(["server", "invite", str(tmp_path / "server"), "0"])
    assert "sudo -u #1234 fedstill server invite" in capsys.readouterr().err


@ROOT
def test_a_file_of_another_user_is_not_called_damaged(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "chain", "log", "put a copy back")
    chain.create()
    (tmp_path / "chain" / "log.head").chmod(0o600)
    for place in [tmp_path / "chain", *(tmp_path / "chain").iterdir()]:
        os.chown(place, 65534 if place.name != "log.head" else 0, -1)
    told = told_as_another(tmp_path, "chain")
    assert "nothing is damaged: run this as its owner" in told and "chown --reference=" in told
    assert "put a copy back" not in told


@ROOT
def test_a_copy_that_nobody_can_write_is_verified(tmp_path: Path) -> None:
    """As an auditor has one."""
    chain = Chain(tmp_path / "chain", "log", "put a copy back")
    chain.create()
    with chain.lock:
        chain.synchronise()
        chain.append({"what": "asked"})
    (tmp_path / "chain" / "log.lock").unlink()
    for place in (tmp_path / "chain").iterdir():
        place.chmod(0o444)
    (tmp_path / "chain").chmod(0o555)
    assert told_as_another(tmp_path, "chain") == "1 line"


def crashed(folder: Path) -> bytes:
    """A chain of one line, with the head from before it, as a crash leaves them; returns the head."""
    chain = Chain(folder, "log", "put a copy back")
    chain.create()
    head = (folder / "log.head").read_bytes()
    with chain.lock:
        chain.synchronise()
        chain.append({"what": "asked"})
    (folder / "log.head").write_bytes(head)
    return head


@ROOT
def test_a_copy_of_a_crash_is_verified_too(tmp_path: Path) -> None:
    """The head was copied before the last line, as of a site that serves: whoever can't write need not repair it."""
    head = crashed(tmp_path / "chain")
    for place in (tmp_path / "chain").iterdir():
        place.chmod(0o444)
    (tmp_path / "chain").chmod(0o555)
    assert told_as_another(tmp_path, "chain") == "1 line"
    assert (tmp_path / "chain" / "log.head").read_bytes() == head


@ROOT
def test_root_s_reading_leaves_no_file_of_its_own(tmp_path: Path) -> None:
    crashed(tmp_path / "chain")
    (tmp_path / "chain" / "log.lock").unlink()
    for place in (tmp_path / "chain", *(tmp_path / "chain").iterdir()):
        os.chown(place, 1234, 1234)
    assert len(Chain(tmp_path / "chain", "log", "").read()) == 1
    assert {place.stat().st_uid for place in (tmp_path / "chain").iterdir()} == {1234}


def test_root_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    main(["server", "init", str(tmp_path / "server"), "--host", "fl.example.org"])
    assert "warning: this server runs as root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert units.of_root("this site") == ""
