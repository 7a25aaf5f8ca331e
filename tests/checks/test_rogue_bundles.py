"""Whoever may start runs sends other Python than fedstill's: at a real site none of it runs, over TLS with keys."""

import hashlib
import json
import os
import re
import signal
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import tomli_w
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedstill[flower]'")

from fedstill.base.records import Records  # noqa: E402
from fedstill.data.sources import DataSet  # noqa: E402
from fedstill.sites.loopback import Loopback, free_port, loopback  # noqa: E402
from fedstill.sites.server import submit  # noqa: E402
from fedstill.sites.site import launcher, setup  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("FEDSTILL_SLOW"), reason="takes minutes; set FEDSTILL_SLOW=1"),
]

MARK = """
import os, sys
with open({file!r}, "a") as mark:
    mark.write(f"{{os.environ.get('WHO')}} {kind}\\n")
"""
SERVER = """
import time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
server_app = ServerApp()

@server_app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(1)
    messages = [Message(RecordDict(), dst_node_id=node, message_type=f"query.{name}")
                for node in nodes for name in ("hello", "ask")]
    for reply in grid.send_and_receive(messages, timeout=180):
        print("REPLY", reply.metadata.src_node_id, reply.error.reason if reply.has_error() else reply.content)
"""
CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp
client_app = ClientApp()
"""
KINDS = ("another app", "our name", "start-up files", "dependencies", "a numpy of its own")


def files_of(kind: str, marks: Path, folder: Path) -> Mapping[str, str]:
    """The Python of a rogue bundle; each line of it would leave a line in ``marks``."""
    mark = MARK.format(file=str(marks), kind=kind)
    code = mark + SERVER + CLIENT
    return {
        "another app": {"rogue.py": code},
        "our name": {"fedstill/__init__.py": mark, "fedstill/sites/__init__.py": mark, "fedstill/sites/app.py": code},
        "start-up files": {
            "rogue.py": SERVER + CLIENT,
            **dict.fromkeys(("sitecustomize.py", "usercustomize.py", "conftest.py", "fedstill.py"), mark),
            "rogue.pth": f"import os; exec({mark!r})",
        },
        "dependencies": {"rogue.py": SERVER + CLIENT, "needed/setup.py": mark, "needed/needed.py": mark},
        "a numpy of its own": {
            "rogue.py": f"import numpy\n{SERVER}{CLIENT}",
            "numpy/__init__.py": mark,
            "torch.py": mark,
        },
    }[kind]


def rogue(kind: str, marks: Path, folder: Path) -> Path:
    """The folder of a rogue bundle."""
    files = files_of(kind, marks, folder)
    project = tomllib.loads(launcher.APP.read_text())
    project["project"] |= {"name": f"rogue-{KINDS.index(kind)}", "dependencies": ["flwr"]}
    if kind == "dependencies":
        project["project"]["dependencies"] = [f"needed @ file://{folder / 'needed'}"]
    where = "fedstill.sites.app" if kind == "our name" else "rogue"
    project["tool"]["flwr"]["app"]["components"] = {
        "serverapp": f"{where}:server_app",
        "clientapp": f"{where}:client_app",
    }
    for name, text in {**files, "pyproject.toml": tomli_w.dumps(project)}.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


def plain_node(here: Loopback, records: Records) -> None:
    """A member's node as Flower starts it, which so has no protection: it shows that the bundles do run elsewhere."""
    place = here.add_site(1, records, methods=["fedavg-p"], budget=4.0)
    words = ["flower-supernode", "--root-certificates", here.server.certificates.authority]
    words += ["--superlink", f"127.0.0.1:{here.port}"]
    words += ["--auth-supernode-private-key", place / setup.KEY, "--host", "127.0.0.1", "--port", str(free_port())]
    here.start("plain", words, {"WHO": "plain", "FLWR_HOME": str(place / "flower")})


def test_no_line_of_a_rogue_bundle_runs_at_a_site(digits: DataSet, tmp_path: Path) -> None:
    with loopback(tmp_path / "here") as here:
        place = here.add_site(0, digits.train[torch.arange(100)], methods=["fedavg-p"], budget=4.0)
        here.start_site(0, WHO="site")
        plain_node(here, digits.train[torch.arange(100)])
        for name in ("site-0", "plain"):
            here.wait_for(lambda: "SuperNode ID" in here.log(name), name)  # noqa: B023
        ran: dict[str, set[str]] = {}
        for kind in KINDS:
            marks = tmp_path / f"marks-{KINDS.index(kind)}"
            run = submit.submit(here.server, {}, rogue(kind, marks, tmp_path / f"rogue-{KINDS.index(kind)}"))
            here.finish(run, 400)
            assert "the site runs fedstill's own app only" in here.output(run), here.output(run)[-2000:]
            ran[kind] = {line.split()[0] for line in marks.read_text().splitlines()} if marks.exists() else set()
        programs = {" ".join(child.cmdline()) for child in psutil.Process(here.processes["site-0"].pid).children(True)}
        here.stop("site-0", signal.SIGTERM)
    assert all("site" not in who for who in ran.values()), ran
    assert {kind for kind, who in ran.items() if "plain" in who} >= {"another app", "our name"}, ran
    assert not [program for program in programs if re.search(r"(flwr|flower)-superexec|flwr-clientapp", program)]
    assert not list((place / "flower").rglob("*.py"))  # not even unpacked
    started, *refused = [json.loads(line) for line in (place / "state" / "journal.jsonl").read_text().splitlines()]
    assert started["what"] == "started"
    assert {line["what"] for line in refused} == {"refused"}
    assert len({line["bundle"] for line in refused}) == len(KINDS)
    assert all(len(line["bundle"]) == len(hashlib.sha256().hexdigest()) for line in refused)
    assert sum("the bundle is not fedstill's: it has the file" in line["detail"] for line in refused) == len(refused)
    assert sys.executable in " ".join(programs)
