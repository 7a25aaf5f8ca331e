"""The table of attacks: each is found by its name, has flags and a section in the documentation."""

import re
from pathlib import Path

import pytest

from fedstill import attacks
from fedstill.attacks.attack import Attack
from fedstill.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "attacks.md"


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_an_attack_is_a_class_with_flags_and_a_section(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert issubclass(attacks.find(name), Attack)
    assert re.search(f"^## {name}", PAGE.read_text(), re.MULTILINE | re.IGNORECASE)
    with pytest.raises(SystemExit) as stop:
        main(["attack", "runs/first", name, "--help"])
    assert stop.value.code == 0
    assert f"fedstill attack runs/first {name}" in " ".join(capsys.readouterr().out.split())
    main(["attack", "--help"])
    assert name in capsys.readouterr().out


def test_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["attack", "runs/first", "phishing"])
    assert stop.value.code == 2
    assert "there is no attack 'phishing'; choose membership, uploads" in capsys.readouterr().err
