"""Completion in a real shell, and that the scripts have every command."""

import os
import select
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
        ("fedstill run fedav", {"fedavg", "fedavg-robust", "fedavg-ft", "fedavg-p"}),
        ("fedstill run fedgm --ip", {"--ipc"}),
        ("fedstill run fedavg --engine ", {"inprocess", "flower"}),
        ("fedstill run fedavg --data digits --roun", {"--rounds"}),
        ("fedstill privacy pl", {"plan"}),
        ("fedstill runs rem", {"remove"}),
        ("fedstill site led", {"ledger"}),
        ("fedstill site log --ver", {"--verify"}),
        ("fedstill site init --inv", {"--invite"}),
        ("fedstill server invite --rec", {"--records"}),
        ("fedstill runs --ta", {"--tag"}),
        ("fedstill runs remove --ye", {"--yes"}),
        ("fedstill data show --part", {"--partition"}),
        ("fedstill audit fedavg-p --conf", {"--confidence"}),
        ("fedstill compare fedavg --seed", {"--seeds"}),
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


LINES = [
    ("fedstill pub", {"publish"}),
    ("fedstill --install-completion f", {"fish"}),
    ("fedstill run fedav", {"fedavg", "fedavg-robust", "fedavg-ft", "fedavg-p"}),
    ("fedstill run fedgm --ip", {"--ipc"}),
    ("fedstill run fedavg --engine ", {"inprocess", "flower"}),
    ("fedstill compare fedavg fedrd-", {"fedrd-records"}),  # a second word
    ("fedstill site led", {"ledger"}),
    ("fedstill report ./re", {"./report/"}),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the completion of zsh and fish, a program called fedstill, and a folder ``report``."""
    place = tmp_path_factory.mktemp("home")
    for shell, file in (("zsh", ".zfunc/_fedstill"), ("fish", ".config/fish/completions/fedstill.fish")):
        (place / file).parent.mkdir(parents=True)
        (place / file).write_text(script(shell, COMMANDS))
    (place / ".zshrc").write_text("fpath+=~/.zfunc; autoload -Uz compinit; compinit -u\n")
    (place / "report").mkdir()
    (place / "bin").mkdir()
    (place / "bin" / "fedstill").symlink_to("/bin/true")
    return place


def _environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "TERM": "dumb"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(home: Path) -> None:
    lines = "\n".join(f"complete -C '{line}'; echo" for line, _ in LINES)
    done = subprocess.run(
        ["fish", "-c", lines], env=_environment(home), cwd=home, capture_output=True, text=True, check=True
    )
    for (line, expected), found in zip(LINES, done.stdout.split("\n\n"), strict=False):
        assert {word.partition("\t")[0] for word in found.strip().split("\n")} == expected, line


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(home: Path) -> None:
    pty = pytest.importorskip("pty")  # not on Windows
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(home)
        os.execvpe("zsh", ["zsh", "-i"], _environment(home))
    shown = ""

    def wait(words: set[str]) -> None:
        nonlocal shown
        while not all(word in shown for word in words):
            assert select.select([terminal], [], [], 60)[0], (words, shown)  # a limit for a shell that hangs
            shown += os.read(terminal, 65536).decode(errors="replace").replace("\r", "")

    try:
        for line, expected in [("print rea''dy\n", {"ready"}), *LINES]:
            shown = ""
            os.write(terminal, f"{line}\t\t".encode())  # one tab completes, the next one lists
            wait(expected)
            os.write(terminal, b"\x15print re''st\n")
            wait({"rest"})
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


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
