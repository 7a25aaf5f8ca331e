"""`fedstill doctor`: broken set-ups, each with the sentence that it prints, and the exit code."""

import json
import os
import re
import shutil
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from fedstill.base import errors, processes
from fedstill.cli import main
from fedstill.runs import machine

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="sentences with paths of POSIX")


class Free(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without faults, whatever this one is like."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "FEDSTILL_DATA", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(processes, "cores", lambda: 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Free(2**50, 0, 2**50))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], int]:
    """The lines, with single spaces, and the exit code."""
    code = 0
    try:
        main(["doctor"])
    except SystemExit as end:
        code = int(end.code or 0)
    return [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()], code


def test_a_sound_machine_has_no_fault_and_nothing_is_left_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines, code = doctor(capsys)
    assert code == 0
    assert [line for line in lines if line.startswith("fault")] == []
    assert f"ok cache {tmp_path}/cache, 0 entries of 0 B, made when it is needed" in lines
    assert "ok data FEDSTILL_DATA is not set; digits is installed, others come from the hub" in lines
    assert lines[-1].startswith("runs are possible: 0 faults, ")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "file" / "cache"))
    lines, code = doctor(capsys)
    assert code == 1
    assert (
        f"fault cache {tmp_path}/file/cache cannot be written ({tmp_path}/file is a file); remedy: make it writable, "
        "or name another folder in the environment variable FEDSTILL_CACHE"
    ) in lines
    assert lines[-1].startswith("runs are impossible: 1 fault, ")


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_without_permission_is_a_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    lines, code = doctor(capsys)
    assert code == 1
    assert any(
        line.startswith(f"fault cache {tmp_path}/cache cannot be written (Permission denied);") for line in lines
    )


def test_a_cache_that_others_may_change_is_a_warning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache" / "digits-0").mkdir(parents=True)
    (tmp_path / "cache" / "digits-0" / "meta.json").write_text("{}")
    (tmp_path / "cache").chmod(0o777)
    lines, code = doctor(capsys)
    assert code == 0
    assert (
        f"warning cache {tmp_path}/cache, 1 entry of 2 B, which other users may change; remedy: chmod go-w "
        f"{tmp_path}/cache, as decoded records there are believed"
    ) in lines


def test_a_full_disk_is_a_fault_and_a_scarce_one_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Free(2**40, 2**40, 5 * 2**20))
    lines, code = doctor(capsys)
    assert code == 1
    assert (
        f"fault temporary disk 5.0 MiB free for {tmp_path}; a run needs 100 MiB or more; remedy: free space there, or "
        "set TMPDIR to a folder with room"
    ) in lines
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Free(2**40, 2**40, 2**30))
    lines, code = doctor(capsys)
    assert code == 0
    assert (
        f"warning working disk 1.0 GiB free for {tmp_path}, less than 2.0 GiB; remedy: free space there, or write runs "
        "elsewhere with --out FOLDER"
    ) in lines


def test_a_tmpdir_that_cannot_be_written_is_a_warning_and_without_another_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    lines, code = doctor(capsys)
    assert code == 0
    assert (
        f"warning temporary files TMPDIR is {tmp_path}/nowhere, which cannot be written (no such folder), so that "
        f"Python takes {tmp_path}; remedy: set TMPDIR to a folder that can be written, or unset it"
    ) in lines

    def none() -> str:
        raise FileNotFoundError("no usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    lines, code = doctor(capsys)
    assert code == 1
    assert (
        f"fault temporary files no folder for temporary files can be written, TMPDIR is {tmp_path}/nowhere; remedy: "
        "set TMPDIR to a folder that can be written and has room"
    ) in lines


def test_an_extra_that_is_missing_has_the_line_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine.version

    def without_flower(package: str) -> str:
        if package == "flwr":
            raise PackageNotFoundError(package)
        return found(package)

    monkeypatch.setattr(machine, "version", without_flower)
    monkeypatch.setattr(errors, "distribution", lambda _: type("FromPyPI", (), {"read_text": lambda *_: None})())
    lines, code = doctor(capsys)
    assert code == 0
    (line,) = (line for line in lines if "extra flower" in line)
    assert line.startswith("warning extra flower flwr ")
    assert line.endswith("not installed, for --engine flower and real sites; remedy: pip install 'fedstill[flower]'")


def test_a_package_that_is_missing_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "requires", lambda _: ["numpy>=2.0", "nosuch-package>=1; python_version > '3'"])
    lines, code = doctor(capsys)
    assert code == 1
    assert "fault packages missing: nosuch-package; remedy: pip install nosuch-package" in lines


def test_a_data_folder_that_does_not_exist_is_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path / "nowhere"))
    lines, code = doctor(capsys)
    assert code == 0
    assert (
        f"warning data FEDSTILL_DATA is {tmp_path}/nowhere, which does not exist, so the known sets come from the hub; "
        "remedy: make the folder, correct FEDSTILL_DATA, or unset it"
    ) in lines
    (tmp_path / "nowhere" / "mnist").mkdir(parents=True)
    assert f"ok data {tmp_path}/nowhere has mnist; others come from the hub" in doctor(capsys)[0]


def test_more_threads_than_cpus_are_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    lines, code = doctor(capsys)
    assert code == 0
    assert (
        "warning threads OMP_NUM_THREADS asks for 64 threads, but there are 2 CPUs of 8, by affinity and quota; "
        "remedy: set OMP_NUM_THREADS=2, as threads that wait for a CPU slow each other"
    ) in lines


def test_a_part_that_cannot_be_examined_is_a_fault_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("a driver of an odd kind")

    monkeypatch.setattr(machine, "_has_cuda", broken)
    lines, code = doctor(capsys)
    assert code == 1
    assert "fault devices cannot be examined: a driver of an odd kind; remedy: report this line as a bug" in lines
    assert any("threads" in line for line in lines)  # the others are examined


def test_json_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["is_well"] is True
    parts: dict[str, Any] = {one["part"]: one for one in found["findings"]}
    assert len(parts) == len(found["findings"])
    assert {"fedstill", "python", "torch", "numpy", "devices", "threads", "cache", "data", "extra flower"} <= {*parts}
    assert {tuple(one) for one in found["findings"]} == {("part", "state", "text", "remedy", "facts")}
    assert parts["cache"]["facts"] == {
        "folder": f"{tmp_path}/cache",
        "exists": False,
        "mode": None,
        "entries": 0,
        "bytes": 0,
    }
    assert parts["temporary disk"]["facts"] == {"free_bytes": 2**50}


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(machine.EXTRAS) == set(extras) - {"docs", "dev"}
    for name, extra in machine.EXTRAS.items():
        declared = {re.split(r"[^\w-]", line)[0] for line in extras[name]}
        assert declared - set(extra.packages) == set(), name


def test_templates_of_reports_ask_for_the_output() -> None:
    forms = [yaml.safe_load(place.read_text("utf-8")) for place in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    fields = [{part["id"]: part for part in form["body"] if "id" in part} for form in forms if "body" in form]
    assert len(fields) == 2
    for one in fields:
        assert one["doctor"]["attributes"]["label"] == "Output of fedstill doctor"
    assert [one["doctor"]["validations"] for one in fields if "command" in one] == [{"required": True}]


def test_entries_of_the_cache_that_others_may_read_are_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, mode in (("digits-0", 0o755), ("patients-1", 0o700)):
        (tmp_path / "cache" / name).mkdir(parents=True, mode=mode)
        (tmp_path / "cache" / name).chmod(mode)
        (tmp_path / "cache" / name / "meta.json").write_text("{}")
    (tmp_path / "cache").chmod(0o755)
    lines, code = doctor(capsys)
    words = (
        f"warning cache {tmp_path}/cache, 2 entries of 4 B, of which other users may read 1; remedy: chmod -R go-rwx"
    )
    assert code == 0 and any(line.startswith(words) for line in lines)
