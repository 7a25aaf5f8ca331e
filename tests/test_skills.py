"""The skills of agents name commands and flags that there are; each was tried from an empty folder."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml

from fedstill import methods
from fedstill.cli import COMMANDS
from fedstill.cli.settings_schema import document

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "skills").glob("*/SKILL.md"))


def lines(page: Path) -> list[list[str]]:
    """The words of each command of fedstill in a page's blocks, to the first sign of a shell."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    joined = [line for block in blocks for line in textwrap.dedent(block).replace("\\\n", " ").split("\n")]
    found = [re.sub(r"^.*?; (?=fedstill )", "", line.strip()) for line in joined]
    return [shlex.split(re.split(r" [>&#]", line)[0]) for line in found if line.startswith("fedstill ")]


def test_there_are_three_skills_and_the_notes_for_agents_name_them() -> None:
    assert [page.parent.name for page in PAGES] == ["audit", "deploy", "run"]
    for notes in ("AGENTS.md", "llms.txt"):
        for page in PAGES:
            assert page.relative_to(ROOT).as_posix() in (ROOT / notes).read_text("utf-8"), notes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_skill_says_when_it_is_used_and_its_commands_exist(page: Path) -> None:
    head = yaml.safe_load(page.read_text("utf-8").split("---\n")[1])
    assert head["name"] == f"fedstill-{page.parent.name}" and "Use when" in head["description"]
    calls = document(COMMANDS)["properties"]
    found = lines(page)
    assert len(found) >= 5
    for words in found:
        rest = words[2:] if words[1] == "--schema" else words[1:]
        name = next(" ".join(rest[:n]) for n in (2, 1) if " ".join(rest[:n]) in calls)
        flags = calls[name]["properties"]["flags"]
        known = {*flags["properties"]}
        for flag in (word for word in words if word.startswith("--") and word != "--schema"):
            labelled = name == "compare" and flag[2:].partition(".")[0] in methods.TABLE
            own = flags.get("patternProperties") and name == "check"
            assert flag in known or labelled or own, (words, flag)
