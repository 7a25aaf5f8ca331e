"""The commands of docs/deploy.md, typed one after the other from nothing, lead to the first result."""

import json
import os
from pathlib import Path

import pytest
import walk

import fedstill

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")
from fedstill.cli.server_commands import COMMANDS as SERVER  # noqa: E402
from fedstill.cli.site_commands import COMMANDS  # noqa: E402
from fedstill.sites.loopback import free_port  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
MOST = 9
"""Commands of the page up to the first result; before `fedstill server` there were 18."""


def test_the_page_names_commands_that_there_are() -> None:
    text = PAGE.read_text()
    found = [command for block in walk.all_blocks(text) for command in walk.commands(block.text) if not block.language]
    groups = {"server": SERVER, "site": {*COMMANDS}}
    named = [words for words in map(str.split, found) if words[:1] == ["fedstill"] and words[1] in groups]
    assert len(named) >= 9
    assert [words for words in named if words[2] not in groups[words[1]]] == []


def test_the_way_to_the_first_result_is_short() -> None:
    steps = [c for block in walk.blocks(PAGE.read_text()) if not block.language for c in walk.commands(block.text)]
    assert any(step.startswith(walk.LAST) for step in steps)
    assert len(steps) <= MOST


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not os.environ.get("FEDSTILL_SLOW"), reason="takes minutes; set FEDSTILL_SLOW=1")
def test_the_page_leads_to_the_first_result(tmp_path: Path) -> None:
    ports = {"port": str(free_port()), "inner_port": str(free_port())}
    changes = {
        f"--host {walk.HOST}": f"--host localhost --port {ports['port']} --inner-port {ports['inner_port']}",
        "9443": ports["port"],
    }
    here = walk.Walk(tmp_path, Path(fedstill.__file__).parents[1], changes)
    try:
        here.follow(PAGE.read_text())
    finally:
        here.close()
    print(here.cost())
    first = here.srv / "federation" / "runs" / "first"
    assert json.loads((first / "summary.json").read_text())["refused"] == []
    assert "in total, per record of one client: epsilon 1.0" in here.output
    assert [oct(place.stat().st_mode & 0o77) for place in here.srv.glob("fed*/*state*")] == ["0o0"] * walk.SITES
    open_to_others = [
        place
        for folder in here.srv.glob("fed*")
        for place in folder.rglob("*")
        if place.is_file() and place.stat().st_mode & 0o077 and not folder.stat().st_mode & 0o077 == 0
    ]
    assert open_to_others == []
