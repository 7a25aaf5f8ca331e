"""The packages: built from the repository, installed in a fresh environment, and used outside of the checkout."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import fedstill

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)]

USED = """
import json, sys
from importlib import resources
from pathlib import Path

import fedstill
from fedstill.cli import main

assert Path(fedstill.__file__).is_relative_to(sys.prefix), fedstill.__file__
assert (resources.files("fedstill.sites") / "flower_app" / "pyproject.toml").is_file()
assert (resources.files("fedstill") / "py.typed").is_file()
main(["data", "list"])
small = "--model convnet:width=8,depth=2 --limit 300 --workers 0 --clients 2".split()
demo = "compare fedavg real fedgm --data digits --fedavg.rounds 1 --real.ipc 1 --fedgm.ipc 1 --fedgm.matching.nets 2"
main([*demo.split(), *small, "--out", "runs/demo"])
main(["report", "runs/demo", "--latex", "--out", "again"])
assert fedstill.load_model("runs/demo/fedgm/seed-0").shape == (1, 8, 8)
page = Path("again/report.html").read_text("utf-8")
assert "clipboard" in page and "--share" in page and "<svg" in page  # the script, the style and a figure
main(["run", sys.argv[1], *small[:6], "--matching.nets", "2", "--out", "example"])
json.loads(Path("example/summary.json").read_text())
"""
"""What a user does first, in one process; ``sys.argv[1]`` is the example file of the source distribution."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The unpacked source distribution, and the wheel that is built from it."""
    pytest.importorskip("hatchling", reason="packages are built with pip install hatchling")
    folder = tmp_path_factory.mktemp("packages")
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run([*hatch, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (packed,) = folder.glob("*.tar.gz")
    assert packed.stat().st_size < 10 * 2**20
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    (sources,) = (place for place in folder.iterdir() if place.is_dir())
    subprocess.run([*hatch, "-t", "wheel"], cwd=sources, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    yield sources, wheel
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def python(packages: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of a fresh environment with the wheel, which takes what fedstill needs from the present one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=os.name != "nt")
    places = {"base": str(folder), "platbase": str(folder)}
    found = Path(sysconfig.get_path("scripts", vars=places)) / ("python.exe" if os.name == "nt" else "python")
    words = ["install", "-q", "--no-deps", "--no-index", "--no-compile", str(packages[1])]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(found), *words], check=True)
    site = Path(sysconfig.get_path("purelib", vars=places))
    needed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "needed.pth").write_text("\n".join(needed))  # their own .pth files, as of a checkout, are not read
    yield found
    shutil.rmtree(folder)


def outside() -> dict[str, str]:
    """The environment without the checkout; the programs of what fedstill needs are in the present one's folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PATH": os.pathsep.join([kept["PATH"], sysconfig.get_path("scripts")])}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(packages: tuple[Path, Path]) -> None:
    package = ROOT / "src" / "fedstill"
    with zipfile.ZipFile(packages[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (place,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        facts = message_from_bytes(archive.read(place))
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(package.parent).as_posix() for path in files}
    assert facts["Version"] == fedstill.__version__
    assert set(facts.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert "Apache" in facts["License-Expression"] and facts["Description-Content-Type"] == "text/markdown"


def test_the_wheel_has_its_bill_of_materials(packages: tuple[Path, Path]) -> None:
    """PEP 770: under ``.dist-info/sboms``, and as ``reproduce/sbom.py`` writes it from this version's dependencies."""
    with zipfile.ZipFile(packages[1]) as archive:
        (place,) = (name for name in archive.namelist() if ".dist-info/sboms/" in name)
        carried = json.loads(archive.read(place))
        (facts,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        asked = message_from_bytes(archive.read(facts)).get_all("Requires-Dist")
    assert carried == runpy.run_path(str(ROOT / "reproduce" / "sbom.py"))["bill"]()
    assert carried["metadata"]["component"]["version"] == fedstill.__version__
    core = {re.split(r"[<>=~!; \[]", line)[0] for line in asked if "extra ==" not in line}
    assert core == {component["name"] for component in carried["components"]}


def test_the_locked_environment_has_what_the_core_asks_for() -> None:
    text = (ROOT / "reproduce" / "locked-linux-py311.txt").read_text("utf-8")
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE))
    assert len(locked) == sum(not line.startswith("#") for line in text.splitlines())
    for asked in map(Requirement, PROJECT["dependencies"]):
        assert asked.specifier.contains(locked[asked.name]), asked


def test_the_source_distribution_has_what_a_reader_needs(packages: tuple[Path, Path]) -> None:
    names = {path.name for path in packages[0].iterdir()}
    assert {"src", "tests", "docs", "examples", "benchmarks", "reproduce", "README.md", "LICENSE"} <= names
    assert {"CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "AGENTS.md", "llms.txt"} <= names
    assert not {"runs", ".venv", ".git", "shared", "build", "dist"} & names


@pytest.mark.slow
def test_the_wheel_works_outside_of_the_checkout(packages: tuple[Path, Path], python: Path, tmp_path: Path) -> None:
    version = subprocess.run([python.parent / "fedstill", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.split() == ["fedstill", fedstill.__version__]
    (tmp_path / "use.py").write_text(f"if __name__ == '__main__':\n{'    '.join(USED.splitlines(keepends=True))}")
    example = packages[0] / "examples" / "digits.yaml"
    done = subprocess.run(
        [python, "-I", "use.py", example], cwd=tmp_path, env=outside(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif("FEDSTILL_SLOW" not in os.environ, reason="takes minutes; set FEDSTILL_SLOW")
def test_the_commands_of_the_documents_run_from_the_wheel(packages: tuple[Path, Path], python: Path) -> None:
    shutil.rmtree(packages[0] / "src")
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_readme.py", "tests/test_cli.py"]
    words += ["-k", "not links_lead_somewhere"]  # into the sources
    done = subprocess.run(words, cwd=packages[0], env=outside(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == fedstill.__version__ and cited["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    released = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert released[0] == (fedstill.__version__, str(cited["date-released"]))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "AGENTS.md", "llms.txt"])
def test_links_of_the_root_s_pages_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target
    for place in re.findall(r"`((?:tests|src|benchmarks|\.github)/[\w./]+)`", text):
        assert place.isupper() or (ROOT / place).exists(), place


def test_the_job_of_lowest_versions_takes_the_lowest_torch_for_processors() -> None:
    (lowest,) = re.findall(r"torch>=([0-9.]+)", " ".join(PROJECT["dependencies"]))
    steps = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))["jobs"]["lowest"]["steps"]
    (resolved,) = (step["run"] for step in steps if "lowest-direct" in step.get("run", ""))
    assert f'"torch=={lowest}.0+cpu" > cpu.txt' in resolved and "--constraint cpu.txt" in resolved
    assert "pytest" not in resolved  # whose lowest version, 2.0.0, does not build


def test_the_workflows_test_every_supported_python() -> None:
    jobs = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert jobs.keys() == {"tests", "docs", "publish"}
    matrix = jobs["tests"]["jobs"]["fast"]["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS
    assert [name.partition("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    trusted = {name: job.get("permissions", {}) for name, job in jobs["publish"]["jobs"].items()}
    assert trusted["publish"] == {"id-token": "write"} and not trusted["build"]


def test_each_package_of_the_core_has_a_reason() -> None:
    page = (ROOT / "reproduce" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(named) == sorted(Requirement(text).name for text in PROJECT["dependencies"])


def test_every_action_of_a_workflow_is_a_commit() -> None:
    """A tag can be moved to other code, which would then publish the package; dependabot moves commits on, visibly."""
    used = [
        line.strip()
        for place in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for line in place.read_text("utf-8").splitlines()
        if re.match(r"\s*(- )?uses:", line)
    ]
    assert len(used) >= 8
    loose = [line for line in used if not re.fullmatch(r"(- )?uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]
    assert loose == []
    assert "github-actions" in (ROOT / ".github" / "dependabot.yml").read_text("utf-8")
