"""Completion in a real shell, and that the scripts have every command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fedstill import methods
from fedstill.cli import COMMANDS, main
from fedstill.cli.completion import script


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "fedstill"
    file.write_text(script("bash", COMMANDS))
    return file


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fedstill ", {*COMMANDS}),
        ("fedstill pub", {"publish"}),
        ("fedstill run fedav", {"fedavg", "fedavg-ft", "fedavg-p"}),
        ("fedstill run fedgm --ip", {"--ipc"}),
        ("fedstill run fedavg --engine ", {"inprocess", "flower"}),
        ("fedstill run fedavg --data digits --roun", {"--rounds"}),
        ("fedstill privacy pl", {"plan"}),
        ("fedstill runs rem", {"remove"}),
        ("fedstill site led", {"ledger"}),
    ],
)
def test_bash_completes(line: str, expected: set[str], bash: Path) -> None:
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {bash}; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; "
        "$(complete -p fedstill | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    found = {word.strip() for word in done.stdout.split("\n")} - {""}
    if line == "fedstill ":
        assert expected <= found
    else:
        assert found == expected


@pytest.mark.slow
def test_the_scripts_are_written_where_the_shells_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    main(["--install-completion"])
    main(["--install-completion", "fish"])
    for place in (".zfunc/_fedstill", ".config/fish/completions/fedstill.fish"):
        text = (tmp_path / place).read_text()
        assert place in capsys.readouterr().out or place.endswith("fish")
        assert all(name in text for name in ("fedgm-records", "publish", *methods.TABLE))
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    for words in ([], ["csh"], ["bash", "zsh"]):
        with pytest.raises(SystemExit) as stop:
            main(["--install-completion", *words])
        assert stop.value.code == 2 and "name one of bash, zsh, fish" in capsys.readouterr().err
