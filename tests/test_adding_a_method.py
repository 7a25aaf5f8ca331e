"""The worked example of docs/adding_a_method.md: its four additions are all that a new method takes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding_a_method.md"
NAME, METHOD_PAGE = "fedproto", Path("docs/methods/fedproto.md")


def additions() -> dict[Path, str]:
    """The page's marked blocks by the file that they go into."""
    blocks = re.findall(r"<!-- \d: (\S+) -->\n```\w*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {Path(place): block for place, block in blocks}


def test_the_example_is_the_method_itself() -> None:
    method, *lines = additions().items()
    assert (ROOT / method[0]).read_text() == method[1]
    assert len(lines) == 2
    for place, line in lines:
        assert (ROOT / place).read_text().count(line) == 1
    assert (ROOT / METHOD_PAGE).exists()


@pytest.mark.slow
def test_the_four_additions_are_all_that_a_method_takes(tmp_path: Path) -> None:
    for part in ("src", "tests", "docs", "examples", "pyproject.toml", "README.md", "CONTRIBUTING.md", "reproduce"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    for place, block in additions().items():  # take the method out again, wherever its name stands
        text = (tmp_path / place).read_text()
        (tmp_path / place).write_text(text.replace(block, ""))
    (tmp_path / METHOD_PAGE).unlink()
    (tmp_path / "tests" / "methods" / f"test_{NAME}.py").unlink()
    (tmp_path / "src/fedstill/methods" / f"{NAME}.py").unlink()
    left = [f for f in tmp_path.rglob("*.py*") if f.suffix in (".py", ".pyi") and NAME in f.read_text().lower()]
    assert [f.name for f in left] == [Path(__file__).name]

    def common_tests(names: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-k", names]
        places = [place for place in (tmp_path / "src", os.environ.get("PYTHONPATH")) if place]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
        files = ["tests/methods/test_methods_common.py", "tests/test_imports.py", "tests/test_readme.py"]
        return subprocess.run(
            [*command, *files], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
        )

    without = common_tests(f"{NAME} and not python_blocks")
    assert without.returncode == 5, without.stdout  # no test of it is left
    for place, block in additions().items():
        if place.suffix == ".py" and not (tmp_path / place).exists():
            (tmp_path / place).write_text(block)
        else:
            text = (tmp_path / place).read_text()
            after = "from fedstill.methods.fedrep import" if place.suffix == ".pyi" else '    "fedrep":'
            line = next(line for line in text.splitlines(keepends=True) if line.startswith(after))
            (tmp_path / place).write_text(text.replace(line, line + block, 1))
    shutil.copy(ROOT / METHOD_PAGE, tmp_path / METHOD_PAGE)
    with_it = common_tests(f"({NAME} or tested or needs or name_is) and not python_blocks")
    assert with_it.returncode == 0, with_it.stdout
    passed = int(re.search(r"(\d+) passed", with_it.stdout)[1])  # type: ignore[index]
    assert passed >= 14  # twelve of the common tests, its command on the page, and the order of imports
