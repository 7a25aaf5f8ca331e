"""The documentation site: it is built without a warning, and its page of claims names tests that exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
import re, sys
from sphinx.cmd.build import main

sys.path.insert(0, sys.argv[1])
import gallery

commands = gallery.commands

def small(page):
    page = re.sub(r"(--\\S*(?:epochs|nets|rounds|shadows)) [0-9]+", r"\\1 4", page)
    page = page.replace("--seeds 0 1", "--seeds 0 1 --fedavg.rounds 2")
    return commands(page.replace("--data digits", "--data digits --limit 300 --workers 0"))

gallery.commands = small
sys.exit(main(sys.argv[2:]))
"""
"""Sphinx, with the gallery's commands made small: what they train takes minutes and is the same work."""


def test_claims_name_tests_that_exist() -> None:
    names = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "claims.md").read_text())
    assert len(names) > 15
    for file, function in names:
        path = ROOT / ("" if file.startswith("benchmarks/") else "tests") / file
        assert path.is_file(), file
        if function:
            found = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
            assert function in found, f"{file} has no {function}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site needs pip install '.[docs]'")
    words = [sys.executable, "-c", SMALL, str(ROOT / "docs"), "-q", "-W", "--keep-going", "-b", "html"]
    words += ["-D", "nb_execution_mode=off"]  # test_notebooks.py runs the cells
    done = subprocess.run([*words, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text()
    assert 'id="fedstill.run"' in page and 'id="fedstill.RunRecord"' in page
    assert page.count('role="heading"') == page.count('role="heading" aria-level="2"') > 0
    gallery, runs = (tmp_path / "gallery.html").read_text(), tmp_path / "gallery" / "runs"
    shown = re.findall(r'<iframe src="gallery/runs/([^"#]+)', gallery)
    assert len(shown) == 6 and all((runs / place).is_file() for place in shown)
    (part,) = re.findall(r'fronts/report.html#([^"]+)"', gallery)
    assert f'href="#{part}">Pareto fronts' in (runs / "fronts" / "report.html").read_text()
    notebooks = [path.stem for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")]
    links = r'class="toctree-l\d[^>]*><a class="[^"]*" href="([^"]+)"'
    first = re.findall(links, (tmp_path / "index.html").read_text())
    assert first[0] == "tutorials.html" and {*first[1 : 1 + len(notebooks)]} == {
        f"tutorials/{name}.html" for name in notebooks
    }
    assert 'href="_static/icon.svg"' in page and "_static/site.css" in page
