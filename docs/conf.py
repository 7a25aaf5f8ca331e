"""Settings of Sphinx for the documentation site (`make docs`)."""

import ast
import sys
from importlib.metadata import version as installed
from pathlib import Path

import fedstill

sys.path.insert(0, str(Path(__file__).parent))

project, author = "fedstill", "the developers of fedstill"
copyright = f"{author}, Apache-2.0"
version = release = installed("fedstill")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "links_outside",
    "gallery",
]
html_theme = "furo"
html_title = "fedstill"
html_static_path, html_css_files, html_favicon = ["_static"], ["site.css"], "_static/icon.svg"
exclude_patterns = ["_build", "jupyter_execute"]

nb_execution_in_temp, nb_execution_timeout = True, 600
nb_execution_raise_on_error = nb_execution_show_tb = True
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "colon_fence"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
highlight_language = "none"  # a block without a language is a command or output, not Python
default_role = "code"  # docstrings name things in single backquotes
nitpicky = False


def _api() -> str:
    """The page of public names, which `fedstill._PLACES` lists."""
    reading = "run", "RunRecord", "Guarantee", "Refusal", "read_run", "find_runs", "compare", "to_pandas"
    models = "load_model", "Trained", "evaluate", "Evaluation", "predict", "Predictions", "publish"
    groups = {
        "Run and read": (*reading, *models, "write_report", "Watcher"),
        "Tune, attack and plan": ("sweep", "attack", "audit", "plan"),
        "Tasks": ("Experiment", "Job", "DataSet", "Records", "Normalisation", "load_data", "from_torch"),
        "Errors": ("FedstillError", "InputError", "TooFewReplies"),
        "Methods of your own": ("Method", "Federation", "Round", "Client", "Reply", "step", "Examples", "Released"),
    }
    grouped = {name for names in groups.values() for name in names}
    others = [name for name, place in fedstill._PLACES.items() if name not in grouped and ".methods." not in place]
    assert not others, f"public names that no part of the API page lists: {others}"
    groups["Methods"] = tuple(name for name, place in fedstill._PLACES.items() if ".methods." in place)
    lines = [
        "# Python API",
        "",
        "Everything here is imported from `fedstill`; [Stability](stability.md) lists those of modules.",
        "",
    ]
    for heading, names in groups.items():
        lines += [f"## {heading}", "", "~~~{eval-rst}"]
        for name in names:
            value = getattr(fedstill, name)
            kind = "autoclass" if isinstance(value, type) else "autofunction"
            members = ["   :members:"] if kind == "autoclass" and heading != "Methods" else []
            lines += [f".. {kind}:: fedstill.{name}", *members, ""]
        lines += ["~~~", ""]
    return "\n".join(lines)


def _house() -> str:
    """The page of all files of the package, with the first line of each docstring."""
    root = Path(fedstill.__file__).parent
    lines = ["# House", "", "Every file of `src/fedstill`; [Architecture](architecture.md) has the floors.", ""]
    rooms: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        if path.stem != "__init__" and path.parent != root:
            rooms.setdefault(path.parent.relative_to(root).as_posix(), []).append(path)
    for room, paths in rooms.items():
        face = ast.get_docstring(ast.parse((root / room / "__init__.py").read_text("utf-8"))) or ""
        lines += [f"## {room}", "", face.split("\n")[0], "", "| file | content |", "|---|---|"]
        for path in paths:
            about = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{path.name}` | {about.replace('``', '`').replace('|', '/')} |")
        lines.append("")
    return "\n".join(lines)


(Path(__file__).parent / "api.md").write_text(_api())
(Path(__file__).parent / "house.md").write_text(_house())
