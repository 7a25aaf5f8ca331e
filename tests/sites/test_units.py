"""The files for the programs that run a server or a site for years: units of systemd, containers."""

import io
import os
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from fedstill.cli import main
from fedstill.sites import units
from fedstill.sites.server import service
from fedstill.sites.server.service import Server
from fedstill.sites.site import decisions, log, site_journal
from fedstill.sites.site.policy import SitePolicy

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def made(tmp_path: Path) -> Server:
    return service.init(tmp_path / "server", {"host": "fl.example.org"})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(made: Server, tmp_path: Path) -> None:
    (tmp_path / units.SITE).write_text(units.site(tmp_path, tmp_path / "state", on_cpu=True))
    (tmp_path / "elsewhere.service").write_text(units.site(tmp_path, Path("/var/lib/site-0"), on_cpu=True))
    for place in (made.folder / units.SERVER, tmp_path / units.SITE, tmp_path / "elsewhere.service"):
        done = subprocess.run(["systemd-analyze", "verify", str(place)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    broken = tmp_path / "broken.service"
    broken.write_text(
        units.site(tmp_path, tmp_path / "state", on_cpu=True).replace("ProtectSystem=strict", "ProtectSystm=strict")
    )
    assert subprocess.run(["systemd-analyze", "verify", str(broken)], capture_output=True, text=True).stderr


def test_a_user_without_a_name_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nameless)
    for text in (units.server(tmp_path), units.site(tmp_path, tmp_path / "state", on_cpu=True)):
        assert f"User={os.getuid()}\n" in text
    policy = SitePolicy(client=0, data=tmp_path, state=tmp_path / "state", methods=())
    site_journal.create(policy.state)
    decisions.pause(policy)
    assert log.read(policy.state)[-1]["by"] == str(os.getuid())


def test_a_unit_may_write_its_folder_only(tmp_path: Path) -> None:
    text = units.site(tmp_path, tmp_path / "state", on_cpu=True)
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["ExecStart"].split()[1:] == ["-m", "fedstill", "site", "serve", f'"{tmp_path}"']
    assert settings["ReadWritePaths"] == f'"{tmp_path}"'
    assert (settings["ProtectSystem"], settings["UMask"], settings["Restart"]) == ("strict", "0077", "always")
    assert settings["Environment"] == f"FEDSTILL_CACHE={tmp_path}/cache"
    elsewhere = units.site(tmp_path, Path("/var/lib/site-0"), on_cpu=True)
    assert f'ReadWritePaths="{tmp_path}" "/var/lib/site-0"\n' in elsewhere
    with pytest.raises(ValueError, match="has ' ', which systemd or nginx would not take"):
        units.site(tmp_path, Path("/var/lib/site 0"), on_cpu=True)
    assert "PrivateDevices=no" in units.site(tmp_path, tmp_path / "state", on_cpu=False)  # a GPU is a device


def test_one_address_can_not_take_all_connections_of_nginx(made: Server) -> None:
    before, block = (made.folder / "nginx.conf").read_text().split("server {", 1)
    assert "limit_conn_zone $binary_remote_addr zone=fedstill_9443:1m;" in before.splitlines()
    lines = list(map(str.strip, block.splitlines()))
    assert "limit_conn fedstill_9443 64;" in lines
    assert "client_header_timeout 15s;" in lines  # nginx counts no connection without a request


def test_a_unit_that_hides_what_an_edited_policy_needs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy may be edited at any time; the unit is written by `site join`."""
    folder, installed = tmp_path / "site", tmp_path / "systemd"
    folder.mkdir()
    installed.mkdir()

    def told(state: Path, *, on_cpu: bool) -> list[str]:
        return list(units.disagreements(folder, state, on_cpu=on_cpu, installed=installed))

    assert told(folder / "state", on_cpu=False) == []  # it runs without systemd
    (folder / units.SITE).write_text(units.site(folder, folder / "state", on_cpu=True))
    assert told(folder / "state", on_cpu=True) == []
    (sentence,) = told(folder / "state", on_cpu=False)
    assert sentence.startswith(
        f"{folder / units.SITE} has PrivateDevices=yes, which hides the GPU from the site; write"
    )
    (sentence,) = told(tmp_path / "elsewhere", on_cpu=True)
    assert sentence.endswith(f'add "{tmp_path / "elsewhere"}" to ReadWritePaths there (state)')
    (folder / units.SITE).write_text(units.site(folder, tmp_path / "elsewhere", on_cpu=False))
    assert told(tmp_path / "elsewhere", on_cpu=False) == []
    (installed / units.SITE).write_text(units.site(folder, folder / "state", on_cpu=True))
    assert len(told(folder / "state", on_cpu=False)) == 1  # the copy that systemd reads is the old one
    (installed / units.SITE).write_text(units.site(tmp_path / "other", tmp_path / "other", on_cpu=True))
    assert told(folder / "state", on_cpu=False) == []


def test_containers_have_health_checks_that_are_commands() -> None:
    for name, each in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        how, program, part, *words = each["healthcheck"]["test"]
        assert (how, program, part) == ("CMD", "fedstill", name)
        assert words == ["status", each["command"][-1], "--check"]
        assert "--check" in help_of(name, "status")


def help_of(*words: str) -> str:
    with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as text:
        main([*words, "--help"])
    return text.getvalue()


def test_containers_run_as_a_plain_user_on_a_file_system_that_is_read_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"server", "site"}
    for each in services.values():
        assert each["read_only"] is True and each["cap_drop"] == ["ALL"]
        assert [mount for mount in each["volumes"] if not mount.endswith(":ro") and ":/state" not in mount] == []
        assert (DEPLOY / each["build"]["context"] / each["build"]["dockerfile"]).is_file()
    assert services["server"]["ports"] == ["9443:9443"]
    assert "ports" not in services["site"]
    lines = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line[:1].isupper()]
    assert [words[1] for words in lines if words[0] == "USER"] == ["${USER_ID}"]
    copied = [word for words in lines if words[0] == "COPY" for word in words[1:-1]]
    assert [name for name in copied if not (DEPLOY.parent / name).exists()] == []
    assert [words[1:] for words in lines if words[0] == "ENTRYPOINT"] == [['["fedstill"]']]
