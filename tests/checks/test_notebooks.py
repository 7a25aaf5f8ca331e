"""The notebooks run from a fresh folder; in a notebook, progress is a bar and an interrupted cell can be repeated."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedstill.experiment.progress import Cell
from fedstill.report import record
from fedstill.runs.journal import Refusal

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))

RUN = """
import json, os, sys, time
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for place in map(Path, sys.argv[1:]):
    began = time.process_time()
    os.makedirs(place.stem)
    os.chdir(place.stem)
    shell.reset()
    for cell in json.loads(place.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code" and "minutes" not in cell["metadata"].get("tags", ()):
            shell.run_cell("".join(cell["source"])).raise_error()
    os.chdir("..")
    print(place.stem, time.process_time() - began, file=sys.stderr)
"""
"""Runs the cells of notebooks as a kernel does, but all in one process, which imports torch once, and without those
that take minutes."""


def test_there_are_notebooks_without_outputs() -> None:
    assert {"own_images", "one_upload", "private_run", "attack", "own_method", "deployment", "hospitals"} == {
        p.stem for p in NOTEBOOKS
    }
    for path in NOTEBOOKS:
        content = json.loads(path.read_text("utf-8"))
        code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code), path.name
        assert content["cells"][0]["source"][0].startswith("# ")
        assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])


@pytest.mark.slow
def test_the_cells_run(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="notebooks need pip install ipykernel nbclient")
    pytest.importorskip("flwr", reason="a notebook makes a server's folder, with pip install 'fedstill[flower]'")
    words = [sys.executable, "-c", RUN, *map(str, NOTEBOOKS)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of packages that are not ours to mend
@pytest.mark.parametrize(
    "path",
    NOTEBOOKS,
    ids=lambda path: path.stem,
)
@pytest.mark.skipif("FEDSTILL_SLOW" not in os.environ, reason="takes a kernel of its own; set FEDSTILL_SLOW=1")
def test_a_kernel_runs_the_notebook(path: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="notebooks need pip install ipykernel nbclient")
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    if path.stem == "own_images":
        assert any("<progress value='4' max='4'>" in page for page in pages)  # the bar, in its last state
        (shown,) = (page for page in pages if "<caption>" in page)
        assert "<img src=" in shown and "accuracy" in shown and "guarantee" in shown
        assert not [output for output in outputs if output.get("name") == "stderr"]


INTERRUPTED = """
import fedstill, os, signal
class Stop(fedstill.Watcher):
    def logged(self, round, rounds, values):
        if round == 3:
            os.kill(os.getpid(), signal.SIGINT)  # what the button "interrupt" does
def cell(watcher=None, **more):
    task = dict(data="digits", limit=300, clients=2, model="convnet:width=8,depth=2", workers=0, rounds=6)
    return fedstill.run("fedavg", watcher=watcher, progress=True, **task, **more)
try:
    cell(Stop(), out="run")
    raise SystemExit("not interrupted")
except KeyboardInterrupt:
    pass
kept = sum(1 for _ in open("run/metrics.jsonl"))
resumed, alone = cell(out="run"), cell()
assert 0 < kept < 6 and len(resumed.metrics) == 6, kept
assert [line["accuracy"] for line in resumed.metrics] == [line["accuracy"] for line in alone.metrics]
a, b = resumed.load_model().state_dict(), alone.load_model().state_dict()
assert all(bool((a[name] == b[name]).all()) for name in a)
"""


@pytest.mark.slow
def test_an_interrupted_cell_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming: " in done.stderr


def test_bars_in_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    class Handle:
        def update(self, page: str) -> None:
            pages[-1] = page

    def display(page: str, display_id: bool) -> Handle:
        assert display_id
        pages.append(page)
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    with Cell("fedavg <b>, seed 0") as cell:
        assert not pages  # a run without work shows nothing
        cell.resumed(done=2, total=5)
        cell.asked("update", 3, 1, 0)
        cell.arrived(None)
        cell.arrived(Refusal(2, "update", None, "it sent <script>"))
        cell.logged(3, 5, {"accuracy": 0.5})
    (page,) = pages  # one output, which is updated
    assert "<progress value='2' max='3'></progress> clients, step update, 1 left out: 2 of 3" in page
    assert "<progress value='3' max='5'></progress> rounds (accuracy 50.0 %): 3 of 5" in page
    assert "resuming: 1 of 3 replies and 2 rounds kept" in page
    assert "client 2 is left out: it sent &lt;script&gt;" in page and "fedavg &lt;b&gt;" in page
    with Cell("fedavg, seed 0") as cell:
        cell.reused("runs/first")
        cell.asked("update", 3, 2, 0)
        cell._drawn -= 1
        cell.working(2, "matching", 7, 300)
        assert "<progress value='7' max='300'></progress> client 2, matching: 7 of 300" in pages[-1]
        cell.arrived(None)
    assert "matching" not in pages[-1]
    assert "2 of 3 replies are those of runs/first" in pages[-1]


def test_pictures_of_a_run() -> None:
    import numpy as np

    assert record.curve({1: 0.5}) == record.sent(None) == record.sent({"real": (np.zeros((1, 1, 2, 2)), [0])}) == ""
    drawn = record.curve({1: 0.1, 2: 0.9, 3: 0.9})
    assert "<svg" in drawn and "<title>round 3: 90.00 %</title>" in drawn
    images = np.zeros((3, 3, 4, 4), np.uint8)
    assert 'width="80"' in record.sent({"real": (images, np.zeros(3)), "sent": (images, np.array([0, 0, 1]))})
