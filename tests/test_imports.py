"""The layers: what may import what (docs/architecture.md)."""

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import benchmark
import pytest

import fedstill
from fedstill import methods
from fedstill.base.settings import Settings
from fedstill.protocol import Method, Step

ROOT = Path(fedstill.__file__).parent
# bottom to top; a module may import from its own layer and from those below
LAYERS = [
    {"base", "ticks"},
    {"evaluation", "measures", "privacy"},
    {"schema"},
    {"protocol"},
    {"data", "models", "sums"},
    {"train"},
    {"distill"},
    {"runs"},
    {"methods"},
    {"engines"},
    {"experiment"},
    {"report", "audits"},
    {"tracking"},
    {"attacks", "sites"},
    {"library", "judged", "predictions", "studies", "typed"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# what a method file may use: no engine, no experiment, no source of data, no Flower
FORBIDDEN_IN_METHODS = {"engines", "experiment", "report", "sites", "attacks", "audits", "data", "cli", "runs"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("fedstill.")}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def own_part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_part_has_a_layer() -> None:
    assert {own_part(path) for path in modules()} <= LEVEL.keys()


def test_no_module_imports_from_a_layer_above_its_own() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {part}"
        for path in modules()
        for part in parts(imported(path)) - {"__version__"}
        if LEVEL[part] > LEVEL[own_part(path)]
    ]
    assert wrong == []


def test_no_two_parts_need_each_other() -> None:
    """No circle of parts, and so no two on one layer that import each other."""
    graph: dict[str, set[str]] = {}
    for path in modules():
        graph.setdefault(own_part(path), set()).update(parts(imported(path)) & LEVEL.keys() - {own_part(path)})
    list(TopologicalSorter(graph).static_order())


def test_methods_know_no_engine_and_no_data_source() -> None:
    wrong = [
        f"{path.name} imports {part}"
        for path in modules()
        if own_part(path) == "methods"
        for part in parts(imported(path)) & FORBIDDEN_IN_METHODS
    ]
    assert wrong == []


def test_only_one_folder_may_import_flower() -> None:
    users = {
        path.parent.relative_to(ROOT).as_posix()
        for path in modules()
        for name in imported(path)
        if name.split(".")[0] in ("flwr", "ray")
    }
    assert users == {"engines/flower"}


def test_nothing_pickles() -> None:
    banned = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    users = {path.name for path in modules() for name in imported(path) if name.split(".")[0] in banned}
    assert users == set()
    pattern = re.compile(r"(?<!safetensors\.)\btorch\.load\((?!.*weights_only=True\))|allow_pickle=True")
    assert [path.name for path in modules() if pattern.search(path.read_text())] == []


def test_no_module_seeds_globally() -> None:
    wrong = [
        path.name
        for path in modules()
        for call in ("torch.manual_seed(", "np.random.seed(", "random.seed(")
        if call in path.read_text() and path.name != "seeds.py"
    ]
    assert wrong == []


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from fedstill.cli import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'pydantic', 'tyro', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_run_without_noise_waits_for_no_accountant() -> None:
    code = (
        "import sys, fedstill.experiment.run, fedstill.methods; "
        "heavy = {'dp_accounting', 'scipy.optimize', 'matplotlib', 'ray'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def by_name() -> dict[str, Path]:
    """The modules by dotted name; late imports inside functions count as theirs."""
    names = {path: ".".join(("fedstill", *path.relative_to(ROOT).with_suffix("").parts)) for path in modules()}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def test_no_module_needs_itself() -> None:
    """No circle of modules, late imports inside functions included."""
    known = by_name()
    graph = {}
    for name, path in known.items():
        needed = {full if full in known else full.rpartition(".")[0] for full in imported(path)}
        graph[name] = needed & known.keys() - {name}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("name", methods.TABLE)
def test_a_method_has_its_own_server_and_steps_and_overrides_no_other_s(name: str) -> None:
    cls = methods.find(name)
    others = [c for c in cls.__mro__[1:] if c.__module__.startswith("fedstill.methods")]
    assert "server" in vars(cls), f"{name} takes its server's loop from {others}"
    for other in others:
        loops = [key for key, value in vars(other).items() if key == "server" or isinstance(value, Step)]
        assert not loops, f"{name} takes {loops} from {other.__name__}"


@pytest.mark.parametrize("name", methods.TABLE)
def test_a_method_stands_on_method_and_mix_ins_of_settings_only(name: str) -> None:
    cls = methods.find(name)
    assert Method in cls.__bases__, f"{name} is no direct subclass of Method, but of {cls.__bases__}"
    for base in cls.__bases__:
        assert base is Method or not issubclass(base, Method), f"{name} stands on the method {base.__name__}"
        assert issubclass(base, Settings), f"{base.__name__} of {name} is no mix-in of settings"


SHORT = {
    "__init__.py": "a public face",
    "__main__.py": "the entry of python -m",
    "ticks.py": "a public face, which methods and models of one's own import",
    "attacks/attack.py": "a public face, which attacks of one's own import",
    "sites/app.py": "the entry of flwr run, which wants plain assignments",
    "report/markup.py": "the templates, which pages of reports, attacks and sites share",
}
"""Files of fewer than 60 lines, with the reason; every other one is a part of some noun that has a room already."""


def test_a_room_holds_one_noun_neither_a_part_of_one_nor_many() -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in modules()}
    assert {place: number for place, number in lines.items() if number > 650} == {}
    short = {place for place, number in lines.items() if number < 60 and not place.endswith("/__init__.py")}
    assert {place for place in short if not re.fullmatch(r"methods/\w+\.py", place)} <= SHORT.keys()
    assert all(place in short or place == "__init__.py" for place in SHORT), "a reason for a file that is not short"


def test_no_two_modules_have_one_name() -> None:
    names = [path.stem for path in modules() if path.stem != "__init__"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_a_function_has_at_most_50_lines() -> None:
    """Without its docstring; texts of several lines count as one."""
    long = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                texts = [n for n in ast.walk(node) if isinstance(n, ast.Constant | ast.JoinedStr) and is_text(n)]
                spared = sum((n.end_lineno or 0) - n.lineno for n in texts if n not in inner(texts))
                number = (node.end_lineno or 0) - node.lineno + (ast.get_docstring(node) is None) - spared
                if number > 50:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = number
    assert long == {}


def is_text(node: ast.Constant | ast.JoinedStr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node.value, str)


def inner(texts: list[ast.Constant | ast.JoinedStr]) -> list[ast.AST]:
    """The texts that are part of another."""
    return [part for text in texts for part in ast.walk(text) if part is not text]


def test_texts_are_read_and_written_as_utf_8() -> None:
    """Not in the locale's encoding, in which a path with an umlaut is silently another; JSON of ASCII is the same."""
    wrong = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in ("read_text", "write_text"):
                words = ast.unparse(node)
                plain = "distribution(" in words or ".write_text(json.dumps(" in words and "ensure_ascii" not in words
                if not plain and "utf-8" not in words:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {words}")
    assert wrong == []


def test_every_benchmark_has_a_short_form() -> None:
    folder = ROOT.parents[1] / "benchmarks"
    programs = [path for path in folder.glob("*.py") if "__main__" in path.read_text() and path.stem != "quick"]
    names = {path.stem for path in [*programs, *folder.glob("*.sh")]} | {
        p.parent.name for p in folder.glob("*/__main__.py")
    }
    short = benchmark.load("quick").SHORT
    assert set(short) == names
    for name, words in short.items():
        assert (folder / words.split()[0]).exists(), name
    measured = json.loads((folder / "results/quick.json").read_text())
    assert [row["benchmark"] for row in measured["table"]] == [*short], "python benchmarks/quick.py --out ... NAME"
    assert all("failed" not in row and row["seconds"] <= measured["limit"] == 300 for row in measured["table"])
